package agent

import (
	"fmt"
	"io"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/event/eventtest"
	"imp.dev/imp/internal/machine"
)

func TestChurn(t *testing.T) {
	t.Run("twenty VMs come and go while agent and runtime are restarted, and nothing is left", func(t *testing.T) {
		w := newWorld(t)
		w.start()
		var vms []*v1alpha1.ImpVM
		for i := range 20 {
			vm := w.vm(fmt.Sprintf("vm-%d", i))
			vms = append(vms, vm)
			switch i % 5 {
			case 1:
				w.runtime.leave()
				w.runtime.comeBack()
			case 3:
				w.stop()
				w.start()
			}
			if i >= 3 {
				w.release(vms[i-3], 1)
			}
		}
		for _, vm := range vms[17:] {
			w.release(vm, 1)
		}
		for _, vm := range vms {
			w.awaitVM(vm.Name, "is released", func(vm *v1alpha1.ImpVM) bool { return vm.Status.ReleasedAssignment == 1 })
			if s := w.runtime.state(string(vm.UID)); s != machine.Removed && s != "" {
				t.Errorf("%s is %s", vm.Name, s)
			}
		}
	})
}

func TestWritersSideBySide(t *testing.T) {
	t.Run("each writer leaves the others' fields alone, in whatever order they write", func(t *testing.T) {
		w := newWorld(t)
		w.start()
		vm := w.running("shared")
		reachable := func(status string) {
			w.apply(vm, v1alpha1.ManagerReachable, map[string]any{"conditions": []any{map[string]any{
				"type": v1alpha1.ConditionNodeReachable, "status": status, "reason": v1alpha1.ReasonReachable, "message": "",
				"lastTransitionTime": time.Now().UTC().Format(time.RFC3339),
			}}})
		}
		steps := map[string]func(){
			"agent":     func() { w.runtime.set(string(vm.UID), func(s *machine.Status) { s.DiskGeneration++ }) },
			"place":     func() { w.place(vm, w.node, 1) },
			"reachable": func() { reachable("True") },
		}
		generation := int64(0)
		for _, order := range [][]string{{"agent", "place", "agent", "reachable", "agent"}, {"reachable", "place", "agent"}} {
			for _, step := range order {
				steps[step]()
				if step == "agent" {
					generation++
					w.awaitVM("shared", "has the agent's word", func(vm *v1alpha1.ImpVM) bool { return vm.Status.DiskGeneration == generation })
				}
				got := w.get("shared")
				s := got.Status
				if s.NodeName != w.node || s.Assignment != 1 || s.Resources == nil || s.StartedAt == nil || s.ReportedAssignment != 1 ||
					!has(v1alpha1.ConditionScheduled, "True", v1alpha1.ReasonPlaced)(got) || !has(v1alpha1.ConditionReady, "True", v1alpha1.ReasonRunning)(got) {
					t.Fatalf("after %s: %+v", step, s)
				}
			}
		}
	})
}

func TestProgressOfAPull(t *testing.T) {
	clk := clocktesting.NewFakeClock(time.Unix(1000, 0))
	log := &eventtest.Log{}
	a := newAgent(nil, nil, newFakeRuntime(), clk, newMetrics(prometheus.NewRegistry()), log,
		slog.New(slog.NewTextHandler(io.Discard, nil)), Options{Node: "n1"})
	vm := &v1alpha1.ImpVM{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "vm", UID: "u1"}}
	m := &memory{}
	told := func() int { return len(log.Of("ns", "vm")) }
	pulling := &machine.Status{Progress: "pulling image: 12 of 80 MiB"}

	a.tellPull(vm, pulling, m, clk.Now())
	clk.Step(time.Second)
	a.tellPull(vm, pulling, m, clk.Now())
	if told() != 0 {
		t.Errorf("a pull of one second was told: %v", log.All())
	}
	for range 10 { // five seconds of progress twice a second
		clk.Step(500 * time.Millisecond)
		a.tellPull(vm, pulling, m, clk.Now())
	}
	if got := log.Of("ns", "vm"); !slices.Equal(got, []string{"Normal Pulling"}) {
		t.Errorf("events are %v", got)
	}
	clk.Step(10 * time.Second)
	a.tellPull(vm, pulling, m, clk.Now())
	if told() != 2 {
		t.Errorf("%d events after sixteen seconds", told())
	}
	a.tellPull(vm, &machine.Status{}, m, clk.Now())
	a.tellPull(vm, pulling, m, clk.Now())
	if told() != 2 {
		t.Errorf("a new pull was told at once: %v", log.All())
	}
}
