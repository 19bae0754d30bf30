package operator_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/devserver/controlplane"
	"imp.dev/imp/internal/event/eventtest"
	"imp.dev/imp/internal/operator"
	"imp.dev/imp/internal/operator/address"
	"imp.dev/imp/internal/operator/network"
	"imp.dev/imp/internal/operator/nodes"
	"imp.dev/imp/internal/operator/place"
	"imp.dev/imp/internal/operator/reach"

	"github.com/go-logr/logr"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// rig is the operator's writers on a real API server, driven by hand: nothing happens but what the test asks for. They
// read the API server itself in place of a cache, unless the test puts something older there.
type rig struct {
	t      *testing.T
	ns     string
	admin  client.Client
	writes *writes
	clock  *clocktesting.FakeClock
	events *eventtest.Log
	view   *nodes.View
	place  *place.Reconciler
	reach  *reach.Reconciler
	audit  *address.Reconciler
	nets   *network.Reconciler
	vnis   *network.VNIs
	ranges *network.Ranges
	placed []time.Duration
}

// start of the fake clock is the real time: the API server stamps creation and deletion with its own.
func newRig(t *testing.T) *rig {
	t.Helper()
	return newRigOn(t, controlplane.ForTest(t))
}

func newRigOn(t *testing.T, cp *controlplane.ForTesting) *rig {
	t.Helper()
	scheme, err := operator.Scheme()
	must(t, err)
	admin, err := client.New(cp.Config(), client.Options{Scheme: scheme})
	must(t, err)
	r := &rig{t: t, admin: admin, writes: &writes{}, clock: clocktesting.NewFakeClock(time.Now()), events: &eventtest.Log{}}
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "operator-"}}
	must(t, admin.Create(t.Context(), namespace))
	r.ns = namespace.Name
	cfg := cp.OperatorConfig()
	cfg.Wrap(r.writes.wrap)
	c, err := client.New(cfg, client.Options{Scheme: scheme})
	must(t, err)
	r.restart(c)
	return r
}

