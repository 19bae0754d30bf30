package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/network"
)

// fence makes the operator's ConfigMap; it goes with the test.
func (w *world) fence() {
	w.t.Helper()
	m := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: v1alpha1.SystemNamespace, Name: v1alpha1.ClusterRangesName},
		Data:       map[string]string{"nodes": "192.0.2.0/24\n", "pods": "10.244.0.0/16\n", "services": "10.96.0.0/12\n"},
	}
	if err := w.admin.Create(w.t.Context(), m); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(w.unfence)
}

func (w *world) unfence() {
	m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: v1alpha1.SystemNamespace, Name: v1alpha1.ClusterRangesName}}
	if err := client.IgnoreNotFound(w.admin.Delete(context.Background(), m)); err != nil { // the test's own context has ended
		w.t.Error(err)
	}
}

// network makes an ImpNetwork, settled by the operator.
func (w *world) network(name string, change ...func(*v1alpha1.ImpNetwork)) *v1alpha1.ImpNetwork {
	w.t.Helper()
	n := &v1alpha1.ImpNetwork{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name},
		Spec:       v1alpha1.ImpNetworkSpec{Subnet: "10.44.0.0/24", NAT: v1alpha1.NetworkNAT{Enabled: true}, DNS: []string{"198.51.100.53"}},
	}
	if err := w.admin.Create(w.t.Context(), n); err != nil {
		w.t.Fatal(err)
	}
	n.Status = v1alpha1.ImpNetworkStatus{Gateway: "10.44.0.1", MTU: 1450, VNI: 7}
	for _, c := range change {
		c(n)
	}
	w.settle(n)
	return n
}

func (w *world) settle(n *v1alpha1.ImpNetwork) {
	w.t.Helper()
	if err := w.admin.Status().Update(w.t.Context(), n); err != nil {
		w.t.Fatal(err)
	}
}

// claim makes an ImpAddress of the network, as the operator would.
func (w *world) claim(n *v1alpha1.ImpNetwork, vm types.UID, name, address, node string, change ...func(*v1alpha1.ImpAddress)) *v1alpha1.ImpAddress {
	w.t.Helper()
	c := &v1alpha1.ImpAddress{
		ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.AddressName(n.UID, address)},
		Spec: v1alpha1.ImpAddressSpec{
			Network: v1alpha1.AddressNetwork{Namespace: n.Namespace, Name: n.Name, UID: n.UID},
			VM:      v1alpha1.AddressVM{Namespace: n.Namespace, Name: name, UID: vm},
			Address: address, MAC: network.GuestMAC(string(vm), 0).String(),
		},
		Status: v1alpha1.ImpAddressStatus{State: v1alpha1.AddressBound, Since: metav1.Now(), Node: node, Assignment: 1, VTEP: "192.0.2.9"},
	}
	for _, f := range change {
		f(c)
	}
	if err := w.admin.Create(w.t.Context(), c); err != nil {
		w.t.Fatal(err)
	}
	return c
}

func (w *world) update(c *v1alpha1.ImpAddress, change func(*v1alpha1.ImpAddressStatus)) {
	w.t.Helper()
	change(&c.Status)
	if err := w.admin.Update(w.t.Context(), c); err != nil {
		w.t.Fatal(err)
	}
}

const address = "10.44.0.7"

// guest makes a VM of the network with an address, bound here.
func (w *world) guest(name string, n *v1alpha1.ImpNetwork, change ...func(*v1alpha1.ImpVM)) *v1alpha1.ImpVM {
	w.t.Helper()
	vm := w.vm(name, append(change, func(vm *v1alpha1.ImpVM) { vm.Spec.NetworkRef = &v1alpha1.NetworkReference{Name: n.Name} })...)
	w.give(vm, n)
	return vm
}

// give writes the VM's address, as the operator would.
func (w *world) give(vm *v1alpha1.ImpVM, n *v1alpha1.ImpNetwork) {
	w.t.Helper()
	w.place(vm, w.node, 1, addressed(vm, n))
}

