package translate

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/clusterranges"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/network"
)

func settled(change ...func(*v1alpha1.ImpNetwork)) *v1alpha1.ImpNetwork {
	n := &v1alpha1.ImpNetwork{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "apps", UID: "22222222-3333"},
		Spec: v1alpha1.ImpNetworkSpec{
			Subnet: "10.44.0.0/16", NAT: v1alpha1.NetworkNAT{Enabled: true, EgressInterface: "eth1"}, DNS: []string{"192.0.2.53"}, SearchDomains: []string{"apps.test"},
		},
		Status: v1alpha1.ImpNetworkStatus{Gateway: "10.44.0.1", MTU: 1450, VNI: 7},
	}
	for _, c := range change {
		c(n)
	}
	return n
}

func claim(address, node string, change ...func(*v1alpha1.ImpAddress)) *v1alpha1.ImpAddress {
	c := &v1alpha1.ImpAddress{
		Spec:   v1alpha1.ImpAddressSpec{Address: address, MAC: "02:00:00:00:00:09"},
		Status: v1alpha1.ImpAddressStatus{State: v1alpha1.AddressBound, Node: node, VTEP: "192.0.2.9"},
	}
	for _, f := range change {
		f(c)
	}
	return c
}

func TestNetwork(t *testing.T) {
	ranges := clusterranges.Ranges{
		Nodes: []netip.Prefix{netip.MustParsePrefix("192.0.2.1/32")}, Pods: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")},
		Services: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")},
	}
	plain := network.Spec{
		ID: "22222222-3333", Namespace: "team", Name: "apps", Subnet: "10.44.0.0/16", Gateway: "10.44.0.1", MTU: 1450, VNI: 7, NAT: true, EgressInterface: "eth1",
		Denied: []string{"10.96.0.0/12", "10.244.0.0/16", "192.0.2.1/32"},
	}
	peer := func(address string) network.Peer {
		return network.Peer{Address: address, MAC: "02:00:00:00:00:09", VTEP: "192.0.2.9"}
	}
	state := func(s v1alpha1.AddressState) func(*v1alpha1.ImpAddress) {
		return func(c *v1alpha1.ImpAddress) { c.Status.State = s }
	}
	for name, c := range map[string]struct {
		network *v1alpha1.ImpNetwork
		claims  []*v1alpha1.ImpAddress
		want    func(*network.Spec)
	}{
		"a network without guests elsewhere": {settled(), nil, func(*network.Spec) {}},
		"a network that may reach pods and Services keeps away from nodes": {
			settled(func(n *v1alpha1.ImpNetwork) { n.Spec.NAT.ClusterAccess = true }), nil, func(s *network.Spec) { s.Denied = []string{"192.0.2.1/32"} },
		},
		"peers are in order of their addresses' numbers": {
			settled(), []*v1alpha1.ImpAddress{claim("10.44.0.10", "n2"), claim("10.44.0.9", "n2"), claim("10.44.1.2", "n3")},
			func(s *network.Spec) {
				s.Peers = []network.Peer{peer("10.44.0.9"), peer("10.44.0.10"), peer("10.44.1.2")}
			},
		},
		"a guest that may still run on its silent node is a peer":  {settled(), []*v1alpha1.ImpAddress{claim("10.44.0.9", "n2", state(v1alpha1.AddressHeld))}, func(s *network.Spec) { s.Peers = []network.Peer{peer("10.44.0.9")} }},
		"an address in quarantine is nobody's":                     {settled(), []*v1alpha1.ImpAddress{claim("10.44.0.9", "n2", state(v1alpha1.AddressQuarantined))}, func(*network.Spec) {}},
		"a guest of this node is none":                             {settled(), []*v1alpha1.ImpAddress{claim("10.44.0.9", "n1")}, func(*network.Spec) {}},
		"a guest that runs nowhere is none":                        {settled(), []*v1alpha1.ImpAddress{claim("10.44.0.9", "")}, func(*network.Spec) {}},
		"a guest on a node without a place in the overlay is none": {settled(), []*v1alpha1.ImpAddress{claim("10.44.0.9", "n2", func(c *v1alpha1.ImpAddress) { c.Status.VTEP = "" })}, func(*network.Spec) {}},
	} {
		t.Run(name, func(t *testing.T) {
			want := plain
			c.want(&want)
			got := Network(c.network, c.claims, ranges, "n1")
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("network differs (-want +got):\n%s", d)
			}
			if err := machine.ValidateNetwork(got); err != nil {
				t.Errorf("the runtime would refuse it: %v", err)
			}
		})
	}
}

func TestANetworkIsWaitedForUntilItIsSettled(t *testing.T) {
	if err := Settled(settled()); err != nil {
		t.Errorf("a settled network: %v", err)
	}
	for name, change := range map[string]func(*v1alpha1.ImpNetworkStatus){
		"VNI":     func(s *v1alpha1.ImpNetworkStatus) { s.VNI = 0 },
		"MTU":     func(s *v1alpha1.ImpNetworkStatus) { s.MTU = 0 },
		"gateway": func(s *v1alpha1.ImpNetworkStatus) { s.Gateway = "" },
	} {
		err := Settled(settled(func(n *v1alpha1.ImpNetwork) { change(&n.Status) }))
		if !fault.Is(err, fault.NetworkSetupFailed) || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "team/apps") {
			t.Errorf("without %s: %v", name, err)
		}
	}
}
