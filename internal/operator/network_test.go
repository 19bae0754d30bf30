package operator_test

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/clusterranges"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

func TestANetworkIsSettledWithThreeWrites(t *testing.T) {
	r := newRig(t)
	r.node("a", overlay(1))
	r.node("b", overlay(2), func(_ *corev1.Node, i *v1alpha1.ImpNode) { i.Status.Network.MTU = 1400 })
	r.node("c") // not in the overlay
	r.makeNetwork("lan", "10.44.0.0/24")
	r.settle("lan")
	r.expect("PATCH impnetworks/lan", "POST leases", "PATCH impnetworks/lan/status")
	n := r.getNetwork("lan")
	s := n.Status
	if s.Gateway != "10.44.0.1" || s.Capacity != 253 || s.MTU != 1350 || s.Usage != "0/253" || s.ObservedGeneration != 1 {
		t.Errorf("status is %+v", s)
	}
	if leases := r.leasesOf(t.Context(), n); len(leases) != 1 || leases[0].Name != fmt.Sprintf("imp-vni-%d", s.VNI) || s.VNI < 4096 || s.VNI >= 1<<24 {
		t.Errorf("VNI %d, claimed by %v", s.VNI, leases)
	}
	if !slices.Equal(n.Finalizers, []string{v1alpha1.NetworkFinalizer}) {
		t.Errorf("finalizers are %v", n.Finalizers)
	}
	r.expectNetwork("lan", v1alpha1.ConditionReady, "True Usable: VMs can be given addresses")
	r.expectNetwork("lan", v1alpha1.ConditionSubnetOverlap, "False NoOverlap: no address of a node, of pods or of Services is in subnet 10.44.0.0/24")
	r.settle("lan")
	r.expect()
}

func TestANetworkWaitsForANodeThatTellsItsMTUAndKeepsWhatItSettledOn(t *testing.T) {
	r := newRig(t)
	r.makeNetwork("lan", "10.44.0.0/24")
	r.settle("lan")
	r.expectNetwork("lan", v1alpha1.ConditionReady,
		"False SettingUp: no node has told its address in the overlay and the MTU there yet; spec.mtu would settle it now")
	r.node("a", overlay(1))
	r.settle("lan")
	r.expectNetwork("lan", v1alpha1.ConditionReady, "True Usable: VMs can be given addresses")
	r.node("b", overlay(2), func(_ *corev1.Node, i *v1alpha1.ImpNode) { i.Status.Network.MTU = 1400 })
	r.writes.take()
	r.settle("lan")
	r.expect()
	if got := r.getNetwork("lan").Status.MTU; got != 1450 {
		t.Errorf("the MTU is %d now", got)
	}
}

func TestAnMTUOfOnesOwnNeedsNoNode(t *testing.T) {
	r := newRig(t)
	r.makeNetwork("lan", "10.44.0.0/24", func(n *v1alpha1.ImpNetwork) { n.Spec.MTU, n.Spec.Gateway = 1400, "10.44.0.254" })
	r.settle("lan")
	r.expectNetwork("lan", v1alpha1.ConditionReady, "True Usable: VMs can be given addresses")
	if s := r.getNetwork("lan").Status; s.MTU != 1400 || s.Gateway != "10.44.0.254" {
		t.Errorf("status is %+v", s)
	}
}

