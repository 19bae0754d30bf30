package rpc

import (
	"context"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	runtimev1 "imp.dev/imp/api/runtime/v1"
	"imp.dev/imp/internal/machine"
)

var _ machine.Keeper = (*Client)(nil)

// RegisterKeeper makes s, which is of NewServer and does not serve yet, offer keeper to those of its peers that have one of uids: the
// agent is let in to the socket and is no administrator of the node.
func RegisterKeeper(s *grpc.Server, keeper machine.Keeper, uids []uint32) {
	runtimev1.RegisterKeeperServer(s, &keeperServer{keeper: keeper, uids: uids})
}

type keeperServer struct {
	runtimev1.UnimplementedKeeperServer
	keeper machine.Keeper
	uids   []uint32
}

// admit says whether the caller may use the Keeper.
func (s *keeperServer) admit(ctx context.Context) error {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return status.Error(codes.PermissionDenied, "only an administrator of the node may do this, and nobody knows who asks")
	}
	info, ok := p.AuthInfo.(PeerInfo)
	if !ok || !slices.Contains(s.uids, info.UID) {
		return status.Errorf(codes.PermissionDenied, "only root may do this, and uid %d asks: run it as root", info.UID)
	}
	return nil
}

// Audit implements runtimev1.KeeperServer.
func (s *keeperServer) Audit(ctx context.Context, r *runtimev1.AuditRequest) (*runtimev1.AuditResponse, error) {
	if err := s.admit(ctx); err != nil {
		return nil, err
	}
	found, err := s.keeper.Audit(ctx, r.GetRepair())
	if err != nil {
		return nil, errorToWire(err)
	}
	return &runtimev1.AuditResponse{Findings: mapSlice(found, func(f machine.Finding) *runtimev1.Finding {
		return &runtimev1.Finding{
			Kind: f.Kind, Id: validText(f.ID), Name: []byte(f.Name), Since: timestampValue(f.Since), Repaired: f.Repaired, Problem: []byte(f.Problem),
		}
	})}, nil
}

// Trash implements runtimev1.KeeperServer.
func (s *keeperServer) Trash(ctx context.Context, _ *runtimev1.TrashRequest) (*runtimev1.TrashResponse, error) {
	if err := s.admit(ctx); err != nil {
		return nil, err
	}
	all, err := s.keeper.Trash(ctx)
	if err != nil {
		return nil, errorToWire(err)
	}
	return &runtimev1.TrashResponse{Disks: mapSlice(all, func(d machine.Discarded) *runtimev1.Discarded {
		return &runtimev1.Discarded{
			Name: validText(d.Name), Id: validText(d.ID), VmNamespace: d.VMNamespace, Vm: d.VM, BaseDigest: d.BaseDigest, Gib: d.GiB, Bytes: d.Bytes,
			DiscardedAt: timestampValue(d.DiscardedAt), ExpiresAt: timestampValue(d.ExpiresAt), Why: []byte(d.Why),
		}
	})}, nil
}

// Restore implements runtimev1.KeeperServer.
func (s *keeperServer) Restore(ctx context.Context, r *runtimev1.RestoreRequest) (*runtimev1.RestoreResponse, error) {
	if err := s.admit(ctx); err != nil {
		return nil, err
	}
	if err := s.keeper.Restore(ctx, r.GetName(), r.GetId()); err != nil {
		return nil, errorToWire(err)
	}
	return &runtimev1.RestoreResponse{}, nil
}

func (c *Client) keeper() runtimev1.KeeperClient { return runtimev1.NewKeeperClient(c.conn) }

// Audit implements machine.Keeper.
func (c *Client) Audit(ctx context.Context, repair bool) ([]machine.Finding, error) {
	r, err := c.keeper().Audit(ctx, &runtimev1.AuditRequest{Repair: repair})
	if err != nil {
		return nil, errorFromWire("auditing node", err)
	}
	return mapSlice(r.GetFindings(), func(f *runtimev1.Finding) machine.Finding {
		return machine.Finding{
			Kind: f.GetKind(), ID: f.GetId(), Name: string(f.GetName()), Since: instantValue(f.GetSince()), Repaired: f.GetRepaired(), Problem: string(f.GetProblem()),
		}
	}), nil
}

// Trash implements machine.Keeper.
func (c *Client) Trash(ctx context.Context) ([]machine.Discarded, error) {
	r, err := c.keeper().Trash(ctx, &runtimev1.TrashRequest{})
	if err != nil {
		return nil, errorFromWire("listing trash", err)
	}
	return mapSlice(r.GetDisks(), func(d *runtimev1.Discarded) machine.Discarded {
		return machine.Discarded{
			Name: d.GetName(), ID: d.GetId(), VMNamespace: d.GetVmNamespace(), VM: d.GetVm(), BaseDigest: d.GetBaseDigest(), GiB: d.GetGib(), Bytes: d.GetBytes(),
			DiscardedAt: instantValue(d.GetDiscardedAt()), ExpiresAt: instantValue(d.GetExpiresAt()), Why: string(d.GetWhy()),
		}
	}), nil
}

// Restore implements machine.Keeper.
func (c *Client) Restore(ctx context.Context, name, id string) error {
	_, err := c.keeper().Restore(ctx, &runtimev1.RestoreRequest{Name: name, Id: id})
	return errorFromWire("restoring disk", err)
}
