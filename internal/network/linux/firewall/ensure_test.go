package firewall_test

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

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

func aHost() firewall.Host {
	return firewall.Host{
		Instance: "one", Prefix: prefix, Transits: []netip.Addr{addr("169.254.1.1"), addr("169.254.2.1")}, Egress: map[string]string{prefix + "1": "eth0"},
		Port: 14789, VNIs: []uint32{7, 1<<24 - 1}, Peers: []firewall.Peer{{VNI: 7, VTEP: addr("192.0.2.2")}, {VNI: 7, VTEP: addr("192.0.2.3")}},
	}
}

func guest(n int) firewall.Guest {
	return firewall.Guest{Port: fmt.Sprintf("tap%d", n), MAC: net.HardwareAddr{2, 0, 0, 1, byte(n >> 8), byte(n)},
		Address: netip.AddrFrom4([4]byte{10, 4, byte(n >> 8), byte(n)})}
}

func TestASecondEnsureOfTheSameChangesNothing(t *testing.T) {
	t.Parallel()
	for sentence, change := range map[string]func(*firewall.Network, *firewall.Host, *[]firewall.Guest){
		"of what tests begin with": func(*firewall.Network, *firewall.Host, *[]firewall.Guest) {},
		"without an overlay":       func(n *firewall.Network, _ *firewall.Host, _ *[]firewall.Guest) { n.Overlay = "" },
		"without NAT":              func(n *firewall.Network, _ *firewall.Host, _ *[]firewall.Guest) { n.NAT = false },
		"of nothing": func(n *firewall.Network, h *firewall.Host, g *[]firewall.Guest) {
			n.Denied, *h, *g = nil, firewall.Host{Instance: "one", Prefix: prefix}, nil
		},
		"with names of 15 bytes": func(n *firewall.Network, _ *firewall.Host, _ *[]firewall.Guest) {
			n.Bridge, n.Uplink, n.Overlay = "i0a1b000000000b", "i0a1b000000000u", "i0a1b000000000v"
		},
		"where everything is denied": func(n *firewall.Network, _ *firewall.Host, _ *[]firewall.Guest) {
			n.Denied = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}
		},
		"where neighbours are denied": func(n *firewall.Network, _ *firewall.Host, _ *[]firewall.Guest) {
			n.Denied = []netip.Prefix{netip.MustParsePrefix("192.0.2.3/32"), netip.MustParsePrefix("192.0.2.2/32"), netip.MustParsePrefix("223.255.255.255/32")}
		},
		"with guests and peers twice": func(_ *firewall.Network, h *firewall.Host, g *[]firewall.Guest) {
			*g, h.Peers, h.VNIs, h.Transits = slices.Repeat(*g, 2), slices.Repeat(h.Peers, 2), slices.Repeat(h.VNIs, 2), slices.Repeat(h.Transits, 2)
		},
		"with a thousand guests and five thousand nodes": func(n *firewall.Network, h *firewall.Host, g *[]firewall.Guest) {
			for i := range 1000 {
				*g = append(*g, guest(1000+i))
			}
			for i := range 5000 {
				node := netip.AddrFrom4([4]byte{100, 64, byte(i >> 7), byte(i << 1)}) // none beside another
				n.Denied = append(n.Denied, netip.PrefixFrom(node, 32))
				h.Peers = append(h.Peers, firewall.Peer{VNI: 7, VTEP: node})
			}
		},
	} {
		t.Run(sentence, func(t *testing.T) {
			t.Parallel()
			ns := newNamespace(t)
			n, h, guests := aNetwork(), aHost(), []firewall.Guest{guest(10), guest(11)}
			change(&n, &h, &guests)
			for _, want := range []bool{true, false, false} {
				if changed, err := firewall.EnsureNetwork(int(ns), n, guests); err != nil || changed != want {
					t.Fatalf("the network was changed: %v (%v), want %v", changed, err, want)
				}
				if changed, err := firewall.EnsureHost(int(ns), h); err != nil || changed != want {
					t.Fatalf("the host was changed: %v (%v), want %v", changed, err, want)
				}
			}
		})
	}
}

