package linux

import (
	"encoding/binary"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"imp.dev/imp/internal/network"
	"imp.dev/imp/internal/network/networktest"
)

const (
	blue = "6f1c2a9e-0d1b-4a64-9f0a-2f6e4e1b7c01"
	red  = "b24d7e50-83aa-4f7c-8a52-0c5d9e6f1d02"
)

func spec(id string, mtu int, peers ...network.Peer) network.Spec {
	s := networktest.SpecOf(id)
	s.MTU, s.Peers = mtu, peers
	return s
}

// nic is the interface of the n-th VM with that address.
func nic(id string, vm int, address string) network.Interface {
	i := networktest.NIC("eth0", id, vm)
	i.Addresses = []string{address + "/16"}
	return i
}

func peer(i network.Interface, node int) network.Peer {
	p := netip.MustParsePrefix(i.Addresses[0])
	return network.Peer{Address: p.Addr().String(), MAC: i.MAC, VTEP: netip.AddrFrom4([4]byte{192, 0, 2, byte(node)}).String()}
}

func (n *node) set(t testing.TB, s network.Spec) {
	t.Helper()
	if err := n.Set(t.Context(), s); err != nil {
		t.Fatal(err)
	}
}

func (n *node) detach(t testing.TB, vm int) {
	t.Helper()
	if err := n.Detach(t.Context(), networktest.VM(vm)); err != nil {
		t.Fatal(err)
	}
}

var gateway = netip.MustParseAddr("10.4.0.1")

// capture gives the frames that a device of the namespace sends and receives.
type capture struct {
	mu     sync.Mutex
	frames [][]byte
}

func newCapture(t testing.TB, s *space, device string) *capture {
	t.Helper()
	c, fd := &capture{}, -1
	must(t, s.inside(func() (err error) {
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(binary.NativeEndian.Uint16([]byte{0, unix.ETH_P_ALL})))
		if err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrLinklayer{Ifindex: mustLink(t, s, device).Attrs().Index, Protocol: binary.NativeEndian.Uint16([]byte{0, unix.ETH_P_ALL})})
	}))
	pace := unix.NsecToTimeval((50 * time.Millisecond).Nanoseconds())
	must(t, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &pace))
	end, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		buffer := make([]byte, 1<<16)
		for {
			n, _, err := unix.Recvfrom(fd, buffer, 0)
			if err == nil {
				c.mu.Lock()
				c.frames = append(c.frames, append([]byte(nil), buffer[:n]...))
				c.mu.Unlock()
			}
			select {
			case <-end:
				return
			default:
			}
		}
	}()
	t.Cleanup(func() { close(end); <-done; _ = unix.Close(fd) })
	return c
}

// inner gives the frames inside the overlay's packets on a port: outer Ethernet 14, IP 20, UDP 8, VXLAN 8.
func (c *capture) inner(port uint16) [][]byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out [][]byte
	for _, f := range c.frames {
		if len(f) > 64 && binary.BigEndian.Uint16(f[12:]) == 0x0800 && f[23] == 17 && binary.BigEndian.Uint16(f[36:]) == port {
			out = append(out, f[50:])
		}
	}
	return out
}

