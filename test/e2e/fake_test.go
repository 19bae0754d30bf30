package e2e

import (
	"fmt"
	"math/rand/v2"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/devserver"
	guestfake "imp.dev/imp/internal/guest/fake"
	vmmfake "imp.dev/imp/internal/vmm/fake"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

func exits(code int) vmmfake.Script {
	return vmmfake.Script{Guest: guestfake.Script{Exit: &guestfake.Exit{Code: code}}}
}

func ends(how string) vmmfake.Script {
	return vmmfake.Script{End: &vmmfake.End{How: how, AfterStart: true, AfterMillis: 200}}
}

// silentRegistry accepts connections and never answers: a pull that hangs.
func silentRegistry(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { conn.Close() })
		}
	}()
	return listener.Addr().String()
}

func TestAVMCanBeDeletedFromEveryPhaseAndLeavesNothing(t *testing.T) {
	c := shared(t, "fake")
	hanging := silentRegistry(t)
	running := func(vm *v1alpha1.ImpVM) bool { return vm.Status.Phase == v1alpha1.PhaseRunning }
	for name, phase := range map[string]struct {
		change []func(*v1alpha1.ImpVM)
		words  string
		is     func(*v1alpha1.ImpVM) bool
	}{
		"waiting for its class": {[]func(*v1alpha1.ImpVM){class("nowhere")}, "waiting", reason(v1alpha1.ReasonInvalidSpec)},
		"waiting for a node": {[]func(*v1alpha1.ImpVM){func(vm *v1alpha1.ImpVM) {
			vm.Spec.NodeSelector = map[string]string{"disk": "tape"}
		}}, "waiting", reason(v1alpha1.ReasonNoNodeFits)},
		"pulling": {[]func(*v1alpha1.ImpVM){image(hanging + "/a/b:c")}, "bound",
			func(vm *v1alpha1.ImpVM) bool {
				return vm.Status.NodeName != "" && condition(vm, v1alpha1.ConditionDiskReady).Status != metav1.ConditionTrue
			}},
		"failing to pull": {[]func(*v1alpha1.ImpVM){image(c.server.Registry + "/no/such:image")}, "failing", reason(v1alpha1.ReasonImagePullFailed)},
		"booting":         {[]func(*v1alpha1.ImpVM){scripted(vmmfake.Script{Guest: guestfake.Script{Silent: true}})}, "on its disk", diskReady},
		"running":         {[]func(*v1alpha1.ImpVM){scripted(vmmfake.Script{})}, "running", running},
		"deaf to signals": {[]func(*v1alpha1.ImpVM){grace(1), scripted(vmmfake.Script{
			Guest: guestfake.Script{IgnoreStop: true, IgnoreKill: true}, IgnoreSignals: true})}, "running", running},
		"backing off": {[]func(*v1alpha1.ImpVM){persistent, scripted(exits(1))}, "backing off",
			func(vm *v1alpha1.ImpVM) bool { return vm.Status.Restart != nil && vm.Status.Restart.NextTryAt != nil }},
		"succeeded": {[]func(*v1alpha1.ImpVM){scripted(exits(0))}, "finished", finished},
		"failed":    {[]func(*v1alpha1.ImpVM){scripted(exits(3))}, "finished", finished},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ns := c.namespace(t)
			vm := c.create(t, c.vm(ns, "vm", phase.change...))
			c.await(t, vm, soon, phase.words, phase.is)
			if err := c.client.Delete(t.Context(), vm); err != nil {
				t.Fatal(err)
			}
			c.awaitGone(t, vm, soon)
			c.nothingLeft(t, vm)
		})
	}
}

func diskReady(vm *v1alpha1.ImpVM) bool {
	return condition(vm, v1alpha1.ConditionDiskReady).Status == metav1.ConditionTrue
}

