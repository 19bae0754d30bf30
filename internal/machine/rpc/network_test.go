package rpc_test

import (
	"context"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/network"
)

// networkStub answers about networks and keeps what it was asked.
type networkStub struct {
	machine.Service
	set      network.Spec
	forgot   string
	networks []network.Status
	err      error
}

func (s *networkStub) SetNetwork(_ context.Context, spec network.Spec) error {
	s.set = spec
	return s.err
}

func (s *networkStub) ForgetNetwork(_ context.Context, id string) error {
	s.forgot = id
	return s.err
}

func (s *networkStub) Networks(context.Context) ([]network.Status, error) { return s.networks, s.err }

// largestNetwork is all that ValidateNetwork lets through.
func largestNetwork() network.Spec {
	s := network.Spec{
		ID: strings.Repeat("a", 64), Namespace: strings.Repeat("b", 253), Name: strings.Repeat("c", 253), Subnet: "100.0.0.0/8", Gateway: "100.0.0.1",
		MTU: 65535, VNI: 1<<24 - 1, NAT: true, EgressInterface: strings.Repeat("d", 15),
	}
	for i := range machine.MaxDenied {
		s.Denied = append(s.Denied, netip.AddrFrom4([4]byte{192, 168, byte(i >> 8), byte(i)}).String()+"/32")
	}
	for i := range machine.MaxPeers {
		address := netip.AddrFrom4([4]byte{100, 100 + byte(i>>16), byte(i >> 8), byte(i)}).String()
		s.Peers = append(s.Peers, network.Peer{Address: address, MAC: "02:00:00:00:00:01", VTEP: "192.168.100.100"})
	}
	return s
}

func TestANetworkOfTheGreatestSizeArrives(t *testing.T) {
	service := &networkStub{}
	client, end := serve(t, service, uint32(os.Geteuid()))
	defer end()
	want := largestNetwork()
	if err := client.SetNetwork(t.Context(), want); err != nil {
		t.Fatal(err)
	}
	if !cmp.Equal(want, service.set) {
		t.Fatal("the network differs from what was sent")
	}
}

func TestNetworksArriveAsTheyWereSent(t *testing.T) {
	service := &networkStub{networks: []network.Status{{ID: "a", Guests: 3}, {ID: "b", Problem: "the bridge is not there"}}}
	client, end := serve(t, service, uint32(os.Geteuid()))
	defer end()
	got, err := client.Networks(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(service.networks, got); d != "" {
		t.Error(d)
	}
	if err := client.ForgetNetwork(t.Context(), "a"); err != nil || service.forgot != "a" {
		t.Errorf("forgot %q, %v", service.forgot, err)
	}
	service.err = fault.Errorf(fault.NetworkSetupFailed, "setting network", "making bridge ibr0: no such device")
	if err := client.SetNetwork(t.Context(), largestNetwork()); !fault.Is(err, fault.NetworkSetupFailed) || err.Error() != service.err.Error() {
		t.Errorf("got %v, want %v", err, service.err)
	}
}
