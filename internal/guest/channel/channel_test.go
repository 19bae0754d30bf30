package channel

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/guest"
	"imp.dev/imp/internal/guest/fake"
	"imp.dev/imp/internal/guest/wire"
)

func client(t *testing.T, dial guest.Dialer) *Client {
	t.Helper()
	c := New(dial, clock.RealClock{}, slog.New(slog.NewTextHandler(io.Discard, nil)))
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// inMemory dials a guest through a pipe without buffer.
func inMemory(t *testing.T, g *fake.Guest) guest.Dialer {
	return func(context.Context) (net.Conn, error) {
		host, guestEnd := net.Pipe()
		go g.ServeConn(t.Context(), guestEnd)
		return host, nil
	}
}

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func TestACallWaitsForAGuestThatIsNotThereYet(t *testing.T) {
	var tries atomic.Int32
	g := inMemory(t, fake.New(fake.Script{}))
	c := client(t, func(ctx context.Context) (net.Conn, error) {
		if tries.Add(1) < 3 {
			return nil, errors.New("connection refused")
		}
		return g(ctx)
	})
	if _, err := c.Hello(within(t)); err != nil || tries.Load() != 3 {
		t.Errorf("%v after %d tries", err, tries.Load())
	}
	if _, err := c.Hello(within(t)); err != nil || tries.Load() != 3 {
		t.Errorf("the second call: %v after %d tries", err, tries.Load())
	}
}

func TestEveryBlockedCallHearsThatTheGuestIsGone(t *testing.T) {
	var gone atomic.Bool
	ends := make(chan net.Conn, 1)
	g := fake.New(fake.Script{})
	c := client(t, func(context.Context) (net.Conn, error) {
		if gone.Load() {
			return nil, guest.ErrGone
		}
		host, guestEnd := net.Pipe()
		go g.ServeConn(t.Context(), guestEnd)
		ends <- guestEnd
		return host, nil
	})
	ctx := within(t)
	if err := errors.Join(c.Configure(ctx, guestv1.Configure{ID: "c"}), c.Start(ctx, guestv1.Start{ID: "s", Argv: [][]byte{{'x'}}})); err != nil {
		t.Fatal(err)
	}
	results := make(chan error)
	for range 5 {
		go func() {
			_, err := c.Wait(ctx)
			results <- err
		}()
	}
	gone.Store(true)
	_ = (<-ends).Close()
	for range 5 {
		if err := <-results; !errors.Is(err, guest.ErrGone) {
			t.Errorf("Wait: %v", err)
		}
	}
}

func TestAGuestThatIsSilentBlocksOnlyAsLongAsTheCallerLikes(t *testing.T) {
	c := client(t, inMemory(t, fake.New(fake.Script{Silent: true})))
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	if _, err := c.Hello(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Hello: %v", err)
	}
}

func TestASessionThatIsDeadOnTheGuestsSideIsGivenUp(t *testing.T) {
	// The first connection gets its handshake and then nothing, as from a guest whose session has ended though the pipe is open.
	var connections atomic.Int32
	g := fake.New(fake.Script{})
	clk := clocktesting.NewFakeClock(time.Now())
	c := New(func(context.Context) (net.Conn, error) {
		host, guestEnd := net.Pipe()
		if connections.Add(1) > 1 {
			go g.ServeConn(t.Context(), guestEnd)
			return host, nil
		}
		go func() {
			if dead, err := wire.Guest(guestEnd); err == nil {
				_, _ = io.Copy(io.Discard, dead)
			}
		}()
		return host, nil
	}, clk, slog.New(slog.DiscardHandler))
	t.Cleanup(func() { _ = c.Close() })
	answered := make(chan error, 1)
	go func() {
		_, err := c.Hello(within(t))
		answered <- err
	}()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case err := <-answered:
			if err != nil || connections.Load() < 2 {
				t.Errorf("%v after %d connections", err, connections.Load())
			}
			return
		case <-tick.C:
			clk.Step(100 * time.Millisecond)
		}
	}
}

func TestCloseEndsBlockedCalls(t *testing.T) {
	c := client(t, inMemory(t, fake.New(fake.Script{Silent: true})))
	result := make(chan error)
	go func() {
		_, err := c.Hello(context.Background())
		result <- err
	}()
	_ = c.Close()
	if err := <-result; !errors.Is(err, errClosed) {
		t.Errorf("Hello: %v", err)
	}
}