func addressed(vm *v1alpha1.ImpVM, n *v1alpha1.ImpNetwork) func(map[string]any) {
	return func(status map[string]any) {
		status["ip"] = address
		status["addresses"] = []any{map[string]any{
			"address": address, "prefix": int64(24), "mac": network.GuestMAC(string(vm.UID), 0).String(), "network": n.Name, "networkUID": string(n.UID),
		}}
	}
}

func message(vm *v1alpha1.ImpVM, conditionType string) string {
	if c := meta.FindStatusCondition(vm.Status.Conditions, conditionType); c != nil {
		return c.Message
	}
	return ""
}

func failedNetwork(words string) func(*v1alpha1.ImpVM) bool {
	return func(vm *v1alpha1.ImpVM) bool {
		return has(v1alpha1.ConditionNetworkReady, "False", v1alpha1.ReasonNetworkSetupFailed)(vm) &&
			has(v1alpha1.ConditionReady, "False", v1alpha1.ReasonNetworkSetupFailed)(vm) && strings.Contains(message(vm, v1alpha1.ConditionReady), words)
	}
}

func (w *world) toldAfterSet(vm *v1alpha1.ImpVM, n *v1alpha1.ImpNetwork) {
	w.t.Helper()
	id := string(vm.UID)
	w.await("the runtime is told", func() bool { return w.runtime.told("ensure "+id) >= 1 })
	w.runtime.mu.Lock()
	defer w.runtime.mu.Unlock()
	set, ensured := slices.Index(w.runtime.calls, "set "+string(n.UID)), slices.Index(w.runtime.calls, "ensure "+id)
	if set < 0 || set > ensured {
		w.t.Errorf("the VM was ordered before its network: %v", w.runtime.calls)
	}
}

