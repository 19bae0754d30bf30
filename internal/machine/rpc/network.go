package rpc

import (
	"context"

	runtimev1 "imp.dev/imp/api/runtime/v1"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/network"
)

// SetNetwork implements machine.Service.
func (c *Client) SetNetwork(ctx context.Context, spec network.Spec) error {
	if err := machine.ValidateNetwork(spec); err != nil {
		return err
	}
	_, err := c.client.SetNetwork(ctx, &runtimev1.SetNetworkRequest{Network: networkToWire(spec)})
	return errorFromWire("setting network", err)
}

// ForgetNetwork implements machine.Service.
func (c *Client) ForgetNetwork(ctx context.Context, id string) error {
	_, err := c.client.ForgetNetwork(ctx, &runtimev1.ForgetNetworkRequest{Id: id})
	return errorFromWire("forgetting network", err)
}

// Networks implements machine.Service.
func (c *Client) Networks(ctx context.Context) ([]network.Status, error) {
	r, err := c.client.Networks(ctx, &runtimev1.NetworksRequest{})
	if err != nil {
		return nil, errorFromWire("listing networks", err)
	}
	return mapSlice(r.GetNetworks(), func(n *runtimev1.NetworkStatus) network.Status {
		return network.Status{ID: n.GetId(), Guests: int(n.GetGuests()), Problem: n.GetProblem()}
	}), nil
}

func (s *server) SetNetwork(ctx context.Context, r *runtimev1.SetNetworkRequest) (*runtimev1.SetNetworkResponse, error) {
	if err := s.service.SetNetwork(ctx, networkFromWire(r.GetNetwork())); err != nil {
		return nil, errorToWire(err)
	}
	return &runtimev1.SetNetworkResponse{}, nil
}

func (s *server) ForgetNetwork(ctx context.Context, r *runtimev1.ForgetNetworkRequest) (*runtimev1.ForgetNetworkResponse, error) {
	if err := s.service.ForgetNetwork(ctx, r.GetId()); err != nil {
		return nil, errorToWire(err)
	}
	return &runtimev1.ForgetNetworkResponse{}, nil
}

func (s *server) Networks(ctx context.Context, _ *runtimev1.NetworksRequest) (*runtimev1.NetworksResponse, error) {
	all, err := s.service.Networks(ctx)
	if err != nil {
		return nil, errorToWire(err)
	}
	return &runtimev1.NetworksResponse{Networks: mapSlice(all, func(n network.Status) *runtimev1.NetworkStatus {
		return &runtimev1.NetworkStatus{Id: n.ID, Guests: int64(n.Guests), Problem: validText(n.Problem)}
	})}, nil
}

func networkToWire(s network.Spec) *runtimev1.Network {
	return &runtimev1.Network{
		Id: s.ID, Namespace: s.Namespace, Name: s.Name, Subnet: s.Subnet, Gateway: s.Gateway, Mtu: int64(s.MTU), Vni: s.VNI,
		Nat: s.NAT, EgressInterface: s.EgressInterface, Denied: s.Denied,
		Peers: mapSlice(s.Peers, func(p network.Peer) *runtimev1.Peer {
			return &runtimev1.Peer{Address: p.Address, Mac: p.MAC, Vtep: p.VTEP}
		}),
	}
}

func networkFromWire(s *runtimev1.Network) network.Spec {
	return network.Spec{
		ID: s.GetId(), Namespace: s.GetNamespace(), Name: s.GetName(), Subnet: s.GetSubnet(), Gateway: s.GetGateway(), MTU: int(s.GetMtu()),
		VNI: s.GetVni(), NAT: s.GetNat(), EgressInterface: s.GetEgressInterface(), Denied: s.GetDenied(),
		Peers: mapSlice(s.GetPeers(), func(p *runtimev1.Peer) network.Peer {
			return network.Peer{Address: p.GetAddress(), MAC: p.GetMac(), VTEP: p.GetVtep()}
		}),
	}
}

func hostToWire(h network.Host) *runtimev1.NetworkHost {
	return &runtimev1.NetworkHost{
		Vtep: h.VTEP, Mtu: int64(h.MTU), Port: int64(h.Port), Addresses: h.Addresses, ForwardBlocked: validText(h.ForwardBlocked),
	}
}

func hostFromWire(h *runtimev1.NetworkHost) network.Host {
	return network.Host{
		VTEP: h.GetVtep(), MTU: int(h.GetMtu()), Port: int(h.GetPort()), Addresses: h.GetAddresses(), ForwardBlocked: h.GetForwardBlocked(),
	}
}
