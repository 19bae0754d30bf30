// Package command is the command line of imp-dev.
package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"imp.dev/imp/internal/devserver"
	"imp.dev/imp/internal/devserver/bench"
	"imp.dev/imp/internal/devserver/controlplane"
	"imp.dev/imp/internal/devserver/demo"
	"imp.dev/imp/internal/devserver/fabric"
	"imp.dev/imp/internal/devserver/kernelfetch"
	"imp.dev/imp/internal/version"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
)

// DefaultDir is where a server keeps its things unless told otherwise; DefaultRegistryPort is where the files in examples/
// expect its registry.
const (
	DefaultDir          = ".dev"
	DefaultRegistryPort = 5050
)

// New makes the root command.
func New() *cobra.Command {
	ctrllog.SetLogger(logr.Discard()) // the client libraries have nothing to say that errors do not say
	root := &cobra.Command{
		Use:           "imp-dev",
		Short:         "All of Imp on one machine: for development, tests and trying it out",
		Version:       version.String(),
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.AddCommand(newUp(), newDemo(), newBench(), newChaos(), newImage(), newConsole(), newBuildControlPlane(), newKernel())
	return root
}

// serverFlags binds the flags that up and demo share.
func serverFlags(cmd *cobra.Command, opts *devserver.Options) {
	flags := cmd.Flags()
	flags.IntVar(&opts.Nodes, "nodes", 1, "how many nodes")
	flags.StringVar(&opts.VMM, "vmm", "qemu", "VM monitor: qemu, or fake for processes that only pretend")
	flags.StringVar(&opts.Accel, "accel", "tcg", "QEMU's accelerator: tcg (works everywhere) or kvm")
	flags.StringVar(&opts.Network, "network", "", "guests' networks: linux (each node gets a network namespace as its host), fake or none (default: linux with qemu, fake with fake)")
	flags.StringVar(&opts.Kernel, "kernel", "", "the guests' kernel, bzImage or ELF (default: Debian's cloud kernel, fetched into the cache)")
	flags.StringVar(&opts.Modules, "modules", "", "lib/modules/RELEASE that belongs to --kernel, if it has not all built in")
	flags.StringVar(&opts.BinDir, "bin-dir", "", "folder of Imp's programs (default: where imp-dev lies)")
	flags.StringVar(&opts.RegistryPassword, "registry-password", "", "user:password: adds a second address of the registry that demands it")
	flags.Int64Var(&opts.VCPU, "node-cpu", 0, "virtual CPUs that each node offers (default: by this machine)")
	flags.Int64Var(&opts.MemoryMiB, "node-memory-mib", 0, "memory that each node offers (default: by this machine)")
	flags.Int64Var(&opts.DiskGiB, "node-disk-gib", 0, "disk that each node offers (default: 100, sparse)")
}

// equip adds what does not come from flags.
func equip(opts *devserver.Options, out io.Writer) error {
	cache, err := controlplane.CacheDir()
	if err != nil {
		return err
	}
	opts.CacheDir = cache
	began := time.Now()
	opts.Progress = func(line string) {
		fmt.Fprintf(out, "%6.1fs  %s\n", time.Since(began).Seconds(), line)
	}
	opts.Log = logger(out)
	return nil
}

func logger(out io.Writer) *slog.Logger { return slog.New(slog.NewTextHandler(out, nil)) }

func newUp() *cobra.Command {
	opts := devserver.Options{}
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Start a control plane, a registry, the operator and nodes; Ctrl-C stops all of it",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := equip(&opts, cmd.ErrOrStderr()); err != nil {
				return err
			}
			server, err := devserver.Up(cmd.Context(), opts)
			if err != nil {
				return err
			}
			self, err := os.Executable()
			if err != nil {
				return errors.Join(fmt.Errorf("finding imp-dev's folder: %w", err), server.Stop(cmd.Context()))
			}
			howTo(cmd.OutOrStdout(), server, filepath.Dir(self))
			return wait(cmd.Context(), cmd.ErrOrStderr(), server)
		},
	}
	serverFlags(cmd, &opts)
	cmd.Flags().StringVar(&opts.Dir, "dir", DefaultDir, "folder for logs, the kubeconfig and the registry's images")
	cmd.Flags().IntVar(&opts.RegistryPort, "registry-port", DefaultRegistryPort, "loopback port of the registry; 0 takes a free one")
	return cmd
}

func newDemo() *cobra.Command {
	opts := devserver.Options{}
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Boot the VMs of examples/ through the Kubernetes API, show what they said, remove them",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := equip(&opts, cmd.ErrOrStderr()); err != nil {
				return err
			}
			return demo.Run(cmd.Context(), opts, cmd.OutOrStdout())
		},
	}
	serverFlags(cmd, &opts)
	return cmd
}

