package operator_test

import (
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// placed gives a rig with the VM "web" placed on node a, and forgets the writes until then.
func placed(t *testing.T, options ...func(*v1alpha1.ImpVM)) (r *rig, node string) {
	t.Helper()
	r = newRig(t)
	node = r.node("a")
	r.class("small")
	r.vm("web", options...)
	r.reconcile("web")
	if r.get("web").Status.NodeName != node {
		t.Fatal("the VM was not placed")
	}
	r.writes.take()
	return r, node
}

func (r *rig) delete(name string) {
	r.t.Helper()
	must(r.t, r.admin.Delete(r.t.Context(), r.get(name)))
	r.clock.SetTime(time.Now()) // the API server stamps the deletion with its own
}

func TestADeletedVMGoesOnceItsNodeHasSaidThatNothingIsLeft(t *testing.T) {
	r, node := placed(t)
	r.report("web", running)
	r.delete("web")
	r.reconcile("web")
	r.expect("PATCH impvms/web/status")
	if got, want := r.get("web").Status.Release, (v1alpha1.Release{Assignment: 1, Reason: "Deleted"}); got == nil || *got != want {
		t.Errorf("the order is %+v", got)
	}
	r.reconcile("web")
	r.expect()
	r.report("web", func(s *v1alpha1.ImpVMStatus) { s.ReleasedAssignment = 0 })
	r.reconcile("web")
	r.expect()
	if got := r.get("web").Status; got.NodeName != node || got.Phase != v1alpha1.PhaseStopping {
		t.Errorf("it is %s on %q", got.Phase, got.NodeName)
	}
	r.report("web", func(s *v1alpha1.ImpVMStatus) { s.ReleasedAssignment = 1 })
	r.reconcile("web")
	r.expect("PATCH impvms/web")
	if r.get("web") != nil {
		t.Error("it is still there")
	}
	r.reconcile("web")
	r.expect()
}

func TestADeletedVMThatWasNeverPlacedGoesAtOnce(t *testing.T) {
	r := newRig(t)
	r.class("small")
	r.vm("web")
	r.reconcile("web") // no node
	r.writes.take()
	r.delete("web")
	if r.get("web") != nil {
		t.Error("it is still there, though nobody has anything to remove")
	}
}

func TestADeletedVMThatWasTakenOffItsNodeGoesAtOnce(t *testing.T) {
	r, _ := placed(t)
	r.report("web", noRoom(1))
	r.reconcile("web")
	r.delete("web")
	r.writes.take()
	r.reconcile("web")
	r.expect("PATCH impvms/web")
	if r.get("web") != nil {
		t.Error("it is still there")
	}
}

func TestAFinalizerOfSomebodyElseStays(t *testing.T) {
	r, _ := placed(t, func(vm *v1alpha1.ImpVM) { vm.Finalizers = []string{"example.com/theirs"} })
	r.report("web", func(s *v1alpha1.ImpVMStatus) { s.ReleasedAssignment = 1 })
	r.delete("web")
	r.reconcile("web")
	if got := r.get("web").Finalizers; len(got) != 1 || got[0] != "example.com/theirs" {
		t.Errorf("finalizers are %v", got)
	}
	r.writes.take()
	r.reconcile("web")
	r.expect()
}

func TestADeletedVMOnASilentNodeGoesAfterFiveMinutes(t *testing.T) {
	r, _ := placed(t)
	r.delete("web")
	r.reconcile("web")
	r.expect("PATCH impvms/web/status")
	for range 5 {
		r.clock.Step(time.Minute)
		if again := r.reconcile("web").RequeueAfter; again <= 0 || again > 5*time.Minute {
			t.Errorf("looks again after %v", again)
		}
	}
	r.expect()
	if r.get("web") == nil {
		t.Fatal("it went while its node may still have spoken")
	}
	r.clock.Step(time.Minute)
	r.reconcile("web")
	r.expect("PATCH impvms/web")
	r.expectEvents("web", "Normal Placed", "Warning AgentTimeout")
	if r.get("web") != nil {
		t.Error("it is still there")
	}
}

func TestADeletedVMWaitsForANodeThatSpeaksHoweverLongItTakes(t *testing.T) {
	r, node := placed(t)
	r.delete("web")
	for range 30 {
		r.clock.Step(30 * time.Second)
		r.beat(node)
		r.reconcile("web")
	}
	r.expect("PATCH impvms/web/status")
}

func TestADeletedVMOnARestartedHostWaitsForTheHostToRemoveIt(t *testing.T) {
	r, node := placed(t, persistent)
	r.reboot(node, time.Minute)
	r.delete("web")
	r.silent()
	r.reconcile("web")
	r.expect("PATCH impvms/web/status")
	if vm := r.get("web"); vm == nil || vm.Status.Release == nil {
		t.Fatal("it went, or without an order, and the host would start it again by its record")
	}
	r.clock.Step(6 * time.Minute)
	r.reconcile("web")
	r.expect("PATCH impvms/web")
	if r.get("web") != nil {
		t.Error("it waits for longer than for a node that is merely silent")
	}
}

func TestADeletedVMOnANodeThatIsProvedGoneGoesAtOnce(t *testing.T) {
	for name, proof := range proofs() {
		if name == "its host was restarted" {
			continue // it is expected back
		}
		t.Run(name, func(t *testing.T) {
			r, node := placed(t)
			proof(r, node)
			r.delete("web")
			r.clock.Step(41 * time.Second)
			r.reconcile("web")
			r.expect("PATCH impvms/web")
			if r.get("web") != nil {
				t.Error("it is still there")
			}
		})
	}
}

// proofs that a node runs nothing any more, besides its silence.
func proofs() map[string]func(r *rig, node string) {
	change := func(r *rig, node string, change func(*corev1.Node)) *corev1.Node {
		n := &corev1.Node{}
		must(r.t, r.admin.Get(r.t.Context(), client.ObjectKey{Name: node}, n))
		change(n)
		return n
	}
	return map[string]func(r *rig, node string){
		"its Node object is gone": func(r *rig, node string) {
			must(r.t, r.admin.Delete(r.t.Context(), change(r, node, func(*corev1.Node) {})))
		},
		"it carries the out-of-service taint": func(r *rig, node string) {
			must(r.t, r.admin.Update(r.t.Context(), change(r, node, func(n *corev1.Node) {
				n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{
					Key: corev1.TaintNodeOutOfService, Value: "nodeshutdown", Effect: corev1.TaintEffectNoExecute,
				})
			})))
		},
		"its host was restarted": func(r *rig, node string) { r.reboot(node, time.Minute) },
	}
}

