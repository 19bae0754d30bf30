package agent

import (
	"k8s.io/apimachinery/pkg/api/meta"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/machine"
)

// action is what the agent does about one VM now.
type action string

const (
	hold           action = "hold"           // nothing: whoever acts next is somebody else
	ensure         action = "ensure"         // tell the runtime what shall be
	remove         action = "remove"         // tell the runtime to stop the VM and to remove everything of it
	report         action = "report"         // say on the object what the runtime says
	reportReleased action = "reportReleased" // say that nothing of this assignment is left
	reportLost     action = "reportLost"     // say that a one-shot's end cannot be known
	reportSilent   action = "reportSilent"   // say that the runtime does not answer
	reportTimeout  action = "reportTimeout"  // say that what the VM does is not known while the runtime does not answer
	reportBehind   action = "reportBehind"   // say that the node has a later assignment than the object
	reportNetwork  action = "reportNetwork"  // say why the VM waits for its network
)

// facts are everything decide looks at.
type facts struct {
	// vm is bound to this node.
	vm *v1alpha1.ImpVM
	// status of the VM's UID at the runtime, of whatever assignment; nil when it has none.
	status *machine.Status
	// synced says that the runtime has told the state of every VM it has.
	synced bool
	// silent says that the runtime has not answered for longer than its restart takes.
	silent bool
	// ensured says that the present spec was accepted on the present connection.
	ensured bool
	// behind says that the runtime has had a later assignment than the object for longer than a cache lags.
	behind bool
	// network is how the VM stands with its networks.
	network standing
}

// decision is an action and why it was chosen, for the log.
type decision struct {
	do  action
	why string
}

// decide walks an ordered list of checks; the first that has an opinion decides.
//
//	runtime away → released already → release ordered → ended elsewhere → ended → forgotten by the node → network awaited →
//	spec not told → report
func decide(f facts) decision {
	for _, check := range []func(facts) (decision, bool){
		runtimeAway, released, releaseOrdered, cacheBehind, lostElsewhere, ended, forgottenOneShot, removedHere, networkAwaited, specNotTold,
	} {
		if d, ok := check(f); ok {
			return d
		}
	}
	return decision{report, "the runtime has the present spec"}
}

func runtimeAway(f facts) (decision, bool) {
	switch {
	case f.synced:
		return decision{}, false
	case f.silent && f.vm.Status.ReportedAssignment != f.vm.Status.Assignment && !isFinished(f.vm):
		return decision{reportSilent, "the runtime does not answer, and nothing was said of this assignment yet"}, true
	case f.silent && wasRunning(f.vm):
		return decision{reportTimeout, "the runtime does not answer, and the VM was running"}, true
	default:
		return decision{hold, "the runtime does not answer; what was said last stands"}, true
	}
}

func released(f facts) (decision, bool) {
	s := f.vm.Status
	return decision{hold, "already released; the operator's turn"}, s.ReleasedAssignment >= s.Assignment
}

func releaseOrdered(f facts) (decision, bool) {
	s := f.vm.Status
	if s.Release == nil || s.Release.Assignment != s.Assignment {
		return decision{}, false
	}
	if removedAt(f) {
		return decision{reportReleased, "released as ordered"}, true
	}
	return decision{remove, "the operator ordered the release"}, true
}

// wasRunning says that the agent's last word of the present assignment is that the workload runs.
func wasRunning(vm *v1alpha1.ImpVM) bool {
	return vm.Status.ReportedAssignment == vm.Status.Assignment && vm.Status.Release == nil && !isFinished(vm) &&
		meta.IsStatusConditionTrue(vm.Status.Conditions, v1alpha1.ConditionStarted)
}

// cacheBehind: the runtime was given a later assignment than the object we look at has. That lasts a moment where our cache is late, and
// until somebody acts where the object itself was set back, by a restored backup: then it is told. A tombstone of a later assignment says
// that nothing of the earlier ones is left either.
func cacheBehind(f facts) (decision, bool) {
	switch {
	case f.status == nil || f.status.Assignment <= f.vm.Status.Assignment || f.status.State == machine.Removed:
		return decision{}, false
	case f.behind:
		return decision{reportBehind, "the runtime has a later assignment than the object"}, true
	default:
		return decision{hold, "the runtime knows a later assignment"}, true
	}
}

// lostElsewhere: the operator has declared the VM lost with this node; what still runs of it is stale.
func lostElsewhere(f facts) (decision, bool) {
	c := meta.FindStatusCondition(f.vm.Status.Conditions, v1alpha1.ConditionFinished)
	if c == nil || c.Status != "True" || c.Reason != v1alpha1.ReasonNodeLost {
		return decision{}, false
	}
	if f.status == nil || f.status.State == machine.Removed || f.status.State == machine.Finished {
		return decision{hold, "the operator ended the VM while this node was away"}, true
	}
	return decision{remove, "the operator ended the VM while this node was away"}, true
}

// ended: a finished VM is never ordered again, not even when the node has forgotten it.
func ended(f facts) (decision, bool) {
	return decision{report, "the VM has finished"}, isFinished(f.vm)
}

// forgottenOneShot keeps the promise of at most once: what was started and is not known any more must not start again.
func forgottenOneShot(f facts) (decision, bool) {
	s := f.vm.Status
	unknown := f.status == nil || f.status.State == machine.Removed
	return decision{reportLost, "the node has no record of a one-shot that was started"},
		f.vm.Spec.Lifecycle != v1alpha1.LifecyclePersistent && unknown &&
			s.ReportedAssignment == s.Assignment && s.StartedAt != nil
}

// removedHere: the runtime refuses an assignment that it has removed, for good. Only another placement helps.
func removedHere(f facts) (decision, bool) {
	return decision{reportReleased, "this assignment was removed from the node"}, removedAt(f)
}

// networkAwaited: a VM is never ordered without its network. One that the runtime has under this assignment goes on as it was ordered.
func networkAwaited(f facts) (decision, bool) {
	switch {
	case f.ensured || !f.network.awaited:
		return decision{}, false
	case f.status != nil && f.status.Assignment == f.vm.Status.Assignment:
		return decision{report, "the VM's network is not set on this connection yet"}, true
	case f.network.problem != nil:
		return decision{reportNetwork, "the VM's network cannot be set"}, true
	default:
		return decision{hold, "the VM's network is being set"}, true
	}
}

func specNotTold(f facts) (decision, bool) {
	return decision{ensure, "the runtime does not have the present spec"}, !f.ensured
}

func removedAt(f facts) bool {
	return f.status != nil && f.status.State == machine.Removed && f.status.Assignment >= f.vm.Status.Assignment
}

func isFinished(vm *v1alpha1.ImpVM) bool {
	return meta.IsStatusConditionTrue(vm.Status.Conditions, v1alpha1.ConditionFinished)
}
