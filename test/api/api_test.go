// Package api tests what Imp's manifests make of a real API server: which objects are refused and with which sentence, what may
// be edited, what kubectl shows, and what an agent's token may write.
package api

import (
	"strings"
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/devserver/controlplane"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"
)

// cluster is one test's view of the API server: a client of the administrator's and a namespace of the test's own.
type cluster struct {
	*controlplane.ForTesting
	t         *testing.T
	admin     client.Client
	namespace string
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	cp := controlplane.ForTest(t)
	c := &cluster{ForTesting: cp, t: t, admin: clientOf(t, cp.Config())}
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "api-"}}
	must(t, c.admin.Create(t.Context(), namespace))
	c.namespace = namespace.Name
	return c
}

func clientOf(t *testing.T, cfg *rest.Config) client.Client {
	t.Helper()
	cfg = rest.CopyConfig(cfg)
	cfg.QPS, cfg.Burst = 200, 200
	s := runtime.NewScheme()
	must(t, scheme.AddToScheme(s))
	must(t, v1alpha1.AddToScheme(s))
	c, err := client.New(cfg, client.Options{Scheme: s})
	must(t, err)
	return c
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// refused demands that err is a refusal that holds every one of the phrases; without phrases, that there is none.
func refused(t *testing.T, err error, phrases ...string) {
	t.Helper()
	if len(phrases) == 0 {
		if err != nil {
			t.Fatalf("was refused: %v", err)
		}
		return
	}
	if err == nil {
		t.Fatalf("was accepted; want a refusal that says %q", phrases)
	}
	for _, phrase := range phrases {
		if !strings.Contains(err.Error(), phrase) {
			t.Errorf("was refused with:\n  %v\nwant it to say\n  %s", err, phrase)
		}
	}
}

// object parses YAML as a user writes it: unlike a Go type it can hold what is not there.
func object(t *testing.T, manifest string) *unstructured.Unstructured {
	t.Helper()
	u := &unstructured.Unstructured{}
	must(t, yaml.Unmarshal([]byte(manifest), &u.Object))
	return u
}

// vm is an ImpVM with the given spec, in flow or block YAML.
func (c *cluster) vm(name, spec string) *unstructured.Unstructured {
	c.t.Helper()
	u := object(c.t, "apiVersion: imp.dev/v1alpha1\nkind: ImpVM\nmetadata: {name: "+name+", namespace: "+c.namespace+"}\n")
	var fields map[string]any
	must(c.t, yaml.Unmarshal([]byte(spec), &fields))
	u.Object["spec"] = fields
	return u
}

// created makes an ImpVM and gives it typed.
func (c *cluster) created(name, spec string) *v1alpha1.ImpVM {
	c.t.Helper()
	must(c.t, c.admin.Create(c.t.Context(), c.vm(name, spec)))
	return c.get(name)
}

func (c *cluster) get(name string) *v1alpha1.ImpVM {
	c.t.Helper()
	vm := &v1alpha1.ImpVM{}
	must(c.t, c.admin.Get(c.t.Context(), client.ObjectKey{Namespace: c.namespace, Name: name}, vm))
	return vm
}

// status changes the status as the administrator.
func (c *cluster) status(vm *v1alpha1.ImpVM, change func(*v1alpha1.ImpVMStatus)) {
	c.t.Helper()
	change(&vm.Status)
	must(c.t, c.admin.Status().Update(c.t.Context(), vm))
}

// bind puts vm on a node as the operator does.
func (c *cluster) bind(vm *v1alpha1.ImpVM, node string) {
	c.t.Helper()
	c.status(vm, func(s *v1alpha1.ImpVMStatus) {
		now := metav1.NewTime(time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC))
		s.NodeName, s.Assignment, s.PlacedAt = node, 1, &now
		s.Resources = &v1alpha1.Resources{VCPU: 1, MemoryMiB: 128, DiskGiB: 1, Arch: "amd64"}
		s.Conditions = []metav1.Condition{
			{Type: v1alpha1.ConditionScheduled, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonPlaced, LastTransitionTime: now},
			{Type: v1alpha1.ConditionNodeReachable, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonReachable, LastTransitionTime: now},
		}
	})
}

// patch merges a change, in YAML, into an object as c's holder.
func patch(t *testing.T, c client.Client, o client.Object, change string) error {
	t.Helper()
	return c.Patch(t.Context(), o, merge(t, change))
}

// patchStatus is patch for the status alone.
func patchStatus(t *testing.T, c client.Client, o client.Object, change string) error {
	t.Helper()
	return c.Status().Patch(t.Context(), o, merge(t, change))
}

func merge(t *testing.T, change string) client.Patch {
	t.Helper()
	body, err := yaml.YAMLToJSON([]byte(change))
	must(t, err)
	return client.RawPatch(types.MergePatchType, body)
}
