// Package channel is the host's end of the pipe into a guest: a guest.Client over whatever a guest.Dialer opens.
package channel

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"time"

	"github.com/hashicorp/yamux"
	"k8s.io/utils/clock"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/guest"
	"imp.dev/imp/internal/guest/wire"
)

const (
	// syncInterval between two SYNC lines. The guest answers the first it sees, 8 ms after its port opens.
	syncInterval = 25 * time.Millisecond
	// tryTimeout bounds one try to synchronise on one connection. A guest that is still booting needs none of it: bytes wait in the
	// socket until it opens the port. It is for the rare guest that sits inside a frame of a dead session and must see an EOF.
	tryTimeout = 5 * time.Second
	// retryGap after a failed try, so that the guest sees the disconnection before the next connection.
	retryGap = 250 * time.Millisecond
	// livenessInterval: while a call is blocked, the session is tested this often, and given up if the test is not
	// answered within it. To be wrong (a paused or slow guest) costs one reconnection.
	livenessInterval = 30 * time.Second
	// backlog of calls on their way, and of streams that a guest may open though nobody accepts them: with yamux's default a
	// hostile guest could make its host keep 64 MiB.
	backlog = 16
)

// Client is one guest. It holds at most one connection, opened by the first call that needs it.
type Client struct {
	dial  guest.Dialer
	clock clock.WithTicker
	log   *slog.Logger

	// turn is a mutex that can be waited for with a context; it guards the fields below.
	turn     chan struct{}
	session  *yamux.Session
	lastFail time.Time

	// life ends with Close.
	life  context.Context
	close context.CancelFunc
}

var _ guest.Client = (*Client)(nil)

// errClosed answers calls after Close.
var errClosed = errors.New("guest client is closed")

// New makes a client; it dials nothing yet.
func New(dial guest.Dialer, clk clock.WithTicker, log *slog.Logger) *Client {
	c := &Client{dial: dial, clock: clk, log: log, turn: make(chan struct{}, 1)}
	c.life, c.close = context.WithCancel(context.Background())
	return c
}

// Close ends the connection and every call.
func (c *Client) Close() error {
	c.close()
	c.turn <- struct{}{}
	defer func() { <-c.turn }()
	c.drop(c.session)
	return nil
}

// drop closes s if it is the current session. The caller holds the turn.
func (c *Client) drop(s *yamux.Session) {
	if s == nil {
		return
	}
	_ = s.Close()
	if c.session == s {
		c.session, c.lastFail = nil, c.clock.Now()
	}
}

