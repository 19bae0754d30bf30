package e2e

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/devserver/demo"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestAnImageThatCannotBePulledIsToldAndRunsOnceItCan(t *testing.T) {
	c := shared(t, "fake")
	ns := c.namespace(t)
	missing := "late/" + ns + ":1"
	closed := freeAddress(t)
	for name, image := range map[string]struct {
		reference string
		says      []string
	}{
		"a name that is not there":     {c.server.Registry + "/" + missing, []string{c.server.Registry, missing}},
		"a registry that wants a name": {c.server.PrivateRegistry + "/" + demo.ImageName, []string{c.server.PrivateRegistry, "401"}},
		"a registry that is down":      {closed + "/a/b:1", []string{closed, "refused"}},
	} {
		t.Run(name, func(t *testing.T) {
			vm := c.create(t, c.vm(ns, "vm", func(vm *v1alpha1.ImpVM) { vm.Spec.Image = image.reference; vm.Name = ""; vm.GenerateName = "vm-" }))
			now := c.await(t, vm, soon, "failing to pull", reason(v1alpha1.ReasonImagePullFailed))
			message := condition(now, v1alpha1.ConditionReady).Message
			for _, words := range image.says {
				if !strings.Contains(message, words) {
					t.Errorf("the message does not say %q: %s", words, message)
				}
			}
			c.awaitEvent(t, vm, v1alpha1.ReasonImagePullFailed)
			if strings.Contains(image.reference, missing) {
				c.push(t, c.busybox(t), missing)
				now = c.await(t, vm, booting, "finished", running)
				if now.UID != vm.UID {
					t.Error("it was created anew")
				}
				c.awaitEvent(t, vm, v1alpha1.ReasonRecovered)
			}
		})
	}
}

func running(vm *v1alpha1.ImpVM) bool { return vm.Status.StartedAt != nil }

func freeAddress(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer listener.Close()
	return listener.Addr().String()
}

// pullSecret gives the namespace a pull secret for the private registry and lets agents read it.
func (c *cluster) pullSecret(t *testing.T, namespace string) {
	t.Helper()
	auth := base64.StdEncoding.EncodeToString([]byte(registryUser + ":" + registryPassword))
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "pull"},
		Type:       corev1.SecretTypeDockerConfigJson,
		Data:       map[string][]byte{corev1.DockerConfigJsonKey: fmt.Appendf(nil, `{"auths":{%q:{"auth":%q}}}`, c.server.PrivateRegistry, auth)},
	}
	binding := &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "agents-pull"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "imp-agent-pull-secrets"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: v1alpha1.SystemNamespace, Name: "imp-agent"}},
	}
	must(t, c.client.Create(t.Context(), secret))
	must(t, c.client.Create(t.Context(), binding))
}

func TestAPrivateImageIsForThoseWithThePasswordOnly(t *testing.T) {
	c := shared(t, "fake")
	with, without := c.namespace(t), c.namespace(t)
	private := image(c.server.PrivateRegistry + "/" + demo.ImageName)
	secret := func(vm *v1alpha1.ImpVM) { vm.Spec.ImagePullSecrets = []corev1.LocalObjectReference{{Name: "pull"}} }

	allowed := c.create(t, c.vm(with, "vm", private, secret, persistent))
	now := c.await(t, allowed, soon, "told about its secret", reason(v1alpha1.ReasonImagePullFailed))
	if message := condition(now, v1alpha1.ConditionReady).Message; !strings.Contains(message, "pull") || !strings.Contains(message, "imp-agent-pull-secrets") {
		t.Errorf("the message does not name the Secret and the remedy: %s", message)
	}
	c.pullSecret(t, with)
	c.await(t, allowed, booting, "running", running)

	refused := c.create(t, c.vm(without, "vm", private, persistent, func(vm *v1alpha1.ImpVM) { vm.Spec.NodeName = now.Status.NodeName }))
	c.await(t, refused, soon, "refused what its neighbour has in the cache", reason(v1alpha1.ReasonImagePullFailed))

	secrets := [][]byte{[]byte(registryPassword), []byte(base64.StdEncoding.EncodeToString([]byte(registryUser + ":" + registryPassword)))}
	for _, root := range []string{c.server.Places.Logs(), c.server.Places.Data, c.server.Places.Run} {
		must(t, filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || !entry.Type().IsRegular() || strings.HasSuffix(path, ".ext4") || strings.Contains(path, "kube-apiserver") {
				return nil //nolint:nilerr // what vanishes meanwhile holds nothing
			}
			content, err := os.ReadFile(path)
			if err != nil {
				return nil //nolint:nilerr // likewise
			}
			for _, secret := range secrets {
				if bytes.Contains(content, secret) {
					t.Errorf("the password is in %s", path)
				}
			}
			return nil
		}))
	}
}
