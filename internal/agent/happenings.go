package agent

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/agent/translate"
	"imp.dev/imp/internal/event"
	"imp.dev/imp/internal/fault"
)

// waiting says that a reason is no failure: the stage has not been reached, or is undone on purpose.
func waiting(reason string) bool {
	switch reason {
	case "", v1alpha1.ReasonPending, v1alpha1.ReasonStarting, v1alpha1.ReasonStopping, v1alpha1.ReasonDone,
		v1alpha1.ReasonRunning, v1alpha1.ReasonPlaced, v1alpha1.ReasonCompleted,
		translate.ReasonReleased, translate.ReasonUpToDate, v1alpha1.ReasonStopped, v1alpha1.ReasonEvacuated:
		return true
	}
	return false
}

// stageConditions in the order in which they become true.
func stageConditions() []string {
	return []string{
		v1alpha1.ConditionDiskReady, v1alpha1.ConditionNetworkReady, v1alpha1.ConditionStarted, v1alpha1.ConditionGuestReady,
	}
}

func find(vm *v1alpha1.ImpVM, conditionType string) metav1.Condition {
	if c := meta.FindStatusCondition(vm.Status.Conditions, conditionType); c != nil {
		return *c
	}
	return metav1.Condition{}
}

// spoken is vm as far as the agent has spoken of its present assignment; what an earlier one left does not count.
func spoken(before, after *v1alpha1.ImpVM) *v1alpha1.ImpVM {
	if before.Status.ReportedAssignment == after.Status.ReportedAssignment {
		return before
	}
	out := &v1alpha1.ImpVM{}
	out.Status.ReleasedAssignment = before.Status.ReleasedAssignment
	out.Status.Conditions = []metav1.Condition{find(before, v1alpha1.ConditionReady), find(before, v1alpha1.ConditionFinished)}
	return out
}

// newFailure gives the condition if it says a failure in after that it did not say in before.
func newFailure(before, after *v1alpha1.ImpVM, conditionType string) (metav1.Condition, bool) {
	b, a := find(before, conditionType), find(after, conditionType)
	if a.Status != metav1.ConditionFalse || waiting(a.Reason) {
		return a, false
	}
	return a, b.Status != metav1.ConditionFalse || b.Reason != a.Reason
}

// significant says that somebody waits for the change from before to after.
func significant(before, after *v1alpha1.ImpVM) bool {
	if before.Status.ReleasedAssignment != after.Status.ReleasedAssignment {
		return true
	}
	before = spoken(before, after)
	waited := []string{v1alpha1.ConditionFinished}
	if !leaving(after) {
		waited = append(waited, v1alpha1.ConditionStarted, v1alpha1.ConditionGuestReady, v1alpha1.ConditionReady)
	}
	for _, t := range waited {
		if (find(before, t).Status == metav1.ConditionTrue) != (find(after, t).Status == metav1.ConditionTrue) {
			return true
		}
	}
	if leaving(after) {
		return false
	}
	for _, t := range stageConditions() {
		if _, ok := newFailure(before, after, t); ok {
			return true
		}
	}
	return startedAnew(before, after)
}

// leaving: of a VM that was ordered to stop only the end of it is waited for.
func leaving(vm *v1alpha1.ImpVM) bool { return vm.DeletionTimestamp != nil || vm.Status.Release != nil }

// startedAnew says that the workload runs in after as it did not in before.
func startedAnew(before, after *v1alpha1.ImpVM) bool {
	return find(after, v1alpha1.ConditionStarted).Status == metav1.ConditionTrue &&
		(find(before, v1alpha1.ConditionStarted).Status != metav1.ConditionTrue ||
			before.Status.Incarnation != after.Status.Incarnation)
}

// troubled says that vm's conditions tell of a failure from which one can recover.
func troubled(vm *v1alpha1.ImpVM) bool {
	for _, t := range append(stageConditions(), v1alpha1.ConditionReady) {
		if c := find(vm, t); c.Status == metav1.ConditionFalse && !waiting(c.Reason) {
			return true
		}
	}
	return false
}

