// Package engine looks after the VMs of one node: it is the machine.Service behind the runtime's socket.
//
// Every VM has one worker, a goroutine that observes, asks package plan for the next step, carries it out, writes down what came
// of it, and begins again. Orders (Ensure, Remove) only change the record and wake the worker; exits, the guest's answers and
// timers wake it as well. Nothing a worker needs to know survives in memory alone: after any death of the runtime the records
// are read again, each VMM on record is looked for, and what has no record is reaped.
package engine

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/utils/clock"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/guest"
	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/plan"
	"imp.dev/imp/internal/network"
	"imp.dev/imp/internal/record"
	"imp.dev/imp/internal/vmm"
)

// Disks makes private disks.
type Disks interface {
	// Create makes a sparse disk of gib GiB at path, ready for the guest. Nothing is at path.
	// Errors are fault.Errors with DiskFailed.
	Create(ctx context.Context, path string, gib int64) error
}

// Config of an Engine. Everything is required but where a default is named.
type Config struct {
	// Records of StateDir, which survives reboots of the host. RunDir does not; it holds sockets and evidence.
	Records          *record.Store[plan.Record]
	StateDir, RunDir string
	Driver           vmm.Driver
	Images           image.Store
	Disks            Disks
	Network          network.Network
	// Guest makes the client for one boot of one guest.
	Guest func(guest.Dialer) guest.Client
	// Kernel is an uncompressed ELF, Initramfs a cpio archive.
	Kernel, Initramfs string
	Budget            plan.Need
	// HostBootID is /proc/sys/kernel/random/boot_id.
	HostBootID string
	// Limits default to plan.DefaultLimits.
	Limits plan.Limits
	// MaxBoots is how many guests boot at once; 0 is no limit. More than the host has processors for would all miss their deadline
	// together, and again together on the next try.
	MaxBoots int
	// Info is what Service.Info tells beside what the engine knows itself.
	Info machine.Info
	// Architecture in Go's spelling, of node and images.
	Architecture string
	Clock        clock.WithTicker
	Log          *slog.Logger
	// Failpoint, when set, is called before and after each step ("before StartVMM", "after StartVMM") and each write of a record
	// ("before save", "after save"), by many goroutines at once, and may not call the engine. An error makes the engine act as if its process had died there.
	Failpoint func(point string) error
}

const probePeriod = 30 * time.Second

// Engine implements machine.Service and machine.Keeper.
type Engine struct {
	config  Config
	records *record.Store[plan.Record]
	paths   paths
	clock   clock.WithTicker
	log     *slog.Logger
	hub     *hub
	trash   trash
	auditor auditor
	// boots holds a token for every guest that boots; nil is no limit.
	boots chan struct{}

	// died is set by a failpoint.
	died atomic.Bool

	// life ends with Close; workers and the audit run in group.
	life  context.Context
	end   context.CancelFunc
	group sync.WaitGroup

	mu         sync.Mutex
	workers    map[string]*worker
	unreadable map[string]string
	// reaping holds the IDs of what is being removed as nobody's, each until its channel is closed.
	reaping map[string]chan struct{}
	// loaded is what the records said of VMs before anything was done in this process.
	loaded map[string]machine.Status
	closed bool

	capabilitiesMu sync.Mutex
	capabilities   vmm.Capabilities
	probedAt       time.Time

	networkMu sync.Mutex
	// networks as they were set since this process began, without their peers.
	networks map[string]network.Spec
	host     network.Host // as last seen
}

var (
	_ machine.Service = (*Engine)(nil)
	_ machine.Keeper  = (*Engine)(nil)
)

// OpenRecords takes a state directory for Config.Records. Its Instance names what the driver makes on the host.
func OpenRecords(stateDir string, log *slog.Logger) (*record.Store[plan.Record], error) {
	return record.Open[plan.Record](stateDir, plan.Version, log)
}

// New takes over the records, starts a worker for every record there is, and reaps what has none. It does not wait for them.
// The records are closed by Close, or by a New that fails.
func New(c Config) (*Engine, error) {
	if c.Limits == (plan.Limits{}) {
		c.Limits = plan.DefaultLimits()
	}
	e := &Engine{
		config: c, records: c.Records, clock: c.Clock, log: c.Log, hub: newHub(), workers: map[string]*worker{}, reaping: map[string]chan struct{}{}, networks: map[string]network.Spec{},
		paths: paths{state: filepath.Join(c.StateDir, "vm"), run: filepath.Join(c.RunDir, "vm"), trash: filepath.Join(c.StateDir, "trash")},
	}
	e.trash.dir, e.trash.clock = e.paths.trash, c.Clock
	if c.MaxBoots > 0 {
		e.boots = make(chan struct{}, c.MaxBoots)
	}
	e.life, e.end = context.WithCancel(context.Background())
	if err := e.load(); err != nil {
		e.end()
		e.group.Wait()
		_ = c.Records.Close()
		return nil, err
	}
	e.group.Add(1)
	go e.auditLoop()
	return e, nil
}

func (e *Engine) load() error {
	for _, dir := range []string{e.paths.state, e.paths.run, e.paths.trash} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("making directory for VMs: %w", err)
		}
	}
	loaded, err := e.records.Load()
	if err != nil {
		return fmt.Errorf("loading records: %w", err)
	}
	e.unreadable = loaded.Unreadable
	e.mu.Lock()
	defer e.mu.Unlock()
	now := e.clock.Now()
	e.loaded = make(map[string]machine.Status, len(loaded.Records))
	for id, r := range loaded.Records {
		e.loaded[id] = plan.Status(r, plan.Step{}, "")
		e.startWorker(id, plan.Reloaded(r, now))
	}
	return nil
}

// startWorker is called with mu held.
func (e *Engine) startWorker(id string, r plan.Record) *worker {
	return e.startWorkerWith(id, r, func(*worker) {})
}

func (e *Engine) startWorkerWith(id string, r plan.Record, prepare func(*worker)) *worker {
	w := newWorker(e, id, r)
	prepare(w)
	e.workers[id] = w
	e.group.Add(1)
	go func() {
		defer e.group.Done()
		w.run(e.life)
	}()
	e.hub.publish(id)
	return w
}

// TakeLoaded gives, once, the VMs as the records told of them when this process began, by ID: who counts what happens since then begins
// there, because the first Watch may come later than the first events.
func (e *Engine) TakeLoaded() map[string]machine.Status {
	e.mu.Lock()
	defer e.mu.Unlock()
	loaded := e.loaded
	e.loaded = nil
	return loaded
}

// Instance is the id of the state directory.
func (e *Engine) Instance() string { return e.records.Instance() }

// Close stops the engine and lets go of everything; VMs go on. It returns when no step is under way any more.
func (e *Engine) Close() error {
	e.mu.Lock()
	e.closed = true
	e.mu.Unlock()
	e.end()
	e.group.Wait()
	return e.records.Close()
}

// known gives the worker of id, nil if there is none.
func (e *Engine) known(id string) *worker {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.workers[id]
}

// jitter spreads d by a fifth either way, so that VMs that failed together do not come back together.
func jitter(d time.Duration) time.Duration {
	return d - d/5 + time.Duration(rand.Int64N(int64(d)*2/5+1))
}

// backoff of the nth failure in a row of a step: 1 s doubling to limit, spread.
func backoff(n int, limit time.Duration) time.Duration {
	d := time.Second
	for i := 1; i < n && d < limit; i++ {
		d *= 2
	}
	return jitter(min(d, limit))
}

func errClosed() error {
	return fault.Errorf(fault.Unavailable, "serving", "the runtime is shutting down")
}
