package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/clusterranges"
	"imp.dev/imp/internal/ipam"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Survey knows the addresses that a cluster has beside guests'. IPv4 only, as guests are.
type Survey struct {
	Client client.Reader
	// ClusterCIDRs are ranges of pods that no Node tells.
	ClusterCIDRs []netip.Prefix
}

// Seen is a cluster at one moment.
type Seen struct {
	// Ranges of everybody, in one order, each with its owner's name.
	Ranges []ipam.Range
	// Denied are the same ranges as agents are told them.
	Denied clusterranges.Ranges
	// MTU of the overlay on the node where it is smallest, 0 where no node has one.
	MTU int32
}

// Look at the cluster.
func (s *Survey) Look(ctx context.Context) (Seen, error) {
	nodes, imps, services := &corev1.NodeList{}, &v1alpha1.ImpNodeList{}, &networkingv1.ServiceCIDRList{}
	err := errors.Join(
		s.Client.List(ctx, nodes, client.UnsafeDisableDeepCopy), s.Client.List(ctx, imps, client.UnsafeDisableDeepCopy),
		s.Client.List(ctx, services, client.UnsafeDisableDeepCopy))
	if err != nil {
		return Seen{}, fmt.Errorf("reading which addresses the cluster has: %w", err)
	}
	seen := Seen{}
	for i := range nodes.Items {
		node := &nodes.Items[i]
		for _, a := range node.Status.Addresses {
			seen.node(node.Name, a.Address)
		}
		for _, cidr := range node.Spec.PodCIDRs {
			seen.add(&seen.Denied.Pods, cidr, "the range %s of pods on node %s", node.Name)
		}
	}
	for i := range imps.Items {
		imp := &imps.Items[i]
		for _, address := range append(slices.Clone(imp.Status.Network.Addresses), imp.Status.Network.Address) {
			seen.node(imp.Name, address)
		}
		if mtu := imp.Status.Network.MTU; imp.Status.Network.Address != "" && mtu > 0 && (seen.MTU == 0 || mtu < seen.MTU) {
			seen.MTU = mtu
		}
	}
	for _, cidr := range s.ClusterCIDRs {
		seen.add(&seen.Denied.Pods, cidr.String(), "the range %s of pods (%s)", "--cluster-cidr")
	}
	for i := range services.Items {
		for _, cidr := range services.Items[i].Spec.CIDRs {
			seen.add(&seen.Denied.Services, cidr, "the range %s of Services (ServiceCIDR %s)", services.Items[i].Name)
		}
	}
	slices.SortFunc(seen.Ranges, func(a, b ipam.Range) int {
		return cmp.Or(a.Prefix.Compare(b.Prefix), cmp.Compare(a.Of, b.Of))
	})
	seen.Ranges = slices.Compact(seen.Ranges)
	return seen, nil
}

// node enters an address of a node. A Node's addresses hold host names and IPv6 as well.
func (s *Seen) node(name, address string) {
	parsed, err := netip.ParseAddr(address)
	if err != nil || !parsed.Is4() {
		return
	}
	s.Denied.Nodes = append(s.Denied.Nodes, netip.PrefixFrom(parsed, parsed.BitLen()))
	s.Ranges = append(s.Ranges, ipam.Range{
		Prefix: netip.PrefixFrom(parsed, parsed.BitLen()), Of: fmt.Sprintf("the address %s of node %s", address, name),
	})
}

// add a range to a list; words name the range and its owner.
func (s *Seen) add(to *[]netip.Prefix, cidr, words, owner string) {
	prefix, err := netip.ParsePrefix(cidr)
	if err != nil || !prefix.Addr().Is4() {
		return
	}
	*to = append(*to, prefix.Masked())
	s.Ranges = append(s.Ranges, ipam.Range{Prefix: prefix.Masked(), Of: fmt.Sprintf(words, cidr, owner)})
}
