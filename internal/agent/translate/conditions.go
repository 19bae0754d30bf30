package translate

import (
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
)

// Reasons that only the agent gives. Those shared with the operator are in v1alpha1.
const (
	ReasonReleased    = "Released"    // a stage that is undone: nothing of it is left on the node
	ReasonUpToDate    = "UpToDate"    // RestartRequired=False
	ReasonSpecChanged = "SpecChanged" // RestartRequired=True
)

// stage is a condition with the time since when it has been so, where the runtime knows it.
type stage struct {
	metav1.Condition
	at time.Time
}

func (s stage) since(now time.Time) time.Time {
	if s.at.IsZero() {
		return now
	}
	return s.at
}

// stages gives the conditions that the agent always reports, in the order in which they become true.
func stages(vm *v1alpha1.ImpVM, o Observation, final *machine.Exit) []stage {
	var out []stage
	switch {
	case o.Released && o.Problem == nil:
		out = all(metav1.ConditionFalse, ReasonReleased, "nothing of the VM is left on node "+vm.Status.NodeName)
	case o.Status != nil:
		out = fromChecks(o.Status)
	default:
		out = all(metav1.ConditionUnknown, v1alpha1.ReasonPending, "waiting for the node's runtime")
	}
	if final != nil {
		for i := range out {
			if out[i].Type == v1alpha1.ConditionStarted || out[i].Type == v1alpha1.ConditionGuestReady {
				out[i] = ended(out[i].Type, final)
			}
		}
	}
	if o.Problem != nil {
		putProblem(out, o)
	}
	out = append(out, restartRequired(o.Status))
	for i := range out {
		out[i].ObservedGeneration = vm.Generation
		if o.Status != nil {
			out[i].ObservedGeneration = o.Status.Generation
		}
	}
	return out
}

// putProblem says the problem where it belongs. Where the runtime has nothing of the VM, the stages before that one wait for the same
// reason: it must be the one that Ready shows, and Ready shows the first stage that is not true.
func putProblem(out []stage, o Observation) {
	for i := range out {
		here := out[i].Type == conditionOf(o.Problem.Reason)
		if here || o.Status == nil {
			out[i].Reason, out[i].Message = string(o.Problem.Reason), Message(o.Problem.Error())
		}
		if here {
			out[i].Status, out[i].at = metav1.ConditionFalse, time.Time{}
			return
		}
	}
}

func stageTypes() []string {
	return []string{
		v1alpha1.ConditionDiskReady, v1alpha1.ConditionNetworkReady, v1alpha1.ConditionStarted, v1alpha1.ConditionGuestReady,
	}
}

func all(status metav1.ConditionStatus, reason, message string) []stage {
	var out []stage
	for _, t := range stageTypes() {
		out = append(out, stage{Condition: metav1.Condition{Type: t, Status: status, Reason: reason, Message: message}})
	}
	return out
}

// conditionOf names the stage that a failure belongs to.
func conditionOf(r fault.Reason) string {
	switch r {
	case fault.ImagePullFailed, fault.DiskFailed, fault.WaitingForSecrets:
		return v1alpha1.ConditionDiskReady
	case fault.NetworkSetupFailed:
		return v1alpha1.ConditionNetworkReady
	default:
		return v1alpha1.ConditionStarted
	}
}

func fromChecks(st *machine.Status) []stage {
	out := []stage{
		fromCheck(v1alpha1.ConditionDiskReady, st.Disk, "the image and the VM's own disk are ready", "preparing the image and the disk"),
		fromCheck(v1alpha1.ConditionNetworkReady, st.Network, "the guest's interfaces are ready", "waiting for the disk"),
		fromCheck(v1alpha1.ConditionStarted, st.Started, "the workload is running", "waiting for the guest to start"),
		fromCheck(v1alpha1.ConditionGuestReady, st.GuestReady, "the guest is ready", "waiting for the guest to be ready"),
	}
	if crashLooping(st) {
		out[2].Reason = v1alpha1.ReasonCrashLoopBackOff
	}
	return out
}

func fromCheck(conditionType string, c machine.Check, done, waiting string) stage {
	s := stage{at: c.Since, Condition: metav1.Condition{
		Type: conditionType, Status: metav1.ConditionUnknown, Reason: string(c.Reason), Message: Message(c.Message),
	}}
	reason, message := v1alpha1.ReasonPending, waiting
	switch {
	case c.OK == nil:
	case *c.OK:
		s.Status, reason, message = metav1.ConditionTrue, v1alpha1.ReasonDone, done
	default:
		s.Status = metav1.ConditionFalse
	}
	if s.Reason == "" {
		s.Reason = reason
	}
	if s.Message == "" {
		s.Message = message
	}
	return s
}

// crashLooping: a workload that failed, once is enough, is told apart from one that ended as it may and is started again.
func crashLooping(st *machine.Status) bool {
	return st.Started.Reason == machine.ReasonBackingOff && st.History.Attempts >= 1
}

func ended(conditionType string, final *machine.Exit) stage {
	return stage{at: final.At, Condition: metav1.Condition{
		Type: conditionType, Status: metav1.ConditionFalse, Reason: string(final.Verdict), Message: exitMessage(final),
	}}
}

// exitMessage is never empty and holds the exit code where there is one, so that REASON and message suffice without -o yaml.
func exitMessage(e *machine.Exit) string {
	if m := Message(e.Message); m != "" {
		return m
	}
	switch {
	case e.Code != nil:
		return fmt.Sprintf("the workload exited with code %d", *e.Code)
	case e.Verdict == machine.Stopped:
		return "the VM was stopped by order"
	default:
		return "the guest ended: " + string(e.Verdict)
	}
}

func restartRequired(st *machine.Status) stage {
	c := metav1.Condition{
		Type: v1alpha1.ConditionRestartRequired, Status: metav1.ConditionFalse,
		Reason: ReasonUpToDate, Message: "no change of the spec waits for a restart",
	}
	if st != nil && st.RestartRequired {
		c.Status, c.Reason = metav1.ConditionTrue, ReasonSpecChanged
		c.Message = "the running guest was started with an older spec; the change takes effect at its next start"
	}
	return stage{Condition: c}
}