func TestNetworks(t *testing.T) {
	t.Run("a VM's network is set first, with its fence and its guests elsewhere, and then the VM is ordered with its interface", func(t *testing.T) {
		w := newWorld(t)
		w.fence()
		n := w.network("apps")
		w.claim(n, "peer-uid-1", "peer", "10.44.0.9", "node-elsewhere")
		w.start()
		vm := w.guest("web", n)
		w.claim(n, vm.UID, "web", address, w.node)
		w.toldAfterSet(vm, n)
		want := network.Spec{
			ID: string(n.UID), Namespace: w.namespace, Name: "apps", Subnet: "10.44.0.0/24", Gateway: "10.44.0.1", MTU: 1450, VNI: 7, NAT: true,
			Denied: []string{"10.96.0.0/12", "10.244.0.0/16", "192.0.2.0/24"},
			Peers:  []network.Peer{{Address: "10.44.0.9", MAC: network.GuestMAC("peer-uid-1", 0).String(), VTEP: "192.0.2.9"}},
		}
		got, _ := w.runtime.network(n.UID)
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("network differs (-want +got):\n%s", d)
		}
		spec, _ := w.runtime.spec(string(vm.UID))
		if d := cmp.Diff([]network.Interface{{
			Name: "eth0", Network: string(n.UID), MAC: network.GuestMAC(string(vm.UID), 0).String(), Addresses: []string{address + "/24"},
			Gateway: "10.44.0.1", MTU: 1450, Nameservers: []string{"198.51.100.53"},
		}}, spec.Interfaces); d != "" {
			t.Errorf("interfaces differ (-want +got):\n%s", d)
		}
	})

	t.Run("a VM that the operator has given no address waits, says so after two seconds and not before, and goes on with one", func(t *testing.T) {
		w := newWorld(t)
		w.fence()
		n := w.network("apps")
		w.start()
		bound := time.Now()
		vm := w.vm("early", func(vm *v1alpha1.ImpVM) { vm.Spec.NetworkRef = &v1alpha1.NetworkReference{Name: "apps"} })
		w.awaitVM("early", "says why", failedNetwork("has not given the VM an address in ImpNetwork "+w.namespace+"/apps"))
		if waited := time.Since(bound); waited < networkPatience {
			t.Errorf("it was said after %s", waited)
		}
		if w.runtime.told("ensure "+string(vm.UID)) != 0 {
			t.Fatal("the VM was started without a network")
		}
		w.give(vm, n)
		w.toldAfterSet(vm, n)
	})

	for name, c := range map[string]struct {
		before, mend func(*world, *v1alpha1.ImpNetwork)
		words        string
	}{
		"without the operator's word on what guests may not reach": {
			before: func(*world, *v1alpha1.ImpNetwork) {}, mend: func(w *world, _ *v1alpha1.ImpNetwork) { w.fence() },
			words: "ConfigMap imp-system/imp-cluster-ranges is not there",
		},
		"without a VNI": {
			before: func(w *world, n *v1alpha1.ImpNetwork) { w.fence(); n.Status.VNI = 0; w.settle(n) }, mend: func(w *world, n *v1alpha1.ImpNetwork) { n.Status.VNI = 7; w.settle(n) },
			words: "has not settled gateway, MTU and VNI of ImpNetwork",
		},
	} {
		t.Run(name+" nothing is set, the VM says what it waits for, and recovers by itself", func(t *testing.T) {
			w := newWorld(t)
			n := w.network("apps")
			c.before(w, n)
			w.start()
			bound := time.Now()
			vm := w.guest("waits", n)
			w.awaitVM("waits", "says why", failedNetwork(c.words))
			if waited := time.Since(bound); waited < networkPatience {
				t.Errorf("it was said after %s", waited)
			}
			if _, ok := w.runtime.network(n.UID); ok || w.runtime.told("ensure "+string(vm.UID)) != 0 {
				t.Fatal("something was set or started")
			}
			c.mend(w, n)
			w.toldAfterSet(vm, n)
			w.runtime.set(string(vm.UID), started, guestReady)
			w.awaitVM("waits", "is ready", has(v1alpha1.ConditionReady, "True", v1alpha1.ReasonRunning))
			w.await("both events are there", func() bool {
				e := w.events(vm)
				return slices.Contains(e, "Warning NetworkSetupFailed") && slices.Contains(e, "Normal Recovered")
			})
		})
	}

	t.Run("claims that come, move and go are at the runtime within a second, and a burst of them is one order", func(t *testing.T) {
		w := newWorld(t)
		w.fence()
		n := w.network("apps")
		w.start()
		vm := w.guest("web", n)
		w.toldAfterSet(vm, n)
		peers := func(want ...string) func() bool {
			return func() bool {
				got, _ := w.runtime.network(n.UID)
				var have []string
				for _, p := range got.Peers {
					have = append(have, p.Address+" "+p.VTEP)
				}
				return slices.Equal(have, want)
			}
		}
		soon := func(what string, holds func() bool) {
			t.Helper()
			from := time.Now()
			w.await(what, holds)
			if took := time.Since(from); took > time.Second {
				t.Errorf("%s after %s", what, took)
			}
		}
		c := w.claim(n, "peer-uid-9", "peer", "10.44.0.9", "node-2")
		soon("the peer is set", peers("10.44.0.9 192.0.2.9"))
		w.update(c, func(s *v1alpha1.ImpAddressStatus) { s.Node, s.VTEP, s.Assignment = "node-3", "192.0.2.10", 2 })
		soon("the peer has moved", peers("10.44.0.9 192.0.2.10"))
		w.update(c, func(s *v1alpha1.ImpAddressStatus) { s.State, s.Node = v1alpha1.AddressQuarantined, "" })
		soon("the peer is gone", peers())
		before := w.runtime.told("set " + string(n.UID))
		var want []string
		for i := range 40 {
			w.claim(n, types.UID(fmt.Sprintf("burst-uid-%d", i)), "burst", fmt.Sprintf("10.44.0.%d", 100+i), "node-2")
			want = append(want, fmt.Sprintf("10.44.0.%d 192.0.2.9", 100+i))
		}
		soon("all peers are set", peers(want...))
		if orders := w.runtime.told("set "+string(n.UID)) - before; orders > 20 {
			t.Errorf("%d orders for a burst of 40 claims", orders)
		}
	})

	t.Run("another name server is told to the guests' runtime, without setting the network anew", func(t *testing.T) {
		w := newWorld(t)
		w.fence()
		n := w.network("apps")
		w.start()
		vm := w.guest("web", n)
		w.toldAfterSet(vm, n)
		sets := w.runtime.told("set " + string(n.UID))
		n.Spec.DNS = []string{"198.51.100.54"}
		if err := w.admin.Update(t.Context(), n); err != nil {
			t.Fatal(err)
		}
		w.await("the guest's name server is told", func() bool {
			s, _ := w.runtime.spec(string(vm.UID))
			return slices.Equal(s.Interfaces[0].Nameservers, []string{"198.51.100.54"})
		})
		if now := w.runtime.told("set " + string(n.UID)); now != sets {
			t.Errorf("the network was set %d times, before %d", now, sets)
		}
	})
}

