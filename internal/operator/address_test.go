package operator_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/network"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

func TestAVMWithANetworkIsPlacedWithThreeWrites(t *testing.T) {
	r := networked(t, "10.44.0.0/24")
	node := r.name("a")
	r.vm("web", inLAN)
	r.reconcile("web")
	r.expect("PATCH impvms/web", "POST impaddresses", "PATCH impvms/web/status")
	r.expectEvents("web", "Normal Placed")
	vm, n := r.get("web"), r.getNetwork("lan")
	want := []v1alpha1.VMAddress{{
		Address: vm.Status.IP, Prefix: 24, MAC: network.GuestMAC(string(vm.UID), 0).String(), Network: "lan", NetworkUID: n.UID,
	}}
	if diff := cmp.Diff(want, vm.Status.Addresses); diff != "" || vm.Status.NodeName != node {
		t.Errorf("on %q with %s", vm.Status.NodeName, diff)
	}
	claim := r.claim(vm.Status.IP)
	if claim == nil {
		t.Fatal("there is no claim")
	}
	wantSpec := v1alpha1.ImpAddressSpec{
		Network: v1alpha1.AddressNetwork{Namespace: r.ns, Name: "lan", UID: n.UID},
		VM:      v1alpha1.AddressVM{Namespace: r.ns, Name: "web", UID: vm.UID},
		Address: vm.Status.IP, MAC: want[0].MAC,
	}
	wantStatus := v1alpha1.ImpAddressStatus{
		State: v1alpha1.AddressBound, Since: claim.Status.Since, Node: node, Assignment: 1, VTEP: "192.0.2.1",
	}
	if diff := cmp.Diff(wantSpec, claim.Spec) + cmp.Diff(wantStatus, claim.Status); diff != "" || claim.Status.Since.IsZero() {
		t.Errorf("the claim: %s", diff)
	}
	r.reconcile("web")
	r.report("web", running)
	r.reconcile("web")
	r.auditAll()
	r.expect()
}

func TestAVMWithoutANetworkHasNoAddress(t *testing.T) {
	r := networked(t, "10.44.0.0/24")
	r.vm("web")
	r.reconcile("web")
	r.expect("PATCH impvms/web", "PATCH impvms/web/status")
	r.expectClaims()
}

func TestAVMWhoseNetworkIsMissingIsToldWhatToCreateAndGoesOn(t *testing.T) {
	r := newRig(t)
	node := r.node("a", overlay(1))
	r.class("small")
	r.vm("web", inLAN)
	r.reconcile("web")
	r.reconcile("web")
	r.expect("PATCH impvms/web/status")
	r.expectEvents("web", "Warning InvalidSpec")
	message := `spec.networkRef names ImpNetwork "lan", which does not exist: create ImpNetwork ` + r.ns + "/lan"
	r.expectCondition("web", v1alpha1.ConditionReady, "False InvalidSpec: "+message)
	r.makeNetwork("lan", "10.44.0.0/24")
	r.reconcile("web")
	r.expectCondition("web", v1alpha1.ConditionScheduled, "False Pending: waiting for network "+r.ns+"/lan to be set up")
	r.expectEvents("web", "Warning InvalidSpec") // a VM that was made together with its network has no trouble
	r.clock.SetTime(r.getNetwork("lan").CreationTimestamp.Add(3 * time.Second))
	r.reconcile("web")
	r.expectCondition("web", v1alpha1.ConditionScheduled, "False NetworkSetupFailed: network "+r.ns+"/lan is not ready yet")
	r.expectEvents("web", "Warning InvalidSpec", "Warning NetworkSetupFailed")
	r.settle("lan")
	r.reconcile("web")
	r.expectCondition("web", v1alpha1.ConditionScheduled, "True Placed: placed on "+node)
}

