// Package none is the network of a node that has none: its VMs have a loopback and nothing else.
package none

import (
	"context"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/network"
)

// Network refuses every interface.
type Network struct{}

var _ network.Network = Network{}

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
