package place

import (
	"context"
	"fmt"
	"sync"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/operator/vmstate"
	"imp.dev/imp/internal/schedule"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// ledger knows what is bound to each node. The cache lags behind our own writes, so a binding is assumed from the moment it
// is decided until the cache shows it, or the write is known to have failed.
type ledger struct {
	mu      sync.Mutex // held from reading the cache to assuming: placement happens in one place at a time
	primed  bool
	assumed map[types.UID]assumption
}

type assumption struct {
	node       string
	assignment int64
	amount     schedule.Amount
	network    types.NamespacedName // zero: in none
	at         time.Time
	// live says that it was read from the API server: the cache may not have the VM yet. Every other VM was read from the
	// cache, so that one which the cache no longer has is gone, and what it held is free.
	live bool
}

// usage is what VMs take of one node.
type usage struct {
	amount schedule.Amount
	guests int // of the network that was asked for
}

// assumedFor is how long an assumption holds that neither the cache nor an error has spoken of.
const assumedFor = time.Minute

// seenIn says that the VM, as the cache has it, already tells what was assumed.
func (a assumption) seenIn(vm *v1alpha1.ImpVM) bool {
	if vm.Status.Assignment != a.assignment {
		return vm.Status.Assignment > a.assignment
	}
	return vm.Status.NodeName == a.node && schedule.Taken(vm.Status.Resources) == a.amount || vm.Status.NodeName == ""
}

// prime assumes what is bound according to the API server. A new leader's cache may not yet show what its predecessor bound
// in its last moment. The caller holds mu.
func (l *ledger) prime(ctx context.Context, live client.Reader, now time.Time) error {
	if l.primed {
		return nil
	}
	vms := &v1alpha1.ImpVMList{}
	if err := live.List(ctx, vms); err != nil {
		return fmt.Errorf("reading what is bound: %w", err)
	}
	for i := range vms.Items {
		if vm := &vms.Items[i]; holds(vm) {
			l.assume(vm, now)
			a := l.assumed[vm.UID]
			a.live = true
			l.assumed[vm.UID] = a
		}
	}
	l.primed = true
	return nil
}

// assume that vm will be bound as its status says. The caller holds mu.
func (l *ledger) assume(vm *v1alpha1.ImpVM, now time.Time) {
	if l.assumed == nil {
		l.assumed = map[types.UID]assumption{}
	}
	l.assumed[vm.UID] = assumption{
		node: vm.Status.NodeName, assignment: vm.Status.Assignment, amount: schedule.Taken(vm.Status.Resources),
		network: inNetwork(vm), at: now,
	}
}

// inNetwork names the VM's network; the zero value where it has none.
func inNetwork(vm *v1alpha1.ImpVM) types.NamespacedName {
	if vm.Spec.NetworkRef == nil {
		return types.NamespacedName{}
	}
	return networkOf(vm)
}

// drop what was assumed of a VM with this assignment.
func (l *ledger) drop(uid types.UID, assignment int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if a, ok := l.assumed[uid]; ok && a.assignment == assignment {
		delete(l.assumed, uid)
	}
}

// ahead says that a binding of vm was decided that vm does not show yet.
func (l *ledger) ahead(vm *v1alpha1.ImpVM, now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	a, ok := l.assumed[vm.UID]
	return ok && a.assignment > vm.Status.Assignment && now.Sub(a.at) < assumedFor
}

// bound gives what is taken of each node without asker, and how many guests of its network are there. The caller holds mu.
func (l *ledger) bound(ctx context.Context, cached client.Reader, now time.Time, asker *v1alpha1.ImpVM) (map[string]usage, error) {
	vms := &v1alpha1.ImpVMList{}
	if err := cached.List(ctx, vms, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("reading what is bound: %w", err)
	}
	taken, asked := map[string]usage{}, inNetwork(asker)
	take := func(node string, amount schedule.Amount, network types.NamespacedName) {
		u := taken[node]
		u.amount = u.amount.Plus(amount)
		if network == asked {
			u.guests++
		}
		taken[node] = u
	}
	listed := make(map[types.UID]bool, len(vms.Items))
	for i := range vms.Items {
		vm := &vms.Items[i]
		listed[vm.UID] = true
		a, ahead := l.assumed[vm.UID]
		if ahead && (a.seenIn(vm) || now.Sub(a.at) >= assumedFor) {
			delete(l.assumed, vm.UID)
			ahead = false
		}
		if vm.UID == asker.UID {
			continue
		}
		if holds(vm) {
			take(vm.Status.NodeName, schedule.Taken(vm.Status.Resources), inNetwork(vm))
		}
		switch {
		case !ahead, vmstate.Finished(vm):
		case holds(vm) && vm.Status.NodeName == a.node: // a new size of the same binding: the larger one counts
			u := taken[a.node]
			u.amount = u.amount.Plus(larger(a.amount, schedule.Taken(vm.Status.Resources)))
			taken[a.node] = u
		default:
			take(a.node, a.amount, a.network)
		}
	}
	for uid, a := range l.assumed {
		switch {
		case listed[uid]:
		case !a.live, now.Sub(a.at) >= assumedFor:
			delete(l.assumed, uid)
		case uid != asker.UID:
			take(a.node, a.amount, a.network)
		}
	}
	return taken, nil
}

// holds says that the VM takes a part of its node's budget: a finished one has nothing left there.
func holds(vm *v1alpha1.ImpVM) bool { return vm.Status.NodeName != "" && !vmstate.Finished(vm) }

// larger gives by how much a exceeds b, in each part at least 0.
func larger(a, b schedule.Amount) schedule.Amount {
	return schedule.Amount{
		VCPU: max(0, a.VCPU-b.VCPU), MemoryMiB: max(0, a.MemoryMiB-b.MemoryMiB), DiskGiB: max(0, a.DiskGiB-b.DiskGiB),
	}
}
