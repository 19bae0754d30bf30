package firecracker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"
)

// Bounds of a client. Firecracker serves ten connections and answers one request at a time: two are one for the work in hand and one to
// look at the machine beside it.
const (
	maxConns    = 2
	idleTime    = 5 * time.Second
	callTimeout = 10 * time.Second
	maxAnswer   = 1 << 20
)

// Error is Firecracker's own word that it refuses a request.
type Error struct {
	Method, Path string
	Status       int
	// Fault is the answer's fault_message.
	Fault string
}

func (e *Error) Error() string {
	return fmt.Sprintf("Firecracker refuses %s %s (status %d): %s", e.Method, e.Path, e.Status, e.Fault)
}

// client speaks to one Firecracker. It holds at most maxConns connections, and none for longer than idleTime without need.
type client struct {
	http    *http.Client
	timeout time.Duration
}

func newClient(dial func(ctx context.Context) (net.Conn, error)) *client {
	return &client{timeout: callTimeout, http: &http.Client{
		Transport: &http.Transport{
			DialContext:     func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
			MaxConnsPerHost: maxConns, MaxIdleConnsPerHost: 1, IdleConnTimeout: idleTime, DisableCompression: true,
			MaxResponseHeaderBytes: 16 << 10,
		},
		// What answers may be a process that a guest has taken over: it sends its host nowhere.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

func (c *client) close() { c.http.CloseIdleConnections() }

// do sends one request and takes the answer into out, which is nil where none is expected. It is never sent twice.
func (c *client) do(ctx context.Context, method, path string, body, out any) error {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	err := c.send(ctx, method, path, body, out)
	if refused := (*Error)(nil); err == nil || errors.As(err, &refused) {
		return err
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("asking Firecracker to %s %s: no answer within %v: %w", method, path, c.timeout, err)
	}
	return fmt.Errorf("asking Firecracker to %s %s: %w", method, path, err)
}

func (c *client) send(ctx context.Context, method, path string, body, out any) error {
	var payload io.Reader = http.NoBody
	if body != nil {
		encoded, err := json.Marshal(body)
		if err != nil {
			return err
		}
		payload = bytes.NewReader(encoded)
	}
	request, err := http.NewRequestWithContext(ctx, method, "http://firecracker"+path, payload)
	if err != nil {
		return err
	}
	request.Header.Set("Accept", "application/json")
	if body != nil {
		request.Header.Set("Content-Type", "application/json")
	}
	answer, err := c.http.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	content, err := io.ReadAll(io.LimitReader(answer.Body, maxAnswer+1))
	switch {
	case err != nil:
		return fmt.Errorf("reading the answer: %w", err)
	case len(content) > maxAnswer:
		return fmt.Errorf("the answer is larger than %d bytes", maxAnswer)
	case answer.StatusCode != http.StatusOK && answer.StatusCode != http.StatusNoContent:
		return &Error{Method: method, Path: path, Status: answer.StatusCode, Fault: faultOf(content)}
	case out == nil:
		return nil
	}
	if err := json.Unmarshal(content, out); err != nil {
		return fmt.Errorf("reading the answer: %w", err)
	}
	return nil
}

// faultOf gives the fault_message of a refusal, or the start of whatever it says instead.
func faultOf(content []byte) string {
	var fault struct {
		Message string `json:"fault_message"`
	}
	const most = 512
	text := string(bytes.TrimSpace(content))
	if json.Unmarshal(content, &fault) == nil && fault.Message != "" {
		text = fault.Message
	}
	if len(text) > most {
		text = text[:most] + "…"
	}
	if text == "" {
		text = "no reason given"
	}
	return text
}

func (c *client) call(ctx context.Context, one call) error {
	return c.do(ctx, one.Method, one.Path, one.Body, nil)
}

func (c *client) version(ctx context.Context) (release, error) {
	var v versionInfo
	if err := c.do(ctx, http.MethodGet, "/version", nil, &v); err != nil {
		return release{}, err
	}
	return parseRelease(v.FirecrackerVersion)
}

// describe asks for the machine as Firecracker sees it.
func (c *client) describe(ctx context.Context) (instanceInfo, error) {
	var i instanceInfo
	err := c.do(ctx, http.MethodGet, "/", nil, &i)
	return i, err
}

func (c *client) act(ctx context.Context, what string) error {
	return c.do(ctx, http.MethodPut, "/actions", action{ActionType: what}, nil)
}

func (c *client) setState(ctx context.Context, state string) error {
	return c.do(ctx, http.MethodPatch, "/vm", vmState{State: state}, nil)
}
