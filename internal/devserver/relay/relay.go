// Package relay is a TCP relay in front of one server that can be cut, so that a program is partitioned from that server alone:
// either at once and loudly (refused), or in the way of a lost network (everything hangs).
package relay

import (
	"context"
	"fmt"
	"io"
	"net"
	"sync"
)

// Mode is what becomes of connections.
type Mode int

// Modes.
const (
	Pass   Mode = iota // bytes go through
	Refuse             // existing connections are reset, new ones are closed at once
	Hang               // connections stay, or are accepted, and no byte goes through
)

// String names the mode in a schedule.
func (m Mode) String() string { return [...]string{"pass", "refuse", "hang"}[m] }

// Relay forwards connections. Make one with Listen; Close ends it and every connection.
type Relay struct {
	target   string
	listener net.Listener
	running  sync.WaitGroup

	mu    sync.Mutex
	mode  Mode
	moved chan struct{} // closed when the mode changes
	conns map[net.Conn]bool
	ended bool
}

// Listen starts a relay on a free loopback port to target (host:port).
func Listen(target string) (*Relay, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("starting a relay to %s: %w", target, err)
	}
	r := &Relay{target: target, listener: l, moved: make(chan struct{}), conns: map[net.Conn]bool{}}
	r.running.Go(r.accept)
	return r, nil
}

// Address (host:port) to connect to.
func (r *Relay) Address() string { return r.listener.Addr().String() }

// Set changes the mode. Connections that hung are cut when bytes pass again, as a network's return finds them long given up by
// the other side.
func (r *Relay) Set(m Mode) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mode == m {
		return
	}
	if m == Refuse || r.mode == Hang {
		r.cut()
	}
	r.mode = m
	close(r.moved)
	r.moved = make(chan struct{})
}

// cut resets every connection. mu is held.
func (r *Relay) cut() {
	for c := range r.conns {
		if tcp, ok := c.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0)
		}
		_ = c.Close()
	}
}

// Close ends the relay.
func (r *Relay) Close() {
	r.mu.Lock()
	r.ended = true
	_ = r.listener.Close()
	r.cut()
	close(r.moved) // whoever held bytes back finds its connection closed
	r.moved = make(chan struct{})
	r.mu.Unlock()
	r.running.Wait()
}

func (r *Relay) accept() {
	for {
		c, err := r.listener.Accept()
		if err != nil {
			return
		}
		if !r.keep(c) {
			_ = c.Close()
			continue
		}
		r.running.Go(func() { r.serve(c) })
	}
}

// keep refuses in mode Refuse and after the end.
func (r *Relay) keep(c net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended || r.mode == Refuse {
		return false
	}
	r.conns[c] = true
	return true
}

func (r *Relay) drop(c net.Conn) {
	_ = c.Close()
	r.mu.Lock()
	delete(r.conns, c)
	r.mu.Unlock()
}

func (r *Relay) serve(c net.Conn) {
	defer r.drop(c)
	server, err := (&net.Dialer{}).DialContext(context.Background(), "tcp", r.target)
	if err != nil {
		return
	}
	if !r.keep(server) {
		_ = server.Close()
		return
	}
	defer r.drop(server)
	done := make(chan struct{}, 2)
	for _, way := range [][2]net.Conn{{server, c}, {c, server}} {
		r.running.Go(func() {
			_, _ = io.Copy(&gate{relay: r, to: way[0]}, way[1])
			done <- struct{}{}
		})
	}
	<-done // either side's end ends both: HTTP has no half-closed connections
}

// gate holds what is written back while the relay hangs.
type gate struct {
	relay *Relay
	to    net.Conn
}

// Write implements io.Writer.
func (g *gate) Write(b []byte) (int, error) {
	for {
		g.relay.mu.Lock()
		mode, moved, ended := g.relay.mode, g.relay.moved, g.relay.ended
		g.relay.mu.Unlock()
		if mode != Hang || ended {
			return g.to.Write(b)
		}
		<-moved
	}
}