func TestGuestsOnTwoNodesReachEachOther(t *testing.T) {
	s := newSite(t, 9000)
	a, b := s.newNode(t), s.newNode(t)
	on, off := nic(blue, 1, "10.4.0.11"), nic(blue, 2, "10.4.0.12")
	third := nic(blue, 3, "10.4.0.13")
	a.set(t, spec(blue, 8950, peer(off, 2)))
	b.set(t, spec(blue, 8950, peer(on, 1), peer(third, 1)))
	wire := newCapture(t, a.host, "wire")
	here, there, beside := a.attach(t, 1, on), b.attach(t, 2, off), a.attach(t, 3, third)
	here.mustPing(there.address, 56)
	there.mustPing(here.address, 56)
	there.mustPing(beside.address, 56)
	here.mustPing(beside.address, 56)
	here.mustPing(there.address, 8192)
	there.mustPing(here.address, 8950-28)
	here.mustPing(gateway, 56)
	there.mustPing(gateway, 56)
	if here.cache[gateway] != there.cache[gateway] {
		t.Errorf("the gateway has two MACs: %s and %s", here.cache[gateway], there.cache[gateway])
	}

	frames := wire.inner(network.DefaultPort)
	if len(frames) < 10 {
		t.Fatalf("the capture saw %d frames of the overlay, so it proves nothing", len(frames))
	}
	for _, f := range frames {
		if binary.BigEndian.Uint16(f[12:]) == 0x0806 {
			t.Errorf("ARP crossed between nodes: %x", f)
		}
	}
	// Nobody hears another's question either.
	stranger := func(f []byte) bool {
		return binary.BigEndian.Uint16(f[12:]) == 0x0806 && binary.BigEndian.Uint16(f[20:]) == 1
	}
	for _, g := range []*actor{here, there, beside} {
		if n := g.heard(stranger); n != 0 {
			t.Errorf("guest %s heard %d questions of others", g.address, n)
		}
	}
}

func TestUnicastARPStaysOnItsNode(t *testing.T) {
	s := newSite(t, 1500)
	a, b := s.newNode(t), s.newNode(t)
	on, off := nic(blue, 1, "10.4.0.11"), nic(blue, 2, "10.4.0.12")
	a.set(t, spec(blue, 1450, peer(off, 2)))
	b.set(t, spec(blue, 1450, peer(on, 1)))
	wire := newCapture(t, a.host, "wire")
	here, there := a.attach(t, 1, on), b.attach(t, 2, off)
	here.mustPing(there.address, 56)
	// Linux asks by unicast before it gives up an entry (NUD_PROBE).
	must(t, here.send(arpFrame(there.mac, here.mac, 1, place{address: here.address, mac: here.mac}, there.mac, there.address)))
	here.mustPing(there.address, 56) // what was sent before has arrived by now
	for _, f := range wire.inner(network.DefaultPort) {
		if binary.BigEndian.Uint16(f[12:]) == 0x0806 {
			t.Errorf("ARP crossed between nodes: %x", f)
		}
	}
}

func TestAnAddressThatAnotherVMTakesIsReachableAtOnce(t *testing.T) {
	s := newSite(t, 1500)
	a, b := s.newNode(t), s.newNode(t)
	mine, first, second := nic(blue, 1, "10.4.0.11"), nic(blue, 2, "10.4.0.12"), nic(blue, 3, "10.4.0.12")
	a.set(t, spec(blue, 1450))
	b.set(t, spec(blue, 1450, peer(mine, 1), peer(first, 1)))
	here, old := a.attach(t, 1, mine), a.attach(t, 2, first)
	far := b.attach(t, 4, nic(blue, 4, "10.4.0.14"))
	a.set(t, spec(blue, 1450, peer(far.nic, 2)))
	here.mustPing(old.address, 56)
	far.mustPing(old.address, 56)

	old.stop()
	a.detach(t, 2)
	b.set(t, spec(blue, 1450, peer(mine, 1)))
	b.attach(t, 3, second)
	a.set(t, spec(blue, 1450, peer(far.nic, 2), peer(second, 2)))
	for _, g := range []*actor{here, far} {
		g := g
		eventually(t, "the announcement of the new MAC", func() bool {
			g.mu.Lock()
			defer g.mu.Unlock()
			return g.cache[old.address].String() == second.MAC
		})
		if err := g.ping(old.address, 56, 200*time.Millisecond); err != nil {
			t.Error(err)
		}
	}
}

