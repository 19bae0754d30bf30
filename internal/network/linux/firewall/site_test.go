package firewall_test

import (
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"

	"imp.dev/imp/internal/network/linux/firewall"
)

// site is a node with networks, a pod, and what lies outside:
//
//	guest tap10, tap11 ── br (10.4.0.1) network up 169.254.1.1 ═ 169.254.1.0 i0a1b1 host eth0 192.0.2.1 ══ 192.0.2.2 e0 outside
//	overlay ── vx ───────┘                                                     host cali0 172.16.0.1 ══ 172.16.0.2 p0 pod
//
// outside is the peer node 192.0.2.2, a node that is no peer (192.0.2.3), and the rest of the world (198.51.100.9).
type site struct {
	host, outside, pod namespace
	config             firewall.Host
	networks           []*segment
	// groups is the bridges' group_fwd_mask: which of the group addresses they forward to.
	groups uint16
}

// segment is one network's namespace, and its guests'.
type segment struct {
	ns, overlay namespace
	config      firewall.Network
	guests      []firewall.Guest
	inside      []namespace // of guests, in their order
}

const prefix = "i0a1b"

func newSite(t testing.TB) *site { return newSiteOf(t, 0xfff8) }

func newSiteOf(t testing.TB, groups uint16) *site {
	t.Helper()
	s := &site{host: newNamespace(t), outside: newNamespace(t), pod: newNamespace(t), groups: groups}
	wire(t, s.host, "eth0", nil, s.outside, "e0", nil)
	s.host.address(t, "eth0", "192.0.2.1/24")
	for _, a := range []string{"192.0.2.2/24", "192.0.2.3/24"} {
		s.outside.address(t, "e0", a)
	}
	for _, a := range []string{"198.51.100.9/32", "169.254.169.254/32"} {
		s.outside.address(t, "lo", a)
	}
	wire(t, s.host, "cali0", nil, s.pod, "p0", nil)
	s.host.address(t, "cali0", "172.16.0.1/24")
	s.pod.address(t, "p0", "172.16.0.2/24")
	s.pod.route(t, "default", "172.16.0.1")
	s.host.route(t, "default", "192.0.2.2")
	s.outside.route(t, "default", "192.0.2.1")
	s.host.sysctl(t, "ipv4/ip_forward", "1")
	s.config = firewall.Host{Instance: "one", Prefix: prefix, Port: 14789}
	s.add(t)
	return s
}

// add makes the next network, with two guests.
func (s *site) add(t testing.TB) *segment { t.Helper(); return s.addOf(t, byte(4+len(s.networks))) }

// addOf makes one whose subnet is 10.THAT.0.0/24.
func (s *site) addOf(t testing.TB, subnet byte) *segment {
	t.Helper()
	n := len(s.networks) + 1
	g := &segment{ns: newNamespace(t), overlay: newNamespace(t), config: aNetwork()}
	g.config.Subnet = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, subnet, 0, 0}), 24)
	g.config.Gateway = netip.AddrFrom4([4]byte{10, subnet, 0, 1})
	g.config.Transit = netip.AddrFrom4([4]byte{169, 254, byte(n), 1})
	g.config.HostTransit = netip.AddrFrom4([4]byte{169, 254, byte(n), 0})
	g.config.Denied = []netip.Prefix{netip.MustParsePrefix("172.16.0.0/24"), netip.MustParsePrefix("10.96.0.0/12")}
	g.ns.do(t, func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.HardwareAddr = "br", g.config.GatewayMAC
		return netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs, GroupFwdMask: &s.groups})
	})
	g.ns.address(t, "br", g.config.Gateway.String()+"/24")
	wire(t, s.host, s.veth(n), nil, g.ns, "up", nil)
	s.host.address(t, s.veth(n), g.config.HostTransit.String()+"/31")
	g.ns.address(t, "up", g.config.Transit.String()+"/31")
	g.ns.route(t, "default", g.config.HostTransit.String())
	if int(subnet) == 3+n { // the first of two with one subnet has the node's route
		s.host.route(t, g.config.Subnet.String(), g.config.Transit.String())
	}
	g.ns.sysctl(t, "ipv4/ip_forward", "1")
	g.ns.sysctl(t, "bridge/bridge-nf-call-iptables", "0")
	wire(t, g.ns, "vx", nil, g.overlay, "eth0", mac("02:00:00:00:00:99"))
	g.port(t, "vx")
	for i := range 2 {
		member := guest(10 + i)
		member.Address = netip.AddrFrom4([4]byte{10, subnet, 0, byte(10 + i)})
		inside := newNamespace(t)
		inside.sysctl(t, "ipv6/conf/default/disable_ipv6", "1") // what it says of itself would be counted
		wire(t, g.ns, member.Port, nil, inside, "eth0", member.MAC)
		g.port(t, member.Port)
		inside.address(t, "eth0", member.Address.String()+"/24")
		inside.route(t, "default", g.config.Gateway.String())
		g.guests, g.inside = append(g.guests, member), append(g.inside, inside)
	}
	s.networks = append(s.networks, g)
	s.config.Transits = append(s.config.Transits, g.config.Transit)
	g.ensure(t)
	s.ensure(t)
	return g
}

