package translate

import (
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/condition"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/restart"
)

// Observation is what the agent knows of a VM that is bound to its node, at one moment.
type Observation struct {
	// Status of this UID and assignment at the runtime; nil when the runtime has none.
	Status *machine.Status
	// Problem keeps the agent from ordering the VM, or is the runtime's refusal.
	Problem *fault.Error
	// Released says that nothing of the present assignment is left on the node, and nothing of it will come.
	Released bool
	// Lost says that the one-shot's workload was started under this assignment and the node knows nothing of it any more.
	Lost bool
	// Unanswered says, when it is not empty, why what the VM does is not known at the moment. What was said last stands but for that.
	Unanswered string
	Now        time.Time
}

// Report gives a copy of vm whose status says all that imp-agent has to say, together with what the other writers said before. It
// is complete: Body takes the agent's whole part out of it. What was said of an earlier assignment, perhaps by another node, is gone.
func Report(vm *v1alpha1.ImpVM, o Observation) *v1alpha1.ImpVM {
	out := vm.DeepCopy()
	s := &out.Status
	before := vm.Status.Conditions
	finished := meta.IsStatusConditionTrue(before, v1alpha1.ConditionFinished)
	if vm.Status.ReportedAssignment != vm.Status.Assignment && !finished {
		forget(s)
		before = nil
	}
	s.ReportedAssignment = vm.Status.Assignment
	if o.Unanswered != "" && !finished {
		silent := metav1.Condition{
			Type: v1alpha1.ConditionGuestReady, Status: metav1.ConditionUnknown, Reason: v1alpha1.ReasonRuntimeTimeout,
			Message: o.Unanswered, ObservedGeneration: vm.Status.ObservedGeneration,
		}
		condition.Set(&s.Conditions, condition.Next(before, silent, o.Now))
		condition.Apply(out, o.Now)
		return out
	}
	final := finalExit(o)
	switch {
	case finished: // terminal is terminal, whatever the node believes
	case o.Status != nil && o.Status.State != machine.Removed:
		copyFacts(s, o.Status, vm.Spec.Lifecycle)
	case final != nil:
		copyExit(s, final, vm.Spec.Lifecycle)
		at := final.At
		s.FinishedAt = toMicro(&at)
	}
	if !finished {
		for _, c := range stages(vm, o, final) {
			condition.Set(&s.Conditions, condition.Next(before, c.Condition, c.since(o.Now)))
		}
		if final != nil {
			c := finishedCondition(final, vm.Generation)
			condition.Set(&s.Conditions, condition.Next(before, c, o.Now))
		}
	}
	if o.Released && s.ReleasedAssignment < vm.Status.Assignment {
		s.ReleasedAssignment = vm.Status.Assignment
	}
	condition.Apply(out, o.Now)
	return out
}

// forget clears what an earlier assignment's agent said. releasedAssignment stays: it speaks of the past and only grows.
func forget(s *v1alpha1.ImpVMStatus) {
	released := s.ReleasedAssignment
	restartHistory := s.Restart // travels with the VM: a crash loop does not begin anew by moving
	digest := s.ImageDigest     // pinned for the VM, not for the node
	replaceOwned(s, v1alpha1.ImpVMStatus{ReleasedAssignment: released, Restart: restartHistory, ImageDigest: digest})
	for _, t := range ownedConditions() {
		if t != v1alpha1.ConditionReady {
			meta.RemoveStatusCondition(&s.Conditions, t)
		}
	}
}

// copyFacts takes over what the runtime says in numbers and times.
func copyFacts(s *v1alpha1.ImpVMStatus, st *machine.Status, l v1alpha1.Lifecycle) {
	s.ObservedGeneration = st.Generation
	s.Incarnation, s.Run = st.Incarnation, st.Run
	s.RestartCount = st.Counters.Restarts
	s.Restart = restartStatus(st.History)
	s.StartedAt, s.FinishedAt = toMicro(st.StartedAt), toMicro(st.FinishedAt)
	if st.ImageDigest != "" {
		s.ImageDigest = st.ImageDigest
	}
	s.DiskGeneration = st.DiskGeneration
	s.Timings = timings(st.Timings)
	if st.LastExit != nil {
		copyExit(s, st.LastExit, l)
	}
	if f := st.LastFailure; f != nil {
		copyFailure(s, f, st.LastExit)
	}
	s.ExitCode = nil
	if st.State == machine.Finished && st.Final != nil {
		copyExit(s, st.Final, l)
		s.ExitCode = st.Final.Code
	}
}

