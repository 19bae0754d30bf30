// Package networks tells the node's runtime of the networks that VMs on this node are in, and of no others: for each it watches the
// ImpNetwork and the claims of addresses in it, and sets the network anew at each change.
//
//	VMs bound here, guests the runtime has ──► Keeper ──► one follower a network ── SetNetwork ──► runtime
//	ImpNetwork by name, ImpAddresses by spec.network.uid, ConfigMap imp-cluster-ranges ──┘
//
// A network without its fence cannot be set: until the operator has said what guests may not reach, nothing is.
package networks

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/agent/translate"
	"imp.dev/imp/internal/clusterranges"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/network"
)

// Runtime is what is needed of machine.Service.
type Runtime interface {
	SetNetwork(ctx context.Context, spec network.Spec) error
	ForgetNetwork(ctx context.Context, id string) error
	Networks(ctx context.Context) ([]network.Status, error)
}

// Options of a Keeper. Everything is required.
type Options struct {
	// Node is this node's name.
	Node    string
	Client  client.WithWatch
	Runtime Runtime
	// Connection gives the number of the present connection to the runtime, 0 while there is none. A runtime that was restarted
	// knows its networks by itself; it is told them anew all the same, because something may have changed meanwhile.
	Connection func() int64
	// Wanted gives the networks that VMs of this node need, by UID.
	Wanted func(ctx context.Context) (map[types.UID]types.NamespacedName, error)
	// Changed is called when State of the network gives another answer than before. It must not block.
	Changed func(network types.UID)
	Clock   clock.WithTicker
	Log     *slog.Logger
}

const (
	// lookEvery is how often the runtime is asked for its networks: whether they are as they should be, and which it could do without.
	lookEvery = 10 * time.Second
	// lookAgain is the least time between two questions while a network is to be forgotten.
	lookAgain = time.Second
	// settle joins what comes in a burst: VMs that are bound together, or claims that follow each other.
	settle = 50 * time.Millisecond
	// orderTimeout bounds a question or an order to the runtime.
	orderTimeout = 30 * time.Second
)

// Keeper keeps the runtime's networks as they should be.
type Keeper struct {
	o      Options
	ranges *collection[*corev1.ConfigMap]
	wake   chan struct{}

	mu        sync.Mutex
	followers map[types.UID]*follower

	// Of Run's goroutine alone.
	lookedAt  time.Time
	lookedOn  int64 // connection
	known     map[types.UID]network.Status
	unwanted  bool // a network is followed, or known to the runtime, that no VM wants
	forgotten map[types.UID]string
}

// State is where one network stands on this node.
type State struct {
	// Facts for guests' Specs, once they are known.
	Facts translate.NetworkFacts
	// Ready says that the network was set on the present connection: a VM of it can be ordered.
	Ready bool
	// Waiting is what is waited for, "" for nothing.
	Waiting string
	// Failed is why the runtime did not take the network as it should be, or why it is not as it should be.
	Failed *fault.Error
}

// New makes a Keeper. It does nothing before Run.
func New(o Options) *Keeper {
	k := &Keeper{o: o, wake: make(chan struct{}, 1), followers: map[types.UID]*follower{}, forgotten: map[types.UID]string{}}
	k.ranges = newCollection(o.Client, func() client.ObjectList { return &corev1.ConfigMapList{} }, &corev1.ConfigMap{}, k.wakeFollowers,
		client.InNamespace(v1alpha1.SystemNamespace), client.MatchingFields{"metadata.name": v1alpha1.ClusterRangesName})
	return k
}

// Poke says that something may have changed: VMs, or the connection to the runtime.
func (k *Keeper) Poke() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// State gives the state of one network.
func (k *Keeper) State(id types.UID) State {
	k.mu.Lock()
	f := k.followers[id]
	k.mu.Unlock()
	if f == nil {
		return State{Waiting: newHere}
	}
	return f.stateOn(k.o.Connection())
}

// Run keeps networks until ctx ends. What was set stays set.
func (k *Keeper) Run(ctx context.Context) error {
	var group sync.WaitGroup
	group.Go(func() { k.ranges.run(ctx) })
	defer group.Wait()
	defer k.stopAll()
	for {
		k.look(ctx)
		if !pause(ctx, k.o.Clock, settle) {
			return nil
		}
		timer := k.o.Clock.NewTimer(k.nextLook())
		select {
		case <-ctx.Done():
		case <-k.wake:
		case <-timer.C():
		}
		timer.Stop()
		if ctx.Err() != nil {
			return nil
		}
	}
}

// pause waits; false: ctx has ended.
func pause(ctx context.Context, clk clock.WithTicker, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := clk.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C():
		return true
	}
}

func (k *Keeper) nextLook() time.Duration {
	every := lookEvery
	if k.unwanted {
		every = lookAgain
	}
	return max(every-k.o.Clock.Since(k.lookedAt), 0)
}

