package rpc

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	runtimev1 "imp.dev/imp/api/runtime/v1"
	"imp.dev/imp/internal/machine"
)

// Client is a machine.Service at the other end of a UNIX socket. It dials when first used and again after every loss; while the
// runtime is away, calls fail with fault Unavailable at once. A Watch that loses its runtime returns Unavailable: its caller
// watches again and is told everything anew.
type Client struct {
	conn   *grpc.ClientConn
	client runtimev1.RuntimeClient
}

var _ machine.Service = (*Client)(nil)

// NewClient makes a Client for the socket at path. It does not connect yet.
func NewClient(path string) (*Client, error) {
	conn, err := grpc.NewClient("unix:"+path,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxResponse), grpc.MaxCallSendMsgSize(maxRequest)),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 2 * time.Second},
			MinConnectTimeout: 2 * time.Second,
		}),
		grpc.WithIdleTimeout(0),
	)
	if err != nil {
		return nil, fmt.Errorf("making client for %s: %w", path, err)
	}
	return &Client{conn: conn, client: runtimev1.NewRuntimeClient(conn)}, nil
}

// Close ends the connection and every call on it.
func (c *Client) Close() error { return c.conn.Close() }

// Info implements machine.Service.
func (c *Client) Info(ctx context.Context) (machine.Info, error) {
	r, err := c.client.Info(ctx, &runtimev1.InfoRequest{})
	if err != nil {
		return machine.Info{}, errorFromWire("asking runtime", err)
	}
	return infoFromWire(r), nil
}

// Ensure implements machine.Service.
func (c *Client) Ensure(ctx context.Context, spec machine.Spec) (machine.Status, error) {
	// What the runtime would refuse is refused here first: a broken string cannot even be sent.
	if err := machine.Validate(spec); err != nil {
		return machine.Status{}, err
	}
	r, err := c.client.Ensure(ctx, &runtimev1.EnsureRequest{Spec: specToWire(spec)})
	if err != nil {
		return machine.Status{}, errorFromWire("ordering VM", err)
	}
	return statusFromWire(r.GetStatus()), nil
}

// Remove implements machine.Service.
func (c *Client) Remove(ctx context.Context, ref machine.Ref, how machine.Removal) (machine.Status, error) {
	r, err := c.client.Remove(ctx, &runtimev1.RemoveRequest{Id: ref.ID, Assignment: ref.Assignment, Grace: duration(how.Grace), KeepDisk: how.KeepDisk})
	if err != nil {
		return machine.Status{}, errorFromWire("ordering removal", err)
	}
	return statusFromWire(r.GetStatus()), nil
}

// List implements machine.Service.
func (c *Client) List(ctx context.Context) ([]machine.Status, error) {
	r, err := c.client.List(ctx, &runtimev1.ListRequest{})
	if err != nil {
		return nil, errorFromWire("listing VMs", err)
	}
	return mapSlice(r.GetStatuses(), statusFromWire), nil
}

// Watch implements machine.Service.
func (c *Client) Watch(ctx context.Context, each func(machine.Update) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the stream when each has failed
	stream, err := c.client.Watch(ctx, &runtimev1.WatchRequest{})
	if err != nil {
		return errorFromWire("watching VMs", err)
	}
	for {
		m, err := stream.Recv()
		if err != nil {
			return errorFromWire("watching VMs", err)
		}
		u := machine.Update{Synced: m.GetSynced()}
		if m.Status != nil {
			st := statusFromWire(m.Status)
			u.Status = &st
		}
		if err := each(u); err != nil {
			return err
		}
	}
}

// Console implements machine.Service.
func (c *Client) Console(ctx context.Context, id string, offset int64, max int) (machine.ConsoleChunk, error) {
	r, err := c.client.Console(ctx, &runtimev1.ConsoleRequest{Id: id, Offset: offset, Max: int64(max)})
	if err != nil {
		return machine.ConsoleChunk{}, errorFromWire("reading console", err)
	}
	return machine.ConsoleChunk{Offset: r.GetOffset(), Data: r.GetData(), Size: r.GetSize()}, nil
}