// restart makes the writers anew, with nothing remembered. Reads and writes go through c.
func (r *rig) restart(c client.Client) {
	ctrl.SetLogger(logr.Discard())
	log := slog.New(slog.NewTextHandler(r.t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	scoped := &inNamespace{Client: c, ns: r.ns}
	r.view = &nodes.View{Cached: c, Live: c, Heartbeats: nodes.NewHeartbeats(r.clock), Clock: r.clock}
	r.view.Heartbeats.Lead()
	claims := &address.Claims{Client: scoped, Live: scoped, Clock: r.clock}
	survey := &network.Survey{Client: scoped}
	r.audit = &address.Reconciler{
		Client: scoped, Live: scoped, Nodes: r.view, Claims: claims, Clock: r.clock, Log: log, Quarantine: time.Minute,
	}
	r.nets = &network.Reconciler{
		Client: scoped, Live: scoped, Claims: claims, Survey: survey, Clock: r.clock, Events: r.events, Log: log,
	}
	r.vnis = &network.VNIs{Client: scoped, Live: scoped, Log: log}
	r.ranges = &network.Ranges{Client: scoped, Survey: survey, Log: log}
	r.place = &place.Reconciler{
		Client: scoped, Live: scoped, Nodes: r.view, Addresses: claims, Clock: r.clock, Events: r.events, Log: log,
		Latency: func(d time.Duration) { r.placed = append(r.placed, d) },
	}
	r.reach = &reach.Reconciler{Client: scoped, Nodes: r.view, Clock: r.clock, Events: r.events, Log: log}
	r.observe()
}

// inNamespace lists only the objects of the test's namespace and nodes of its name, so that tests do not see each other's.
type inNamespace struct {
	client.Client
	ns string
}

func (c *inNamespace) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	switch list.(type) {
	case *v1alpha1.ImpVMList, *v1alpha1.ImpNetworkList:
		return c.Client.List(ctx, list, append(opts, client.InNamespace(c.ns))...)
	}
	if err := c.Client.List(ctx, list, opts...); err != nil {
		return err
	}
	switch l := list.(type) {
	case *corev1.NodeList:
		l.Items = slices.DeleteFunc(l.Items, func(n corev1.Node) bool { return !strings.HasPrefix(n.Name, c.ns) })
	case *v1alpha1.ImpNodeList:
		l.Items = slices.DeleteFunc(l.Items, func(n v1alpha1.ImpNode) bool { return !strings.HasPrefix(n.Name, c.ns) })
	}
	return nil
}

// writes counts what is written to the API server, as "VERB resource[/subresource] name".
type writes struct {
	mu   sync.Mutex
	seen []string
	// fail, if it gives an answer or an error, stands in for the API server. Called with the lock released.
	fail func(*http.Request) (*http.Response, error)
	next http.RoundTripper
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func (w *writes) wrap(next http.RoundTripper) http.RoundTripper {
	w.next = next
	return roundTripper(func(req *http.Request) (*http.Response, error) {
		if req.Method == http.MethodGet {
			return next.RoundTrip(req)
		}
		w.mu.Lock()
		parts := strings.Split(req.URL.Path, "/")
		for i, part := range parts {
			if slices.Contains([]string{"impvms", "impaddresses", "impnetworks", "configmaps"}, part) ||
				part == "leases" && !strings.Contains(req.URL.Path, operator.LeaderLease) && !strings.Contains(req.URL.Path, v1alpha1.LeasePrefix) {
				w.seen = append(w.seen, req.Method+" "+strings.Join(parts[i:], "/"))
			}
		}
		fail := w.fail
		w.mu.Unlock()
		if fail != nil {
			if answer, err := fail(req); answer != nil || err != nil {
				return answer, err
			}
		}
		return next.RoundTrip(req)
	})
}

func (w *writes) take() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	seen := w.seen
	w.seen = nil
	return seen
}

// passOn makes the request after all.
func (r *rig) passOn(req *http.Request) (*http.Response, error) { return r.writes.next.RoundTrip(req) }

func requestOf(namespace, name string) ctrl.Request {
	return ctrl.Request{NamespacedName: client.ObjectKey{Namespace: namespace, Name: name}}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// name of a cluster-wide object of this test.
func (r *rig) name(short string) string { return r.ns + "-" + short }

// node makes a Node, its ImpNode and its agent's Lease. Options change the Node before it is made.
func (r *rig) node(short string, options ...func(*corev1.Node, *v1alpha1.ImpNode)) string {
	r.t.Helper()
	name := r.name(short)
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v1alpha1.LabelEnabled: "true"}},
		Status: corev1.NodeStatus{
			Conditions: []corev1.NodeCondition{{
				Type: corev1.NodeReady, Status: corev1.ConditionTrue, LastHeartbeatTime: metav1.NewTime(r.clock.Now()),
			}},
			NodeInfo: corev1.NodeSystemInfo{BootID: "boot-1", Architecture: "amd64"},
		},
	}
	imp := &v1alpha1.ImpNode{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: v1alpha1.ImpNodeStatus{
		Budget:       v1alpha1.Budget{VCPU: 4, MemoryMiB: 4096, DiskGiB: 40},
		Capabilities: v1alpha1.NodeCapabilities{Arch: "amd64", Driver: "fake", OverheadMiB: 64},
		BootID:       "boot-1",
		Conditions: []metav1.Condition{{
			Type: v1alpha1.ConditionRuntimeReady, Status: metav1.ConditionTrue, Reason: "Ready", LastTransitionTime: metav1.Now(),
		}},
	}}
	for _, option := range options {
		option(node, imp)
	}
	nodeStatus, impStatus := node.Status, imp.Status
	must(r.t, r.admin.Create(r.t.Context(), node))
	node.Status = nodeStatus
	must(r.t, r.admin.Status().Update(r.t.Context(), node))
	must(r.t, r.admin.Create(r.t.Context(), imp))
	imp.Status = impStatus
	must(r.t, r.admin.Status().Update(r.t.Context(), imp))
	r.t.Cleanup(func() {
		for _, o := range []client.Object{node, imp} {
			_ = r.admin.Delete(context.Background(), o)
		}
	})
	r.beat(name)
	return name
}

// beat renews the Lease of the node's agent.
func (r *rig) beat(node string) {
	r.t.Helper()
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: v1alpha1.SystemNamespace, Name: v1alpha1.LeasePrefix + node}}
	_ = r.admin.Get(r.t.Context(), client.ObjectKeyFromObject(lease), lease)
	lease.Spec.RenewTime = ptr.To(metav1.NewMicroTime(r.clock.Now()))
	if lease.ResourceVersion == "" {
		must(r.t, r.admin.Create(r.t.Context(), lease))
		r.t.Cleanup(func() { _ = r.admin.Delete(context.Background(), lease) })
	} else {
		must(r.t, r.admin.Update(r.t.Context(), lease))
	}
	r.observe()
}