func TestNetworkThatTheRuntimeDoesNotTake(t *testing.T) {
	refused := fault.New(fault.NetworkSetupFailed, "setting network", errors.New("making bridge ibr0 in imp-1: no such device"))

	t.Run("its VMs say within a second what failed, where and why, and recover by themselves", func(t *testing.T) {
		w := newWorld(t)
		w.fence()
		n := w.network("apps")
		w.runtime.refuseNetworks(refused)
		w.start()
		bound := time.Now()
		vm := w.guest("web", n)
		w.awaitVM("web", "says why", failedNetwork("ImpNetwork "+w.namespace+"/apps: setting network: making bridge ibr0 in imp-1: no such device"))
		if took := time.Since(bound); took > time.Second {
			t.Errorf("it was said after %s", took)
		}
		if w.runtime.told("ensure "+string(vm.UID)) != 0 {
			t.Error("the VM was ordered without its network")
		}
		w.runtime.refuseNetworks(nil)
		w.toldAfterSet(vm, n)
		w.runtime.set(string(vm.UID), started, guestReady)
		w.awaitVM("web", "is ready", has(v1alpha1.ConditionReady, "True", v1alpha1.ReasonRunning))
		w.await("the event Recovered", func() bool { return slices.Contains(w.events(vm), "Normal Recovered") })
	})

	t.Run("a guest that runs says so too while it lasts", func(t *testing.T) {
		w := newWorld(t)
		w.fence()
		n := w.network("apps")
		w.start()
		vm := w.guest("web", n)
		w.toldAfterSet(vm, n)
		w.runtime.set(string(vm.UID), started, guestReady)
		w.awaitVM("web", "is ready", has(v1alpha1.ConditionReady, "True", v1alpha1.ReasonRunning))
		w.runtime.refuseNetworks(refused)
		w.claim(n, "peer-uid-1", "peer", "10.44.0.9", "node-2")
		got := w.awaitVM("web", "says why", failedNetwork("making bridge ibr0"))
		if got.Status.Phase != v1alpha1.PhaseRunning {
			t.Errorf("phase is %s", got.Status.Phase)
		}
		w.runtime.refuseNetworks(nil)
		w.awaitVM("web", "is ready again", has(v1alpha1.ConditionReady, "True", v1alpha1.ReasonRunning))
		w.await("the event Recovered", func() bool { return slices.Contains(w.events(vm), "Normal Recovered") })
	})

	t.Run("what the runtime cannot repair is told on the guests", func(t *testing.T) {
		w := newWorld(t)
		w.fence()
		n := w.network("apps")
		w.start()
		vm := w.guest("web", n)
		w.toldAfterSet(vm, n)
		w.runtime.set(string(vm.UID), started, guestReady)
		w.awaitVM("web", "is ready", has(v1alpha1.ConditionReady, "True", v1alpha1.ReasonRunning))
		problem := func(text string) {
			w.runtime.mu.Lock()
			w.runtime.networkProblem = text
			w.runtime.mu.Unlock()
			w.runtime.leave() // a new connection has the networks looked at now and not at the next look
			w.runtime.comeBack()
		}
		problem("bridge ibr0 is not there")
		w.awaitVM("web", "says why", failedNetwork("ImpNetwork "+w.namespace+"/apps: bridge ibr0 is not there"))
		problem("")
		w.awaitVM("web", "is ready again", has(v1alpha1.ConditionReady, "True", v1alpha1.ReasonRunning))
	})
}

