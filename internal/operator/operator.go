// Package operator is the program imp-operator put together: its caches, its writers, their election, health and metrics.
package operator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/event"
	"imp.dev/imp/internal/metrics"
	"imp.dev/imp/internal/operator/address"
	"imp.dev/imp/internal/operator/network"
	"imp.dev/imp/internal/operator/nodes"
	"imp.dev/imp/internal/operator/place"
	"imp.dev/imp/internal/operator/reach"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

const (
	// component is the program's name in events and metrics.
	component = "imp-operator"
	// LeaderLease is the Lease, in v1alpha1.SystemNamespace, by which one of several operators is elected.
	LeaderLease = "imp-controller-manager"
)

// Options of an operator. Zero values are not defaults: see the flags of Command.
type Options struct {
	Config *rest.Config
	// MetricsAddr and HealthAddr are listened on; "0" is not.
	MetricsAddr, HealthAddr string
	LeaderElect             bool
	// LeaseDuration is how long a leader that fell silent keeps its office.
	LeaseDuration time.Duration
	// Concurrency is how many VMs are looked at at a time.
	Concurrency int
	// ClusterCIDRs are ranges of pods that no Node tells. IPv4.
	ClusterCIDRs []netip.Prefix
	// Quarantine is how long an address is given to nobody after its VM.
	Quarantine time.Duration
	// Instance names this process in events: the pod's or the host's name.
	Instance string
	Clock    clock.WithTicker
	Log      *slog.Logger
}

// Run is the operator until ctx ends, which gives nil. It returns an error as well when it was leader and no longer is: a new
// process begins with nothing remembered.
func Run(ctx context.Context, o Options) error {
	// The API server's own fairness is the limit that counts: with client-go's 5 a second, events of a thousand VMs come minutes late.
	o.Config = rest.CopyConfig(o.Config)
	o.Config.QPS, o.Config.Burst = 200, 400
	kube, err := kubernetes.NewForConfig(o.Config)
	if err != nil {
		return fmt.Errorf("making client: %w", err)
	}
	if err := checkVersion(kube.Discovery()); err != nil {
		return err
	}
	mgr, err := newManager(o)
	if err != nil {
		return err
	}
	if err := indexes(ctx, mgr); err != nil {
		return err
	}
	view, err := newView(ctx, mgr, o.Clock)
	if err != nil {
		return err
	}
	survey := &network.Survey{Client: mgr.GetClient(), ClusterCIDRs: o.ClusterCIDRs}
	claims := &address.Claims{Client: mgr.GetClient(), Live: mgr.GetAPIReader(), Clock: o.Clock}
	registry := prometheus.NewRegistry()
	latency, err := register(registry, mgr.GetClient(), o.Clock)
	if err != nil {
		return err
	}
	events := event.NewWriter(kube.CoreV1(), component, o.Instance, o.Clock, o.Log)
	err = errors.Join(
		mgr.Add(events),
		mgr.Add(everywhere(func(ctx context.Context) error {
			return metrics.Serve(ctx, o.MetricsAddr, prometheus.Gatherers{ctrlmetrics.Registry, registry})
		})),
		(&place.Reconciler{
			Client: mgr.GetClient(), Live: mgr.GetAPIReader(), Nodes: view, Addresses: claims,
			Clock: o.Clock, Events: events, Log: o.Log,
			Latency: func(d time.Duration) { latency.Observe(d.Seconds()) },
		}).SetupWithManager(mgr, o.Concurrency),
		(&reach.Reconciler{
			Client: mgr.GetClient(), Nodes: view, Clock: o.Clock, Events: events, Log: o.Log,
		}).SetupWithManager(mgr, o.Concurrency),
		(&address.Reconciler{
			Client: mgr.GetClient(), Live: mgr.GetAPIReader(), Nodes: view, Claims: claims,
			Clock: o.Clock, Log: o.Log, Quarantine: o.Quarantine,
		}).SetupWithManager(mgr, o.Concurrency),
		network.SetupWithManager(mgr, &network.Reconciler{
			Client: mgr.GetClient(), Live: mgr.GetAPIReader(), Claims: claims, Survey: survey, Clock: o.Clock, Events: events, Log: o.Log,
		}, &network.VNIs{Client: mgr.GetClient(), Live: mgr.GetAPIReader(), Log: o.Log},
			&network.Ranges{Client: mgr.GetClient(), Survey: survey, Log: o.Log}),
		health(mgr),
	)
	if err != nil {
		return fmt.Errorf("putting the operator together: %w", err)
	}
	o.Log.Info("operator starts", "instance", o.Instance)
	if err := mgr.Start(ctx); err != nil {
		return fmt.Errorf("running the operator: %w", err)
	}
	return nil
}

// everywhere is a Runnable of leaders and standbys.
type everywhere func(context.Context) error

func (f everywhere) Start(ctx context.Context) error { return f(ctx) }
func (everywhere) NeedLeaderElection() bool          { return false }

// Scheme has the kinds that the operator reads and writes, and no others.
func Scheme() (*runtime.Scheme, error) {
	s := runtime.NewScheme()
	err := errors.Join(corev1.AddToScheme(s), coordinationv1.AddToScheme(s), networkingv1.AddToScheme(s), v1alpha1.AddToScheme(s))
	if err != nil {
		return nil, fmt.Errorf("registering types: %w", err)
	}
	return s, nil
}

