package runtimed

import (
	"context"
	"errors"
	"maps"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/vmm"
)

// scripted is a service that tells what it was made with.
type scripted struct {
	machine.Service
	updates []machine.Update
}

var errTold = errors.New("everything was told")

func (s scripted) Watch(_ context.Context, each func(machine.Update) error) error {
	for _, u := range s.updates {
		if err := each(u); err != nil {
			return err
		}
	}
	return errTold
}

// usableDriver answers the probe that goes on beside the watch.
type usableDriver struct{ vmm.Driver }

func (usableDriver) Probe(context.Context) vmm.Capabilities { return vmm.Capabilities{Usable: true} }

// observed gives the figures after a service has told its updates to a runtime that found the VMs of before on record.
func observed(t *testing.T, before map[string]machine.Status, updates ...machine.Status) map[string]float64 {
	t.Helper()
	registry := prometheus.NewRegistry()
	o := newObserver(registry, &measuredDriver{Driver: usableDriver{}}, before)
	s := scripted{}
	for i := range updates {
		s.updates = append(s.updates, machine.Update{Status: &updates[i]})
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if err := o.run(ctx, s); !errors.Is(err, errTold) {
		t.Fatalf("the watch ended with %v", err)
	}
	got, err := gather(registry)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func wantFigures(t *testing.T, got, want map[string]float64) {
	t.Helper()
	for key, v := range want {
		if has, ok := got[key]; !ok || has != v {
			t.Errorf("%s is %v (%v), want %v", key, has, ok, v)
		}
	}
}

func ends(verdict machine.Verdict, n int64) map[machine.Verdict]int64 {
	return map[machine.Verdict]int64{verdict: n}
}

func TestTheSupervisorsFiguresAreWhatWatchTells(t *testing.T) {
	at := time.Now()
	later := at.Add(time.Second)
	running := machine.Status{ID: "a", Assignment: 1, State: machine.Running, StartedAt: &at, Counters: machine.Counters{Starts: 1},
		Timings: machine.Timings{VMM: time.Second, Kernel: 2 * time.Second}}
	crashed := running
	crashed.State, crashed.Counters = machine.Pending, machine.Counters{Starts: 1, Exits: 1, Ends: ends(machine.GuestPanic, 1), Retries: 2}
	again := running
	again.StartedAt, again.Counters = &later, machine.Counters{Starts: 2, Exits: 1, Restarts: 1, Ends: ends(machine.GuestPanic, 1), Retries: 2, Silent: 1}
	got := observed(t, nil, running, running, crashed, again, machine.Status{ID: "b", Assignment: 1, State: machine.Halted})
	wantFigures(t, got, map[string]float64{
		"imp_vm_starts_total": 2, "imp_vm_exits_total verdict=GuestPanic": 1, "imp_vm_restarts_total": 1, "imp_vm_step_retries_total": 2,
		"imp_vm_guest_silent_total": 1, "imp_vm_adopted_total": 0, "imp_runtime_vms state=Running": 1, "imp_runtime_vms state=Pending": 0,
		"imp_runtime_vms state=Halted": 1, "imp_vm_boot_latency_seconds stage=kernel": 4, "imp_vm_boot_latency_seconds stage=total": 6,
	})
}

func TestARestartOfTheRuntimeMakesNoFigureJump(t *testing.T) {
	at := time.Now()
	old := machine.Status{ID: "a", Assignment: 1, State: machine.Running, StartedAt: &at,
		Counters: machine.Counters{Starts: 7, Exits: 6, Restarts: 6, Retries: 5, Silent: 4, Adopted: 3, Ends: ends(machine.Failed, 6)}}
	now := old
	now.Counters.Adopted = 4
	got := observed(t, map[string]machine.Status{"a": old}, now)
	wantFigures(t, got, map[string]float64{
		"imp_vm_starts_total": 0, "imp_vm_restarts_total": 0, "imp_vm_step_retries_total": 0, "imp_vm_guest_silent_total": 0, "imp_vm_adopted_total": 1,
		"imp_runtime_vms state=Running": 1,
	})
	if n := got["imp_vm_exits_total verdict=Failed"]; n != 0 {
		t.Errorf("%v exits from before the runtime are counted", n)
	}
}

func TestWhatHappenedWithoutARuntimeIsCountedByTheNext(t *testing.T) {
	old := machine.Status{ID: "a", Assignment: 1, State: machine.Running, Counters: machine.Counters{Starts: 1, Exits: 1, Ends: ends(machine.VMMKilled, 1)}}
	now := old
	now.State, now.Counters.Exits, now.Counters.Ends = machine.Pending, 2, ends(machine.VMMKilled, 2)
	// The first that Watch tells is after the verdict.
	got := observed(t, map[string]machine.Status{"a": old}, now)
	wantFigures(t, got, map[string]float64{"imp_vm_exits_total verdict=VMMKilled": 1, "imp_vm_starts_total": 0})
}

func TestAVMOfAnotherAssignmentCountsFromNothing(t *testing.T) {
	first := machine.Status{ID: "a", Assignment: 1, State: machine.Running, Counters: machine.Counters{Starts: 5}}
	second := machine.Status{ID: "a", Assignment: 2, State: machine.Running, Counters: machine.Counters{Starts: 1}}
	got := observed(t, map[string]machine.Status{"a": first}, first, second)
	wantFigures(t, got, map[string]float64{"imp_vm_starts_total": 1, "imp_runtime_vms state=Running": 1})
}

func TestATombstoneThatIsToldAgainIsNotCountedAgain(t *testing.T) {
	alive := machine.Status{ID: "a", Assignment: 1, State: machine.Running, Counters: machine.Counters{Starts: 1}}
	gone := machine.Status{ID: "a", Assignment: 1, State: machine.Removed, Counters: machine.Counters{Starts: 1, Exits: 1, Ends: ends(machine.Stopped, 1)}}
	again := gone
	again.Assignment = 2
	got := observed(t, nil, alive, gone, gone, again)
	wantFigures(t, got, map[string]float64{"imp_vm_starts_total": 1, "imp_vm_exits_total verdict=Stopped": 1, "imp_runtime_vms state=Running": 0})
}

func TestEveryKindOfOrphanHasAFigureFromTheStart(t *testing.T) {
	registry := prometheus.NewRegistry()
	left, removed := map[string]int{}, map[string]int64{}
	registry.MustRegister(newOrphans(func() (map[string]int, map[string]int64) { return maps.Clone(left), maps.Clone(removed) }))
	figures := func() map[string]float64 {
		got, err := gather(registry)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	wantFigures(t, figures(), map[string]float64{"imp_orphaned_resources kind=cgroup": 0, "imp_orphaned_resources_removed_total kind=tap": 0})
	left["cgroup"], removed["tap"] = 2, 3
	wantFigures(t, figures(), map[string]float64{"imp_orphaned_resources kind=cgroup": 2, "imp_orphaned_resources_removed_total kind=tap": 3})
}

// gather gives every figure by its name and labels.
func gather(registry *prometheus.Registry) (map[string]float64, error) {
	families, err := registry.Gather()
	if err != nil {
		return nil, err
	}
	got := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			key := f.GetName()
			for _, l := range m.GetLabel() {
				key += " " + l.GetName() + "=" + l.GetValue()
			}
			got[key] = m.GetCounter().GetValue() + m.GetGauge().GetValue() + m.GetHistogram().GetSampleSum()
		}
	}
	return got, nil
}