func TestWhatAStrangerDoesToOurTablesIsRepaired(t *testing.T) {
	t.Parallel()
	const bridge, inet, ip = nftables.TableFamilyBridge, nftables.TableFamilyINet, nftables.TableFamilyIPv4
	for _, table := range []*nftables.Table{{Family: bridge, Name: "imp"}, {Family: inet, Name: "imp"}, {Family: ip, Name: "imp-one"}} {
		set, key := map[nftables.TableFamily]string{bridge: "guests", inet: "denied", ip: "transits"}[table.Family], []byte{1, 1, 1, 1}
		if table.Family == bridge {
			key = make([]byte, 28)
		}
		chain := &nftables.Chain{Table: table, Name: "prerouting"}
		drop, accept, hook := nftables.ChainPolicyDrop, nftables.ChainPolicyAccept, nftables.ChainHookPrerouting
		priority := map[nftables.TableFamily]nftables.ChainPriority{bridge: -200, inet: -300, ip: -150}[table.Family]
		for sentence, harm := range map[string]func(*nftables.Conn){
			"everything was flushed": func(c *nftables.Conn) { c.FlushRuleset() },
			"the table was removed":  func(c *nftables.Conn) { c.DelTable(table) },
			"the table was flushed":  func(c *nftables.Conn) { c.FlushTable(table) },
			"a chain was flushed":    func(c *nftables.Conn) { c.FlushChain(chain) },
			"a set was flushed":      func(c *nftables.Conn) { c.FlushSet(&nftables.Set{Table: table, Name: set}) },
			"an element was added": func(c *nftables.Conn) {
				_ = c.SetAddElements(&nftables.Set{Table: table, Name: set}, []nftables.SetElement{{Key: key}})
			},
			"a rule was put ahead": func(c *nftables.Conn) {
				c.InsertRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{verdict(expr.VerdictAccept)}})
			},
			"a rule was put behind": func(c *nftables.Conn) {
				c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{verdict(expr.VerdictAccept)}})
			},
			"a chain was added": func(c *nftables.Conn) { c.AddChain(&nftables.Chain{Table: table, Name: "more"}) },
			"a set was added": func(c *nftables.Conn) {
				_ = c.AddSet(&nftables.Set{Table: table, ID: 1, Name: "more", KeyType: nftables.TypeIPAddr}, nil)
			},
			"a chain's policy turned": func(c *nftables.Conn) {
				policy := &accept
				if table.Family == ip { // where it is to accept
					policy = &drop
				}
				c.AddChain(&nftables.Chain{Table: table, Name: "prerouting", Type: nftables.ChainTypeFilter, Hooknum: hook, Priority: &priority, Policy: policy})
			},
		} {
			t.Run(fmt.Sprintf("%s of family %d", sentence, table.Family), func(t *testing.T) {
				t.Parallel()
				repairs(t, func(ns namespace) { ns.nft(t, harm) }, sentence == "everything was flushed")
			})
		}
		t.Run(fmt.Sprintf("the table was put to sleep of family %d", table.Family), func(t *testing.T) {
			t.Parallel()
			repairs(t, func(ns namespace) { ns.newTable(t, table.Family, table.Name, tableDormant) }, false)
		})
	}
}

// repairs does harm to what is right, and looks whether it becomes right again; both sides are harmed or one.
func repairs(t *testing.T, harm func(namespace), both bool) {
	t.Helper()
	ns := newNamespace(t)
	n, h, guests := aNetwork(), aHost(), []firewall.Guest{guest(10), guest(11)}
	ensure := func() (network, host bool) {
		network, err := firewall.EnsureNetwork(int(ns), n, guests)
		if err != nil {
			t.Fatal(err)
		}
		host, err = firewall.EnsureHost(int(ns), h)
		if err != nil {
			t.Fatal(err)
		}
		return network, host
	}
	ensure()
	harm(ns)
	if network, host := ensure(); network == host && !both || !network && !host {
		t.Errorf("repaired are network %v and host %v", network, host)
	}
	if network, host := ensure(); network || host {
		t.Errorf("after that there is something left to repair: network %v, host %v", network, host)
	}
}

func TestAChangeOfANetworkIsFelt(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	g := s.networks[0]
	g.inside[0].listen(t, "0.0.0.0:80")
	g.inside[1].mustConnect(t, "10.4.0.10:80", "10.4.0.11")
	g.guests[1].Address = addr("10.4.0.77")
	g.ensure(t)
	g.inside[1].mustNotConnect(t, "10.4.0.10:80")
	if n := g.dropped(t)["tap11"]; n == 0 {
		t.Error("what it sent under its former address is not counted")
	}
}

