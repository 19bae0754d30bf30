package firewall_test

import (
	"encoding/binary"
	"testing"

	"golang.org/x/sys/unix"

	"imp.dev/imp/internal/network/linux/firewall"
)

func TestNetworksOfOneHostDoNotReachEachOther(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	one, two := s.networks[0], s.add(t)
	for _, g := range []*segment{one, two} {
		g.inside[0].listen(t, "0.0.0.0:80")
	}
	s.host.mustConnect(t, "10.4.0.10:80", "10.4.0.1")
	s.host.mustConnect(t, "10.5.0.10:80", "10.5.0.1")
	t.Run("by the guest's address", func(t *testing.T) { one.inside[0].mustNotConnect(t, "10.5.0.10:80") })
	t.Run("the other way", func(t *testing.T) { two.inside[1].mustNotConnect(t, "10.4.0.10:80") })
	t.Run("nor does another instance's", func(t *testing.T) {
		// The same network, as if another instance had made it: its veth bears another prefix, and two tables judge.
		other := s.config
		other.Instance, other.Prefix, other.Transits = "two", prefix+"2", s.config.Transits[1:]
		s.config.Transits = s.config.Transits[:1]
		s.config.Prefix = prefix + "1"
		s.ensure(t)
		if _, err := firewall.EnsureHost(int(s.host), other); err != nil {
			t.Fatal(err)
		}
		s.host.mustConnect(t, "10.5.0.10:80", "10.5.0.1")
		one.inside[0].mustNotConnect(t, "10.5.0.10:80")
	})
}

func TestTwoNetworksWithOneSubnetReachTheWorld(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.outside.listen(t, "198.51.100.9:80")
	two := s.addOf(t, 4)
	for _, g := range []*segment{s.networks[0], two} {
		g.inside[0].mustConnect(t, "198.51.100.9:80", "192.0.2.1")
		g.inside[1].mustConnect(t, "198.51.100.9:80", "192.0.2.1")
	}
	s.networks[0].inside[0].listen(t, "0.0.0.0:80")
	two.inside[1].mustNotConnect(t, "10.4.0.10:80") // there are two of that address, and only the twin listens
}

func TestAnEgressInterfaceIsTheOnlyWayOut(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	second := s.add(t)
	s.outside.listen(t, "198.51.100.9:80")
	s.config.Egress = map[string]string{s.veth(1): "eth1", s.veth(2): "eth0"}
	s.ensure(t)
	t.Run("a network that is bound to another interface does not get out by this one", func(t *testing.T) {
		s.networks[0].inside[0].mustNotConnect(t, "198.51.100.9:80")
	})
	t.Run("one that is bound to it does", func(t *testing.T) { second.inside[0].mustConnect(t, "198.51.100.9:80", "192.0.2.1") })
	t.Run("the node reaches guests that are bound", func(t *testing.T) {
		s.networks[0].inside[0].listen(t, "0.0.0.0:80")
		s.host.mustConnect(t, "10.4.0.10:80", "10.4.0.1")
	})
	t.Run("one that is not bound gets out", func(t *testing.T) {
		s.config.Egress = nil
		s.ensure(t)
		s.networks[0].inside[0].mustConnect(t, "198.51.100.9:80", "192.0.2.1")
	})
}

// What a network's own rules let out under another source than its way to the host is refused by the host.
func TestTheHostTakesConnectionsFromTransitsAlone(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	g := s.networks[0]
	outside := s.outside.watch(t, "e0")
	send := func(from, marker string) {
		g.ns.sendRaw(t, ipv4(unix.IPPROTO_UDP, addr(from), addr("198.51.100.9"), udp(1, 2, []byte(marker))))
	}
	send("192.0.2.2", "under a node's address")
	send("169.254.1.1", "under the way's address")
	outside.await(t, "under the way's address")
	if outside.has("under a node's address") {
		t.Error("the host has forwarded it")
	}
}

// sendRaw sends an IPv4 packet as it is, whatever its source, by the namespace's routes.
func (ns namespace) sendRaw(t testing.TB, packet []byte) {
	t.Helper()
	ns.do(t, func() error {
		socket, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(socket)
		to := &unix.SockaddrInet4{Addr: [4]byte(packet[16:20])}
		return unix.Sendto(socket, packet, 0, to)
	})
}

// vxlan is the payload of a datagram of that network; the last byte of its header is reserved.
func vxlan(vni uint32, reserved byte, marker string) []byte {
	h := []byte{8, 0, 0, 0}
	return append(binary.BigEndian.AppendUint32(h, vni<<8|uint32(reserved)), marker...)
}

