package agent

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/devserver/controlplane"
)

// world is a real API server, one node's agent with that node's own token, and a runtime that the test plays.
type world struct {
	t         *testing.T
	cp        *controlplane.ForTesting
	admin     client.Client
	node      string
	namespace string
	runtime   *fakeRuntime
	requests  *requests
	log       *syncBuffer
	clock     clock.WithTicker
	stop      func()
}

// newWorld makes a node and a namespace of the test's own. The agent is started by start.
func newWorld(t *testing.T) *world {
	t.Helper()
	cp := controlplane.ForTest(t)
	scheme, err := Scheme()
	if err != nil {
		t.Fatal(err)
	}
	if err := coordinationv1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	admin, err := client.New(cp.Config(), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "agent-"}}
	if err := admin.Create(t.Context(), namespace); err != nil {
		t.Fatal(err)
	}
	w := &world{
		t: t, cp: cp, admin: admin, node: "node-of-" + namespace.Name, namespace: namespace.Name,
		runtime: newFakeRuntime(), requests: newRequests(), log: &syncBuffer{},
		clock: clock.RealClock{}, stop: func() {},
	}
	t.Cleanup(func() {
		w.stop()
		if t.Failed() {
			t.Logf("the agent's log:\n%s", w.log.String())
		}
	})
	return w
}

// start runs an agent; stop, or the test's end, stops it. A second start is a restart.
func (w *world) start() {
	w.t.Helper()
	config := w.cp.AgentConfig(w.node)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return &counter{next: next, requests: w.requests} })
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	log := slog.New(slog.NewTextHandler(w.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	go func() {
		ended <- Run(ctx, rest.CopyConfig(config), w.runtime, w.clock, prometheus.NewRegistry(), log, Options{
			Node: w.node, RuntimeSocket: "/run/imp/runtime.sock", FCBin: "/opt/fc", KernelPath: "/opt/vmlinux", MetricsAddress: "0",
		})
	}()
	w.stop = func() {
		cancel()
		if err := <-ended; err != nil {
			w.t.Errorf("agent ended: %v", err)
		}
		w.stop = func() {}
	}
}

// vm makes an ImpVM and binds it to the world's node, as the operator would.
func (w *world) vm(name string, change ...func(*v1alpha1.ImpVM)) *v1alpha1.ImpVM {
	w.t.Helper()
	vm := &v1alpha1.ImpVM{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name, Finalizers: []string{v1alpha1.Finalizer}},
		Spec:       v1alpha1.ImpVMSpec{ClassRef: &v1alpha1.ClassReference{Name: "small"}, Image: "registry.test/app:1"},
	}
	for _, c := range change {
		c(vm)
	}
	if err := w.admin.Create(w.t.Context(), vm); err != nil {
		w.t.Fatal(err)
	}
	w.place(vm, w.node, 1)
	return vm
}

// place applies what imp-place owns.
func (w *world) place(vm *v1alpha1.ImpVM, node string, assignment int64, more ...func(status map[string]any)) {
	w.t.Helper()
	now := time.Now().UTC().Format(time.RFC3339)
	status := map[string]any{
		"nodeName": node, "assignment": assignment, "placedAt": now,
		"resources": map[string]any{"vcpu": int64(1), "memoryMiB": int64(128), "diskGiB": int64(1), "arch": "amd64"},
		"conditions": []any{map[string]any{
			"type": v1alpha1.ConditionScheduled, "status": "True", "reason": v1alpha1.ReasonPlaced, "message": "on " + node,
			"lastTransitionTime": now,
		}},
	}
	for _, m := range more {
		m(status)
	}
	w.apply(vm, v1alpha1.ManagerPlace, status)
}

func (w *world) apply(vm *v1alpha1.ImpVM, manager string, status map[string]any) {
	w.t.Helper()
	u := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": v1alpha1.GroupVersion.String(), "kind": "ImpVM",
		"metadata": map[string]any{"namespace": vm.Namespace, "name": vm.Name}, "status": status,
	}}
	err := w.admin.Status().Apply(w.t.Context(), client.ApplyConfigurationFromUnstructured(u),
		client.FieldOwner(manager), client.ForceOwnership)
	if err != nil {
		w.t.Fatal(err)
	}
}

// release orders the node to give the VM up.
func (w *world) release(vm *v1alpha1.ImpVM, assignment int64) {
	w.t.Helper()
	w.place(vm, w.node, assignment, func(status map[string]any) {
		status["release"] = map[string]any{"assignment": assignment, "reason": "Deleted"}
	})
}

// get reads the object as it is now.
func (w *world) get(name string) *v1alpha1.ImpVM {
	w.t.Helper()
	vm := &v1alpha1.ImpVM{}
	if err := w.admin.Get(w.t.Context(), client.ObjectKey{Namespace: w.namespace, Name: name}, vm); err != nil {
		w.t.Fatal(err)
	}
	return vm
}

