package fake_test

import (
	"context"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"testing"

	"k8s.io/utils/clock"

	"imp.dev/imp/internal/guest"
	"imp.dev/imp/internal/guest/channel"
	"imp.dev/imp/internal/guest/fake"
	"imp.dev/imp/internal/guest/guesttest"

	guestv1 "imp.dev/imp/api/guest/v1"
)

// served is a fake guest on a UNIX socket, with a client for it.
func served(t *testing.T, s fake.Script) guesttest.Machine {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "guest")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	off := make(chan struct{})
	go func() {
		_ = fake.Serve(t.Context(), l, s)
		close(off)
	}()
	var (
		mu    sync.Mutex
		conns []net.Conn
	)
	dial := func(ctx context.Context) (net.Conn, error) {
		select {
		case <-off:
			return nil, guest.ErrGone
		default:
		}
		conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
		if err == nil {
			mu.Lock()
			conns = append(conns, conn)
			mu.Unlock()
		}
		return conn, err
	}
	c := channel.New(dial, clock.RealClock{}, slog.New(slog.NewTextHandler(io.Discard, nil)))
	t.Cleanup(func() { _ = c.Close() })
	return guesttest.Machine{
		Client: c, Off: off, Start: guestv1.Start{Argv: [][]byte{[]byte("true")}},
		Drop: func() {
			mu.Lock()
			defer mu.Unlock()
			for _, conn := range conns {
				_ = conn.Close()
			}
			conns = nil
		},
	}
}

func TestTheFakePassesTheSuite(t *testing.T) {
	guesttest.Run(t, func(t *testing.T, w guesttest.Workload) guesttest.Machine {
		s := fake.Script{Output: w.Prints, IgnoreStop: w.Deaf}
		if !w.Forever {
			s.Exit = &fake.Exit{Code: w.Code}
		}
		return served(t, s)
	})
}
