package firewall

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Names in a network's namespace.
const (
	networkTable = "imp"
	guestsSet    = "guests" // port . MAC . address: what may be sent from where
	portsSet     = "ports"  // counts what each port sent beside that
	deniedSet    = "denied" // destinations out of reach
)

// EnsureNetwork makes both tables of the network's namespace be what n and guests say; guests are all there are. Counters of ports
// that stay are kept over a rewrite; packets dropped between its reading and its commit, some microseconds, are not counted.
// changed says that something was written: a sweep that expects nothing to do has found a stranger's hand.
func EnsureNetwork(ns int, n Network, guests []Guest) (changed bool, err error) {
	if err := n.check(guests); err != nil {
		return false, fmt.Errorf("writing rules of network %s: %w", n.Subnet, err)
	}
	conn, err := open(ns)
	if err != nil {
		return false, err
	}
	defer conn.CloseLasting() //nolint:errcheck // nothing was left to send
	counted, err := dropped(conn)
	if err != nil {
		// A set that cannot be understood is replaced below, and what the caller read last is where its counters go on.
		counted = nil
	}
	for _, t := range []table{n.frames(guests, counted), n.packets()} {
		if !t.differs(conn) {
			continue
		}
		if err := t.write(conn); err != nil {
			return false, err
		}
		changed = true
	}
	if err := conn.Flush(); err != nil {
		return false, fmt.Errorf("writing rules of network %s: %w", n.Subnet, err)
	}
	return changed, nil
}

// AddGuest lets a guest send, in one transaction that touches sets alone and costs the same however many guests there are. A guest
// that is there already is success. It fails when EnsureNetwork has not been called or its tables are gone.
func AddGuest(ns int, g Guest) error {
	return alter(ns, g, "adding", (*nftables.Conn).SetAddElements)
}

// RemoveGuest undoes AddGuest; the port's counter goes with it, read it before. A guest that is not there, or has no table to be in,
// is success.
func RemoveGuest(ns int, g Guest) error {
	err := alter(ns, g, "removing", (*nftables.Conn).SetDeleteElements)
	if !errors.Is(err, unix.ENOENT) {
		return err
	}
	// Half of it was not there, which undid the other half.
	for _, half := range []string{guestsSet, portsSet} {
		only := func(conn *nftables.Conn, s *nftables.Set, elements []nftables.SetElement) error {
			if s.Name != half {
				return nil
			}
			return conn.SetDeleteElements(s, elements)
		}
		if err := alter(ns, g, "removing", only); err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
	return nil
}

func alter(ns int, g Guest, doing string, how func(*nftables.Conn, *nftables.Set, []nftables.SetElement) error) error {
	if err := g.check(); err != nil {
		return fmt.Errorf("%s guest of port %q: %w", doing, g.Port, err)
	}
	conn, err := open(ns)
	if err != nil {
		return err
	}
	defer conn.CloseLasting() //nolint:errcheck // nothing was left to send
	frames := &nftables.Table{Family: nftables.TableFamilyBridge, Name: networkTable}
	for _, s := range guestSets([]Guest{g}, nil) {
		if err := how(conn, &nftables.Set{Table: frames, Name: s.name, KeyType: s.key}, s.elements); err != nil {
			return fmt.Errorf("%s guest of port %s: %w", doing, g.Port, err)
		}
	}
	if err := conn.Flush(); err != nil {
		return fmt.Errorf("%s guest of port %s: %w", doing, g.Port, err)
	}
	return nil
}

// Dropped gives how many packets each port has sent that were not its to send, by the port's name. No table gives an empty map.
func Dropped(ns int) (map[string]uint64, error) {
	conn, err := open(ns)
	if err != nil {
		return nil, err
	}
	defer conn.CloseLasting() //nolint:errcheck // nothing was left to send
	return dropped(conn)
}

func dropped(conn *nftables.Conn) (map[string]uint64, error) {
	counted := map[string]uint64{}
	frames, err := find(conn, nftables.TableFamilyBridge, networkTable)
	if err != nil || frames == nil {
		return counted, err
	}
	sets, err := conn.GetSets(frames)
	if err != nil {
		return nil, fmt.Errorf("reading counters: %w", err)
	}
	for _, s := range sets {
		if s.Name != portsSet {
			continue
		}
		elements, err := conn.GetSetElements(s)
		if err != nil {
			return nil, fmt.Errorf("reading counters: %w", err)
		}
		for _, e := range elements {
			if e.Counter == nil {
				continue
			}
			start, _ := strconv.ParseUint(e.Comment, 10, 64) // none is 0
			counted[unix.ByteSliceToString(e.Key)] = start + e.Counter.Packets
		}
	}
	return counted, nil
}

// frames is the bridge's table. A frame from a TAP either is ARP or IPv4 from the guest's own MAC and address, or ends here: STP,
// VLAN tags, IPv6 and LLDP alike.
func (n Network) frames(guests []Guest, counted map[string]uint64) table {
	arp := all(etherType(unix.ETH_P_ARP),
		rule{load(expr.PayloadBaseNetworkHeader, 0, 6, word(0)), equals([]byte{0, 1, 8, 0, 6, 4})}, // MACs for IPv4 addresses
		own(load(expr.PayloadBaseLLHeader, macOffset, 6, word(4)), arpSourceOffset),
		own(load(expr.PayloadBaseNetworkHeader, arpMACOffset, 6, word(4)), arpSourceOffset), accept())
	ip := all(etherType(unix.ETH_P_IP), own(load(expr.PayloadBaseLLHeader, macOffset, 6, word(4)), sourceOffset), accept())
	count := all(rule{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: word(0)}}, in(portsSet), drop())
	prerouting := []rule{arp, ip, count}
	chains := []chain{}
	if n.Overlay != "" {
		prerouting = append([]rule{all(from(n.Overlay), goTo("overlay"))}, prerouting...)
		gateway := rule{load(expr.PayloadBaseLLHeader, macOffset, 6, word(0)), equals(n.GatewayMAC)}
		chains = append(chains, chain{name: "overlay", rules: []rule{
			all(gateway, drop()), // each node has its own
			all(etherType(unix.ETH_P_ARP), accept()),
			all(etherType(unix.ETH_P_IP), accept()),
		}}, chain{name: "forward", base: &base{nftables.ChainTypeFilter, *nftables.ChainHookForward, bridgeFilter, nftables.ChainPolicyAccept}, rules: []rule{
			// A guest that asks its neighbour alone (Linux does before it gives an entry up) is not answered by the bridge, and so asks
			// everybody next, which is: no ARP crosses between nodes.
			all(to(n.Overlay), etherType(unix.ETH_P_ARP), drop()),
		}})
	}
	// Frames to the group addresses that a bridge answers itself never see prerouting: 01-80-C2-00-00-00 to -0F (IEEE 802.1Q, 8.6.3).
	group := rule{load(expr.PayloadBaseLLHeader, 0, 6, word(0)), masked([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xf0}), equals([]byte{1, 0x80, 0xc2, 0, 0, 0})}
	return table{
		family: nftables.TableFamilyBridge, name: networkTable, sets: guestSets(guests, counted),
		chains: append(chains,
			chain{name: "prerouting", base: &base{nftables.ChainTypeFilter, *nftables.ChainHookPrerouting, bridgeFilter, nftables.ChainPolicyDrop}, rules: prerouting},
			chain{name: "input", base: &base{nftables.ChainTypeFilter, *nftables.ChainHookInput, bridgeFilter, nftables.ChainPolicyAccept}, rules: []rule{
				all(group, count), all(group, drop()),
			}}),
	}
}

