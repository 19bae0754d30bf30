// Package networktest is the suite that every implementation of network.Network passes.
package networktest

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"imp.dev/imp/internal/network"
)

// Harness is an implementation under test.
type Harness struct {
	Network network.Network
	// Reopen gives another Network over what the first has made and written down, as a runtime does that was killed and started
	// again. The first is not used any more.
	Reopen func(t *testing.T) network.Network
	// Fail makes each Attach fail with err, part of the way where there is a way; nil ends that.
	Fail func(err error)
	// Residue lists what there is outside of the implementation's memory that it can have left: devices, namespaces, files. It is compared
	// with what was there before.
	Residue func(t *testing.T) []string
	// Slow says that MaxGuests guests take long enough to be left out in short mode.
	Slow bool
}

// The networks of the suite. The subnets are one on purpose: networks know nothing of each other.
const (
	blue = "6f1c2a9e-0d1b-4a64-9f0a-2f6e4e1b7c01"
	red  = "b24d7e50-83aa-4f7c-8a52-0c5d9e6f1d02"
)

// SpecOf is a network of that ID for a test.
func SpecOf(id string) network.Spec {
	return network.Spec{ID: id, Namespace: "test", Name: "net-" + id[:8], Subnet: "10.4.0.0/16", Gateway: "10.4.0.1", MTU: 1400, VNI: 100 + uint32(id[0])}
}

// VM gives the ID of the n-th VM.
func VM(n int) string { return fmt.Sprintf("0b9f3f6e-1c55-4d7a-8c3e-%012d", n) }

// NIC is the interface of the n-th VM in a network: address 10.4.0.1 and n onwards.
func NIC(name, id string, n int) network.Interface {
	address := netip.AddrFrom4([4]byte{10, 4, byte((n + 1) >> 8), byte(n + 1)})
	return network.Interface{Name: name, Network: id, MAC: network.GuestMAC(VM(n), int(name[len(name)-1]-'0')).String(),
		Addresses: []string{netip.PrefixFrom(address, 16).String()}, Gateway: "10.4.0.1", MTU: 1400}
}

// Run runs the suite, each case with a harness of its own.
func Run(t *testing.T, newHarness func(t *testing.T) *Harness) {
	for sentence, do := range map[string]func(*testing.T, *Harness){
		"what was set is listed until it is forgotten":                   setAndForget,
		"a network with a guest is not forgotten":                        forgetRefused,
		"a network that is not known cannot be attached to":              unknownNetwork,
		"each interface gets a TAP, in order":                            attachGivesTAPs,
		"a VM without interfaces has nothing here":                       nothingToAttach,
		"a VM whose VMM has ended is attached anew":                      attachAgain,
		"an interface that the VM has no more is detached":               interfaceLeft,
		"detaching leaves nothing, once and twice":                       detachTwice,
		"a restarted runtime finds networks and guests":                  restart,
		"many attach and detach at once":                                 concurrent,
		"an attach that fails leaves nothing, and the next one succeeds": failedAttach,
		"counters name every interface in order":                         counters,
		"a network is full at a thousand guests":                         full,
	} {
		t.Run(sentence, func(t *testing.T) {
			h := newHarness(t)
			before := h.Residue(t)
			do(t, h)
			if t.Failed() {
				return
			}
			if after := h.Residue(t); !slices.Equal(before, after) {
				t.Errorf("something was left:\n%s\nbefore:\n%s", strings.Join(after, "\n"), strings.Join(before, "\n"))
			}
		})
	}
}

func setAndForget(t *testing.T, h *Harness) {
	h.statuses(t)
	for range 2 {
		h.set(t, SpecOf(red))
		h.set(t, SpecOf(blue))
	}
	h.statuses(t, network.Status{ID: blue}, network.Status{ID: red})
	changed := SpecOf(red)
	changed.NAT, changed.Denied = true, []string{"192.0.2.0/24"}
	changed.Peers = []network.Peer{{Address: "10.4.0.9", MAC: "02:00:00:00:00:09", VTEP: "192.0.2.9"}}
	h.set(t, changed)
	h.statuses(t, network.Status{ID: blue}, network.Status{ID: red})
	for range 2 {
		h.forget(t, red)
	}
	h.statuses(t, network.Status{ID: blue})
	h.forget(t, blue)
	h.statuses(t)
}

