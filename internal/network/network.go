// Package network is the contract for giving a VM an interface on this host.
//
// The first implementation, none, serves VMs without a network: they have a loopback only. What a real one owns carries the
// runtime's instance and the VM's ID, so that Audit can tell its own from a stranger's.
package network

import (
	"context"
	"os"
)

// Interface is one NIC as the VM's spec wants it.
type Interface struct {
	// Name inside the spec; unique within the VM.
	Name string `json:"name"`
	MAC  string `json:"mac"`
	// Addresses in CIDR form, Gateway, MTU, Nameservers and SearchDomains go to the guest through Configure.
	Addresses     []string `json:"addresses,omitempty"`
	Gateway       string   `json:"gateway,omitempty"`
	MTU           int      `json:"mtu,omitempty"`
	Nameservers   []string `json:"nameservers,omitempty"`
	SearchDomains []string `json:"searchDomains,omitempty"`
}

// Attachment is an interface that is ready for a VMM. TAP is open and inherited by the VMM; the caller closes it after
// the VMM was started.
type Attachment struct {
	Interface Interface
	TAP       *os.File
}

// Network wires VMs on this host. Every method is idempotent; errors are fault.Errors with NetworkSetupFailed, and a failed
// Attach has undone what it did.
type Network interface {
	// Attach makes what the VM's interfaces need and opens the TAPs.
	Attach(ctx context.Context, vmID string, interfaces []Interface) ([]Attachment, error)
	// Detach removes everything of the VM; no attachment is success. The VMM must be gone (an open TAP cannot be reused).
	Detach(ctx context.Context, vmID string) error
	// Attached lists the IDs of VMs that have something here, for the audit.
	Attached(ctx context.Context) ([]string, error)
}