func TestAnExhaustedPoolIsToldWithItsCountsAndAFreedAddressIsTaken(t *testing.T) {
	r := networked(t, "10.44.0.0/29") // five guests
	r.setBudgetOf(r.name("a"), v1alpha1.Budget{VCPU: 20, MemoryMiB: 20000, DiskGiB: 200})
	for i := range 5 {
		r.vm(fmt.Sprintf("vm-%d", i), inLAN)
		r.reconcile(fmt.Sprintf("vm-%d", i))
	}
	if got := len(r.claims()); got != 5 {
		t.Fatalf("claims are %q", r.claims())
	}
	r.vm("late", inLAN)
	r.writes.take()
	r.reconcile("late")
	r.reconcile("late")
	r.expect("PATCH impvms/late/status") // no finalizer for who has nothing yet
	r.expectEvents("late", "Warning NetworkSetupFailed")
	exhausted := "False NetworkSetupFailed: pool exhausted: 5 of 5 addresses of network " + r.ns + "/lan are taken "
	r.expectCondition("late", v1alpha1.ConditionReady, exhausted+"(5 used, 0 held, 0 quarantined)")

	freed := r.ip("vm-3")
	r.leave("vm-3")
	r.clock.Step(31 * time.Second)
	r.beat(r.name("a"))
	r.reconcile("late")
	r.expectCondition("late", v1alpha1.ConditionScheduled, exhausted+"(4 used, 0 held, 1 quarantined)")
	if after := r.auditAll(); after < 25*time.Second || after > 30*time.Second {
		t.Errorf("the quarantine is looked at again after %v", after)
	}
	r.clock.Step(30 * time.Second)
	r.beat(r.name("a"))
	r.auditAll()
	r.writes.take()
	r.reconcile("late")
	r.expect("PATCH impvms/late", "POST impaddresses", "PATCH impvms/late/status")
	if got := r.ip("late"); got != freed {
		t.Errorf("it has %q, and %s was freed", got, freed)
	}
	r.expectEvents("late", "Warning NetworkSetupFailed", "Warning NetworkSetupFailed", "Normal Placed", "Normal Recovered")
}

func (r *rig) setBudgetOf(node string, budget v1alpha1.Budget) {
	r.t.Helper()
	imp := &v1alpha1.ImpNode{}
	must(r.t, r.admin.Get(r.t.Context(), keyOf(node), imp))
	imp.Status.Budget = budget
	must(r.t, r.admin.Status().Update(r.t.Context(), imp))
}

func TestAnAddressOfOnesOwnIsHonouredOrRefusedWithAReason(t *testing.T) {
	r := networked(t, "10.44.0.0/24")
	r.vm("mine", static("10.44.0.10"))
	r.reconcile("mine")
	r.expectClaims("10.44.0.10 Bound mine a")
	for name, test := range map[string]struct{ address, want string }{
		"outside": {"10.4.0.10", "InvalidSpec: spec.address 10.4.0.10 is outside subnet 10.44.0.0/24: name another, or leave it out for a free one"},
		"itself":  {"10.44.0.0", "InvalidSpec: spec.address 10.44.0.0 is the address of subnet 10.44.0.0/24 itself: name another, or leave it out for a free one"},
		"every":   {"10.44.0.255", "InvalidSpec: spec.address 10.44.0.255 is the broadcast address of subnet 10.44.0.0/24: name another, or leave it out for a free one"},
		"gateway": {"10.44.0.1", "InvalidSpec: spec.address 10.44.0.1 is the gateway of subnet 10.44.0.0/24: name another, or leave it out for a free one"},
		"taken":   {"10.44.0.10", "NetworkSetupFailed: address in use: 10.44.0.10 of network " + r.ns + "/lan: VM " + r.ns + "/mine has it"},
	} {
		r.vm(name, static(test.address))
		r.writes.take()
		r.reconcile(name)
		r.expect("PATCH impvms/" + name + "/status")
		r.expectCondition(name, v1alpha1.ConditionScheduled, "False "+test.want)
	}
	r.leave("mine")
	since := r.claim("10.44.0.10").Status.Since.UTC().Format(time.RFC3339)
	r.clock.Step(31 * time.Second)
	r.beat(r.name("a"))
	r.reconcile("taken")
	r.expectCondition("taken", v1alpha1.ConditionScheduled, "False NetworkSetupFailed: address in use: 10.44.0.10 of network "+r.ns+
		"/lan: VM "+r.ns+"/mine had it until "+since+", and it is not given out again at once")
	r.clock.Step(30 * time.Second)
	r.beat(r.name("a"))
	r.auditAll()
	r.reconcile("taken")
	r.expectClaims("10.44.0.10 Bound taken a")
}