func TestAGuestThatMovesIsReachedWhereItIs(t *testing.T) {
	s := newSite(t, 1500)
	a, b := s.newNode(t), s.newNode(t)
	still, mover := nic(blue, 1, "10.4.0.11"), nic(blue, 2, "10.4.0.12")
	a.set(t, spec(blue, 1450))
	b.set(t, spec(blue, 1450, peer(still, 1), peer(mover, 1)))
	here := a.attach(t, 1, still)
	far := b.attach(t, 3, nic(blue, 3, "10.4.0.13"))
	a.set(t, spec(blue, 1450, peer(far.nic, 2)))
	moving := a.attach(t, 2, mover)
	for range 3 {
		here.mustPing(moving.address, 56)
		far.mustPing(moving.address, 56)
		moving.stop()
		a.detach(t, 2)
		a.set(t, spec(blue, 1450, peer(far.nic, 2), peer(mover, 2)))
		moving = b.attach(t, 2, mover) // the other node still believes it to be on the first one
		here.mustPing(moving.address, 56)
		far.mustPing(moving.address, 56)
		b.set(t, spec(blue, 1450, peer(still, 1)))
		far.mustPing(moving.address, 56)

		moving.stop()
		a.set(t, spec(blue, 1450, peer(far.nic, 2), peer(mover, 2)))
		moving = a.attach(t, 2, mover) // before it is gone from the other: what is attached here is known better
		here.mustPing(moving.address, 56)
		b.set(t, spec(blue, 1450, peer(still, 1), peer(mover, 1)))
		b.detach(t, 2)
		far.mustPing(moving.address, 56)
		a.set(t, spec(blue, 1450, peer(far.nic, 2)))
	}
}

func TestTwoNetworksWithOneSubnetDoNotMeet(t *testing.T) {
	n := newSite(t, 1500).newNode(t)
	n.set(t, spec(blue, 1450))
	n.set(t, spec(red, 1450))
	one, other := n.attach(t, 1, nic(blue, 1, "10.4.0.11")), n.attach(t, 2, nic(red, 2, "10.4.0.12"))
	same := n.attach(t, 3, nic(red, 3, "10.4.0.11"))
	other.mustPing(same.address, 56)
	one.mustPing(gateway, 56)
	same.mustPing(gateway, 56)
	if err := one.ping(other.address, 56, 300*time.Millisecond); err == nil {
		t.Error("a guest reached one of another network")
	}
	if one.cache[gateway] == same.cache[gateway] {
		t.Error("two networks have one gateway MAC")
	}
	n.detach(t, 2)
	n.detach(t, 3)
	one.mustPing(gateway, 56)
}

func TestSubnetsWithLikeNamesDoNotMeddle(t *testing.T) {
	s := newSite(t, 1500)
	n := newNode(t, s.newHost(t), "00000001", func(o *Options) { o.NodeRoutes = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")} })
	four, fortyFour := spec(blue, 1450), spec(red, 1450)
	four.Subnet, fortyFour.Subnet, fortyFour.Gateway = "10.4.0.0/24", "10.44.0.0/24", "10.44.0.1"
	n.set(t, four)
	n.set(t, fortyFour)
	before := n.residue(t)
	nicOf := func(id string, vm int, address, gateway string) network.Interface {
		i := networktest.NIC("eth0", id, vm)
		i.Addresses, i.Gateway = []string{address + "/24"}, gateway
		return i
	}
	one := n.attach(t, 1, nicOf(blue, 1, "10.4.0.11", "10.4.0.1"))
	alone := n.residue(t)
	other := n.attach(t, 2, nicOf(red, 2, "10.44.0.11", "10.44.0.1"))
	one.mustPing(netip.MustParseAddr("10.4.0.1"), 56)
	other.mustPing(netip.MustParseAddr("10.44.0.1"), 56)
	n.Sweep(t.Context())
	if strings.Contains(n.log.String(), "repaired") {
		t.Errorf("the sweep found something to do")
	}
	n.detach(t, 2)
	same(t, "the other network has gone", alone, n.residue(t))
	one.mustPing(netip.MustParseAddr("10.4.0.1"), 56)
	n.detach(t, 1)
	same(t, "both have gone", before, n.residue(t))
}

func same(t testing.TB, when string, before, after []string) {
	t.Helper()
	had, has := map[string]bool{}, map[string]bool{}
	for _, l := range before {
		had[l] = true
	}
	for _, l := range after {
		has[l] = true
		if !had[l] {
			t.Errorf("when %s there is more: %s", when, l)
		}
	}
	for _, l := range before {
		if !has[l] {
			t.Errorf("when %s there is less: %s", when, l)
		}
	}
}
