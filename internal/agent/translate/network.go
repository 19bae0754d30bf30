package translate

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/clusterranges"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/network"
)

// NetworkFacts is what a network's guests are told of it.
type NetworkFacts struct {
	Gateway            string
	MTU                int
	DNS, SearchDomains []string
}

// Settled says that the operator has settled all that a node must know of the network; else the error, a fault NetworkSetupFailed,
// says what is waited for.
func Settled(n *v1alpha1.ImpNetwork) error {
	if n.Status.VNI == 0 || n.Status.MTU == 0 || n.Status.Gateway == "" {
		return fault.Errorf(fault.NetworkSetupFailed, "setting up network",
			"the operator has not settled gateway, MTU and VNI of ImpNetwork %s/%s yet; its condition Ready says why", n.Namespace, n.Name)
	}
	return nil
}

// Facts of a network that is Settled.
func Facts(n *v1alpha1.ImpNetwork) NetworkFacts {
	return NetworkFacts{Gateway: n.Status.Gateway, MTU: int(n.Status.MTU), DNS: n.Spec.DNS, SearchDomains: n.Spec.SearchDomains}
}

// Network is all that node's runtime has to know of a network that is Settled: what is claimed in it and where, and what its guests
// may not reach.
//
// A claim without a node is of a guest that runs nowhere; one of this node is a guest of the runtime's own, which it knows better;
// one in quarantine is nobody's.
func Network(n *v1alpha1.ImpNetwork, claims []*v1alpha1.ImpAddress, ranges clusterranges.Ranges, node string) network.Spec {
	s := network.Spec{
		ID: string(n.UID), Namespace: n.Namespace, Name: n.Name,
		Subnet: n.Spec.Subnet, Gateway: n.Status.Gateway, MTU: int(n.Status.MTU), VNI: uint32(n.Status.VNI),
		NAT: n.Spec.NAT.Enabled, EgressInterface: n.Spec.NAT.EgressInterface,
	}
	for _, p := range ranges.Denied(n.Spec.NAT.ClusterAccess) {
		s.Denied = append(s.Denied, p.String())
	}
	type peer struct {
		address netip.Addr
		network.Peer
	}
	var peers []peer
	for _, c := range claims {
		held := c.Status.State == v1alpha1.AddressBound || c.Status.State == v1alpha1.AddressHeld
		if !held || c.Status.Node == "" || c.Status.Node == node || c.Status.VTEP == "" {
			continue
		}
		address, err := netip.ParseAddr(c.Spec.Address)
		if err != nil {
			continue // the API server lets none through
		}
		peers = append(peers, peer{address, network.Peer{Address: c.Spec.Address, MAC: c.Spec.MAC, VTEP: c.Status.VTEP}})
	}
	slices.SortFunc(peers, func(a, b peer) int { return cmp.Or(a.address.Compare(b.address), cmp.Compare(a.VTEP, b.VTEP)) })
	for _, p := range peers {
		s.Peers = append(s.Peers, p.Peer)
	}
	return s
}

// interfaces are those of a VM of a network, one for each address the operator has given it. facts holds every network of these.
func interfaces(vm *v1alpha1.ImpVM, facts map[types.UID]NetworkFacts) ([]network.Interface, error) {
	if vm.Spec.NetworkRef == nil {
		return nil, nil
	}
	if len(vm.Status.Addresses) == 0 {
		return nil, NoAddress(vm)
	}
	var out []network.Interface
	for i, a := range vm.Status.Addresses {
		f, ok := facts[a.NetworkUID]
		if !ok {
			return nil, fault.Errorf(fault.NetworkSetupFailed, "setting up network", "nothing is known of ImpNetwork %s/%s (%s) yet", vm.Namespace, a.Network, a.NetworkUID)
		}
		out = append(out, network.Interface{
			Name: fmt.Sprintf("eth%d", i), Network: string(a.NetworkUID), MAC: a.MAC, Addresses: []string{fmt.Sprintf("%s/%d", a.Address, a.Prefix)},
			Gateway: f.Gateway, MTU: f.MTU, Nameservers: f.DNS, SearchDomains: f.SearchDomains,
		})
	}
	return out, nil
}

// NoAddress is the reason why a VM of a network waits that the operator has given no address.
func NoAddress(vm *v1alpha1.ImpVM) error {
	return fault.Errorf(fault.NetworkSetupFailed, "setting up network", "the operator has not given the VM an address in ImpNetwork %s/%s yet",
		vm.Namespace, vm.Spec.NetworkRef.Name)
}