func TestASubnetThatSomebodyElseHasIsNamedAndTakesNoNewVM(t *testing.T) {
	r := newRig(t)
	a := r.node("a", overlay(1), func(n *corev1.Node, i *v1alpha1.ImpNode) {
		n.Spec.PodCIDRs, n.Spec.PodCIDR = []string{"10.7.0.0/24", "fd00:7::/64"}, "10.7.0.0/24"
		i.Status.Network.Addresses = append(i.Status.Network.Addresses, "172.20.0.9", "fe80::1")
	})
	r.nets.Survey.ClusterCIDRs = []netip.Prefix{netip.MustParsePrefix("10.42.0.0/16")}
	for subnet, whose := range map[string]string{
		"192.0.2.0/24":  "the address 192.0.2.1 of node " + a,
		"172.20.0.8/29": "the address 172.20.0.9 of node " + a,
		"10.7.0.128/25": "the range 10.7.0.0/24 of pods on node " + a,
		"10.42.7.0/24":  "the range 10.42.0.0/16 of pods (--cluster-cidr)",
		"10.96.0.0/16":  "the range 10.96.0.0/24 of Services (ServiceCIDR kubernetes)",
	} {
		name := strings.NewReplacer(".", "-", "/", "-").Replace(subnet)
		r.makeNetwork(name, subnet)
		r.settle(name)
		message := " SubnetOverlap: subnet " + subnet + " overlaps " + whose + ": no VM is given an address; create an ImpNetwork with another subnet"
		r.expectNetwork(name, v1alpha1.ConditionSubnetOverlap, "True"+message)
		r.expectNetwork(name, v1alpha1.ConditionReady, "False"+message)
		r.expectEvents(name, "Warning SubnetOverlap")
	}
	r.class("small")
	r.vm("web", func(vm *v1alpha1.ImpVM) { vm.Spec.NetworkRef = &v1alpha1.NetworkReference{Name: "10-42-7-0-24"} })
	r.reconcile("web")
	r.expectCondition("web", v1alpha1.ConditionScheduled, "False NetworkSetupFailed: network "+r.ns+"/10-42-7-0-24 is not ready: SubnetOverlap: "+
		"subnet 10.42.7.0/24 overlaps the range 10.42.0.0/16 of pods (--cluster-cidr): no VM is given an address; create an ImpNetwork with another subnet")
	r.expectEvents("web", "Warning NetworkSetupFailed")
}

func TestAnOverlapThatComesAndGoesLeavesRunningVMsAlone(t *testing.T) {
	r := networked(t, "10.44.0.0/24")
	r.vm("web", inLAN)
	r.reconcile("web")
	before := r.get("web")
	r.node("b", func(n *corev1.Node, _ *v1alpha1.ImpNode) {
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeExternalIP, Address: "10.44.0.200"}}
	})
	r.settle("lan")
	r.reconcile("web")
	if diff := cmp.Diff(before, r.get("web")); diff != "" {
		t.Errorf("it was changed: %s", diff)
	}
	r.vm("late", inLAN)
	r.reconcile("late")
	r.expectCondition("late", v1alpha1.ConditionReady, "False NetworkSetupFailed: network "+r.ns+"/lan is not ready: SubnetOverlap: "+
		"subnet 10.44.0.0/24 overlaps the address 10.44.0.200 of node "+r.name("b")+": no VM is given an address; create an ImpNetwork with another subnet")
	must(t, r.admin.Delete(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: r.name("b")}}))
	r.settle("lan")
	r.reconcile("late")
	r.expectCondition("late", v1alpha1.ConditionScheduled, "True Placed: placed on "+r.name("a"))
	r.expectEvents("lan", "Warning SubnetOverlap", "Normal Recovered")
	r.expectEvents("late", "Warning NetworkSetupFailed", "Normal Placed", "Normal Recovered")
}

func TestTwoNetworksWithOneSubnetAreBothUsable(t *testing.T) {
	r := networked(t, "10.44.0.0/30")
	r.makeNetwork("other", "10.44.0.0/30")
	r.settle("other")
	r.expectNetwork("other", v1alpha1.ConditionReady, "True Usable: VMs can be given addresses")
	if a, b := r.getNetwork("lan").Status.VNI, r.getNetwork("other").Status.VNI; a == b || a == 0 {
		t.Errorf("their VNIs are %d and %d", a, b)
	}
	r.vm("one", inLAN)
	r.vm("two", func(vm *v1alpha1.ImpVM) { vm.Spec.NetworkRef = &v1alpha1.NetworkReference{Name: "other"} })
	r.reconcile("one")
	r.reconcile("two")
	if one, two := r.ip("one"), r.ip("two"); one != "10.44.0.2" || two != "10.44.0.2" {
		t.Errorf("they have %q and %q", one, two)
	}
}