// bridgeFilter is NF_BR_PRI_FILTER_BRIDGED, before br_netfilter takes the frame for the host's rules.
const bridgeFilter nftables.ChainPriority = -200

// own matches when the port, the MAC that mac loads and the address at offset in the network header are one guest's.
func own(mac expr.Any, offset uint32) rule {
	return all(rule{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: word(0)}, mac, load(expr.PayloadBaseNetworkHeader, offset, 4, word(6))}, in(guestsSet))
}

// guestSets gives what the guests are in; a port's counter starts from counted, or from the guest's own figure.
func guestSets(guests []Guest, counted map[string]uint64) []set {
	key, err := nftables.ConcatSetType(nftables.TypeIFName, nftables.TypeEtherAddr, nftables.TypeIPAddr)
	if err != nil {
		panic(err) // three types of the library's own are not too many
	}
	who := set{name: guestsSet, key: key}
	ports := set{name: portsSet, key: nftables.TypeIFName, counted: true}
	for _, g := range guests {
		port := deviceName(g.Port)
		triple := append(append(append([]byte{}, port...), g.MAC...), 0, 0) // filled up to whole registers
		who.add(nftables.SetElement{Key: append(triple, g.Address.AsSlice()...)})
		start, ok := counted[g.Port]
		if !ok {
			start = g.Dropped
		}
		e := nftables.SetElement{Key: port}
		if start != 0 {
			e.Comment = strconv.FormatUint(start, 10)
		}
		ports.add(e)
	}
	return []set{who, ports}
}

