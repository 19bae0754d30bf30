// Package runtimed is imp-runtime: it puts engine, driver, image store, disks and network together and serves them on a socket.
//
// It has the host's privileges and no cluster credentials; nothing of Kubernetes' API is in its build.
package runtimed

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"imp.dev/imp/internal/image/oci/build"
	"imp.dev/imp/internal/process"
	"imp.dev/imp/internal/version"
	vmmfake "imp.dev/imp/internal/vmm/fake"
)

// buildCommand is the first argument of the child that builds an image in a sandbox.
const buildCommand = "build-image"

// Child gives what this binary does when it was started by itself to be a child, nil if it was not. It comes before any flag is
// read: a child's descriptors and environment are exactly its parent's order.
func Child(args []string) func() int {
	if len(args) < 2 {
		return nil
	}
	switch args[1] {
	case process.ChildCommand:
		return func() int { process.ChildMain(); return 1 }
	case vmmfake.Command:
		return func() int { vmmfake.Main(); return 1 }
	case buildCommand:
		return func() int { return build.Main(context.Background(), os.Stdin, os.Stdout) }
	default:
		return nil
	}
}

// Options are imp-runtime's flags.
type Options struct {
	StateDir, RunDir string
	VMM              string
	QEMUBinary       string
	Accel            string
	Kernel           string
	Initramfs        string
	BootDeadline     time.Duration
	GuestSilence     time.Duration
	MaxBoots         int
	// Budgets of 0 are derived from the host.
	BudgetVCPU, BudgetMemoryMiB, BudgetDiskGiB int64
	AgentUID, AgentGID                         int
	CgroupParent                               string
	HostNamespaces                             string
	VMMUIDBase, VMMUIDCount                    int
	Images                                     string
	ImageBudgetGiB                             int64
	ReserveMiB                                 int64
	BuilderUID                                 int
	RegistryConfig                             string
	MetricsAddr                                string
	LogLevel                                   string
	NetworkOptions
}

// NewCommand makes the command line.
func NewCommand() *cobra.Command {
	var o Options
	cmd := &cobra.Command{
		Use:   "imp-runtime",
		Short: "Looks after the microVMs of one node; needs the host's privileges and no cluster credentials",
		Args:  cobra.NoArgs, Version: version.Long(), SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var level slog.Level
			if err := level.UnmarshalText([]byte(o.LogLevel)); err != nil {
				return fmt.Errorf("reading flags: --log-level: %w", err)
			}
			log := slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), &slog.HandlerOptions{Level: level}))
			return Run(cmd.Context(), o, log)
		},
	}
	o.register(cmd.Flags())
	cmd.AddCommand(&cobra.Command{
		Use: "version", Short: "Print the version", Args: cobra.NoArgs,
		Run: func(cmd *cobra.Command, _ []string) { fmt.Fprintln(cmd.OutOrStdout(), version.Long()) },
	}, newDoctor())
	return cmd
}

func (o *Options) register(f *pflag.FlagSet) {
	f.StringVar(&o.StateDir, "state-dir", "/var/lib/imp", "directory for records, disks, images and consoles; survives reboots of the host")
	f.StringVar(&o.RunDir, "run-dir", "/run/imp", "directory for the socket and for what does not survive a reboot")
	f.StringVar(&o.VMM, "vmm", "qemu", "VM monitor: qemu, or fake (small processes that run no guest, for tests)")
	f.StringVar(&o.QEMUBinary, "qemu-bin", "", "QEMU's binary (default: the driver's)")
	f.StringVar(&o.Accel, "accel", "tcg", "QEMU's accelerator: tcg or kvm")
	f.StringVar(&o.Kernel, "kernel", os.Getenv("KERNEL_PATH"), "the guests' kernel, bzImage or ELF (environment: KERNEL_PATH)")
	f.StringVar(&o.Initramfs, "initramfs", "", "the guests' initramfs with imp-guest in it")
	f.DurationVar(&o.BootDeadline, "boot-deadline", 30*time.Second, "time a guest has from launch until it takes its workload")
	f.DurationVar(&o.GuestSilence, "guest-silence", time.Minute, "how long a guest may answer nothing, while its VMM lives, before it is ended as one that hangs (GuestHung); 0 is never")
	f.IntVar(&o.MaxBoots, "max-boots", 2*runtime.NumCPU(), "guests that boot at once; 0 is no limit")
	f.Int64Var(&o.BudgetVCPU, "budget-vcpu", 0, "vCPUs that VMs may take in all (default: four for each of the host's CPUs)")
	f.Int64Var(&o.BudgetMemoryMiB, "budget-memory-mib", 0, "MiB of memory that VMs may take in all, with their VMMs (default: four fifths of the host's)")
	f.Int64Var(&o.BudgetDiskGiB, "budget-disk-gib", 0, "GiB that the private disks of VMs may have in all (default: four fifths of the file system)")
	f.IntVar(&o.AgentUID, "agent-uid", 47110, "user that may use the socket, beside root")
	f.IntVar(&o.AgentGID, "agent-gid", -1, "group of the socket (default: the agent's uid)")
	f.StringVar(&o.CgroupParent, "cgroup-parent", "", "cgroup below which VMs get theirs, relative to the mounts")
	f.StringVar(&o.HostNamespaces, "host-namespaces", "", "/proc/PID/ns directory whose namespaces VMMs join; empty joins none")
	f.IntVar(&o.VMMUIDBase, "vmm-uid-base", 47200, "first of the users that VMMs run as")
	f.IntVar(&o.VMMUIDCount, "vmm-uid-count", 4096, "number of users that VMMs run as, one for each VM")
	f.StringVar(&o.Images, "images", "", "image store: oci, or fake (default: fake for --vmm=fake, else oci)")
	f.Int64Var(&o.ImageBudgetGiB, "image-budget-gib", 20, "GiB that cached images may take before those that no VM uses are evicted")
	f.Int64Var(&o.ReserveMiB, "reserve-mib", 512, "MiB of the state directory's file system that images and disks leave free")
	f.IntVar(&o.BuilderUID, "builder-uid", 47111, "user that builds images, in a sandbox")
	f.StringVar(&o.RegistryConfig, "registry-config", "", "docker config file with registry credentials for every VM of the node")
	o.NetworkOptions.register(f, os.Getenv)
	f.StringVar(&o.MetricsAddr, "metrics-addr", ":8081", "address to serve /metrics on; 0 serves nothing")
	f.StringVar(&o.LogLevel, "log-level", "info", "debug, info, warn or error")
	// ImpNode calls it cpu; both names are taken.
	f.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		if name == "budget-cpu" {
			name = "budget-vcpu"
		}
		return pflag.NormalizedName(name)
	})
}