func TestNetworksOfANode(t *testing.T) {
	t.Run("a node watches the networks it hosts and no others", func(t *testing.T) {
		w := newWorld(t)
		w.fence()
		here, elsewhere := w.network("here"), w.network("elsewhere")
		w.claim(elsewhere, "peer-uid-1", "peer", "10.44.0.9", "node-2")
		w.start()
		vm := w.guest("web", here)
		w.toldAfterSet(vm, here)
		if d := cmp.Diff([]string{"spec.network.uid=" + string(here.UID), "status.node=" + w.node}, w.requests.watches("impaddresses")); d != "" {
			t.Errorf("claims are watched by (-want +got):\n%s", d)
		}
		if d := cmp.Diff([]string{"metadata.name=here"}, w.requests.watches("impnetworks")); d != "" {
			t.Errorf("networks are watched by (-want +got):\n%s", d)
		}
		if d := cmp.Diff([]string{"metadata.name=" + v1alpha1.ClusterRangesName}, w.requests.watches("configmaps")); d != "" {
			t.Errorf("ConfigMaps are watched by (-want +got):\n%s", d)
		}
		if _, ok := w.runtime.network(elsewhere.UID); ok {
			t.Error("the runtime was told of a network without a guest here")
		}
	})

	t.Run("a network is forgotten once no VM here is in it, also one that the runtime kept from before", func(t *testing.T) {
		w := newWorld(t)
		w.fence()
		n := w.network("apps")
		old := network.Spec{ID: "old-network-uid", Namespace: "gone", Name: "gone", Subnet: "10.50.0.0/24", Gateway: "10.50.0.1", MTU: 1450, VNI: 9}
		w.runtime.networks[old.ID] = old
		w.start()
		w.await("the old network is forgotten", func() bool { _, ok := w.runtime.network(types.UID(old.ID)); return !ok })
		vm := w.guest("web", n)
		w.toldAfterSet(vm, n)
		w.place(vm, w.node, 1, addressed(vm, n), func(status map[string]any) {
			status["release"] = map[string]any{"assignment": int64(1), "reason": "Deleted"}
		})
		w.awaitVM("web", "is released", func(vm *v1alpha1.ImpVM) bool { return vm.Status.ReleasedAssignment == 1 })
		w.await("the network is forgotten", func() bool { _, ok := w.runtime.network(n.UID); return !ok })
	})

	t.Run("a guest without an object keeps its network, whose peers still move, over a restart of the agent too", func(t *testing.T) {
		w := newWorld(t)
		w.fence()
		n := w.network("apps")
		w.start()
		vm := w.guest("web", n)
		w.claim(n, vm.UID, "web", address, w.node)
		w.toldAfterSet(vm, n)
		w.runtime.set(string(vm.UID), started, guestReady)
		w.vanish(vm)
		for i := range 2 {
			w.claim(n, types.UID(fmt.Sprintf("peer-uid-%d", i)), "peer", fmt.Sprintf("10.44.0.%d", 20+i), "node-2")
			w.await("the peer is set", func() bool { s, _ := w.runtime.network(n.UID); return len(s.Peers) == i+1 })
			w.stop()
			w.start()
		}
		if w.runtime.told("forget "+string(n.UID)) != 0 {
			t.Error("its network was to be forgotten")
		}
	})

	t.Run("a new connection is told every network before its VMs, and an agent that starts again disturbs nothing", func(t *testing.T) {
		w := newWorld(t)
		w.fence()
		n := w.network("apps")
		w.start()
		vm := w.guest("web", n)
		w.toldAfterSet(vm, n)
		id := string(vm.UID)
		w.runtime.set(id, started, guestReady)
		before := w.awaitVM("web", "is ready", has(v1alpha1.ConditionReady, "True", v1alpha1.ReasonRunning))
		for n_, again := range []func(){func() { w.runtime.leave(); w.runtime.comeBack() }, func() { w.stop(); w.start() }} {
			w.await("the VM is told again", func() bool { again(); again = func() {}; return w.runtime.told("ensure "+id) == n_+2 })
			w.runtime.mu.Lock()
			calls := slices.Clone(w.runtime.calls)
			w.runtime.mu.Unlock()
			calls = slices.DeleteFunc(calls, func(c string) bool { return c != "set "+string(n.UID) && c != "ensure "+id })
			if calls[len(calls)-2] != "set "+string(n.UID) {
				t.Errorf("calls are %v", calls)
			}
		}
		if got := w.get("web"); got.ResourceVersion != before.ResourceVersion || w.runtime.told("forget "+string(n.UID)) != 0 || len(w.runtime.removals()) != 0 {
			t.Errorf("something was done: %+v, calls %v", got.Status, w.runtime.calls)
		}
	})

	t.Run("a network that was deleted and made anew is another", func(t *testing.T) {
		w := newWorld(t)
		w.fence()
		old := w.network("apps")
		if err := w.admin.Delete(t.Context(), old); err != nil {
			t.Fatal(err)
		}
		fresh := w.network("apps")
		w.start()
		vm := w.guest("stale", old)
		w.awaitVM("stale", "says why", failedNetwork("this one is another"))
		if w.runtime.told("ensure "+string(vm.UID)) != 0 {
			t.Error("it was ordered all the same")
		}
		w.toldAfterSet(w.guest("fresh", fresh), fresh)
	})

	t.Run("a foreign chain that drops what guests send is on the ImpNode, with an event", func(t *testing.T) {
		w := newWorld(t)
		w.runtime.info.Network.ForwardBlocked = "ip filter FORWARD: its policy is drop, and the table is not ours to amend"
		w.start()
		node := &v1alpha1.ImpNode{}
		w.await("the ImpNode names the chain", func() bool {
			err := w.admin.Get(t.Context(), client.ObjectKey{Name: w.node}, node)
			c := meta.FindStatusCondition(node.Status.Conditions, v1alpha1.ConditionForwardBlocked)
			return err == nil && c != nil && c.Status == "True" && strings.Contains(c.Message, "ip filter FORWARD")
		})
		want := v1alpha1.NodeNetwork{Address: "192.0.2.1", Addresses: []string{"192.0.2.1"}, MTU: 1500, Port: 14789}
		if d := cmp.Diff(want, node.Status.Network); d != "" {
			t.Errorf("the node's network differs (-want +got):\n%s", d)
		}
		w.await("the event about the ImpNode", func() bool {
			list := &corev1.EventList{}
			err := w.admin.List(t.Context(), list, client.InNamespace(corev1.NamespaceDefault))
			return err == nil && slices.ContainsFunc(list.Items, func(e corev1.Event) bool {
				return e.Reason == v1alpha1.ReasonForwardBlocked && e.Type == corev1.EventTypeWarning && e.InvolvedObject.Name == w.node
			})
		})
	})
}

