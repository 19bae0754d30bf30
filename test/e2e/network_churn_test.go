package e2e

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/devserver"
	vmmfake "imp.dev/imp/internal/vmm/fake"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const (
	churnRounds = 200
	// churnBreadth is how many rounds go on side by side.
	churnBreadth = 20
	// churnPatience with a VM on its way: a try at a network has some twenty steps, of which each fails one time in ten, so that a
	// VM needs several tries, with a backoff between them.
	churnPatience = 20 * time.Second
)

func TestTwoHundredVMsComeAndGoWhileNetworkStepsFailAndNothingIsLeft(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	c := own(t, devserver.Options{Nodes: 2, VMM: "fake", Network: "linux", RuntimeArgs: []string{fmt.Sprintf("--network-failures=0.1,%d", seed)}})
	ns := c.namespace(t)
	before := c.hostState(t)
	// A claim outlives its VM by a minute: there must be addresses for all.
	networks := []*v1alpha1.ImpNetwork{c.network(t, ns, "wide", "10.70.0.0/23", nat), c.network(t, ns, "again", "10.70.0.0/23")}

	var ran atomic.Int64
	rounds := make(chan int)
	var working sync.WaitGroup
	for worker := range churnBreadth {
		random := rand.New(rand.NewPCG(seed, uint64(worker)))
		working.Go(func() {
			for i := range rounds {
				c.comeAndGo(t, ns, networks[i%len(networks)].Name, i, random, &ran)
			}
		})
	}
	for i := range churnRounds {
		rounds <- i
	}
	close(rounds)
	working.Wait()

	t.Logf("%d of %d VMs were ready before they were deleted", ran.Load(), churnRounds)
	if ran.Load() < churnRounds/10 {
		t.Errorf("only %d of %d VMs ever ran", ran.Load(), churnRounds)
	}
	seen := c.eventReasons(t, ns)
	for _, reason := range []string{v1alpha1.ReasonNetworkSetupFailed, v1alpha1.ReasonRecovered} {
		if seen[reason] == 0 {
			t.Errorf("a tenth of all steps failed, and there is no event %s: %v", reason, seen)
		}
	}
	if !eventually(t.Context(), quarantine, func() bool {
		list := &v1alpha1.ImpAddressList{}
		must(t, c.client.List(t.Context(), list))
		return len(list.Items) == 0
	}) {
		for _, n := range networks {
			t.Errorf("claims of %s are left: %+v", n.Name, c.claims(t, n.UID))
		}
	}
	var after []string
	if !eventually(t.Context(), soon, func() bool { after = c.hostState(t); return slices.Equal(after, before) }) {
		t.Errorf("the nodes had\n  %s\nand have\n  %s", strings.Join(before, "\n  "), strings.Join(after, "\n  "))
	}
	for _, n := range networks {
		must(t, c.client.Delete(t.Context(), n))
		if !eventually(t.Context(), soon, func() bool {
			return c.client.Get(t.Context(), client.ObjectKeyFromObject(n), &v1alpha1.ImpNetwork{}) != nil
		}) {
			t.Errorf("network %s cannot be deleted", n.Name)
		}
	}
}

// comeAndGo is one round: a VM is created, awaited for a while, and deleted. It counts in ran if it was ready.
func (c *cluster) comeAndGo(t *testing.T, ns, network string, i int, random *rand.Rand, ran *atomic.Int64) {
	vm := c.vm(ns, fmt.Sprintf("vm-%03d", i), persistent, grace(0), scripted(vmmfake.Script{}), func(vm *v1alpha1.ImpVM) {
		vm.Spec.NetworkRef = &v1alpha1.NetworkReference{Name: network}
	})
	if err := c.client.Create(t.Context(), vm); err != nil {
		t.Errorf("creating %s: %v", vm.Name, err)
		return
	}
	patience := churnPatience // or any moment before
	if random.IntN(2) == 0 {
		patience = time.Duration(random.IntN(2000)) * time.Millisecond
	}
	now := &v1alpha1.ImpVM{}
	if eventually(t.Context(), patience, func() bool {
		return c.client.Get(t.Context(), client.ObjectKeyFromObject(vm), now) == nil && ready(now)
	}) {
		ran.Add(1)
	}
	if err := c.client.Delete(t.Context(), vm); err != nil {
		t.Errorf("deleting %s: %v", vm.Name, err)
	}
	if !eventually(t.Context(), 2*time.Minute, func() bool { return c.client.Get(t.Context(), client.ObjectKeyFromObject(vm), now) != nil }) {
		t.Errorf("%s is still there: %s", vm.Name, describe(now))
		return
	}
	var left []string
	if !eventually(t.Context(), soon, func() bool { left = c.server.Leftovers(string(vm.UID)); return len(left) == 0 }) {
		t.Errorf("%s is deleted, but left behind:\n  %s", vm.Name, strings.Join(left, "\n  "))
	}
}

// eventReasons counts the events of a namespace by reason.
func (c *cluster) eventReasons(t *testing.T, ns string) map[string]int {
	t.Helper()
	events := &corev1.EventList{}
	must(t, c.client.List(t.Context(), events, client.InNamespace(ns)))
	seen := map[string]int{}
	for _, e := range events.Items {
		seen[e.Reason]++
	}
	return seen
}
