// Package condition computes the condition Ready and the phase of an ImpVM out of its other conditions. It is pure, and
// both writers of an ImpVM's status use it, so that whoever speaks says the same of the same facts.
//
//	Scheduled → NodeReachable → DiskReady → NetworkReady → Started → GuestReady
//	└ imp-place └ imp-reachable └──────────────── imp-agent ─────────────────┘
//
// Ready is False with the reason and message of the first of these that is not true. Finished comes before all of them.
package condition

import (
	"time"

	"imp.dev/imp/api/v1alpha1"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Inputs are all that Ready depends on.
type Inputs struct {
	// Conditions of every writer, as they will be after the write that Ready is computed for. Of an older Ready among them
	// only the time is used.
	Conditions []metav1.Condition
	// AgentSpoke says that the agent's conditions are of the present assignment. Those of an earlier one count as not there.
	AgentSpoke bool
	// Leaving says that the VM is being deleted or its node was told to give it up.
	Leaving bool
	// Halting says that the VM is to stand still.
	Halting bool
	// Generation of the object, kept as Ready's observedGeneration.
	Generation int64
	Now        time.Time
}

// Of takes the inputs from an object whose status is as it will be written.
func Of(vm *v1alpha1.ImpVM, now time.Time) Inputs {
	return Inputs{
		Conditions: vm.Status.Conditions,
		AgentSpoke: vm.Status.ReportedAssignment == vm.Status.Assignment,
		Leaving:    vm.DeletionTimestamp != nil || vm.Status.Release != nil,
		Halting:    vm.Spec.DesiredState == v1alpha1.DesiredStopped || vm.Status.Hold != nil,
		Generation: vm.Generation,
		Now:        now,
	}
}

// Apply puts Ready and the phase into vm's status. It is the last thing a writer does before it writes.
func Apply(vm *v1alpha1.ImpVM, now time.Time) {
	ready, phase := Ready(Of(vm, now))
	Set(&vm.Status.Conditions, ready)
	vm.Status.Phase = phase
}

// stage is one condition on the way to Ready.
type stage struct {
	conditionType string
	// waiting is said while nobody has written the condition.
	waiting string
	// byAgent marks what is worthless when the agent has not spoken for the present assignment.
	byAgent bool
	// trueIfAbsent: a write to say that all is well is saved.
	trueIfAbsent bool
}

// stages in the order in which they become true.
func stages() []stage {
	return []stage{
		{conditionType: v1alpha1.ConditionScheduled, waiting: "waiting for a node"},
		{conditionType: v1alpha1.ConditionNodeReachable, trueIfAbsent: true},
		{conditionType: v1alpha1.ConditionDiskReady, waiting: "waiting for the node to prepare the disk", byAgent: true},
		{conditionType: v1alpha1.ConditionNetworkReady, waiting: "waiting for the node to set up the network", byAgent: true},
		{conditionType: v1alpha1.ConditionStarted, waiting: "waiting for the node to start the guest", byAgent: true},
		{conditionType: v1alpha1.ConditionGuestReady, waiting: "waiting for the guest to be ready", byAgent: true},
	}
}

// Ready computes the condition Ready, which is True or False and never Unknown, and the phase.
func Ready(in Inputs) (metav1.Condition, v1alpha1.Phase) {
	ready, phase := decide(in)
	ready.Type = v1alpha1.ConditionReady
	ready.ObservedGeneration = in.Generation
	return Next(in.Conditions, ready, in.Now), phase
}

func decide(in Inputs) (metav1.Condition, v1alpha1.Phase) {
	if f := meta.FindStatusCondition(in.Conditions, v1alpha1.ConditionFinished); f != nil && f.Status == metav1.ConditionTrue {
		return finished(f)
	}
	missing, cause := firstNotTrue(in)
	switch {
	case in.Leaving && missing == v1alpha1.ConditionNodeReachable:
		return cause, v1alpha1.PhaseStopping // why it does not go away is worth more than that it should
	case in.Leaving:
		return notReady(v1alpha1.ReasonStopping, "being stopped and removed from its node"), v1alpha1.PhaseStopping
	case standsStill(in, missing) != nil:
		still := standsStill(in, missing)
		return notReady(still.Reason, still.Message), v1alpha1.PhaseStopped
	case rests(cause.Reason):
		return cause, v1alpha1.PhaseStopped
	case in.Halting && (missing == "" || missing == v1alpha1.ConditionGuestReady):
		return notReady(v1alpha1.ReasonStopping, "being stopped; disk and address stay"), v1alpha1.PhaseStopping
	case missing == "":
		return metav1.Condition{
			Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonRunning, Message: "the guest is running and ready",
		}, v1alpha1.PhaseRunning
	case missing == v1alpha1.ConditionNodeReachable:
		return cause, v1alpha1.PhaseUnknown
	case cause.Reason == v1alpha1.ReasonRuntimeTimeout:
		return cause, v1alpha1.PhaseUnknown // its agent lives, and cannot say what the guest does
	case missing != v1alpha1.ConditionScheduled && in.AgentSpoke &&
		meta.IsStatusConditionTrue(in.Conditions, v1alpha1.ConditionStarted):
		return cause, v1alpha1.PhaseRunning
	default:
		return cause, v1alpha1.PhaseStarting
	}
}

// standsStill gives what its node says of a VM that is kept stopped by order, nil of any other. The order is why such a VM may not have
// a disk or a network yet, so it is told before them.
func standsStill(in Inputs, missing string) *metav1.Condition {
	started := meta.FindStatusCondition(in.Conditions, v1alpha1.ConditionStarted)
	switch {
	case !in.AgentSpoke || started == nil || started.Status != metav1.ConditionFalse:
		return nil
	case missing == v1alpha1.ConditionScheduled || missing == v1alpha1.ConditionNodeReachable:
		return nil
	case started.Reason != v1alpha1.ReasonStopped && started.Reason != v1alpha1.ReasonEvacuated:
		return nil
	}
	return started
}

// rests says that a VM with this reason is not started until somebody wants it: one without a node, or one whose retries are used up.
func rests(reason string) bool {
	return reason == v1alpha1.ReasonStopped || reason == v1alpha1.ReasonEvacuated || reason == v1alpha1.ReasonRetriesExhausted
}

// finished: a reason that tells more than Failed (DeadlineExceeded, NodeLost) is kept.
func finished(f *metav1.Condition) (metav1.Condition, v1alpha1.Phase) {
	switch f.Reason {
	case v1alpha1.ReasonSucceeded:
		return notReady(v1alpha1.ReasonCompleted, f.Message), v1alpha1.PhaseSucceeded
	case "":
		return notReady(v1alpha1.ReasonFailed, f.Message), v1alpha1.PhaseFailed
	default:
		return notReady(f.Reason, f.Message), v1alpha1.PhaseFailed
	}
}

// firstNotTrue gives the type of the first stage that is not true and what Ready says of it; "" when all are.
func firstNotTrue(in Inputs) (string, metav1.Condition) {
	for _, s := range stages() {
		c := meta.FindStatusCondition(in.Conditions, s.conditionType)
		if s.byAgent && !in.AgentSpoke {
			c = nil
		}
		switch {
		case c == nil && s.trueIfAbsent, c != nil && c.Status == metav1.ConditionTrue:
		case c == nil:
			return s.conditionType, notReady(v1alpha1.ReasonPending, s.waiting)
		case c.Reason == "":
			return s.conditionType, notReady(v1alpha1.ReasonPending, c.Message)
		default:
			return s.conditionType, notReady(c.Reason, c.Message)
		}
	}
	return "", metav1.Condition{}
}

func notReady(reason, message string) metav1.Condition {
	return metav1.Condition{Status: metav1.ConditionFalse, Reason: reason, Message: message}
}

// OperatorSpeaks says who writes Ready and phase at this moment: the operator (true) while the VM is not bound, its node is
// not reachable, or its agent has not yet reported the present assignment; else the agent, in the same write as the cause.
func OperatorSpeaks(vm *v1alpha1.ImpVM) bool {
	bound := vm.Status.NodeName != ""
	return !bound || !Reachable(vm.Status.Conditions) || vm.Status.ReportedAssignment != vm.Status.Assignment
}

// Reachable says that nothing speaks against the node: NodeReachable is written only once a node has been silent.
func Reachable(conditions []metav1.Condition) bool {
	c := meta.FindStatusCondition(conditions, v1alpha1.ConditionNodeReachable)
	return c == nil || c.Status == metav1.ConditionTrue
}

// Next gives want with its lastTransitionTime: that of the condition of the same type in previous while the status is the same,
// else now. A builder of a complete set of conditions calls it for each.
func Next(previous []metav1.Condition, want metav1.Condition, now time.Time) metav1.Condition {
	want.LastTransitionTime = metav1.NewTime(now)
	if p := meta.FindStatusCondition(previous, want.Type); p != nil && p.Status == want.Status && !p.LastTransitionTime.IsZero() {
		want.LastTransitionTime = p.LastTransitionTime
	}
	return want
}

// Set puts c, complete as Next gives it, in the place of the condition of its type, or at the end.
func Set(conditions *[]metav1.Condition, c metav1.Condition) {
	if old := meta.FindStatusCondition(*conditions, c.Type); old != nil {
		*old = c
		return
	}
	*conditions = append(*conditions, c)
}
