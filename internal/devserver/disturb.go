package devserver

import (
	"context"
	"fmt"
	"strings"
	"syscall"

	"imp.dev/imp/internal/devserver/controlplane"
	"imp.dev/imp/internal/devserver/relay"
)

// What a server lets one do to its programs, beside Kill and Start: for tests of what survives it.

// Terminate ends a program with SIGTERM, as an upgrade does, and waits until it is gone.
func (s *Server) Terminate(program Program, node string) error {
	key := programKey{program: program, node: node}
	s.mu.Lock()
	p := s.running[key]
	delete(s.running, key)
	s.mu.Unlock()
	if p == nil {
		return fmt.Errorf("ending %s: it does not run", key)
	}
	p.Stop()
	return nil
}

// Signal sends a signal to a running program; it does not wait. SIGSTOP makes it hang until SIGCONT.
func (s *Server) Signal(program Program, node string, sig syscall.Signal) error {
	key := programKey{program: program, node: node}
	s.mu.Lock()
	p := s.running[key]
	s.mu.Unlock()
	if p == nil {
		return fmt.Errorf("signalling %s: it does not run", key)
	}
	return p.Signal(sig)
}

// Partition sets what becomes of the connections between a program (the operator or an agent) and the API server. It needs
// Options.Relays.
func (s *Server) Partition(program Program, node string, mode relay.Mode) error {
	key := programKey{program: program, node: node}
	s.mu.Lock()
	r := s.relays[key.String()]
	s.mu.Unlock()
	if r == nil {
		return fmt.Errorf("partitioning %s: it has no relay", key)
	}
	r.Set(mode)
	return nil
}

// relayOf gives the relay of a program to host (https://HOST:PORT), made on first use.
func (s *Server) relayOf(program, host string) (*relay.Relay, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r := s.relays[program]; r != nil {
		return r, nil
	}
	r, err := relay.Listen(strings.TrimPrefix(host, "https://"))
	if err == nil {
		s.relays[program] = r
	}
	return r, err
}

// KillAPIServer ends kube-apiserver with SIGKILL; its data stays.
func (s *Server) KillAPIServer() error {
	return s.ControlPlane.KillProcess(controlplane.APIServerProcess)
}

// StartAPIServer starts it again and waits until it is ready.
func (s *Server) StartAPIServer(ctx context.Context) error {
	if err := s.ControlPlane.StartProcess(controlplane.APIServerProcess); err != nil {
		return err
	}
	s.watchControlPlane()
	return s.ControlPlane.AwaitReady(ctx)
}

// RestoreEtcd goes back to an earlier ControlPlane.BackUp.
func (s *Server) RestoreEtcd(ctx context.Context, dir string) error {
	err := s.ControlPlane.Restore(ctx, dir)
	s.watchControlPlane()
	return err
}

// watchControlPlane watches all its processes; one that is watched twice is told twice, which does no harm.
func (s *Server) watchControlPlane() {
	for _, p := range s.ControlPlane.Processes() {
		s.watch(p)
	}
}