// look brings followers and the runtime's networks in line with what is wanted.
func (k *Keeper) look(ctx context.Context) {
	wanted, err := k.o.Wanted(ctx)
	if err != nil {
		if ctx.Err() == nil {
			k.o.Log.Warn("VMs of networks not listed", "node", k.o.Node, "error", err)
		}
		return // nothing follows from a list that is not there
	}
	epoch := k.o.Connection()
	for id, name := range wanted {
		k.follow(ctx, id, name)
	}
	k.unwanted = k.anyUnwanted(wanted)
	if epoch != 0 && (epoch != k.lookedOn || k.nextLook() == 0) {
		k.ask(ctx, epoch)
		k.unwanted = k.anyUnwanted(wanted)
	}
	if k.unwanted && epoch != 0 && k.lookedOn == epoch {
		k.drop(ctx, wanted)
	}
	k.tellFollowers(epoch)
}

// ask asks the runtime what it knows.
func (k *Keeper) ask(ctx context.Context, epoch int64) {
	ctx, cancel := context.WithTimeout(ctx, orderTimeout)
	defer cancel()
	k.lookedAt = k.o.Clock.Now()
	list, err := k.o.Runtime.Networks(ctx)
	if err != nil {
		if !errors.Is(err, context.Canceled) && !fault.Is(err, fault.Unavailable) {
			k.o.Log.Warn("runtime's networks not listed", "node", k.o.Node, "error", err)
		}
		return
	}
	k.lookedOn, k.known = epoch, map[types.UID]network.Status{}
	for _, n := range list {
		k.known[types.UID(n.ID)] = n
	}
}

// anyUnwanted says that there is a network which no VM wants.
func (k *Keeper) anyUnwanted(wanted map[types.UID]types.NamespacedName) bool {
	for id := range k.known {
		if _, ok := wanted[id]; !ok {
			return true
		}
	}
	for id := range k.all() {
		if _, ok := wanted[id]; !ok {
			return true
		}
	}
	return false
}

// drop lets go of networks that no VM wants. One with a guest in it that has no object any more is kept as it should be, until
// that guest is gone: its peers may move.
func (k *Keeper) drop(ctx context.Context, wanted map[types.UID]types.NamespacedName) {
	for id, n := range k.known {
		if _, ok := wanted[id]; !ok && n.Guests > 0 {
			k.follow(ctx, id, types.NamespacedName{})
		}
	}
	for id, f := range k.all() {
		if _, ok := wanted[id]; !ok && k.known[id].Guests == 0 {
			k.mu.Lock()
			delete(k.followers, id)
			k.mu.Unlock()
			f.stop() // before it is forgotten, or it would set it again
		}
	}
	for id, n := range k.known {
		if _, ok := wanted[id]; !ok && n.Guests == 0 {
			k.forget(ctx, id)
		}
	}
}

// forget is tried again with the next look where it fails: the runtime knows of a VM that still needs the network.
func (k *Keeper) forget(ctx context.Context, id types.UID) {
	ctx, cancel := context.WithTimeout(ctx, orderTimeout)
	defer cancel()
	err := k.o.Runtime.ForgetNetwork(ctx, string(id))
	if err == nil {
		k.o.Log.Info("network forgotten, no VM here is in it", "node", k.o.Node, "network", id)
		delete(k.known, id)
		delete(k.forgotten, id)
		return
	}
	if text := err.Error(); k.forgotten[id] != text && ctx.Err() == nil {
		k.forgotten[id] = text
		k.o.Log.Info("network not forgotten yet", "node", k.o.Node, "network", id, "error", err)
	}
}

// follow starts a follower if there is none.
func (k *Keeper) follow(ctx context.Context, id types.UID, name types.NamespacedName) {
	k.mu.Lock()
	f := k.followers[id]
	if f == nil {
		f = newFollower(k, id)
		k.followers[id] = f
		f.start(ctx)
	}
	k.mu.Unlock()
	if name.Name != "" {
		f.called(name)
	}
}

// tellFollowers wakes each that has something to learn of the connection or of the runtime's list.
func (k *Keeper) tellFollowers(epoch int64) {
	for id, f := range k.all() {
		f.told(epoch, k.known[id].Problem)
	}
}

func (k *Keeper) wakeFollowers() {
	for _, f := range k.all() {
		f.poke()
	}
}

// all gives a copy of the followers.
func (k *Keeper) all() map[types.UID]*follower {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := make(map[types.UID]*follower, len(k.followers))
	for id, f := range k.followers {
		out[id] = f
	}
	return out
}

func (k *Keeper) stopAll() {
	for _, f := range k.all() {
		f.stop()
	}
}

// fence gives what the operator says of the cluster, or what is waited for.
func (k *Keeper) fence() (clusterranges.Ranges, string) {
	const name = "ConfigMap " + v1alpha1.SystemNamespace + "/" + v1alpha1.ClusterRangesName
	m, whole := k.ranges.one()
	switch err := k.ranges.problem(); {
	case m != nil:
	case err != nil:
		return clusterranges.Ranges{}, name + " cannot be read: " + err.Error()
	case !whole:
		return clusterranges.Ranges{}, "reading " + name
	default:
		return clusterranges.Ranges{}, name + " is not there: the operator writes it, and without it guests could reach what they may not"
	}
	ranges, err := clusterranges.Decode(m.Data)
	if err != nil {
		return clusterranges.Ranges{}, name + ": " + err.Error()
	}
	return ranges, ""
}
