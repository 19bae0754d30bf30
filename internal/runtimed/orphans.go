package runtimed

import (
	"github.com/prometheus/client_golang/prometheus"

	"imp.dev/imp/internal/machine/engine"
	"imp.dev/imp/internal/metrics"
)

// orphans makes metrics of what the audit found and removed. Every kind is there from the start, so that an alert can see it grow.
type orphans struct {
	audited       func() (left map[string]int, removed map[string]int64)
	left, removed *prometheus.Desc
}

func newOrphans(audited func() (map[string]int, map[string]int64)) *orphans {
	describe := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc(prometheus.BuildFQName(metrics.Namespace, "", name), help, []string{"kind"}, nil)
	}
	return &orphans{
		audited: audited,
		left:    describe("orphaned_resources", "Things on this node that were nobody's in the latest audit, or, of kind record, records whose things are missing."),
		removed: describe("orphaned_resources_removed_total", "Things on this node that were nobody's and were removed."),
	}
}

// Describe implements prometheus.Collector.
func (o *orphans) Describe(out chan<- *prometheus.Desc) {
	out <- o.left
	out <- o.removed
}

// Collect implements prometheus.Collector.
func (o *orphans) Collect(out chan<- prometheus.Metric) {
	left, removed := o.audited()
	for _, kind := range engine.AuditKinds() {
		out <- prometheus.MustNewConstMetric(o.left, prometheus.GaugeValue, float64(left[kind]), kind)
		out <- prometheus.MustNewConstMetric(o.removed, prometheus.CounterValue, float64(removed[kind]), kind)
	}
}
