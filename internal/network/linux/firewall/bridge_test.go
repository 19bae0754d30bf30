package firewall_test

import (
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"testing"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"imp.dev/imp/internal/network/linux/firewall"
)

func TestAGuestsOwnFramesReachItsNeighbour(t *testing.T) {
	t.Parallel()
	g := newSite(t).networks[0]
	me, other := g.guests[0], g.guests[1]
	neighbour := g.inside[1].watch(t, "eth0")
	for sentence, frame := range map[string][]byte{
		"an ARP question":     ether(broadcast, me.MAC, unix.ETH_P_ARP, arp(1, 6, me.MAC, me.Address, other.Address, "an ARP question")),
		"an ARP answer":       ether(other.MAC, me.MAC, unix.ETH_P_ARP, arp(2, 6, me.MAC, me.Address, other.Address, "an ARP answer")),
		"an IPv4 packet":      ether(other.MAC, me.MAC, unix.ETH_P_IP, ipv4(unix.IPPROTO_UDP, me.Address, other.Address, udp(1, 2, []byte("an IPv4 packet")))),
		"an IPv4 broadcast":   ether(broadcast, me.MAC, unix.ETH_P_IP, ipv4(unix.IPPROTO_UDP, me.Address, netip.MustParseAddr("255.255.255.255"), udp(1, 2, []byte("an IPv4 broadcast")))),
		"a protocol of IPv4s": ether(other.MAC, me.MAC, unix.ETH_P_IP, ipv4(unix.IPPROTO_GRE, me.Address, other.Address, []byte("a protocol of IPv4s"))),
	} {
		t.Run(sentence, func(t *testing.T) {
			g.inside[0].send(t, "eth0", frame)
			neighbour.await(t, sentence)
		})
	}
	if counted := g.dropped(t); counted["tap10"] != 0 || counted["tap11"] != 0 {
		t.Errorf("something of it was counted: %v", counted)
	}
}

// forgeries are frames that are not the guest's to send, each with its sentence in it.
func forgeries(me, other firewall.Guest, gateway netip.Addr) map[string][]byte {
	packet := func(from netip.Addr, marker string) []byte {
		return ipv4(unix.IPPROTO_UDP, from, other.Address, udp(1, 2, []byte(marker)))
	}
	mine := func(marker string) []byte { return ether(other.MAC, me.MAC, unix.ETH_P_IP, packet(me.Address, marker)) }
	frames := map[string][]byte{
		"a neighbour's MAC":                         ether(broadcast, other.MAC, unix.ETH_P_IP, packet(me.Address, "a neighbour's MAC")),
		"a neighbour's address":                     ether(other.MAC, me.MAC, unix.ETH_P_IP, packet(other.Address, "a neighbour's address")),
		"the neighbour as a whole":                  ether(broadcast, other.MAC, unix.ETH_P_IP, packet(other.Address, "the neighbour as a whole")),
		"the gateway's address":                     ether(other.MAC, me.MAC, unix.ETH_P_IP, packet(gateway, "the gateway's address")),
		"no address, as DHCP has it":                ether(broadcast, me.MAC, unix.ETH_P_IP, packet(netip.IPv4Unspecified(), "no address, as DHCP has it")),
		"an ARP answer for the gateway":             ether(other.MAC, me.MAC, unix.ETH_P_ARP, arp(2, 6, me.MAC, gateway, other.Address, "an ARP answer for the gateway")),
		"an ARP announcement of a neighbour":        ether(broadcast, me.MAC, unix.ETH_P_ARP, arp(1, 6, me.MAC, other.Address, other.Address, "an ARP announcement of a neighbour")),
		"ARP that says another's MAC":               ether(broadcast, me.MAC, unix.ETH_P_ARP, arp(1, 6, other.MAC, me.Address, other.Address, "ARP that says another's MAC")),
		"ARP from another's MAC":                    ether(broadcast, other.MAC, unix.ETH_P_ARP, arp(1, 6, me.MAC, me.Address, other.Address, "ARP from another's MAC")),
		"ARP about MACs of eight bytes":             ether(broadcast, me.MAC, unix.ETH_P_ARP, arp(1, 8, me.MAC, me.Address, other.Address, "ARP about MACs of eight bytes")),
		"a VLAN tag":                                tagged(mine("a VLAN tag"), unix.ETH_P_8021Q, 5),
		"a priority tag":                            tagged(mine("a priority tag"), unix.ETH_P_8021Q, 0xe000),
		"a provider's tag":                          tagged(mine("a provider's tag"), unix.ETH_P_8021AD, 5),
		"two tags":                                  tagged(tagged(mine("two tags"), unix.ETH_P_8021Q, 5), unix.ETH_P_8021AD, 6),
		"ARP with a tag":                            tagged(ether(broadcast, me.MAC, unix.ETH_P_ARP, arp(1, 6, me.MAC, me.Address, other.Address, "ARP with a tag")), unix.ETH_P_8021Q, 5),
		"an IPv6 router advertisement":              ether(net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1}, me.MAC, unix.ETH_P_IPV6, append(routerAdvertisement(), "an IPv6 router advertisement"...)),
		"an STP BPDU":                               ether(net.HardwareAddr{1, 0x80, 0xc2, 0, 0, 0}, me.MAC, 38, append([]byte{0x42, 0x42, 3, 0, 0, 0, 0}, "an STP BPDU: we are the root, of all"...)),
		"LACP":                                      ether(net.HardwareAddr{1, 0x80, 0xc2, 0, 0, 2}, me.MAC, unix.ETH_P_SLOW, []byte("LACP")),
		"LLDP":                                      ether(net.HardwareAddr{1, 0x80, 0xc2, 0, 0, 0xe}, me.MAC, unix.ETH_P_LLDP, []byte("LLDP")),
		"a packet to a bridge's group address":      ether(net.HardwareAddr{1, 0x80, 0xc2, 0, 0, 0xe}, me.MAC, unix.ETH_P_IP, packet(other.Address, "a packet to a bridge's group address")),
		"an own packet to a slow protocols address": ether(net.HardwareAddr{1, 0x80, 0xc2, 0, 0, 2}, me.MAC, unix.ETH_P_IP, packet(me.Address, "an own packet to a slow protocols address")),
		"RARP":                     ether(broadcast, me.MAC, 0x8035, []byte("RARP")),
		"a type that nobody knows": ether(broadcast, me.MAC, 0x88b5, []byte("a type that nobody knows")),
		"MPLS":                     ether(broadcast, me.MAC, unix.ETH_P_MPLS_UC, []byte("MPLS")),
		"PPPoE":                    ether(broadcast, me.MAC, unix.ETH_P_PPP_SES, []byte("PPPoE")),
	}
	// Too short to have an address: nothing is to be found in it but its type.
	frames["an IPv4 packet of five bytes"] = ether(other.MAC, me.MAC, unix.ETH_P_IP, []byte{0x45, 0, 0, 5, 0})
	return frames
}

