package runtimed

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"imp.dev/imp/internal/cgroup"
	"imp.dev/imp/internal/disk"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image"
	imagefake "imp.dev/imp/internal/image/fake"
	"imp.dev/imp/internal/image/oci"
	"imp.dev/imp/internal/kernel"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/engine"
	"imp.dev/imp/internal/process"
	"imp.dev/imp/internal/vmm"
	vmmfake "imp.dev/imp/internal/vmm/fake"
	"imp.dev/imp/internal/vmm/qemu"
)

func newDriver(o Options, instance string, tree *cgroup.Tree, log *slog.Logger) (*measuredDriver, error) {
	launcher := process.New(process.Options{})
	switch o.VMM {
	case "fake":
		fake := vmmfake.New(vmmfake.Options{Launcher: launcher, Instance: instance, Cgroups: tree, Clock: clock.RealClock{}, Log: log})
		return &measuredDriver{Driver: fake, kernel: func() string { return "" }}, nil
	case "qemu":
		q := qemu.New(qemu.Options{
			Binary: o.QEMUBinary, Accel: o.Accel, Launcher: launcher, Instance: instance, Cgroups: tree, Namespaces: o.HostNamespaces,
			UIDBase: o.VMMUIDBase, UIDCount: o.VMMUIDCount, Clock: clock.RealClock{}, Log: log,
		})
		boots := &bootableDriver{Driver: q, kernel: o.Kernel, initramfs: o.Initramfs, dir: filepath.Join(o.StateDir, "kernel")}
		return &measuredDriver{Driver: boots, kernel: boots.digest}, nil
	default:
		return nil, fmt.Errorf("reading flags: --vmm is %q and must be qemu or fake", o.VMM)
	}
}

// bootableDriver hands its driver a kernel that it can boot: an ELF, unpacked once. The file is looked at before each launch, so that a
// kernel that was missing or broken is told with each VM's start, and a repaired one is used without a restart.
type bootableDriver struct {
	vmm.Driver
	kernel, initramfs, dir string

	mu       sync.Mutex
	of       string // size and time of the file that elf was made from
	unpacked string
}

// Probe implements vmm.Driver: without kernel and initramfs no VM can start.
func (d *bootableDriver) Probe(ctx context.Context) vmm.Capabilities {
	c := d.Driver.Probe(ctx)
	if !c.Usable {
		return c
	}
	if _, err := d.elf(); err != nil {
		c.Usable, c.Problem = false, err.Error()
	} else if _, err := os.Stat(d.initramfs); err != nil {
		c.Usable, c.Problem = false, fmt.Sprintf("no initramfs: %v; name one by --initramfs", err)
	}
	return c
}

// Start implements vmm.Driver.
func (d *bootableDriver) Start(ctx context.Context, c vmm.Config) (vmm.Instance, error) {
	elf, err := d.elf()
	if err != nil {
		return nil, err
	}
	c.Kernel = elf
	return d.Driver.Start(ctx, c)
}

func (d *bootableDriver) elf() (string, error) {
	const stage = "preparing kernel"
	info, err := os.Stat(d.kernel)
	if err != nil {
		return "", fault.Errorf(fault.RuntimeStartFailed, stage, "no kernel: %w; name one by --kernel", err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	of := fmt.Sprintf("%d %s", info.Size(), info.ModTime().Format(time.RFC3339Nano))
	if d.of == of {
		if _, err := os.Stat(d.unpacked); err == nil {
			return d.unpacked, nil
		}
	}
	if err := os.MkdirAll(d.dir, 0o700); err != nil {
		return "", fault.New(fault.DiskFailed, stage, err)
	}
	path, err := kernel.Unpacked(d.kernel, d.dir)
	if err != nil {
		return "", err
	}
	d.of, d.unpacked = of, path
	return path, nil
}

// digest of the kernel that the next VM boots, "" if there is none: its file is named by it.
func (d *bootableDriver) digest() string {
	path, err := d.elf()
	if err != nil {
		return ""
	}
	_, sum, _ := strings.Cut(filepath.Base(path), "-")
	return sum
}

// informed tells what the engine does not know itself.
type informed struct {
	machine.Service
	kernel func() string
}

// Info implements machine.Service.
func (s informed) Info(ctx context.Context) (machine.Info, error) {
	info, err := s.Service.Info(ctx)
	info.KernelDigest = s.kernel()
	return info, err
}

// newImages makes the store. Bases and VMs' directories are on one file system: they share files by hard links.
func newImages(o Options, instance string, log *slog.Logger) (image.Store, error) {
	kind := o.Images
	if kind == "" {
		kind = "oci"
		if o.VMM == "fake" {
			kind = "fake"
		}
	}
	dir := filepath.Join(o.StateDir, "images")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making image directory: %w", err)
	}
	switch kind {
	case "fake":
		return imagefake.New(imagefake.Config{Dir: dir, BudgetBytes: o.ImageBudgetGiB << 30, Clock: clock.RealClock{}})
	case "oci":
		return oci.New(oci.Config{
			Dir: dir, BudgetBytes: o.ImageBudgetGiB << 30, ReserveBytes: o.ReserveMiB << 20, NodeCredentialsFile: o.RegistryConfig,
			Builder: newBuilder(o, instance, log), Clock: clock.RealClock{}, Log: log,
		})
	default:
		return nil, fmt.Errorf("reading flags: --images is %q and must be oci or fake", kind)
	}
}

// disks are real ones, or for the fake driver sparse files that nobody reads.
type disks struct {
	reserve int64
	empty   bool
}

func newDisks(o Options) engine.Disks {
	return disks{reserve: o.ReserveMiB << 20, empty: o.VMM == "fake"}
}

// Create implements engine.Disks.
func (d disks) Create(ctx context.Context, path string, gib int64) error {
	if !d.empty {
		return disk.Create(ctx, disk.Disk{Path: path, SizeGiB: int(gib), ReserveBytes: d.reserve})
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return fault.New(fault.DiskFailed, "making private disk", err)
	}
	defer f.Close()
	return fault.New(fault.DiskFailed, "making private disk", f.Truncate(gib<<30))
}
