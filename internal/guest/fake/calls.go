package fake

import (
	"bytes"
	"context"
	"io"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/guest"
)

// Wait implements server.Handler.
func (g *Guest) Wait(ctx context.Context) (guestv1.Exit, error) {
	g.mu.Lock()
	started := g.started != nil
	g.mu.Unlock()
	if !started {
		return guestv1.Exit{}, guest.ErrNotStarted
	}
	select {
	case <-g.ended:
		return *g.exit, nil
	case <-ctx.Done():
		return guestv1.Exit{}, ctx.Err()
	}
}

// Acknowledge implements server.Handler.
func (g *Guest) Acknowledge(context.Context) error {
	select {
	case <-g.ended:
		return nil
	default:
		return &guest.RefusedError{Code: guestv1.CodeInvalid, Message: "the workload has not ended"}
	}
}

// Acknowledged implements server.Handler.
func (g *Guest) Acknowledged() {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-g.off:
	default:
		if !g.script.IgnoreAcknowledge {
			close(g.off)
		}
	}
}

// Stop implements server.Handler.
func (g *Guest) Stop(_ context.Context, s guestv1.Stop) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.started == nil {
		return guest.ErrNotStarted
	}
	if !g.script.IgnoreStop && s.GraceMillis > 0 {
		if !g.stopping {
			g.stopping = true
			code := 143
			switch {
			case g.script.StopCode < 0:
				code = 0
			case g.script.StopCode > 0:
				code = g.script.StopCode
			}
			go g.end(guestv1.Exit{Code: code})
		}
		return nil
	}
	if !g.script.IgnoreKill {
		go func() {
			_ = g.sleep(context.Background(), s.GraceMillis)
			g.end(guestv1.Exit{Code: 137})
		}()
	}
	return nil
}

// Probe implements server.Handler.
func (g *Guest) Probe(_ context.Context, _ guestv1.Probe) (guestv1.ProbeResult, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.script.Probes) == 0 {
		return guestv1.ProbeResult{Healthy: true, Status: 200}, nil
	}
	i := min(g.probesAsked, len(g.script.Probes)-1)
	g.probesAsked++
	return g.script.Probes[i], nil
}

// Output implements server.Handler.
func (g *Guest) Output(ctx context.Context, o guestv1.Output) (int64, io.WriterTo, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.started == nil {
		return 0, nil, guest.ErrNotStarted
	}
	first := max(0, min(o.Offset, int64(len(g.output))))
	return first, &source{ctx: ctx, guest: g, follow: o.Follow, rest: bytes.NewReader(g.output[first:])}, nil
}

type source struct {
	ctx    context.Context
	guest  *Guest
	follow bool
	rest   io.Reader
}

// WriteTo implements io.WriterTo.
func (s *source) WriteTo(w io.Writer) (int64, error) {
	n, err := io.Copy(w, s.rest)
	if err == nil && s.follow {
		select {
		case <-s.guest.ended:
		case <-s.ctx.Done():
		}
	}
	return n, err
}
