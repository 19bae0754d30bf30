package agent

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/agent/translate"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
)

const (
	// silence is how long the runtime may be away before VMs that wait for it say so; its restart takes a second.
	silence = 15 * time.Second
	// secretsAgain is how often the pull secrets of a VM whose pull fails are read anew; waitingAgain when the runtime has none.
	secretsAgain = 30 * time.Second
	waitingAgain = 2 * time.Second
	// behindPatience is how long the runtime may know a later assignment than the object before the object says so: a cache lags less.
	behindPatience = 2 * time.Second
	// writeTries bounds the passes of one reconcile: each but the first follows a conflict.
	writeTries = 5
)

// Reconcile does what is to be done now about the VMs of one name: the one whose object is bound here, those that a Held claim orders
// away, and those the runtime still has of objects that are not bound here.
func (a *Agent) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	vm, err := a.bound(ctx, req.NamespacedName)
	if err != nil {
		return reconcile.Result{}, err
	}
	held, err := a.heldClaims(ctx, req.NamespacedName)
	if err != nil {
		return reconcile.Result{}, err
	}
	a.networks.Poke()
	if vm != nil {
		delete(held, string(vm.UID)) // the object itself gives the orders
	}
	var wait time.Duration
	for _, claims := range held {
		for _, claim := range claims {
			wait = soonest(wait, a.reconcileHeld(ctx, claim))
		}
	}
	for _, st := range a.view.named(req.NamespacedName) {
		if (vm == nil || st.ID != string(vm.UID)) && len(held[st.ID]) == 0 {
			wait = soonest(wait, a.reconcileAbsent(ctx, st))
		}
	}
	if vm != nil {
		wait = soonest(wait, a.reconcileBound(ctx, vm))
	}
	return reconcile.Result{RequeueAfter: wait}, nil
}

// soonest is the shorter of two waits; 0 is never.
func soonest(a, b time.Duration) time.Duration {
	if a == 0 || (b != 0 && b < a) {
		return b
	}
	return a
}

// bound gives the object of that name from the cache, which holds those bound to this node; nil when it has none.
func (a *Agent) bound(ctx context.Context, name types.NamespacedName) (*v1alpha1.ImpVM, error) {
	vm := &v1alpha1.ImpVM{}
	err := a.cache.Get(ctx, name, vm)
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("reading cache: %w", err)
	case vm.Status.NodeName != a.opts.Node:
		return nil, nil
	}
	return vm, nil
}

// live reads the object from the API server itself; nil when there is none.
func (a *Agent) live(ctx context.Context, name types.NamespacedName) (*v1alpha1.ImpVM, error) {
	vm := &v1alpha1.ImpVM{}
	err := a.client.Get(ctx, name, vm)
	// Without the CRD the server does not know the path: that is no word about the object.
	if apierrors.IsNotFound(err) && !apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse) {
		return nil, nil
	}
	return vm, err
}

// reconcileBound makes passes over one VM until what it says is on the object, or has to wait.
func (a *Agent) reconcileBound(ctx context.Context, vm *v1alpha1.ImpVM) time.Duration {
	m := a.memory.of(vm.UID)
	m.absentTold, m.absentSince, m.looks = "", time.Time{}, 0
	original := vm
	vm = m.newer(vm)
	for range writeTries {
		wait, result := a.pass(ctx, vm, m)
		if result == written || result == unchanged {
			return wait
		}
		// Whatever kept the write from happening, the object has the answer.
		m.latest = nil
		live, err := a.live(ctx, types.NamespacedName{Namespace: vm.Namespace, Name: vm.Name})
		switch {
		case err != nil:
			a.logVM(vm).Warn("object not read after a refused write", "error", err)
			return m.backoff()
		case live == nil || live.UID != original.UID || live.Status.NodeName != a.opts.Node:
			a.logVM(vm).Info("VM is not this node's any more")
			return 0
		case result == denied && live.Status.Assignment == vm.Status.Assignment && live.ResourceVersion == vm.ResourceVersion:
			return m.backoff()
		case result == failed:
			return m.backoff()
		}
		vm = live
	}
	return m.backoff()
}