func TestARequestBeyondTheLimitIsRefusedWithoutAsking(t *testing.T) {
	c := client(t, inMemory(t, fake.New(fake.Script{})))
	err := c.Start(within(t), guestv1.Start{ID: "s", Argv: [][]byte{make([]byte, guestv1.MaxFrame)}})
	refused := (*guest.RefusedError)(nil)
	if !errors.As(err, &refused) || refused.Code != guestv1.CodeInvalid {
		t.Errorf("Start: %v", err)
	}
}

func TestAFailedConfigureKeepsItsAnswer(t *testing.T) {
	c := client(t, inMemory(t, fake.New(fake.Script{ConfigureError: "mounting base disk: invalid argument"})))
	for range 2 {
		err := c.Configure(within(t), guestv1.Configure{ID: "c"})
		refused := (*guest.RefusedError)(nil)
		if !errors.As(err, &refused) || refused.Code != guestv1.CodeFailed || err.Error() != "mounting base disk: invalid argument" {
			t.Errorf("Configure: %v", err)
		}
	}
}

func TestAConfigureThatLosesItsConnectionIsCarriedOutOnce(t *testing.T) {
	var connections atomic.Int32
	g := fake.New(fake.Script{ConfigureMillis: 60, DropEveryMillis: 40})
	c := client(t, func(context.Context) (net.Conn, error) {
		host, guestEnd := net.Pipe()
		connections.Add(1)
		go g.ServeConn(t.Context(), guestEnd)
		return host, nil
	})
	if err := c.Configure(within(t), guestv1.Configure{ID: "c"}); err != nil {
		t.Fatal(err)
	}
	if n := connections.Load(); n < 2 {
		t.Errorf("%d connections: the first was meant to break", n)
	}
	h, err := c.Hello(within(t))
	if err != nil || h.ConfigureID != "c" {
		t.Errorf("%+v, %v", h, err)
	}
}

func TestOutputGoesOnAcrossLostConnections(t *testing.T) {
	text := strings.Repeat("0123456789", 100_000)
	c := client(t, inMemory(t, fake.New(fake.Script{Output: text, Exit: &fake.Exit{AfterMillis: 50}, DropEveryMillis: 100})))
	ctx := within(t)
	if err := errors.Join(c.Configure(ctx, guestv1.Configure{ID: "c"}), c.Start(ctx, guestv1.Start{ID: "s", Argv: [][]byte{{'x'}}})); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	first, next, err := c.Output(ctx, guestv1.Output{Follow: true}, &b)
	if err != nil || first != 0 || next != int64(len(text)) || b.String() != text {
		t.Errorf("first %d, next %d of %d, %v; equal: %v", first, next, len(text), err, b.String() == text)
	}
	full := errors.New("disk full")
	if _, _, err := c.Output(ctx, guestv1.Output{}, failingWriter{full}); !errors.Is(err, full) {
		t.Errorf("a writer that fails: %v", err)
	}
}

type failingWriter struct{ err error }

func (w failingWriter) Write([]byte) (int, error) { return 0, w.err }

func TestAGuestsWordsAreMadeHarmless(t *testing.T) {
	hostile := "a\x1b[2Jb\nc\xff" + strings.Repeat("ü", maxText)
	c := client(t, inMemory(t, fake.New(fake.Script{
		Exit: &fake.Exit{Code: 1 << 40, Message: hostile}, Probes: []guestv1.ProbeResult{{Message: hostile}},
	})))
	ctx := within(t)
	if err := errors.Join(c.Configure(ctx, guestv1.Configure{ID: "c"}), c.Start(ctx, guestv1.Start{ID: "s", Argv: [][]byte{{'x'}}})); err != nil {
		t.Fatal(err)
	}
	e, err := c.Wait(ctx)
	if err != nil || e.Code != maxCode {
		t.Errorf("exit code %d, %v", e.Code, err)
	}
	r, err := c.Probe(ctx, guestv1.Probe{})
	if err != nil {
		t.Fatal(err)
	}
	for _, got := range []string{e.Message, r.Message} {
		if !strings.HasPrefix(got, "a [2Jb c ") || len(got) > maxText+1 || strings.ContainsAny(got, "\x1b\n") || !utf8.ValidString(got) {
			t.Errorf("%d bytes: %.40q", len(got), got)
		}
	}
}
