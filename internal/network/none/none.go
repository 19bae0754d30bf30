// Package none is the network of a node that has none: its VMs have a loopback and nothing else.
package none

import (
	"context"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/network"
)

// Network refuses every network and every interface.
type Network struct{}

var _ network.Network = Network{}

// Host implements network.Network: the node has no place in networks.
func (Network) Host(context.Context) (network.Host, error) { return network.Host{}, nil }

// Set implements network.Network.
func (Network) Set(_ context.Context, spec network.Spec) error {
	return fault.Permanent(fault.Errorf(fault.NetworkSetupFailed, "setting network", "this node has no networks, so not %s/%s either", spec.Namespace, spec.Name))
}

// Forget implements network.Network.
func (Network) Forget(context.Context, string) error { return nil }

// Networks implements network.Network.
func (Network) Networks(context.Context) ([]network.Status, error) { return nil, nil }

// Attach implements network.Network: only a VM without interfaces can be served.
func (Network) Attach(_ context.Context, _ string, interfaces []network.Interface) ([]network.Attachment, error) {
	if len(interfaces) > 0 {
		return nil, fault.Permanent(fault.Errorf(fault.NetworkSetupFailed, "attaching network", "this node has no networks, and the VM has %d interfaces", len(interfaces)))
	}
	return nil, nil
}

// Detach implements network.Network.
func (Network) Detach(context.Context, string) error { return nil }

// Attached implements network.Network.
func (Network) Attached(context.Context) ([]string, error) { return nil, nil }

// Audit implements network.Network.
func (Network) Audit(context.Context, bool) ([]network.Finding, error) { return nil, nil }

// Counters implements network.Network.
func (Network) Counters(context.Context) ([]network.Counters, error) { return nil, nil }
