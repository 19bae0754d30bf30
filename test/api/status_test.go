package api

import (
	"testing"

	"imp.dev/imp/api/v1alpha1"

	corev1 "k8s.io/api/core/v1"
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
		"writing an ImpNode":   patch(t, operator, &v1alpha1.ImpNode{ObjectMeta: metav1.ObjectMeta{Name: "x"}}, `metadata: {labels: {a: b}}`),
		"writing its own role": patch(t, operator, object(t, "apiVersion: rbac.authorization.k8s.io/v1\nkind: ClusterRole\nmetadata: {name: imp-controller-manager}"), `rules: []`),
	} {
		if !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v, want 403 Forbidden", what, err)
		}
	}
	must(t, operator.Delete(t.Context(), vm))
}
