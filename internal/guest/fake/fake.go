package fake

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"k8s.io/utils/clock"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/guest"
	"imp.dev/imp/internal/guest/server"
	"imp.dev/imp/internal/guest/wire"
)

// Guest is one boot of a fake guest. It implements server.Handler.
type Guest struct {
	script  Script
	console io.Writer
	clock   clock.WithTicker
	bootID  string

	configuring sync.Mutex // held for as long as a Configure takes

	mu          sync.Mutex
	configured  *guestv1.Configure
	configErr   error
	started     *guestv1.Start
	output      []byte
	exit        *guestv1.Exit
	stopping    bool
	probesAsked int

	running chan struct{} // closed at Start
	ended   chan struct{} // closed with exit set
	off     chan struct{} // closed when the machine stops
	hung    chan struct{} // closed when the guest hangs
	hang    func()        // closes hung, once
}

var _ server.Handler = (*Guest)(nil)

// Option of Serve.
type Option func(*Guest)

// WithConsole sends what the guest prints (the workload's output and the marker) to w.
func WithConsole(w io.Writer) Option { return func(g *Guest) { g.console = w } }

// WithClock replaces the real clock.
func WithClock(c clock.WithTicker) Option { return func(g *Guest) { g.clock = c } }

// New boots a fake guest.
func New(s Script, options ...Option) *Guest {
	id := make([]byte, 16)
	_, _ = rand.Read(id)
	g := &Guest{
		script: s, console: io.Discard, clock: clock.RealClock{}, bootID: hex.EncodeToString(id),
		running: make(chan struct{}), ended: make(chan struct{}), off: make(chan struct{}),
	}
	g.hung = make(chan struct{})
	g.hang = sync.OnceFunc(func() {
		close(g.hung)
		_, _ = io.WriteString(g.console, "[    2.000000] "+HangWords+"\n")
	})
	for _, o := range options {
		o(g)
	}
	return g
}

// Serve boots a fake guest and serves it on l, one connection at a time as a serial port does, until its end was acknowledged (nil) or
// ctx ends. It closes l.
func Serve(ctx context.Context, l net.Listener, s Script, options ...Option) error {
	return New(s, options...).Serve(ctx, l)
}

// Serve serves g on l; see the function of the same name.
func (g *Guest) Serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	go func() {
		<-g.off
		cancel()
	}()
	if err := g.sleep(ctx, g.script.BootMillis); err != nil {
		return err
	}
	for {
		conn, err := l.Accept()
		if err != nil {
			select {
			case <-g.off:
				return nil
			default:
				return fmt.Errorf("accepting connection: %w", err)
			}
		}
		g.ServeConn(ctx, conn)
		if g.hangs() {
			<-ctx.Done() // the kernel takes connections still
		}
	}
}

func (g *Guest) hangs() bool {
	select {
	case <-g.hung:
		return true
	default:
		return false
	}
}

// ServeConn serves one connection until it breaks, and closes it.
func (g *Guest) ServeConn(ctx context.Context, conn net.Conn) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() { // a guest that hangs lets go of nothing, but for the fake the end of a connection is silence enough
		select {
		case <-g.hung:
			cancel()
		case <-ctx.Done():
		}
	}()
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	if g.script.Silent {
		_, _ = io.Copy(io.Discard, conn)
		return
	}
	if g.script.DropEveryMillis > 0 {
		limited, cancel := context.WithCancel(ctx)
		defer cancel()
		go func() {
			_ = g.sleep(limited, g.script.DropEveryMillis)
			_ = conn.Close()
		}()
	}
	synced, err := wire.Guest(conn)
	if err != nil {
		return
	}
	_ = server.Serve(ctx, synced, g)
}

// Off is closed when the machine stops.
func (g *Guest) Off() <-chan struct{} { return g.off }

func (g *Guest) sleep(ctx context.Context, millis int64) error {
	if millis <= 0 {
		return ctx.Err()
	}
	select {
	case <-g.clock.After(time.Duration(millis) * time.Millisecond):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Hello implements server.Handler.
func (g *Guest) Hello(context.Context) (guestv1.Hello, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	h := guestv1.Hello{Version: guestv1.Version, AgentVersion: "fake", BootID: g.bootID, KernelRelease: "fake"}
	if g.configured != nil {
		h.ConfigureID = g.configured.ID
	}
	if g.started != nil {
		h.StartID = g.started.ID
	}
	return h, nil
}

// Configure implements server.Handler. Like the real one it is carried through whatever happens to the connection.
func (g *Guest) Configure(_ context.Context, c guestv1.Configure) error {
	g.configuring.Lock()
	defer g.configuring.Unlock()
	g.mu.Lock()
	known, err := g.configured, g.configErr
	g.mu.Unlock()
	if known != nil && known.ID == c.ID {
		return err
	}
	if c.ID == "" {
		return &guest.RefusedError{Code: guestv1.CodeInvalid, Message: "configure request has no id"}
	}
	_ = g.sleep(context.Background(), g.script.ConfigureMillis)
	g.mu.Lock()
	defer g.mu.Unlock()
	g.configured, g.configErr = &c, nil
	if g.script.ConfigureError != "" {
		g.configErr = &guest.RefusedError{Code: guestv1.CodeFailed, Message: g.script.ConfigureError}
	}
	return g.configErr
}

// Start implements server.Handler.
func (g *Guest) Start(_ context.Context, s guestv1.Start) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.started != nil && g.started.ID == s.ID:
		return nil
	case g.started != nil:
		return guest.ErrConflict
	case g.script.HangAtStart:
		g.hang()
		select {} // whatever it returned might still be heard
	case g.script.StartError != "":
		return &guest.RefusedError{Code: guestv1.CodeInvalid, Message: g.script.StartError}
	case g.configured == nil || g.configErr != nil:
		return &guest.RefusedError{Code: guestv1.CodeInvalid, Message: "guest is not configured"}
	case s.ID == "" || len(s.Argv) == 0:
		return &guest.RefusedError{Code: guestv1.CodeInvalid, Message: "start request has no id or no command"}
	}
	g.started = &s
	g.output = []byte(g.script.Output)
	_, _ = g.console.Write(g.output)
	close(g.running)
	if ms := g.script.HangAfterMillis; ms > 0 {
		go func() {
			_ = g.sleep(context.Background(), ms)
			g.hang()
		}()
	}
	if e := g.script.Exit; e != nil {
		go func() {
			_ = g.sleep(context.Background(), e.AfterMillis)
			g.end(guestv1.Exit{Code: e.Code, Message: e.Message, OOMKilled: e.OOMKilled})
		}()
	}
	return nil
}

func (g *Guest) end(e guestv1.Exit) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.exit != nil || g.hangs() {
		return
	}
	e.UnixNanos = g.clock.Now().UnixNano()
	if e.Code > 128 && e.Code <= 192 {
		e.Signal = e.Code - 128
	}
	g.exit = &e
	if !g.script.NoMarker {
		marker := guestv1.MarkerSuccess
		if e.Code != 0 {
			marker = fmt.Sprintf("%s code=%d", guestv1.MarkerFailed, e.Code)
		}
		_, _ = fmt.Fprintf(g.console, "%s id=%s\n", marker, g.started.Nonce)
	}
	close(g.ended)
}