func TestClaimsAreCountedByState(t *testing.T) {
	r := networked(t, "10.44.0.0/24")
	for _, name := range []string{"used", "held", "quarantined"} {
		r.vm(name, inLAN)
		r.reconcile(name)
	}
	for name, state := range map[string]v1alpha1.AddressState{"held": v1alpha1.AddressHeld, "quarantined": v1alpha1.AddressQuarantined} {
		claim := r.claim(r.ip(name))
		claim.Status.State = state
		must(t, r.admin.Update(t.Context(), claim))
	}
	r.writes.take()
	r.settle("lan")
	r.expect("PATCH impnetworks/lan/status")
	if s := r.getNetwork("lan").Status; s.Used != 1 || s.Held != 1 || s.Quarantined != 1 || s.Usage != "1/253" {
		t.Errorf("status is %+v", s)
	}
}

func TestAnInterruptedClaimOfAVNIIsTakenUpAndASurplusOneFreed(t *testing.T) {
	r := newRig(t)
	r.makeNetwork("lan", "10.44.0.0/24", func(n *v1alpha1.ImpNetwork) { n.Spec.MTU = 1400 })
	r.writes.fail = func(req *http.Request) (*http.Response, error) {
		if onStatus(req) {
			return nil, errors.New("killed")
		}
		return nil, nil
	}
	if _, err := r.nets.Reconcile(t.Context(), requestOf(r.ns, "lan")); err == nil {
		t.Fatal("the status was written")
	}
	r.writes.fail = nil
	n := r.getNetwork("lan")
	claimed := r.leasesOf(t.Context(), n)
	r.settle("lan")
	n = r.getNetwork("lan")
	if len(claimed) != 1 || claimed[0].Name != fmt.Sprintf("imp-vni-%d", n.Status.VNI) {
		t.Errorf("VNI %d, claimed %v", n.Status.VNI, claimed)
	}
	surplus := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: v1alpha1.SystemNamespace, Name: "imp-vni-16000001"},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: ptr.To(string(n.UID))},
	}
	must(t, r.admin.Create(t.Context(), surplus))
	for _, lease := range []string{surplus.Name, claimed[0].Name} {
		_, err := r.vnis.Reconcile(t.Context(), requestOf(v1alpha1.SystemNamespace, lease))
		must(t, err)
	}
	if left := r.leasesOf(t.Context(), n); len(left) != 1 || left[0].Name != claimed[0].Name {
		t.Errorf("left are %v", left)
	}
}

func TestAVNIThatIsTakenIsNotSharedAndAnOrphanIsFreed(t *testing.T) {
	r := newRig(t)
	n := r.makeNetwork("lan", "10.44.0.0/24", func(n *v1alpha1.ImpNetwork) { n.Spec.MTU = 1400 })
	r.settle("lan")
	first := r.leasesOf(t.Context(), n)[0]
	// An admin gives the number to somebody else.
	first.Spec.HolderIdentity = ptr.To("00000000-0000-0000-0000-000000000001")
	must(t, r.admin.Update(t.Context(), &first))
	t.Cleanup(func() { _ = r.admin.Delete(t.Context(), &first) })
	r.settle("lan")
	leases := r.leasesOf(t.Context(), n)
	if len(leases) != 1 || leases[0].Name == first.Name || leases[0].Name != fmt.Sprintf("imp-vni-%d", r.getNetwork("lan").Status.VNI) {
		t.Errorf("VNI %d, claimed by %v", r.getNetwork("lan").Status.VNI, leases)
	}
	_, err := r.vnis.Reconcile(t.Context(), requestOf(v1alpha1.SystemNamespace, first.Name))
	must(t, err)
	if err := r.admin.Get(t.Context(), client.ObjectKeyFromObject(&first), &first); client.IgnoreNotFound(err) != nil || err == nil {
		t.Errorf("the claim of a network that does not exist is still there (%v)", err)
	}
}

