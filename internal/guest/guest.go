// Package guest is the contract for what the host can ask of a running guest.
//
// A Client speaks to one boot of one guest and survives the loss of its connection: each call dials again when needed, and
// every call is safe to repeat (see api/guest/v1 for the protocol's own promises).
package guest

import (
	"context"
	"errors"
	"io"
	"net"

	guestv1 "imp.dev/imp/api/guest/v1"
)

// Dialer opens the host's end of the byte pipe into a guest: for QEMU the UNIX socket of the virtio-serial port, for
// Firecracker the vsock socket after its CONNECT line. One open connection at a time; the caller closes it.
type Dialer func(ctx context.Context) (net.Conn, error)

// ErrGone says that the guest can no longer be asked: the machine has ended. Every blocked call returns it once the Dialer
// reports it (a Dialer wraps it when the VMM is gone).
var ErrGone = errors.New("guest is gone")

// ErrNotStarted answers Wait, Stop and Output before Start was accepted.
var ErrNotStarted = errors.New("workload not started")

// ErrConflict answers a Start whose ID differs from the one already accepted in this boot.
var ErrConflict = errors.New("another workload was started in this boot")

// RefusedError is a guest's own word that it could not do what was asked; asking again is no use.
type RefusedError struct{ Code, Message string }

func (e *RefusedError) Error() string { return e.Message }

// Client is one guest. Calls may run concurrently. All honour ctx; without a deadline they wait for as long as the guest may
// still come (reconnecting with short pauses), until ErrGone.
type Client interface {
	Hello(ctx context.Context) (guestv1.Hello, error)
	Configure(ctx context.Context, c guestv1.Configure) error
	Start(ctx context.Context, s guestv1.Start) error
	// Wait blocks until the workload has ended. It may be called again after any interruption and gives the same answer.
	Wait(ctx context.Context) (guestv1.Exit, error)
	// Acknowledge tells the guest that the exit is on record; the guest then syncs its disks and stops the machine.
	Acknowledge(ctx context.Context) error
	Stop(ctx context.Context, s guestv1.Stop) error
	Probe(ctx context.Context, p guestv1.Probe) (guestv1.ProbeResult, error)
	// Output copies the workload's output from offset on to w and returns the offset after the last byte written. A gap (the
	// ring has wrapped) is told by a first offset greater than asked.
	Output(ctx context.Context, o guestv1.Output, w io.Writer) (first, next int64, err error)
	// Close ends the connection; the guest is not told and goes on.
	Close() error
}