func routerAdvertisement() []byte {
	h := append([]byte{0x60, 0, 0, 0, 0, 48, unix.IPPROTO_ICMPV6, 255}, net.ParseIP("fe80::bad")...)
	return append(append(h, net.ParseIP("ff02::1")...), 134, 0, 0, 0, 64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0)
}

func TestForgedFramesReachNobodyAndAreCountedForTheirPortAlone(t *testing.T) {
	t.Parallel()
	g := newSite(t).networks[0]
	me, other := g.guests[0], g.guests[1]
	places := map[string]*watcher{
		"the neighbour": g.inside[1].watch(t, "eth0"), "the gateway": g.ns.watch(t, "br"), "the overlay": g.overlay.watch(t, "eth0"),
	}
	for sentence, frame := range forgeries(me, other, g.config.Gateway) {
		t.Run(sentence, func(t *testing.T) {
			before := g.dropped(t)
			g.inside[0].send(t, "eth0", frame)
			eventually(t, "the port's counter goes up", func() bool { return g.dropped(t)["tap10"] == before["tap10"]+1 })
			// What the guest sends next comes later than what must not come.
			after := "after " + sentence
			g.inside[0].send(t, "eth0", ether(broadcast, me.MAC, unix.ETH_P_IP, ipv4(unix.IPPROTO_UDP, me.Address, other.Address, udp(1, 2, []byte(after)))))
			for place, w := range places {
				w.await(t, after)
				if w.received(frame) {
					t.Errorf("it has reached %s", place)
				}
			}
			if now := g.dropped(t); now["tap11"] != before["tap11"] || now["tap10"] != before["tap10"]+1 {
				t.Errorf("counted are %v, before %v", now, before)
			}
		})
	}
}

func TestAPortThatIsNoGuestsSendsNothing(t *testing.T) {
	t.Parallel()
	g := newSite(t).networks[0]
	me, stranger := g.guests[0], newNamespace(t)
	wire(t, g.ns, "other", nil, stranger, "eth0", nil)
	g.port(t, "other")
	neighbour := g.inside[1].watch(t, "eth0")
	stranger.send(t, "eth0", ether(broadcast, me.MAC, unix.ETH_P_IP, ipv4(unix.IPPROTO_UDP, me.Address, g.guests[1].Address, udp(1, 2, []byte("from a stranger's port")))))
	g.inside[0].send(t, "eth0", ether(broadcast, me.MAC, unix.ETH_P_IP, ipv4(unix.IPPROTO_UDP, me.Address, g.guests[1].Address, udp(1, 2, []byte("afterwards")))))
	neighbour.await(t, "afterwards")
	if neighbour.has("from a stranger's port") {
		t.Error("a frame passed that no guest's port sent")
	}
}

