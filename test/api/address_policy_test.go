package api

import (
	"context"
	"testing"

	"imp.dev/imp/api/v1alpha1"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

func TestAnAgentSaysOfAHeldAddressOfItsNodeThatNothingIsLeftAndNothingElse(t *testing.T) {
	c := newCluster(t)
	agent := clientOf(t, c.AgentConfig("held-a"))
	network := uuid.NewUUID()
	held := c.claimed(network, "10.44.0.2", "vm", on("held-a", 3, v1alpha1.AddressHeld))
	bound := c.claimed(network, "10.44.0.3", "vm", on("held-a", 3, v1alpha1.AddressBound))
	quarantined := c.claimed(network, "10.44.0.4", "vm", on("held-a", 3, v1alpha1.AddressQuarantined))
	theirs := c.claimed(network, "10.44.0.5", "vm", on("held-b", 3, v1alpha1.AddressHeld))
	nobodys := c.claimed(network, "10.44.0.6", "vm", on("", 0, v1alpha1.AddressHeld))
	const nothingElse = "an agent may change nothing of an ImpAddress but status.releasedAssignment"
	const released = `status: {releasedAssignment: 3}`
	for _, tc := range []struct {
		name    string
		address *v1alpha1.ImpAddress
		change  string
		want    string
	}{
		{"its VM's that is not Held", bound, released, "only while it is Held"},
		{"nobody's any more", quarantined, released, "only while it is Held"},
		{"another node's", theirs, released, "the agent of node held-a may write only to ImpAddresses of its node; this one is of node held-b"},
		{"one of no node", nobodys, released, "this one is of none"},
		{"another node's, taken over", theirs, `status: {node: held-a}`, "this one is of node held-b"},
		{"a state, freed", held, `status: {state: Quarantined}`, nothingElse},
		{"a state, bound again", held, `status: {state: Bound}`, nothingElse},
		{"when it became so", held, `status: {since: "2001-01-01T00:00:00Z"}`, nothingElse},
		{"a node", held, `status: {node: held-b}`, nothingElse},
		{"a node, none", held, `status: {node: null}`, nothingElse},
		{"an assignment", held, `status: {assignment: 4, releasedAssignment: 4}`, nothingElse},
		{"a VTEP", held, `status: {vtep: 192.0.2.66}`, nothingElse},
		{"a VTEP, beside what it may", held, `status: {vtep: 192.0.2.66, releasedAssignment: 3}`, nothingElse},
		{"a label", held, `metadata: {labels: {a: b}}`, nothingElse},
		{"a finalizer", held, `metadata: {finalizers: [example.com/mine]}`, nothingElse},
		{"an owner", held, `metadata: {ownerReferences: [{apiVersion: v1, kind: Pod, name: p, uid: u}]}`, nothingElse},
		{"a VM", held, `spec: {vm: {name: other}}`, ""},
		{"an assignment beyond the last", held, `status: {releasedAssignment: 4}`, "only grows, and not beyond status.assignment"},
		{"an older assignment", held, `status: {releasedAssignment: 2}`, "accepted"},
		{"the last assignment", held, released, "accepted"},
		{"the same again", held, released, "accepted"},
		{"an older one after it", held, `status: {releasedAssignment: 2}`, "only grows"},
		{"nothing after it", held, `status: {releasedAssignment: null}`, "only grows"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := patch(t, agent, tc.address.DeepCopy(), tc.change)
			if tc.want == "accepted" {
				must(t, err)
				return
			}
			notMine(t, err, tc.want)
		})
	}
	notMine(t, patch(t, c.unbound(), held.DeepCopy(), released), "this one names no node, so it may write nothing")

	t.Run("by apply, as any field manager", func(t *testing.T) {
		u := object(t, "apiVersion: imp.dev/v1alpha1\nkind: ImpAddress\nmetadata: {name: "+held.Name+"}\n"+released)
		must(t, agent.Apply(t.Context(), client.ApplyConfigurationFromUnstructured(u), client.FieldOwner(v1alpha1.ManagerAgent), client.ForceOwnership))
		must(t, c.admin.Get(t.Context(), client.ObjectKeyFromObject(held), held))
		if held.Status.ReleasedAssignment != 3 || held.Status.Node != "held-a" || held.Status.State != v1alpha1.AddressHeld {
			t.Errorf("the status is %+v", held.Status)
		}
	})
	t.Run("with a label that somebody gave the address", func(t *testing.T) {
		labelled := c.claimed(network, "10.44.0.7", "vm", on("held-a", 3, v1alpha1.AddressHeld))
		must(t, patch(t, c.admin, labelled, `metadata: {labels: {a: b}, annotations: {c: d}}`))
		must(t, patch(t, agent, labelled, released))
	})
}

