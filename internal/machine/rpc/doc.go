// Package rpc carries machine.Service over gRPC on a UNIX socket: Serve on the runtime's side, Client on the agent's.
//
//	agent ── Client ──► /run/imp/runtime.sock ──► server (peer's uid checked) ──► machine.Service
//
// A reason survives the wire: a fault.Error becomes a gRPC code for strangers and a FaultDetail for the Client, which makes the
// same fault.Error of it. Nothing here logs a request: it may hold credentials.
package rpc

// Sizes in bytes. A request holds at most machine.MaxWorkloadBytes of workload beside small things, or a network of machine.MaxPeers
// at some 55 bytes each; a list a few KiB a VM.
const (
	maxRequest  = 8 << 20
	maxResponse = 64 << 20
	// MaxConsole is the most one Console call gives.
	MaxConsole = 1 << 20
)