func TestANodeThatOthersDoNotReachTakesNoVMWithANetwork(t *testing.T) {
	r := networked(t, "10.44.0.0/24")
	r.setVTEP(r.name("a"), "")
	r.vm("web", inLAN)
	r.vm("alone")
	r.writes.take()
	r.reconcile("web")
	r.expect("PATCH impvms/web/status")
	r.expectCondition("web", v1alpha1.ConditionScheduled,
		"False NoNodeFits: "+r.name("a")+": without an address in the overlay, which spec.networkRef needs")
	r.expectClaims()
	r.reconcile("alone")
	r.expectCondition("alone", v1alpha1.ConditionScheduled, "True Placed: placed on "+r.name("a"))
	r.setVTEP(r.name("a"), "192.0.2.1")
	r.reconcile("web")
	r.expectCondition("web", v1alpha1.ConditionScheduled, "True Placed: placed on "+r.name("a"))
}

func (r *rig) setVTEP(node, address string) {
	r.t.Helper()
	imp := &v1alpha1.ImpNode{}
	must(r.t, r.admin.Get(r.t.Context(), keyOf(node), imp))
	imp.Status.Network.Address = address
	must(r.t, r.admin.Status().Update(r.t.Context(), imp))
}

func TestAClaimFollowsItsNodesAddress(t *testing.T) {
	r := networked(t, "10.44.0.0/24")
	r.vm("web", inLAN)
	r.reconcile("web")
	r.writes.take()
	r.setVTEP(r.name("a"), "") // the agent is starting, perhaps: where the guest was reached it still is
	r.reconcile("web")
	r.expect()
	r.setVTEP(r.name("a"), "192.0.2.77")
	r.reconcile("web")
	r.reconcile("web")
	name := r.claim(r.ip("web")).Name
	r.expect("PATCH impaddresses/" + name)
	if got := r.claim(r.ip("web")).Status.VTEP; got != "192.0.2.77" {
		t.Errorf("it leads to %s", got)
	}
}

func TestAVMKeepsItsAddressWhenItMovesAndWhileItHasNoNode(t *testing.T) {
	r := networked(t, "10.44.0.0/24")
	node := r.name("a")
	r.vm("web", inLAN, persistent)
	r.reconcile("web")
	r.report("web", running)
	ip := r.ip("web")
	proofs()["its Node object is gone"](r, node)
	r.silent()
	r.reconcile("web")
	r.expectClaims(ip + " Bound web")
	if claim := r.claim(ip); claim.Status.VTEP != "" || r.ip("web") != ip {
		t.Errorf("the claim leads to %q; the VM has %q", claim.Status.VTEP, r.ip("web"))
	}
	r.node("b", overlay(2))
	r.writes.take()
	r.reconcile("web")
	r.expect("PATCH impaddresses/"+r.claim(ip).Name, "PATCH impvms/web/status")
	r.expectClaims(ip + " Bound web b")
	if s := r.claim(ip).Status; s.Assignment != 2 || s.VTEP != "192.0.2.2" || r.ip("web") != ip {
		t.Errorf("the claim is %+v; the VM has %q", s, r.ip("web"))
	}
}

func TestAVMThatIsGivenBackAndPlacedElsewhereKeepsItsAddressByOneMoreWrite(t *testing.T) {
	r := networked(t, "10.44.0.0/24")
	r.node("b", overlay(2))
	r.vm("web", inLAN)
	r.reconcile("web")
	ip := r.ip("web")
	r.report("web", noRoom(1))
	r.writes.take()
	r.reconcile("web")
	r.expect("PATCH impaddresses/"+r.claim(ip).Name, "PATCH impvms/web/status")
	r.expectClaims(ip + " Bound web b")
}