func (s *site) veth(n int) string { return fmt.Sprintf("%s%d", prefix, n) }

// port makes the device a port of the bridge that does not learn.
func (g *segment) port(t testing.TB, device string) {
	t.Helper()
	g.ns.do(t, func() error {
		bridge, err := netlink.LinkByName("br")
		if err != nil {
			return err
		}
		link, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		if err := netlink.LinkSetMaster(link, bridge); err != nil {
			return err
		}
		return netlink.LinkSetLearning(link, false)
	})
}

func (g *segment) ensure(t testing.TB) {
	t.Helper()
	if _, err := firewall.EnsureNetwork(int(g.ns), g.config, g.guests); err != nil {
		t.Fatal(err)
	}
}

func (s *site) ensure(t testing.TB) {
	t.Helper()
	if _, err := firewall.EnsureHost(int(s.host), s.config); err != nil {
		t.Fatal(err)
	}
}

// dropped reads the counters.
func (g *segment) dropped(t testing.TB) map[string]uint64 {
	t.Helper()
	counted, err := firewall.Dropped(int(g.ns))
	if err != nil {
		t.Fatal(err)
	}
	return counted
}

// nft writes to nftables in the namespace as somebody else does.
func (ns namespace) nft(t testing.TB, f func(*nftables.Conn)) {
	t.Helper()
	conn, err := nftables.New(nftables.WithNetNSFd(int(ns)))
	if err != nil {
		t.Fatal(err)
	}
	f(conn)
	if err := conn.Flush(); err != nil {
		t.Fatal(err)
	}
}

// nodePort sends TCP for the port, on any address of the node, to the pod, as kube-proxy does.
func (s *site) nodePort(t testing.TB, port uint16, to string, target uint16) {
	t.Helper()
	s.translate(t, 6, port, to, target)
}

// masquerade gives what comes from the range and leaves the node the node's address, as a CNI does for pods.
func (s *site) masquerade(t testing.TB, source string) {
	t.Helper()
	p := netip.MustParsePrefix(source)
	s.host.nft(t, func(conn *nftables.Conn) {
		table := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "cni"})
		chain := conn.AddChain(&nftables.Chain{Table: table, Name: "masquerade", Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource})
		conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 4},
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: net.CIDRMask(p.Bits(), 32), Xor: make([]byte, 4)},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: p.Addr().AsSlice()},
			&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: append([]byte("eth0"), make([]byte, 12)...)},
			&expr.Masq{},
		}})
	})
}

// translate sends what is for the port of any address to another address and port.
func (s *site) translate(t testing.TB, protocol byte, port uint16, to string, target uint16) {
	t.Helper()
	s.host.nft(t, func(conn *nftables.Conn) {
		table := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "kube-proxy"})
		chain := conn.AddChain(&nftables.Chain{Table: table, Name: "nodeports", Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityNATDest})
		conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{protocol}},
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{byte(port >> 8), byte(port)}},
			&expr.Immediate{Register: 1, Data: net.ParseIP(to).To4()},
			&expr.Immediate{Register: 2, Data: []byte{byte(target >> 8), byte(target)}},
			&expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(nftables.TableFamilyIPv4), RegAddrMin: 1, RegProtoMin: 2},
		}})
	})
}