func newBench() *cobra.Command {
	opts := devserver.Options{}
	var rounds int
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Print Imp's figures, each a comparison within one run",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := equip(&opts, cmd.ErrOrStderr()); err != nil {
				return err
			}
			return bench.Run(cmd.Context(), opts, rounds, cmd.OutOrStdout())
		},
	}
	serverFlags(cmd, &opts)
	cmd.Flags().IntVar(&rounds, "rounds", 7, "how often each timing is taken")
	cmd.AddCommand(newBenchSupervision())
	return cmd
}

// howTo prints what the README builds on. self is the folder of imp-dev, which is called by name from here on.
func howTo(out io.Writer, server *devserver.Server, self string) {
	fmt.Fprintf(out, `
Imp is up. In another terminal:

  export KUBECONFIG=%s
  export PATH=%s:%s:$PATH
  kubectl get nodes,impnode
  kubectl get impvm -A

The registry is %s (imp-dev image push DIR %s/NAME:TAG; imp-dev image demo for examples/).
`, server.Places.Kubeconfig(), self, filepath.Dir(server.ControlPlane.Kubectl), server.Registry, server.Registry)
	if server.PrivateRegistry != "" {
		fmt.Fprintf(out, "The same images, but with a password: %s\n", server.PrivateRegistry)
	}
	fmt.Fprintf(out, "Metrics:\n  operator                  http://%s/metrics\n", server.Metrics(devserver.Operator, ""))
	for _, node := range server.NodeNames() {
		fmt.Fprintf(out, "  agent of %-15s  http://%s/metrics\n", node, server.Metrics(devserver.Agent, node))
		fmt.Fprintf(out, "  runtime of %-13s  http://%s/metrics\n", node, server.Metrics(devserver.Runtime, node))
	}
	if hosts := server.Fabric(); hosts != nil {
		fmt.Fprintf(out, "Each node has a network namespace as its host, and reaches its own guests from there (10.0.0.0/8 only):\n")
		for _, node := range server.NodeNames() {
			host := hosts.Node(node)
			fmt.Fprintf(out, "  %-10s %-13s ip netns exec %s sh\n", node, host.Address, host.Name)
		}
		fmt.Fprintf(out, "Guests with NAT reach %s, where servers can be put: ip netns exec %s sh\n", fabric.OutsideAddress(), hosts.Outside().Name)
	}
	fmt.Fprintf(out, "Logs are in %s. Ctrl-C stops everything and removes the VMs; logs and pushed images stay.\n\n", server.Places.Logs())
}

// wait runs until ctx ends, telling of programs that end, then stops the server.
func wait(ctx context.Context, out io.Writer, server *devserver.Server) error {
	for {
		select {
		case err := <-server.Ended():
			fmt.Fprintf(out, "imp-dev: not restarted: %v\n", err)
		case <-ctx.Done():
			fmt.Fprintln(out, "removing the VMs and stopping everything")
			return server.Stop(context.WithoutCancel(ctx))
		}
	}
}

func newBuildControlPlane() *cobra.Command {
	return &cobra.Command{
		Use:   "build-control-plane",
		Short: "Build etcd, kube-apiserver, kube-controller-manager and kubectl into the cache, if they are not there",
		Long: "Build etcd, kube-apiserver, kube-controller-manager and kubectl from their Go modules, pinned by checksum, into the\n" +
			"cache ($IMP_CACHE, else ~/.cache/imp). Takes some ten minutes once.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			opts := devserver.Options{}
			if err := equip(&opts, cmd.ErrOrStderr()); err != nil {
				return err
			}
			binaries, err := controlplane.Build(cmd.Context(), opts.CacheDir, opts.Progress)
			if err != nil {
				return err
			}
			for _, path := range []string{binaries.Etcd, binaries.APIServer, binaries.ControllerManager, binaries.Kubectl} {
				fmt.Fprintln(cmd.OutOrStdout(), path)
			}
			return nil
		},
	}
}

func newKernel() *cobra.Command {
	return &cobra.Command{
		Use:   "kernel",
		Short: "Fetch Debian's cloud kernel for guests into the cache, if it is not there; nothing is installed",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cache, err := controlplane.CacheDir()
			if err != nil {
				return err
			}
			k, err := kernelfetch.FetchDebian(cmd.Context(), devserver.KernelCache(cache), logger(cmd.ErrOrStderr()))
			if err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "kernel  %s\nmodules %s\n", k.Path, k.ModulesDir)
			return nil
		},
	}
}
