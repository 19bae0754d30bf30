package agent

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
)

func TestAnAPIServerThatIsAwayForFiveMinutes(t *testing.T) {
	w := newWorld(t)
	clk := clocktesting.NewFakeClock(time.Now())
	w.clock = clk
	w.start()
	var vms []*v1alpha1.ImpVM
	for i := range 3 {
		vms = append(vms, w.running(fmt.Sprintf("vm-%d", i), func(vm *v1alpha1.ImpVM) { vm.Spec.Lifecycle = v1alpha1.LifecyclePersistent }))
	}
	writes := w.requests.of(vmWrite)
	w.requests.cut(true)
	for range 4 { // the node starts them again meanwhile
		for _, vm := range vms {
			w.runtime.set(string(vm.UID), started, guestReady, func(s *machine.Status) { s.Incarnation++; s.Run++; s.Counters.Restarts++ })
		}
	}
	for range 5 {
		clk.Step(time.Minute)
	}
	w.await("the agent has noticed", func() bool { return strings.Contains(w.log.String(), "object not read after a refused write") })
	w.requests.cut(false)
	for _, vm := range vms {
		w.awaitVM(vm.Name, "has caught up", func(vm *v1alpha1.ImpVM) bool {
			return vm.Status.Incarnation == 5 && vm.Status.RestartCount == 4 && has(v1alpha1.ConditionReady, "True", v1alpha1.ReasonRunning)(vm)
		})
	}
	if n := w.requests.of(vmWrite) - writes; n != len(vms) {
		t.Errorf("%d status writes to catch up with %d VMs", n, len(vms))
	}
	if r := w.runtime.removals(); len(r) != 0 {
		t.Errorf("removals %v", r)
	}
	away := clk.Now()
	w.await("the Lease is renewed", func() bool {
		clk.Step(leaseEvery)
		lease := &coordinationv1.Lease{}
		err := w.admin.Get(t.Context(), client.ObjectKey{Namespace: v1alpha1.SystemNamespace, Name: v1alpha1.LeasePrefix + w.node}, lease)
		return err == nil && lease.Spec.RenewTime.After(away)
	})
}

func TestStartsThatFailAgainAndAgainAreToldWithFewWrites(t *testing.T) {
	w := newWorld(t)
	w.start()
	vm := w.vm("loop", func(vm *v1alpha1.ImpVM) { vm.Spec.Lifecycle = v1alpha1.LifecyclePersistent })
	id := string(vm.UID)
	w.await("the runtime is told", func() bool { return w.runtime.told("ensure "+id) == 1 })
	const tries = 60
	for i := range tries {
		w.runtime.set(id, diskReady, failing(startedCheck, fault.RuntimeStartFailed, "starting VMM: no file at /opt/fc"), func(s *machine.Status) {
			s.LastFailure = &machine.Failure{Reason: fault.RuntimeStartFailed, Message: "no file at /opt/fc", At: time.Now().Add(time.Duration(i))}
		})
	}
	w.awaitVM("loop", "says why at once", has(v1alpha1.ConditionReady, "False", v1alpha1.ReasonRuntimeStartFailed))
	w.awaitVM("loop", "knows all tries", func(vm *v1alpha1.ImpVM) bool { return vm.Status.Restart.StartFailures == tries })
	if n := w.requests.of(vmWrite); n > burst+2 {
		t.Errorf("%d status writes for %d tries", n, tries)
	}
	if n := w.requests.of("POST events") + w.requests.of("PATCH events"); n > 3 {
		t.Errorf("%d writes of events for %d tries", n, tries)
	}
	w.runtime.set(id, started, guestReady)
	got := w.awaitVM("loop", "is ready", has(v1alpha1.ConditionReady, "True", v1alpha1.ReasonRunning))
	if f := got.Status.LastFailure; f == nil || f.Reason != string(fault.RuntimeStartFailed) {
		t.Errorf("last failure is %+v", f)
	}
	w.await("the events", func() bool {
		e := w.events(vm)
		return slices.Contains(e, "Warning RuntimeStartFailed") && slices.Contains(e, "Normal Recovered")
	})
}