// pass gathers, decides, acts and reports, once. Its wait is the time until the next pass is due.
func (a *Agent) pass(ctx context.Context, vm *v1alpha1.ImpVM, m *memory) (time.Duration, writeResult) {
	now := a.clock.Now()
	epoch, away := a.view.connection(now)
	deaf := a.deaf.Load()
	f := facts{vm: vm, synced: epoch != 0 && !deaf, silent: deaf || (epoch == 0 && away >= silence)}
	if st, ok := a.view.get(vm.UID); ok {
		f.status = &st
	}
	f.behind = m.behind(f, now)
	f.network = a.standingOf(vm, m, now)
	var wait time.Duration
	f.ensured, wait = a.specKnown(vm, f, m, epoch, now)
	d := decide(f)
	o := translate.Observation{Now: now}
	if d.do != reportLost && d.do != reportReleased {
		o.Status = matching(f.status, vm)
	}
	switch d.do {
	case hold:
		return a.holdWait(f, away), unchanged
	case reportSilent:
		o.Problem = fault.Of(fault.Errorf(fault.RuntimeStartFailed, "asking the node's runtime",
			"it does not answer on %s", a.opts.RuntimeSocket))
	case reportTimeout:
		o.Unanswered = fmt.Sprintf("the node's runtime has not answered for %s; what the VM does is not known", silence)
	case reportBehind:
		o.Problem = fault.Of(fault.Errorf(fault.StaleAssignment, "ordering VM",
			"node %s has assignment %d of this VM, and the object says %d (was it restored from a backup?): the VM is left as it is until status.assignment is greater",
			a.opts.Node, f.status.Assignment, vm.Status.Assignment))
	case reportReleased:
		o.Released = true
	case reportLost:
		o.Lost = true
	case remove:
		wait = a.remove(ctx, vm, m, &o)
	case ensure:
		retry, ok := a.ensure(ctx, vm, f, m, epoch, &o)
		if !ok {
			return retry, unchanged
		}
		wait = retry
	}
	if o.Problem == nil {
		o.Problem = f.network.shows(d.do, o.Status)
	}
	a.tellPull(vm, o.Status, m, now)
	a.tellReset(vm, m)
	reportWait, result := a.report(ctx, vm, m, o)
	return soonest(wait, reportWait), result
}

// holdWait: a VM that nothing was said about yet is looked at again when the runtime has been silent, or its network not set, for long
// enough.
func (a *Agent) holdWait(f facts, away time.Duration) time.Duration {
	switch {
	case f.synced && f.status != nil && f.status.Assignment > f.vm.Status.Assignment:
		return behindPatience
	case f.synced:
		return f.network.wait
	case f.silent:
		return 0
	default:
		return silence - away
	}
}

// behind says that the runtime has had a later assignment than the object for longer than behindPatience.
func (m *memory) behind(f facts, now time.Time) bool {
	if f.status == nil || f.status.Assignment <= f.vm.Status.Assignment || f.status.State == machine.Removed {
		m.behindSince = time.Time{}
		return false
	}
	if m.behindSince.IsZero() {
		m.behindSince = now
	}
	return now.Sub(m.behindSince) >= behindPatience
}

// matching gives st if it speaks of vm's present assignment. What is left of an older one is being removed.
func matching(st *machine.Status, vm *v1alpha1.ImpVM) *machine.Status {
	if st == nil || st.Assignment != vm.Status.Assignment {
		return nil
	}
	return st
}

// specKnown says that the runtime has the present spec and needs no new credentials; and when that is to be asked again.
func (a *Agent) specKnown(vm *v1alpha1.ImpVM, f facts, m *memory, epoch int64, now time.Time) (bool, time.Duration) {
	st := f.status
	spec, err := translate.Spec(vm, f.network.facts, nil)
	spec.Cluster = a.cluster.get()
	if err != nil || !m.knows(spec, epoch) {
		return false, 0
	}
	if st == nil || len(vm.Spec.ImagePullSecrets) == 0 || (st.Disk.OK != nil && *st.Disk.OK) {
		return true, 0
	}
	var every time.Duration
	switch st.Disk.Reason {
	case fault.ImagePullFailed:
		every = secretsAgain
	case fault.WaitingForSecrets:
		every = waitingAgain
	default:
		return true, 0
	}
	left := every - now.Sub(m.toldAt)
	return left > 0, max(left, 0)
}