// observe gives the writers all Leases as they are, as an informer would.
func (r *rig) observe() {
	r.t.Helper()
	leases := &coordinationv1.LeaseList{}
	must(r.t, r.admin.List(r.t.Context(), leases, client.InNamespace(v1alpha1.SystemNamespace)))
	for i := range leases.Items {
		r.view.Heartbeats.Observe(&leases.Items[i])
	}
}

func (r *rig) class(short string, options ...func(*v1alpha1.ImpVMClass)) string {
	r.t.Helper()
	class := &v1alpha1.ImpVMClass{
		ObjectMeta: metav1.ObjectMeta{Name: r.name(short)},
		Spec:       v1alpha1.ImpVMClassSpec{VCPU: 1, MemoryMiB: 512, DiskGiB: 4, Arch: "amd64"},
	}
	for _, option := range options {
		option(class)
	}
	must(r.t, r.admin.Create(r.t.Context(), class))
	r.t.Cleanup(func() { _ = r.admin.Delete(context.Background(), class) })
	return class.Name
}

func (r *rig) vm(name string, options ...func(*v1alpha1.ImpVM)) *v1alpha1.ImpVM {
	r.t.Helper()
	vm := &v1alpha1.ImpVM{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.ns, Name: name},
		Spec: v1alpha1.ImpVMSpec{
			ClassRef: &v1alpha1.ClassReference{Name: r.name("small")}, Image: "registry.example/app:1",
			Lifecycle: v1alpha1.LifecycleEphemeral,
		},
	}
	for _, option := range options {
		option(vm)
	}
	must(r.t, r.admin.Create(r.t.Context(), vm))
	return vm
}

func persistent(vm *v1alpha1.ImpVM) { vm.Spec.Lifecycle = v1alpha1.LifecyclePersistent }

// get the VM as it is; nil if it is gone.
func (r *rig) get(name string) *v1alpha1.ImpVM {
	r.t.Helper()
	vm := &v1alpha1.ImpVM{}
	err := r.admin.Get(r.t.Context(), client.ObjectKey{Namespace: r.ns, Name: name}, vm)
	if client.IgnoreNotFound(err) != nil {
		r.t.Fatal(err)
	}
	if err != nil {
		return nil
	}
	return vm
}

// reconcile looks at the VM once as imp-place.
func (r *rig) reconcile(name string) ctrl.Result {
	r.t.Helper()
	result, err := r.place.Reconcile(r.t.Context(), requestOf(r.ns, name))
	must(r.t, err)
	return result
}

// watchNode looks at the node once as imp-reachable.
func (r *rig) watchNode(name string) ctrl.Result {
	r.t.Helper()
	result, err := r.reach.Reconcile(r.t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Name: name}})
	must(r.t, err)
	return result
}

// report applies what an agent would say: the complete set of imp-agent, with Ready as its node sees it.
func (r *rig) report(name string, change func(*v1alpha1.ImpVMStatus)) {
	r.t.Helper()
	vm := r.get(name)
	must(r.t, applyAsAgent(r.t.Context(), r.admin, vm, r.clock.Now(), change))
}

// expect compares the writes since the last time it was asked.
func (r *rig) expect(want ...string) {
	r.t.Helper()
	if got := r.writes.take(); !slices.Equal(got, want) {
		r.t.Errorf("writes:\n got  %q\n want %q", got, want)
	}
}

func (r *rig) expectEvents(vm string, want ...string) {
	r.t.Helper()
	if got := r.events.Of(r.ns, vm); !slices.Equal(got, want) {
		r.t.Errorf("events:\n got  %q\n want %q", got, want)
	}
}

// expectCondition compares "Status Reason: message" of one condition.
func (r *rig) expectCondition(vm, conditionType, want string) {
	r.t.Helper()
	if got := told(r.get(vm), conditionType); got != want {
		r.t.Errorf("%s of %s:\n got  %s\n want %s", conditionType, vm, got, want)
	}
}

func told(vm *v1alpha1.ImpVM, conditionType string) string {
	if vm == nil {
		return "no such VM"
	}
	c := meta.FindStatusCondition(vm.Status.Conditions, conditionType)
	if c == nil {
		return "absent"
	}
	return fmt.Sprintf("%s %s: %s", c.Status, c.Reason, c.Message)
}
