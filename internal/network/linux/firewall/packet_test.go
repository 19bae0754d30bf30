package firewall_test

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"imp.dev/imp/internal/network/linux/firewall"
)

// ping says whether the address answers.
func (ns namespace) ping(t testing.TB, address string) bool {
	t.Helper()
	answered := false
	ns.do(t, func() error {
		c, err := net.Dial("ip4:icmp", address)
		if err != nil {
			return err
		}
		defer c.Close()
		echo := []byte{8, 0, 0, 0, 0x1a, 0x2b, 0, 1}
		binary.BigEndian.PutUint16(echo[2:], checksum(echo))
		if _, err := c.Write(echo); err != nil {
			return err
		}
		if err := c.SetReadDeadline(time.Now().Add(unreachable)); err != nil {
			return err
		}
		buffer := make([]byte, 1500)
		for {
			n, _, err := c.(*net.IPConn).ReadFrom(buffer)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				return nil
			}
			if err != nil {
				return err
			}
			if n >= 8 && buffer[0] == 0 && buffer[4] == 0x1a {
				answered = true
				return nil
			}
		}
	})
	return answered
}

func TestWhatAnswersAGuestsPing(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	for address, want := range map[string]bool{
		"10.4.0.1":        true,  // the gateway
		"10.4.0.11":       true,  // its neighbour
		"198.51.100.9":    true,  // the world
		"169.254.1.1":     false, // the network's way to the host
		"169.254.1.0":     false, // and the host on it
		"192.0.2.1":       false, // the node
		"172.16.0.1":      false, // the node, as pods know it
		"172.16.0.2":      false, // a pod
		"169.254.169.254": false, // metadata
	} {
		t.Run(address, func(t *testing.T) {
			t.Parallel()
			if got := s.networks[0].inside[0].ping(t, address); got != want {
				t.Errorf("%s answers: %v, want %v", address, got, want)
			}
		})
	}
}

func TestNoListenerOfANodeIsReachedByAGuest(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	g := s.networks[0]
	s.pod.listen(t, "172.16.0.2:80")
	s.nodePort(t, 30080, "172.16.0.2", 80)
	for _, port := range []string{"22", "10250"} {
		g.ns.listen(t, "0.0.0.0:"+port)
		s.host.listen(t, "0.0.0.0:"+port)
	}
	s.outside.mustConnect(t, "192.0.2.1:22", "")
	s.outside.mustConnect(t, "192.0.2.1:30080", "")
	for _, address := range []string{"10.4.0.1", "169.254.1.1", "169.254.1.0", "192.0.2.1", "172.16.0.1"} {
		for _, port := range []string{"22", "10250", "30080"} {
			t.Run(address+":"+port, func(t *testing.T) {
				t.Parallel()
				g.inside[0].mustNotConnect(t, net.JoinHostPort(address, port))
			})
		}
	}
}

func TestWhatAGuestReachesOutside(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	g := s.networks[0]
	s.outside.listen(t, "0.0.0.0:80")
	s.pod.listen(t, "172.16.0.2:80")
	s.outside.route(t, "172.16.0.0/24", "192.0.2.1")
	s.outside.mustConnect(t, "172.16.0.2:80", "")
	s.host.mustConnect(t, "169.254.169.254:80", "")

	t.Run("the world, under the node's address", func(t *testing.T) { g.inside[0].mustConnect(t, "198.51.100.9:80", "192.0.2.1") })
	t.Run("no metadata service, though there is one", func(t *testing.T) { g.inside[0].mustNotConnect(t, "169.254.169.254:80") })
	t.Run("no denied range", func(t *testing.T) { g.inside[0].mustNotConnect(t, "172.16.0.2:80") })
	t.Run("a range that is denied no more, under the node's address", func(t *testing.T) {
		g.config.Denied = nil
		g.ensure(t)
		g.inside[0].mustConnect(t, "172.16.0.2:80", "172.16.0.1")
	})
	t.Run("nothing without NAT", func(t *testing.T) {
		g.config.NAT = false
		g.ensure(t)
		g.inside[0].mustNotConnect(t, "198.51.100.9:80")
	})
}

