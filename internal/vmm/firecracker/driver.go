// Package firecracker is the driver for Firecracker, the VMM that production runs on: KVM, a jail for each VM, vsock to the guest.
//
// A run is one process from its launch on. The launcher enters the VM's cgroup and an empty network namespace and executes the jailer, which
// makes its jail and becomes Firecracker; nothing else is ever its parent or child, so that pid and start time find it again.
//
//	launch ──► API socket ──► version ──► machine, boot source, drives, network, vsock, entropy, balloon ──► InstanceStart
//
// Its evidence is the last word of its log, the guest's console, and the cgroup: docs/adr/0009-firecracker.md.
package firecracker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"k8s.io/utils/clock"

	"imp.dev/imp/internal/cgroup"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/process"
	"imp.dev/imp/internal/vmm"
	"imp.dev/imp/internal/vmm/runner"
)

const (
	driverName    = "firecracker"
	handleVersion = 1
	stage         = "starting VMM"

	defaultAnswerTimeout = 15 * time.Second
	cleanTime            = 15 * time.Second
	defaultPeriod        = 500 * time.Millisecond
)

// Options of the driver. Binary, Launcher, Instance, Dir and Log must be set, and Jailer unless Unjailed.
type Options struct {
	// Binary is Firecracker, Jailer the jailer of the same release.
	Binary, Jailer string
	// Unjailed runs Firecracker with the runtime's own user and namespaces, without capabilities: for development.
	Unjailed bool
	// Dir is where jails are: on the file system of the disks, mounted with devices and execution allowed.
	Dir      string
	Launcher process.Launcher
	// Instance is the runtime's id.
	Instance string
	// Cgroups may be nil: no limits, and runs are found by their arguments.
	Cgroups *cgroup.Tree
	// Namespaces is the host's /proc/PID/ns directory to join where the runtime lives in a container; "" joins none.
	Namespaces string
	// Each jailed VM runs as a user and group of its own out of UIDBase … UIDBase+UIDCount-1.
	UIDBase, UIDCount int
	// Arch is that of the host, as Go names it; "" is this binary's.
	Arch  string
	Clock clock.WithTicker
	Log   *slog.Logger
	// AnswerTimeout is how long Start waits for the API's socket; 0 is 15 s, for loaded hosts.
	AnswerTimeout time.Duration
	// Period is between two looks at a machine's console; 0 is 500 ms. FigurePeriod is between two readings of its figures; 0 is 10 s.
	Period, FigurePeriod time.Duration
}

// Driver of Firecracker.
type Driver struct {
	options Options
	runner  *runner.Runner
	jails   *jails
	figures *figures
}

var _ vmm.Driver = (*Driver)(nil)

// New makes the driver.
func New(o Options) *Driver {
	if o.Arch == "" {
		o.Arch = runtime.GOARCH
	}
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	if o.AnswerTimeout == 0 {
		o.AnswerTimeout = defaultAnswerTimeout
	}
	if o.Period == 0 {
		o.Period = defaultPeriod
	}
	if o.FigurePeriod == 0 {
		o.FigurePeriod = figurePeriod
	}
	d := &Driver{options: o, figures: newFigures()}
	program := filepath.Base(o.Binary)
	if real, err := filepath.EvalSymlinks(d.onHost(o.Binary)); err == nil {
		program = filepath.Base(real) // as the jailer sees it
	}
	d.jails = newJails(o.Dir, program, o.UIDBase, o.UIDCount)
	d.runner = &runner.Runner{Driver: driverName, Version: handleVersion, Instance: o.Instance, Launcher: o.Launcher, Cgroups: o.Cgroups,
		Clock: o.Clock, Log: o.Log, IDFlag: "--id", Sockets: []string{apiName, vsockName}, Logs: d.logs}
	return d
}

// onHost gives the path by which this process sees a file of the host.
func (d *Driver) onHost(path string) string {
	if d.options.Namespaces == "" {
		return path
	}
	return filepath.Join(filepath.Dir(filepath.Clean(d.options.Namespaces)), "root", path)
}

// Name implements vmm.Driver.
func (d *Driver) Name() string { return driverName }

func (d *Driver) containment() string {
	if d.options.Unjailed {
		return Unjailed
	}
	return Jailed
}

// OverheadMiB implements vmm.Driver. Measured: TestOverheadIsAsMeasured prints the figures.
func (d *Driver) OverheadMiB(vcpu int, memoryMiB int64) int64 {
	// Firecracker's own memory with room for its copy's file pages, a little for each vCPU's thread, page tables and bookkeeping of the guest's memory.
	return 24 + int64(vcpu) + memoryMiB/128
}