func forgetRefused(t *testing.T, h *Harness) {
	h.set(t, SpecOf(blue))
	h.attach(t, 1, NIC("eth0", blue, 1))
	err := h.Network.Forget(t.Context(), blue)
	isSetupFailure(t, err)
	if err != nil && !strings.Contains(err.Error(), VM(1)) {
		t.Errorf("the error does not say which VM is in the way: %v", err)
	}
	h.statuses(t, network.Status{ID: blue, Guests: 1})
	h.detach(t, 1)
	h.forget(t, blue)
}

func unknownNetwork(t *testing.T, h *Harness) {
	attachments, err := h.Network.Attach(t.Context(), VM(1), []network.Interface{NIC("eth0", red, 1)})
	isSetupFailure(t, err)
	closeAll(attachments)
	h.attached(t)
}

func attachGivesTAPs(t *testing.T, h *Harness) {
	h.set(t, SpecOf(blue))
	h.set(t, SpecOf(red))
	want := []network.Interface{NIC("eth1", red, 1), NIC("eth0", blue, 1)}
	attachments, err := h.Network.Attach(t.Context(), VM(1), want)
	if err != nil {
		t.Fatal(err)
	}
	if len(attachments) != len(want) {
		t.Fatalf("%d attachments for %d interfaces", len(attachments), len(want))
	}
	for i, a := range attachments {
		if a.Interface.Name != want[i].Name || a.Interface.MAC != want[i].MAC || a.TAP == nil {
			t.Errorf("attachment %d is %+v, want interface %+v", i, a, want[i])
		}
	}
	closeAll(attachments)
	h.attached(t, 1)
	h.statuses(t, network.Status{ID: blue, Guests: 1}, network.Status{ID: red, Guests: 1})
	h.detach(t, 1)
	h.forget(t, blue)
	h.forget(t, red)
}

func nothingToAttach(t *testing.T, h *Harness) {
	h.attach(t, 1)
	h.attached(t)
}

func attachAgain(t *testing.T, h *Harness) {
	h.set(t, SpecOf(blue))
	for range 3 {
		h.attach(t, 1, NIC("eth0", blue, 1)) // and its TAP closed, as a VMM's that ends
	}
	h.statuses(t, network.Status{ID: blue, Guests: 1})
	h.detach(t, 1)
	h.attach(t, 1, NIC("eth0", blue, 1))
	h.detach(t, 1)
	h.forget(t, blue)
}

func interfaceLeft(t *testing.T, h *Harness) {
	h.set(t, SpecOf(blue))
	h.set(t, SpecOf(red))
	h.attach(t, 1, NIC("eth0", blue, 1), NIC("eth1", red, 1))
	h.attach(t, 1, NIC("eth0", blue, 1))
	h.statuses(t, network.Status{ID: blue, Guests: 1}, network.Status{ID: red})
	h.forget(t, red)
	h.attach(t, 1)
	h.attached(t)
	h.forget(t, blue)
}

func detachTwice(t *testing.T, h *Harness) {
	h.set(t, SpecOf(blue))
	h.detach(t, 1)
	h.attach(t, 1, NIC("eth0", blue, 1))
	h.attach(t, 2, NIC("eth0", blue, 2))
	for range 2 {
		h.detach(t, 1)
		h.attached(t, 2)
	}
	for range 2 {
		h.detach(t, 2)
		h.attached(t)
	}
	h.forget(t, blue)
}

func restart(t *testing.T, h *Harness) {
	h.set(t, SpecOf(blue))
	h.set(t, SpecOf(red))
	h.attach(t, 1, NIC("eth0", blue, 1))
	h.attach(t, 2, NIC("eth0", blue, 2), NIC("eth1", red, 2))
	h.Network = h.Reopen(t)
	h.attached(t, 1, 2)
	h.statuses(t, network.Status{ID: blue, Guests: 2}, network.Status{ID: red, Guests: 1})
	isSetupFailure(t, h.Network.Forget(t.Context(), red))
	h.attach(t, 1, NIC("eth0", blue, 1))
	h.attach(t, 3, NIC("eth0", blue, 3))
	h.detach(t, 2)
	h.Network = h.Reopen(t)
	h.attached(t, 1, 3)
	h.forget(t, red)
	h.detach(t, 1)
	h.detach(t, 3)
	h.forget(t, blue)
	h.Network = h.Reopen(t)
	h.attached(t)
	h.statuses(t)
}