// connected gives the session, connecting for as long as it takes.
func (c *Client) connected(ctx context.Context) (*yamux.Session, error) {
	select {
	case c.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	defer func() { <-c.turn }()
	if c.session != nil && c.session.IsClosed() {
		c.drop(c.session)
	}
	for c.session == nil {
		if err := c.pause(ctx); err != nil {
			return nil, err
		}
		s, err := c.connect(ctx)
		switch {
		case err == nil:
			c.session = s
		case errors.Is(err, guest.ErrGone), ctx.Err() != nil:
			return nil, err
		default:
			c.lastFail = c.clock.Now()
			c.log.Debug("connection to guest not established", "error", err)
		}
	}
	return c.session, nil
}

// pause waits until retryGap has passed since the last failure.
func (c *Client) pause(ctx context.Context) error {
	rest := retryGap - c.clock.Since(c.lastFail)
	if c.lastFail.IsZero() || rest <= 0 {
		return ctx.Err()
	}
	select {
	case <-c.clock.After(rest):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (c *Client) connect(ctx context.Context) (*yamux.Session, error) {
	conn, err := c.dial(ctx)
	if err != nil {
		return nil, fmt.Errorf("dialling guest: %w", err)
	}
	s, err := c.synchronise(ctx, conn)
	if err != nil {
		_ = conn.Close()
	}
	return s, err
}

func (c *Client) synchronise(ctx context.Context, conn net.Conn) (*yamux.Session, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	limit := c.clock.NewTimer(tryTimeout)
	defer limit.Stop()
	go func() {
		select {
		case <-limit.C():
			cancel()
		case <-ctx.Done():
		}
	}()
	nonce := make([]byte, 8)
	if _, err := rand.Read(nonce); err != nil {
		return nil, fmt.Errorf("making a nonce: %w", err)
	}
	synced, err := wire.Host(ctx, conn, hex.EncodeToString(nonce), syncInterval, c.clock)
	if err != nil {
		return nil, err
	}
	config := wire.SessionConfig()
	config.AcceptBacklog = backlog
	return yamux.Client(synced, config)
}

// call performs one call, again and again on new connections until the guest has answered. body, if not nil, takes what
// follows the answer; an error of it that wraps errStop ends the call.
func (c *Client) call(ctx context.Context, q guestv1.Request, body func(p *guestv1.Response, r io.Reader) error) (*guestv1.Response, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(c.life, cancel)()
	for {
		session, err := c.connected(ctx)
		if err == nil {
			var p *guestv1.Response
			if p, err = c.once(ctx, session, &q, body); err == nil {
				return p, answerError(p)
			}
		}
		stop := (*stopError)(nil)
		switch {
		case errors.As(err, &stop):
			return nil, stop.error
		case c.life.Err() != nil:
			return nil, errClosed
		case ctx.Err() != nil:
			return nil, fmt.Errorf("asking guest for %s: %w", q.Method, ctx.Err())
		case errors.Is(err, guest.ErrGone):
			return nil, fmt.Errorf("asking guest for %s: %w", q.Method, err)
		case errors.Is(err, wire.ErrTooLarge):
			return nil, &guest.RefusedError{Code: guestv1.CodeInvalid, Message: err.Error()}
		}
		c.log.Debug("call to guest interrupted, repeating it", "method", q.Method, "error", err)
		c.giveUp(session)
	}
}

// stopError ends a call for a reason on the caller's side.
type stopError struct{ error }

// giveUp ends a session on which a call was interrupted: a stream that breaks alone is not something the protocol has.
func (c *Client) giveUp(session *yamux.Session) {
	c.turn <- struct{}{}
	defer func() { <-c.turn }()
	c.drop(session)
}

// once performs the call on one session.
func (c *Client) once(ctx context.Context, session *yamux.Session, q *guestv1.Request,
	body func(p *guestv1.Response, r io.Reader) error) (*guestv1.Response, error) {
	stream, err := session.OpenStream()
	if err != nil {
		return nil, fmt.Errorf("opening call: %w", err)
	}
	defer func() { _ = stream.Close() }()
	defer context.AfterFunc(ctx, func() { _ = stream.SetDeadline(time.Unix(1, 0)) })()
	watching, stop := context.WithCancel(ctx)
	defer stop()
	go c.watch(watching, session)

	if err := wire.WriteFrame(stream, q); err != nil {
		return nil, err
	}
	var p guestv1.Response
	if err := wire.ReadFrame(stream, &p); err != nil {
		return nil, err
	}
	if body != nil && p.Error == nil {
		if err := body(&p, &sessionReader{stream, session}); err != nil {
			return nil, err
		}
	}
	return &p, nil
}

// sessionReader tells the end of a stream from the end of its session, which yamux both reports as io.EOF.
type sessionReader struct {
	io.Reader
	session *yamux.Session
}

func (r *sessionReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if errors.Is(err, io.EOF) && r.session.IsClosed() {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

// watch tests the session while a call is blocked on it. A guest whose end of the session is dead while the pipe is open gives no
// other sign.
func (c *Client) watch(ctx context.Context, session *yamux.Session) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.clock.After(livenessInterval):
		}
		answered := make(chan struct{})
		go func() {
			if _, err := session.Ping(); err == nil {
				close(answered)
			}
		}()
		select {
		case <-ctx.Done():
			return
		case <-answered:
		case <-c.clock.After(livenessInterval):
			_ = session.Close()
			return
		}
	}
}

func answerError(p *guestv1.Response) error {
	switch {
	case p.Error == nil:
		return nil
	case p.Error.Code == guestv1.CodeNotStarted:
		return guest.ErrNotStarted
	case p.Error.Code == guestv1.CodeConflict:
		return guest.ErrConflict
	}
	return &guest.RefusedError{Code: plain(p.Error.Code), Message: plain(p.Error.Message)}
}
