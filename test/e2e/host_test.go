package e2e

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"imp.dev/imp/internal/devserver/fabric"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// listen has something answer every connection to a port of a namespace with the address that it sees.
func listen(t *testing.T, n fabric.Namespace, address string) {
	t.Helper()
	listener, err := n.Listen("tcp4", address)
	must(t, err)
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			fmt.Fprintln(conn, conn.RemoteAddr().(*net.TCPAddr).IP)
			conn.Close()
		}
	}()
}

// dials connects from a namespace and gives what is answered.
func dials(n fabric.Namespace, address string) (answer string, err error) {
	err = n.Do(func() error {
		conn, err := net.DialTimeout("tcp4", address, 2*time.Second)
		if err != nil {
			return err
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(2 * time.Second))
		buf := make([]byte, 256)
		read, err := conn.Read(buf)
		answer = strings.TrimSpace(string(buf[:read]))
		return err
	})
	return answer, err
}

// addAddress gives a namespace's loopback an address for the time of the test.
func addAddress(t *testing.T, n fabric.Namespace, address string) {
	t.Helper()
	parsed, err := netlink.ParseAddr(address + "/32")
	must(t, err)
	must(t, n.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.AddrAdd(lo, parsed)
	}))
	t.Cleanup(func() {
		_ = n.Do(func() error {
			lo, err := netlink.LinkByName("lo")
			if err != nil {
				return err
			}
			return netlink.AddrDel(lo, parsed)
		})
	})
}

// dropForwarding makes a namespace like that of a host with Docker and br_netfilter: what is to be passed on is dropped by
// somebody else's chain, bridges' frames included.
func dropForwarding(t *testing.T, n fabric.Namespace) {
	t.Helper()
	table := &nftables.Table{Family: nftables.TableFamilyIPv4, Name: "somebody"}
	drop := nftables.ChainPolicyDrop
	change := func(f func(*nftables.Conn)) error {
		return n.Do(func() error {
			conn, err := nftables.New()
			if err != nil {
				return err
			}
			f(conn)
			return conn.Flush()
		})
	}
	must(t, change(func(conn *nftables.Conn) {
		conn.AddTable(table)
		conn.AddChain(&nftables.Chain{
			Name: "FORWARD", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter, Policy: &drop,
		})
	}))
	t.Cleanup(func() { must(t, change(func(conn *nftables.Conn) { conn.DelTable(table) })) })
	const file = "/proc/sys/net/bridge/bridge-nf-call-iptables"
	if err := n.Do(func() error { return os.WriteFile(file, []byte("1"), 0o644) }); err != nil {
		lacking(t, "needs br_netfilter (modprobe br_netfilter): %v", err)
	}
}

// pod makes a namespace that hangs on a node as pods do: a link, an address, and routes to it on the node and beyond.
func (m *mesh) pod(t *testing.T, node fabric.Host, address string) fabric.Namespace {
	t.Helper()
	addRoute(t, m.server.Fabric().Switch(), address, node.Address.AsSlice())
	addRoute(t, m.outside, address, net.IPv4(198, 51, 100, 0))
	n, err := fabric.Create(node.Name + "-pod")
	must(t, err)
	t.Cleanup(func() { _, _ = fabric.Remove(n.Name) })
	far, err := os.Open(n.Path())
	must(t, err)
	defer far.Close()
	must(t, node.Do(func() error {
		attributes := netlink.NewLinkAttrs()
		attributes.Name = "veth-pod"
		link := &netlink.Veth{LinkAttrs: attributes, PeerName: "eth0", PeerNamespace: netlink.NsFd(int(far.Fd()))}
		if err := netlink.LinkAdd(link); err != nil {
			return err
		}
		if err := configure("veth-pod", "169.254.1.1/32"); err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{LinkIndex: link.Index, Scope: netlink.SCOPE_LINK, Dst: mustNet(address + "/32")})
	}))
	must(t, n.Do(func() error {
		if err := configure("eth0", address+"/32"); err != nil {
			return err
		}
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		if err := netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Scope: netlink.SCOPE_LINK, Dst: mustNet("169.254.1.1/32")}); err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{Dst: mustNet("0.0.0.0/0"), Gw: net.IPv4(169, 254, 1, 1)})
	}))
	return n
}

