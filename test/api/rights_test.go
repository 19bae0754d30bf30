package api

import (
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// may asks the API server as `kubectl auth can-i VERB RESOURCE` does, about somebody in a namespace; "" asks for all namespaces.
func (c *cluster) may(user, verb, resource, namespace string) bool {
	c.t.Helper()
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: user, Groups: []string{"system:authenticated"},
		ResourceAttributes: &authorizationv1.ResourceAttributes{Group: "imp.dev", Resource: resource, Verb: verb, Namespace: namespace},
	}}
	must(c.t, c.admin.Create(c.t.Context(), review))
	return review.Status.Allowed
}

func TestTenantsManageTheirNetworksAndNobodysAddresses(t *testing.T) {
	c := newCluster(t)
	c.user("editor", "imp-edit", "imp-view")
	c.user("viewer", "imp-view")
	editor, viewer := "editor-of-"+c.namespace, "viewer-of-"+c.namespace
	read := []string{"get", "list", "watch"}
	write := []string{"create", "update", "patch", "delete", "deletecollection"}
	for _, tc := range []struct {
		who, user, resource, namespace string
		verbs                          []string
		want                           bool
	}{
		{"an editor", editor, "impnetworks", c.namespace, append(read, write...), true},
		{"an editor", editor, "impnetworks/status", c.namespace, []string{"update", "patch"}, false},
		{"an editor", editor, "impnetworks", "default", append(read, write...), false},
		{"an editor", editor, "impaddresses", c.namespace, append(read, write...), false},
		{"an editor", editor, "impaddresses", "", append(read, write...), false},
		{"a viewer", viewer, "impnetworks", c.namespace, read, true},
		{"a viewer", viewer, "impnetworks", c.namespace, write, false},
		{"a viewer", viewer, "impnetworks", "default", read, false},
		{"a viewer", viewer, "impaddresses", c.namespace, append(read, write...), false},
		{"a viewer", viewer, "impaddresses", "", append(read, write...), false},
	} {
		for _, verb := range tc.verbs {
			if got := c.may(tc.user, verb, tc.resource, tc.namespace); got != tc.want {
				t.Errorf("%s may %s %s in namespace %q: %v, want %v", tc.who, verb, tc.resource, tc.namespace, got, tc.want)
			}
		}
	}
}

// What the roles view and edit are in a cluster, where the rules come by these labels.
func TestNetworksComeWithTheBuiltInRoles(t *testing.T) {
	c := newCluster(t)
	for role, label := range map[string]string{"imp-view": "aggregate-to-view", "imp-edit": "aggregate-to-edit"} {
		u := object(t, "apiVersion: rbac.authorization.k8s.io/v1\nkind: ClusterRole\nmetadata: {name: "+role+"}")
		must(t, c.admin.Get(t.Context(), client.ObjectKeyFromObject(u), u))
		if got := u.GetLabels()["rbac.authorization.k8s.io/"+label]; got != "true" {
			t.Errorf("the label %s of %s is %q, want true", label, role, got)
		}
	}
}

// An agent compares the cluster with the one that ordered a VM, and reads nothing else of namespaces.
func TestAnAgentReadsTheClustersIdentity(t *testing.T) {
	c := newCluster(t)
	agent := clientOf(t, c.AgentConfig("node-a"))
	must(t, agent.Get(t.Context(), client.ObjectKey{Name: "kube-system"}, &corev1.Namespace{}))
	for what, err := range map[string]error{
		"another namespace": agent.Get(t.Context(), client.ObjectKey{Name: "default"}, &corev1.Namespace{}),
		"the list of them":  agent.List(t.Context(), &corev1.NamespaceList{}),
	} {
		if !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
