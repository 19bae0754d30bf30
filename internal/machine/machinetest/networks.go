package machinetest

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/network"
	vmmfake "imp.dev/imp/internal/vmm/fake"
)

func networkChecks() []Check {
	return []Check{
		{Name: "a network is known until it is forgotten, over restarts of the runtime too", Run: knownNetworks},
		{Name: "a network that is not valid is refused with the field's name", Run: invalidNetwork},
		{Name: "a VM of a network that is not known says so, and goes on as soon as it is", Run: unknownNetwork},
		{Name: "a network cannot be forgotten while a VM is in it", Run: networkInUse},
		{Name: "a network that cannot be set up is told within a second with what, where and why, tried again, and recovers", Run: networkFailure, Images: true},
		{Name: "another name server or MTU waits for the next boot of a running VM", Run: interfaceEdit},
		{Name: "Info tells the node's place in networks", Run: networkHost},
	}
}

// NewNetwork is a small valid network.
func NewNetwork() network.Spec {
	return network.Spec{
		ID: uuid.NewString(), Namespace: "default", Name: "net", Subnet: "10.44.0.0/24", Gateway: "10.44.0.1", MTU: 1450, VNI: 7, NAT: true,
		Denied: []string{"10.96.0.0/12", "192.0.2.1/32"},
		Peers:  []network.Peer{{Address: "10.44.0.9", MAC: "02:00:00:00:00:09", VTEP: "192.0.2.9"}},
	}
}