// addRoute gives a namespace a route to one address for the time of the test.
func addRoute(t *testing.T, n fabric.Namespace, to string, via net.IP) {
	t.Helper()
	route := &netlink.Route{Dst: mustNet(to + "/32"), Gw: via}
	must(t, n.Do(func() error { return netlink.RouteAdd(route) }))
	t.Cleanup(func() { must(t, n.Do(func() error { return netlink.RouteDel(route) })) })
}

func configure(name, address string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	parsed, err := netlink.ParseAddr(address)
	if err != nil {
		return err
	}
	if err := netlink.AddrAdd(link, parsed); err != nil {
		return err
	}
	return netlink.LinkSetUp(link)
}

func mustNet(text string) *net.IPNet {
	_, parsed, err := net.ParseCIDR(text)
	if err != nil {
		panic(err)
	}
	return parsed
}

// inject sends an IPv4 packet from a namespace, whatever source it claims.
func inject(n fabric.Namespace, packet []byte) error {
	return n.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, packet, 0, &unix.SockaddrInet4{Addr: [4]byte(packet[16:20])})
	})
}

// overlayPacket is one that brings a frame to a node.
func overlayPacket(from, to netip.Addr, vni uint32, frame []byte) []byte {
	return udp4(netip.AddrPortFrom(from, 40000), netip.AddrPortFrom(to, overlayPort), vxlan(vni, frame))
}

// hostState tells what is in the nodes' namespaces and which networks' namespaces there are, so that two moments can be compared.
func (c *cluster) hostState(t *testing.T) []string {
	t.Helper()
	var state []string
	for _, name := range c.server.NodeNames() {
		host := c.server.Fabric().Node(name)
		prefix := strings.TrimSuffix(c.server.NetworkNamespace(name, "x").Name, "x")
		networks, err := fabric.Namespaces(prefix)
		must(t, err)
		for _, n := range networks {
			state = append(state, name+" namespace "+n.Name)
		}
		must(t, host.Do(func() error {
			found, err := namespaceState()
			for _, line := range found {
				state = append(state, name+" "+line)
			}
			return err
		}))
	}
	slices.Sort(state)
	return state
}

// namespaceState lists links, routes, FDB entries, and nftables' tables with the number of rules and elements in them.
func namespaceState() (state []string, err error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, err
	}
	for _, link := range links {
		state = append(state, "link "+link.Attrs().Name)
	}
	routes, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	if err != nil {
		return nil, err
	}
	for _, route := range routes {
		state = append(state, fmt.Sprintf("route %v table %d", route.Dst, route.Table))
	}
	entries, err := netlink.NeighList(0, unix.AF_BRIDGE)
	if err != nil {
		return nil, err
	}
	for _, entry := range entries {
		if binary.BigEndian.Uint16(append([]byte(entry.HardwareAddr), 0, 0))&0x0100 == 0 { // groups come and go with listeners
			state = append(state, "fdb "+entry.HardwareAddr.String())
		}
	}
	rules, err := netlink.RuleList(netlink.FAMILY_V4)
	if err != nil {
		return nil, err
	}
	state = append(state, fmt.Sprintf("%d routing rules", len(rules)))
	tables, err := firewallState()
	return append(state, tables...), err
}

func firewallState() (state []string, err error) {
	conn, err := nftables.New()
	if err != nil {
		return nil, err
	}
	tables, err := conn.ListTables()
	if err != nil {
		return nil, err
	}
	chains, err := conn.ListChains()
	if err != nil {
		return nil, err
	}
	for _, table := range tables {
		sets, err := conn.GetSets(table)
		if err != nil {
			return nil, err
		}
		elements := 0
		for _, set := range sets {
			content, err := conn.GetSetElements(set)
			if err != nil {
				return nil, err
			}
			elements += len(content)
		}
		state = append(state, fmt.Sprintf("table %d %s: %d elements", table.Family, table.Name, elements))
	}
	for _, chain := range chains {
		rules, err := conn.GetRules(chain.Table, chain)
		if err != nil {
			return nil, err
		}
		state = append(state, fmt.Sprintf("chain %d %s %s: %d rules", chain.Table.Family, chain.Table.Name, chain.Name, len(rules)))
	}
	return state, nil
}
