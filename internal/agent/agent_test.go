package agent

import (
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/utils/ptr"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
)

func TestAgent(t *testing.T) {
	t.Run("a bound VM is ordered, started, ready and released with three status writes in all", func(t *testing.T) {
		w := newWorld(t)
		w.start()
		vm := w.vm("web")
		id := string(vm.UID)
		w.await("the runtime is told", func() bool { return w.runtime.told("ensure "+id) == 1 })
		w.runtime.set(id, diskReady)
		w.runtime.set(id, started)
		w.awaitVM("web", "is started", has(v1alpha1.ConditionStarted, "True", v1alpha1.ReasonDone))
		w.runtime.set(id, guestReady)
		got := w.awaitVM("web", "is ready", has(v1alpha1.ConditionReady, "True", v1alpha1.ReasonRunning))
		if got.Status.Phase != v1alpha1.PhaseRunning || got.Status.ReportedAssignment != 1 || got.Status.Incarnation != 1 {
			t.Errorf("status is %+v", got.Status)
		}
		if n := w.requests.of(vmWrite); n > 2 {
			t.Errorf("%d status writes until ready, want at most 2", n)
		}
		w.release(vm, 1)
		got = w.awaitVM("web", "is released", func(vm *v1alpha1.ImpVM) bool { return vm.Status.ReleasedAssignment == 1 })
		if got.Status.Phase != v1alpha1.PhaseStopping {
			t.Errorf("phase is %s after the release", got.Status.Phase)
		}
		if n := w.requests.of(vmWrite); n > 3 {
			t.Errorf("%d status writes in all, want at most 3 (%s)", n, w.requests.writes())
		}
		if n := w.runtime.told("ensure " + id); n != 1 {
			t.Errorf("the spec was told %d times", n)
		}
		if g := w.runtime.graces; len(g) == 0 || g[0] != 30*time.Second {
			t.Errorf("graces are %v", g)
		}
		w.await("the events are there", func() bool { return len(w.events(vm)) >= 3 })
		events := w.events(vm)
		slices.Sort(events)
		if want := []string{"Normal Ready", "Normal Released", "Normal Started"}; !slices.Equal(events, want) {
			t.Errorf("events are %v, want %v", events, want)
		}
	})

	t.Run("a one-shot that ends is finished with its code and its console, and the log shows the marker", func(t *testing.T) {
		w := newWorld(t)
		w.start()
		vm := w.vm("job")
		id := string(vm.UID)
		w.await("the runtime is told", func() bool { return w.runtime.told("ensure "+id) == 1 })
		w.runtime.set(id, started)
		w.runtime.set(id, finished(machine.Succeeded, ptr.To(int32(0)), "the workload exited with code 0", "hello\r\nIMP_SUCCESS id=x\n"))
		got := w.awaitVM("job", "has finished", has(v1alpha1.ConditionFinished, "True", v1alpha1.ReasonSucceeded))
		if got.Status.Phase != v1alpha1.PhaseSucceeded || got.Status.ExitCode == nil || *got.Status.ExitCode != 0 ||
			got.Status.ConsoleTail != "hello | IMP_SUCCESS id=x" || got.Status.FinishedAt == nil {
			t.Errorf("status is %+v", got.Status)
		}
		w.await("the agent's log shows the marker", func() bool { return strings.Contains(w.log.String(), "marker=IMP_SUCCESS") })
		w.await("the event is there", func() bool { return slices.Contains(w.events(vm), "Normal Succeeded") })
	})

	t.Run("a grace of zero seconds kills", func(t *testing.T) {
		w := newWorld(t)
		w.start()
		vm := w.vm("kill", func(vm *v1alpha1.ImpVM) { vm.Spec.TerminationGracePeriodSeconds = ptr.To(int64(0)) })
		w.await("the runtime is told", func() bool { return w.runtime.told("ensure "+string(vm.UID)) == 1 })
		w.release(vm, 1)
		w.awaitVM("kill", "is released", func(vm *v1alpha1.ImpVM) bool { return vm.Status.ReleasedAssignment == 1 })
		if g := w.runtime.graces; g[0] != 0 {
			t.Errorf("grace is %s", g[0])
		}
	})

	t.Run("releasedAssignment is written only when the runtime says that nothing is left", func(t *testing.T) {
		w := newWorld(t)
		w.runtime.removeAtOnce = false
		w.start()
		vm := w.vm("slow")
		id := string(vm.UID)
		w.await("the runtime is told", func() bool { return w.runtime.told("ensure "+id) == 1 })
		w.runtime.set(id, started, guestReady)
		w.awaitVM("slow", "is ready", has(v1alpha1.ConditionReady, "True", v1alpha1.ReasonRunning))
		w.release(vm, 1)
		w.await("the removal is ordered", func() bool { return w.runtime.state(id) == machine.Removing })
		got := w.awaitVM("slow", "is stopping", has(v1alpha1.ConditionReady, "False", v1alpha1.ReasonStopping))
		if got.Status.ReleasedAssignment != 0 {
			t.Fatal("released while the runtime was removing")
		}
		w.runtime.set(id, func(s *machine.Status) { s.State = machine.Removed })
		w.awaitVM("slow", "is released", func(vm *v1alpha1.ImpVM) bool { return vm.Status.ReleasedAssignment == 1 })
	})

	t.Run("a VM that cannot start says why, in condition, event and log, and recovers", func(t *testing.T) {
		w := newWorld(t)
		w.start()
		vm := w.vm("broken", func(vm *v1alpha1.ImpVM) { vm.Spec.Lifecycle = v1alpha1.LifecyclePersistent })
		id := string(vm.UID)
		w.await("the runtime is told", func() bool { return w.runtime.told("ensure "+id) == 1 })
		w.runtime.set(id, diskReady, failing(startedCheck, fault.RuntimeStartFailed, "starting VMM: no file at /opt/fc"))
		got := w.awaitVM("broken", "says why", has(v1alpha1.ConditionReady, "False", v1alpha1.ReasonRuntimeStartFailed))
		if got.Status.Restart == nil || got.Status.Restart.NextTryAt == nil {
			t.Error("the object does not say when the next try is")
		}
		if !strings.Contains(w.log.String(), "FC_BIN=/opt/fc") {
			t.Error("the log does not name FC_BIN")
		}
		w.runtime.set(id, started, guestReady)
		w.awaitVM("broken", "is ready", has(v1alpha1.ConditionReady, "True", v1alpha1.ReasonRunning))
		w.await("both events are there", func() bool {
			e := w.events(vm)
			return slices.Contains(e, "Warning RuntimeStartFailed") && slices.Contains(e, "Normal Recovered")
		})
	})

	t.Run("a node without room gives the VM back", func(t *testing.T) {
		w := newWorld(t)
		w.runtime.refuse = fault.Errorf(fault.NoCapacity, "reserving", "8192 of 8192 MiB are taken")
		w.start()
		w.vm("big")
		got := w.awaitVM("big", "is given back", func(vm *v1alpha1.ImpVM) bool { return vm.Status.ReleasedAssignment == 1 })
		if !has(v1alpha1.ConditionReady, "False", string(fault.NoCapacity))(got) || got.Status.Phase != v1alpha1.PhaseStarting {
			t.Errorf("status is %+v", got.Status)
		}
	})
}