// await waits until the condition holds, and fails the test with what when it does not within half a minute.
func (w *world) await(what string, holds func() bool) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), 30*time.Second)
	defer cancel()
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for !holds() {
		select {
		case <-ctx.Done():
			w.t.Fatalf("waited in vain until %s", what)
		case <-ticker.C:
		}
	}
}

// awaitVM waits until the object is as said.
func (w *world) awaitVM(name, what string, holds func(*v1alpha1.ImpVM) bool) *v1alpha1.ImpVM {
	w.t.Helper()
	var vm *v1alpha1.ImpVM
	defer func() {
		if w.t.Failed() && vm != nil {
			w.t.Logf("the object's status: %+v", vm.Status)
		}
	}()
	w.await(name+" "+what, func() bool { vm = w.get(name); return holds(vm) })
	return vm
}

func has(conditionType string, status metav1.ConditionStatus, reason string) func(*v1alpha1.ImpVM) bool {
	return func(vm *v1alpha1.ImpVM) bool {
		c := meta.FindStatusCondition(vm.Status.Conditions, conditionType)
		return c != nil && c.Status == status && c.Reason == reason
	}
}

// events gives the reasons of a VM's events, oldest first.
func (w *world) events(vm *v1alpha1.ImpVM) []string {
	w.t.Helper()
	list := &corev1.EventList{}
	if err := w.admin.List(w.t.Context(), list, client.InNamespace(w.namespace)); err != nil {
		w.t.Fatal(err)
	}
	var out []string
	for _, e := range list.Items {
		if e.InvolvedObject.UID == vm.UID {
			out = append(out, e.Type+" "+e.Reason)
		}
	}
	return out
}

// requests counts what the agent asks of the API server, by "METHOD resource", and can hold a kind of request back.
type requests struct {
	mu    sync.Mutex
	count map[string]int
	held  map[string]*held
	// watched holds "resource selector" of every list and watch.
	watched map[string]bool
	// down refuses every request, which is then not counted.
	down bool
}

// cut takes the API server away, or gives it back.
func (r *requests) cut(down bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.down = down
}

type held struct {
	arrived chan struct{}
	go_     chan struct{}
}

func newRequests() *requests {
	return &requests{count: map[string]int{}, held: map[string]*held{}, watched: map[string]bool{}}
}

// watches gives the selectors of what was listed or watched of one resource, sorted.
func (r *requests) watches(resource string) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []string
	for w := range r.watched {
		if of, selector, _ := strings.Cut(w, " "); of == resource {
			out = append(out, selector)
		}
	}
	slices.Sort(out)
	return out
}

const vmWrite = "PATCH impvms/status"

func (r *requests) of(kind string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.count[kind]
}

// writes sums up everything but reads and the Lease.
func (r *requests) writes() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []string
	for k, n := range r.count {
		if !strings.HasPrefix(k, "GET ") && !strings.HasSuffix(k, " leases") {
			out = append(out, fmt.Sprintf("%s %d", k, n))
		}
	}
	return strings.Join(out, ", ")
}

// hold keeps the next request of the kind back until let is called. arrived is closed when it is held.
func (r *requests) hold(kind string) (arrived <-chan struct{}, let func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	h := &held{arrived: make(chan struct{}), go_: make(chan struct{})}
	r.held[kind] = h
	return h.arrived, func() { close(h.go_) }
}

// counter is a transport that counts, and holds back what it is told to.
type counter struct {
	next     http.RoundTripper
	requests *requests
}

func (c *counter) RoundTrip(q *http.Request) (*http.Response, error) {
	kind := q.Method + " " + resourceOf(q.URL.Path)
	c.requests.mu.Lock()
	if c.requests.down {
		c.requests.mu.Unlock()
		return nil, syscall.ECONNREFUSED
	}
	c.requests.count[kind]++
	if q.Method == http.MethodGet && (q.URL.Query().Has("watch") || q.URL.Query().Has("fieldSelector")) {
		c.requests.watched[resourceOf(q.URL.Path)+" "+q.URL.Query().Get("fieldSelector")] = true
	}
	h := c.requests.held[kind]
	delete(c.requests.held, kind)
	c.requests.mu.Unlock()
	if h != nil {
		close(h.arrived)
		<-h.go_
	}
	return c.next.RoundTrip(q)
}

// resourceOf turns /apis/G/V/namespaces/NS/RESOURCE/NAME/status into RESOURCE/status.
func resourceOf(path string) string {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	skip := 2
	if parts[0] == "apis" {
		skip = 3
	}
	if len(parts) < skip {
		return path
	}
	parts = parts[min(skip, len(parts)):]
	if len(parts) > 2 && parts[0] == "namespaces" {
		parts = parts[2:]
	}
	switch {
	case len(parts) == 0:
		return path
	case len(parts) > 2:
		return parts[0] + "/" + parts[2]
	default:
		return parts[0]
	}
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}
