package qemu

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// qmpTimeout bounds every single answer of QEMU's monitor.
const qmpTimeout = 10 * time.Second

// qmpMaxLine bounds a line from QEMU, which a guest may have taken over.
const qmpMaxLine = 1 << 20

// qmpMessage is any line of the protocol.
type qmpMessage struct {
	QMP    *json.RawMessage `json:"QMP,omitempty"`
	Return *json.RawMessage `json:"return,omitempty"`
	Error  *qmpError        `json:"error,omitempty"`
	Event  string           `json:"event,omitempty"`
	Data   json.RawMessage  `json:"data,omitempty"`
}

type qmpError struct {
	Class string `json:"class"`
	Desc  string `json:"desc"`
}

func (e *qmpError) Error() string { return e.Desc }

// qmpClient is the one client of a QEMU monitor (QEMU serves one at a time). Commands go one after another.
type qmpClient struct {
	conn    net.Conn
	lines   *bufio.Scanner
	onEvent func(qmpMessage)

	mu      sync.Mutex // one command at a time
	answers chan qmpMessage
	closed  chan struct{}
}

// newQMP takes conn through greeting and capabilities. onEvent is called for each event, one at a time. The connection is closed on an error.
func newQMP(ctx context.Context, conn net.Conn, onEvent func(qmpMessage)) (*qmpClient, error) {
	c := &qmpClient{conn: conn, lines: bufio.NewScanner(conn), onEvent: onEvent, answers: make(chan qmpMessage), closed: make(chan struct{})}
	c.lines.Buffer(make([]byte, 0, 4096), qmpMaxLine)
	if err := c.greet(ctx); err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("opening QMP: %w", err)
	}
	go c.read()
	return c, nil
}

func (c *qmpClient) greet(ctx context.Context) error {
	defer context.AfterFunc(ctx, func() { _ = c.conn.Close() })()
	if err := c.conn.SetDeadline(deadline(ctx)); err != nil {
		return err
	}
	greeting, err := c.next()
	if err != nil {
		return err
	}
	if greeting.QMP == nil {
		return errors.New("the other side does not speak QMP")
	}
	if _, err := c.conn.Write([]byte(`{"execute":"qmp_capabilities"}` + "\n")); err != nil {
		return err
	}
	for {
		m, err := c.next()
		switch {
		case err != nil:
			return err
		case m.Error != nil:
			return m.Error
		case m.Return != nil:
			return c.conn.SetDeadline(time.Time{})
		case m.Event != "":
			c.onEvent(m)
		}
	}
}

func deadline(ctx context.Context) time.Time {
	limit := time.Now().Add(qmpTimeout)
	if d, ok := ctx.Deadline(); ok && d.Before(limit) {
		return d
	}
	return limit
}

func (c *qmpClient) next() (qmpMessage, error) {
	var m qmpMessage
	if !c.lines.Scan() {
		if err := c.lines.Err(); err != nil {
			return m, err
		}
		return m, errors.New("QEMU closed the connection")
	}
	if err := json.Unmarshal(c.lines.Bytes(), &m); err != nil {
		return m, fmt.Errorf("reading QMP: %w", err)
	}
	return m, nil
}

// read delivers lines until the connection ends. Events have no deadline: a healthy guest has none for days.
func (c *qmpClient) read() {
	defer close(c.closed)
	for {
		m, err := c.next()
		if err != nil {
			_ = c.conn.Close()
			return
		}
		if m.Event != "" {
			c.onEvent(m)
			continue
		}
		select {
		case c.answers <- m:
		case <-time.After(qmpTimeout): // the asker has given up
		}
	}
}

// command sends one command and gives its answer into result, if not nil. After a timeout the connection is closed: its answers
// could no longer be told apart.
func (c *qmpClient) command(ctx context.Context, name string, arguments, result any) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	ctx, cancel := context.WithDeadline(ctx, deadline(ctx))
	defer cancel()
	line, err := json.Marshal(struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
	}{name, arguments})
	if err != nil {
		return fmt.Errorf("asking QEMU %s: %w", name, err)
	}
	_ = c.conn.SetWriteDeadline(deadline(ctx))
	if _, err := c.conn.Write(append(line, '\n')); err != nil {
		_ = c.conn.Close()
		return fmt.Errorf("asking QEMU %s: %w", name, err)
	}
	select {
	case m := <-c.answers:
		if m.Error != nil {
			return fmt.Errorf("asking QEMU %s: %w", name, m.Error)
		}
		if result == nil || m.Return == nil {
			return nil
		}
		return json.Unmarshal(*m.Return, result)
	case <-c.closed:
		return fmt.Errorf("asking QEMU %s: connection lost", name)
	case <-ctx.Done():
		_ = c.conn.Close()
		return fmt.Errorf("asking QEMU %s: %w", name, ctx.Err())
	}
}

// status gives QEMU's run state: "running", "shutdown", "guest-panicked", ….
func (c *qmpClient) status(ctx context.Context) (string, error) {
	var s struct {
		Status string `json:"status"`
	}
	err := c.command(ctx, "query-status", nil, &s)
	return s.Status, err
}

func (c *qmpClient) close() {
	_ = c.conn.Close()
	<-c.closed
}
