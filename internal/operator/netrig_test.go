package operator_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/network"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// overlay gives a node an address in the overlay: 192.0.2.LAST.
func overlay(last int) func(*corev1.Node, *v1alpha1.ImpNode) {
	address := fmt.Sprintf("192.0.2.%d", last)
	return func(n *corev1.Node, i *v1alpha1.ImpNode) {
		n.Status.Addresses = []corev1.NodeAddress{
			{Type: corev1.NodeInternalIP, Address: address}, {Type: corev1.NodeHostName, Address: "a-host"},
		}
		i.Status.Network = v1alpha1.NodeNetwork{Address: address, Addresses: []string{address}, MTU: 1500, Port: network.DefaultPort}
	}
}

// inLAN has the VM in the test's network "lan".
func inLAN(vm *v1alpha1.ImpVM) { vm.Spec.NetworkRef = &v1alpha1.NetworkReference{Name: "lan"} }

func static(address string) func(*v1alpha1.ImpVM) {
	return func(vm *v1alpha1.ImpVM) {
		inLAN(vm)
		vm.Spec.Address = address
	}
}

// makeNetwork makes an ImpNetwork, and what is claimed for it goes with the test.
func (r *rig) makeNetwork(name, subnet string, options ...func(*v1alpha1.ImpNetwork)) *v1alpha1.ImpNetwork {
	r.t.Helper()
	n := &v1alpha1.ImpNetwork{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.ns, Name: name}, Spec: v1alpha1.ImpNetworkSpec{Subnet: subnet},
	}
	for _, option := range options {
		option(n)
	}
	must(r.t, r.admin.Create(r.t.Context(), n))
	r.t.Cleanup(func() {
		ctx := context.Background()
		for _, claim := range r.claimsOf(ctx, n) {
			_ = r.admin.Delete(ctx, &claim)
		}
		for _, lease := range r.leasesOf(ctx, n) {
			_ = r.admin.Delete(ctx, &lease)
		}
	})
	return n
}

// lan makes the network "lan" and has it settled. The writes until then are forgotten.
func (r *rig) lan(subnet string) *v1alpha1.ImpNetwork {
	r.t.Helper()
	r.makeNetwork("lan", subnet)
	r.settle("lan")
	r.writes.take()
	return r.getNetwork("lan")
}

// settle looks at the network once as imp-network.
func (r *rig) settle(name string) ctrl.Result {
	r.t.Helper()
	result, err := r.nets.Reconcile(r.t.Context(), requestOf(r.ns, name))
	must(r.t, err)
	return result
}

// getNetwork as it is; nil if it is gone.
func (r *rig) getNetwork(name string) *v1alpha1.ImpNetwork {
	r.t.Helper()
	n := &v1alpha1.ImpNetwork{}
	err := r.admin.Get(r.t.Context(), client.ObjectKey{Namespace: r.ns, Name: name}, n)
	must(r.t, client.IgnoreNotFound(err))
	if err != nil {
		return nil
	}
	return n
}

func (r *rig) claimsOf(ctx context.Context, n *v1alpha1.ImpNetwork) []v1alpha1.ImpAddress {
	list := &v1alpha1.ImpAddressList{}
	if err := r.admin.List(ctx, list, client.MatchingFields{"spec.network.uid": string(n.UID)}); err != nil {
		r.t.Errorf("listing claims: %v", err)
	}
	return list.Items
}

func (r *rig) leasesOf(ctx context.Context, n *v1alpha1.ImpNetwork) []coordinationv1.Lease {
	list := &coordinationv1.LeaseList{}
	if err := r.admin.List(ctx, list, client.InNamespace(v1alpha1.SystemNamespace)); err != nil {
		r.t.Errorf("listing Leases: %v", err)
	}
	return slices.DeleteFunc(list.Items, func(l coordinationv1.Lease) bool {
		return ptr.Deref(l.Spec.HolderIdentity, "") != string(n.UID) || !strings.HasPrefix(l.Name, v1alpha1.VNILeasePrefix)
	})
}

// claim of the address in the network "lan"; nil if there is none.
func (r *rig) claim(address string) *v1alpha1.ImpAddress {
	r.t.Helper()
	claim := &v1alpha1.ImpAddress{}
	err := r.admin.Get(r.t.Context(), client.ObjectKey{Name: v1alpha1.AddressName(r.getNetwork("lan").UID, address)}, claim)
	must(r.t, client.IgnoreNotFound(err))
	if err != nil {
		return nil
	}
	return claim
}

// claims of the network "lan", as "address state vm node", in order.
func (r *rig) claims() []string {
	r.t.Helper()
	var out []string
	for _, c := range r.claimsOf(r.t.Context(), r.getNetwork("lan")) {
		out = append(out, strings.TrimSpace(fmt.Sprintf("%s %s %s %s", c.Spec.Address, c.Status.State, c.Spec.VM.Name,
			strings.TrimPrefix(c.Status.Node, r.ns+"-"))))
	}
	slices.Sort(out)
	return out
}

func (r *rig) expectClaims(want ...string) {
	r.t.Helper()
	if got := r.claims(); !slices.Equal(got, want) {
		r.t.Errorf("claims:\n got  %q\n want %q", got, want)
	}
}

// auditAll looks once at each claim of the network "lan", and gives the soonest time for which another look is due; 0: none.
func (r *rig) auditAll() time.Duration {
	r.t.Helper()
	soonest := time.Duration(0)
	for _, claim := range r.claimsOf(r.t.Context(), r.getNetwork("lan")) {
		result, err := r.audit.Reconcile(r.t.Context(), requestOf("", claim.Name))
		must(r.t, err)
		if after := result.RequeueAfter; after > 0 && (soonest == 0 || after < soonest) {
			soonest = after
		}
	}
	return soonest
}

// expectNetwork compares "Status Reason: message" of one condition of a network.
func (r *rig) expectNetwork(name, conditionType, want string) {
	r.t.Helper()
	got := "absent"
	if c := meta.FindStatusCondition(r.getNetwork(name).Status.Conditions, conditionType); c != nil {
		got = fmt.Sprintf("%s %s: %s", c.Status, c.Reason, c.Message)
	}
	if got != want {
		r.t.Errorf("%s of network %s:\n got  %s\n want %s", conditionType, name, got, want)
	}
}

// networked gives a rig with a node in the overlay and the network "lan", and forgets the writes until then.
func networked(t *testing.T, subnet string) *rig {
	t.Helper()
	r := newRig(t)
	r.node("a", overlay(1))
	r.class("small")
	r.lan(subnet)
	return r
}

// ip of the VM in its status.
func (r *rig) ip(name string) string {
	r.t.Helper()
	if vm := r.get(name); vm != nil {
		return vm.Status.IP
	}
	return ""
}