func newManager(o Options) (ctrl.Manager, error) {
	scheme, err := Scheme()
	if err != nil {
		return nil, err
	}
	mgr, err := ctrl.NewManager(o.Config, ctrl.Options{
		Scheme:                 scheme,
		Logger:                 logr.FromSlogHandler(o.Log.Handler()),
		Cache:                  cacheOptions(),
		Metrics:                metricsserver.Options{BindAddress: "0"}, // served by metrics.Serve, with our own registry beside
		HealthProbeBindAddress: o.HealthAddr,
		LeaderElection:         o.LeaderElect, LeaderElectionID: LeaderLease, LeaderElectionNamespace: v1alpha1.SystemNamespace,
		LeaderElectionReleaseOnCancel: true, // the caller ends after Run
		LeaseDuration:                 ptr.To(o.LeaseDuration), RenewDeadline: ptr.To(o.LeaseDuration * 2 / 3), RetryPeriod: ptr.To(o.LeaseDuration / 6),
		Controller: config.Controller{SkipNameValidation: ptr.To(true)}, // two operators in one process are a test
	})
	if err != nil {
		return nil, fmt.Errorf("making manager: %w", err)
	}
	return mgr, nil
}

// cacheOptions: nothing here reads who set which field, so that is dropped from all kinds; and of Nodes nearly everything.
func cacheOptions() cache.Options {
	return cache.Options{
		DefaultTransform: cache.TransformStripManagedFields(),
		ByObject: map[client.Object]cache.ByObject{
			&corev1.Node{}:          {Transform: nodes.Trim},
			&coordinationv1.Lease{}: {Namespaces: map[string]cache.Config{v1alpha1.SystemNamespace: {}}},
			&corev1.ConfigMap{}: {
				Namespaces: map[string]cache.Config{v1alpha1.SystemNamespace: {}},
				Field:      fields.OneTermEqualSelector("metadata.name", v1alpha1.ClusterRangesName),
			},
		},
	}
}

func indexes(ctx context.Context, mgr ctrl.Manager) error {
	by := func(kind client.Object, field string, value func(client.Object) string) error {
		return mgr.GetFieldIndexer().IndexField(ctx, kind, field, func(o client.Object) []string { return []string{value(o)} })
	}
	vm := func(o client.Object) *v1alpha1.ImpVM { return o.(*v1alpha1.ImpVM) }
	claim := func(o client.Object) *v1alpha1.ImpAddress { return o.(*v1alpha1.ImpAddress) }
	err := errors.Join(
		by(&v1alpha1.ImpVM{}, reach.IndexNode, func(o client.Object) string { return vm(o).Status.NodeName }),
		by(&v1alpha1.ImpVM{}, place.IndexClass, func(o client.Object) string {
			return ptr.Deref(vm(o).Spec.ClassRef, v1alpha1.ClassReference{}).Name
		}),
		by(&v1alpha1.ImpVM{}, place.IndexNetwork, func(o client.Object) string {
			return ptr.Deref(vm(o).Spec.NetworkRef, v1alpha1.NetworkReference{}).Name
		}),
		by(&v1alpha1.ImpAddress{}, address.IndexNetwork, func(o client.Object) string { return string(claim(o).Spec.Network.UID) }),
		by(&v1alpha1.ImpAddress{}, address.IndexNode, func(o client.Object) string { return claim(o).Status.Node }),
		by(&v1alpha1.ImpAddress{}, address.IndexVM, func(o client.Object) string { return string(claim(o).Spec.VM.UID) }),
	)
	if err != nil {
		return fmt.Errorf("indexing: %w", err)
	}
	return nil
}

// newView follows Leases from the start, in a standby too: a new leader then knows whom it has heard.
func newView(ctx context.Context, mgr ctrl.Manager, clk clock.PassiveClock) (*nodes.View, error) {
	heartbeats := nodes.NewHeartbeats(clk)
	leases, err := mgr.GetCache().GetInformer(ctx, &coordinationv1.Lease{}, cache.BlockUntilSynced(false))
	if err != nil {
		return nil, fmt.Errorf("watching Leases: %w", err)
	}
	if _, err := leases.AddEventHandler(heartbeats.Handler()); err != nil {
		return nil, fmt.Errorf("watching Leases: %w", err)
	}
	return &nodes.View{Cached: mgr.GetClient(), Live: mgr.GetAPIReader(), Heartbeats: heartbeats, Clock: clk}, nil
}

// health: alive is who answers; ready is who has filled its caches, a standby included.
func health(mgr ctrl.Manager) error {
	return errors.Join(
		mgr.AddHealthzCheck("ping", healthz.Ping),
		mgr.AddReadyzCheck("caches", func(req *http.Request) error {
			ctx, cancel := context.WithTimeout(req.Context(), time.Second)
			defer cancel()
			if !mgr.GetCache().WaitForCacheSync(ctx) {
				return errors.New("caches are not filled yet")
			}
			return nil
		}),
	)
}
