package operator_test

import (
	"strings"
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

func reschedules(vm *v1alpha1.ImpVM) {
	persistent(vm)
	vm.Spec.RestartPolicy = &v1alpha1.RestartPolicy{Mode: v1alpha1.RestartReschedule}
}

// failedElsewhere is the report of a node on which a VM of mode reschedule has failed for the nth time, to be tried again at the time.
func failedElsewhere(n int32, at time.Time) func(*v1alpha1.ImpVMStatus) {
	return func(s *v1alpha1.ImpVMStatus) {
		s.DiskGeneration = 1
		s.Restart = &v1alpha1.RestartStatus{Attempts: n, NextTryAt: &metav1.MicroTime{Time: at}, Elsewhere: true}
		s.LastFailure = &v1alpha1.LastFailure{Reason: "GuestPanic", Message: "the guest's kernel panicked", Time: metav1.MicroTime{Time: at}, Incarnation: 1}
		said(s, v1alpha1.ConditionStarted, metav1.ConditionFalse, v1alpha1.ReasonCrashLoopBackOff, "GuestPanic", time.Now())
	}
}

// released is the report of a node on which nothing of assignment 1 is left; what it said before of the VM's history stands.
func (r *rig) released(name string) {
	r.t.Helper()
	before := r.get(name).Status
	r.report(name, func(s *v1alpha1.ImpVMStatus) {
		s.ReleasedAssignment, s.Restart, s.LastFailure, s.DiskGeneration = 1, before.Restart, before.LastFailure, before.DiskGeneration
	})
}

// edit changes the spec as a user does.
func (r *rig) edit(name string, change func(*v1alpha1.ImpVM)) {
	r.t.Helper()
	vm := r.get(name)
	change(vm)
	must(r.t, r.admin.Update(r.t.Context(), vm))
}

// taint sets the taints of a node.
func (r *rig) taint(node string, taints ...corev1.Taint) {
	r.t.Helper()
	object := &corev1.Node{}
	must(r.t, r.admin.Get(r.t.Context(), client.ObjectKey{Name: node}, object))
	before := object.DeepCopy()
	object.Spec.Taints = taints
	must(r.t, r.admin.Patch(r.t.Context(), object, client.MergeFrom(before)))
}

func evacuate() corev1.Taint {
	return corev1.Taint{Key: v1alpha1.TaintEvacuate, Effect: corev1.TaintEffectNoExecute}
}

func TestAVMThatIsToBeTriedElsewhereWaitsWithoutANodeAndGoesToAnother(t *testing.T) {
	r := newRig(t)
	r.class("small")
	first := r.node("a")
	r.vm("web", reschedules)
	r.reconcile("web")
	other := r.node("b", func(_ *corev1.Node, n *v1alpha1.ImpNode) {}) // as empty as the first will be
	at := r.clock.Now().Add(40 * time.Second).Truncate(time.Second)
	r.report("web", failedElsewhere(2, at))
	r.writes.take()
	r.reconcile("web")
	r.expect("PATCH impvms/web/status")
	if got := r.get("web").Status.Release; got == nil || *got != (v1alpha1.Release{Assignment: 1, Reason: "Rescheduled"}) {
		t.Fatalf("the order is %+v", got)
	}
	r.reconcile("web")
	r.expect() // the node's turn
	r.released("web")
	r.writes.take()
	again := r.reconcile("web").RequeueAfter
	r.expect("PATCH impvms/web/status")
	waits := r.get("web").Status
	if waits.NodeName != "" || waits.Resources != nil || waits.Restart == nil || waits.Restart.Attempts != 2 {
		t.Fatalf("it waits as %+v", waits)
	}
	r.expectCondition("web", v1alpha1.ConditionReady, "False CrashLoopBackOff: GuestPanic: the guest's kernel panicked; placed anew at "+at.UTC().Format(time.RFC3339))
	if again <= 0 || again > 40*time.Second {
		t.Errorf("it is looked at again after %s", again)
	}
	r.clock.SetTime(at.Add(-time.Millisecond))
	r.beat(first)
	r.beat(other)
	r.observe()
	r.reconcile("web")
	r.expect()
	r.clock.SetTime(at)
	r.reconcile("web")
	if got := r.get("web").Status; got.NodeName != other || got.Assignment != 2 || got.Restart == nil || got.Restart.Attempts != 2 || got.Release != nil {
		t.Errorf("it is on %q with assignment %d, history %+v", got.NodeName, got.Assignment, got.Restart)
	}
	r.expectEvents("web", "Normal Placed", "Normal Rescheduled", "Warning DiskDiscarded", "Normal Placed")
}

func TestAVMThatFailedOnTheOnlyNodeIsTriedThereAgain(t *testing.T) {
	r := newRig(t)
	r.class("small")
	only := r.node("a")
	r.vm("web", reschedules)
	r.reconcile("web")
	r.report("web", failedElsewhere(1, r.clock.Now()))
	r.reconcile("web")
	r.released("web")
	r.reconcile("web")
	if got := r.get("web").Status; got.NodeName != only || got.Assignment != 2 {
		t.Errorf("it is on %q with assignment %d", got.NodeName, got.Assignment)
	}
}

func TestWhoWantsAVMStoppedFindsItStoppedWhereverItWaits(t *testing.T) {
	r := newRig(t)
	r.class("small")
	r.node("a")
	r.vm("web", reschedules, func(vm *v1alpha1.ImpVM) { vm.Spec.DesiredState = v1alpha1.DesiredStopped })
	r.reconcile("web")
	r.expectCondition("web", v1alpha1.ConditionReady, "False Stopped: spec.desiredState is Stopped")
	if got := r.get("web").Status; got.NodeName != "" || got.Phase != v1alpha1.PhaseStopped {
		t.Fatalf("it is %s on %q", got.Phase, got.NodeName)
	}
	r.edit("web", func(vm *v1alpha1.ImpVM) { vm.Spec.DesiredState = v1alpha1.DesiredRunning })
	r.reconcile("web")
	if r.get("web").Status.NodeName == "" {
		t.Fatal("it was not placed")
	}
	// While it waits for its next try.
	r.report("web", failedElsewhere(1, r.clock.Now().Add(time.Minute)))
	r.reconcile("web")
	r.released("web")
	r.edit("web", func(vm *v1alpha1.ImpVM) { vm.Spec.DesiredState = v1alpha1.DesiredStopped })
	r.reconcile("web")
	r.clock.Step(2 * time.Minute)
	r.reconcile("web")
	if got := r.get("web").Status; got.NodeName != "" || got.Phase != v1alpha1.PhaseStopped || got.Restart.Attempts != 1 {
		t.Errorf("it is %s on %q, history %+v", got.Phase, got.NodeName, got.Restart)
	}
}

func TestAVMThatIsWantedStoppedKeepsItsNode(t *testing.T) {
	r, node := placed(t, reschedules)
	r.edit("web", func(vm *v1alpha1.ImpVM) { vm.Spec.DesiredState = v1alpha1.DesiredStopped })
	r.report("web", failedElsewhere(1, r.clock.Now()))
	r.writes.take()
	r.reconcile("web")
	if got := r.get("web").Status; got.NodeName != node || got.Release != nil {
		t.Errorf("it is on %q, ordered to leave: %+v", got.NodeName, got.Release)
	}
}

func TestAResetEndsTheWaitOfAVMWithoutANode(t *testing.T) {
	r := newRig(t)
	r.class("small")
	r.node("a")
	r.vm("web", reschedules)
	r.reconcile("web")
	r.report("web", failedElsewhere(3, r.clock.Now().Add(time.Hour)))
	r.reconcile("web")
	r.released("web")
	r.reconcile("web")
	r.edit("web", func(vm *v1alpha1.ImpVM) { vm.Annotations = map[string]string{v1alpha1.AnnotationRestartReset: "now"} })
	r.reconcile("web")
	if got := r.get("web").Status; got.NodeName == "" {
		t.Errorf("it waits still: %+v", got.Conditions)
	}
}

func TestAClassesPolicyReachesItsVMsAtOnce(t *testing.T) {
	r := newRig(t)
	r.node("a")
	policy := &v1alpha1.RestartPolicy{Backoff: &v1alpha1.RestartBackoff{MaxRetries: ptr.To(int32(3))}, OnExhaustion: v1alpha1.OnExhaustionManualReset}
	name := r.class("small", func(c *v1alpha1.ImpVMClass) { c.Spec.RestartPolicy = policy })
	r.vm("web", persistent)
	r.vm("job")
	r.reconcile("web")
	r.reconcile("job")
	if got := r.get("web").Status.Resources.RestartPolicy; got == nil || got.OnExhaustion != v1alpha1.OnExhaustionManualReset || *got.Backoff.MaxRetries != 3 {
		t.Errorf("the policy of a persistent VM is %+v", got)
	}
	if got := r.get("job").Status.Resources.RestartPolicy; got != nil {
		t.Errorf("the policy of an ephemeral VM is %+v", got)
	}
	class := &v1alpha1.ImpVMClass{}
	must(t, r.admin.Get(t.Context(), client.ObjectKey{Name: name}, class))
	class.Spec.RestartPolicy = nil
	must(t, r.admin.Update(t.Context(), class))
	r.reconcile("web")
	if got := r.get("web").Status.Resources.RestartPolicy; got != nil {
		t.Errorf("after the class has lost its policy: %+v", got)
	}
}

func TestEvacuation(t *testing.T) {
	t.Run("a VM that may be moved is moved", func(t *testing.T) {
		r, node := placed(t, reschedules)
		other := r.node("b")
		r.taint(node, evacuate())
		r.report("web", running)
		r.reconcile("web")
		if got := r.get("web").Status.Release; got == nil || got.Reason != "Evacuated" {
			t.Fatalf("the order is %+v", got)
		}
		r.released("web")
		r.reconcile("web")
		if got := r.get("web").Status; got.NodeName != other || got.Release != nil {
			t.Errorf("it is on %q", got.NodeName)
		}
		r.expectEvents("web", "Normal Placed", "Normal Evacuated", "Warning DiskDiscarded", "Normal Placed")
	})
	t.Run("one whose restarts are in-place stands still until the taint is gone", func(t *testing.T) {
		r, node := placed(t, persistent)
		r.node("b")
		r.report("web", running)
		r.taint(node, evacuate())
		r.reconcile("web")
		hold := r.get("web").Status.Hold
		if hold == nil || hold.Reason != "Evacuated" || !strings.Contains(hold.Message, node) || !strings.Contains(hold.Message, v1alpha1.TaintEvacuate) {
			t.Fatalf("the order is %+v", hold)
		}
		r.writes.take()
		r.reconcile("web")
		r.expect()
		r.taint(node)
		r.reconcile("web")
		if got := r.get("web").Status; got.Hold != nil || got.NodeName != node || got.Assignment != 1 {
			t.Errorf("it is on %q with %+v", got.NodeName, got.Hold)
		}
		r.expectEvents("web", "Normal Placed", "Warning Evacuated")
	})
	t.Run("a one-shot is left to end", func(t *testing.T) {
		r, node := placed(t)
		r.report("web", running)
		r.taint(node, evacuate())
		r.writes.take()
		r.reconcile("web")
		r.expect()
	})
	t.Run("a cordon moves nothing", func(t *testing.T) {
		r, node := placed(t, reschedules)
		r.report("web", running)
		r.taint(node, corev1.Taint{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule})
		r.writes.take()
		r.reconcile("web")
		r.expect()
	})
	t.Run("a taint that is tolerated for some time acts after it", func(t *testing.T) {
		r, node := placed(t, persistent, func(vm *v1alpha1.ImpVM) {
			vm.Spec.Tolerations = []corev1.Toleration{{Key: v1alpha1.TaintEvacuate, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: ptr.To(int64(30))}}
		})
		r.report("web", running)
		taint := evacuate()
		taint.TimeAdded = &metav1.Time{Time: r.clock.Now().Truncate(time.Second)}
		r.taint(node, taint)
		if again := r.reconcile("web").RequeueAfter; again <= 0 || again > 30*time.Second {
			t.Errorf("it is looked at again after %s", again)
		}
		if r.get("web").Status.Hold != nil {
			t.Fatal("it is held at once")
		}
		r.clock.Step(31 * time.Second)
		r.reconcile("web")
		if r.get("web").Status.Hold == nil {
			t.Error("it goes on")
		}
	})
}
