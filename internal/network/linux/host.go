package linux

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"imp.dev/imp/internal/network"
	"imp.dev/imp/internal/network/linux/firewall"
)

// host is the host's network namespace, and what networks need there in common.
type host struct {
	n     *Network
	space *space

	mu      sync.Mutex
	members map[string]member // networks that are on the host, by ID
	made    bool              // there may be rules of ours
	blocked []string          // foreign chains that could not be amended
	problem string            // what the last sweep could not repair
}

// member is one network's part in the host's namespace.
type member struct {
	veth    string
	transit netip.Addr // the network's end of the way
	subnet  netip.Prefix
	egress  string
	vni     uint32 // 0: no overlay
	vteps   []netip.Addr
}

func (m member) equal(o member) bool {
	return m.veth == o.veth && m.transit == o.transit && m.subnet == o.subnet && m.egress == o.egress && m.vni == o.vni && slices.Equal(m.vteps, o.vteps)
}

// openHost opens the host's namespace. made begins true: an earlier process may have left rules.
func openHost(n *Network) (*host, error) {
	path := n.o.HostNamespace
	if path == "" {
		path = "/proc/self/ns/net"
	}
	ns, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("opening the host's network namespace: %w", err)
	}
	s, err := openSpace(ns)
	if err != nil {
		return nil, fmt.Errorf("opening the host's network namespace: %w", err)
	}
	return &host{n: n, space: s, members: map[string]member{}, made: true}, nil
}

