package agent

import "github.com/prometheus/client_golang/prometheus"

// agentMetrics are the agent's own. Those of the VMs are the runtime's.
type agentMetrics struct {
	writes     *prometheus.CounterVec
	reconnects prometheus.Counter
	connected  prometheus.Gauge
	absent     prometheus.Gauge
}

func newMetrics(r prometheus.Registerer) *agentMetrics {
	m := &agentMetrics{
		writes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "imp", Subsystem: "agent", Name: "writes_total",
			Help: "Writes to the API server by kind of object and result (written, conflict, gone, denied, failed).",
		}, []string{"kind", "result"}),
		reconnects: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: "imp", Subsystem: "agent", Name: "runtime_reconnects_total",
			Help: "Times the stream of VM states from the runtime was opened again.",
		}),
		connected: prometheus.NewGauge(prometheus.GaugeOpts{
			Namespace: "imp", Subsystem: "agent", Name: "runtime_connected",
			Help: "1 while the runtime tells the states of its VMs, else 0.",
		}),
		absent: prometheus.NewGauge(prometheus.GaugeOpts{
			Namespace: "imp", Subsystem: "agent", Name: "absent_vms",
			Help: "VMs on this node whose objects are gone without an order to remove them. They go on.",
		}),
	}
	r.MustRegister(m.writes, m.reconnects, m.connected, m.absent)
	return m
}