func TestGuestsComeAndGo(t *testing.T) {
	t.Parallel()
	ns := newNamespace(t)
	n := aNetwork()
	if err := firewall.AddGuest(int(ns), guest(10)); err == nil {
		t.Error("a guest was added where there is no table")
	}
	if err := firewall.RemoveGuest(int(ns), guest(10)); err != nil {
		t.Errorf("removing a guest where there is no table: %v", err)
	}
	if counted, err := firewall.Dropped(int(ns)); err != nil || len(counted) != 0 {
		t.Errorf("without a table counted are %v (%v)", counted, err)
	}
	want := func(guests ...firewall.Guest) {
		t.Helper()
		if changed, err := firewall.EnsureNetwork(int(ns), n, guests); err != nil || changed {
			t.Errorf("it was not the network of %d guests (%v)", len(guests), err)
		}
	}
	do := func(f func(int, firewall.Guest) error, g firewall.Guest) {
		t.Helper()
		if err := f(int(ns), g); err != nil {
			t.Error(err)
		}
	}
	if _, err := firewall.EnsureNetwork(int(ns), n, nil); err != nil {
		t.Fatal(err)
	}
	do(firewall.AddGuest, guest(10))
	do(firewall.AddGuest, guest(11))
	do(firewall.AddGuest, guest(10)) // is there
	want(guest(10), guest(11))
	do(firewall.RemoveGuest, guest(12)) // is not there
	want(guest(10), guest(11))
	do(firewall.RemoveGuest, guest(10))
	do(firewall.RemoveGuest, guest(10))
	want(guest(11))
	half := guest(11)
	half.Address = addr("10.4.0.99") // only its port is there
	do(firewall.RemoveGuest, half)
	if counted, err := firewall.Dropped(int(ns)); err != nil || len(counted) != 0 {
		t.Errorf("counted are %v (%v)", counted, err)
	}
}

func TestCountersGoOn(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	g := s.networks[0]
	forge := func(times int) {
		t.Helper()
		before := g.dropped(t)["tap10"]
		for range times {
			g.inside[0].send(t, "eth0", ether(broadcast, g.guests[0].MAC, 0x88b5, []byte("not its to send")))
		}
		eventually(t, "all are counted", func() bool { return g.dropped(t)["tap10"] == before+uint64(times) })
	}
	want := func(when string, tap10, tap11 uint64) {
		t.Helper()
		if got := g.dropped(t); !maps.Equal(got, map[string]uint64{"tap10": tap10, "tap11": tap11}) {
			t.Errorf("%s: counted are %v", when, got)
		}
	}
	forge(3)
	want("after three frames", 3, 0)
	g.ensure(t)
	want("after an Ensure of the same", 3, 0)
	g.config.Overlay = "" // another table of frames
	g.ensure(t)
	want("after a rewrite", 3, 0)
	forge(2)
	want("after two more", 5, 0)
	g.config.Overlay = "vx"
	g.ensure(t)
	want("after another rewrite", 5, 0)
	if err := firewall.AddGuest(int(g.ns), g.guests[0]); err != nil {
		t.Fatal(err)
	}
	want("after it was added again", 5, 0)

	g.guests[0].Dropped, g.guests[1].Dropped = 4, 7 // what was read last
	g.ensure(t)
	want("where the kernel knows better", 5, 0)
	g.ns.nft(t, func(c *nftables.Conn) { c.DelTable(&nftables.Table{Family: nftables.TableFamilyBridge, Name: "imp"}) })
	g.ensure(t)
	want("after somebody removed the table", 4, 7)
	forge(1)
	want("after one more", 5, 7)
	if err := firewall.RemoveGuest(int(g.ns), g.guests[0]); err != nil {
		t.Fatal(err)
	}
	g.guests[0].Dropped = 5
	if err := firewall.AddGuest(int(g.ns), g.guests[0]); err != nil {
		t.Fatal(err)
	}
	want("after it went and came", 5, 7)
	forge(1)
	want("after one more", 6, 7)
}