func TestEachEndHasItsOwnReasonWhetherTheRuntimeWatchedOrNot(t *testing.T) {
	c := own(t, devserver.Options{Nodes: 1, VMM: "fake"})
	wants := map[string]struct {
		script vmmfake.Script
		reason string
		phase  v1alpha1.Phase
	}{
		"exit-0":    {exits(0), "Succeeded", v1alpha1.PhaseSucceeded},
		"exit-3":    {exits(3), "Failed", v1alpha1.PhaseFailed},
		"panic":     {ends(vmmfake.Panic), "GuestPanic", v1alpha1.PhaseFailed},
		"reboot":    {ends(vmmfake.Reboot), "GuestReboot", v1alpha1.PhaseFailed},
		"power-off": {ends(vmmfake.PowerOff), "GuestPowerOff", v1alpha1.PhaseFailed},
		"killed":    {ends(vmmfake.Killed), "VMMKilled", v1alpha1.PhaseFailed},
		// The guest's last word counts more than what became of its machine.
		"panic-after-success": {vmmfake.Script{
			Guest: guestfake.Script{Exit: &guestfake.Exit{Code: 0}, IgnoreAcknowledge: true},
			End:   &vmmfake.End{How: vmmfake.Panic, AfterExit: true},
		}, "Succeeded", v1alpha1.PhaseSucceeded},
	}
	for _, mode := range []string{"runtime up", "runtime down", "runtime restarted before"} {
		t.Run(mode, func(t *testing.T) {
			ns := c.namespace(t)
			vms := map[string]*v1alpha1.ImpVM{}
			for name, want := range wants {
				// Late enough for the runtime to be gone by then.
				if want.script.End != nil && !want.script.End.AfterExit {
					want.script.End.AfterMillis = 4000
				} else {
					want.script.Guest.Exit.AfterMillis = 4000
				}
				vms[name] = c.create(t, c.vm(ns, name, scripted(want.script)))
			}
			for _, vm := range vms {
				c.await(t, vm, soon, "started", func(vm *v1alpha1.ImpVM) bool { return vm.Status.StartedAt != nil })
			}
			if mode != "runtime up" {
				must(t, c.server.Kill(devserver.Runtime, "node-1"))
			}
			if mode == "runtime down" {
				awaitTime(t, 5*time.Second) // everything ends while nobody looks
			}
			if mode != "runtime up" {
				must(t, c.server.Start(devserver.Runtime, "node-1"))
			}
			for name, want := range wants {
				vm := c.await(t, vms[name], soon, "finished", finished)
				if got := condition(vm, v1alpha1.ConditionFinished); got.Reason != want.reason {
					t.Errorf("%s: Finished for the reason %s (%s), want %s", name, got.Reason, got.Message, want.reason)
				}
				if vm.Status.Phase != want.phase {
					t.Errorf("%s: phase %s, want %s", name, vm.Status.Phase, want.phase)
				}
				if vm.Status.Incarnation != 1 {
					t.Errorf("%s: a one-shot was booted %d times", name, vm.Status.Incarnation)
				}
			}
		})
	}
}

