package firewall_test

import (
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/google/nftables"

	"imp.dev/imp/internal/network/linux/firewall"
)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func mac(s string) net.HardwareAddr {
	m, err := net.ParseMAC(s)
	if err != nil {
		panic(err)
	}
	return m
}

// aNetwork is what tests begin with.
func aNetwork() firewall.Network {
	return firewall.Network{
		Bridge: "br", Uplink: "up", Overlay: "vx", Subnet: netip.MustParsePrefix("10.4.0.0/24"), Gateway: addr("10.4.0.1"),
		GatewayMAC: mac("02:00:00:00:00:01"), Transit: addr("169.254.1.1"), HostTransit: addr("169.254.1.0"),
		NAT: true, Port: 14789, Denied: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12"), netip.MustParsePrefix("10.100.0.0/16")},
	}
}

func guest(n int) firewall.Guest {
	return firewall.Guest{Port: fmt.Sprintf("tap%d", n), MAC: net.HardwareAddr{2, 0, 0, 1, byte(n >> 8), byte(n)},
		Address: netip.AddrFrom4([4]byte{10, 4, byte(n >> 8), byte(n)})}
}

func TestASecondEnsureOfTheSameChangesNothing(t *testing.T) {
	ns := newNamespace(t)
	n, guests := aNetwork(), []firewall.Guest{guest(10), guest(11)}
	for _, want := range []bool{true, false} {
		changed, err := firewall.EnsureNetwork(int(ns), n, guests)
		if err != nil || changed != want {
			t.Fatalf("changed is %v (%v), want %v", changed, err, want)
		}
	}
	h := firewall.Host{Instance: "one", Prefix: "i0a1b", Transits: []netip.Addr{addr("169.254.1.1")}, Egress: map[string]string{"i0a1bx": "eth0"},
		Port: 14789, VNIs: []uint32{7, 1<<24 - 1}, Peers: []firewall.Peer{{VNI: 7, VTEP: addr("192.0.2.2")}}}
	for _, want := range []bool{true, false} {
		changed, err := firewall.EnsureHost(int(ns), h)
		if err != nil || changed != want {
			t.Fatalf("changed is %v (%v), want %v", changed, err, want)
		}
	}
	_ = nftables.Conn{}
}