func TestAPodSendsNothingThatAnotherNodeTakesForItsPeers(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.config.VNIs = []uint32{7}
	s.config.Peers = []firewall.Peer{{VNI: 7, VTEP: addr("192.0.2.2")}}
	s.ensure(t)
	s.masquerade(t, "172.16.0.0/24") // as CNIs do with what pods send to nodes
	received, beside := s.outside.datagrams(t, "192.0.2.2:14789"), s.outside.datagrams(t, "192.0.2.2:14790")
	for sentence, tc := range map[string]struct {
		vni  uint32
		want bool
	}{
		"of a network of this node": {7, false},
		"of somebody else's":        {99, true},
	} {
		marker := "<" + sentence + ">"
		for _, port := range []uint16{14789, 14790} {
			s.pod.sendRaw(t, ipv4(unix.IPPROTO_UDP, addr("172.16.0.2"), addr("192.0.2.2"), udp(4000, port, vxlan(tc.vni, 0, marker))))
		}
		eventually(t, "what is sent to another port comes", func() bool { return beside(marker) })
		if tc.want {
			eventually(t, sentence+": it comes", func() bool { return received(marker) })
		} else if received(marker) {
			t.Errorf("%s: it was received under the node's address", sentence)
		}
	}
}

func TestTheOverlayIsTakenFromPeersAlone(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.config.VNIs = []uint32{7, 8}
	s.config.Peers = []firewall.Peer{{VNI: 7, VTEP: addr("192.0.2.2")}, {VNI: 8, VTEP: addr("192.0.2.3")}}
	s.ensure(t)
	received := s.host.datagrams(t, "0.0.0.0:14789")
	beside := s.host.datagrams(t, "0.0.0.0:14790")
	s.translate(t, unix.IPPROTO_UDP, 9999, "192.0.2.1", 14789)
	for sentence, tc := range map[string]struct {
		sender   namespace
		from, to string
		port     uint16
		vni      uint32
		reserved byte
		want     bool
	}{
		"from a peer":                               {s.outside, "192.0.2.2", "192.0.2.1", 14789, 7, 0, true},
		"from a peer with a reserved byte":          {s.outside, "192.0.2.2", "192.0.2.1", 14789, 7, 0xff, true},
		"from a node that is a peer elsewhere":      {s.outside, "192.0.2.3", "192.0.2.1", 14789, 7, 0, false},
		"from that node where it is one":            {s.outside, "192.0.2.3", "192.0.2.1", 14789, 8, 0, true},
		"from no peer with a reserved byte":         {s.outside, "192.0.2.3", "192.0.2.1", 14789, 7, 1, false},
		"of somebody else's network":                {s.outside, "192.0.2.3", "192.0.2.1", 14789, 99, 0, true},
		"from a pod":                                {s.pod, "172.16.0.2", "192.0.2.1", 14789, 7, 0, false},
		"from a pod under a peer's address":         {s.pod, "192.0.2.2", "192.0.2.1", 14789, 7, 0, false},
		"from a pod to another address of the node": {s.pod, "192.0.2.2", "172.16.0.1", 14789, 7, 0, false},
		"from a pod by another's translation":       {s.pod, "172.16.0.2", "203.0.113.1", 9999, 7, 0, false},
		"from such a pod under a peer's address":    {s.pod, "192.0.2.2", "203.0.113.1", 9999, 7, 0, false},
		"from a peer by another's translation":      {s.outside, "192.0.2.2", "203.0.113.1", 9999, 7, 0, true},
		"of somebody else, from a pod":              {s.pod, "192.0.2.2", "192.0.2.1", 14789, 99, 0, true},
	} {
		t.Run(sentence, func(t *testing.T) {
			send := func(sender namespace, from, to string, port uint16, payload []byte) {
				sender.sendRaw(t, ipv4(unix.IPPROTO_UDP, addr(from), addr(to), udp(4000, port, payload)))
			}
			marker := "<" + sentence + ">"
			send(tc.sender, tc.from, tc.to, tc.port, vxlan(tc.vni, tc.reserved, marker))
			send(tc.sender, tc.from, "192.0.2.1", 14790, vxlan(99, 0, "after "+marker))
			eventually(t, "what is sent afterwards comes", func() bool { return beside("after " + marker) })
			if tc.want {
				eventually(t, "it comes", func() bool { return received(marker) })
			} else if received(marker) {
				t.Error("it was received")
			}
		})
	}
}