// packets is the table of what the namespace routes and takes itself. It is of both IP families, so that no IPv6 packet gets
// anywhere even where the kernel has it switched on.
func (n Network) packets() table {
	const known = expr.CtStateBitESTABLISHED | expr.CtStateBitRELATED
	v4 := meta(expr.MetaKeyNFPROTO, []byte{unix.NFPROTO_IPV4})
	denied := set{name: deniedSet, key: nftables.TypeIPAddr, interval: true, elements: ranges(slices.Concat(reserved(), n.Denied, []netip.Prefix{n.Subnet}))}
	source, target := load(expr.PayloadBaseNetworkHeader, sourceOffset, 4, word(0)), load(expr.PayloadBaseNetworkHeader, targetOffset, 4, word(0))

	forward := []rule{
		all(state(expr.CtStateBitINVALID), drop()),
		// The node may open connections to its guests, which answer.
		all(from(n.Uplink), to(n.Bridge), asked(), sourceIs(n.HostTransit), targetWithin(n.Subnet), accept()),
		all(from(n.Bridge), to(n.Uplink), answered(), state(known), targetIs(n.HostTransit), accept()),
	}
	if n.NAT {
		// Each packet is judged, not each connection: one that is open when its destination becomes denied is cut.
		forward = append(forward,
			all(from(n.Bridge), to(n.Uplink), udpTo(n.Port), drop()),
			all(from(n.Bridge), to(n.Uplink), asked(), sourceWithin(n.Subnet), rule{target}, outside(deniedSet), accept()),
			all(from(n.Uplink), to(n.Bridge), answered(), state(expr.CtStateBitESTABLISHED), rule{source}, outside(deniedSet), accept()),
			// Whoever on the way says that a packet is too big or its destination cannot be reached may have a denied address.
			all(from(n.Uplink), to(n.Bridge), answered(), state(expr.CtStateBitRELATED), protocol(unix.IPPROTO_ICMP), accept()))
	}
	chains := []chain{
		// A frame to some of the group addresses is handed to the port's own device, past the bridge and its rules.
		{name: "prerouting", base: &base{nftables.ChainTypeFilter, *nftables.ChainHookPrerouting, *nftables.ChainPriorityRaw, nftables.ChainPolicyDrop}, rules: []rule{
			all(v4, from("lo"), accept()), all(v4, from(n.Bridge), accept()), all(v4, from(n.Uplink), accept()),
		}},
		{name: "input", base: &base{nftables.ChainTypeFilter, *nftables.ChainHookInput, *nftables.ChainPriorityFilter, nftables.ChainPolicyDrop}, rules: []rule{
			all(from("lo"), accept()),
			all(state(known), accept()),
			all(from(n.Bridge), targetIs(n.Gateway), protocol(unix.IPPROTO_ICMP),
				rule{load(expr.PayloadBaseTransportHeader, 0, 1, word(0)), equals([]byte{8})}, accept()), // an echo request
		}},
		{name: "forward", base: &base{nftables.ChainTypeFilter, *nftables.ChainHookForward, *nftables.ChainPriorityFilter, nftables.ChainPolicyDrop}, rules: forward},
		{name: "postrouting", base: &base{nftables.ChainTypeNAT, *nftables.ChainHookPostrouting, *nftables.ChainPriorityNATSource, nftables.ChainPolicyAccept}, rules: []rule{
			all(to(n.Uplink), sourceWithin(n.Subnet), comesFrom(n.Transit)),
			all(to(n.Bridge), sourceIs(n.HostTransit), comesFrom(n.Gateway)),
		}},
	}
	return table{family: nftables.TableFamilyINet, name: networkTable, sets: []set{denied}, chains: chains}
}

// reserved is what no guest may send to (RFC 6890): this network, loopback, link-local, multicast, reserved, broadcast.
func reserved() []netip.Prefix {
	prefixes := []netip.Prefix{}
	for _, p := range []string{"0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4"} {
		prefixes = append(prefixes, netip.MustParsePrefix(p))
	}
	return prefixes
}

// comesFrom ends a rule of a NAT chain: the packet's source becomes the address. The end of the range is said, as the kernel says it.
func comesFrom(address netip.Addr) rule {
	return rule{&expr.Immediate{Register: word(0), Data: address.AsSlice()},
		&expr.NAT{Type: expr.NATTypeSourceNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: word(0), RegAddrMax: word(0)}}
}

func (n Network) check(guests []Guest) error {
	for _, device := range []string{n.Bridge, n.Uplink} {
		if err := checkName(device); err != nil {
			return err
		}
	}
	if len(n.Overlay) >= unix.IFNAMSIZ {
		return checkName(n.Overlay)
	}
	for _, a := range []netip.Addr{n.Subnet.Addr(), n.Gateway, n.Transit, n.HostTransit} {
		if !a.Is4() {
			return fmt.Errorf("%q is not an IPv4 address", a)
		}
	}
	for _, p := range n.Denied {
		if !p.IsValid() || !p.Addr().Is4() {
			return fmt.Errorf("%q is not an IPv4 prefix", p)
		}
	}
	if len(n.GatewayMAC) != 6 {
		return fmt.Errorf("%q is not a MAC of six bytes", n.GatewayMAC)
	}
	for _, g := range guests {
		if err := g.check(); err != nil {
			return fmt.Errorf("guest of port %q: %w", g.Port, err)
		}
	}
	return nil
}

func (g Guest) check() error {
	if !g.Address.Is4() {
		return fmt.Errorf("%q is not an IPv4 address", g.Address)
	}
	if len(g.MAC) != 6 {
		return fmt.Errorf("%q is not a MAC of six bytes", g.MAC)
	}
	return checkName(g.Port)
}

// checkName keeps a name from the kernel that would be cut there, and mean another device.
func checkName(device string) error {
	if device == "" || len(device) >= unix.IFNAMSIZ {
		return fmt.Errorf("%q is not a device's name of 1 to %d bytes", device, unix.IFNAMSIZ-1)
	}
	return nil
}
