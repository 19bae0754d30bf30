package api

import (
	"context"
	"testing"

	"imp.dev/imp/api/v1alpha1"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// user is somebody who was given one of Imp's roles for people in the test's namespace. In a cluster these are part of Kubernetes' own
// roles view and edit, by a controller that the control plane for tests does without.
func (c *cluster) user(name string, roles ...string) client.Client {
	c.t.Helper()
	name += "-of-" + c.namespace
	for _, role := range roles {
		must(c.t, c.admin.Create(c.t.Context(), object(c.t, `
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {generateName: user-, namespace: `+c.namespace+`}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: `+role+`}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: `+name+`}]`)))
	}
	cfg := c.Config()
	cfg.Impersonate = rest.ImpersonationConfig{UserName: name, Groups: []string{"system:authenticated"}}
	user := clientOf(c.t, cfg)
	// Bindings take effect in their order, and imp-view is everybody's last.
	await(c.t, "the roles of "+name+" to take effect", func(ctx context.Context) bool {
		return user.List(ctx, &v1alpha1.ImpVMList{}, client.InNamespace(c.namespace)) == nil
	})
	return user
}

func TestTheRolesForPeople(t *testing.T) {
	c := newCluster(t)
	editor, viewer := c.user("editor", "imp-edit", "imp-view"), c.user("viewer", "imp-view")
	vm := c.vm("vm", `{image: a}`)
	if err := viewer.Create(t.Context(), vm.DeepCopy()); !apierrors.IsForbidden(err) {
		t.Errorf("creating a VM with view: %v, want 403 Forbidden", err)
	}
	must(t, editor.Create(t.Context(), vm.DeepCopy()))
	must(t, viewer.Get(t.Context(), client.ObjectKeyFromObject(vm), vm.DeepCopy()))
	if err := patchStatus(t, editor, vm.DeepCopy(), `status: {nodeName: mine}`); !apierrors.IsForbidden(err) {
		t.Errorf("writing a VM's status with edit: %v, want 403 Forbidden", err)
	}
	if err := editor.Create(t.Context(), class(t, c.namespace, `{vcpu: 1, memoryMiB: 128, diskGiB: 1}`)); !apierrors.IsForbidden(err) {
		t.Errorf("creating a class with edit: %v, want 403 Forbidden", err)
	}
	must(t, editor.Delete(t.Context(), vm.DeepCopy()))
}