func TestTheOverlayBringsARPAndIPv4OfOtherNodesGuests(t *testing.T) {
	t.Parallel()
	g := newSite(t).networks[0]
	here, far, farIP := g.guests[0], mac("02:00:00:00:02:02"), addr("10.4.0.77")
	guest := g.inside[0].watch(t, "eth0")
	packet := func(marker string) []byte {
		return ipv4(unix.IPPROTO_UDP, farIP, here.Address, udp(1, 2, []byte(marker)))
	}
	for sentence, tc := range map[string]struct {
		frame  []byte
		passes bool
	}{
		"a packet":                {ether(here.MAC, far, unix.ETH_P_IP, packet("a packet")), true},
		"ARP":                     {ether(broadcast, far, unix.ETH_P_ARP, arp(1, 6, far, farIP, here.Address, "ARP of the overlay")), true},
		"IPv6":                    {ether(broadcast, far, unix.ETH_P_IPV6, append(routerAdvertisement(), "IPv6"...)), false},
		"a VLAN tag":              {tagged(ether(here.MAC, far, unix.ETH_P_IP, packet("a VLAN tag")), unix.ETH_P_8021Q, 5), false},
		"another node's gateway":  {ether(here.MAC, g.config.GatewayMAC, unix.ETH_P_IP, packet("another node's gateway")), false},
		"ARP of another gateway":  {ether(broadcast, g.config.GatewayMAC, unix.ETH_P_ARP, arp(2, 6, g.config.GatewayMAC, g.config.Gateway, here.Address, "ARP of another gateway")), false},
		"LACP from another node":  {ether(net.HardwareAddr{1, 0x80, 0xc2, 0, 0, 2}, far, unix.ETH_P_SLOW, []byte("LACP from another node")), false},
		"an STP BPDU of a bridge": {ether(net.HardwareAddr{1, 0x80, 0xc2, 0, 0, 0}, far, 38, []byte("an STP BPDU of a bridge, the root one")), false},
	} {
		t.Run(sentence, func(t *testing.T) {
			after := "after " + sentence
			g.overlay.send(t, "eth0", tc.frame)
			g.overlay.send(t, "eth0", ether(here.MAC, far, unix.ETH_P_IP, packet(after)))
			guest.await(t, after)
			passed := guest.received(tc.frame)
			if passed != tc.passes {
				t.Errorf("it passed: %v, want %v", passed, tc.passes)
			}
		})
	}
	if counted := g.dropped(t); counted["tap10"]+counted["tap11"] != 0 || len(counted) != 2 {
		t.Errorf("frames of the overlay are counted for guests: %v", counted)
	}
}

// A bridge without a mask of group addresses hands such frames to the port's device, where they would be routed.
func TestAFrameThatPassesByTheBridgeIsNotRouted(t *testing.T) {
	t.Parallel()
	s := newSiteOf(t, 0)
	g := s.networks[0]
	me, other := g.guests[0], g.guests[1]
	port, outside := g.ns.watch(t, me.Port), s.outside.watch(t, "e0")
	frame := ether(net.HardwareAddr{1, 0x80, 0xc2, 0, 0, 0xe}, me.MAC, unix.ETH_P_IP,
		ipv4(unix.IPPROTO_UDP, other.Address, addr("198.51.100.9"), udp(1, 2, []byte("past the bridge"))))
	g.inside[0].send(t, "eth0", frame)
	port.await(t, "past the bridge")
	g.inside[0].do(t, func() error {
		c, err := net.Dial("udp4", "198.51.100.9:9")
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write([]byte("by the bridge"))
		return err
	})
	outside.await(t, "by the bridge")
	if outside.has("past the bridge") {
		t.Error("a packet under a neighbour's address was routed to the outside")
	}
}

