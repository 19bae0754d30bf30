package networks

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/agent/translate"
	"imp.dev/imp/internal/clusterranges"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/network"
)

const (
	// coalesce is the least time between two SetNetworks: claims come in bursts, and each is to be in the kernel within a second.
	coalesce = 100 * time.Millisecond
	// Waits after a SetNetwork that failed, doubling from the first to the last.
	retryFirst = time.Second
	retryLast  = time.Minute
)

// follower keeps one network set at the runtime:
//
//	gather ──► aim (what is to be set, or what is waited for) ──► order (SetNetwork where that differs from what was set) ──► publish
type follower struct {
	keeper *Keeper
	id     types.UID
	wake   chan struct{}
	end    context.CancelFunc
	group  sync.WaitGroup
	claims *collection[*v1alpha1.ImpAddress]

	mu   sync.Mutex
	name types.NamespacedName // empty while nobody has told
	// epoch of the connection and problem of the network, as the keeper saw them last.
	epoch   int64
	problem string
	state   State // but Ready, which depends on the moment
	setOn   int64 // connection on which the network was set last, 0 for none

	// Of the follower's goroutine alone.
	object   *collection[*v1alpha1.ImpNetwork] // of name; nil before it is known
	set      network.Spec                      // as it was set last, on connection accepted
	accepted int64
	tried    network.Spec // with the latest SetNetwork, on connection triedOn at triedAt
	triedOn  int64
	triedAt  time.Time
	refused  *fault.Error // why the latest failed
	failures int
}

func newFollower(k *Keeper, id types.UID) *follower {
	f := &follower{keeper: k, id: id, wake: make(chan struct{}, 1), state: State{Waiting: newHere}}
	f.claims = newCollection(k.o.Client, func() client.ObjectList { return &v1alpha1.ImpAddressList{} }, &v1alpha1.ImpAddress{}, f.poke,
		client.MatchingFields{"spec.network.uid": string(id)})
	return f
}

func (f *follower) start(ctx context.Context) {
	ctx, f.end = context.WithCancel(ctx)
	f.group.Go(func() { f.claims.run(ctx) })
	f.group.Go(func() { f.run(ctx) })
}

// stop ends it; nothing is set afterwards.
func (f *follower) stop() {
	f.end()
	f.group.Wait()
}

func (f *follower) poke() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// called says how the network is called.
func (f *follower) called(name types.NamespacedName) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.name != name {
		f.name = name
		f.poke()
	}
}

// told says what the keeper has seen.
func (f *follower) told(epoch int64, problem string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.epoch != epoch || f.problem != problem {
		f.epoch, f.problem = epoch, problem
		f.poke()
	}
}

// stateOn gives the state on a connection.
func (f *follower) stateOn(epoch int64) State {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.state
	s.Ready = epoch != 0 && f.setOn == epoch
	return s
}

func (f *follower) run(ctx context.Context) {
	clk := f.keeper.o.Clock
	for {
		wait := f.pass(ctx)
		if wait == 0 {
			wait = lookEvery // nothing waits for it: everything that may change wakes this loop
		}
		timer := clk.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-timer.C():
		case <-f.wake:
		}
		timer.Stop()
		if ctx.Err() != nil || !pause(ctx, clk, coalesce-clk.Since(f.triedAt)) {
			return
		}
	}
}

// pass is one round. The wait is until the next try; 0 is none.
func (f *follower) pass(ctx context.Context) (wait time.Duration) {
	in := f.gather(ctx)
	spec, facts, waiting := aim(in)
	if waiting == "" {
		wait = f.order(ctx, spec, in)
	}
	next := State{Facts: facts, Waiting: waiting, Failed: f.refused}
	if next.Failed == nil && in.problem != "" {
		next.Failed = fault.Of(fault.Errorf(fault.NetworkSetupFailed, "keeping network", "ImpNetwork %s: %s", in.name, in.problem))
	}
	f.publish(next)
	return wait
}

// publish makes next what State tells.
func (f *follower) publish(next State) {
	f.mu.Lock()
	if next.Facts.MTU == 0 {
		next.Facts = f.state.Facts // what an object that is gone has told stands for the guests it leaves
	}
	news := f.setOn != f.accepted || !reflect.DeepEqual(f.state, next)
	f.state, f.setOn = next, f.accepted
	f.mu.Unlock()
	if news {
		f.keeper.o.Changed(f.id)
	}
}

// gathered is all that a round depends on.
type gathered struct {
	id      types.UID
	node    string
	name    types.NamespacedName
	epoch   int64
	problem string
	// object as the API server has it under name, nil for none; it is certain once objectWhole.
	object      *v1alpha1.ImpNetwork
	objectWhole bool
	claims      []*v1alpha1.ImpAddress
	claimsWhole bool
	// apiErr is why the API server could not be asked last.
	apiErr error
	ranges clusterranges.Ranges
	// fence is what is waited for before the ranges are known.
	fence string
}

