package rpc

import (
	"context"
	"math"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	runtimev1 "imp.dev/imp/api/runtime/v1"
	"imp.dev/imp/internal/machine"
)

// NewServer makes a gRPC server that offers service to peers with one of the uids. The caller serves it on a UNIX listener
// and stops it; Stop ends every Watch.
func NewServer(service machine.Service, uids []uint32) *grpc.Server {
	s := grpc.NewServer(
		grpc.Creds(newPeerCredentials(uids)),
		grpc.MaxRecvMsgSize(maxRequest),
		grpc.MaxSendMsgSize(math.MaxInt32),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: time.Minute, Timeout: 20 * time.Second}),
	)
	runtimev1.RegisterRuntimeServer(s, &server{service: service})
	return s
}

type server struct {
	runtimev1.UnimplementedRuntimeServer
	service machine.Service
}

func (s *server) Info(ctx context.Context, _ *runtimev1.InfoRequest) (*runtimev1.InfoResponse, error) {
	info, err := s.service.Info(ctx)
	if err != nil {
		return nil, errorToWire(err)
	}
	return infoToWire(info), nil
}

func (s *server) Ensure(ctx context.Context, r *runtimev1.EnsureRequest) (*runtimev1.EnsureResponse, error) {
	st, err := s.service.Ensure(ctx, specFromWire(r.GetSpec()))
	if err != nil {
		return nil, errorToWire(err)
	}
	return &runtimev1.EnsureResponse{Status: statusToWire(st)}, nil
}

func (s *server) Remove(ctx context.Context, r *runtimev1.RemoveRequest) (*runtimev1.RemoveResponse, error) {
	st, err := s.service.Remove(ctx, machine.Ref{ID: r.GetId(), Assignment: r.GetAssignment()}, machine.Removal{Grace: r.GetGrace().AsDuration(), KeepDisk: r.GetKeepDisk()})
	if err != nil {
		return nil, errorToWire(err)
	}
	return &runtimev1.RemoveResponse{Status: statusToWire(st)}, nil
}

func (s *server) List(ctx context.Context, _ *runtimev1.ListRequest) (*runtimev1.ListResponse, error) {
	list, err := s.service.List(ctx)
	if err != nil {
		return nil, errorToWire(err)
	}
	return &runtimev1.ListResponse{Statuses: mapSlice(list, statusToWire)}, nil
}

func (s *server) Watch(_ *runtimev1.WatchRequest, stream grpc.ServerStreamingServer[runtimev1.WatchResponse]) error {
	return errorToWire(s.service.Watch(stream.Context(), func(u machine.Update) error {
		m := &runtimev1.WatchResponse{Synced: u.Synced}
		if u.Status != nil {
			m.Status = statusToWire(*u.Status)
		}
		return stream.Send(m)
	}))
}

func (s *server) Console(ctx context.Context, r *runtimev1.ConsoleRequest) (*runtimev1.ConsoleResponse, error) {
	chunk, err := s.service.Console(ctx, r.GetId(), r.GetOffset(), int(min(r.GetMax(), MaxConsole)))
	if err != nil {
		return nil, errorToWire(err)
	}
	return &runtimev1.ConsoleResponse{Offset: chunk.Offset, Data: chunk.Data, Size: chunk.Size}, nil
}
