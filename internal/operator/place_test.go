package operator_test

import (
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/fault"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

func TestAVMIsPlacedWithTwoWritesAndOneEvent(t *testing.T) {
	r := newRig(t)
	node := r.node("a")
	r.class("small")
	r.vm("web")
	r.reconcile("web")
	r.expect("PATCH impvms/web", "PATCH impvms/web/status")
	r.expectEvents("web", "Normal Placed")
	r.expectCondition("web", v1alpha1.ConditionScheduled, "True Placed: placed on "+node)
	r.expectCondition("web", v1alpha1.ConditionReady, "False Pending: waiting for the node to prepare the disk")
	vm := r.get("web")
	want := v1alpha1.Resources{VCPU: 1, MemoryMiB: 512, DiskGiB: 4, Arch: "amd64", OverheadMiB: 64}
	if s := vm.Status; s.NodeName != node || s.Assignment != 1 || s.PlacedAt == nil || s.Phase != v1alpha1.PhaseStarting || *s.Resources != want {
		t.Errorf("status is %+v", s)
	}
	if len(vm.Finalizers) != 1 || vm.Finalizers[0] != v1alpha1.Finalizer {
		t.Errorf("finalizers are %v", vm.Finalizers)
	}
	if len(r.placed) != 1 {
		t.Errorf("the time to the placement was observed %d times", len(r.placed))
	}
	r.reconcile("web")
	r.report("web", running)
	r.reconcile("web")
	r.expect()
	r.expectCondition("web", v1alpha1.ConditionReady, "True Running: the guest is running and ready")
}

func TestAVMWithoutAClassWaitsAndIsRepairedWithoutBeingRecreated(t *testing.T) {
	r := newRig(t)
	node := r.node("a")
	r.vm("web", func(vm *v1alpha1.ImpVM) { vm.Spec.ClassRef, vm.Spec.Lifecycle = nil, v1alpha1.LifecyclePersistent })
	r.reconcile("web")
	r.reconcile("web")
	r.expect("PATCH impvms/web/status")
	r.expectEvents("web", "Warning InvalidSpec")
	r.expectCondition("web", v1alpha1.ConditionReady, "False InvalidSpec: spec.classRef is missing: name an ImpVMClass")

	vm := r.get("web")
	vm.Spec.ClassRef = &v1alpha1.ClassReference{Name: r.name("small")}
	must(t, r.admin.Update(t.Context(), vm))
	r.clock.Step(time.Minute)
	r.beat(node)
	r.reconcile("web")
	r.expectCondition("web", v1alpha1.ConditionScheduled,
		`False InvalidSpec: spec.classRef names ImpVMClass "`+r.name("small")+`", which does not exist: create it, or name another`)
	r.class("small")
	r.writes.take()
	r.reconcile("web")
	r.expect("PATCH impvms/web", "PATCH impvms/web/status")
	r.expectCondition("web", v1alpha1.ConditionScheduled, "True Placed: placed on "+node)
}

func TestAVMThatFitsNowhereIsToldWhyAndNotOftenerThanEveryHalfMinute(t *testing.T) {
	r := newRig(t)
	a := r.node("a", func(n *corev1.Node, _ *v1alpha1.ImpNode) { n.Spec.Unschedulable = true })
	b := r.node("b", func(_ *corev1.Node, i *v1alpha1.ImpNode) { i.Status.Budget.MemoryMiB = 100 })
	r.class("small")
	r.vm("web")
	if again := r.reconcile("web").RequeueAfter; again < time.Minute {
		t.Errorf("looks again after %v", again)
	}
	r.expect("PATCH impvms/web/status")
	r.expectEvents("web", "Warning NoNodeFits")
	r.expectCondition("web", v1alpha1.ConditionScheduled,
		"False NoNodeFits: "+a+": cordoned; "+b+": 576 MiB of memory needed, budget is 100")
	r.expectCondition("web", v1alpha1.ConditionReady,
		"False NoNodeFits: "+a+": cordoned; "+b+": 576 MiB of memory needed, budget is 100")

	r.setBudget(b, 200)
	if again := r.reconcile("web").RequeueAfter; again > 30*time.Second {
		t.Errorf("the new words are told after %v only", again)
	}
	r.expect()
	r.clock.Step(31 * time.Second)
	r.beat(a)
	r.beat(b)
	r.reconcile("web")
	r.expect("PATCH impvms/web/status")

	r.setBudget(b, 4096)
	r.reconcile("web")
	r.expect("PATCH impvms/web", "PATCH impvms/web/status")
	r.expectEvents("web", "Warning NoNodeFits", "Warning NoNodeFits", "Normal Placed")
}

func (r *rig) setBudget(node string, memory int64) {
	r.t.Helper()
	imp := &v1alpha1.ImpNode{}
	must(r.t, r.admin.Get(r.t.Context(), client.ObjectKey{Name: node}, imp))
	imp.Status.Budget.MemoryMiB = memory
	must(r.t, r.admin.Status().Update(r.t.Context(), imp))
}

func TestAFinishedVMFreesItsPlaceAndIsNeverPlacedAgain(t *testing.T) {
	r := newRig(t)
	r.node("a", func(_ *corev1.Node, i *v1alpha1.ImpNode) { i.Status.Budget.VCPU = 1 })
	r.class("small")
	r.vm("first")
	r.vm("second")
	r.reconcile("first")
	r.reconcile("second")
	r.expectCondition("second", v1alpha1.ConditionScheduled, "False NoNodeFits: "+r.name("a")+": 1 short of vcpu")
	r.report("first", succeeded)
	r.report("first", func(s *v1alpha1.ImpVMStatus) { succeeded(s); s.ReleasedAssignment = 1 })
	r.writes.take()
	r.reconcile("first")
	r.expect()
	r.reconcile("second")
	r.expect("PATCH impvms/second", "PATCH impvms/second/status")
	if vm := r.get("first"); vm.Status.Assignment != 1 || vm.Status.Phase != v1alpha1.PhaseSucceeded {
		t.Errorf("the finished VM is %+v", vm.Status)
	}
}

func noRoom(assignment int64) func(*v1alpha1.ImpVMStatus) {
	return func(s *v1alpha1.ImpVMStatus) {
		said(s, v1alpha1.ConditionStarted, metav1.ConditionFalse, string(fault.NoCapacity), "the budget is spent", time.Now())
		s.ReleasedAssignment = assignment
	}
}

func TestAVMThatItsNodeHasNoRoomForIsPlacedElsewhereByOneWrite(t *testing.T) {
	r := newRig(t)
	a, b := r.node("a"), r.node("b")
	r.class("small")
	r.vm("once")
	r.reconcile("once")
	if got := r.get("once").Status.NodeName; got != a {
		t.Fatalf("placed on %s first", got)
	}
	r.report("once", noRoom(1))
	r.writes.take()
	r.reconcile("once")
	r.expect("PATCH impvms/once/status")
	if s := r.get("once").Status; s.NodeName != b || s.Assignment != 2 {
		t.Errorf("now on %q with assignment %d", s.NodeName, s.Assignment)
	}
	r.report("once", noRoom(2))
	result := r.reconcile("once")
	r.expectCondition("once", v1alpha1.ConditionScheduled, "False NoNodeFits: "+
		a+": gave the VM back for want of capacity; "+b+": gave the VM back for want of capacity")
	if s := r.get("once").Status; s.NodeName != "" || s.Resources != nil || s.Assignment != 2 || s.Phase != v1alpha1.PhaseStarting {
		t.Errorf("unbound it is %+v", s)
	}
	if result.RequeueAfter <= 0 || result.RequeueAfter > 10*time.Second {
		t.Errorf("looks again after %v", result.RequeueAfter)
	}
	r.clock.Step(11 * time.Second)
	r.reconcile("once")
	if s := r.get("once").Status; s.NodeName == "" || s.Assignment != 3 {
		t.Errorf("after its time it is on %q with assignment %d", s.NodeName, s.Assignment)
	}
}

func TestAOneShotThatWasStartedIsNotPlacedAgainEvenIfItsNodeGivesItUp(t *testing.T) {
	r := newRig(t)
	r.node("a")
	r.node("b")
	r.class("small")
	r.vm("once")
	r.reconcile("once")
	r.report("once", func(s *v1alpha1.ImpVMStatus) { running(s); s.ReleasedAssignment = 1 })
	r.writes.take()
	r.reconcile("once")
	r.expect()
}

func TestAProbeOfTheClassFollowsAtOnce(t *testing.T) {
	r := newRig(t)
	r.node("a")
	name := r.class("small")
	r.vm("web")
	r.reconcile("web")
	class := &v1alpha1.ImpVMClass{}
	must(t, r.admin.Get(t.Context(), client.ObjectKey{Name: name}, class))
	class.Spec.Probes = &v1alpha1.Probes{ReadinessProbe: &v1alpha1.ReadinessProbe{HTTP: v1alpha1.HTTPGet{Path: "/ready", Port: 80}}}
	must(t, r.admin.Update(t.Context(), class))
	r.writes.take()
	r.reconcile("web")
	r.reconcile("web")
	r.expect("PATCH impvms/web/status")
	if probe := r.get("web").Status.Resources.ReadinessProbe; probe == nil || probe.HTTP.Port != 80 || probe.FailureThreshold != 3 {
		t.Errorf("the probe is %+v", probe)
	}
	must(t, r.admin.Delete(t.Context(), class))
	r.reconcile("web")
	r.expect() // a VM that has a node goes on without its class
}

func TestAnotherClassOfAPersistentVMIsTakenIfItsNodeHasRoom(t *testing.T) {
	r := newRig(t)
	node := r.node("a")
	r.class("small")
	r.class("large", func(c *v1alpha1.ImpVMClass) { c.Spec.MemoryMiB = 2048 })
	r.class("huge", func(c *v1alpha1.ImpVMClass) { c.Spec.MemoryMiB = 8192 })
	r.vm("web", persistent)
	r.reconcile("web")
	for _, test := range []struct {
		class  string
		memory int64
		told   string
	}{
		{"large", 2048, "placed on " + node},
		{"huge", 2048, "placed on " + node + " with its earlier size; ImpVMClass " + r.name("huge") +
			" has no room there (" + node + ": 8256 MiB of memory needed, budget is 4096)"},
		{"small", 512, "placed on " + node},
	} {
		vm := r.get("web")
		vm.Spec.ClassRef.Name = r.name(test.class)
		must(t, r.admin.Update(t.Context(), vm))
		r.writes.take()
		r.reconcile("web")
		r.reconcile("web")
		r.expect("PATCH impvms/web/status")
		r.expectCondition("web", v1alpha1.ConditionScheduled, "True Placed: "+test.told)
		if got := r.get("web").Status.Resources.MemoryMiB; got != test.memory {
			t.Errorf("class %s: %d MiB", test.class, got)
		}
	}
}

func TestAPersistentVMWhoseClassIsMissingGoesOnAndSaysSo(t *testing.T) {
	r := newRig(t)
	node := r.node("a")
	name := r.class("small")
	r.vm("web", persistent)
	r.reconcile("web")
	r.report("web", running)
	vm := r.get("web")
	vm.Spec.ClassRef.Name = r.name("typo")
	must(t, r.admin.Update(t.Context(), vm))
	r.writes.take()
	r.reconcile("web")
	r.reconcile("web")
	r.expect("PATCH impvms/web/status")
	r.expectEvents("web", "Normal Placed", "Warning InvalidSpec")
	r.expectCondition("web", v1alpha1.ConditionScheduled, "True InvalidSpec: placed on "+node+
		` with what its class said before; spec.classRef names ImpVMClass "`+r.name("typo")+`", which does not exist: create it, or name another`)
	r.expectCondition("web", v1alpha1.ConditionReady, "True Running: the guest is running and ready")

	vm = r.get("web")
	vm.Spec.ClassRef.Name = name
	must(t, r.admin.Update(t.Context(), vm))
	r.reconcile("web")
	r.expectCondition("web", v1alpha1.ConditionScheduled, "True Placed: placed on "+node)
}

func TestAPinWinsAndATolerationIsHonoured(t *testing.T) {
	r := newRig(t)
	r.node("a")
	b := r.node("b", func(n *corev1.Node, _ *v1alpha1.ImpNode) {
		n.Spec.Taints = []corev1.Taint{{Key: "gpu", Effect: corev1.TaintEffectNoSchedule}}
	})
	r.class("small")
	r.vm("pinned", func(vm *v1alpha1.ImpVM) { vm.Spec.NodeName = b })
	r.reconcile("pinned")
	r.expectCondition("pinned", v1alpha1.ConditionScheduled, "False NoNodeFits: "+b+": taint gpu:NoSchedule not tolerated")
	r.vm("tolerant", func(vm *v1alpha1.ImpVM) {
		vm.Spec.NodeName = b
		vm.Spec.Tolerations = []corev1.Toleration{{Key: "gpu", Operator: corev1.TolerationOpExists}}
	})
	r.reconcile("tolerant")
	r.expectCondition("tolerant", v1alpha1.ConditionScheduled, "True Placed: placed on "+b)
}
