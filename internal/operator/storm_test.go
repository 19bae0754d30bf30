package operator_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/operator/vmstate"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
)

func TestAnOperatorThatDiesBetweenFinalizerAndClaimIsFollowedByOneThatClaims(t *testing.T) {
	r := newRig(t)
	r.node("a")
	r.class("small")
	r.vm("web")
	r.writes.fail = func(req *http.Request) (*http.Response, error) {
		if onStatus(req) {
			return nil, errors.New("killed")
		}
		return nil, nil
	}
	if _, err := r.place.Reconcile(t.Context(), requestOf(r.ns, "web")); err == nil {
		t.Fatal("the claim was made")
	}
	r.writes.fail = nil
	r.restart(r.place.Client.(*inNamespace).Client)
	r.writes.take()
	r.reconcile("web")
	r.expect("PATCH impvms/web/status")
	if got := r.get("web").Status.Assignment; got != 1 {
		t.Errorf("assignment %d", got)
	}
}

// storm drives the operator through arbitrary events and checks after each what must always hold.
type storm struct {
	*rig
	random *rand.Rand
	api    client.Client
	nodes  []string
	// before is each VM as it was at the last look; started those whose workload was started, by UID.
	before  map[types.UID]*v1alpha1.ImpVM
	started map[types.UID]int64
	// left are the addresses of VMs that were removed without their nodes' word, by VM: what runs there still uses them.
	left map[string]types.UID
	// cache is behind by some steps, across restarts too, but never goes back.
	cache *frozen
}

// stormSeeds times the storm takes another course; each takes some seconds.
const stormSeeds = 4

func TestWhateverHappensNoNodeIsOvercommittedNoOneShotRunsTwiceAndNoAddressIsShared(t *testing.T) {
	for seed := range uint64(stormSeeds) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			s := &storm{
				rig: newRig(t), random: rand.New(rand.NewPCG(seed, 1)),
				before: map[types.UID]*v1alpha1.ImpVM{}, started: map[types.UID]int64{}, left: map[string]types.UID{},
			}
			s.nodes = []string{s.node("a", overlay(1)), s.node("b", overlay(2))}
			s.class("small", func(c *v1alpha1.ImpVMClass) { c.Spec.VCPU = 2 }) // two on each
			s.lan("10.44.0.0/29")                                              // five addresses, quarantined ones among them
			s.cache, s.api = s.frozen(), s.place.Client.(*inNamespace).Client
			s.behind()
			for range 150 {
				s.happen()
				s.check()
			}
			s.calm()
		})
	}
}

// behind has everything read from the cache.
func (s *storm) behind() {
	s.readFrom(s.cache)
	s.audit.Client, s.nets.Client = s.cache, s.cache
}

// any VM by name; there may be none of it.
func (s *storm) any() string { return fmt.Sprintf("vm-%d", s.random.IntN(7)) }

func (s *storm) happen() {
	s.clock.Step(time.Duration(s.random.IntN(5000)) * time.Millisecond)
	if s.random.IntN(3) == 0 {
		s.thaw(s.cache)
	}
	name := s.any()
	switch vm := s.get(name); s.random.IntN(15) {
	case 0, 1, 2:
		if vm == nil {
			lifecycle := v1alpha1.LifecycleEphemeral
			if s.random.IntN(2) == 0 {
				lifecycle = v1alpha1.LifecyclePersistent
			}
			s.vm(name, func(vm *v1alpha1.ImpVM) {
				vm.Spec.Lifecycle = lifecycle
				switch s.random.IntN(4) {
				case 0:
				case 1:
					static(fmt.Sprintf("10.44.0.%d", 2+s.random.IntN(5)))(vm)
				default:
					inLAN(vm)
				}
			})
		}
	case 3:
		if vm != nil {
			must(s.t, client.IgnoreNotFound(s.admin.Delete(s.t.Context(), vm)))
		}
	case 4, 5:
		s.agent(vm)
	case 6:
		s.beat(s.nodes[s.random.IntN(len(s.nodes))])
	case 7:
		s.watchNode(s.nodes[s.random.IntN(len(s.nodes))])
		s.watchNode("")
	case 8:
		s.restart(s.api)
		s.behind()
	case 9: // the answer of the next write is lost
		s.writes.fail = func(req *http.Request) (*http.Response, error) {
			s.writes.fail = nil
			if answer, err := s.passOn(req); err == nil {
				_ = answer.Body.Close()
			}
			return nil, errors.New("connection reset")
		}
		_, _ = s.place.Reconcile(s.t.Context(), requestOf(s.ns, name))
		s.writes.fail = nil
	case 10, 11:
		s.auditAll()
		s.settle("lan")
	case 12:
		s.release()
		if vm != nil && s.random.IntN(4) == 0 { // an admin does not wait
			if vm.Status.NodeName != "" && !vmstate.Released(vm) && !vmstate.Finished(vm) {
				s.left[vm.Status.IP] = vm.UID
			}
			s.vanish(name)
		}
	default:
		s.reconcile(name)
	}
}

