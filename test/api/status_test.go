package api

import (
	"context"
	"net/netip"
	"testing"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/clusterranges"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

func TestAnAssignmentOnlyGrows(t *testing.T) {
	c := newCluster(t)
	vm := c.created("vm", `{image: a}`)
	c.bind(vm, "node-a")
	status := func(change string) error { return patchStatus(t, c.admin, vm.DeepCopy(), "status: "+change) }
	must(t, status(`{assignment: 3}`))
	refused(t, status(`{assignment: 2}`), "status.assignment", "only grows")
	refused(t, status(`{assignment: null}`), "status.assignment", "only grows")
	must(t, status(`{nodeName: null, assignment: 3}`))
}

// Whoever wrote another node's name would leave the VM running where it is, with nobody to look after it.
func TestAVMIsOnAnotherNodeByANewAssignmentOnly(t *testing.T) {
	const byItself = "cannot be changed by itself, or the VM of before is left on its node: to move a VM delete and create it"
	bound := func(c *cluster, vm *v1alpha1.ImpVM) { c.bind(vm, "node-a") }
	unbound := func(c *cluster, vm *v1alpha1.ImpVM) {
		c.bind(vm, "node-a")
		c.status(vm, func(s *v1alpha1.ImpVMStatus) { s.NodeName = "" })
	}
	fresh := func(*cluster, *v1alpha1.ImpVM) {}
	for name, tc := range map[string]struct {
		before func(*cluster, *v1alpha1.ImpVM)
		change string
		want   []string
	}{
		"placed for the first time":               {before: fresh, change: `{nodeName: node-a, assignment: 1}`},
		"placed without an assignment":            {fresh, `{nodeName: node-a}`, []string{"status.nodeName", byItself}},
		"placed with assignment 0":                {fresh, `{nodeName: node-a, assignment: 0}`, []string{"status.nodeName", byItself}},
		"another word about it":                   {before: bound, change: `{phase: Running}`},
		"the same node once more":                 {before: bound, change: `{nodeName: node-a}`},
		"another node":                            {bound, `{nodeName: node-b}`, []string{"status.nodeName", byItself}},
		"another node with the same assignment":   {bound, `{nodeName: node-b, assignment: 1}`, []string{"status.nodeName", byItself}},
		"given up and placed again at once":       {before: bound, change: `{nodeName: node-b, assignment: 2}`},
		"given up and placed again where it was":  {before: bound, change: `{nodeName: node-a, assignment: 2}`},
		"given up":                                {before: bound, change: `{nodeName: ""}`},
		"given up, by leaving it out":             {before: bound, change: `{nodeName: null}`},
		"placed again after it was given up":      {before: unbound, change: `{nodeName: node-b, assignment: 2}`},
		"placed again with the assignment it had": {unbound, `{nodeName: node-a, assignment: 1}`, []string{"status.nodeName", byItself}},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t)
			vm := c.created("vm", `{image: a}`)
			tc.before(c, vm)
			refused(t, patchStatus(t, c.admin, vm.DeepCopy(), "status: "+tc.change), tc.want...)
		})
	}
}

func TestAFinishedEphemeralVMStaysFinished(t *testing.T) {
	for lifecycle, want := range map[string][]string{
		"ephemeral":  {"status.conditions", "Finished=True cannot be taken back from an ephemeral VM"},
		"persistent": nil,
	} {
		t.Run(lifecycle, func(t *testing.T) {
			c := newCluster(t)
			vm := c.created("vm", `{image: a, lifecycle: `+lifecycle+`}`)
			status := func(change string) error { return patchStatus(t, c.admin, vm.DeepCopy(), "status: "+change) }
			must(t, status(conditions("Finished", "True")))
			must(t, status(`{phase: Failed, conditions: [{type: Finished, status: "True", reason: Z, message: "", lastTransitionTime: "2031-01-01T00:00:00Z"}]}`))
			refused(t, status(`{conditions: null}`), want...)
			must(t, status(conditions("Finished", "True")))
			refused(t, status(conditions("Finished", "False")), want...)
			must(t, c.admin.Delete(t.Context(), vm))
		})
	}
}

