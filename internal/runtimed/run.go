package runtimed

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"k8s.io/utils/clock"

	"imp.dev/imp/internal/cgroup"
	"imp.dev/imp/internal/guest"
	"imp.dev/imp/internal/guest/channel"
	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/engine"
	"imp.dev/imp/internal/machine/plan"
	"imp.dev/imp/internal/machine/rpc"
	"imp.dev/imp/internal/metrics"
	"imp.dev/imp/internal/process"
	"imp.dev/imp/internal/record"
	"imp.dev/imp/internal/version"
)

// Run is the life of imp-runtime: until ctx ends, or it cannot serve. VMs go on without it.
func Run(ctx context.Context, o Options, log *slog.Logger) error {
	if o.AgentGID < 0 {
		o.AgentGID = o.AgentUID
	}
	var err error
	if o.NetworkOptions, err = o.complete(o.VMM, o.HostNamespaces, os.Geteuid() == 0); err != nil {
		return err
	}
	if err := os.MkdirAll(o.StateDir, 0o700); err != nil {
		return fmt.Errorf("making state directory: %w", err)
	}
	lock, err := prepareRunDir(o)
	if err != nil {
		return err
	}
	defer lock.Close()
	p, err := assemble(o, log)
	if err != nil {
		return err
	}
	defer p.close(log)
	listener, err := listen(o)
	if err != nil {
		return err
	}
	registry := metrics.NewRegistry("imp-runtime")
	observed := newObserver(registry, p.driver, p.engine.TakeLoaded())
	registry.MustRegister(newTraffic(p.network, observed.nameOf))
	server := rpc.NewServer(informed{Service: p.engine, kernel: p.driver.kernel}, peers(o))
	rpc.RegisterKeeper(server, p.engine, administrators())
	registry.MustRegister(newOrphans(p.engine.Audited))
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return metrics.Serve(ctx, o.MetricsAddr, registry) })
	group.Go(func() error { return observed.run(ctx, p.engine) })
	if p.network.run != nil {
		group.Go(func() error { return p.network.run(ctx) })
	}
	group.Go(func() error {
		if err := server.Serve(listener); err != nil {
			return fmt.Errorf("serving: %w", err)
		}
		return nil
	})
	group.Go(func() error {
		<-ctx.Done()
		server.Stop()
		return nil
	})
	log.Info("imp-runtime serves", "version", version.String(), "instance", p.engine.Instance(), "socket", listener.Addr().String(), "vmm", o.VMM, "network", o.Network)
	err = group.Wait()
	log.Info("imp-runtime ends, VMs go on", "instance", p.engine.Instance())
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

func peers(o Options) []uint32 {
	return []uint32{0, uint32(os.Geteuid()), uint32(o.AgentUID)}
}

// administrators are the users that may use the Keeper: root, and who the runtime runs as where that is not root.
func administrators() []uint32 { return []uint32{0, uint32(os.Geteuid())} }

// parts of a runtime that serves.
type parts struct {
	engine  *engine.Engine
	driver  *measuredDriver
	images  image.Store
	network hostNetwork
}

func (p parts) close(log *slog.Logger) {
	if err := p.engine.Close(); err != nil {
		log.Error("engine not closed", "error", err)
	}
	if c, ok := p.images.(io.Closer); ok {
		_ = c.Close()
	}
	if p.network.close != nil {
		p.network.close()
	}
}

// assemble puts the parts together and starts the engine.
func assemble(o Options, log *slog.Logger) (parts, error) {
	records, err := engine.OpenRecords(o.StateDir, log)
	if err != nil {
		return parts{}, err
	}
	fail := func(err error) (parts, error) {
		_ = records.Close()
		return parts{}, err
	}
	budget, err := budgetOf(o)
	if err != nil {
		return fail(err)
	}
	bootID, err := process.BootID()
	if err != nil {
		return fail(err)
	}
	p := parts{}
	tree, info := cgroups(o, records.Instance(), log)
	if p.driver, err = newDriver(o, records.Instance(), tree, log); err != nil {
		return fail(err)
	}
	if p.images, err = newImages(o, records.Instance(), log); err != nil {
		return fail(err)
	}
	clk := clock.RealClock{}
	if p.network, err = newNetwork(o, records.Instance(), clk, log); err != nil {
		return fail(err)
	}
	limits := plan.DefaultLimits()
	limits.Boot, limits.Silence = o.BootDeadline, o.GuestSilence
	p.engine, err = engine.New(engine.Config{
		Records: records, StateDir: o.StateDir, RunDir: o.RunDir, Driver: p.driver, Images: p.images, Disks: newDisks(o), Network: p.network,
		Guest:  func(dial guest.Dialer) guest.Client { return channel.New(dial, clk, log) },
		Kernel: o.Kernel, Initramfs: o.Initramfs, Budget: budget, HostBootID: bootID, Limits: limits, MaxBoots: o.MaxBoots, Info: info,
		Architecture: runtime.GOARCH, Clock: clk, Log: log,
	})
	return p, err
}

