package runtimed

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"imp.dev/imp/internal/machine"
)

func TestMetricsCountWhatIsNew(t *testing.T) {
	registry := prometheus.NewRegistry()
	o := newObserver(registry, &measuredDriver{})
	at := time.Now()
	old := machine.Status{ID: "old", Assignment: 1, State: machine.Running, StartedAt: &at, Counters: machine.Counters{Exits: 7, Restarts: 7}, LastExit: &machine.Exit{Verdict: machine.Failed}}
	o.update(old)
	o.synced = true
	later := at.Add(time.Second)
	old.StartedAt, old.Counters.Exits, old.Counters.Restarts, old.LastExit = &later, 9, 8, &machine.Exit{Verdict: machine.GuestPanic}
	old.Timings = machine.Timings{VMM: time.Second, Kernel: 2 * time.Second}
	o.update(old)
	o.update(old)
	o.update(machine.Status{ID: "new", Assignment: 1, State: machine.Pending, Counters: machine.Counters{Retries: 2}})
	o.update(machine.Status{ID: "new", Assignment: 1, State: machine.Removed, Counters: machine.Counters{Retries: 2}})
	got, err := gather(registry)
	if err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]float64{
		"imp_runtime_vms state=Pending": 0, "imp_runtime_vms state=Running": 1, "imp_vm_exits_total verdict=GuestPanic": 2, "imp_vm_restarts_total": 1,
		"imp_vm_step_retries_total": 2, "imp_vm_boot_latency_seconds stage=kernel": 2, "imp_vm_boot_latency_seconds stage=total": 3,
	} {
		if v, ok := got[key]; !ok || v != want {
			t.Errorf("%s is %v (%v), want %v", key, v, ok, want)
		}
	}
	if _, ok := got["imp_vm_exits_total verdict=Failed"]; ok {
		t.Error("an exit from before the runtime was is counted")
	}
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