// happenings are the events of the change from before to after. trouble says that a failure was seen since the VM was last Ready.
func happenings(before, after *v1alpha1.ImpVM, trouble bool) []event.Event {
	var out []event.Event
	tell := func(eventType, reason, step, message string) {
		e := event.VM(after, eventType, reason, message)
		e.Step = step
		out = append(out, e)
	}
	trouble = trouble || troubled(before)
	before = spoken(before, after)
	if c := find(after, v1alpha1.ConditionDiskReady); c.Status == metav1.ConditionTrue &&
		find(before, c.Type).Status != metav1.ConditionTrue && after.Status.Timings != nil && after.Status.Timings.PullMillis > 0 {
		tell(corev1.EventTypeNormal, reasonPulled, "", fmt.Sprintf("pulled image %s in %s", after.Spec.Image, millis(after.Status.Timings.PullMillis)))
	}
	finished := find(after, v1alpha1.ConditionFinished)
	for _, t := range stageConditions() {
		c, ok := newFailure(before, after, t)
		if ok && finished.Status != metav1.ConditionTrue {
			eventType := corev1.EventTypeWarning
			if c.Reason == v1alpha1.ReasonBackingOff || c.Reason == v1alpha1.ReasonRescheduled {
				eventType = corev1.EventTypeNormal // the workload ended as it may, or what failed is told beside it
			}
			tell(eventType, c.Reason, t, c.Message)
		}
	}
	if c := find(after, v1alpha1.ConditionGuestReady); c.Reason == v1alpha1.ReasonRuntimeTimeout && find(before, c.Type).Reason != c.Reason {
		tell(corev1.EventTypeWarning, c.Reason, c.Type, c.Message)
	}
	if e, ok := failureHappening(before, after); ok && finished.Status != metav1.ConditionTrue {
		out = append(out, e)
	}
	if c := find(after, v1alpha1.ConditionStarted); halted(c) && !leaving(after) && find(before, c.Type).Reason != c.Reason {
		tell(corev1.EventTypeNormal, c.Reason, c.Type, c.Message)
	}
	out = append(out, progressHappenings(before, after, trouble)...)
	if finished.Status == metav1.ConditionTrue && find(before, v1alpha1.ConditionFinished).Status != metav1.ConditionTrue {
		eventType := corev1.EventTypeWarning
		if finished.Reason == v1alpha1.ReasonSucceeded || waiting(finished.Reason) {
			eventType = corev1.EventTypeNormal
		}
		tell(eventType, finished.Reason, "", finished.Message)
	}
	if after.Status.ReleasedAssignment > before.Status.ReleasedAssignment {
		tell(corev1.EventTypeNormal, translate.ReasonReleased, "", "nothing of the VM is left on node "+after.Status.NodeName)
	}
	return out
}

// halted says that the VM stands still by an order that leaves it where it is.
func halted(started metav1.Condition) bool {
	return started.Status == metav1.ConditionFalse &&
		(started.Reason == v1alpha1.ReasonStopped || started.Reason == v1alpha1.ReasonEvacuated)
}

// failureHappening is the event of a failure that is new in after. One that a stage's condition has just begun to say is told as that;
// of one that it goes on saying, the next try failed as well, and the event is counted up.
func failureHappening(before, after *v1alpha1.ImpVM) (event.Event, bool) {
	f, old := after.Status.LastFailure, before.Status.LastFailure
	if f == nil || (old != nil && f.Incarnation == old.Incarnation && f.Reason == old.Reason && f.Time.Equal(&old.Time)) {
		return event.Event{}, false
	}
	e := event.VM(after, corev1.EventTypeWarning, f.Reason, f.Message)
	e.Incarnation = f.Incarnation
	for _, t := range stageConditions() {
		if _, ok := newFailure(before, after, t); find(after, t).Reason == f.Reason {
			e.Step, e.Incarnation = t, after.Status.Incarnation
			return e, !ok
		}
	}
	return e, true
}

// progressHappenings are those of a VM that gets on: started, started again, ready, healthy again.
func progressHappenings(before, after *v1alpha1.ImpVM, trouble bool) []event.Event {
	var out []event.Event
	if startedAnew(before, after) {
		if n := after.Status.RestartCount; n > 0 {
			out = append(out, event.VM(after, corev1.EventTypeNormal, reasonRestarted, fmt.Sprintf("the workload was started again, restart %d", n)))
		} else {
			out = append(out, event.VM(after, corev1.EventTypeNormal, reasonStarted, "the workload was started"+bootTime(after.Status.Timings)))
		}
	}
	if c := find(after, v1alpha1.ConditionRestartRequired); c.Status == metav1.ConditionTrue &&
		find(before, c.Type).Status != metav1.ConditionTrue {
		out = append(out, event.VM(after, corev1.EventTypeNormal, v1alpha1.ConditionRestartRequired, c.Message))
	}
	ready := find(after, v1alpha1.ConditionReady)
	if ready.Status == metav1.ConditionTrue && find(before, v1alpha1.ConditionReady).Status != metav1.ConditionTrue {
		if trouble {
			out = append(out, event.VM(after, corev1.EventTypeNormal, v1alpha1.ReasonRecovered, ready.Message))
		} else {
			out = append(out, event.VM(after, corev1.EventTypeNormal, v1alpha1.ConditionReady, ready.Message))
		}
	}
	return out
}

// Event reasons of the agent's own.
const (
	reasonPulling   = "Pulling"
	reasonPulled    = "Pulled"
	reasonStarted   = "Started"
	reasonRestarted = "Restarted"
)

func bootTime(t *v1alpha1.Timings) string {
	if t == nil {
		return ""
	}
	sum := t.DiskMillis + t.NetworkMillis + t.VMMMillis + t.KernelMillis + t.GuestMillis + t.WorkloadMillis
	return " " + millis(sum).String() + " after its image was there"
}

func millis(n int64) time.Duration { return time.Duration(n) * time.Millisecond }

// couldNotStart says that after tells of a VMM that could not be started, and before did not.
func couldNotStart(before, after *v1alpha1.ImpVM) (string, bool) {
	c, ok := newFailure(spoken(before, after), after, v1alpha1.ConditionStarted)
	return c.Message, ok && c.Reason == string(fault.RuntimeStartFailed)
}
