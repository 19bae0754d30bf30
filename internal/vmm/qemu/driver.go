// Package qemu is the driver for QEMU's microvm machine: the product's way to run guests where KVM is not to be had.
//
// QEMU runs as a user of its own, without capabilities, in its own cgroup and QEMU's own system call filter. It inherits every
// file as a descriptor (disks, kernel, console, both listening sockets), so that its user needs no right to anything on the host.
// It is left waiting when its machine ends (-action), and its monitor's log tells why to whoever looks, whenever.
package qemu

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"imp.dev/imp/internal/cgroup"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/process"
	"imp.dev/imp/internal/vmm"
	"imp.dev/imp/internal/vmm/runner"
)

const (
	driverName    = "qemu"
	handleVersion = 1
	stage         = "starting VMM"

	// DefaultBinary is where Debian's package puts QEMU.
	DefaultBinary = "/usr/bin/qemu-system-x86_64"

	defaultTBSizeMiB     = 64
	defaultAnswerTimeout = 30 * time.Second
	cleanTime            = 15 * time.Second
)

// Options of the driver. Launcher, Instance, Log and UIDBase must be set.
type Options struct {
	// Binary is QEMU; "" is DefaultBinary.
	Binary string
	// Accel is TCG (also "") or KVM.
	Accel    string
	Launcher process.Launcher
	// Instance is the runtime's id.
	Instance string
	// Cgroups may be nil: no limits, and runs are found by their environment.
	Cgroups *cgroup.Tree
	// Namespaces is the host's /proc/PID/ns directory to join where the runtime lives in a container; "" joins none.
	Namespaces string
	// Each VM runs as a user and group of its own out of UIDBase … UIDBase+UIDCount-1; a count of 0 or 1 gives all of them UIDBase.
	UIDBase, UIDCount int
	// TBSizeMiB is TCG's buffer for translated code; 0 is 64.
	TBSizeMiB int
	Clock     clock.WithTicker
	Log       *slog.Logger
	// AnswerTimeout is how long Start waits for QEMU's monitor; 0 is 30 s, for loaded hosts.
	AnswerTimeout time.Duration
}

// Driver of QEMU.
type Driver struct {
	options Options
	runner  *runner.Runner
	uids    *uidPool

	tscOnce sync.Once
	tscKHz  int64
	errTSC  error
}

var _ vmm.Driver = (*Driver)(nil)

// New makes the driver.
func New(o Options) *Driver {
	if o.Binary == "" {
		o.Binary = DefaultBinary
	}
	if o.Accel == "" {
		o.Accel = TCG
	}
	if o.TBSizeMiB == 0 {
		o.TBSizeMiB = defaultTBSizeMiB
	}
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	if o.AnswerTimeout == 0 {
		o.AnswerTimeout = defaultAnswerTimeout
	}
	r := &runner.Runner{Driver: driverName, Version: handleVersion, Instance: o.Instance, Launcher: o.Launcher, Cgroups: o.Cgroups,
		Clock: o.Clock, Log: o.Log, Sockets: []string{qmpSocketName, guestSocketName},
		Logs: func(c vmm.Config) []string { return []string{filepath.Join(c.Dir, qmpLogName)} }}
	return &Driver{options: o, runner: r, uids: newUIDPool(o.UIDBase, o.UIDCount, r)}
}

// Name implements vmm.Driver.
func (d *Driver) Name() string { return driverName }

// Probe implements vmm.Driver.
func (d *Driver) Probe(ctx context.Context) vmm.Capabilities {
	c := vmm.Capabilities{Accelerator: d.options.Accel}
	r, err := process.Run(ctx, process.Cmd{Path: d.options.Binary, Args: []string{"--version"}})
	if err != nil {
		c.Problem = d.explainBinary(err).Error()
		return c
	}
	first, _, _ := strings.Cut(string(r.Stdout), "\n")
	c.VMMVersion = strings.TrimSpace(first)
	if d.options.Accel == KVM {
		if _, err := os.Stat("/dev/kvm"); err != nil {
			c.Problem = fmt.Sprintf("no KVM on this host: %v; use --accel tcg", err)
			return c
		}
	}
	if _, err := d.tsc(); err != nil && d.options.Accel == TCG {
		c.Problem = err.Error()
		return c
	}
	c.Usable = true
	return c
}

// explainBinary names the remedy for a QEMU that is not there.
func (d *Driver) explainBinary(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("no QEMU at %s: install it (Debian: qemu-system-x86) or name another binary: %w", d.options.Binary, err)
	}
	return err
}

