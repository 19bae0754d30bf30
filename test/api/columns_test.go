package api

import (
	"encoding/json"
	"slices"
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// table asks for what kubectl get prints.
func (c *cluster) table(path string) metav1.Table {
	c.t.Helper()
	set, err := kubernetes.NewForConfig(c.Config())
	must(c.t, err)
	body, err := set.Discovery().RESTClient().Get().AbsPath(path).
		SetHeader("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io").DoRaw(c.t.Context())
	must(c.t, err)
	var table metav1.Table
	must(c.t, json.Unmarshal(body, &table))
	return table
}

// columns of the table, those of kubectl's -o wide in brackets.
func columns(table metav1.Table) []string {
	var names []string
	for _, c := range table.ColumnDefinitions {
		if c.Priority > 0 {
			names = append(names, "("+c.Name+")")
			continue
		}
		names = append(names, c.Name)
	}
	return names
}

func equal[T comparable](t *testing.T, what string, got, want []T) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s is\n  %v, want\n  %v", what, got, want)
	}
}

func TestColumnsOfAnImpVM(t *testing.T) {
	c := newCluster(t)
	vm := c.created("web", `{image: "nginx:1", lifecycle: persistent}`)
	c.bind(vm, "node-a")
	c.status(vm, func(s *v1alpha1.ImpVMStatus) {
		code := int32(3)
		s.IP = "10.44.0.10"
		s.Addresses = []v1alpha1.VMAddress{{Address: s.IP, Prefix: 24, MAC: "02:00:00:00:00:01", Network: "net", NetworkUID: "u"}}
		s.Phase, s.RestartCount, s.ExitCode = v1alpha1.PhaseStarting, 2, &code
		s.Restart = &v1alpha1.RestartStatus{Attempts: 2, NextTryAt: &metav1.MicroTime{Time: s.PlacedAt.Add(20 * time.Second)}}
		s.Conditions = append(s.Conditions, metav1.Condition{
			Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonCrashLoopBackOff, LastTransitionTime: *s.PlacedAt,
		})
	})
	table := c.table("/apis/imp.dev/v1alpha1/namespaces/" + c.namespace + "/impvms")
	equal(t, "the header", columns(table),
		[]string{"Name", "Phase", "Ready", "Node", "IP", "Restarts", "Age", "Reason", "Next Try", "(Image)", "(Exit)"})
	equal(t, "the row", row(table, 0), []string{"web", "Starting", "False", "node-a", "10.44.0.10", "2", "", "CrashLoopBackOff", "2030-01-02T03:04:25.000000Z", "nginx:1", "3"})
}

func TestColumnsOfClassesAndNodes(t *testing.T) {
	c := newCluster(t)
	equal(t, "a class's header", columns(c.table("/apis/imp.dev/v1alpha1/impvmclasses")),
		[]string{"Name", "VCPU", "Memory", "Disk", "Arch", "Age"})
	equal(t, "a node's header", columns(c.table("/apis/imp.dev/v1alpha1/impnodes")),
		[]string{"Name", "Ready", "Driver", "Accel", "VCPU", "Memory", "Age"})
}

func TestShortNames(t *testing.T) {
	c := newCluster(t)
	d, err := discovery.NewDiscoveryClientForConfig(c.Config())
	must(t, err)
	list, err := d.ServerResourcesForGroupVersion(v1alpha1.GroupVersion.String())
	must(t, err)
	got := map[string][]string{}
	for _, r := range list.APIResources {
		got[r.Name] = append(r.ShortNames, r.SingularName)
	}
	for resource, short := range map[string]string{"impvms": "impvm", "impvmclasses": "impcls", "impnodes": "impnode", "impnetworks": "impnet", "impaddresses": "impaddr"} {
		if !slices.Contains(got[resource], short) {
			t.Errorf("%s is known as %v, want %s among them", resource, got[resource], short)
		}
	}
}

func TestVMsAreSelectedByTheNodeTheyAreBoundTo(t *testing.T) {
	c := newCluster(t)
	c.bind(c.created("here", `{image: a}`), "node-here")
	c.bind(c.created("there", `{image: a}`), "node-there")
	c.created("nowhere", `{image: a}`)
	for node, want := range map[string][]string{"node-here": {"here"}, "node-there": {"there"}, "": {"nowhere"}, "node-x": nil} {
		var list v1alpha1.ImpVMList
		must(t, c.admin.List(t.Context(), &list, client.InNamespace(c.namespace), client.MatchingFields{"status.nodeName": node}))
		var names []string
		for _, vm := range list.Items {
			names = append(names, vm.Name)
		}
		equal(t, "the VMs of node "+node, names, want)
	}
}