// release has the nodes say that nothing is left of the VMs whose addresses are held, as agents do.
func (s *storm) release() {
	for _, claim := range s.claimsOf(s.t.Context(), s.getNetwork("lan")) {
		if claim.Status.State == v1alpha1.AddressHeld {
			claim.Status.ReleasedAssignment = claim.Status.Assignment
			must(s.t, s.admin.Update(s.t.Context(), &claim))
			if s.left[claim.Spec.Address] == claim.Spec.VM.UID {
				delete(s.left, claim.Spec.Address)
			}
		}
	}
}

// agent does the next thing an agent might do about a VM.
func (s *storm) agent(vm *v1alpha1.ImpVM) {
	if vm == nil || vm.Status.NodeName == "" {
		return
	}
	_, ran := s.started[vm.UID]
	switch {
	case vm.Status.Release != nil:
		s.report(vm.Name, func(status *v1alpha1.ImpVMStatus) {
			if vmstate.Finished(vm) {
				succeeded(status)
			}
			status.ReleasedAssignment = vm.Status.Assignment
		})
	case vmstate.Finished(vm):
	case vm.Status.ReportedAssignment != vm.Status.Assignment && s.random.IntN(3) == 0:
		s.report(vm.Name, noRoom(vm.Status.Assignment))
	case vm.Status.ReportedAssignment != vm.Status.Assignment:
		if ran && vmstate.Ephemeral(vm) {
			s.t.Fatalf("one-shot %s is to be started a second time", vm.Name)
		}
		s.started[vm.UID] = vm.Status.Assignment
		s.report(vm.Name, running)
	case vmstate.Released(vm):
	case vmstate.Ephemeral(vm):
		s.report(vm.Name, succeeded)
	}
}

func (s *storm) check() {
	s.t.Helper()
	vms := &v1alpha1.ImpVMList{}
	must(s.t, s.admin.List(s.t.Context(), vms, client.InNamespace(s.ns)))
	on := map[string]int{}
	for i := range vms.Items {
		vm := &vms.Items[i]
		if vm.Status.NodeName != "" && !vmstate.Finished(vm) {
			on[vm.Status.NodeName]++
		}
		if vm.Status.NodeName != "" && !controllerutil.ContainsFinalizer(vm, v1alpha1.Finalizer) {
			s.t.Fatalf("%s is bound and could vanish", vm.Name)
		}
		if before := s.before[vm.UID]; before != nil {
			if vm.Status.Assignment < before.Status.Assignment {
				s.t.Fatalf("the assignment of %s went from %d to %d", vm.Name, before.Status.Assignment, vm.Status.Assignment)
			}
			if vm.Status.NodeName != before.Status.NodeName && vm.Status.NodeName != "" && vm.Status.Assignment == before.Status.Assignment {
				s.t.Fatalf("%s moved from %q to %q within assignment %d", vm.Name, before.Status.NodeName, vm.Status.NodeName, vm.Status.Assignment)
			}
			if vmstate.Finished(before) && (!vmstate.Finished(vm) || vm.Status.Assignment != before.Status.Assignment) {
				s.t.Fatalf("%s had ended and goes on", vm.Name)
			}
		}
		s.before[vm.UID] = vm
	}
	for node, n := range on {
		if n > 2 {
			s.t.Fatalf("%d VMs on %s, which has room for 2", n, node)
		}
	}
	s.checkAddresses(vms.Items)
}