// orderTimeout bounds an order to the runtime, which answers at once and works behind: one that hangs must not hold a worker.
const orderTimeout = 10 * time.Second

// remove orders the removal and puts its outcome into o.
func (a *Agent) remove(ctx context.Context, vm *v1alpha1.ImpVM, m *memory, o *translate.Observation) time.Duration {
	ref := machine.Ref{ID: string(vm.UID), Assignment: vm.Status.Assignment}
	ctx, cancel := context.WithTimeout(ctx, orderTimeout)
	defer cancel()
	// A disk that a move leaves behind can be had back for a while; with the VM its disk goes.
	how := machine.Removal{Grace: translate.Grace(vm), KeepDisk: vm.DeletionTimestamp == nil && !isFinished(vm)}
	st, err := a.service.Remove(ctx, ref, how)
	if err != nil {
		a.logVM(vm).Warn("removal not ordered", "step", "remove", "error", err)
		return m.backoff()
	}
	m.failures = 0
	a.view.put(st)
	if st.State == machine.Removed {
		o.Status, o.Released = nil, true
		return 0
	}
	o.Status = matching(&st, vm)
	return 0
}

// ensure tells the runtime what shall be and puts its answer into o. ok is false when there is nothing to report.
func (a *Agent) ensure(ctx context.Context, vm *v1alpha1.ImpVM, f facts, m *memory, epoch int64, o *translate.Observation) (wait time.Duration, ok bool) {
	log := a.logVM(vm)
	credentials, err := a.credentials(ctx, vm)
	if err != nil {
		log.Warn("pull secrets not read", "step", "disk", "error", err)
		if o.Status == nil || o.Status.Disk.OK == nil || !*o.Status.Disk.OK {
			o.Problem = fault.Of(err)
			return m.backoff(), true
		}
		credentials = nil // the disk is there; what else has changed must reach the node all the same
	}
	spec, err := translate.Spec(vm, f.network.facts, credentials)
	if err != nil {
		o.Problem = fault.Of(err)
		return m.backoff(), true
	}
	spec.Cluster = a.cluster.get()
	return a.order(ctx, vm, spec, m, epoch, o)
}

func (a *Agent) order(
	ctx context.Context, vm *v1alpha1.ImpVM, spec machine.Spec, m *memory, epoch int64, o *translate.Observation,
) (wait time.Duration, ok bool) {
	log := a.logVM(vm)
	ctx, cancel := context.WithTimeout(ctx, orderTimeout)
	defer cancel()
	st, err := a.service.Ensure(ctx, spec)
	f := fault.Of(err)
	switch {
	case err == nil:
		m.told, m.epoch, m.toldAt, m.failures = comparable(spec), epoch, a.clock.Now(), 0
		a.view.put(st)
		if latest, found := a.view.get(vm.UID); found {
			st = latest
		}
		o.Status = matching(&st, vm)
		return 0, true
	case fault.Is(err, fault.NoCapacity) && o.Status == nil:
		log.Warn("node has no room for the VM", "error", err)
		o.Problem, o.Released = f, true
		return 0, true
	case fault.Is(err, fault.StaleAssignment), fault.Is(err, fault.Unavailable), ctx.Err() != nil:
		log.Info("runtime did not take the VM now", "step", "ensure", "error", err)
		return m.backoff(), false
	default:
		log.Error("runtime refused the VM", "step", "ensure", "error", err)
		o.Problem = f
		if f.Permanent {
			return 0, true
		}
		return m.backoff(), true
	}
}

func (a *Agent) logVM(vm *v1alpha1.ImpVM) *slog.Logger {
	return a.logOf(string(vm.UID), vm.Namespace, vm.Name)
}

func (a *Agent) logOf(uid, namespace, name string) *slog.Logger {
	return a.log.With("vm", uid, "namespace", namespace, "name", name, "node", a.opts.Node)
}