func TestReservedDestinationsStayInside(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	g := s.networks[0]
	uplink, bridge := s.host.watch(t, s.veth(1)), g.ns.watch(t, "br")
	me := g.guests[0]
	for _, address := range []string{"0.1.2.3", "127.0.0.1", "169.254.3.4", "224.0.0.251", "239.1.2.3", "240.0.0.1", "255.255.255.255", "172.16.0.2", "172.16.0.255", "10.111.255.255", "10.4.0.255"} {
		t.Run(address, func(t *testing.T) {
			send := func(to string) {
				g.inside[0].send(t, "eth0", ether(g.config.GatewayMAC, me.MAC, unix.ETH_P_IP, ipv4(unix.IPPROTO_UDP, me.Address, addr(to), udp(1, 2, []byte("for "+address+" to "+to)))))
			}
			send(address)
			bridge.await(t, "for "+address+" to "+address)
			send("198.51.100.9")
			uplink.await(t, "for "+address+" to 198.51.100.9")
			if uplink.has("for " + address + " to " + address) {
				t.Error("it has left the network")
			}
		})
	}
	if n := g.dropped(t)[me.Port]; n != 0 {
		t.Errorf("%d frames are counted as not the guest's to send", n)
	}
}

// What conntrack makes nothing of is not translated, and would leave under the guest's own address.
func TestWhatBelongsToNoConnectionDoesNotLeave(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	g := s.networks[0]
	uplink, me := s.host.watch(t, s.veth(1)), g.guests[0]
	reset := []byte{0, 9, 0, 9, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x14, 0, 0, 0, 0, 0, 0}
	pseudo := append(append(append([]byte{}, me.Address.AsSlice()...), 198, 51, 100, 9, 0, 6, 0, byte(len(reset))), reset...)
	binary.BigEndian.PutUint16(reset[16:], checksum(pseudo))
	send := func(protocol byte, payload []byte) {
		g.inside[0].send(t, "eth0", ether(g.config.GatewayMAC, me.MAC, unix.ETH_P_IP, ipv4(protocol, me.Address, addr("198.51.100.9"), payload)))
	}
	send(unix.IPPROTO_TCP, reset)
	send(unix.IPPROTO_UDP, udp(1, 2, []byte("afterwards")))
	uplink.await(t, "afterwards")
	if uplink.has(string(reset[:8])) {
		t.Error("the end of no connection has left")
	}
}

// datagrams gives a UDP listener on the address and what it has received.
func (ns namespace) datagrams(t testing.TB, address string) func(marker string) bool {
	t.Helper()
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		t.Fatal(err)
	}
	got := &watcher{more: make(chan struct{}, 1)}
	ns.do(t, func() error {
		c, err := net.ListenPacket("udp4", address)
		if err != nil {
			return err
		}
		t.Cleanup(func() { _ = c.Close() })
		go func() {
			buffer := make([]byte, 65536)
			for {
				n, _, err := c.ReadFrom(buffer)
				if err != nil {
					return
				}
				got.mu.Lock()
				got.frames = append(got.frames, append([]byte(host), buffer[:n]...))
				got.mu.Unlock()
			}
		}()
		return nil
	})
	return got.has
}

func (ns namespace) sendUDP(t testing.TB, address, payload string) {
	t.Helper()
	ns.do(t, func() error {
		c, err := net.Dial("udp4", address)
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write([]byte(payload))
		return err
	})
}

func TestNoGuestSendsToTheOverlaysPort(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	g := s.networks[0]
	overlay, other := s.outside.datagrams(t, "0.0.0.0:14789"), s.outside.datagrams(t, "0.0.0.0:14790")
	s.host.sendUDP(t, "192.0.2.2:14789", "from the node")
	eventually(t, "the node's datagram comes", func() bool { return overlay("from the node") })
	for _, address := range []string{"192.0.2.2", "198.51.100.9"} {
		g.inside[0].sendUDP(t, address+":14789", "to "+address)
		g.inside[0].sendUDP(t, address+":14790", "beside "+address)
		eventually(t, "a datagram to another port comes", func() bool { return other("beside " + address) })
		if overlay("to " + address) {
			t.Errorf("a datagram has reached the overlay's port of %s", address)
		}
	}
}

