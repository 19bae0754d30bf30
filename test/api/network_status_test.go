package api

import (
	"fmt"
	"testing"

	"imp.dev/imp/api/v1alpha1"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// appliedNetwork writes a network's status by server-side apply, forced, as the operator does.
func (c *cluster) appliedNetwork(as client.Client, network *v1alpha1.ImpNetwork, status *v1alpha1.ImpNetworkStatus) error {
	c.t.Helper()
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(status)
	must(c.t, err)
	u := &unstructured.Unstructured{Object: map[string]any{"status": fields}}
	u.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("ImpNetwork"))
	u.SetNamespace(network.Namespace)
	u.SetName(network.Name)
	u.SetResourceVersion(network.ResourceVersion)
	return as.Status().Apply(c.t.Context(), client.ApplyConfigurationFromUnstructured(u),
		client.FieldOwner(v1alpha1.ManagerNetwork), client.ForceOwnership)
}

// A new network has no status, and its counts have no default: none of them is 0 because nobody has counted yet.
func TestTheOperatorWritesTheStatusOfANetwork(t *testing.T) {
	c := newCluster(t)
	operator := clientOf(t, c.OperatorConfig())
	network := c.createdNetwork("net", `{subnet: 10.44.0.0/24}`)
	read := func() *v1alpha1.ImpNetwork {
		t.Helper()
		must(t, operator.Get(t.Context(), client.ObjectKeyFromObject(network), network))
		return network
	}
	ready := metav1.Condition{
		Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonNetworkUsable, LastTransitionTime: metav1.Now(),
	}
	status := &v1alpha1.ImpNetworkStatus{
		Conditions: []metav1.Condition{ready}, ObservedGeneration: 1, Gateway: "10.44.0.1", MTU: 1450, VNI: 7, Capacity: 253, Usage: "0/253",
	}
	must(t, c.appliedNetwork(operator, read(), status))
	status.Used, status.Held, status.Quarantined, status.Usage = 2, 1, 3, "2/253"
	must(t, c.appliedNetwork(operator, read(), status))
	if got := read().Status; got.Used != 2 || got.Held != 1 || got.Quarantined != 3 || got.Capacity != 253 || got.VNI != 7 || len(got.Conditions) != 1 {
		t.Errorf("the status is %+v", got)
	}
	refused(t, patchStatus(t, c.admin, network.DeepCopy(), `status: {capacity: null}`), "status.capacity: Required value")

	must(t, patch(t, operator, network.DeepCopy(), `metadata: {finalizers: [imp.dev/network]}`))
	must(t, patch(t, operator, network.DeepCopy(), `metadata: {finalizers: null}`))
}

func TestColumnsOfAnImpNetwork(t *testing.T) {
	c := newCluster(t)
	network := c.createdNetwork("app-network", `{subnet: 10.44.0.0/24, nat: {enabled: true}}`)
	c.createdNetwork("fresh", `{subnet: 10.4.0.0/24}`)
	must(t, c.appliedNetwork(c.admin, network, &v1alpha1.ImpNetworkStatus{
		Conditions: []metav1.Condition{{
			Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonNetworkUsable, LastTransitionTime: metav1.Now(),
		}},
		Gateway: "10.44.0.1", MTU: 1450, VNI: 7, Capacity: 253, Used: 2, Usage: "2/253",
	}))
	table := c.table("/apis/imp.dev/v1alpha1/namespaces/" + c.namespace + "/impnetworks")
	equal(t, "the header", columns(table), []string{"Name", "Subnet", "Used", "NAT", "Ready", "Age", "(Gateway)", "(MTU)", "(VNI)", "(Reason)"})
	equal(t, "the row", row(table, 0), []string{"app-network", "10.44.0.0/24", "2/253", "true", "True", "", "10.44.0.1", "1450", "7", "Usable"})
	equal(t, "the row of one that nobody has looked at", row(table, 1),
		[]string{"fresh", "10.4.0.0/24", "<nil>", "false", "<nil>", "", "<nil>", "<nil>", "<nil>", "<nil>"})
}

// row n of a table, without the age.
func row(table metav1.Table, n int) []string {
	var cells []string
	for i, cell := range table.Rows[n].Cells {
		if table.ColumnDefinitions[i].Name == "Age" {
			cell = ""
		}
		cells = append(cells, fmt.Sprint(cell))
	}
	return cells
}