func TestANetworkInUseWaitsAndSaysForWhom(t *testing.T) {
	r := networked(t, "10.44.0.0/24")
	node := r.name("a")
	for i := range 4 {
		r.vm(fmt.Sprintf("vm-%d", i), inLAN)
		r.reconcile(fmt.Sprintf("vm-%d", i))
	}
	n := r.getNetwork("lan")
	must(t, r.admin.Delete(t.Context(), n))
	r.writes.take()
	r.settle("lan")
	r.settle("lan")
	r.expect("PATCH impnetworks/lan/status")
	r.expectNetwork("lan", v1alpha1.ConditionInUse, "True InUse: its deletion waits for 4 VMs: vm-0, vm-1, vm-2, vm-3")
	r.expectNetwork("lan", v1alpha1.ConditionReady, "False Deleting: being deleted: no VM is given an address any more")
	r.expectEvents("lan", "Normal InUse")
	r.vm("late", inLAN)
	r.reconcile("late")
	r.expectCondition("late", v1alpha1.ConditionScheduled, "False NetworkSetupFailed: network "+r.ns+"/lan is being deleted")

	r.leave("vm-0")
	r.leave("vm-1")
	r.leave("vm-2")
	r.settle("lan")
	r.expectNetwork("lan", v1alpha1.ConditionInUse, "True InUse: its deletion waits for 1 VM: vm-3")
	r.delete("vm-3")
	r.silent()
	r.clock.Step(6 * time.Minute)
	r.reconcile("vm-3")
	r.settle("lan")
	r.expectNetwork("lan", v1alpha1.ConditionInUse,
		"True InUse: its deletion waits for 1 VM: vm-3 (deleted; node "+node+" has not said that nothing of it is left)")
	held := r.claimsOf(t.Context(), n)
	i := slices.IndexFunc(held, func(c v1alpha1.ImpAddress) bool { return c.Status.State == v1alpha1.AddressHeld })
	held[i].Status.ReleasedAssignment = 1
	must(t, r.admin.Update(t.Context(), &held[i]))
	r.auditAll()
	r.settle("lan")
	if r.getNetwork("lan") != nil {
		t.Error("it is still there")
	}
	if claims, leases := r.claimsOf(t.Context(), n), r.leasesOf(t.Context(), n); len(claims)+len(leases) > 0 {
		t.Errorf("left are %v and %v", claims, leases)
	}
	r.reconcile("late")
	r.expectCondition("late", v1alpha1.ConditionScheduled,
		`False InvalidSpec: spec.networkRef names ImpNetwork "lan", which does not exist: create ImpNetwork `+r.ns+"/lan")
}

// leave deletes the VM and has its node say that nothing of it is left.
func (r *rig) leave(name string) {
	r.t.Helper()
	r.delete(name)
	r.report(name, func(s *v1alpha1.ImpVMStatus) { s.ReleasedAssignment = r.get(name).Status.Assignment })
	r.reconcile(name)
	if r.get(name) != nil {
		r.t.Fatalf("%s is still there", name)
	}
}

func TestManyUsersAreCountedAndFiveOfThemNamed(t *testing.T) {
	r := networked(t, "10.44.0.0/24")
	node := &v1alpha1.ImpNode{}
	must(t, r.admin.Get(t.Context(), keyOf(r.name("a")), node))
	node.Status.Budget = v1alpha1.Budget{VCPU: 100, MemoryMiB: 100000, DiskGiB: 1000}
	must(t, r.admin.Status().Update(t.Context(), node))
	for i := range 7 {
		r.vm(fmt.Sprintf("vm-%d", i), inLAN)
		r.reconcile(fmt.Sprintf("vm-%d", i))
	}
	must(t, r.admin.Delete(t.Context(), r.getNetwork("lan")))
	r.settle("lan")
	r.expectNetwork("lan", v1alpha1.ConditionInUse, "True InUse: its deletion waits for 7 VMs: vm-0, vm-1, vm-2, vm-3, vm-4 and 2 more")
}

// The deletion comes between the look at the network and the claim, and its last look at the claims before it.
func TestNoVMIsBoundToANetworkThatHasJustGone(t *testing.T) {
	r := networked(t, "10.44.0.0/24")
	r.vm("web", inLAN)
	n := r.getNetwork("lan")
	r.writes.fail = func(req *http.Request) (*http.Response, error) {
		if req.Method == http.MethodPost && strings.HasSuffix(req.URL.Path, "/impaddresses") {
			r.writes.fail = nil
			must(t, r.admin.Delete(t.Context(), n))
			r.settle("lan")
		}
		return nil, nil
	}
	if again := r.reconcile("web").RequeueAfter; again <= 0 || again > 5*time.Second {
		t.Errorf("looks again after %v", again)
	}
	if r.getNetwork("lan") != nil {
		t.Fatal("the network is still there: this tests nothing")
	}
	if vm := r.get("web"); vm.Status.NodeName != "" || vm.Status.IP != "" {
		t.Errorf("it is bound: %+v", vm.Status)
	}
	if left := r.claimsOf(t.Context(), n); len(left) > 0 {
		t.Errorf("left are %v", left)
	}
	r.reconcile("web")
	r.expectCondition("web", v1alpha1.ConditionScheduled,
		`False InvalidSpec: spec.networkRef names ImpNetwork "lan", which does not exist: create ImpNetwork `+r.ns+"/lan")
	// It goes on as soon as there is one.
	r.lan("10.44.0.0/24")
	r.reconcile("web")
	r.expectCondition("web", v1alpha1.ConditionScheduled, "True Placed: placed on "+r.name("a"))
}

