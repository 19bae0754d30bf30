// Package command is the command line of imp-agent.
package command

import (
	"fmt"
	"log/slog"
	"os"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"

	"imp.dev/imp/internal/agent"
	"imp.dev/imp/internal/machine/rpc"
	"imp.dev/imp/internal/metrics"
	"imp.dev/imp/internal/version"
)

type flags struct {
	agent.Options
	kubeconfig string
	logLevel   string
}

// New makes the command.
func New() *cobra.Command {
	f := flags{}
	cmd := &cobra.Command{
		Use:   "imp-agent",
		Short: "Speaks for one node's microVMs in the cluster; needs no privileges on the host",
		Args:  cobra.NoArgs, Version: version.Long(), SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error { return run(cmd, f) },
	}
	set := cmd.Flags()
	set.StringVar(&f.Node, "node", os.Getenv("NODE_NAME"), "name of this node's Node object (environment: NODE_NAME)")
	set.StringVar(&f.kubeconfig, "kubeconfig", os.Getenv("KUBECONFIG"), "path of a kubeconfig; empty uses the pod's ServiceAccount")
	set.StringVar(&f.RuntimeSocket, "runtime-socket", "/run/imp/runtime.sock", "UNIX socket of imp-runtime")
	set.StringVar(&f.MetricsAddress, "metrics-addr", ":8080", "address to serve /metrics on; 0 serves nothing")
	set.StringVar(&f.FCBin, "fc-bin", os.Getenv("FC_BIN"), "the runtime's Firecracker binary, named in the log when a VMM cannot start (environment: FC_BIN)")
	set.StringVar(&f.KernelPath, "kernel-path", os.Getenv("KERNEL_PATH"), "the runtime's guest kernel, named in the log when a VMM cannot start (environment: KERNEL_PATH)")
	set.StringVar(&f.logLevel, "log-level", "info", "debug, info, warn or error")
	return cmd
}

func run(cmd *cobra.Command, f flags) error {
	if f.Node == "" {
		return fmt.Errorf("reading flags: --node is required (or the environment variable NODE_NAME)")
	}
	var level slog.Level
	if err := level.UnmarshalText([]byte(f.logLevel)); err != nil {
		return fmt.Errorf("reading flags: --log-level: %w", err)
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	klog.SetSlogLogger(log)
	ctrl.SetLogger(logr.FromSlogHandler(log.Handler()))
	config, err := clientcmd.BuildConfigFromFlags("", f.kubeconfig)
	if err != nil {
		return fmt.Errorf("reading kubeconfig: %w", err)
	}
	service, err := rpc.NewClient(f.RuntimeSocket)
	if err != nil {
		return err
	}
	defer func() { _ = service.Close() }()
	ctrlmetrics.Registry.MustRegister(metrics.BuildInfo("imp-agent"))
	return agent.Run(cmd.Context(), config, service, clock.RealClock{}, ctrlmetrics.Registry, log, f.Options)
}
