package chaos

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"imp.dev/imp/api/v1alpha1"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// expect compares a VM, and its process, with what its kind and its users' wish come to in peace; "" is as wanted.
func expect(kind Kind, w wish, vm *v1alpha1.ImpVM, processes int) string {
	ready := meta.FindStatusCondition(vm.Status.Conditions, v1alpha1.ConditionReady)
	done := meta.IsStatusConditionTrue(vm.Status.Conditions, v1alpha1.ConditionFinished)
	reason, isReady := "", false
	if ready != nil {
		reason, isReady = ready.Reason, ready.Status == "True"
	}
	var want string
	ok, live := false, 0
	switch {
	case done && (kind == Fails || !kind.persistent()):
		want, ok = "finished", true
	case kind.persistent() && w.stopped:
		want, ok = "stopped", vm.Status.Phase == v1alpha1.PhaseStopped && !isReady
	case kind == OneShot || kind == Fails:
		want = "finished"
	case kind == ManualReset:
		want, ok = "waiting for a reset", reason == v1alpha1.ReasonRetriesExhausted
	default:
		want, ok, live = "ready", isReady, 1
	}
	switch {
	case !ok:
		return "is not " + want
	case processes != live:
		return fmt.Sprintf("is %s with %d processes", want, processes)
	}
	return ""
}

// stays is how long all must be as wanted: a VM that is about to crash is Ready for a moment, and waits for longestDelay or coolDown.
const stays = 6 * time.Second

// converge waits until every slot is as wanted, all at one time, and stays so.
func (r *runner) converge(ctx context.Context) {
	began := time.Now()
	reached := map[int]time.Duration{}
	var wrong []string
	right := time.Now() // since when all are
	for {
		wrong = r.wrong(ctx, func(slot int) {
			if _, ok := reached[slot]; !ok {
				reached[slot] = time.Since(began)
			}
		}, func(slot int) { delete(reached, slot) })
		if len(wrong) > 0 {
			right = time.Now()
		}
		if time.Since(right) > stays || time.Since(began) > r.options.Bound || ctx.Err() != nil {
			break
		}
		pause(ctx, 250*time.Millisecond)
	}
	r.observer.checked(Converges, len(r.slots))
	for slot, after := range reached {
		if after >= r.verdict.Slowest {
			r.verdict.Slowest, r.verdict.SlowestVM = after, fmt.Sprintf("%s, %s", slotName(slot), r.schedule.Kinds[slot])
		}
	}
	for _, line := range wrong {
		name, what, _ := strings.Cut(line, ": ")
		r.observer.violate(Converges, name, "%s after the faults ended it %s", r.options.Bound, what)
	}
}

// wrong compares every slot and gives those that are not as wanted, in words.
func (r *runner) wrong(ctx context.Context, right, not func(slot int)) (lines []string) {
	vms := &v1alpha1.ImpVMList{}
	if err := r.client.List(ctx, vms, client.InNamespace(namespace)); err != nil {
		return []string{"all: cannot be listed: " + err.Error()}
	}
	by := map[string]*v1alpha1.ImpVM{}
	for i := range vms.Items {
		by[vms.Items[i].Name] = &vms.Items[i]
	}
	for _, s := range r.slots {
		_, w, applied := s.now()
		vm, problem := by[slotName(s.number)], ""
		switch {
		case !applied:
			problem = "is not what its user wants in the API yet"
		case !w.exists && vm != nil:
			problem = "is not gone"
		case w.exists && vm == nil:
			problem = "is not there"
		case w.exists:
			problem = expect(r.schedule.Kinds[s.number], w, vm, len(r.observer.reality.of(string(vm.UID))))
		}
		if problem == "" {
			right(s.number)
			continue
		}
		not(s.number)
		if vm != nil {
			problem += "; it is " + state(vm)
		}
		lines = append(lines, slotName(s.number)+": "+problem)
	}
	return lines
}

// restFor is how long writes are counted once all is as wanted; perMinute bounds them. Leases are not counted.
const (
	restFor           = 10 * time.Second
	restWritesAllowed = 5
)

// rest counts what is written while there is nothing to do.
func (r *runner) rest(ctx context.Context) {
	r.writes.sample(ctx)
	before := r.writes.since(nil)
	pause(ctx, restFor)
	r.writes.sample(ctx)
	r.verdict.Rest, r.verdict.RestOver = r.writes.since(before), restFor
	n := 0.0
	for _, count := range r.verdict.Rest {
		n += count
	}
	r.observer.checked(Quiet, 1)
	if n > restWritesAllowed {
		r.observer.violate(Quiet, "the API server", "%.0f writes in %s with every VM as wanted: %v", n, restFor, r.verdict.Rest)
	}
}

// removeAll deletes every VM and looks for what is left of any that ever was.
func (r *runner) removeAll(ctx context.Context) {
	began := time.Now()
	for _, s := range r.slots {
		s.apply(func(w *wish) { w.exists = false })
	}
	left := []string{"everything"}
	for len(left) > 0 && time.Since(began) < r.options.Bound && ctx.Err() == nil {
		pause(ctx, 500*time.Millisecond)
		left = r.left(ctx)
	}
	r.verdict.Removed = time.Since(began)
	r.observer.checked(NothingLeft, len(r.observer.uids()))
	for _, what := range left[:min(len(left), 20)] {
		r.observer.violate(NothingLeft, "deleted "+r.options.Bound.String()+" ago", "%s", what)
	}
}

func (r *runner) left(ctx context.Context) (found []string) {
	vms := &v1alpha1.ImpVMList{}
	if err := r.client.List(ctx, vms, client.InNamespace(namespace)); err != nil {
		return []string{err.Error()}
	}
	for i := range vms.Items {
		vm := &vms.Items[i]
		found = append(found, "object "+vm.Name+": "+state(vm))
		if ptr.Deref(vm.Spec.TerminationGracePeriodSeconds, 1) != 0 {
			before := vm.DeepCopy()
			vm.Spec.TerminationGracePeriodSeconds = ptr.To(int64(0)) // the grace is no part of what is looked for here
			if err := r.client.Patch(ctx, vm, client.MergeFrom(before)); err != nil && !apierrors.IsNotFound(err) {
				found = append(found, err.Error())
			}
		}
	}
	if len(found) > 0 {
		return found
	}
	addresses := &v1alpha1.ImpAddressList{}
	if err := r.client.List(ctx, addresses); err != nil {
		return []string{err.Error()}
	}
	for i := range addresses.Items {
		found = append(found, "ImpAddress "+addresses.Items[i].Name)
	}
	if len(found) > 0 {
		return found
	}
	for uid, processes := range r.observer.reality.look() {
		found = append(found, fmt.Sprintf("%d processes of %s", len(processes), r.observer.name(uid)))
	}
	for _, uid := range r.observer.uids() {
		for _, what := range r.server.Leftovers(uid) {
			if !strings.Contains(what, "/trash/") { // a disk that was left behind by a move is kept for 72 h, and is to be
				found = append(found, what+" of "+r.observer.name(uid))
			}
		}
	}
	slices.Sort(found)
	return found
}