func TestAnAddressIsFreedWhenItsVMHasFinished(t *testing.T) {
	r := networked(t, "10.44.0.0/24")
	r.vm("once", inLAN, func(vm *v1alpha1.ImpVM) { vm.Spec.TTLSecondsAfterFinished = ptr.To[int32](30) })
	r.reconcile("once")
	ip := r.ip("once")
	r.report("once", running)
	r.report("once", succeeded)
	r.writes.take()
	r.reconcile("once")
	r.expect("PATCH impaddresses/"+r.claim(ip).Name, "PATCH impvms/once/status")
	r.expectClaims(ip + " Quarantined once")
	vm := r.get("once")
	if vm.Status.IP != "" || vm.Status.Addresses != nil || vm.Status.NodeName == "" || vm.Status.Phase != v1alpha1.PhaseSucceeded {
		t.Errorf("status is %+v", vm.Status)
	}
	r.reconcile("once")
	r.expect()
	r.clock.Step(61 * time.Second)
	r.beat(r.name("a"))
	r.auditAll()
	r.expect("DELETE impaddresses/" + v1alpha1.AddressName(r.getNetwork("lan").UID, ip))
	r.reconcile("once")
	r.expect("DELETE impvms/once")
}

func TestAOneShotThatIsLostWithItsNodeFreesItsAddress(t *testing.T) {
	r := networked(t, "10.44.0.0/24")
	r.vm("once", inLAN)
	r.reconcile("once")
	ip := r.ip("once")
	r.report("once", running)
	proofs()["it carries the out-of-service taint"](r, r.name("a"))
	r.silent()
	r.watchNode(r.name("a"))
	r.reconcile("once")
	r.expectClaims(ip + " Quarantined once")
	r.expectCondition("once", v1alpha1.ConditionReady, "False NodeLost: lost with "+r.name("a")+": it carries the out-of-service taint")
	if r.ip("once") != "" {
		t.Errorf("it has %s", r.ip("once"))
	}
}

func TestADeletedVMsAddressIsSettledBeforeTheVMIsForgotten(t *testing.T) {
	r := networked(t, "10.44.0.0/24")
	r.vm("web", inLAN)
	r.reconcile("web")
	ip := r.ip("web")
	name := r.claim(ip).Name
	r.report("web", running)
	r.delete("web")
	r.writes.take()
	r.reconcile("web")
	r.expect("PATCH impvms/web/status") // the order to release it; the address is still its own
	r.expectClaims(ip + " Bound web a")
	r.report("web", func(s *v1alpha1.ImpVMStatus) { s.ReleasedAssignment = 1 })
	r.reconcile("web")
	r.expect("PATCH impaddresses/"+name, "PATCH impvms/web")
	r.expectClaims(ip + " Quarantined web")
	r.auditAll()
	r.clock.Step(59 * time.Second)
	r.auditAll()
	r.expect()
	r.clock.Step(2 * time.Second)
	r.auditAll()
	r.expect("DELETE impaddresses/" + name)
}

