package operator

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"time"

	"imp.dev/imp/internal/version"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
)

// Command is imp-operator's command line. It logs to log.
func Command(log io.Writer) *cobra.Command {
	o := Options{Clock: clock.RealClock{}}
	kubeconfig, level, cidrs := "", slog.LevelInfo, []string(nil)
	c := &cobra.Command{
		Use:          component,
		Short:        "Places microVMs on nodes, gives them addresses, and speaks for nodes that are silent",
		Args:         cobra.NoArgs,
		Version:      version.Long(),
		SilenceUsage: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Log = slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: level}))
			var err error
			if o.ClusterCIDRs, err = parseCIDRs(cidrs); err != nil {
				return err
			}
			return run(cmd.Context(), o, kubeconfig)
		},
	}
	f := c.Flags()
	f.StringVar(&kubeconfig, "kubeconfig", "", "path of a kubeconfig; without one $KUBECONFIG, then the pod's own credentials")
	f.StringVar(&o.MetricsAddr, "metrics-addr", ":8080", "where to serve /metrics; 0 for nowhere")
	f.StringVar(&o.HealthAddr, "health-addr", ":8081", "where to serve /healthz and /readyz; 0 for nowhere")
	f.BoolVar(&o.LeaderElect, "leader-elect", true, "do nothing but wait while another operator of this cluster leads")
	f.DurationVar(&o.LeaseDuration, "lease-duration", 15*time.Second, "how long a silent leader keeps its office")
	f.IntVar(&o.Concurrency, "concurrency", 8, "how many VMs to look at at a time")
	f.StringArrayVar(&cidrs, "cluster-cidr", nil, "an IPv4 range of pods that Nodes do not tell in spec.podCIDRs, as some network plugins use; may be repeated")
	f.DurationVar(&o.Quarantine, "address-quarantine", time.Minute, "how long an address is given to nobody after its VM")
	f.TextVar(&level, "log-level", slog.LevelInfo, "DEBUG, INFO, WARN or ERROR")
	return c
}

func run(ctx context.Context, o Options, kubeconfig string) error {
	if o.LeaseDuration < 3*time.Second || o.Concurrency < 1 {
		return fmt.Errorf("--lease-duration must be at least 3s and --concurrency at least 1")
	}
	if o.Quarantine < 0 {
		return fmt.Errorf("--address-quarantine must not be negative")
	}
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = kubeconfig
	var err error
	o.Config, err = clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{}).ClientConfig()
	if err != nil {
		return fmt.Errorf("reading kubeconfig: %w", err)
	}
	o.Config.UserAgent = component + "/" + version.String()
	if o.Instance, err = os.Hostname(); err != nil { // in a pod: the pod's name
		return fmt.Errorf("reading hostname: %w", err)
	}
	// The libraries log through these, and through nothing else.
	logger := logr.FromSlogHandler(o.Log.Handler())
	ctrl.SetLogger(logger)
	klog.SetLogger(logger)
	return Run(ctx, o)
}

func parseCIDRs(from []string) ([]netip.Prefix, error) {
	var parsed []netip.Prefix
	for _, s := range from {
		p, err := netip.ParsePrefix(s)
		if err != nil || !p.Addr().Is4() || p != p.Masked() {
			return nil, fmt.Errorf("--cluster-cidr %q must be an IPv4 range in CIDR form without host bits, like 10.42.0.0/16", s)
		}
		parsed = append(parsed, p)
	}
	return parsed, nil
}