func (d *Driver) tsc() (int64, error) {
	d.tscOnce.Do(func() { d.tscKHz, d.errTSC = measureTSC() })
	return d.tscKHz, d.errTSC
}

// OverheadMiB implements vmm.Driver. Measured: TestOverheadIsAsMeasured prints the figures.
func (d *Driver) OverheadMiB(vcpu int, memoryMiB int64) int64 {
	// QEMU's own heap, stacks and file pages; a little for each vCPU's thread; page tables and bookkeeping of the guest's memory.
	overhead := int64(40) + 4*int64(vcpu) + memoryMiB/64
	if d.options.Accel == TCG {
		overhead += int64(d.options.TBSizeMiB)
	}
	return overhead
}

// Start implements vmm.Driver.
func (d *Driver) Start(ctx context.Context, c vmm.Config) (vmm.Instance, error) {
	if err := d.check(c); err != nil {
		return nil, fault.New(fault.RuntimeStartFailed, stage, err)
	}
	if err := d.runner.Vacant(c); err != nil {
		return nil, fault.New(fault.RuntimeStartFailed, stage, err)
	}
	uid, release, err := d.uids.take(c.Cgroup)
	if err != nil {
		return nil, fault.New(fault.RuntimeStartFailed, stage, err)
	}
	defer release()
	files, err := d.open(c)
	if err != nil {
		return nil, fault.New(fault.RuntimeStartFailed, stage, errors.Join(err, d.Destroy(ctx, c, vmm.Handle{}))) // sockets made before the failure
	}
	defer files.close()
	order := process.Order{Path: d.options.Binary, Args: files.invocation.arguments(), Env: []string{"PATH=/usr/bin:/bin", "LC_ALL=C"}, Dir: "/",
		UID: uid, GID: uid, Groups: d.groups(), Namespaces: d.options.Namespaces, Files: files.inherit}
	if os.Geteuid() != 0 {
		order.UID, order.GID = os.Geteuid(), os.Getegid()
	}
	limits := cgroup.Limits{MemoryBytes: (c.MemoryMiB + d.OverheadMiB(c.VCPU, c.MemoryMiB)) << 20, Pids: 512}
	run, err := d.runner.Launch(ctx, c, order, limits)
	if err != nil {
		return nil, fault.New(fault.RuntimeStartFailed, stage, d.explainBinary(err))
	}
	i := &instance{Run: run, config: c, log: d.options.Log.With("vm", c.VMID, "run", c.Run)}
	if err := i.awaitRunning(ctx, d.options.AnswerTimeout); err != nil {
		_ = i.Close()
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTime)
		defer cancel()
		return nil, fault.New(fault.RuntimeStartFailed, stage, errors.Join(err, d.Destroy(clean, c, i.Handle())))
	}
	i.MarkStarted()
	i.Go(i.watch)
	return i, nil
}

// groups lets a VMM that runs without capabilities open /dev/kvm.
func (d *Driver) groups() []int {
	if d.options.Accel != KVM {
		return nil
	}
	if gid, ok := groupOf("/dev/kvm"); ok {
		return []int{gid}
	}
	return nil
}

// Recover implements vmm.Driver.
func (d *Driver) Recover(_ context.Context, c vmm.Config, h vmm.Handle) (vmm.Instance, error) {
	run, err := d.runner.Adopt(c, h)
	if err != nil {
		return nil, err
	}
	i := &instance{Run: run, config: c, log: d.options.Log.With("vm", c.VMID, "run", c.Run)}
	i.Go(i.watch)
	return i, nil
}

// Evidence implements vmm.Driver. It asks files only: the monitor serves one client, and that may be another.
func (d *Driver) Evidence(_ context.Context, c vmm.Config, h vmm.Handle) (vmm.Evidence, error) {
	facts, err := d.runner.Gather(c, h)
	if err == nil {
		err = event(c, &facts)
	}
	if err != nil {
		return vmm.Evidence{}, fmt.Errorf("gathering evidence: %w", err)
	}
	return runner.Decide(facts), nil
}

// Destroy implements vmm.Driver.
func (d *Driver) Destroy(ctx context.Context, c vmm.Config, h vmm.Handle) error {
	return d.runner.Destroy(ctx, c, h)
}

// Runs implements vmm.Driver.
func (d *Driver) Runs(context.Context) ([]vmm.Found, error) { return d.runner.Runs() }