func TestADeletedVMsAddressIsHeldForASilentNodeUntilItOrProofSpeaks(t *testing.T) {
	speaks := map[string]struct {
		do    func(r *rig, node string)
		frees bool
	}{
		"the node says that nothing is left": {func(r *rig, _ string) {
			claim := r.claimsOf(r.t.Context(), r.getNetwork("lan"))[0]
			claim.Status.ReleasedAssignment = claim.Status.Assignment
			must(r.t, r.admin.Update(r.t.Context(), &claim))
		}, true},
		"the node speaks of an older assignment": {func(r *rig, _ string) {
			claim := r.claimsOf(r.t.Context(), r.getNetwork("lan"))[0]
			claim.Status.ReleasedAssignment = claim.Status.Assignment - 1
			must(r.t, r.admin.Update(r.t.Context(), &claim))
		}, false},
		"its Node object is gone":             {proofs()["its Node object is gone"], true},
		"it carries the out-of-service taint": {proofs()["it carries the out-of-service taint"], true},
		// It comes back with the VM's record: the held claim is its order to remove it.
		"its host was restarted":   {proofs()["its host was restarted"], false},
		"the node is merely heard": {func(r *rig, node string) { r.beat(node) }, false},
	}
	for name, test := range speaks {
		t.Run(name, func(t *testing.T) {
			r := networked(t, "10.44.0.0/24")
			node := r.name("a")
			r.vm("web", inLAN, persistent)
			r.reconcile("web")
			ip := r.ip("web")
			r.report("web", running)
			r.delete("web")
			r.silent()
			r.clock.Step(6 * time.Minute)
			r.writes.take()
			r.reconcile("web")
			r.expect("PATCH impaddresses/"+r.claim(ip).Name, "PATCH impvms/web")
			r.expectClaims(ip + " Held web a")
			r.clock.Step(time.Hour)
			r.auditAll()
			r.expectClaims(ip + " Held web a")
			test.do(r, node)
			again := r.auditAll()
			if !test.frees {
				r.expectClaims(ip + " Held web a")
				if r.view.Heartbeats.Alive(node) && (again < time.Second || again > 41*time.Second) {
					t.Errorf("proof of a node that is heard is looked for again after %v", again)
				}
				return
			}
			r.expectClaims(ip + " Quarantined web")
			r.clock.Step(61 * time.Second)
			r.auditAll()
			r.expectClaims()
		})
	}
}

func TestTheAuditSettlesWhatIsLeftBehind(t *testing.T) {
	tests := map[string]struct {
		leave func(r *rig, vm *v1alpha1.ImpVM)
		want  string
	}{
		"a claim whose VM lost its finalizer while it was bound may still run": {func(r *rig, vm *v1alpha1.ImpVM) { r.vanish(vm.Name) }, "Held web a"},
		"of one that had no node nothing runs": {func(r *rig, vm *v1alpha1.ImpVM) {
			claim := r.claim(vm.Status.IP)
			claim.Status.Node, claim.Status.VTEP = "", ""
			must(r.t, r.admin.Update(r.t.Context(), claim))
			r.vanish(vm.Name)
		}, "Quarantined web"},
		"of one on a node that is proved gone nothing runs": {func(r *rig, vm *v1alpha1.ImpVM) {
			proofs()["its Node object is gone"](r, vm.Status.NodeName)
			r.silent()
			r.vanish(vm.Name)
		}, "Quarantined web"},
		"another VM of its name is not the VM": {func(r *rig, vm *v1alpha1.ImpVM) {
			r.vanish(vm.Name)
			r.vm(vm.Name, inLAN)
		}, "Held web a"},
		"a VM that is there keeps its claim": {func(*rig, *v1alpha1.ImpVM) {}, "Bound web a"},
		"a VM that is being deleted and has its node keeps it": {func(r *rig, vm *v1alpha1.ImpVM) {
			r.delete(vm.Name)
		}, "Bound web a"},
		"a finished VM keeps none": {func(r *rig, vm *v1alpha1.ImpVM) { r.report(vm.Name, succeeded) }, "Quarantined web"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			r := networked(t, "10.44.0.0/24")
			r.vm("web", inLAN)
			r.reconcile("web")
			vm := r.get("web")
			test.leave(r, vm)
			r.auditAll()
			r.expectClaims(vm.Status.IP + " " + test.want)
		})
	}
}

func TestASecondClaimOfOneVMIsFreed(t *testing.T) {
	r := networked(t, "10.44.0.0/24")
	r.vm("web", inLAN)
	r.reconcile("web")
	second := r.claim(r.ip("web"))
	second.ObjectMeta = metav1.ObjectMeta{Name: v1alpha1.AddressName(second.Spec.Network.UID, "10.44.0.250")}
	second.Spec.Address = "10.44.0.250"
	must(t, r.admin.Create(t.Context(), second))
	r.auditAll()
	want := []string{r.ip("web") + " Bound web a", "10.44.0.250 Quarantined web"}
	slices.Sort(want)
	r.expectClaims(want...)
	r.reconcile("web")
	r.expectClaims(want...)
}