// The kernel would answer an IPv6 ping that comes that way, by the port's own address.
func TestNoIPv6IsAnsweredPastTheBridge(t *testing.T) {
	t.Parallel()
	s := newSiteOf(t, 0)
	g := s.networks[0]
	me := g.guests[0]
	guest, port := g.inside[0].watch(t, "eth0"), g.ns.watch(t, me.Port)
	packet := append([]byte{0x60, 0, 0, 0, 0, 24, unix.IPPROTO_ICMPV6, 255}, net.ParseIP("fe80::1")...)
	packet = append(packet, net.ParseIP("ff02::1")...)
	begin := len(packet)
	packet = append(packet, 128, 0, 0, 0, 0x1a, 0x2b, 0, 1)
	packet = append(packet, "an IPv6 question"...)
	pseudo := append(append([]byte{}, packet[8:40]...), 0, 0, 0, 24, 0, 0, 0, unix.IPPROTO_ICMPV6)
	binary.BigEndian.PutUint16(packet[begin+2:], checksum(append(pseudo, packet[begin:]...)))
	g.ns.do(t, func() error {
		link, err := netlink.LinkByName(me.Port)
		if err != nil {
			return err
		}
		// No wait for a duplicate, and nobody to be asked where the answer goes.
		address := &netlink.Addr{IPNet: &net.IPNet{IP: net.ParseIP("fe80::2"), Mask: net.CIDRMask(64, 128)}, Flags: unix.IFA_F_NODAD}
		if err := netlink.AddrAdd(link, address); err != nil {
			return err
		}
		return netlink.NeighAdd(&netlink.Neigh{LinkIndex: link.Attrs().Index, Family: unix.AF_INET6, State: netlink.NUD_PERMANENT, IP: net.ParseIP("fe80::1"), HardwareAddr: me.MAC})
	})
	g.inside[0].send(t, "eth0", ether(net.HardwareAddr{1, 0x80, 0xc2, 0, 0, 0xe}, me.MAC, unix.ETH_P_IPV6, packet))
	port.await(t, "an IPv6 question")
	g.inside[1].send(t, "eth0", ether(broadcast, g.guests[1].MAC, unix.ETH_P_IP, ipv4(unix.IPPROTO_UDP, g.guests[1].Address, me.Address, udp(1, 2, []byte("afterwards")))))
	guest.await(t, "afterwards")
	if guest.has("an IPv6 question") {
		t.Error("it was answered")
	}
}

func TestNoARPCrossesToOtherNodes(t *testing.T) {
	t.Parallel()
	g := newSite(t).networks[0]
	me, overlay := g.guests[0], g.overlay.watch(t, "eth0")
	far, farIP := mac("02:00:00:00:02:02"), addr("10.4.0.77")
	for _, to := range []net.HardwareAddr{broadcast, far} {
		g.inside[0].send(t, "eth0", ether(to, me.MAC, unix.ETH_P_ARP, arp(1, 6, me.MAC, me.Address, farIP, "who has it, "+to.String())))
		g.inside[0].send(t, "eth0", ether(to, me.MAC, unix.ETH_P_IP, ipv4(unix.IPPROTO_UDP, me.Address, farIP, udp(1, 2, []byte("a packet to "+to.String())))))
		overlay.await(t, "a packet to "+to.String())
		if overlay.has("who has it, " + to.String()) {
			t.Errorf("ARP to %s has crossed", to)
		}
	}
}

func TestFramesOfATAPAreJudgedLikeAnyPorts(t *testing.T) {
	t.Parallel()
	g := newSite(t).networks[0]
	me := guest(12)
	var tap *os.File
	g.ns.do(t, func() (err error) {
		tap, err = openTAP(me.Port)
		return err
	})
	t.Cleanup(func() { tap.Close() })
	g.ns.do(t, func() error { return up(me.Port) })
	g.port(t, me.Port)
	if err := firewall.AddGuest(int(g.ns), me); err != nil {
		t.Fatal(err)
	}
	neighbour, other := g.inside[1].watch(t, "eth0"), g.guests[1]
	sent := uint64(0)
	for sentence, frame := range forgeries(me, other, g.config.Gateway) {
		t.Run(sentence, func(t *testing.T) {
			if _, err := tap.Write(frame); err != nil {
				t.Fatal(err)
			}
			sent++
			eventually(t, "the port's counter goes up", func() bool { return g.dropped(t)[me.Port] == sent })
			after := "after " + sentence
			if _, err := tap.Write(ether(other.MAC, me.MAC, unix.ETH_P_IP, ipv4(unix.IPPROTO_UDP, me.Address, other.Address, udp(1, 2, []byte(after))))); err != nil {
				t.Fatal(err)
			}
			neighbour.await(t, after)
			if neighbour.received(frame) {
				t.Error("it has reached the neighbour")
			}
		})
	}
}

// openTAP makes a TAP in the calling thread's namespace, which goes when it is closed.
func openTAP(name string) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	request := make([]byte, 40) // struct ifreq
	copy(request, name)
	binary.NativeEndian.PutUint16(request[unix.IFNAMSIZ:], unix.IFF_TAP|unix.IFF_NO_PI)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TUNSETIFF, uintptr(unsafe.Pointer(&request[0]))); errno != 0 {
		unix.Close(fd)
		return nil, errno
	}
	return os.NewFile(uintptr(fd), name), nil
}
