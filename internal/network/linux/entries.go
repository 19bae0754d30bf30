package linux

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// tables are what the kernel knows of where guests are: neighbours of the bridge, MACs at its ports, and MACs at nodes.
type tables struct {
	neighbours map[netip.Addr]mac
	bridge     map[mac]int
	overlay    map[mac]netip.Addr
}

func (s *segment) tables() (tables, error) {
	t := tables{neighbours: map[netip.Addr]mac{}, bridge: map[mac]int{}, overlay: map[mac]netip.Addr{}}
	neighbours, err := list(func() ([]netlink.Neigh, error) { return s.space.nl.NeighList(s.indices.bridge, unix.AF_INET) })
	if err != nil {
		return t, fmt.Errorf("listing neighbours: %w", err)
	}
	for _, n := range neighbours {
		if a, ok := netip.AddrFromSlice(n.IP.To4()); ok && n.State&netlink.NUD_PERMANENT != 0 && len(n.HardwareAddr) == 6 {
			t.neighbours[a] = mac(n.HardwareAddr)
		}
	}
	entries, err := list(func() ([]netlink.Neigh, error) { return s.space.nl.NeighList(0, unix.AF_BRIDGE) })
	if err != nil {
		return t, fmt.Errorf("listing forwarding entries: %w", err)
	}
	for _, e := range entries {
		switch {
		case len(e.HardwareAddr) != 6 || e.HardwareAddr[0]&1 != 0 || e.Vlan != 0:
		case e.Flags&netlink.NTF_SELF != 0 && e.LinkIndex == s.indices.overlay && e.IP.To4() != nil:
			t.overlay[mac(e.HardwareAddr)], _ = netip.AddrFromSlice(e.IP.To4())
		case e.MasterIndex == s.indices.bridge && e.State&netlink.NUD_NOARP != 0 && e.State&netlink.NUD_PERMANENT == 0:
			t.bridge[mac(e.HardwareAddr)] = e.LinkIndex
		}
	}
	return t, nil
}

// entries makes the kernel know where every guest is, and nobody else.
func (c *convergence) entries() error {
	s := c.s
	is, err := s.tables()
	if err != nil {
		return err
	}
	neighbours, macs, nodes := map[netip.Addr]bool{}, map[mac]bool{}, map[mac]bool{}
	clear(s.remotes)
	var want []place
	ports := map[netip.Addr]int{}
	for _, g := range s.guests {
		want = append(want, g.at)
		if l := c.links[g.tap]; l != nil {
			ports[g.at.address] = l.Attrs().Index
		}
	}
	if s.indices.overlay != 0 {
		for _, p := range s.remote() {
			want = append(want, p)
			ports[p.address] = s.indices.overlay
			s.remotes[p.address] = p
		}
	}
	for _, p := range want {
		port, reachable := ports[p.address]
		neighbours[p.address] = true
		macs[p.mac] = macs[p.mac] || reachable
		nodes[p.mac] = nodes[p.mac] || p.vtep.IsValid()
		if is.knows(p, port, reachable) {
			s.heard[p.address] = p.mac
			continue
		}
		if err := s.n.step("entry"); err != nil {
			return err
		}
		if !reachable {
			if err := s.space.nl.NeighSet(s.neighbour(p)); err != nil {
				return fmt.Errorf("making %s the neighbour with address %s: %w", p.mac, p.address, err)
			}
		} else if err := s.tell(p, port); err != nil {
			return err
		}
		s.announce(p)
		c.did("entries of %s at %s were made", p.mac, p.address)
	}
	for a := range is.neighbours {
		if neighbours[a] {
			continue
		}
		if err := s.forgetAddress(a); err != nil {
			return err
		}
		c.did("neighbour %s was removed", a)
	}
	return c.strangers(is, macs, nodes)
}

// knows says that the kernel has the entries of a guest. One whose TAP is not there has a neighbour entry alone.
func (t tables) knows(p place, port int, reachable bool) bool {
	if t.neighbours[p.address] != p.mac {
		return false
	}
	if !reachable {
		return true
	}
	return t.bridge[p.mac] == port && (!p.vtep.IsValid() || t.overlay[p.mac] == p.vtep)
}

// strangers removes MACs that no guest has.
func (c *convergence) strangers(is tables, macs, nodes map[mac]bool) error {
	for m, port := range is.bridge {
		if macs[m] {
			continue
		}
		if err := c.s.space.nl.NeighDel(bridgeEntry(m, port)); err != nil && !gone(err) {
			return fmt.Errorf("taking %s from the bridge: %w", m, err)
		}
		c.did("%s was taken from the bridge", m)
	}
	for m, vtep := range is.overlay {
		if nodes[m] {
			continue
		}
		if err := c.s.space.nl.NeighDel(c.s.remoteEntry(m, vtep)); err != nil && !gone(err) {
			return fmt.Errorf("taking %s from the overlay: %w", m, err)
		}
		c.did("%s was taken from the overlay", m)
	}
	return nil
}