func TestAClaimThatSomebodyDeletedOrChangedIsMadeAgain(t *testing.T) {
	r := networked(t, "10.44.0.0/24")
	r.vm("web", inLAN)
	r.reconcile("web")
	ip := r.ip("web")
	before := r.claim(ip)
	must(t, r.admin.Delete(t.Context(), r.claim(ip)))
	r.writes.take()
	r.reconcile("web")
	r.expect("POST impaddresses")
	after := r.claim(ip)
	before.ObjectMeta, before.Status.Since = after.ObjectMeta, after.Status.Since
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("it is another: %s", diff)
	}
	after.Status.State = v1alpha1.AddressQuarantined
	must(t, r.admin.Update(t.Context(), after))
	r.clock.Step(2 * time.Minute)
	r.auditAll() // not freed under a VM that has it
	r.expectClaims(ip + " Quarantined web a")
	r.reconcile("web")
	r.expectClaims(ip + " Bound web a")
}

func TestTwoVMsWithOneAddressAreTold(t *testing.T) {
	r := networked(t, "10.44.0.0/24")
	r.vm("web", inLAN)
	r.reconcile("web")
	ip := r.ip("web")
	claim := r.claim(ip)
	must(t, r.admin.Delete(t.Context(), claim)) // an admin's doing
	r.place.Addresses.Gone(claim)               // as the informer tells
	r.vm("thief", static(ip))
	r.reconcile("thief")
	r.expectClaims(ip + " Bound thief a")
	r.reconcile("web")
	r.reconcile("web")
	r.expectEvents("web", "Normal Placed", "Warning AddressInUse")
	r.expectClaims(ip + " Bound thief a")
	all := r.events.All()
	if got, want := all[len(all)-1].Message, "address "+ip+" of network "+r.ns+"/lan is claimed by VM "+r.ns+"/thief as well: one of the two has to be deleted"; got != want {
		t.Errorf("the event says %q", got)
	}
}

func TestAVMThatIsDeletedAndMadeAgainUnderItsNameNeedNotWait(t *testing.T) {
	for name, option := range map[string]func(*v1alpha1.ImpVM){
		"whatever address it gets": inLAN, "with an address of its own": static("10.44.0.2"),
	} {
		t.Run(name, func(t *testing.T) {
			r := networked(t, "10.44.0.0/30") // one guest
			r.vm("web", option)
			r.reconcile("web")
			first := r.get("web")
			r.leave("web")
			r.expectClaims("10.44.0.2 Quarantined web")
			r.vm("another", option)
			r.reconcile("another")
			if told := told(r.get("another"), v1alpha1.ConditionScheduled); !strings.HasPrefix(told, "False NetworkSetupFailed") {
				t.Errorf("another VM is told %s", told)
			}
			r.vm("web", option)
			r.writes.take()
			r.reconcile("web")
			claim := r.claim("10.44.0.2")
			r.expect("PATCH impvms/web", "DELETE impaddresses/"+claim.Name, "POST impaddresses", "PATCH impvms/web/status")
			second := r.get("web")
			if second.Status.IP != "10.44.0.2" || claim.Spec.VM.UID != second.UID || claim.Spec.MAC == first.Status.Addresses[0].MAC {
				t.Errorf("it has %q; the claim is %+v", second.Status.IP, claim.Spec)
			}
		})
	}
}

func TestAVMMadeAgainUnderItsNameGetsAnotherAddressWhereThereIsOne(t *testing.T) {
	r := networked(t, "10.44.0.0/24")
	r.vm("web", inLAN)
	r.reconcile("web")
	first := r.ip("web")
	r.leave("web")
	r.vm("web", inLAN)
	r.reconcile("web")
	if second := r.ip("web"); second == "" || second == first {
		t.Errorf("it has %q after %q", second, first)
	}
}

