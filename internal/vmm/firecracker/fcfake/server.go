package fcfake

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"time"
)

// Limits of the real server.
const (
	maxConnections = 10
	maxPayload     = 51200
)

// limited serves ten connections; the eleventh is told so and closed.
type limited struct {
	net.Listener
	open atomic.Int32
}

func (l *limited) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if l.open.Add(1) <= maxConnections {
			return &counted{Conn: conn, left: l}, nil
		}
		l.open.Add(-1)
		body := `{ "error": "Too many open connections" }`
		fmt.Fprintf(conn, "HTTP/1.1 503\r\nServer: Firecracker API\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		_ = conn.Close()
	}
}

type counted struct {
	net.Conn
	left   *limited
	closed atomic.Bool
}

func (c *counted) Close() error {
	if c.closed.CompareAndSwap(false, true) {
		c.left.open.Add(-1)
	}
	return c.Conn.Close()
}

// serve answers the API until the process ends.
func (m *machine) serve(l net.Listener) {
	server := &http.Server{Handler: http.HandlerFunc(m.handle), ReadHeaderTimeout: time.Minute}
	m.giveUp(1, "API server: %v", server.Serve(&limited{Listener: l}))
}

func (m *machine) handle(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(io.LimitReader(r.Body, maxPayload+1))
	if err != nil {
		return
	}
	m.log("The API server received a %s request on %q with body %q.", strings.ToUpper(r.Method[:1])+strings.ToLower(r.Method[1:]), r.URL.Path, body)
	if millis := m.config.SlowMillis[r.URL.Path]; millis > 0 {
		<-time.After(time.Duration(millis) * time.Millisecond)
	}
	if code, ok := m.config.ExitAt[r.URL.Path]; ok {
		m.exit(code, "asked for "+r.URL.Path)
	}
	if r.URL.Path == m.config.Mute || r.URL.Path == m.config.Cut {
		m.breakOff(w, r.URL.Path == m.config.Cut)
		return
	}
	if r.URL.Path == m.config.Huge {
		for range 4 << 10 {
			_, _ = w.Write(make([]byte, 1<<10))
		}
		return
	}
	w.Header().Set("Server", "Firecracker API")
	answer, refused := m.answer(r, body)
	if words := m.config.Refuse[r.URL.Path]; words != "" {
		answer, refused = nil, bad("%s", words)
	}
	switch {
	case refused != nil:
		m.log("Received Error. Status code: %d Bad Request. Message: %s", refused.status, refused.words)
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(refused.status)
		_ = json.NewEncoder(w).Encode(map[string]string{"fault_message": refused.words})
	case answer == nil:
		m.log("The request was executed successfully. Status code: 204 No Content.")
		w.WriteHeader(http.StatusNoContent)
	default:
		m.log("The request was executed successfully. Status code: 200 OK.")
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(answer)
	}
}

// breakOff ends a connection without an answer, or in the middle of one.
func (m *machine) breakOff(w http.ResponseWriter, begun bool) {
	hijacker, ok := w.(http.Hijacker)
	if !ok {
		os.Exit(2)
	}
	conn, _, err := hijacker.Hijack()
	if err != nil {
		return
	}
	if begun {
		_, _ = conn.Write([]byte("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{\"firecracker_ver"))
	}
	_ = conn.Close()
}

func (m *machine) answer(r *http.Request, body []byte) (any, *refusal) {
	if len(body) > maxPayload {
		return nil, &refusal{413, fmt.Sprintf("The request payload with size %d is larger than the limit of %d allowed by server.", len(body), maxPayload)}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if r.Method == http.MethodGet {
		if len(body) > 0 {
			return nil, bad("GET request cannot have a body.")
		}
		switch r.URL.Path {
		case "/":
			return map[string]string{"app_name": "Firecracker", "id": m.id, "state": m.state, "vmm_version": m.config.version()}, nil
		case "/version":
			v := m.config.version()
			if m.config.APIVersion != "" {
				v = m.config.APIVersion
			}
			return map[string]string{"firecracker_version": v}, nil
		}
		return nil, bad("Invalid request method and/or path: GET %s.", strings.Trim(r.URL.Path, "/"))
	}
	object, refused := parse(r.Method, r.URL.Path, body, m.minor())
	if refused != nil {
		return nil, refused
	}
	return nil, m.obey(strings.Split(strings.Trim(r.URL.Path, "/"), "/")[0], object)
}