// A rewrite is one transaction: between the old rules and the new no packet finds none.
func TestNoPacketFindsHalfATable(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	g := s.networks[0]
	me, uplink, bridge := g.guests[0], s.host.watch(t, s.veth(1)), g.ns.watch(t, "br")
	forged := ether(broadcast, me.MAC, unix.ETH_P_IP, ipv4(unix.IPPROTO_UDP, g.guests[1].Address, addr("198.51.100.9"), udp(1, 2, []byte("forged"))))
	reserved := ether(g.config.GatewayMAC, me.MAC, unix.ETH_P_IP, ipv4(unix.IPPROTO_UDP, me.Address, addr("240.0.0.1"), udp(1, 2, []byte("reserved"))))
	stop, stopped, rounds := make(chan struct{}), make(chan struct{}), 0
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
			}
			if err := g.inside[0].try(func() error {
				for range 200 {
					if err := sendFrames("eth0", forged, reserved); err != nil {
						return err
					}
				}
				return nil
			}); err != nil {
				t.Error(err)
				return
			}
			rounds++
		}
	}()
	for i := range 20 {
		g.config.Overlay, g.config.Port = []string{"vx", ""}[i%2], uint16(14789+i%2)
		g.ensure(t)
	}
	close(stop)
	<-stopped
	if rounds == 0 {
		t.Fatal("nothing was sent meanwhile")
	}
	if bridge.has("forged") || uplink.has("forged") {
		t.Error("a forged frame has passed")
	}
	if uplink.has("reserved") {
		t.Error("a packet to a reserved address has left")
	}
}

func TestWhatCannotBeRulesIsRefused(t *testing.T) {
	t.Parallel()
	ns := newNamespace(t)
	for sentence, call := range map[string]func() error{
		"a name that the kernel would cut": func() error {
			n := aNetwork()
			n.Bridge = "i0a1b00000000000"
			_, err := firewall.EnsureNetwork(int(ns), n, nil)
			return err
		},
		"an IPv6 gateway": func() error {
			n := aNetwork()
			n.Gateway = addr("fd00::1")
			_, err := firewall.EnsureNetwork(int(ns), n, nil)
			return err
		},
		"an IPv6 range": func() error {
			n := aNetwork()
			n.Denied = []netip.Prefix{netip.MustParsePrefix("fd00::/8")}
			_, err := firewall.EnsureNetwork(int(ns), n, nil)
			return err
		},
		"an overlay without a gateway's MAC": func() error {
			n := aNetwork()
			n.GatewayMAC = nil
			_, err := firewall.EnsureNetwork(int(ns), n, nil)
			return err
		},
		"a guest without an address": func() error { return firewall.AddGuest(int(ns), firewall.Guest{Port: "tap1", MAC: guest(1).MAC}) },
		"a guest without a MAC": func() error {
			_, err := firewall.EnsureNetwork(int(ns), aNetwork(), []firewall.Guest{{Port: "tap1", Address: guest(1).Address}})
			return err
		},
		"a host without an instance":     func() error { _, err := firewall.EnsureHost(int(ns), firewall.Host{Prefix: prefix}); return err },
		"a host without a prefix":        func() error { _, err := firewall.EnsureHost(int(ns), firewall.Host{Instance: "one"}); return err },
		"a forward rule for all devices": func() error { _, err := firewall.EnsureForward(int(ns), "one", ""); return err },
		"a VNI of 25 bits": func() error {
			h := aHost()
			h.VNIs = []uint32{1 << 24}
			_, err := firewall.EnsureHost(int(ns), h)
			return err
		},
		"an egress of what is not ours": func() error {
			h := aHost()
			h.Egress = map[string]string{"eth0": "eth1"}
			_, err := firewall.EnsureHost(int(ns), h)
			return err
		},
	} {
		t.Run(sentence, func(t *testing.T) {
			if call() == nil {
				t.Error("it was taken")
			}
		})
	}
	if got := ns.tables(t); len(got) != 0 {
		t.Errorf("there are tables %v", got)
	}
}

func BenchmarkAddGuest(b *testing.B) {
	for _, there := range []int{0, 300, 1000} {
		b.Run(fmt.Sprintf("beside %d", there), func(b *testing.B) {
			ns := newNamespace(b)
			guests := []firewall.Guest{}
			for i := range there {
				guests = append(guests, guest(1000+i))
			}
			if _, err := firewall.EnsureNetwork(int(ns), aNetwork(), guests); err != nil {
				b.Fatal(err)
			}
			for b.Loop() {
				if err := firewall.AddGuest(int(ns), guest(10)); err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				if err := firewall.RemoveGuest(int(ns), guest(10)); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
	}
}

// A sweep that finds nothing to do.
func BenchmarkEnsureNetwork(b *testing.B) {
	for _, there := range []int{1, 300, 1000} {
		b.Run(fmt.Sprintf("of %d", there), func(b *testing.B) {
			ns := newNamespace(b)
			guests := []firewall.Guest{}
			for i := range there {
				guests = append(guests, guest(1000+i))
			}
			for b.Loop() {
				if _, err := firewall.EnsureNetwork(int(ns), aNetwork(), guests); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