func TestAClaimOfAnInterruptedPlacementIsFoundAgain(t *testing.T) {
	r := networked(t, "10.44.0.0/24")
	r.vm("web", inLAN)
	r.writes.fail = func(req *http.Request) (*http.Response, error) {
		if onStatus(req) {
			return nil, errors.New("killed")
		}
		return nil, nil
	}
	if _, err := r.place.Reconcile(t.Context(), requestOf(r.ns, "web")); err == nil {
		t.Fatal("it was bound")
	}
	r.writes.fail = nil
	claimed := r.claims()
	r.restart(r.place.Client.(*inNamespace).Client)
	r.auditAll()
	r.writes.take()
	r.reconcile("web")
	r.expect("PATCH impvms/web/status")
	r.expectClaims(claimed...)
	if len(claimed) != 1 || !strings.HasPrefix(claimed[0], r.ip("web")+" Bound web") {
		t.Errorf("claimed was %q, and it has %s", claimed, r.ip("web"))
	}
}

func TestAnInterruptedPlacementThatIsNotWantedAnyMoreLeavesNothing(t *testing.T) {
	r := networked(t, "10.44.0.0/24")
	r.vm("web", inLAN)
	r.writes.fail = func(req *http.Request) (*http.Response, error) {
		if onStatus(req) {
			return nil, errors.New("killed")
		}
		return nil, nil
	}
	_, _ = r.place.Reconcile(t.Context(), requestOf(r.ns, "web"))
	r.writes.fail = nil
	r.restart(r.place.Client.(*inNamespace).Client)
	r.delete("web")
	r.reconcile("web")
	if claims := r.claims(); r.get("web") != nil || len(claims) != 1 || !strings.Contains(claims[0], "Quarantined") {
		t.Errorf("the VM is %v, claims are %q", r.get("web"), claims)
	}
}

// The answer to a claim is lost: it may have been made or not.
func TestAClaimWhoseAnswerIsLostIsNotMadeForASecondAddress(t *testing.T) {
	for name, made := range map[string]bool{"it was made": true, "it was not made": false} {
		t.Run(name, func(t *testing.T) {
			r := networked(t, "10.44.0.0/24")
			r.vm("web", inLAN)
			lost := errors.New("connection reset")
			r.writes.fail = func(req *http.Request) (*http.Response, error) {
				if req.Method != http.MethodPost {
					return nil, nil
				}
				r.writes.fail = nil
				if made {
					answer, err := r.passOn(req)
					if err != nil {
						return nil, err
					}
					_ = answer.Body.Close()
				}
				return nil, lost
			}
			if _, err := r.place.Reconcile(t.Context(), requestOf(r.ns, "web")); !errors.Is(err, lost) {
				t.Fatalf("got %v", err)
			}
			r.reconcile("web")
			r.expectClaims(r.ip("web") + " Bound web a")
		})
	}
}

// Two operators, neither of which sees what the other writes.
func TestTwoOperatorsThatDoNotSeeEachOthersWritesGiveNoAddressTwice(t *testing.T) {
	r := networked(t, "10.44.0.0/29")
	r.setBudgetOf(r.name("a"), v1alpha1.Budget{VCPU: 20, MemoryMiB: 20000, DiskGiB: 200})
	for i := range 6 {
		r.vm(fmt.Sprintf("vm-%d", i), inLAN)
	}
	api := r.place.Client.(*inNamespace).Client
	behind := r.frozen()
	r.readFrom(behind)
	first := r.place
	r.restart(api)
	r.readFrom(behind)
	for i := range 6 {
		if i%2 == 0 {
			first, r.place = r.place, first
		}
		r.reconcile(fmt.Sprintf("vm-%d", i))
	}
	given := map[string]string{}
	waiting := 0
	for i := range 6 {
		name := fmt.Sprintf("vm-%d", i)
		ip := r.ip(name)
		if ip == "" {
			waiting++
			continue
		}
		if given[ip] != "" {
			t.Errorf("%s and %s have %s", given[ip], name, ip)
		}
		given[ip] = name
	}
	if claims := r.claims(); len(given) != 5 || len(claims) != 5 || waiting != 1 {
		t.Errorf("%d have an address, %d wait; claims are %q", len(given), waiting, claims)
	}
}

