package runtimed

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/metrics"
	"imp.dev/imp/internal/vmm"
)

// measuredDriver counts the launches of the driver it decorates.
type measuredDriver struct {
	vmm.Driver
	// kernel gives the digest of the kernel it boots.
	kernel   func() string
	mu       sync.Mutex
	launches *prometheus.CounterVec
	usable   prometheus.Gauge
}

// Probe implements vmm.Driver.
func (d *measuredDriver) Probe(ctx context.Context) vmm.Capabilities {
	c := d.Driver.Probe(ctx)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.usable != nil {
		d.usable.Set(0)
		if c.Usable {
			d.usable.Set(1)
		}
	}
	return c
}

// Start implements vmm.Driver.
func (d *measuredDriver) Start(ctx context.Context, c vmm.Config) (vmm.Instance, error) {
	i, err := d.Driver.Start(ctx, c)
	result := "ok"
	if err != nil {
		result = "error"
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.launches != nil {
		d.launches.WithLabelValues(result).Inc()
	}
	return i, err
}

// readyPeriod is how often the driver is asked whether it is usable while nobody else asks.
const readyPeriod = 30 * time.Second

// observer makes metrics of what the service tells everybody: it is one more consumer of Watch.
type observer struct {
	driver   *measuredDriver
	boot     *prometheus.HistogramVec
	starts   prometheus.Counter
	exits    *prometheus.CounterVec
	restarts prometheus.Counter
	retries  prometheus.Counter
	adopted  prometheus.Counter
	silent   prometheus.Counter
	states   *prometheus.GaugeVec

	mu   sync.Mutex // guards last, which is read with each scrape
	last map[string]machine.Status
	// before has VMs of which nothing was told yet, as they were when this process began.
	before map[string]machine.Status
}

// newObserver makes the figures. They are of this process: what Status counts over a VM's life, over restarts of the runtime too, is
// compared with before, so that a restart makes no figure jump, and what happened while no runtime was there is counted by the next one.
func newObserver(r prometheus.Registerer, d *measuredDriver, before map[string]machine.Status) *observer {
	name := func(n, help string) prometheus.Opts {
		return prometheus.Opts{Namespace: metrics.Namespace, Name: n, Help: help}
	}
	o := &observer{
		driver: d, last: map[string]machine.Status{}, before: before,
		boot: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: metrics.Namespace, Name: "vm_boot_latency_seconds", Buckets: metrics.LatencyBuckets(),
			Help: "Time a stage of a VM's start took: pull, disk, network, vmm, kernel, guest, workload, and total.",
		}, []string{"stage"}),
		starts:   prometheus.NewCounter(prometheus.CounterOpts(name("vm_starts_total", "VMMs started."))),
		silent:   prometheus.NewCounter(prometheus.CounterOpts(name("vm_guest_silent_total", "Times a guest whose VMM lives stopped answering."))),
		exits:    prometheus.NewCounterVec(prometheus.CounterOpts(name("vm_exits_total", "Incarnations that ended, by verdict.")), []string{"verdict"}),
		restarts: prometheus.NewCounter(prometheus.CounterOpts(name("vm_restarts_total", "Incarnations after the first."))),
		retries:  prometheus.NewCounter(prometheus.CounterOpts(name("vm_step_retries_total", "Steps that failed and are tried again."))),
		adopted:  prometheus.NewCounter(prometheus.CounterOpts(name("vm_adopted_total", "VMMs found again after a restart of the runtime."))),
		states:   prometheus.NewGaugeVec(prometheus.GaugeOpts(name("runtime_vms", "VMs on this node, by state.")), []string{"state"}),
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.launches = prometheus.NewCounterVec(prometheus.CounterOpts(name("vmm_launches_total", "VMMs launched, by result.")), []string{"result"})
	d.usable = prometheus.NewGauge(prometheus.GaugeOpts(name("runtime_ready", "1 while the runtime serves and can start VMs.")))
	r.MustRegister(o.boot, o.starts, o.silent, o.exits, o.restarts, o.retries, o.adopted, o.states, d.launches, d.usable)
	return o
}

// run observes until ctx ends.
func (o *observer) run(ctx context.Context, s machine.Service) error {
	go func() {
		ticker := time.NewTicker(readyPeriod)
		defer ticker.Stop()
		for {
			o.driver.Probe(ctx)
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
		}
	}()
	err := s.Watch(ctx, func(u machine.Update) error {
		if u.Status != nil {
			o.update(*u.Status)
		}
		return nil
	})
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// update compares a status with the last one of its VM.
func (o *observer) update(now machine.Status) {
	o.mu.Lock()
	defer o.mu.Unlock()
	was, known := o.last[now.ID]
	if !known {
		was = o.before[now.ID]
		delete(o.before, now.ID)
		if was.ID == "" && now.State == machine.Removed {
			return // a tombstone that was told before
		}
	} else {
		o.states.WithLabelValues(string(was.State)).Dec()
	}
	if now.State == machine.Removed {
		delete(o.last, now.ID)
	} else {
		o.last[now.ID] = now
		o.states.WithLabelValues(string(now.State)).Inc()
	}
	if was.Assignment != now.Assignment {
		was.Counters, was.StartedAt = machine.Counters{}, nil
	}
	add := func(c prometheus.Counter, before, after int64) {
		if after > before {
			c.Add(float64(after - before))
		}
	}
	add(o.restarts, was.Counters.Restarts, now.Counters.Restarts)
	add(o.retries, was.Counters.Retries, now.Counters.Retries)
	add(o.adopted, was.Counters.Adopted, now.Counters.Adopted)
	add(o.starts, was.Counters.Starts, now.Counters.Starts)
	add(o.silent, was.Counters.Silent, now.Counters.Silent)
	for verdict, n := range now.Counters.Ends {
		add(o.exits.WithLabelValues(string(verdict)), was.Counters.Ends[verdict], n)
	}
	if now.StartedAt != nil && (was.StartedAt == nil || !was.StartedAt.Equal(*now.StartedAt)) {
		o.started(now.Timings)
	}
}

// nameOf gives namespace and name of a VM that is here.
func (o *observer) nameOf(id string) (namespace, name string, ok bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	st, ok := o.last[id]
	return st.Namespace, st.Name, ok
}

func (o *observer) started(t machine.Timings) {
	var total time.Duration
	for _, s := range []struct {
		name string
		took time.Duration
	}{
		{"pull", t.Pull}, {"disk", t.Disk}, {"network", t.Network}, {"vmm", t.VMM}, {"kernel", t.Kernel}, {"guest", t.Guest}, {"workload", t.Workload},
	} {
		o.boot.WithLabelValues(s.name).Observe(s.took.Seconds())
		total += s.took
	}
	o.boot.WithLabelValues("total").Observe(total.Seconds())
}
