package agent

import (
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/machine"
)

// look has the VMs of a name looked at now and not when the queue's own time comes: an object of another node under the name does
// nothing, so the runtime's word stands for it.
func (w *world) look(vm *v1alpha1.ImpVM) { w.runtime.set(string(vm.UID)) }

func (w *world) nodeSays(reason string) func() bool {
	return func() bool {
		node := &v1alpha1.ImpNode{}
		if err := w.admin.Get(w.t.Context(), client.ObjectKey{Name: w.node}, node); err != nil {
			return false
		}
		c := meta.FindStatusCondition(node.Status.Conditions, v1alpha1.ConditionVMsAccountedFor)
		return c != nil && c.Reason == reason && (c.Status == metav1.ConditionTrue) == (reason == v1alpha1.ReasonAccountedFor)
	}
}

func (w *world) nodeEvent(reason, part string) func() bool {
	return func() bool {
		list := &corev1.EventList{}
		if err := w.admin.List(w.t.Context(), list, client.InNamespace(corev1.NamespaceDefault)); err != nil {
			return false
		}
		return slices.ContainsFunc(list.Items, func(e corev1.Event) bool {
			return e.Reason == reason && e.InvolvedObject.Name == w.node && strings.Contains(e.Message, part)
		})
	}
}

func TestAVMThatStaysAbsent(t *testing.T) {
	t.Run("is stopped after ten minutes, its disk is kept, and the ImpNode says where it is", func(t *testing.T) {
		w := newWorld(t)
		clk := clocktesting.NewFakeClock(time.Now())
		w.clock = clk
		w.start()
		vm := w.running("lone")
		w.running("other")
		w.vanish(vm)
		w.await("the absence is in the log", func() bool { return strings.Contains(w.log.String(), "VM goes on without an object") })
		clk.Step(absentLimit - time.Minute)
		w.look(vm)
		w.running("witness") // when this one is Ready, the other one has long been looked at
		if r := w.runtime.removals(); len(r) != 0 {
			t.Fatalf("removals before its time: %v", r)
		}
		clk.Step(2 * time.Minute)
		w.look(vm)
		w.await("it is removed", func() bool { return w.runtime.state(string(vm.UID)) == machine.Removed })
		if k := w.runtime.kept(); len(k) != 1 || !k[0] {
			t.Errorf("disks kept: %v", k)
		}
		w.await("the event about the ImpNode", w.nodeEvent(v1alpha1.ReasonVMAbsent, "/lone ("+string(vm.UID)+")"))
	})

	t.Run("goes on with most others of its node, which the ImpNode says until the objects are plausible again", func(t *testing.T) {
		w := newWorld(t)
		clk := clocktesting.NewFakeClock(time.Now())
		w.clock = clk
		w.start()
		var gone []*v1alpha1.ImpVM
		for _, name := range []string{"one", "two", "three"} {
			gone = append(gone, w.running(name))
		}
		for _, vm := range gone {
			w.vanish(vm)
		}
		w.await("the ImpNode says so", w.nodeSays(v1alpha1.ReasonSuspiciousList))
		clk.Step(2 * absentLimit)
		for _, vm := range gone {
			w.look(vm)
		}
		for _, name := range []string{"four", "five", "six"} {
			w.running(name)
		}
		clk.Step(leaseEvery)
		w.await("the list is plausible", w.nodeSays(v1alpha1.ReasonAccountedFor))
		for _, vm := range gone {
			w.look(vm)
		}
		w.running("witness")
		if r := w.runtime.removals(); len(r) != 0 {
			t.Errorf("removals %v", r)
		}
	})

	t.Run("goes on when it was ordered by another cluster", func(t *testing.T) {
		w := newWorld(t)
		clk := clocktesting.NewFakeClock(time.Now())
		w.clock = clk
		theirs := machine.Status{
			ID: "99999999-2222-3333-4444-555555555555", Namespace: w.namespace, Name: "same", Assignment: 3, State: machine.Running,
			Cluster: "another-cluster", Revision: 1,
		}
		w.runtime.vms[theirs.ID] = theirs
		w.start()
		ours := w.running("same")
		w.await("the ImpNode says so", w.nodeSays(v1alpha1.ReasonDifferentCluster))
		clk.Step(2 * absentLimit)
		w.runtime.set(theirs.ID)
		w.running("witness")
		if r := w.runtime.removals(); len(r) != 0 || w.runtime.told("ensure "+theirs.ID) != 0 {
			t.Errorf("removals %v, calls %v", r, w.runtime.calls)
		}
		if spec, _ := w.runtime.spec(string(ours.UID)); spec.Cluster == "" || spec.Cluster == theirs.Cluster {
			t.Errorf("our own VM was ordered by cluster %q", spec.Cluster)
		}
	})
}

func TestAnObjectThatWasSetBackBehindItsNodeSaysSo(t *testing.T) {
	w := newWorld(t)
	w.start()
	vm := w.vm("restored")
	id := string(vm.UID)
	w.await("the runtime is told", func() bool { return w.runtime.told("ensure "+id) == 1 })
	w.runtime.set(id, started, guestReady, func(s *machine.Status) { s.Assignment = 5 })
	got := w.awaitVM("restored", "says that the node is ahead", has(v1alpha1.ConditionReady, "False", v1alpha1.ReasonStaleAssignment))
	if c := meta.FindStatusCondition(got.Status.Conditions, v1alpha1.ConditionReady); !strings.Contains(c.Message, "assignment 5") {
		t.Errorf("message is %q", c.Message)
	}
	w.await("the event", func() bool { return slices.Contains(w.events(vm), "Warning StaleAssignment") })
	w.place(vm, w.node, 6)
	w.await("a later assignment is ordered", func() bool { spec, _ := w.runtime.spec(id); return spec.Assignment == 6 })
	if r := w.runtime.removals(); len(r) != 0 {
		t.Errorf("removals %v", r)
	}
}
