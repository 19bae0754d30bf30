// Package devserver runs all of Imp on one machine: a real API server, an operator, and for each pretended node a runtime
// and an agent with the identities and roles they have in a cluster. For a laptop, for tests and for trying Imp.
package devserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"imp.dev/imp/config"
	"imp.dev/imp/internal/devserver/child"
	"imp.dev/imp/internal/devserver/controlplane"
	"imp.dev/imp/internal/devserver/fabric"
	"imp.dev/imp/internal/devserver/registry"
	"imp.dev/imp/internal/devserver/relay"
	"imp.dev/imp/internal/devserver/sweep"

	"k8s.io/client-go/rest"
)

// Server is a running development server.
type Server struct {
	Places Places
	// ControlPlane gives the admin's config and client.
	ControlPlane *controlplane.ControlPlane
	// Registry is the address (host:port) images are pushed to and pulled from; PrivateRegistry the one with a password,
	// "" without one.
	Registry, PrivateRegistry string

	opts      Options
	fabric    *fabric.Fabric // nil without networks that are real
	group     *child.Group
	unlock    func()
	listeners []*http.Server
	boot      bootFiles
	binDir    string

	// refresh renews tokens until the server stops.
	refresh    context.CancelFunc
	refreshing sync.WaitGroup

	mu       sync.Mutex
	running  map[programKey]*child.Process
	metrics  map[programKey]string   // addresses
	relays   map[string]*relay.Relay // by program's name, with Options.Relays
	ended    chan error
	stopping bool
}

// Up starts everything and returns once every node can take VMs. What an earlier server over the same folder left, even
// one that was killed, is removed first. On an error everything started is stopped again. A cancelled ctx ends the start; the
// server itself runs until Stop.
func Up(ctx context.Context, opts Options) (_ *Server, err error) {
	if opts, err = opts.complete(); err != nil {
		return nil, err
	}
	places, err := PlacesOf(opts.Dir)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(places.Logs(), 0o755); err != nil {
		return nil, fmt.Errorf("making --dir: %w", err)
	}
	unlock, err := places.lock()
	if err != nil {
		return nil, err
	}
	s := &Server{
		Places: places, opts: opts, unlock: unlock, group: child.NewGroup(),
		running: map[programKey]*child.Process{}, metrics: map[programKey]string{}, relays: map[string]*relay.Relay{}, ended: make(chan error, 64),
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.teardown(context.WithoutCancel(ctx)))
		}
	}()
	if err := s.removeEarlier(ctx); err != nil {
		return nil, err
	}
	for _, step := range []func(context.Context) error{
		s.makeFolders, s.placePrograms, s.makeHosts, s.startRegistry, s.prepareBoot, s.startControlPlane, s.startOperator, s.startNodes,
	} {
		if err := step(ctx); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// Config is the admin's.
func (s *Server) Config() *rest.Config { return s.ControlPlane.Config() }

// Ended gives an error for each program that ended without being told to. Nothing is restarted: a defect is to be seen.
func (s *Server) Ended() <-chan error { return s.ended }

// removeEarlier cleans up after a server that was killed.
func (s *Server) removeEarlier(ctx context.Context) error {
	area := s.area()
	area.Namespaces = append(area.Namespaces, s.Places.Namespaces+"-")
	found, err := sweep.Clean(ctx, area)
	if len(found) > 0 {
		s.opts.Progress("removed what an earlier imp-dev left: " + strings.Join(found, ", "))
	}
	return err
}

// area is what may hold leftovers of VMs; logs and the registry's images are the user's.
func (s *Server) area() sweep.Area {
	return sweep.Area{Cgroup: s.Places.Cgroup, Dirs: []string{s.Places.Data, s.Places.Run}, Namespaces: s.Places.networks()}
}

func (s *Server) makeFolders(context.Context) error {
	for _, dir := range []string{s.Places.Data, s.Places.Run, filepath.Join(s.Places.Run, "credentials"), s.Places.boot()} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("making folders: %w", err)
		}
	}
	logs, err := filepath.Glob(filepath.Join(s.Places.Logs(), "*.log"))
	if err != nil {
		return err
	}
	for _, log := range logs { // an old log in front of a new one misleads whoever reads it
		if err := os.Remove(log); err != nil {
			return fmt.Errorf("removing an old log: %w", err)
		}
	}
	return nil
}

func (s *Server) startRegistry(context.Context) error {
	handler, err := registry.New(s.Places.registry(), s.opts.Log)
	if err != nil {
		return err
	}
	if s.Registry, err = s.serve(handler, s.opts.RegistryPort); err != nil {
		return fmt.Errorf("starting the registry (--registry-port takes another): %w", err)
	}
	if user, password, ok := strings.Cut(s.opts.RegistryPassword, ":"); ok {
		s.PrivateRegistry, err = s.serve(registry.WithPassword(handler, user, password), 0)
	}
	return err
}

func (s *Server) serve(handler http.Handler, port int) (address string, err error) {
	listener, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return "", err
	}
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second}
	s.listeners = append(s.listeners, server)
	go func() { _ = server.Serve(listener) }() // ends with Close
	return listener.Addr().String(), nil
}

func (s *Server) startControlPlane(ctx context.Context) error {
	binaries, err := controlplane.Build(ctx, s.opts.CacheDir, s.opts.Progress)
	if err != nil {
		return err
	}
	s.opts.Progress("starting etcd, kube-apiserver and kube-controller-manager")
	s.ControlPlane, err = controlplane.Start(ctx, controlplane.Options{
		Dir: s.Places.Dir, LogDir: s.Places.Logs(), Binaries: binaries, Group: s.group,
	})
	if err != nil {
		return err
	}
	s.watchControlPlane()
	s.opts.Progress("installing CRDs, roles and policies")
	return s.ControlPlane.Install(ctx, config.Files)
}

// watch reports a process that ends on its own.
func (s *Server) watch(p *child.Process) {
	go func() {
		<-p.Done()
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.stopping || s.expected(p) {
			return
		}
		select {
		case s.ended <- p.Ended():
		default: // nobody reads; the logs have it
		}
	}()
}

// expected says whether p was stopped by Kill or replaced. mu is held.
func (s *Server) expected(p *child.Process) bool {
	for _, q := range s.running {
		if q == p {
			return false
		}
	}
	for _, q := range s.ControlPlane.Processes() {
		if q == p {
			return false
		}
	}
	return true
}

// Stop removes every VM through the API, then stops everything and leaves nothing but the logs and the registry's images.
// An error says what did not go in order; nothing runs any more all the same.
func (s *Server) Stop(ctx context.Context) error {
	err := s.removeVMs(ctx)
	return errors.Join(err, s.teardown(ctx))
}

func (s *Server) teardown(ctx context.Context) error {
	s.mu.Lock()
	s.stopping = true
	s.mu.Unlock()
	if s.refresh != nil {
		s.refresh()
	}
	s.refreshing.Wait()
	s.group.Close()
	for _, r := range s.relays {
		r.Close()
	}
	for _, server := range s.listeners {
		_ = server.Close() // an error says that it was closed before
	}
	_, err := fabric.Remove(s.Places.Namespaces + "-")
	found, failed := sweep.Clean(ctx, s.area())
	err = errors.Join(err, failed)
	if len(found) > 0 {
		err = errors.Join(err, fmt.Errorf("stopping: still there after the runtimes had ended, removed now: %s", strings.Join(found, ", ")))
	}
	for _, name := range []string{"etcd", "pki", "kubeconfig"} {
		err = errors.Join(err, os.RemoveAll(filepath.Join(s.Places.Dir, name)))
	}
	s.unlock()
	return err
}