func setNetwork(t *testing.T, h *Harness) network.Spec {
	t.Helper()
	n := NewNetwork()
	if err := h.Service.SetNetwork(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	return n
}

// In gives the VM an interface in the network, with an address of its own.
func In(n network.Spec) SpecOption {
	return func(s *machine.Spec) {
		s.Interfaces = append(s.Interfaces, network.Interface{
			Name: "eth0", Network: n.ID, MAC: network.GuestMAC(s.ID, 0).String(), Addresses: []string{"10.44.0.2/24"}, Gateway: n.Gateway, MTU: n.MTU,
		})
	}
}

func networks(t *testing.T, h *Harness) []network.Status {
	t.Helper()
	all, err := h.Service.Networks(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func knownNetworks(t *testing.T, h *Harness) {
	if all := networks(t, h); len(all) != 0 {
		t.Fatalf("a new runtime knows %v", all)
	}
	n := setNetwork(t, h)
	n.NAT, n.Peers = false, nil
	if err := h.Service.SetNetwork(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	h.Restart(t)
	if d := cmp.Diff([]network.Status{{ID: n.ID}}, networks(t, h)); d != "" {
		t.Fatalf("after a restart (-want +got):\n%s", d)
	}
	if got, ok := h.Network.Spec(n.ID); !ok || !cmp.Equal(got, n) {
		t.Fatalf("the network is %+v (%v), want what was set last", got, ok)
	}
	for range 2 { // a network that is not known is success
		if err := h.Service.ForgetNetwork(t.Context(), n.ID); err != nil {
			t.Fatal(err)
		}
	}
	if all := networks(t, h); len(all) != 0 {
		t.Fatalf("a forgotten network is known: %v", all)
	}
}

func invalidNetwork(t *testing.T, h *Harness) {
	for field, change := range map[string]func(*network.Spec){
		"id":                func(n *network.Spec) { n.ID = "../../etc" },
		"subnet":            func(n *network.Spec) { n.Subnet = "10.44.0.1/24" },
		"peers[0].vtep":     func(n *network.Spec) { n.Peers[0].VTEP = "127.0.0.1" },
		"egressInterface":   func(n *network.Spec) { n.EgressInterface = "a/b" },
		"peers[0].address ": func(n *network.Spec) { n.Peers[0].Address = n.Gateway },
	} {
		n := NewNetwork()
		change(&n)
		err := h.Service.SetNetwork(t.Context(), n)
		wantFault(t, err, fault.InvalidSpec)
		if !errorsContain(err, field) {
			t.Errorf("%v does not name %s", err, field)
		}
	}
	wantFault(t, h.Service.ForgetNetwork(t.Context(), ".."), fault.InvalidSpec)
}

func unknownNetwork(t *testing.T, h *Harness) {
	n := NewNetwork()
	s := NewSpec(WithScript(vmmfake.Script{}), In(n))
	ensure(t, h, s)
	st := await(t, h, s.ID, "told of the network", func(st machine.Status) bool { return st.Network.Reason == fault.NetworkSetupFailed })
	if st.Network.OK == nil || *st.Network.OK || !strings.Contains(st.Network.Message, n.ID) {
		t.Fatalf("the network is %s", pretty(st.Network))
	}
	// By then the next try is some seconds away: the VM must not wait for it.
	await(t, h, s.ID, "tried again in vain", func(st machine.Status) bool { return st.Counters.Retries >= 2 })
	if err := h.Service.SetNetwork(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	set := time.Now()
	st = awaitState(t, h, s.ID, machine.Running)
	if waited := st.StartedAt.Sub(set); waited > time.Second {
		t.Errorf("the VM ran %s after its network was set", waited)
	}
	if st.Network.OK == nil || !*st.Network.OK || st.Network.Message != "" {
		t.Errorf("the network is %s", pretty(st.Network))
	}
}

func networkInUse(t *testing.T, h *Harness) {
	n := setNetwork(t, h)
	s := NewSpec(WithScript(vmmfake.Script{}), In(n))
	ensure(t, h, s)
	awaitState(t, h, s.ID, machine.Running)
	for range 2 {
		wantFault(t, h.Service.ForgetNetwork(t.Context(), n.ID), fault.NetworkSetupFailed)
		if all := networks(t, h); len(all) != 1 || all[0].Guests != 1 {
			t.Fatalf("networks are %+v", all)
		}
		h.Restart(t)
	}
	remove(t, h, s, 0)
	awaitState(t, h, s.ID, machine.Removed)
	if err := h.Service.ForgetNetwork(t.Context(), n.ID); err != nil {
		t.Fatal(err)
	}
	noLeftovers(t, h)
}

func networkFailure(t *testing.T, h *Harness) {
	h.Network.Fail(errors.New("making TAP i0000: no such device"))
	s := NewSpec(IsPersistent, WithScript(vmmfake.Script{}), In(setNetwork(t, h)))
	ensured := time.Now()
	ensure(t, h, s)
	st := await(t, h, s.ID, "told of the failure", func(st machine.Status) bool { return st.Network.Reason == fault.NetworkSetupFailed })
	if after := st.Network.Since.Sub(ensured); after > time.Second || !strings.Contains(st.Network.Message, "attaching network: making TAP i0000: no such device") {
		t.Errorf("after %s: %s", after, pretty(st.Network))
	}
	await(t, h, s.ID, "tried again", func(st machine.Status) bool { return st.Counters.Retries >= 2 })
	h.Network.Fail(nil)
	st = awaitState(t, h, s.ID, machine.Running)
	if st.Network.OK == nil || !*st.Network.OK || st.History.Attempts != 0 || st.Incarnation != 1 {
		t.Fatalf("after the failure: %s", pretty(st))
	}
	h.Network.Fail(errors.New("again"))
	h.Kill(t, s.ID)
	await(t, h, s.ID, "told of the failure of a later boot", func(st machine.Status) bool { return st.Network.Reason == fault.NetworkSetupFailed })
	h.Network.Fail(nil)
	await(t, h, s.ID, "running again", func(st machine.Status) bool { return st.State == machine.Running && st.Incarnation == 2 })
	remove(t, h, s, 0)
	awaitState(t, h, s.ID, machine.Removed)
	noLeftovers(t, h)
}

func interfaceEdit(t *testing.T, h *Harness) {
	s := NewSpec(IsPersistent, WithScript(vmmfake.Script{}), In(setNetwork(t, h)))
	ensure(t, h, s)
	awaitState(t, h, s.ID, machine.Running)
	empty := s
	empty.Interfaces = []network.Interface{s.Interfaces[0]}
	empty.Interfaces[0].Nameservers = []string{}
	if st := ensure(t, h, empty); st.RestartRequired {
		t.Fatalf("an empty list asks for a restart: %s", pretty(st))
	}
	for n, change := range []func(*network.Interface){
		func(i *network.Interface) { i.Nameservers = []string{"192.0.2.53"} },
		func(i *network.Interface) { i.MTU = 1400 },
	} {
		s.Interfaces = []network.Interface{s.Interfaces[0]}
		change(&s.Interfaces[0])
		s.Generation++
		if st := ensure(t, h, s); !st.RestartRequired {
			t.Fatalf("change %d asks for no restart: %s", n, pretty(st))
		}
		if st := ensure(t, h, s); !st.RestartRequired {
			t.Fatalf("change %d, told again, asks for no restart: %s", n, pretty(st))
		}
		h.Kill(t, s.ID)
		await(t, h, s.ID, fmt.Sprintf("running with change %d", n), func(st machine.Status) bool {
			return st.State == machine.Running && st.Incarnation == int64(n)+2 && !st.RestartRequired
		})
	}
}

func networkHost(t *testing.T, h *Harness) {
	info, err := h.Service.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want, err := h.Network.Host(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, info.Network); d != "" {
		t.Errorf("the host differs (-want +got):\n%s", d)
	}
}