// adopt takes networks that an earlier process has left on the host for members, so that the first rules written here are not
// without them.
func (h *host) adopt(segments map[string]*segment) {
	under, err := h.underlay()
	if err != nil {
		h.n.o.Log.Error("overlay's address was not found", "error", err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, s := range segments {
		if s.space != nil && len(s.guests) > 0 && s.record.Transit >= 0 {
			h.members[id] = s.member(under)
		}
	}
}

func (h *host) close() { h.space.close() }

// underlay is what carries the overlay: the zero one carries none.
type underlay struct {
	vtep   netip.Addr
	device string
	mtu    int
}

func (h *host) underlay() (underlay, error) {
	addresses, err := h.addresses()
	if err != nil {
		return underlay{}, err
	}
	vtep, index := h.n.o.VTEP, 0
	if !vtep.IsValid() {
		if vtep, index, err = h.defaultSource(addresses); err != nil || !vtep.IsValid() {
			return underlay{}, err
		}
	}
	for _, a := range addresses {
		if ip, _ := netip.AddrFromSlice(a.IP.To4()); ip == vtep {
			index = a.LinkIndex
		}
	}
	if index == 0 {
		return underlay{}, fmt.Errorf("finding the overlay's address: no interface of the host has %s", vtep)
	}
	link, err := h.space.nl.LinkByIndex(index)
	if err != nil {
		return underlay{}, fmt.Errorf("finding the overlay's interface: %w", err)
	}
	return underlay{vtep: vtep, device: link.Attrs().Name, mtu: link.Attrs().MTU}, nil
}

// defaultSource gives the source address of the default route, and its interface.
func (h *host) defaultSource(addresses []netlink.Addr) (netip.Addr, int, error) {
	routes, err := list(func() ([]netlink.Route, error) {
		return h.space.nl.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return netip.Addr{}, 0, fmt.Errorf("listing the host's routes: %w", err)
	}
	var best *netlink.Route
	for i, r := range routes {
		if ones := prefixLength(r.Dst); ones == 0 && r.LinkIndex != 0 && (best == nil || r.Priority < best.Priority) {
			best = &routes[i]
		}
	}
	if best == nil {
		return netip.Addr{}, 0, nil
	}
	if src, ok := netip.AddrFromSlice(best.Src.To4()); ok {
		return src, best.LinkIndex, nil
	}
	for _, a := range addresses {
		if a.LinkIndex == best.LinkIndex && a.Scope == unix.RT_SCOPE_UNIVERSE {
			src, _ := netip.AddrFromSlice(a.IP.To4())
			return src, best.LinkIndex, nil
		}
	}
	return netip.Addr{}, 0, nil
}

func prefixLength(n *net.IPNet) int {
	if n == nil {
		return 0
	}
	ones, _ := n.Mask.Size()
	return ones
}

func (h *host) addresses() ([]netlink.Addr, error) {
	a, err := list(func() ([]netlink.Addr, error) { return h.space.nl.AddrList(nil, netlink.FAMILY_V4) })
	return a, wrap("listing the host's addresses", err)
}

// look implements network.Network's Host.
func (h *host) look() (network.Host, error) {
	out := network.Host{Port: h.n.o.Port}
	under, err := h.underlay()
	if err != nil {
		return out, err
	}
	if under.vtep.IsValid() {
		out.VTEP, out.MTU = under.vtep.String(), under.mtu
	}
	addresses, err := h.addresses()
	if err != nil {
		return out, err
	}
	// Our own are link-local, as are those of other instances here.
	for _, a := range addresses {
		if ip, ok := netip.AddrFromSlice(a.IP.To4()); ok && !ip.IsLoopback() && !ip.IsLinkLocalUnicast() {
			out.Addresses = append(out.Addresses, ip.String())
		}
	}
	slices.Sort(out.Addresses)
	out.Addresses = slices.Compact(out.Addresses)
	h.mu.Lock()
	defer h.mu.Unlock()
	out.ForwardBlocked = strings.Join(h.blocked, "; ")
	return out, nil
}

// trouble says what keeps the host's namespace from being as networks need it, "" if nothing does.
func (h *host) trouble() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.problem
}

// put tells the host's rules and routes of a network; nothing is done if they know it as it is. A failure leaves the last ones.
func (h *host) put(id string, m member) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	before, had := h.members[id]
	if had && before.equal(m) {
		return nil
	}
	h.members[id] = m
	_, err := h.ensure()
	if err == nil {
		return nil
	}
	if had {
		h.members[id] = before
	} else {
		delete(h.members, id)
	}
	return err
}

// drop takes a network out of the host's rules. Its routes went with its veth.
func (h *host) drop(id string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, had := h.members[id]; !had && len(h.members) > 0 {
		return nil
	}
	delete(h.members, id)
	_, err := h.ensure()
	return err
}

// ensure makes the host's namespace what the members need, and gives sentences about what was not so. h.mu is held.
func (h *host) ensure() ([]string, error) {
	if len(h.members) == 0 {
		return nil, h.clear()
	}
	var done []string
	h.made = true
	if err := h.n.step("host forwarding"); err != nil {
		return nil, err
	}
	changed, err := h.space.sysctls([]sysctl{{name: "ipv4/ip_forward", want: "1"}})
	if err != nil {
		return nil, fmt.Errorf("on the host: %w", err)
	}
	for _, name := range changed {
		done = append(done, "the host's "+name+" was set to 1")
	}
	if err := h.n.step("host rules"); err != nil {
		return done, err
	}
	wrote, err := firewall.EnsureHost(h.space.fd(), h.rules())
	if err != nil {
		return done, fmt.Errorf("writing the host's rules: %w", err)
	}
	if wrote {
		done = append(done, "the host's rules were written")
	}
	if h.blocked, err = firewall.EnsureForward(h.space.fd(), h.n.o.Instance, h.n.names.prefix()); err != nil {
		return done, fmt.Errorf("passing the host's foreign forward chains: %w", err)
	}
	routes, err := h.routes()
	return append(done, routes...), err
}

func (h *host) clear() error {
	if !h.made {
		return nil
	}
	if err := h.n.step("host rules removed"); err != nil {
		return err
	}
	if err := firewall.RemoveForward(h.space.fd(), h.n.o.Instance); err != nil {
		return fmt.Errorf("leaving the host's foreign forward chains: %w", err)
	}
	if err := firewall.RemoveHost(h.space.fd(), h.n.o.Instance); err != nil {
		return fmt.Errorf("removing the host's rules: %w", err)
	}
	h.made, h.blocked = false, nil
	return nil
}

// rules gives what the host's rules are made of, in the order of networks.
func (h *host) rules() firewall.Host {
	r := firewall.Host{Instance: h.n.o.Instance, Prefix: h.n.names.prefix(), Port: uint16(h.n.o.Port), Egress: map[string]string{}}
	for _, id := range h.ids() {
		m := h.members[id]
		r.Transits = append(r.Transits, m.transit)
		if m.egress != "" {
			r.Egress[m.veth] = m.egress
		}
		if m.vni == 0 {
			continue
		}
		r.VNIs = append(r.VNIs, m.vni)
		for _, vtep := range m.vteps {
			r.Peers = append(r.Peers, firewall.Peer{VNI: m.vni, VTEP: vtep})
		}
	}
	return r
}

func (h *host) ids() []string {
	ids := make([]string, 0, len(h.members))
	for id := range h.members {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// routes gives the host routes to guests' subnets, where the administrator allows them. Of networks whose subnets overlap the one
// that has its route keeps it. A route that somebody else has made for the same subnet stays his. h.mu is held.
func (h *host) routes() ([]string, error) {
	if len(h.n.o.NodeRoutes) == 0 {
		return nil, nil
	}
	if err := h.n.step("host routes"); err != nil {
		return nil, err
	}
	have, err := list(func() ([]netlink.Route, error) {
		return h.space.nl.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return nil, fmt.Errorf("listing the host's routes: %w", err)
	}
	var routed []netip.Prefix
	waiting := map[string]int{}
	for _, id := range h.ids() {
		m := h.members[id]
		link, err := h.space.nl.LinkByName(m.veth)
		if err != nil {
			continue // the network's own repair makes it
		}
		index := link.Attrs().Index
		mine := slices.IndexFunc(have, func(r netlink.Route) bool { return r.LinkIndex == index && toPrefix(r.Dst) == m.subnet })
		switch may := h.mayRoute(m.subnet); {
		case !may && mine >= 0:
			if err := h.space.nl.RouteDel(&have[mine]); err != nil && !gone(err) {
				return nil, fmt.Errorf("removing route to %s on the host: %w", m.subnet, err)
			}
		case !may:
		case mine >= 0:
			routed = append(routed, m.subnet)
		default:
			waiting[id] = index
		}
	}
	var done []string
	for _, id := range h.ids() {
		index, waits := waiting[id]
		m := h.members[id]
		if !waits || slices.ContainsFunc(routed, m.subnet.Overlaps) {
			continue
		}
		route := &netlink.Route{LinkIndex: index, Dst: ipNet(m.subnet), Gw: m.transit.AsSlice()}
		if err := h.space.nl.RouteAdd(route); errors.Is(err, fs.ErrExist) {
			continue
		} else if err != nil {
			return done, fmt.Errorf("making route to %s on the host by %s: %w", m.subnet, m.veth, err)
		}
		routed = append(routed, m.subnet)
		done = append(done, fmt.Sprintf("the host's route to %s was made", m.subnet))
	}
	return done, nil
}

func (h *host) mayRoute(subnet netip.Prefix) bool {
	return slices.ContainsFunc(h.n.o.NodeRoutes, func(r netip.Prefix) bool {
		return r.Bits() <= subnet.Bits() && r.Contains(subnet.Addr())
	})
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), 32)}
}

func toPrefix(n *net.IPNet) netip.Prefix {
	if n == nil {
		return netip.Prefix{}
	}
	a, ok := netip.AddrFromSlice(n.IP.To4())
	if !ok {
		return netip.Prefix{}
	}
	return netip.PrefixFrom(a, prefixLength(n))
}

// list asks the kernel again when its answer was cut through by a change.
func list[T any](ask func() ([]T, error)) ([]T, error) {
	for try := 0; ; try++ {
		out, err := ask()
		if !errors.Is(err, netlink.ErrDumpInterrupted) || try == 10 {
			return out, err
		}
	}
}
