package linux

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"imp.dev/imp/internal/network"
)

// plan is a network.Spec that was understood.
type plan struct {
	subnet  netip.Prefix
	gateway netip.Addr
	mac     net.HardwareAddr
	mtu     int
	vni     uint32
	nat     bool
	egress  string
	denied  []netip.Prefix
	peers   []place
	// elsewhere and elsewhereMAC are the peers' addresses and MACs.
	elsewhere    map[netip.Addr]int
	elsewhereMAC map[mac]bool
}

// place is where a guest is: a MAC and an address behind a TAP here (vtep is zero) or a node.
type place struct {
	address netip.Addr
	mac     mac
	vtep    netip.Addr
}

// mac is a hardware address that can be compared.
type mac [6]byte

func (m mac) hardware() net.HardwareAddr { return net.HardwareAddr(m[:]) }

func (m mac) String() string { return m.hardware().String() }

const (
	minMTU = 576 // every IPv4 host must take a datagram of this size: RFC 791
	maxMTU = 65535
	maxVNI = 1<<24 - 1
)

func parse(spec network.Spec) (plan, error) {
	p := plan{mtu: spec.MTU, vni: spec.VNI, nat: spec.NAT, egress: spec.EgressInterface, mac: network.GatewayMAC(spec.ID),
		elsewhere: map[netip.Addr]int{}, elsewhereMAC: map[mac]bool{}}
	if !fileName(spec.ID) {
		return p, fmt.Errorf("its ID %q is not one", spec.ID)
	}
	var err error
	if p.subnet, err = prefix(spec.Subnet); err != nil {
		return p, fmt.Errorf("subnet: %w", err)
	}
	if p.gateway, err = address(spec.Gateway); err != nil {
		return p, fmt.Errorf("gateway: %w", err)
	}
	if !p.subnet.Contains(p.gateway) {
		return p, fmt.Errorf("gateway %s is not in subnet %s", p.gateway, p.subnet)
	}
	if p.mtu < minMTU || p.mtu > maxMTU {
		return p, fmt.Errorf("MTU %d is not between %d and %d", p.mtu, minMTU, maxMTU)
	}
	if p.vni < 1 || p.vni > maxVNI {
		return p, fmt.Errorf("VNI %d is not between 1 and %d", p.vni, maxVNI)
	}
	for _, text := range spec.Denied {
		d, err := prefix(text)
		if err != nil {
			return p, fmt.Errorf("denied destination: %w", err)
		}
		p.denied = append(p.denied, d)
	}
	for _, peer := range spec.Peers {
		at, err := parsePlace(peer.Address, peer.MAC, p)
		if err != nil {
			return p, fmt.Errorf("guest on another node: %w", err)
		}
		if at.vtep, err = address(peer.VTEP); err != nil {
			return p, fmt.Errorf("node of guest %s: %w", at.address, err)
		}
		p.elsewhereMAC[at.mac] = true
		if i, again := p.elsewhere[at.address]; again {
			p.peers[i] = at // said twice: the last word counts
			continue
		}
		p.elsewhere[at.address] = len(p.peers)
		p.peers = append(p.peers, at)
	}
	return p, nil
}

// parsePlace refuses what would take the gateway's place, or a multicast's.
func parsePlace(text, hardware string, p plan) (place, error) {
	a, err := address(text)
	if err != nil {
		return place{}, err
	}
	m, err := net.ParseMAC(hardware)
	if err != nil || len(m) != 6 {
		return place{}, fmt.Errorf("%q is not a MAC address", hardware)
	}
	switch {
	case m[0]&1 != 0 || bytes.Equal(m, make([]byte, 6)):
		return place{}, fmt.Errorf("MAC address %s is not one interface's", m)
	case !p.subnet.Contains(a):
		return place{}, fmt.Errorf("address %s is not in subnet %s", a, p.subnet)
	case a == p.gateway || bytes.Equal(m, p.mac):
		return place{}, fmt.Errorf("address %s or MAC address %s is the gateway's", a, m)
	}
	return place{address: a, mac: mac(m)}, nil
}

func address(text string) (netip.Addr, error) {
	a, err := netip.ParseAddr(text)
	if err != nil || !a.Is4() {
		return a, fmt.Errorf("%q is not an IPv4 address", text)
	}
	return a, nil
}

func prefix(text string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(text)
	if err != nil || !p.Addr().Is4() {
		return p, fmt.Errorf("%q is not an IPv4 prefix", text)
	}
	return p.Masked(), nil
}

// fileName says that an ID can be a file's name and a part of a message.
func fileName(id string) bool {
	if id == "" || len(id) > 128 || id[0] == '.' {
		return false
	}
	for _, c := range []byte(id) {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' && c != '_' && c != '.' {
			return false
		}
	}
	return true
}

// key names one interface of one VM.
type key struct{ vm, name string }

// guest is one interface of a VM here.
type guest struct {
	key   key
	at    place
	tap   string
	alias string
	tally tally
}

// guest understands an interface that is to be in this network.
func (s *segment) guest(vm string, i network.Interface) (*guest, error) {
	if len(i.Addresses) != 1 {
		return nil, fmt.Errorf("it has %d addresses, and an interface in a network has one", len(i.Addresses))
	}
	p, err := netip.ParsePrefix(i.Addresses[0])
	if err != nil {
		return nil, fmt.Errorf("%q is not an address in CIDR form", i.Addresses[0])
	}
	at, err := parsePlace(p.Addr().String(), i.MAC, s.plan)
	if err != nil {
		return nil, err
	}
	names := s.n.names
	return &guest{key: key{vm, i.Name}, at: at, tap: names.tap(vm, i.Name), alias: names.alias("vm " + vm + " " + i.Name)}, nil
}

// clash says which other guest here has the address or the MAC of g.
func (s *segment) clash(g *guest) error {
	for _, other := range []*guest{s.at[g.at.address], s.by[g.at.mac]} {
		if other != nil && other.key != g.key {
			return fmt.Errorf("address %s or MAC address %s is held by interface %s of VM %s here", g.at.address, g.at.mac, other.key.name, other.key.vm)
		}
	}
	return nil
}

// add and remove keep what guests are looked up by.
func (s *segment) add(g *guest) {
	if old := s.guests[g.key]; old != nil {
		s.remove(old)
	}
	s.guests[g.key], s.at[g.at.address], s.by[g.at.mac] = g, g, g
}

func (s *segment) remove(g *guest) {
	delete(s.guests, g.key)
	if s.at[g.at.address] == g {
		delete(s.at, g.at.address)
	}
	if s.by[g.at.mac] == g {
		delete(s.by, g.at.mac)
	}
}

// remote gives the guests elsewhere, without those that are here: what is attached here is known better here.
func (s *segment) remote() []place {
	out := make([]place, 0, len(s.plan.peers))
	for _, p := range s.plan.peers {
		if s.at[p.address] == nil && s.by[p.mac] == nil {
			out = append(out, p)
		}
	}
	return out
}

// vteps of the guests elsewhere, each once and in order.
func (s *segment) vteps() []netip.Addr {
	var out []netip.Addr
	for _, p := range s.remote() {
		out = append(out, p.vtep)
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out)
}

var errNoNetwork = errors.New("it names no network")