func copyExit(s *v1alpha1.ImpVMStatus, e *machine.Exit, l v1alpha1.Lifecycle) {
	if len(e.ConsoleTail) > 0 {
		s.ConsoleTail = ConsoleTail(e.ConsoleTail)
	}
	if !isFailure(e.Verdict, l) {
		return
	}
	at := e.At
	s.LastFailure = &v1alpha1.LastFailure{
		Reason: string(e.Verdict), Message: exitMessage(e), Incarnation: e.Incarnation, ExitCode: e.Code,
	}
	if t := toMicro(&at); t != nil {
		s.LastFailure.Time = *t
	}
}

// copyFailure takes over the latest failure, of a workload or of a start that came to nothing. A later end, which was none, has the
// last word on the console.
func copyFailure(s *v1alpha1.ImpVMStatus, f *machine.Failure, last *machine.Exit) {
	s.LastFailure = &v1alpha1.LastFailure{
		Reason: string(f.Reason), Message: Message(f.Message), Incarnation: f.Incarnation, ExitCode: f.Code,
	}
	at := f.At
	if t := toMicro(&at); t != nil {
		s.LastFailure.Time = *t
	}
	if len(f.ConsoleTail) > 0 && (last == nil || !last.At.After(f.At)) {
		s.ConsoleTail = ConsoleTail(f.ConsoleTail)
	}
}

// isFailure: a persistent VM's guest may reboot or switch itself off; a one-shot must end with a report.
func isFailure(v machine.Verdict, l v1alpha1.Lifecycle) bool {
	switch v {
	case machine.Succeeded, machine.Stopped:
		return false
	case machine.GuestReboot, machine.GuestPowerOff:
		return l != v1alpha1.LifecyclePersistent
	default:
		return true
	}
}

func restartStatus(h restart.History) *v1alpha1.RestartStatus {
	r := v1alpha1.RestartStatus{
		Attempts: h.Attempts, StartFailures: h.StartFailures, LastFailureAt: toMicro(h.LastFailureAt),
		NextTryAt: toMicro(h.NextTryAt), ExhaustedAt: toMicro(h.ExhaustedAt), Elsewhere: h.Elsewhere, Reset: h.Reset,
	}
	if r == (v1alpha1.RestartStatus{}) {
		return nil
	}
	return &r
}

func timings(t machine.Timings) *v1alpha1.Timings {
	if t == (machine.Timings{}) {
		return nil
	}
	return &v1alpha1.Timings{
		PullMillis: t.Pull.Milliseconds(), DiskMillis: t.Disk.Milliseconds(), NetworkMillis: t.Network.Milliseconds(),
		VMMMillis: t.VMM.Milliseconds(), KernelMillis: t.Kernel.Milliseconds(), GuestMillis: t.Guest.Milliseconds(),
		WorkloadMillis: t.Workload.Milliseconds(),
	}
}

// finalExit is the end of a VM that will not run again.
func finalExit(o Observation) *machine.Exit {
	switch {
	case o.Status != nil && o.Status.State == machine.Finished && o.Status.Final != nil:
		return o.Status.Final
	case o.Lost:
		return &machine.Exit{
			Verdict: machine.Lost, At: o.Now,
			Message: "the workload was started once, and its node has no record of how it ended",
		}
	default:
		return nil
	}
}

// finishedCondition's reason is the verdict: a user tells a panic from a killed VMM without reading further.
func finishedCondition(e *machine.Exit, generation int64) metav1.Condition {
	return metav1.Condition{
		Type: v1alpha1.ConditionFinished, Status: metav1.ConditionTrue, Reason: string(e.Verdict),
		Message: exitMessage(e), ObservedGeneration: generation,
	}
}