func cgroups(o Options, instance string, log *slog.Logger) (*cgroup.Tree, machine.Info) {
	info := machine.Info{Version: version.String(), Features: []string{"console", "readiness-http", "networks"}}
	if os.Geteuid() != 0 {
		log.Warn("not root: VMs have no cgroups and no users of their own")
		return nil, info
	}
	tree, err := cgroup.Open(cgroup.Options{Parent: o.CgroupParent, Instance: instance})
	if err != nil {
		log.Warn("no cgroups on this host: VMs have no limits", "error", err)
		return nil, info
	}
	info.CgroupVersion = tree.Version()
	return tree, info
}

// budgetOf fills in from the host what no flag says.
func budgetOf(o Options) (plan.Need, error) {
	n := plan.Need{VCPU: o.BudgetVCPU, MemoryMiB: o.BudgetMemoryMiB, DiskGiB: o.BudgetDiskGiB}
	if n.VCPU == 0 {
		n.VCPU = int64(runtime.NumCPU()) * 4
	}
	if n.MemoryMiB == 0 {
		var info syscall.Sysinfo_t
		if err := syscall.Sysinfo(&info); err != nil {
			return n, fmt.Errorf("measuring memory: %w", err)
		}
		n.MemoryMiB = int64(info.Totalram) * int64(info.Unit) / 5 * 4 >> 20
	}
	if n.DiskGiB == 0 {
		var fs unix.Statfs_t
		if err := unix.Statfs(o.StateDir, &fs); err != nil {
			return n, fmt.Errorf("measuring file system: %w", err)
		}
		n.DiskGiB = max(1, int64(fs.Blocks)*fs.Bsize/5*4>>30)
	}
	return n, nil
}

// prepareRunDir makes the directory that holds the socket and nothing else for others to see, and takes it for this process: a
// second runtime must not take the socket away.
func prepareRunDir(o Options) (*os.File, error) {
	if err := os.MkdirAll(filepath.Join(o.RunDir, "vm"), 0o700); err != nil {
		return nil, fmt.Errorf("making run directory: %w", err)
	}
	if err := give(o, o.RunDir, 0o750); err != nil {
		return nil, err
	}
	dir, err := os.Open(o.RunDir)
	if err != nil {
		return nil, fmt.Errorf("opening run directory: %w", err)
	}
	if err := record.Hold(dir); err != nil {
		_ = dir.Close()
		return nil, fmt.Errorf("taking run directory %s: %w", o.RunDir, err)
	}
	return dir, nil
}

// give sets group and mode of a path. Without root it stays with who made it.
func give(o Options, path string, mode os.FileMode) error {
	if os.Geteuid() == 0 {
		if err := os.Chown(path, 0, o.AgentGID); err != nil {
			return fmt.Errorf("giving path to the agent's group: %w", err)
		}
	}
	if err := os.Chmod(path, mode); err != nil {
		return fmt.Errorf("setting mode: %w", err)
	}
	return nil
}

// listen opens runtime.sock in place of one that an earlier process left; the lock says that it is nobody's.
func listen(o Options) (net.Listener, error) {
	path := filepath.Join(o.RunDir, "runtime.sock")
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("removing old socket: %w", err)
	}
	l, err := (&net.ListenConfig{KeepAlive: -time.Second}).Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, fmt.Errorf("listening: %w", err)
	}
	if err := give(o, path, 0o660); err != nil {
		_ = l.Close()
		return nil, err
	}
	return l, nil
}