// at finds the home of a run that this driver may have started: what its Handle says, else what is on the disk.
func (d *Driver) at(c vmm.Config, h vmm.Handle) (home, error) {
	if h.Driver != "" {
		var kept home
		if err := d.runner.Kept(h, &kept); err != nil {
			return home{}, err
		}
		if kept.Root != "" {
			return kept, nil
		}
	}
	if jail := d.jails.home(d.runner.ID(c.Cgroup)); exists(jail.Keep) {
		return jail, nil
	}
	return unjailedHome(c), nil
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// logs are kept short while a run lives.
func (d *Driver) logs(c vmm.Config) []string {
	h, err := d.at(c, vmm.Handle{})
	if err != nil {
		return nil
	}
	return []string{h.logPath(), h.metricsPath()}
}

// Start implements vmm.Driver.
func (d *Driver) Start(ctx context.Context, c vmm.Config) (vmm.Instance, error) {
	i, err := d.start(ctx, c)
	if err != nil {
		return nil, fault.New(fault.RuntimeStartFailed, stage, err)
	}
	return i, nil
}

func (d *Driver) start(ctx context.Context, c vmm.Config) (_ *instance, err error) {
	if err := errors.Join(ctx.Err(), d.check(c)); err != nil {
		return nil, err
	}
	if err := d.runner.Vacant(c); err != nil {
		return nil, err
	}
	var i *instance
	defer func() {
		if err == nil {
			return
		}
		handle := vmm.Handle{}
		if i != nil {
			handle = i.Handle()
			_ = i.Close()
		}
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTime)
		defer cancel()
		err = errors.Join(err, d.Destroy(clean, c, handle))
	}()
	h, machine, err := d.settle(c)
	if err != nil {
		return nil, err
	}
	namespace, err := d.namespace()
	if err != nil {
		return nil, err
	}
	defer namespace.Close()
	run, err := d.launch(ctx, c, h, namespace)
	if err != nil {
		return nil, d.explainBinary(err)
	}
	i = newInstance(d, run, c, h)
	if err := i.boot(ctx, machine, namespace, d.options.AnswerTimeout); err != nil {
		return nil, i.explain(err)
	}
	i.MarkStarted()
	i.Go(i.watch)
	i.Go(i.meter)
	i.log.Info("Firecracker started", "containment", i.home.Containment, "version", i.home.Release, "uid", i.home.UID, "pid", i.PID())
	return i, nil
}

// settle puts the run's files where its VMM finds them.
func (d *Driver) settle(c vmm.Config) (home, spec, error) {
	var h home
	var s spec
	var err error
	if d.options.Unjailed {
		h, s = unjailedHome(c), spec{Kernel: c.Kernel, Initramfs: c.Initramfs}
		for _, disk := range c.Disks {
			s.Disks = append(s.Disks, specDisk{Path: disk.Path, ReadOnly: disk.ReadOnly})
		}
		for _, name := range []string{apiName, vsockName} {
			_ = os.Remove(filepath.Join(h.Root, name)) // Firecracker takes no name that is there
		}
		err = h.makeLogs()
	} else if err = d.jails.usable(); err == nil {
		h, s, err = d.jails.make(d.runner.ID(c.Cgroup), c)
	}
	s.Arch, s.VCPU, s.MemoryMiB, s.KernelArgs = d.options.Arch, c.VCPU, c.MemoryMiB, c.KernelArgs
	return h, s, err
}

func (d *Driver) launch(ctx context.Context, c vmm.Config, h home, namespace *os.File) (*runner.Run, error) {
	console, err := os.OpenFile(c.ConsoleLog, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening console: %w", err)
	}
	defer console.Close()
	id := d.runner.ID(c.Cgroup)
	// The serial console is Firecracker's standard output.
	o := process.Order{Path: d.options.Binary, Args: append([]string{"--id", id}, firecrackerArgs()...), Env: []string{"PATH=/usr/bin:/bin", "LC_ALL=C"},
		Dir: h.Root, UID: os.Geteuid(), GID: os.Getegid(), Namespaces: d.options.Namespaces, Stdout: console, OpenFiles: jailOpenFiles}
	if h.Containment == Jailed {
		o = d.jails.order(o, d.options.Jailer, d.options.Binary, id, h.UID)
		o.NetNS = namespace
	}
	limits := cgroup.Limits{MemoryBytes: (c.MemoryMiB + d.OverheadMiB(c.VCPU, c.MemoryMiB)) << 20, Pids: int64(64 + c.VCPU), MilliCPU: int64(1000*c.VCPU + vmmMilliCPU)}
	return d.runner.Launch(ctx, c, o, limits)
}

// vmmMilliCPU is what a VMM may use beside its vCPUs, for devices.
const vmmMilliCPU = 500

// Recover implements vmm.Driver.
func (d *Driver) Recover(_ context.Context, c vmm.Config, h vmm.Handle) (vmm.Instance, error) {
	at, err := d.at(c, h)
	if err != nil {
		return nil, err
	}
	run, err := d.runner.Adopt(c, h)
	if err != nil {
		return nil, err
	}
	i := newInstance(d, run, c, at)
	i.Go(i.watch)
	i.Go(i.meter)
	return i, nil
}

// Destroy implements vmm.Driver.
func (d *Driver) Destroy(ctx context.Context, c vmm.Config, h vmm.Handle) error {
	at, err := d.at(c, h)
	if err != nil {
		return err
	}
	if err := d.runner.Destroy(ctx, c, h); err != nil {
		return err // it may live: its jail stays
	}
	d.figures.forget(c.Cgroup)
	if at.Containment != Jailed {
		return nil
	}
	if err := keepLog(at.logPath(), c.Dir); err != nil {
		return err
	}
	return d.jails.remove(d.runner.ID(c.Cgroup))
}

// Runs implements vmm.Driver.
func (d *Driver) Runs(context.Context) ([]vmm.Found, error) {
	found, err := d.runner.Runs()
	ids, listing := d.jails.list()
	for _, id := range ids {
		if name, ours := strings.CutPrefix(id, d.runner.ID("")); ours {
			found = append(found, vmm.Found{Cgroup: name, Kind: vmm.FoundJail, Name: d.jails.path(id)})
		}
	}
	return found, errors.Join(err, listing)
}