func TestOnlyTheNodeOpensConnectionsToItsGuests(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	g := s.networks[0]
	s.outside.route(t, "10.4.0.0/24", "192.0.2.1")
	for _, inside := range g.inside {
		inside.listen(t, "0.0.0.0:80")
	}
	t.Run("the node does, and is seen as the gateway", func(t *testing.T) { s.host.mustConnect(t, "10.4.0.10:80", "10.4.0.1") })
	t.Run("the node does without NAT too", func(t *testing.T) {
		g.config.NAT = false
		g.ensure(t)
		s.host.mustConnect(t, "10.4.0.10:80", "10.4.0.1")
	})
	t.Run("the node does not under another of its addresses", func(t *testing.T) {
		if seen, err := s.host.connectFrom("192.0.2.1", "10.4.0.10:80"); err == nil {
			t.Errorf("it was reached and sees %s", seen)
		}
	})
	t.Run("a neighbour does", func(t *testing.T) { g.inside[1].mustConnect(t, "10.4.0.10:80", "10.4.0.11") })
	t.Run("the outside does not", func(t *testing.T) { s.outside.mustNotConnect(t, "10.4.0.10:80") })
	t.Run("a pod does not", func(t *testing.T) { s.pod.mustNotConnect(t, "10.4.0.10:80") })
}

// A connection that is open is judged by what the network is now.
func TestAnOpenConnectionIsCutByWhatForbidsItAlone(t *testing.T) {
	t.Parallel()
	for sentence, tc := range map[string]struct {
		change func(*firewall.Network)
		goesOn bool
	}{
		"its destination becomes denied": {func(n *firewall.Network) { n.Denied = append(n.Denied, netip.MustParsePrefix("198.51.100.0/24")) }, false},
		"NAT is switched off":            {func(n *firewall.Network) { n.NAT = false }, false},
		"another range becomes denied":   {func(n *firewall.Network) { n.Denied = append(n.Denied, netip.MustParsePrefix("203.0.113.0/24")) }, true},
	} {
		t.Run(sentence, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			g := s.networks[0]
			echoed := s.outside.echo(t, "198.51.100.9:7")
			var c net.Conn
			g.inside[0].do(t, func() (err error) {
				c, err = net.DialTimeout("tcp4", "198.51.100.9:7", unreachable)
				return err
			})
			t.Cleanup(func() { _ = c.Close() })
			if !echoed(c) {
				t.Fatal("the connection is of no use before")
			}
			g.ensure(t)
			if !echoed(c) {
				t.Fatal("an Ensure of the same has cut it")
			}
			tc.change(&g.config)
			g.ensure(t)
			if got := echoed(c); got != tc.goesOn {
				t.Errorf("the connection goes on: %v, want %v", got, tc.goesOn)
			}
		})
	}
}

// echo serves the address; what it gives says whether a connection to it still works.
func (ns namespace) echo(t testing.TB, address string) func(net.Conn) bool {
	t.Helper()
	ns.do(t, func() error {
		l, err := net.Listen("tcp4", address)
		if err != nil {
			return err
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				t.Cleanup(func() { _ = c.Close() })
				go func() {
					buffer := make([]byte, 1)
					for {
						if _, err := c.Read(buffer); err != nil {
							return
						}
						if _, err := c.Write(buffer); err != nil {
							return
						}
					}
				}()
			}
		}()
		return nil
	})
	return func(c net.Conn) bool {
		if _, err := c.Write([]byte{1}); err != nil {
			return false
		}
		if err := c.SetReadDeadline(time.Now().Add(unreachable)); err != nil {
			return false
		}
		_, err := c.Read(make([]byte, 1))
		return err == nil
	}
}

// The host's word that a packet is too big comes from a link-local address, which guests may not reach.
func TestAGuestLearnsThatThePathIsNarrow(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.host.narrow(t, "eth0", 1400)
	s.networks[0].inside[0].do(t, func() error {
		socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(socket)
		if err := unix.SetsockoptInt(socket, unix.SOL_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO); err != nil {
			return err
		}
		if err := unix.Connect(socket, &unix.SockaddrInet4{Port: 9, Addr: [4]byte{198, 51, 100, 9}}); err != nil {
			return err
		}
		if _, err := unix.Write(socket, make([]byte, 1450)); err != nil {
			return err
		}
		eventually(t, "the guest knows of 1400 bytes", func() bool {
			mtu, err := unix.GetsockoptInt(socket, unix.SOL_IP, unix.IP_MTU)
			return err == nil && mtu == 1400
		})
		return nil
	})
}
