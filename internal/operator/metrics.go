package operator

import (
	"context"
	"fmt"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/metrics"
	"imp.dev/imp/internal/operator/vmstate"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// register adds the operator's own metrics and gives the histogram of placement.
func register(to prometheus.Registerer, cached client.Reader, clk clock.PassiveClock) (prometheus.Histogram, error) {
	latency := prometheus.NewHistogram(prometheus.HistogramOpts{
		Namespace: metrics.Namespace, Name: "vm_scheduling_latency_seconds",
		Help: "Time from a VM's creation to its first placement on a node.", Buckets: metrics.LatencyBuckets(),
	})
	for _, c := range []prometheus.Collector{latency, metrics.BuildInfo(component), newPopulation(cached, clk), newAddresses(cached)} {
		if err := to.Register(c); err != nil {
			return nil, fmt.Errorf("registering metrics: %w", err)
		}
	}
	return latency, nil
}

// population counts VMs when it is asked, so that no count can go astray.
type population struct {
	cached  client.Reader
	clock   clock.PassiveClock
	phase   *prometheus.Desc
	waiting *prometheus.Desc
}

func newPopulation(cached client.Reader, clk clock.PassiveClock) *population {
	return &population{
		cached: cached, clock: clk,
		phase: prometheus.NewDesc(metrics.Namespace+"_vm_phase", "Number of VMs by namespace and phase.",
			[]string{"namespace", "phase"}, nil),
		waiting: prometheus.NewDesc(metrics.Namespace+"_vm_oldest_unplaced_seconds",
			"Age of the oldest VM that wants a node and has none; 0 if there is none.", nil, nil),
	}
}

// Describe implements prometheus.Collector.
func (p *population) Describe(to chan<- *prometheus.Desc) {
	to <- p.phase
	to <- p.waiting
}

// Collect implements prometheus.Collector.
func (p *population) Collect(to chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	vms := &v1alpha1.ImpVMList{}
	if err := p.cached.List(ctx, vms, client.UnsafeDisableDeepCopy); err != nil {
		to <- prometheus.NewInvalidMetric(p.phase, err)
		return
	}
	type group struct {
		namespace string
		phase     v1alpha1.Phase
	}
	counts, oldest := map[group]int{}, time.Duration(0)
	for i := range vms.Items {
		vm := &vms.Items[i]
		phase := vm.Status.Phase
		if phase == "" {
			phase = v1alpha1.PhaseStarting // created a moment ago, and nobody has looked at it yet
		}
		counts[group{vm.Namespace, phase}]++
		if vmstate.Waiting(vm) {
			oldest = max(oldest, p.clock.Since(vm.CreationTimestamp.Time))
		}
	}
	for g, n := range counts {
		to <- prometheus.MustNewConstMetric(p.phase, prometheus.GaugeValue, float64(n), g.namespace, string(g.phase))
	}
	to <- prometheus.MustNewConstMetric(p.waiting, prometheus.GaugeValue, oldest.Seconds())
}

// addresses tells of each network how many it has, from its status: that counts them already.
type addresses struct {
	cached client.Reader
	desc   *prometheus.Desc
}

func newAddresses(cached client.Reader) *addresses {
	return &addresses{cached: cached, desc: prometheus.NewDesc(metrics.Namespace+"_network_addresses",
		"Number of a network's addresses by state: used, held (deleted VM, silent node), quarantined (not given out yet), free.",
		[]string{"namespace", "network", "state"}, nil)}
}

// Describe implements prometheus.Collector.
func (a *addresses) Describe(to chan<- *prometheus.Desc) { to <- a.desc }

// Collect implements prometheus.Collector.
func (a *addresses) Collect(to chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	networks := &v1alpha1.ImpNetworkList{}
	if err := a.cached.List(ctx, networks, client.UnsafeDisableDeepCopy); err != nil {
		to <- prometheus.NewInvalidMetric(a.desc, err)
		return
	}
	for i := range networks.Items {
		n := &networks.Items[i]
		s := n.Status
		for state, count := range map[string]int64{
			"used": s.Used, "held": s.Held, "quarantined": s.Quarantined, "free": s.Capacity - s.Used - s.Held - s.Quarantined,
		} {
			to <- prometheus.MustNewConstMetric(a.desc, prometheus.GaugeValue, float64(count), n.Namespace, n.Name, state)
		}
	}
}