// reboot has the kubelet tell of another boot; after is how much later than the agent's last word.
func (r *rig) reboot(node string, after time.Duration) {
	r.t.Helper()
	n := &corev1.Node{}
	must(r.t, r.admin.Get(r.t.Context(), client.ObjectKey{Name: node}, n))
	n.Status.NodeInfo.BootID = "boot-2"
	n.Status.Conditions[0].LastHeartbeatTime = metav1.NewTime(r.clock.Now().Add(after))
	must(r.t, r.admin.Status().Update(r.t.Context(), n))
}

func TestAFinishedVMIsDeletedAfterItsTime(t *testing.T) {
	r, node := placed(t, func(vm *v1alpha1.ImpVM) { vm.Spec.TTLSecondsAfterFinished = ptr.To[int32](60) })
	r.report("web", succeeded)
	if again := r.reconcile("web").RequeueAfter; again <= 50*time.Second || again > 61*time.Second {
		t.Errorf("looks again after %v", again)
	}
	r.expect()
	r.clock.Step(62 * time.Second)
	r.beat(node)
	r.reconcile("web")
	r.expect("DELETE impvms/web")
	if vm := r.get("web"); vm == nil || vm.DeletionTimestamp == nil {
		t.Error("it was not deleted, or without its node")
	}
}

func TestOnlyPersistentVMsMoveAndOnlyOffANodeThatIsNotExpectedBack(t *testing.T) {
	tests := map[string]struct {
		proof string
		vm    func(*v1alpha1.ImpVM)
		moves bool
	}{
		"a persistent one off a deleted node":            {"its Node object is gone", persistent, true},
		"a persistent one off an out-of-service node":    {"it carries the out-of-service taint", persistent, true},
		"not a persistent one off a host that restarted": {"its host was restarted", persistent, false},
		"not a one-shot": {"its Node object is gone", func(*v1alpha1.ImpVM) {}, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			r, node := placed(t, test.vm)
			r.report("web", running)
			b := r.node("b")
			proofs()[test.proof](r, node)
			r.clock.Step(30 * time.Second)
			r.beat(b)
			r.reconcile("web")
			r.expect() // the proof alone, with an agent that was heard a moment ago, moves nothing
			r.clock.Step(11 * time.Second)
			r.reconcile("web")
			if !test.moves {
				r.expect()
				return
			}
			r.expect("PATCH impvms/web/status")
			if s := r.get("web").Status; s.NodeName != b || s.Assignment != 2 {
				t.Errorf("it is on %q with assignment %d", s.NodeName, s.Assignment)
			}
			r.expectEvents("web", "Normal Placed", "Warning NodeLost", "Warning DiskDiscarded", "Normal Placed")
		})
	}
}
