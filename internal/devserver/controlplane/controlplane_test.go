package controlplane

import (
	"context"
	"os"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

func TestAgentsTokenIsBoundToItsNode(t *testing.T) {
	cp := ForTest(t)
	c, err := kubernetes.NewForConfig(cp.AgentConfig("bound-node"))
	if err != nil {
		t.Fatal(err)
	}
	review, err := c.AuthenticationV1().SelfSubjectReviews().Create(t.Context(), &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	user := review.Status.UserInfo
	if want := "system:serviceaccount:imp-system:imp-agent"; user.Username != want {
		t.Errorf("the agent is %q, want %q", user.Username, want)
	}
	if got := user.Extra["authentication.kubernetes.io/node-name"]; len(got) != 1 || got[0] != "bound-node" {
		t.Errorf("the node-name claim is %q, want the node's name", got)
	}
	if _, err := c.CoreV1().Secrets("kube-system").List(t.Context(), metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("reading the cluster's secrets with an agent's token gave %v, want forbidden", err)
	}
}

func TestTokenDiesWithItsNode(t *testing.T) {
	cp := ForTest(t)
	agent, err := kubernetes.NewForConfig(cp.AgentConfig("doomed-node"))
	if err != nil {
		t.Fatal(err)
	}
	admin, err := kubernetes.NewForConfig(cp.Config())
	if err != nil {
		t.Fatal(err)
	}
	if err := admin.CoreV1().Nodes().Delete(t.Context(), "doomed-node", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	err = poll(t.Context(), "the token to be refused", func(ctx context.Context) (bool, error) {
		_, err := agent.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
		return apierrors.IsUnauthorized(err), err
	})
	if err != nil {
		t.Error(err)
	}
}

func TestNodesAreReadyAndWithoutTaints(t *testing.T) {
	cp := ForTest(t)
	node, err := cp.EnsureNode(t.Context(), Node{Name: "plain-node", BootID: "boot-1", Address: "192.0.2.11", PodCIDR: "10.244.1.0/24"})
	if err != nil {
		t.Fatal(err)
	}
	if len(node.Spec.Taints) != 0 {
		t.Errorf("a new node has taints %v", node.Spec.Taints)
	}
	if node.Status.NodeInfo.BootID != "boot-1" || node.Status.Conditions[0].Status != corev1.ConditionTrue {
		t.Errorf("a new node's status is %+v, want ready and boot id boot-1", node.Status)
	}
	if node.Status.Addresses[0].Address != "192.0.2.11" || node.Spec.PodCIDR != "10.244.1.0/24" {
		t.Errorf("a new node has the addresses %v and the pods' range %q", node.Status.Addresses, node.Spec.PodCIDR)
	}
}

func TestInstallEnforcesPoliciesBeforeItReturns(t *testing.T) {
	cp := ForTest(t)
	manifests := fstest.MapFS{"policy/deny.yaml": {Data: []byte(`
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: no-forbidden-maps}
spec:
  failurePolicy: Fail
  matchConstraints:
    resourceRules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [configmaps], resourceNames: [forbidden]}]
  validations: [{expression: "false", message: "not this one"}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: no-forbidden-maps}
spec: {policyName: no-forbidden-maps, validationActions: [Deny]}
`)}}
	if err := cp.Install(t.Context(), manifests); err != nil {
		t.Fatal(err)
	}
	c, err := cp.Client()
	if err != nil {
		t.Fatal(err)
	}
	err = c.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "forbidden"}})
	if !apierrors.IsInvalid(err) && !apierrors.IsForbidden(err) {
		t.Errorf("creating what a policy denies gave %v", err)
	}
}

func TestNamespacesAreFinalizedAndOwnersCollected(t *testing.T) {
	cp := ForTest(t)
	c, err := cp.Client()
	if err != nil {
		t.Fatal(err)
	}
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "short-lived"}}
	owner := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "short-lived", Name: "owner"}}
	for _, object := range []client.Object{namespace, owner} {
		if err := c.Create(t.Context(), object); err != nil {
			t.Fatal(err)
		}
	}
	owned := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "short-lived", Name: "owned",
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: "owner", UID: owner.UID}}}}
	if err := c.Create(t.Context(), owned); err != nil {
		t.Fatal(err)
	}
	if err := c.Delete(t.Context(), owner); err != nil {
		t.Fatal(err)
	}
	gone := func(object client.Object) func(context.Context) (bool, error) {
		return func(ctx context.Context) (bool, error) {
			err := c.Get(ctx, client.ObjectKeyFromObject(object), object)
			return apierrors.IsNotFound(err), err
		}
	}
	if err := poll(t.Context(), "the owned object to be collected", gone(owned)); err != nil {
		t.Error(err)
	}
	if err := c.Delete(t.Context(), namespace); err != nil {
		t.Fatal(err)
	}
	if err := poll(t.Context(), "the namespace to be finalized", gone(namespace)); err != nil {
		t.Error(err)
	}
}

func TestStopLeavesNoProcessAndASecondStartInTheSameFolderWorks(t *testing.T) {
	binaries := requireBinaries(t)
	dir := t.TempDir()
	for range 2 {
		cp, err := Start(t.Context(), Options{Dir: dir, Binaries: binaries, WithoutControllers: true})
		if err != nil {
			t.Fatal(err)
		}
		cfg, err := clientcmd.BuildConfigFromFlags("", cp.Kubeconfig)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := kubernetes.NewForConfigOrDie(cfg).CoreV1().Namespaces().List(t.Context(), metav1.ListOptions{}); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		cp.Stop()
		t.Logf("stopped in %v", time.Since(began))
		for _, p := range cp.Processes() {
			if p.Running() {
				t.Errorf("%s still runs after Stop", p.Name)
			}
		}
	}
}

func TestStartNamesTheProcessThatFails(t *testing.T) {
	binaries := requireBinaries(t)
	binaries.APIServer = "/bin/false"
	_, err := Start(t.Context(), Options{Dir: t.TempDir(), Binaries: binaries})
	if err == nil || !strings.Contains(err.Error(), "kube-apiserver ended") {
		t.Errorf("Start with an API server that ends at once gave %v, want its name", err)
	}
}

func TestKeysAreReadableByTheOwnerOnly(t *testing.T) {
	ca, err := newAuthority(t.TempDir(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	issued, err := ca.issue("someone", "someone")
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(issued.key)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o600 {
		t.Errorf("the key's mode is %v, want 0600", info.Mode())
	}
}
