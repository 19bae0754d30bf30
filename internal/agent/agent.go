// Package agent is the node's voice in the cluster: it watches the ImpVMs bound to its node, tells the runtime what shall be,
// and writes on the objects what is. It has cluster credentials and no powers over the host; it may be killed at any moment.
//
//	API server ── watch status.nodeName=me ──┐                       ┌── Ensure, Remove ──► runtime
//	                                         ├─► facts ─► decide ─►──┤
//	runtime ────── Watch ────────────────────┘     (pure)            └── one status write ─► API server
//	API server ── the networks of these VMs ──► package networks ──────── SetNetwork ──────► runtime
//
// Two facts make it safe to restart: everything it knows it is told anew by both sides, and no resource is removed without an
// order that is on the object itself. Every write carries the resourceVersion of an object whose UID, node and assignment were
// compared with what is written about, so that a write that was held back cannot reach another object.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	versioninfo "k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/discovery"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/agent/networks"
	"imp.dev/imp/internal/event"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/version"
)

// Options of an agent.
type Options struct {
	// Node is the name of this node's Node object.
	Node string
	// RuntimeSocket, FCBin and KernelPath are only named in messages and log lines: the runtime is reached through the Service.
	RuntimeSocket string
	FCBin         string
	KernelPath    string
	// MetricsAddress to serve /metrics on; "0" serves nothing.
	MetricsAddress string
}

// Agent of one node.
type Agent struct {
	opts    Options
	service machine.Service
	clock   clock.WithTicker
	log     *slog.Logger
	metrics *agentMetrics
	events  event.Recorder
	// client reads and writes at the API server itself; cache holds the ImpVMs bound to this node, and the claims of addresses
	// whose VM is on it.
	client client.WithWatch
	cache  client.Reader

	view     *view
	memory   *memories
	kicks    *kicker
	beat     *heartbeat
	networks *networks.Keeper
	cluster  identity
	// deaf says that the runtime leaves questions unanswered although its stream is open.
	deaf atomic.Bool
}

// Scheme knows the kinds the agent works with.
func Scheme() (*runtime.Scheme, error) {
	s := runtime.NewScheme()
	return s, errors.Join(corev1.AddToScheme(s), v1alpha1.AddToScheme(s))
}

// Run is the agent until ctx ends. config's credentials must be bound to the Node; metrics registers at registry, which the metrics
// address serves only if it is controller-runtime's own.
func Run(
	ctx context.Context, config *rest.Config, service machine.Service, clk clock.WithTicker,
	registry prometheus.Registerer, log *slog.Logger, opts Options,
) error {
	config = rest.CopyConfig(config)
	config.UserAgent = "imp-agent/" + version.String()
	if config.QPS == 0 { // a node that has been away has a status to write for each VM
		config.QPS, config.Burst = 50, 100
	}
	core, err := corev1client.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("making client: %w", err)
	}
	if err := checkServer(discovery.NewDiscoveryClient(core.RESTClient()).ServerVersion()); err != nil {
		return err
	}
	scheme, err := Scheme()
	if err != nil {
		return fmt.Errorf("making scheme: %w", err)
	}
	direct, err := client.NewWithWatch(config, client.Options{Scheme: scheme})
	if err != nil {
		return fmt.Errorf("making client: %w", err)
	}
	mgr, err := newManager(config, scheme, log, opts)
	if err != nil {
		return fmt.Errorf("making manager: %w", err)
	}
	events := event.NewWriter(core, "imp-agent", opts.Node, clk, log)
	a := newAgent(direct, mgr.GetCache(), service, clk, newMetrics(registry), events, log, opts)
	if err := a.addTo(ctx, mgr, events); err != nil {
		return err
	}
	// Before the first order, so that it need not be given twice.
	a.readCluster(ctx)
	log.Info("agent starts", "node", opts.Node, "version", version.String(), "runtimeSocket", opts.RuntimeSocket)
	return mgr.Start(ctx)
}