func TestAWriteHeldBackDoesNotTouchAnotherNetworkOfTheSameName(t *testing.T) {
	for name, is := range map[string]func(*http.Request) bool{"the finalizer": onObject, "the status": onStatus} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.node("a", overlay(1))
			first := r.makeNetwork("lan", "10.44.0.0/24")
			var second *v1alpha1.ImpNetwork
			r.writes.fail = func(req *http.Request) (*http.Response, error) {
				if second != nil || !is(req) || !strings.Contains(req.URL.Path, "/impnetworks/") {
					return nil, nil
				}
				gone := r.getNetwork("lan")
				gone.Finalizers = nil
				must(t, r.admin.Update(t.Context(), gone))
				must(t, client.IgnoreNotFound(r.admin.Delete(t.Context(), gone)))
				second = r.makeNetwork("lan", "10.45.0.0/24")
				return nil, nil
			}
			r.settle("lan")
			if second == nil {
				t.Fatal("the write was not made")
			}
			if diff := cmp.Diff(second, r.getNetwork("lan")); diff != "" {
				t.Errorf("the second network was changed: %s", diff)
			}
			r.writes.fail = nil
			r.settle("lan")
			r.expectNetwork("lan", v1alpha1.ConditionReady, "True Usable: VMs can be given addresses")
			for _, lease := range r.leasesOf(t.Context(), first) {
				_, err := r.vnis.Reconcile(t.Context(), requestOf(v1alpha1.SystemNamespace, lease.Name))
				must(t, err)
			}
			if left := r.leasesOf(t.Context(), first); len(left) > 0 {
				t.Errorf("the first network's VNI is still claimed: %v", left)
			}
		})
	}
}

func TestWhatGuestsMayNotReachIsWrittenOnceAndWhenItChanges(t *testing.T) {
	r := newRig(t)
	key := client.ObjectKey{Namespace: v1alpha1.SystemNamespace, Name: v1alpha1.ClusterRangesName}
	_ = r.admin.Delete(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name}})
	r.node("a", overlay(1), func(n *corev1.Node, i *v1alpha1.ImpNode) {
		n.Spec.PodCIDRs, n.Spec.PodCIDR = []string{"10.7.0.0/24", "fd00:7::/64"}, "10.7.0.0/24"
		i.Status.Network.Addresses = append(i.Status.Network.Addresses, "172.20.0.9", "fd00::9")
	})
	r.ranges.Survey.ClusterCIDRs = []netip.Prefix{netip.MustParsePrefix("10.42.0.0/16")}
	look := func() {
		t.Helper()
		_, err := r.ranges.Reconcile(t.Context(), requestOf(key.Namespace, key.Name))
		must(t, err)
	}
	look()
	look()
	r.expect("POST configmaps")
	r.node("b", overlay(2))
	look()
	look()
	r.expect("PUT configmaps/" + key.Name)
	written := &corev1.ConfigMap{}
	must(t, r.admin.Get(t.Context(), key, written))
	got, err := clusterranges.Decode(written.Data)
	must(t, err)
	prefixes := func(from ...string) (out []netip.Prefix) {
		for _, s := range from {
			out = append(out, netip.MustParsePrefix(s))
		}
		return out
	}
	want := clusterranges.Ranges{
		Nodes: prefixes("172.20.0.9/32", "192.0.2.1/32", "192.0.2.2/32"), Pods: prefixes("10.7.0.0/24", "10.42.0.0/16"),
		Services: prefixes("10.96.0.0/24"),
	}
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
		t.Errorf("ranges: %s", diff)
	}
}