// awaitTime lets real time pass, because what is waited for happens where no test can look.
func awaitTime(t *testing.T, d time.Duration) {
	t.Helper()
	select {
	case <-time.After(d):
	case <-t.Context().Done():
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestGuestsOutliveAgentAndRuntime(t *testing.T) {
	c := own(t, devserver.Options{Nodes: 1, VMM: "fake"})
	ns := c.namespace(t)
	var vms []*v1alpha1.ImpVM
	for i := range 5 {
		vms = append(vms, c.create(t, c.vm(ns, fmt.Sprintf("vm-%d", i), persistent, scripted(vmmfake.Script{}))))
	}
	started := map[string]string{}
	for _, vm := range vms {
		now := c.await(t, vm, soon, "Ready", ready)
		started[vm.Name] = now.Status.StartedAt.String()
	}
	for _, program := range []devserver.Program{devserver.Agent, devserver.Runtime} {
		must(t, c.server.Kill(program, "node-1"))
		must(t, c.server.Start(program, "node-1"))
	}
	// A VM that is created now shows that both are at work again.
	fresh := c.create(t, c.vm(ns, "fresh", scripted(exits(0))))
	c.await(t, fresh, soon, "finished", finished)
	for _, vm := range vms {
		now := c.await(t, vm, soon, "Ready", ready)
		if now.Status.StartedAt.String() != started[vm.Name] || now.Status.RestartCount != 0 || now.Status.Incarnation != 1 {
			t.Errorf("%s was started again: %s", vm.Name, describe(now))
		}
		must(t, c.client.Delete(t.Context(), vm))
	}
	for _, vm := range vms {
		c.awaitGone(t, vm, soon)
		c.nothingLeft(t, vm)
	}
}

func TestAPersistentVMIsStartedAgainInPlace(t *testing.T) {
	c := shared(t, "fake")
	ns := c.namespace(t)
	t.Run("at once after a reboot, uncounted", func(t *testing.T) {
		vm := c.create(t, c.vm(ns, "reboots", persistent, scripted(vmmfake.Script{Runs: []vmmfake.Script{ends(vmmfake.Reboot), {}}})))
		now := c.await(t, vm, 8*time.Second, "Ready in its second boot", func(vm *v1alpha1.ImpVM) bool { return ready(vm) && vm.Status.Incarnation == 2 })
		if now.Status.RestartCount != 1 || (now.Status.Restart != nil && now.Status.Restart.Attempts != 0) {
			t.Errorf("a reboot is a restart but no failure: %+v %+v", now.Status.RestartCount, now.Status.Restart)
		}
	})
	t.Run("with backoff after a failure, told on the object, and Recovered by an event", func(t *testing.T) {
		vm := c.create(t, c.vm(ns, "fails-once", persistent, scripted(vmmfake.Script{Runs: []vmmfake.Script{exits(7), {}}})))
		now := c.await(t, vm, soon, "waiting for its next try", func(vm *v1alpha1.ImpVM) bool {
			return vm.Status.Restart != nil && vm.Status.Restart.NextTryAt != nil
		})
		if now.Status.Restart.Attempts != 1 || now.Status.LastFailure == nil || now.Status.LastFailure.ExitCode == nil || *now.Status.LastFailure.ExitCode != 7 {
			t.Errorf("the failure is not on the object: %+v %+v", now.Status.Restart, now.Status.LastFailure)
		}
		c.await(t, vm, soon, "Ready in its second boot", func(vm *v1alpha1.ImpVM) bool { return ready(vm) && vm.Status.Incarnation == 2 })
		c.awaitEvent(t, vm, v1alpha1.ReasonRecovered)
	})
}

func (c *cluster) awaitEvent(t *testing.T, vm *v1alpha1.ImpVM, reason string) {
	t.Helper()
	var seen []string
	if !eventually(t.Context(), soon, func() bool {
		events := &corev1.EventList{}
		if err := c.client.List(t.Context(), events, client.InNamespace(vm.Namespace)); err != nil {
			t.Fatal(err)
		}
		seen = nil
		for _, e := range events.Items {
			if e.InvolvedObject.UID == vm.UID {
				seen = append(seen, e.Reason+": "+e.Message)
				if e.Reason == reason && !e.LastTimestamp.IsZero() {
					return true
				}
			}
		}
		return false
	}) {
		t.Fatalf("no event %s about %s; there are:\n  %s", reason, vm.Name, strings.Join(seen, "\n  "))
	}
}

func TestAVMWithoutItsClassRunsOnceTheClassIsThere(t *testing.T) {
	c := shared(t, "fake")
	ns := c.namespace(t)
	vm := c.create(t, c.vm(ns, "early", class("late-"+ns), scripted(exits(0))))
	now := c.await(t, vm, soon, "InvalidSpec", reason(v1alpha1.ReasonInvalidSpec))
	if message := condition(now, v1alpha1.ConditionReady).Message; !strings.Contains(message, "late-"+ns) || !strings.Contains(message, "classRef") {
		t.Errorf("the message does not name the class and the field: %q", message)
	}
	late := &v1alpha1.ImpVMClass{ObjectMeta: metav1.ObjectMeta{Name: "late-" + ns}, Spec: v1alpha1.ImpVMClassSpec{VCPU: 1, MemoryMiB: 128, DiskGiB: 1}}
	must(t, c.client.Create(t.Context(), late))
	t.Cleanup(func() { _ = c.client.Delete(t.Context(), late) })
	now = c.await(t, vm, soon, "finished", finished)
	if now.UID != vm.UID || now.Status.Phase != v1alpha1.PhaseSucceeded {
		t.Errorf("it did not run to its end: %s", describe(now))
	}
}

func TestKillingEverythingDuringTwentyCreatesAndDeletesLeavesNothing(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	c := own(t, devserver.Options{Nodes: 2, VMM: "fake"})
	ns := c.namespace(t)

	stop := make(chan struct{})
	var killing sync.WaitGroup
	killing.Add(1)
	go func() {
		defer killing.Done()
		targets := []struct {
			program devserver.Program
			node    string
		}{{devserver.Operator, ""}, {devserver.Agent, "node-1"}, {devserver.Agent, "node-2"}, {devserver.Runtime, "node-1"}, {devserver.Runtime, "node-2"}}
		for kills := 0; ; kills++ {
			select {
			case <-stop:
				t.Logf("%d kills", kills)
				return
			case <-time.After(time.Duration(100+random.IntN(700)) * time.Millisecond):
			}
			target := targets[random.IntN(len(targets))]
			if err := c.server.Kill(target.program, target.node); err != nil {
				t.Errorf("%v", err)
			}
			if err := c.server.Start(target.program, target.node); err != nil {
				t.Errorf("%v", err)
			}
		}
	}()

	scripts := []func(*v1alpha1.ImpVM){
		scripted(exits(0)), scripted(exits(3)), scripted(vmmfake.Script{}), scripted(ends(vmmfake.Killed)),
		func(vm *v1alpha1.ImpVM) { persistent(vm); scripted(ends(vmmfake.Reboot))(vm) },
	}
	var vms []*v1alpha1.ImpVM
	for i := range 20 {
		vms = append(vms, c.create(t, c.vm(ns, fmt.Sprintf("vm-%02d", i), grace(1), scripts[i%len(scripts)])))
		awaitTime(t, time.Duration(100)*time.Millisecond)
		if i >= 5 {
			must(t, c.client.Delete(t.Context(), vms[i-5]))
		}
	}
	awaitTime(t, 3*time.Second)
	close(stop)
	killing.Wait()
	for _, vm := range vms[15:] {
		must(t, c.client.Delete(t.Context(), vm))
	}
	for _, vm := range vms {
		c.awaitGone(t, vm, 90*time.Second)
		c.nothingLeft(t, vm)
	}
	// And the cluster still works.
	after := c.create(t, c.vm(ns, "after", scripted(exits(0))))
	c.await(t, after, soon, "finished", finished)
}

func TestARuntimeThatHangsIsToldOnItsNode(t *testing.T) {
	c := own(t, devserver.Options{Nodes: 1, VMM: "fake"})
	ns := c.namespace(t)
	vm := c.create(t, c.vm(ns, "vm", grace(0), scripted(vmmfake.Script{})))
	c.await(t, vm, soon, "Ready", ready)
	pid := c.server.PID(devserver.Runtime, "node-1")
	must(t, syscall.Kill(pid, syscall.SIGSTOP))
	resume := func() { _ = syscall.Kill(pid, syscall.SIGCONT) }
	t.Cleanup(resume)
	node := &v1alpha1.ImpNode{}
	if !eventually(t.Context(), time.Minute, func() bool {
		must(t, c.client.Get(t.Context(), client.ObjectKey{Name: "node-1"}, node))
		return meta.IsStatusConditionFalse(node.Status.Conditions, v1alpha1.ConditionRuntimeReady)
	}) {
		t.Fatalf("a runtime that does not answer is said to be usable: %+v", node.Status.Conditions)
	}
	must(t, c.client.Delete(t.Context(), vm))
	resume()
	c.awaitGone(t, vm, time.Minute)
	c.nothingLeft(t, vm)
}

func TestANameIsFreeForASuccessorAtOnce(t *testing.T) {
	c := shared(t, "fake")
	ns := c.namespace(t)
	var before *v1alpha1.ImpVM
	for i := range 5 {
		vm := c.create(t, c.vm(ns, "phoenix", grace(0), scripted(vmmfake.Script{})))
		c.await(t, vm, soon, "running and itself", func(now *v1alpha1.ImpVM) bool { return now.UID == vm.UID && ready(now) })
		if before != nil {
			c.nothingLeft(t, before)
		}
		must(t, c.client.Delete(t.Context(), vm))
		c.awaitGone(t, vm, soon)
		before = vm
		_ = i
	}
}

func TestTheRunbooksCommandsWorkAsWritten(t *testing.T) {
	c := shared(t, "fake")
	ns := c.namespace(t)
	vm := c.create(t, c.vm(ns, "book", scripted(exits(3))))
	kubectl := func(args ...string) string { t.Helper(); return c.kubectl(t, args...) }
	expect := func(out string, words ...string) {
		t.Helper()
		for _, w := range words {
			if !strings.Contains(out, w) {
				t.Errorf("%q is not in:\n%s", w, out)
			}
		}
	}
	expect(kubectl("wait", "--for=condition=Finished", "impvm/book", "-n", ns, "--timeout=30s"), "condition met")
	expect(kubectl("get", "impvm", "-A"), "PHASE", "READY", "NODE", "RESTARTS", "AGE", "REASON", "book", "Failed")
	expect(kubectl("get", "impvm", "-n", ns, "-o", "wide"), "IMAGE", "EXIT", "3")
	expect(kubectl("describe", "impvm", "book", "-n", ns), "Finished", "Failed", "Events:", "exit code 3")
	expect(kubectl("get", "nodes", "-l", "imp/enabled=true"), "node-1", "node-2")
	expect(kubectl("get", "impcls"), "small")
	expect(kubectl("get", "impnode"), "node-1", "fake")
	c.awaitEvent(t, vm, v1alpha1.ReasonFailed)
	lines := strings.Split(strings.TrimSpace(kubectl("get", "events", "-A", "--sort-by=.lastTimestamp")), "\n")
	if last := lines[len(lines)-1]; strings.Contains(last, "<unknown>") {
		t.Errorf("the newest event has no time: %s", last)
	}
	agentLogs, err := filepath.Glob(filepath.Join(c.server.Places.Logs(), "imp-agent-*.log"))
	must(t, err)
	if len(agentLogs) != 2 {
		t.Errorf("want a log for each of two agents, got %v", agentLogs)
	}
}