// checkAddresses: whatever may run with an address has it claimed, and nobody else has it.
func (s *storm) checkAddresses(vms []v1alpha1.ImpVM) {
	s.t.Helper()
	claims, has := map[string]v1alpha1.ImpAddress{}, map[string]string{}
	for _, claim := range s.claimsOf(s.t.Context(), s.getNetwork("lan")) {
		claims[claim.Spec.Address] = claim
	}
	for i := range vms {
		vm := &vms[i]
		if vm.Spec.NetworkRef == nil || vm.Status.NodeName == "" || vmstate.Finished(vm) || vmstate.Released(vm) {
			continue
		}
		ip := vm.Status.IP
		if other := has[ip]; other != "" || ip == "" {
			s.t.Fatalf("%s is bound with address %q, as is %q", vm.Name, ip, other)
		}
		has[ip] = vm.Name
		if other, ok := s.left[ip]; ok && other != vm.UID {
			s.t.Fatalf("%s has %s, with which %s may still run", vm.Name, ip, other)
		}
		claim, ok := claims[ip]
		if !ok || claim.Spec.VM.UID != vm.UID || claim.Status.State == v1alpha1.AddressQuarantined {
			s.t.Fatalf("%s is bound with %s, and the claim is %+v", vm.Name, ip, claim)
		}
		if before := s.before[vm.UID]; before != nil && before.Status.IP != "" && before.Status.IP != ip {
			s.t.Fatalf("%s had %s and has %s", vm.Name, before.Status.IP, ip)
		}
	}
}

// restless says that an address is on its way back.
func (s *storm) restless() bool {
	return slices.ContainsFunc(s.claimsOf(s.t.Context(), s.getNetwork("lan")), func(claim v1alpha1.ImpAddress) bool {
		return claim.Status.State != v1alpha1.AddressBound
	})
}

// settleAddresses: each claim there is belongs to a VM that has it, and leads to where it is.
func (s *storm) settleAddresses() {
	s.t.Helper()
	n := s.getNetwork("lan")
	for _, claim := range s.claimsOf(s.t.Context(), n) {
		vm := s.get(claim.Spec.VM.Name)
		switch {
		case vm == nil || vm.UID != claim.Spec.VM.UID || vmstate.Finished(vm):
			s.t.Errorf("%s of %s is left behind: %+v", claim.Spec.Address, claim.Spec.VM.Name, claim.Status)
		case vm.Status.IP == claim.Spec.Address && (claim.Status.Node != vm.Status.NodeName || claim.Status.State != v1alpha1.AddressBound):
			s.t.Errorf("%s of %s on %q is %+v", claim.Spec.Address, vm.Name, vm.Status.NodeName, claim.Status)
		}
	}
	if claims := s.claimsOf(s.t.Context(), n); int64(len(claims)) != n.Status.Used || n.Status.Held+n.Status.Quarantined != 0 {
		s.t.Errorf("%d claims are counted as %+v", len(claims), n.Status)
	}
}

// calm: once everybody is heard, everything deleted goes, and what remains is placed or told why not.
func (s *storm) calm() {
	s.t.Helper()
	// A VM that ends frees its address after a quarantine for one that waits, and so on.
	for round := 0; round < 4 || round < 20 && s.restless(); round++ {
		s.clock.SetTime(maxTime(s.clock.Now(), time.Now()).Add(61 * time.Second))
		for _, node := range s.nodes {
			s.beat(node)
			s.watchNode(node)
		}
		s.watchNode("")
		s.release()
		for i := range 7 {
			name := fmt.Sprintf("vm-%d", i)
			for range 2 {
				s.thaw(s.cache)
				s.reconcile(name)
				s.agent(s.get(name))
			}
			s.thaw(s.cache)
			s.reconcile(name)
			s.check()
		}
		s.thaw(s.cache)
		s.auditAll()
		s.thaw(s.cache)
		s.settle("lan")
	}
	s.settleAddresses()
	for i := range 7 {
		vm := s.get(fmt.Sprintf("vm-%d", i))
		switch {
		case vm == nil:
		case vm.DeletionTimestamp != nil:
			s.t.Errorf("%s does not go", vm.Name)
		case told(vm, v1alpha1.ConditionScheduled) == "absent", told(vm, v1alpha1.ConditionReady) == "absent":
			s.t.Errorf("nobody tells how %s is", vm.Name)
		}
	}
}

func maxTime(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
