package runtimed

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"imp.dev/imp/internal/metrics"
	"imp.dev/imp/internal/network"
)

// countTime bounds the counting of one scrape.
const countTime = 5 * time.Second

// traffic makes metrics of what guests' interfaces count. It counts when it is asked, so that nothing runs at rest.
type traffic struct {
	network network.Network
	// nameOf gives namespace and name of a VM that is here.
	nameOf                            func(id string) (namespace, name string, ok bool)
	received, sent, dropped, problems *prometheus.Desc
}

// newTraffic makes the collector. The label vm is the VM's UID: a VM that is being removed and its namesake are two.
func newTraffic(n network.Network, nameOf func(string) (string, string, bool)) *traffic {
	describe := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(prometheus.BuildFQName(metrics.Namespace, "", name), help, labels, nil)
	}
	labels := []string{"namespace", "name", "vm", "interface"}
	return &traffic{
		network: n, nameOf: nameOf,
		received: describe("vm_network_received_bytes_total", "Bytes a VM's interface has received.", labels...),
		sent:     describe("vm_network_sent_bytes_total", "Bytes a VM's interface has sent.", labels...),
		dropped:  describe("vm_network_dropped_packets_total", "Packets a VM sent that were not its to send: a foreign MAC or address, a VLAN tag, neither ARP nor IPv4.", labels...),
		problems: describe("network_problems", "Networks on this node that are not as they should be and cannot be repaired at the moment."),
	}
}

// Describe implements prometheus.Collector.
func (t *traffic) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{t.received, t.sent, t.dropped, t.problems} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (t *traffic) Collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), countTime)
	defer cancel()
	if all, err := t.network.Counters(ctx); err != nil {
		out <- prometheus.NewInvalidMetric(t.received, err)
	} else {
		for _, c := range all {
			t.count(out, c)
		}
	}
	networks, err := t.network.Networks(ctx)
	if err != nil {
		out <- prometheus.NewInvalidMetric(t.problems, err)
		return
	}
	problems := 0
	for _, n := range networks {
		if n.Problem != "" {
			problems++
		}
	}
	out <- prometheus.MustNewConstMetric(t.problems, prometheus.GaugeValue, float64(problems))
}

func (t *traffic) count(out chan<- prometheus.Metric, c network.Counters) {
	namespace, name, ok := t.nameOf(c.VM)
	if !ok {
		return // what is left of a VM without a record is reaped soon
	}
	for desc, value := range map[*prometheus.Desc]uint64{t.received: c.ReceivedBytes, t.sent: c.SentBytes, t.dropped: c.Dropped} {
		out <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(value), namespace, name, c.VM, c.Interface)
	}
}