// A claim of a predecessor that arrives late, when its successor has made another for the VM.
func TestOfTwoClaimsTheOneInTheVMsStatusStays(t *testing.T) {
	r := networked(t, "10.44.0.0/24")
	r.vm("web", inLAN)
	behind := r.frozen()
	api := r.place.Client.(*inNamespace).Client
	late := r.place
	r.restart(api)
	var held *http.Request
	r.writes.fail = func(req *http.Request) (*http.Response, error) {
		if req.Method != http.MethodPost {
			return nil, nil
		}
		held, r.writes.fail = req.Clone(t.Context()), nil
		return nil, errors.New("no answer")
	}
	late.Client, late.Addresses.Client = behind, behind
	_, _ = late.Reconcile(t.Context(), requestOf(r.ns, "web"))
	if held == nil {
		t.Fatal("no claim was made")
	}
	taken := r.vm("taker", inLAN) // so that the successor finds another place
	body, err := held.GetBody()
	must(t, err)
	claim := &v1alpha1.ImpAddress{}
	must(t, json.NewDecoder(body).Decode(claim))
	claim.Spec.VM = v1alpha1.AddressVM{Namespace: r.ns, Name: taken.Name, UID: taken.UID}
	must(t, r.admin.Create(t.Context(), claim))
	r.reconcile("web")
	ip := r.ip("web")
	must(t, r.admin.Delete(t.Context(), claim))
	answer, err := r.passOn(held)
	must(t, err)
	must(t, answer.Body.Close())
	want := []string{ip + " Bound web a", claim.Spec.Address + " Bound web a"}
	slices.Sort(want)
	r.expectClaims(want...)
	r.auditAll()
	want = []string{ip + " Bound web a", claim.Spec.Address + " Quarantined web"}
	slices.Sort(want)
	r.expectClaims(want...)
}

// Each write about a claim is held back while somebody else changes it.
func TestAWriteHeldBackDoesNotTouchAClaimThatHasChanged(t *testing.T) {
	tests := map[string]struct {
		is      func(*http.Request) bool
		prepare func(r *rig)
		write   func(r *rig)
	}{
		"letting go": {
			is: onObject,
			prepare: func(r *rig) {
				r.delete("web")
				r.report("web", func(s *v1alpha1.ImpVMStatus) { s.ReleasedAssignment = 1 })
			},
			write: func(r *rig) { r.reconcile("web") },
		},
		"the audit's verdict": {is: onObject, prepare: func(r *rig) { r.vanish("web") }, write: func(r *rig) { r.auditAll() }},
		"the end of a quarantine": {
			is: func(req *http.Request) bool { return req.Method == http.MethodDelete },
			prepare: func(r *rig) {
				r.leave("web")
				r.clock.Step(2 * time.Minute)
			},
			write: func(r *rig) { r.auditAll() },
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			r := networked(t, "10.44.0.0/24")
			r.vm("web", inLAN)
			r.reconcile("web")
			ip := r.ip("web")
			test.prepare(r)
			changed := false
			r.writes.fail = func(req *http.Request) (*http.Response, error) {
				if !changed && test.is(req) && strings.Contains(req.URL.Path, "/impaddresses/") {
					changed = true
					claim := r.claim(ip)
					claim.Labels = map[string]string{"changed": "meanwhile"}
					must(t, r.admin.Update(t.Context(), claim))
				}
				return nil, nil
			}
			before := r.claim(ip).Status
			test.write(r)
			if !changed {
				t.Fatal("the write was not made")
			}
			if claim := r.claim(ip); claim == nil || claim.Status != before {
				t.Errorf("the claim is %+v", claim)
			}
			test.write(r)
			if claim := r.claim(ip); claim != nil && claim.Status == before {
				t.Error("it is not tried again")
			}
		})
	}
}