func TestAnAgentHasNoRightToClaimOrFreeAnAddress(t *testing.T) {
	c := newCluster(t)
	agent := clientOf(t, c.AgentConfig("claim-a"))
	network := c.createdNetwork("net", `{subnet: 10.44.0.0/24}`)
	held := c.claimed(network.UID, "10.44.0.2", "vm", on("claim-a", 1, v1alpha1.AddressHeld))
	apply := object(t, `
apiVersion: imp.dev/v1alpha1
kind: ImpAddress
metadata: {name: 12345678-10.44.0.9}
spec:
  network: {namespace: default, name: net, uid: 12345678-aaaa}
  vm: {namespace: default, name: vm, uid: 12345678-bbbb}
  address: 10.44.0.9
  mac: "02:00:00:00:00:01"
status: {state: Bound, since: "2030-01-01T00:00:00Z"}`)
	for what, err := range map[string]error{
		"claiming an address":          agent.Create(t.Context(), c.address(network.UID, "10.44.0.3", "vm")),
		"claiming one by apply":        agent.Apply(t.Context(), client.ApplyConfigurationFromUnstructured(apply), client.FieldOwner("x")),
		"freeing an address":           agent.Delete(t.Context(), held.DeepCopy()),
		"freeing all addresses":        agent.DeleteAllOf(t.Context(), &v1alpha1.ImpAddress{}),
		"replacing an address":         agent.Update(t.Context(), held.DeepCopy()),
		"editing a network":            patch(t, agent, network.DeepCopy(), `spec: {nat: {enabled: true}}`),
		"writing a network's status":   patchStatus(t, agent, network.DeepCopy(), `status: {vni: 1}`),
		"deleting a network":           agent.Delete(t.Context(), network.DeepCopy()),
		"reading another ConfigMap":    agent.Get(t.Context(), client.ObjectKey{Namespace: v1alpha1.SystemNamespace, Name: "other"}, &corev1.ConfigMap{}),
		"listing all ConfigMaps":       agent.List(t.Context(), &corev1.ConfigMapList{}, client.InNamespace(v1alpha1.SystemNamespace)),
		"editing the cluster's ranges": patch(t, agent, ranges(), `data: {nodes: ""}`),
	} {
		if !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v, want 403 Forbidden", what, err)
		}
	}
}

// ranges is the ConfigMap that tells agents what guests may not reach.
func ranges() *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: v1alpha1.SystemNamespace, Name: v1alpha1.ClusterRangesName}}
}

// A policy speaks where a role would not: an administrator may have given the agents more than Imp does.
func TestThePolicyOnAddressesHoldsWhateverTheRolesAllow(t *testing.T) {
	c := newCluster(t)
	must(t, c.admin.Create(t.Context(), object(t, `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: too-much-of-`+c.namespace+`}
rules: [{apiGroups: [imp.dev], resources: [impaddresses], verbs: ["*"]}]`)))
	binding := object(t, `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: too-much-of-`+c.namespace+`}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: too-much-of-`+c.namespace+`}
subjects: [{kind: ServiceAccount, name: imp-agent, namespace: imp-system}]`)
	must(t, c.admin.Create(t.Context(), binding))
	t.Cleanup(func() { must(t, c.admin.Delete(context.WithoutCancel(t.Context()), binding)) })
	agent := clientOf(t, c.AgentConfig("policy-a"))
	held := c.claimed(uuid.NewUUID(), "10.44.0.2", "vm", on("policy-a", 1, v1alpha1.AddressHeld))
	const want = "an agent may neither create nor delete one"
	var err error
	await(t, "the binding to take effect", func(ctx context.Context) bool {
		err = agent.Delete(ctx, held.DeepCopy())
		return !apierrors.IsForbidden(err)
	})
	notMine(t, err, want)
	notMine(t, agent.Create(t.Context(), c.address(uuid.NewUUID(), "10.44.0.3", "vm")), want)
	held.Status.Node = "policy-b"
	notMine(t, agent.Update(t.Context(), held), "an agent may change nothing of an ImpAddress but status.releasedAssignment")
}
