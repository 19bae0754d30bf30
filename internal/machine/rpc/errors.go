package rpc

import (
	"context"
	"errors"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	runtimev1 "imp.dev/imp/api/runtime/v1"
	"imp.dev/imp/internal/fault"
)

// maxMessage bounds an error's text, which travels in trailers.
const maxMessage = 4 << 10

func codeOf(reason fault.Reason) codes.Code {
	switch reason {
	case fault.InvalidSpec:
		return codes.InvalidArgument
	case fault.StaleAssignment:
		return codes.FailedPrecondition
	case fault.NoCapacity:
		return codes.ResourceExhausted
	case fault.NotFound:
		return codes.NotFound
	case fault.Unavailable:
		return codes.Unavailable
	default:
		return codes.Internal
	}
}

// errorToWire gives err the code of its reason, and the reason itself as a detail.
func errorToWire(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, context.Canceled):
		return status.FromContextError(context.Canceled).Err()
	case errors.Is(err, context.DeadlineExceeded):
		return status.FromContextError(context.DeadlineExceeded).Err()
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	f := fault.Of(err)
	text := f.Error()
	if len(text) > maxMessage {
		text = text[:maxMessage]
	}
	st := status.New(codeOf(f.Reason), validText(text))
	cause := strings.TrimPrefix(text, f.Stage+": ")
	detailed, detailErr := st.WithDetails(&runtimev1.FaultDetail{
		Reason: string(f.Reason), Stage: validText(f.Stage), Permanent: f.Permanent, Message: []byte(cause),
	})
	if detailErr != nil {
		return st.Err()
	}
	return detailed.Err()
}

// validText is what a string field can carry.
func validText(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

// errorFromWire makes the fault.Error again that errorToWire was given. An error of the connection is Unavailable.
func errorFromWire(stage string, err error) error {
	if err == nil {
		return nil
	}
	st, ok := status.FromError(err)
	if !ok {
		return fault.New(fault.Internal, stage, err)
	}
	for _, d := range st.Details() {
		if f, ok := d.(*runtimev1.FaultDetail); ok {
			return &fault.Error{Reason: fault.Reason(f.GetReason()), Stage: f.GetStage(), Permanent: f.GetPermanent(), Err: errors.New(string(f.GetMessage()))}
		}
	}
	switch st.Code() {
	case codes.Canceled:
		return context.Canceled
	case codes.DeadlineExceeded:
		return context.DeadlineExceeded
	case codes.Unavailable, codes.PermissionDenied, codes.Unauthenticated:
		return fault.New(fault.Unavailable, stage, errors.New(st.Message()))
	case codes.Unimplemented:
		return fault.Permanent(fault.Errorf(fault.Unavailable, stage, "the runtime is too old for this call: %s", st.Message()))
	default:
		return fault.New(fault.Internal, stage, errors.New(st.Message()))
	}
}