func newAgent(
	direct client.WithWatch, cached client.Reader, service machine.Service, clk clock.WithTicker,
	metrics *agentMetrics, events event.Recorder, log *slog.Logger, opts Options,
) *Agent {
	a := &Agent{
		opts: opts, service: service, clock: clk, log: log, metrics: metrics, events: events,
		client: direct, cache: cached,
		view: newView(clk.Now()), memory: newMemories(), kicks: &kicker{},
	}
	a.beat = newHeartbeat(a)
	a.networks = networks.New(networks.Options{
		Node: opts.Node, Client: direct, Runtime: service, Connection: a.epoch, Wanted: a.wantedNetworks, Changed: a.networkChanged,
		Clock: clk, Log: log,
	})
	return a
}

func newManager(config *rest.Config, scheme *runtime.Scheme, log *slog.Logger, opts Options) (manager.Manager, error) {
	logger := logr.FromSlogHandler(log.Handler())
	return ctrl.NewManager(config, ctrl.Options{
		Scheme:  scheme,
		Logger:  logger,
		Metrics: metricsserver.Options{BindAddress: opts.MetricsAddress},
		Cache: cache.Options{
			DefaultTransform: cache.TransformStripManagedFields(), // nothing here reads who set which field
			ByObject: map[client.Object]cache.ByObject{
				&v1alpha1.ImpVM{}:      {Field: fields.OneTermEqualSelector("status.nodeName", opts.Node)},
				&v1alpha1.ImpAddress{}: {Field: fields.OneTermEqualSelector("status.node", opts.Node)},
			},
		},
		GracefulShutdownTimeout: ptr.To(5 * time.Second),
	})
}

// reconcilers is how many VMs are worked at side by side; each waits for the API server most of the time.
const reconcilers = 8

func (a *Agent) addTo(ctx context.Context, mgr manager.Manager, events *event.Writer) error {
	if err := mgr.GetFieldIndexer().IndexField(ctx, &v1alpha1.ImpAddress{}, heldIndex, heldFor); err != nil {
		return fmt.Errorf("indexing claims: %w", err)
	}
	err := builder.ControllerManagedBy(mgr).
		Named("impvm").
		For(&v1alpha1.ImpVM{}).
		Watches(&v1alpha1.ImpAddress{}, handler.EnqueueRequestsFromMapFunc(vmOfClaim)).
		WatchesRawSource(source.Func(a.kicks.start)).
		WithOptions(controller.Options{
			MaxConcurrentReconciles: reconcilers,
			SkipNameValidation:      ptr.To(true), // several agents in one process: tests
		}).
		Complete(a)
	if err != nil {
		return fmt.Errorf("making controller: %w", err)
	}
	// The manager starts these when the caches are filled, so that no VM is taken for absent before.
	for _, run := range []manager.Runnable{
		events, manager.RunnableFunc(a.beat.run), manager.RunnableFunc(a.watchRuntime), manager.RunnableFunc(a.networks.Run),
		manager.RunnableFunc(a.learnCluster),
	} {
		if err := mgr.Add(run); err != nil {
			return fmt.Errorf("adding to manager: %w", err)
		}
	}
	return nil
}

// oldestMinor of Kubernetes 1: the first with field selectors for CRDs, node-bound tokens and admission policies all GA.
const oldestMinor = 33

func checkServer(v *versioninfo.Info, err error) error {
	if err != nil {
		return fmt.Errorf("asking the API server's version: %w", err)
	}
	minor, err := strconv.Atoi(regexp.MustCompile(`^\d+`).FindString(v.Minor))
	if v.Major != "1" || err != nil || minor < oldestMinor {
		return fmt.Errorf("checking the API server's version: it is %s, and Imp needs Kubernetes 1.%d or later", v.GitVersion, oldestMinor)
	}
	return nil
}