func concurrent(t *testing.T, h *Harness) {
	const guests = 20
	each := func(do func(n int) error) {
		errs := make([]error, guests+1)
		wait := sync.WaitGroup{}
		for n := 1; n <= guests; n++ {
			wait.Go(func() { errs[n] = do(n) })
		}
		wait.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	}
	each(func(int) error {
		return errors.Join(h.Network.Set(t.Context(), SpecOf(blue)), h.Network.Set(t.Context(), SpecOf(red)))
	})
	each(func(n int) error {
		attachments, err := h.Network.Attach(t.Context(), VM(n), []network.Interface{NIC("eth0", []string{blue, red}[n%2], n)})
		closeAll(attachments)
		return err
	})
	h.statuses(t, network.Status{ID: blue, Guests: guests / 2}, network.Status{ID: red, Guests: guests / 2})
	each(func(n int) error { return h.Network.Detach(t.Context(), VM(n)) })
	h.attached(t)
	each(func(int) error {
		return errors.Join(h.Network.Forget(t.Context(), blue), h.Network.Forget(t.Context(), red))
	})
}

func failedAttach(t *testing.T, h *Harness) {
	h.set(t, SpecOf(blue))
	empty := h.Residue(t)
	fail := func(n int) {
		t.Helper()
		cause := errors.New("no luck")
		h.Fail(cause)
		attachments, err := h.Network.Attach(t.Context(), VM(n), []network.Interface{NIC("eth0", blue, n)})
		closeAll(attachments)
		isSetupFailure(t, err)
		if !errors.Is(err, cause) {
			t.Errorf("the cause is lost: %v", err)
		}
		h.Fail(nil)
	}
	fail(1)
	h.attached(t)
	if left := h.Residue(t); !slices.Equal(empty, left) {
		t.Errorf("the first guest's failure left:\n%s", strings.Join(left, "\n"))
	}
	h.attach(t, 1, NIC("eth0", blue, 1))
	one := h.Residue(t)
	fail(2)
	h.attached(t, 1)
	h.statuses(t, network.Status{ID: blue, Guests: 1})
	if left := h.Residue(t); !slices.Equal(one, left) {
		t.Errorf("the second guest's failure left:\n%s\nbefore:\n%s", strings.Join(left, "\n"), strings.Join(one, "\n"))
	}
	fail(1) // it was attached, and is so after a failure to attach it again
	h.attached(t, 1)
	h.attach(t, 1, NIC("eth0", blue, 1))
	h.detach(t, 1)
	h.forget(t, blue)
}

func counters(t *testing.T, h *Harness) {
	h.set(t, SpecOf(blue))
	h.set(t, SpecOf(red))
	h.attach(t, 2, NIC("eth1", red, 2), NIC("eth0", blue, 2))
	h.attach(t, 1, NIC("eth0", blue, 1))
	got, err := h.Network.Counters(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, c := range got {
		names = append(names, c.VM+" "+c.Interface+" "+c.Network)
	}
	want := []string{VM(1) + " eth0 " + blue, VM(2) + " eth0 " + blue, VM(2) + " eth1 " + red}
	if !slices.Equal(names, want) {
		t.Errorf("counters of\n%s\nwant of\n%s", strings.Join(names, "\n"), strings.Join(want, "\n"))
	}
	h.detach(t, 1)
	h.detach(t, 2)
	if got, err := h.Network.Counters(t.Context()); err != nil || len(got) != 0 {
		t.Errorf("after the last VM: %+v %v", got, err)
	}
	h.forget(t, blue)
	h.forget(t, red)
}

func full(t *testing.T, h *Harness) {
	if h.Slow && testing.Short() {
		t.Skipf("%d guests take long, and this is short mode", network.MaxGuests)
	}
	h.set(t, SpecOf(blue))
	for n := 1; n <= network.MaxGuests; n++ {
		h.attach(t, n, NIC("eth0", blue, n))
	}
	attachments, err := h.Network.Attach(t.Context(), VM(network.MaxGuests+1), []network.Interface{NIC("eth0", blue, network.MaxGuests+1)})
	closeAll(attachments)
	isSetupFailure(t, err)
	if err != nil && (!strings.Contains(err.Error(), "1000 guests") || !strings.Contains(err.Error(), "full")) {
		t.Errorf("the error does not say that the network is full at 1000 guests: %v", err)
	}
	h.statuses(t, network.Status{ID: blue, Guests: network.MaxGuests})
	h.attach(t, 1, NIC("eth0", blue, 1)) // who is in stays in
	h.detach(t, 1)
	h.attach(t, network.MaxGuests+1, NIC("eth0", blue, network.MaxGuests+1))
	for n := 2; n <= network.MaxGuests+1; n++ {
		h.detach(t, n)
	}
	h.forget(t, blue)
}
