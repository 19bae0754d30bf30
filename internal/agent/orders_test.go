package agent

import (
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/restart"
)

func (w *world) patch(vm *v1alpha1.ImpVM, body string) {
	w.t.Helper()
	if err := w.admin.Patch(w.t.Context(), vm.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(body))); err != nil {
		w.t.Fatal(err)
	}
}

// orderedAs waits until the runtime was told a spec of vm like that.
func (w *world) orderedAs(vm *v1alpha1.ImpVM, what string, holds func(machine.Spec) bool) {
	w.t.Helper()
	w.await("the node is told "+what, func() bool {
		spec, ok := w.runtime.spec(string(vm.UID))
		return ok && holds(spec)
	})
}

func TestOrdersReachTheNodeAtOnce(t *testing.T) {
	persistent := func(vm *v1alpha1.ImpVM) { vm.Spec.Lifecycle = v1alpha1.LifecyclePersistent }
	w := newWorld(t)
	w.start()
	vm := w.running("loop", persistent)
	id := string(vm.UID)

	w.patch(vm, `{"spec":{"restartPolicy":{"mode":"reschedule","backoff":{"maxRetries":2}}}}`)
	w.orderedAs(vm, "the policy", func(s machine.Spec) bool {
		return s.Restart.Mode == restart.Reschedule && s.Restart.MaxRetries != nil && *s.Restart.MaxRetries == 2
	})

	before := w.get("loop").Generation
	w.patch(vm, `{"metadata":{"annotations":{"imp.dev/restart-reset":"now"}}}`)
	w.orderedAs(vm, "the reset, which is no new generation", func(s machine.Spec) bool { return s.Reset == "now" })
	if after := w.get("loop").Generation; after != before {
		t.Errorf("generation went from %d to %d", before, after)
	}

	w.patch(vm, `{"spec":{"desiredState":"Stopped"}}`)
	w.orderedAs(vm, "to stop it", func(s machine.Spec) bool { return s.Halt != nil && s.Halt.Reason == v1alpha1.ReasonStopped })
	w.runtime.set(id, func(s *machine.Status) {
		s.State, s.GuestReady = machine.Halted, machine.Check{}
		s.Started = machine.Check{OK: no(), Reason: v1alpha1.ReasonStopped, Message: "spec.desiredState is Stopped", Since: time.Now()}
	})
	w.awaitVM("loop", "says that it is stopped", has(v1alpha1.ConditionReady, "False", v1alpha1.ReasonStopped))
	w.await("the event", func() bool { return slices.Contains(w.events(vm), "Normal Stopped") })

	w.patch(vm, `{"spec":{"desiredState":"Running"}}`)
	w.orderedAs(vm, "to start it", func(s machine.Spec) bool { return s.Halt == nil })

	w.place(vm, w.node, 1, func(status map[string]any) {
		status["hold"] = map[string]any{"reason": v1alpha1.ReasonEvacuated, "message": "taint a=b:NoExecute"}
	})
	w.orderedAs(vm, "to hold it", func(s machine.Spec) bool { return s.Halt != nil && s.Halt.Reason == v1alpha1.ReasonEvacuated })
	if len(w.runtime.removals()) != 0 {
		t.Errorf("removals %v", w.runtime.removals())
	}

	w.patch(vm, `{"metadata":{"annotations":{"imp.dev/restart-reset":"`+strings.Repeat("x", 300)+`"}}}`)
	w.await("the event about a reset that is none", func() bool { return slices.Contains(w.events(vm), "Warning InvalidSpec") })
}

func TestTheHistoryIsOnTheObjectAndComesBackFromIt(t *testing.T) {
	w := newWorld(t)
	w.start()
	vm := w.running("told", func(vm *v1alpha1.ImpVM) { vm.Spec.Lifecycle = v1alpha1.LifecyclePersistent })
	id, next := string(vm.UID), time.Now().Add(time.Minute).UTC().Truncate(time.Microsecond)
	history := restart.History{Attempts: 2, StartFailures: 1, NextTryAt: &next, Elsewhere: true, Reset: "r1"}
	w.runtime.set(id, func(s *machine.Status) {
		s.State, s.History = machine.Pending, history
		s.Started = machine.Check{OK: no(), Reason: machine.ReasonElsewhere, Message: "GuestHung: silent; to be placed anew in 1m0s", Since: time.Now()}
		s.LastFailure = &machine.Failure{Reason: "GuestHung", Message: "silent", At: time.Now(), Incarnation: 1, ConsoleTail: []byte("stuck")}
	})
	got := w.awaitVM("told", "is to be placed anew", has(v1alpha1.ConditionReady, metav1.ConditionFalse, v1alpha1.ReasonRescheduled)).Status
	if r := got.Restart; r == nil || r.Attempts != 2 || r.StartFailures != 1 || !r.Elsewhere || r.Reset != "r1" || !r.NextTryAt.Time.Equal(next) {
		t.Errorf("status.restart is %+v", r)
	}
	if got.LastFailure == nil || got.LastFailure.Reason != "GuestHung" || got.ConsoleTail != "stuck" {
		t.Errorf("last failure %+v, console %q", got.LastFailure, got.ConsoleTail)
	}
	w.await("both events", func() bool {
		e := w.events(vm)
		return slices.Contains(e, "Normal Rescheduled") && slices.Contains(e, "Warning GuestHung")
	})
	w.runtime.leave() // a new connection has every spec told anew
	w.runtime.comeBack()
	w.orderedAs(vm, "the history", func(s machine.Spec) bool {
		return s.History.Attempts == 2 && s.History.StartFailures == 1 && s.History.Elsewhere && s.History.Reset == "r1"
	})
}
