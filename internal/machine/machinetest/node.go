package machinetest

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/utils/clock"

	"imp.dev/imp/internal/cgroup"
	"imp.dev/imp/internal/guest"
	"imp.dev/imp/internal/guest/channel"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/engine"
	"imp.dev/imp/internal/machine/plan"
	networkfake "imp.dev/imp/internal/network/fake"
	"imp.dev/imp/internal/process"
	vmmfake "imp.dev/imp/internal/vmm/fake"
)

// NewEngine makes a node whose runtime is an engine in this process. The test binary's TestMain must know process.ChildCommand and
// the fake driver's Command. Wrap, if not nil, puts something between the engine and the suite and says how to end it.
func NewEngine(t *testing.T, wrap func(t *testing.T, s machine.Service) (machine.Service, func())) *Harness {
	t.Helper()
	root := t.TempDir()
	log := &syncBuffer{}
	images, err := NewImages(filepath.Join(root, "images"))
	if err != nil {
		t.Fatal(err)
	}
	network, err := networkfake.New(filepath.Join(root, "network"))
	if err != nil {
		t.Fatal(err)
	}
	h := &Harness{Images: images, StateDir: filepath.Join(root, "state"), RunDir: filepath.Join(root, "run"), Log: log, Digest: digest(Reference), Network: network}
	var e *engine.Engine
	bootID, err := process.BootID()
	if err != nil {
		t.Fatal(err)
	}
	unwrap := func() {}
	settings := &settings{silence: plan.DefaultLimits().Silence}
	h.SetSilence = func(d time.Duration) { settings.silence = d }
	h.SetFailpoint = func(f func(string) error) { settings.failpoint.Store(&f) }
	h.Instance = func() string { return e.Instance() }
	h.Start = func(t *testing.T) {
		t.Helper()
		e = startEngine(t, h, network, log, bootID, settings)
		h.Service = e
		if wrap != nil {
			h.Service, unwrap = wrap(t, e)
		}
	}
	h.Stop = func(t *testing.T) {
		t.Helper()
		unwrap()
		if err := e.Close(); err != nil {
			t.Errorf("closing engine: %v", err)
		}
	}
	h.Reboot = func(t *testing.T) {
		t.Helper()
		h.Stop(t)
		killAll(t, h)
		if err := os.RemoveAll(h.RunDir); err != nil {
			t.Fatal(err)
		}
		bootID += "-next"
		h.Start(t)
	}
	h.Start(t)
	t.Cleanup(func() {
		unwrap()
		_ = e.Close()
		killAll(t, h)
		if os.Geteuid() == 0 {
			RemoveCgroups(t, e.Instance())
		}
	})
	return h
}

func killAll(t *testing.T, h *Harness) {
	t.Helper()
	for _, pid := range h.PIDs(t, "") {
		if p, err := os.FindProcess(pid); err == nil {
			_ = p.Kill()
		}
	}
	eventually(t, "an end of all VMMs", func() bool { return len(h.PIDs(t, "")) == 0 })
}

// settings of the engines of one harness.
type settings struct {
	silence   time.Duration
	failpoint atomic.Pointer[func(string) error]
}

func (s *settings) reach(point string) error {
	if f := s.failpoint.Load(); f != nil && *f != nil {
		return (*f)(point)
	}
	return nil
}

func startEngine(t *testing.T, h *Harness, network *networkfake.Network, log *syncBuffer, bootID string, set *settings) *engine.Engine {
	t.Helper()
	logger := slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	records, err := engine.OpenRecords(h.StateDir, logger)
	if err != nil {
		t.Fatal(err)
	}
	var tree *cgroup.Tree
	if os.Geteuid() == 0 {
		if tree, err = cgroup.Open(cgroup.Options{Instance: records.Instance()}); err != nil {
			t.Logf("without cgroups: %v", err)
			tree = nil
		}
	}
	clk := clock.RealClock{}
	limits := plan.DefaultLimits()
	limits.Boot, limits.Kill, limits.Off = 5*time.Second, time.Second, 2*time.Second
	limits.Silence = set.silence
	e, err := engine.New(engine.Config{
		Records: records, StateDir: h.StateDir, RunDir: h.RunDir,
		Driver: vmmfake.New(vmmfake.Options{Launcher: process.New(process.Options{}), Instance: records.Instance(), Cgroups: tree, Log: logger, Clock: clk}),
		Images: h.Images, Disks: Disks{}, Network: network,
		Guest:  func(dial guest.Dialer) guest.Client { return channel.New(dial, clk, logger) },
		Budget: plan.Need{VCPU: 32, MemoryMiB: 32 << 10, DiskGiB: 1 << 10}, HostBootID: bootID, Limits: limits, MaxBoots: 4, Architecture: "amd64", Clock: clk, Log: logger,
		Failpoint: set.reach,
	})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// RemoveCgroups removes the groups an uninstalled runtime leaves; that they can be removed says that nothing lives in them.
func RemoveCgroups(t *testing.T, instance string) {
	t.Helper()
	tree, err := cgroup.Open(cgroup.Options{Instance: instance})
	if err != nil {
		return // no cgroups on this host
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	names, err := tree.List()
	if err != nil {
		t.Errorf("listing cgroups of %s: %v", instance, err)
	}
	for _, name := range names {
		if g, err := tree.Group(name); err != nil {
			t.Errorf("cgroup %s: %v", name, err)
		} else if err := g.Remove(ctx); err != nil {
			t.Errorf("removing cgroup %s: %v", name, err)
		}
	}
	if err := tree.Close(); err != nil {
		t.Errorf("cgroups of %s: %v", instance, err)
	}
}
