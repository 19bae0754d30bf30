package operator_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
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
	// cache is behind by some steps, across restarts too, but never goes back.
	cache *frozen
}

// stormSeeds times the storm takes another course; each takes some seconds.
const stormSeeds = 3

func TestWhateverHappensNoNodeIsOvercommittedAndNoOneShotRunsTwice(t *testing.T) {
	for seed := range uint64(stormSeeds) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			s := &storm{
				rig: newRig(t), random: rand.New(rand.NewPCG(seed, 1)),
				before: map[types.UID]*v1alpha1.ImpVM{}, started: map[types.UID]int64{},
			}
			s.nodes = []string{s.node("a"), s.node("b")}
			s.class("small", func(c *v1alpha1.ImpVMClass) { c.Spec.VCPU = 2 }) // two on each
			s.cache = s.frozen()
			s.api, s.place.Client = s.place.Client.(*inNamespace).Client, s.cache
			for range 150 {
				s.happen()
				s.check()
			}
			s.settle()
		})
	}
}

// any VM by name; there may be none of it.
func (s *storm) any() string { return fmt.Sprintf("vm-%d", s.random.IntN(7)) }

func (s *storm) happen() {
	s.clock.Step(time.Duration(s.random.IntN(5000)) * time.Millisecond)
	if s.random.IntN(3) == 0 {
		s.cache.vms = s.frozen().vms
	}
	name := s.any()
	switch vm := s.get(name); s.random.IntN(12) {
	case 0, 1, 2:
		if vm == nil {
			lifecycle := v1alpha1.LifecycleEphemeral
			if s.random.IntN(2) == 0 {
				lifecycle = v1alpha1.LifecyclePersistent
			}
			s.vm(name, func(vm *v1alpha1.ImpVM) { vm.Spec.Lifecycle = lifecycle })
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
		s.place.Client = s.cache
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
	default:
		s.reconcile(name)
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
}

// settle: once everybody is heard, everything deleted goes, and what remains is placed or told why not.
func (s *storm) settle() {
	s.t.Helper()
	for range 4 {
		s.clock.SetTime(maxTime(s.clock.Now(), time.Now()).Add(15 * time.Second))
		for _, node := range s.nodes {
			s.beat(node)
			s.watchNode(node)
		}
		s.watchNode("")
		s.cache.vms = s.frozen().vms
		for i := range 7 {
			name := fmt.Sprintf("vm-%d", i)
			s.reconcile(name)
			s.agent(s.get(name))
			s.cache.vms = s.frozen().vms
			s.reconcile(name)
			s.check()
		}
	}
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