func TestHeldClaims(t *testing.T) {
	hold := func(s *v1alpha1.ImpAddressStatus) { s.State = v1alpha1.AddressHeld }
	released := func(w *world, c *v1alpha1.ImpAddress) func() bool {
		return func() bool {
			got := &v1alpha1.ImpAddress{}
			err := w.admin.Get(w.t.Context(), client.ObjectKeyFromObject(c), got)
			return err == nil && got.Status.ReleasedAssignment == c.Status.Assignment
		}
	}

	t.Run("a VM that was deleted while its node was silent is removed by the word of its claim, and the claim is released only then", func(t *testing.T) {
		w := newWorld(t)
		w.runtime.removeAtOnce = false
		w.fence()
		n := w.network("apps")
		w.start()
		vm := w.guest("web", n)
		c := w.claim(n, vm.UID, "web", address, w.node)
		w.toldAfterSet(vm, n)
		id := string(vm.UID)
		w.runtime.set(id, started, guestReady)
		w.awaitVM("web", "is ready", has(v1alpha1.ConditionReady, "True", v1alpha1.ReasonRunning))
		w.vanish(vm)
		w.await("the absence is in the log", func() bool { return strings.Contains(w.log.String(), "VM goes on without an object") })
		if len(w.runtime.removals()) != 0 {
			t.Fatal("removed without an order")
		}
		w.update(c, hold)
		w.await("the removal is ordered", func() bool { return w.runtime.state(id) == machine.Removing })
		if g := w.runtime.graces; g[0] != 30*time.Second {
			t.Errorf("grace is %s", g[0])
		}
		if released(w, c)() {
			t.Fatal("released while the runtime was removing")
		}
		w.runtime.set(id, func(s *machine.Status) { s.State = machine.Removed })
		w.await("the address is released", released(w, c))
		w.await("the network is forgotten", func() bool { _, ok := w.runtime.network(n.UID); return !ok })
	})

	t.Run("the order is found after a restart of the agent, when nobody else here is in the network", func(t *testing.T) {
		w := newWorld(t)
		w.fence()
		n := w.network("apps")
		w.start()
		vm := w.guest("web", n)
		c := w.claim(n, vm.UID, "web", address, w.node)
		w.toldAfterSet(vm, n)
		w.runtime.set(string(vm.UID), started, guestReady)
		w.stop()
		w.vanish(vm)
		w.update(c, hold)
		w.start()
		w.await("the VM is removed", func() bool { return w.runtime.state(string(vm.UID)) == machine.Removed })
		w.await("the address is released", released(w, c))
	})

	t.Run("a claim of a VM that the runtime does not know is released, with a tombstone in its place", func(t *testing.T) {
		w := newWorld(t)
		w.start()
		n := w.network("apps")
		c := w.claim(n, "unknown-uid-1", "lost", address, w.node, func(c *v1alpha1.ImpAddress) { hold(&c.Status); c.Status.Assignment = 4 })
		w.await("the address is released", released(w, c))
		if w.runtime.told("remove unknown-uid-1") == 0 {
			t.Error("a late order of that assignment would be taken")
		}
	})

	t.Run("nothing is released while the runtime is away", func(t *testing.T) {
		w := newWorld(t)
		w.start()
		w.running("calm")
		w.runtime.leave()
		w.await("the agent has noticed", func() bool { return strings.Contains(w.log.String(), "runtime's stream ended") })
		n := w.network("apps")
		c := w.claim(n, "unknown-uid-1", "lost", address, w.node, func(c *v1alpha1.ImpAddress) { hold(&c.Status) })
		other := w.vm("seen") // when the agent has seen this one it has seen the claim
		w.await("the agent is past it", func() bool { return w.requests.of("GET impaddresses") > 0 && w.get(other.Name) != nil })
		if released(w, c)() {
			t.Fatal("released without the runtime's word")
		}
		w.runtime.comeBack()
		w.await("the address is released", released(w, c))
	})

	t.Run("a claim that is held here while the VM's object is still bound here leaves the orders to the object", func(t *testing.T) {
		w := newWorld(t)
		w.fence()
		n := w.network("apps")
		w.start()
		vm := w.guest("web", n, func(vm *v1alpha1.ImpVM) { vm.Spec.TerminationGracePeriodSeconds = ptr.To(int64(7)) })
		w.toldAfterSet(vm, n)
		w.runtime.set(string(vm.UID), started, guestReady)
		w.awaitVM("web", "is ready", has(v1alpha1.ConditionReady, "True", v1alpha1.ReasonRunning))
		c := w.claim(n, vm.UID, "web", address, w.node, func(c *v1alpha1.ImpAddress) { hold(&c.Status) })
		w.running("next") // when this one is Ready, the claim has long been seen
		if len(w.runtime.removals()) != 0 || released(w, c)() {
			t.Fatal("the claim was taken for an order")
		}
		w.place(vm, w.node, 1, addressed(vm, n), func(status map[string]any) {
			status["release"] = map[string]any{"assignment": int64(1), "reason": "Deleted"}
		})
		w.awaitVM("web", "is released", func(vm *v1alpha1.ImpVM) bool { return vm.Status.ReleasedAssignment == 1 })
		if g := w.runtime.graces; g[0] != 7*time.Second {
			t.Errorf("grace is %s", g[0])
		}
	})
}
