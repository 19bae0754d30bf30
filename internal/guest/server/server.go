// Package server answers the calls of one host on one session: the guest's side of the protocol, shared by the real guest and the
// fake one.
package server

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/hashicorp/yamux"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/guest"
	"imp.dev/imp/internal/guest/wire"
)

// Handler is a guest. Methods are called concurrently. The context ends with the call's stream, so also with the connection:
// what must be carried through regardless of the host's fate (Configure, Start) does not listen to it.
//
// Errors: guest.ErrNotStarted, guest.ErrConflict and *guest.RefusedError keep their code, everything else becomes CodeFailed.
type Handler interface {
	Hello(ctx context.Context) (guestv1.Hello, error)
	Configure(ctx context.Context, c guestv1.Configure) error
	Start(ctx context.Context, s guestv1.Start) error
	Wait(ctx context.Context) (guestv1.Exit, error)
	// Acknowledge accepts; Acknowledged is called after the answer has left and may end the machine.
	Acknowledge(ctx context.Context) error
	Acknowledged()
	Stop(ctx context.Context, s guestv1.Stop) error
	Probe(ctx context.Context, p guestv1.Probe) (guestv1.ProbeResult, error)
	// Output gives the absolute offset of the first byte and a source that writes them.
	Output(ctx context.Context, o guestv1.Output) (first int64, source io.WriterTo, err error)
}

// Serve runs one session on conn, which has its handshake behind it, until it breaks or ctx ends, and closes conn.
// Calls still running when it ends see their context end; Serve does not wait for them.
func Serve(ctx context.Context, conn io.ReadWriteCloser, h Handler) error {
	session, err := yamux.Server(conn, wire.SessionConfig())
	if err != nil {
		_ = conn.Close()
		return fmt.Errorf("opening session: %w", err)
	}
	defer func() { _ = session.Close() }()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = session.Close() })()
	for {
		stream, err := session.AcceptStream()
		if err != nil {
			return fmt.Errorf("waiting for a call: %w", err)
		}
		go answer(ctx, stream, h)
	}
}

func answer(ctx context.Context, stream *yamux.Stream, h Handler) {
	defer func() { _ = stream.Close() }()
	var q guestv1.Request
	if err := wire.ReadFrame(stream, &q); err != nil {
		if errors.Is(err, wire.ErrMalformed) || errors.Is(err, wire.ErrTooLarge) {
			_ = wire.WriteFrame(stream, guestv1.Response{Error: &guestv1.Error{Code: guestv1.CodeInvalid, Message: err.Error()}})
		}
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// The host writes nothing after its request: the end of its side is the end of its interest.
	go func() {
		_, _ = io.Copy(io.Discard, stream)
		cancel()
	}()
	p, source, err := dispatch(ctx, &q, h)
	if err != nil {
		p = guestv1.Response{Error: errorOf(err)}
	}
	if wire.WriteFrame(stream, p) != nil {
		return
	}
	if source != nil && err == nil {
		_, _ = source.WriteTo(stream)
	}
	if q.Method == guestv1.MethodAcknowledge && err == nil {
		h.Acknowledged()
	}
}

func dispatch(ctx context.Context, q *guestv1.Request, h Handler) (p guestv1.Response, source io.WriterTo, err error) {
	missing := &guest.RefusedError{Code: guestv1.CodeInvalid, Message: "request " + q.Method + " without its parameters"}
	switch q.Method {
	case guestv1.MethodHello:
		hello, err := h.Hello(ctx)
		return guestv1.Response{Hello: &hello}, nil, err
	case guestv1.MethodConfigure:
		if q.Configure == nil {
			return p, nil, missing
		}
		return p, nil, h.Configure(ctx, *q.Configure)
	case guestv1.MethodStart:
		if q.Start == nil {
			return p, nil, missing
		}
		return p, nil, h.Start(ctx, *q.Start)
	case guestv1.MethodWait:
		exit, err := h.Wait(ctx)
		return guestv1.Response{Exit: &exit}, nil, err
	case guestv1.MethodAcknowledge:
		return p, nil, h.Acknowledge(ctx)
	case guestv1.MethodStop:
		if q.Stop == nil {
			return p, nil, missing
		}
		return p, nil, h.Stop(ctx, *q.Stop)
	case guestv1.MethodProbe:
		if q.Probe == nil {
			return p, nil, missing
		}
		result, err := h.Probe(ctx, *q.Probe)
		return guestv1.Response{Probe: &result}, nil, err
	case guestv1.MethodOutput:
		if q.Output == nil {
			return p, nil, missing
		}
		first, source, err := h.Output(ctx, *q.Output)
		return guestv1.Response{Output: &guestv1.OutputStart{Offset: first}}, source, err
	}
	return p, nil, &guest.RefusedError{Code: guestv1.CodeUnsupported, Message: fmt.Sprintf("this guest does not know the call %q", q.Method)}
}

func errorOf(err error) *guestv1.Error {
	refused := (*guest.RefusedError)(nil)
	switch {
	case errors.As(err, &refused):
		return &guestv1.Error{Code: refused.Code, Message: err.Error()}
	case errors.Is(err, guest.ErrNotStarted):
		return &guestv1.Error{Code: guestv1.CodeNotStarted, Message: err.Error()}
	case errors.Is(err, guest.ErrConflict):
		return &guestv1.Error{Code: guestv1.CodeConflict, Message: err.Error()}
	}
	return &guestv1.Error{Code: guestv1.CodeFailed, Message: err.Error()}
}
