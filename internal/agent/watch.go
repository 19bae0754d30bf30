package agent

import (
	"context"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/machine"
)

// Waits between two tries to watch the runtime, doubling from the first to the last.
const (
	reconnectFirst = 200 * time.Millisecond
	reconnectLast  = 5 * time.Second
)

// kicker puts names into the controller's queue. Before the controller runs, kicks are kept.
type kicker struct {
	mu      sync.Mutex
	queue   workqueue.TypedRateLimitingInterface[reconcile.Request]
	waiting []reconcile.Request
}

// start is the controller's source: the runtime's stream is the second cause of a reconcile beside the API server's.
func (k *kicker) start(_ context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.queue = queue
	for _, r := range k.waiting {
		queue.Add(r)
	}
	k.waiting = nil
	return nil
}

// kick has the VMs of a name looked at. A tombstone of a VM that the runtime never had is without a name, and of no interest.
func (k *kicker) kick(name types.NamespacedName) {
	if name.Name == "" {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	r := reconcile.Request{NamespacedName: name}
	if k.queue == nil {
		k.waiting = append(k.waiting, r)
		return
	}
	k.queue.Add(r)
}

// watchRuntime keeps a Watch open until ctx ends. Each one begins with the state of every VM, so that nothing is missed however long
// the runtime, or this process, was away:
//
//	connect → begin → put, put, … → Synced → every VM is looked at, and its spec told anew (a runtime that was restarted has
//	lost the credentials) → put, put, … → lost → connect
func (a *Agent) watchRuntime(ctx context.Context) error {
	wait := reconnectFirst
	for {
		if a.watchOnce(ctx) {
			wait = reconnectFirst
		}
		select {
		case <-ctx.Done():
			return nil
		case <-a.clock.After(wait):
		}
		wait = min(2*wait, reconnectLast)
		a.metrics.reconnects.Inc()
	}
}

// watchOnce is one Watch. It says whether the whole list was told.
func (a *Agent) watchOnce(ctx context.Context) (synced bool) {
	a.view.begin()
	err := a.service.Watch(ctx, func(u machine.Update) error {
		if u.Synced {
			synced = true
			a.synced(ctx)
		}
		if u.Status != nil && a.view.put(*u.Status) && synced {
			a.kicks.kick(nameOf(*u.Status))
		}
		return nil
	})
	if ctx.Err() != nil {
		return synced
	}
	a.view.lost(a.clock.Now())
	a.metrics.connected.Set(0)
	a.networks.Poke()
	if !synced {
		a.log.Debug("runtime not reached", "node", a.opts.Node, "error", err)
		return false
	}
	a.log.Warn("runtime's stream ended", "node", a.opts.Node, "error", err)
	a.beat.poke()
	a.kickAll(ctx) // each is looked at again when the runtime has been silent for long
	return true
}

func (a *Agent) synced(ctx context.Context) {
	a.view.sync()
	a.metrics.connected.Set(1)
	a.log.Info("runtime's VMs are known", "node", a.opts.Node, "vms", len(a.view.all()))
	a.beat.poke()
	a.networks.Poke()
	a.kickAll(ctx)
}

// kickAll has every VM looked at that the API server or the runtime knows of here, and those that Held claims order away.
func (a *Agent) kickAll(ctx context.Context) {
	names := map[types.NamespacedName]bool{}
	for _, st := range a.view.all() {
		names[nameOf(st)] = true
	}
	err := a.eachBound(ctx, func(vm *v1alpha1.ImpVM) { names[types.NamespacedName{Namespace: vm.Namespace, Name: vm.Name}] = true })
	if err != nil {
		a.log.Warn("cache not listed", "node", a.opts.Node, "error", err)
	}
	claims := &v1alpha1.ImpAddressList{}
	if err := a.cache.List(ctx, claims); err != nil {
		a.log.Warn("cache not listed", "node", a.opts.Node, "error", err)
	}
	for i := range claims.Items {
		for _, r := range vmOfClaim(ctx, &claims.Items[i]) {
			names[r.NamespacedName] = true
		}
	}
	for name := range names {
		a.kicks.kick(name)
	}
}