func TestTheOperatorHasNoRightBeyondItsRoles(t *testing.T) {
	c := newCluster(t)
	operator := clientOf(t, c.OperatorConfig())
	vm := c.created("vm", `{image: a, ttlSecondsAfterFinished: 0}`)
	c.bind(vm, "node-a")
	must(t, patch(t, operator, vm.DeepCopy(), `metadata: {finalizers: [imp.dev/node]}`))
	for what, err := range map[string]error{
		"creating a VM":        operator.Create(t.Context(), c.vm("other", `{image: a}`)),
		"reading Secrets":      operator.List(t.Context(), &corev1.SecretList{}, client.InNamespace(c.namespace)),
		"labelling a node":     patch(t, operator, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}}, `metadata: {labels: {a: b}}`),
		"listing pods":         operator.List(t.Context(), &corev1.PodList{}),
		"changing a class":     patch(t, operator, &v1alpha1.ImpVMClass{ObjectMeta: metav1.ObjectMeta{Name: "x"}}, `metadata: {labels: {a: b}}`),
		"creating a network":   operator.Create(t.Context(), c.network("other", `{subnet: 10.44.0.0/24}`)),
		"deleting a network":   operator.Delete(t.Context(), c.network("other", `{subnet: 10.44.0.0/24}`)),
		"another ConfigMap":    patch(t, operator, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: v1alpha1.SystemNamespace, Name: "other"}}, `data: {a: b}`),
		"a tenant's ConfigMap": operator.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: "other"}}),
		"a tenant's Lease":     operator.Create(t.Context(), &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: "imp-vni-1"}}),
		"writing an ImpNode":   patch(t, operator, &v1alpha1.ImpNode{ObjectMeta: metav1.ObjectMeta{Name: "x"}}, `metadata: {labels: {a: b}}`),
		"writing its own role": patch(t, operator, object(t, "apiVersion: rbac.authorization.k8s.io/v1\nkind: ClusterRole\nmetadata: {name: imp-controller-manager}"), `rules: []`),
	} {
		if !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v, want 403 Forbidden", what, err)
		}
	}
	must(t, operator.Delete(t.Context(), vm))
}

func TestTheOperatorTellsAgentsWhatGuestsMayNotReach(t *testing.T) {
	c := newCluster(t)
	operator, agent := clientOf(t, c.OperatorConfig()), clientOf(t, c.AgentConfig("ranges-a"))
	must(t, operator.List(t.Context(), &networkingv1.ServiceCIDRList{}))
	must(t, operator.List(t.Context(), &corev1.NodeList{}))
	must(t, operator.Create(t.Context(), ranges()))
	t.Cleanup(func() { must(t, c.admin.Delete(context.WithoutCancel(t.Context()), ranges())) })
	told := ranges()
	must(t, operator.Get(t.Context(), client.ObjectKeyFromObject(told), told))
	told.Data = clusterranges.Ranges{Nodes: []netip.Prefix{netip.MustParsePrefix("192.0.2.2/32")}}.Encode()
	must(t, operator.Update(t.Context(), told))

	read := ranges()
	must(t, agent.Get(t.Context(), client.ObjectKeyFromObject(read), read))
	if got, err := clusterranges.Decode(read.Data); err != nil || len(got.Nodes) != 1 || got.Nodes[0].String() != "192.0.2.2/32" {
		t.Errorf("the agent reads %v (%v)", got, err)
	}
	// What a watch needs: a list of that name alone.
	must(t, agent.List(t.Context(), &corev1.ConfigMapList{}, client.InNamespace(v1alpha1.SystemNamespace), client.MatchingFields{"metadata.name": v1alpha1.ClusterRangesName}))
}
