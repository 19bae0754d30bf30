package linux

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// overlay makes the VXLAN device a port of the bridge. It is made by the host's namespace, where its socket stays, into the
// network's. Where the host has no address in the overlay there is none.
func (c *convergence) overlay() error {
	s := c.s
	name := s.n.names.overlay(s.id)
	if err := s.n.step("overlay"); err != nil {
		return err
	}
	if !c.under.vtep.IsValid() {
		if c.links[name] != nil {
			c.did("overlay was removed, the host has no address in it any more")
		}
		s.indices.overlay = 0
		return s.space.unlink(name)
	}
	want := attrs(name, s.plan.mtu)
	want.Alias = s.n.names.alias("overlay of network " + s.id)
	right := func(l netlink.Link) bool {
		v, ok := l.(*netlink.Vxlan)
		return ok && v.VxlanId == int(s.plan.vni) && v.Port == s.n.o.Port && !v.Learning && v.SrcAddr.String() == c.under.vtep.String() && v.Group == nil
	}
	l, made, err := c.device(want, func(a netlink.LinkAttrs) error {
		a.Namespace = netlink.NsFd(s.space.fd())
		err := s.n.host.space.nl.LinkAdd(&netlink.Vxlan{LinkAttrs: a, VxlanId: int(s.plan.vni), SrcAddr: c.under.vtep.AsSlice(), Port: s.n.o.Port})
		if errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("VNI %d on port %d is taken by another network of this host: %w", s.plan.vni, s.n.o.Port, err)
		}
		return err
	}, right)
	if err != nil {
		if errors.Is(err, unix.EADDRINUSE) {
			return fmt.Errorf("UDP port %d of the host is taken: %w", s.n.o.Port, err)
		}
		return err
	}
	if s.indices.overlay != l.Attrs().Index {
		clear(s.remotes) // what was told to another device is told to none
	}
	s.indices.overlay = l.Attrs().Index
	mended, err := s.port(l, want.Alias, overlayPort(), nil)
	if mended && !made {
		c.did("overlay was made a port of the bridge again")
	}
	return err
}

// port makes a device a port of the bridge with these flags. ports are all there are, nil if they were not read.
func (s *segment) port(l netlink.Link, alias string, flags portFlags, ports map[int]portFlags) (bool, error) {
	index, changed := l.Attrs().Index, false
	if l.Attrs().MasterIndex != s.indices.bridge {
		if err := s.space.enslave(index, s.indices.bridge, s.plan.mtu, alias); err != nil {
			return false, fmt.Errorf("making %s a port of the bridge: %w", l.Attrs().Name, err)
		}
		changed = true
	}
	if !changed && ports == nil {
		var err error
		if ports, err = s.space.ports(); err != nil {
			return false, err
		}
	}
	if changed || !ports[index].has(flags) {
		if err := s.space.setPort(index, flags); err != nil {
			return false, fmt.Errorf("setting bridge port %s: %w", l.Attrs().Name, err)
		}
		changed = true
	}
	return changed, nil
}

// follow brings the guests elsewhere that the kernel knows to those that the plan names: only what differs. s.mu is held.
func (s *segment) follow() error {
	if s.space == nil {
		return nil
	}
	if err := s.n.step("peers"); err != nil {
		return err
	}
	if s.indices.overlay == 0 {
		return nil
	}
	under, err := s.n.host.underlay()
	if err != nil {
		return err
	}
	// The host's rules come first: a node's first frame must find its door open.
	if err := s.n.host.put(s.id, s.member(under)); err != nil {
		return err
	}
	want := s.remote()
	for _, p := range want {
		if s.remotes[p.address] == p {
			continue
		}
		if err := s.n.step("peer"); err != nil {
			return err
		}
		if err := s.tell(p, s.indices.overlay); err != nil {
			return err
		}
		s.remotes[p.address] = p
		s.announce(p)
	}
	return s.unlearn(want)
}

// unlearn takes from the kernel the guests elsewhere that are not wanted any more.
func (s *segment) unlearn(want []place) error {
	if len(want) == len(s.remotes) {
		return nil // each of want is among them
	}
	keep, keepMAC := map[place]bool{}, map[mac]bool{}
	for _, p := range want {
		keep[p], keepMAC[p.mac] = true, true
	}
	for address, p := range s.remotes {
		if keep[p] {
			continue
		}
		if err := s.n.step("peer removed"); err != nil {
			return err
		}
		if !keepMAC[p.mac] {
			if err := s.forgetMAC(p.mac, p.vtep); err != nil {
				return err
			}
		}
		if s.at[address] == nil {
			if err := s.forgetAddress(address); err != nil {
				return err
			}
		}
		delete(s.remotes, address)
	}
	return nil
}

// tell makes the kernel know where a guest is, over what it knew before and without a gap: by the overlay to a node, or by a TAP.
func (s *segment) tell(p place, port int) error {
	if p.vtep.IsValid() {
		if err := s.space.nl.NeighSet(s.remoteEntry(p.mac, p.vtep)); err != nil {
			return fmt.Errorf("sending frames for %s to node %s: %w", p.mac, p.vtep, err)
		}
	}
	if err := s.space.nl.NeighSet(bridgeEntry(p.mac, port)); err != nil {
		return fmt.Errorf("sending frames for %s to their port of the bridge: %w", p.mac, err)
	}
	if err := s.space.nl.NeighSet(s.neighbour(p)); err != nil {
		return fmt.Errorf("making %s the neighbour with address %s: %w", p.mac, p.address, err)
	}
	return nil
}

// remoteEntry says to the overlay which node a MAC is at.
func (s *segment) remoteEntry(m mac, vtep netip.Addr) *netlink.Neigh {
	return &netlink.Neigh{LinkIndex: s.indices.overlay, Family: unix.AF_BRIDGE, Flags: netlink.NTF_SELF, State: netlink.NUD_PERMANENT | netlink.NUD_NOARP,
		HardwareAddr: m.hardware(), IP: vtep.AsSlice()}
}

// bridgeEntry says to the bridge which port a MAC is at; it does not age.
func bridgeEntry(m mac, port int) *netlink.Neigh {
	return &netlink.Neigh{LinkIndex: port, Family: unix.AF_BRIDGE, Flags: netlink.NTF_MASTER, State: netlink.NUD_NOARP, HardwareAddr: m.hardware()}
}

// neighbour is what the bridge answers guests' ARP out of, and the gateway its own.
func (s *segment) neighbour(p place) *netlink.Neigh {
	return &netlink.Neigh{LinkIndex: s.indices.bridge, Family: unix.AF_INET, State: netlink.NUD_PERMANENT, IP: p.address.AsSlice(), HardwareAddr: p.mac.hardware()}
}

// forgetMAC takes a MAC that was at a node from the overlay, and from the bridge if it is at no other port by now.
func (s *segment) forgetMAC(m mac, vtep netip.Addr) error {
	for _, entry := range []*netlink.Neigh{bridgeEntry(m, s.indices.overlay), s.remoteEntry(m, vtep)} {
		if err := s.space.nl.NeighDel(entry); err != nil && !gone(err) {
			return fmt.Errorf("taking %s from the overlay: %w", m, err)
		}
	}
	return nil
}

func (s *segment) forgetAddress(a netip.Addr) error {
	if err := s.space.nl.NeighDel(s.neighbour(place{address: a})); err != nil && !gone(err) {
		return fmt.Errorf("removing neighbour %s: %w", a, err)
	}
	return nil
}