func (f *follower) gather(ctx context.Context) gathered {
	f.mu.Lock()
	in := gathered{id: f.id, node: f.keeper.o.Node, name: f.name, epoch: f.epoch, problem: f.problem}
	f.mu.Unlock()
	in.claims, in.claimsWhole = f.claims.all()
	in.apiErr = f.claims.problem()
	if in.name.Name == "" && len(in.claims) > 0 {
		of := in.claims[0].Spec.Network
		in.name = types.NamespacedName{Namespace: of.Namespace, Name: of.Name}
		f.called(in.name)
	}
	if f.object == nil && in.name.Name != "" {
		f.object = newCollection(f.keeper.o.Client, func() client.ObjectList { return &v1alpha1.ImpNetworkList{} }, &v1alpha1.ImpNetwork{}, f.poke,
			client.InNamespace(in.name.Namespace), client.MatchingFields{"metadata.name": in.name.Name})
		f.group.Go(func() { f.object.run(ctx) })
	}
	if f.object != nil {
		in.object, in.objectWhole = f.object.one()
		in.apiErr = errors.Join(in.apiErr, f.object.problem())
	}
	in.ranges, in.fence = f.keeper.fence()
	return in
}

// newHere is waited for in the moments before a network was looked at for the first time.
const newHere = "the network is new on this node"

// aim gives what is to be set and what guests are told, or what is waited for.
func aim(in gathered) (spec network.Spec, facts translate.NetworkFacts, waiting string) {
	read := in.objectWhole && in.claimsWhole
	switch {
	case in.name.Name == "":
		waiting = newHere
	case !read && in.apiErr != nil:
		waiting = fmt.Sprintf("ImpNetwork %s and its ImpAddresses cannot be read: %v", in.name, in.apiErr)
	case !read:
		waiting = fmt.Sprintf("reading ImpNetwork %s and its ImpAddresses", in.name)
	case in.object == nil:
		waiting = fmt.Sprintf("there is no ImpNetwork %s", in.name)
	case in.object.UID != in.id:
		waiting = fmt.Sprintf("the ImpNetwork %s that the VM belongs to was deleted, and this one is another: delete the VM and create it anew", in.name)
	}
	if waiting != "" {
		return spec, facts, waiting
	}
	if err := translate.Settled(in.object); err != nil {
		return spec, facts, fault.Of(err).Err.Error()
	}
	facts = translate.Facts(in.object)
	switch {
	case in.fence != "":
		waiting = in.fence
	case in.epoch == 0:
		waiting = "the node's runtime does not answer"
	default:
		spec = translate.Network(in.object, in.claims, in.ranges, in.node)
	}
	return spec, facts, waiting
}

// order sets the network if that has not been done on this connection, or it differs. The wait is until the next try; 0 is none.
func (f *follower) order(ctx context.Context, spec network.Spec, in gathered) (wait time.Duration) {
	clk, log := f.keeper.o.Clock, f.keeper.o.Log.With("node", in.node, "network", in.id, "namespace", in.name.Namespace, "name", in.name.Name)
	if f.refused == nil && f.accepted == in.epoch && reflect.DeepEqual(spec, f.set) {
		return 0
	}
	// Peers come and go; what was refused for another reason is not tried again for their sake.
	if f.refused != nil && f.triedOn == in.epoch && sameButPeers(spec, f.tried) {
		if left := f.retryWait() - clk.Since(f.triedAt); left > 0 {
			return left
		}
	} else {
		f.failures = 0
	}
	orderCtx, cancel := context.WithTimeout(ctx, orderTimeout)
	err := f.keeper.o.Runtime.SetNetwork(orderCtx, spec)
	cancel()
	f.tried, f.triedOn, f.triedAt = spec, in.epoch, clk.Now()
	switch {
	case err == nil:
		level := slog.LevelDebug
		if f.accepted != in.epoch || f.refused != nil {
			level = slog.LevelInfo
		}
		log.Log(ctx, level, "network set", "peers", len(spec.Peers))
		f.accepted, f.set, f.refused, f.failures = in.epoch, spec, nil, 0
		return 0
	case ctx.Err() != nil:
		return 0
	case fault.Is(err, fault.Unavailable):
		return retryFirst // the runtime is away, and its VMs say nothing of that at once
	}
	f.refused = refusal(in.name, err)
	f.failures++
	log.Warn("network not set", "step", "network", "error", err, "failures", f.failures, "retry", f.retryWait())
	return f.retryWait()
}

func (f *follower) retryWait() time.Duration {
	wait := retryFirst
	for i := 1; i < f.failures && wait < retryLast; i++ {
		wait *= 2
	}
	return min(wait, retryLast)
}

// refusal is the failure as VMs show it: whatever the reason of the runtime's own, for them it is their network.
func refusal(name types.NamespacedName, err error) *fault.Error {
	return &fault.Error{Reason: fault.NetworkSetupFailed, Stage: "setting up network", Err: fmt.Errorf("ImpNetwork %s: %w", name, err)}
}

func sameButPeers(a, b network.Spec) bool {
	a.Peers, b.Peers = nil, nil
	return reflect.DeepEqual(a, b)
}
