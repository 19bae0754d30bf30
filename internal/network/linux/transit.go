package linux

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The ways from networks to the host are link-local /31s of 169.254.64.0/18: nobody routes them, and 169.254.169.254 is not in it.
// A network's is chosen by hash and kept; the host has the lower address.
const (
	transitBase  = 169<<24 | 254<<16 | 64<<8
	transitCount = 1 << (32 - 18 - 1)
	transitTries = 256
)

// transit gives the two ends of the way of that number.
func transit(number int) (host, own netip.Addr) {
	at := func(n uint32) netip.Addr {
		return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
	}
	low := uint32(transitBase + 2*number)
	return at(low), at(low + 1)
}

// wish gives the number that a network tries at its n-th try.
func (n names) wish(id string, try int) int {
	v, _ := strconv.ParseUint(digest(n.instance+"/transit/"+id+"/"+strconv.Itoa(try), 8), 16, 64)
	return int(v % transitCount)
}

// uplink makes the veth between the network and the host, with an address of the way at either end.
func (c *convergence) uplink() error {
	s, host := c.s, c.s.n.host.space
	names := s.n.names
	outer, inner := attrs(names.hostEnd(s.id), s.plan.mtu), attrs(names.uplink(s.id), s.plan.mtu)
	outer.Alias, inner.Alias = names.alias("network "+s.id), names.alias("way to the host of network "+s.id)
	if err := s.n.step("uplink"); err != nil {
		return err
	}
	there, err := host.link(outer.Name)
	if err != nil {
		return err
	}
	here := c.links[inner.Name]
	// The two are one pair when each knows the other's index.
	if there == nil || here == nil || there.Attrs().ParentIndex != here.Attrs().Index || here.Attrs().ParentIndex != there.Attrs().Index {
		if err := errors.Join(host.unlink(outer.Name), s.space.unlink(inner.Name)); err != nil {
			return err
		}
		pair := netlink.NewVeth(outer)
		pair.PeerName, pair.PeerHardwareAddr, pair.PeerNamespace = inner.Name, inner.HardwareAddr, netlink.NsFd(s.space.fd())
		if err := host.nl.LinkAdd(pair); err != nil {
			return fmt.Errorf("making %s and %s: %w", outer.Name, inner.Name, err)
		}
		c.did("way to the host was made")
		if there, err = host.nl.LinkByName(outer.Name); err != nil {
			return fmt.Errorf("looking at %s on the host: %w", outer.Name, err)
		}
		if here, err = s.space.nl.LinkByName(inner.Name); err != nil {
			return fmt.Errorf("looking at %s: %w", inner.Name, err)
		}
		c.links[inner.Name] = here
	}
	s.indices.uplink = here.Attrs().Index
	if err := c.addressUplink(there, here); err != nil {
		return err
	}
	if _, err := host.sysctls([]sysctl{{"ipv6/conf/" + outer.Name + "/disable_ipv6", "1", true}}); err != nil {
		return fmt.Errorf("on the host: %w", err)
	}
	for _, end := range []struct {
		space *space
		link  netlink.Link
		want  netlink.LinkAttrs
	}{{host, there, outer}, {s.space, here, inner}} {
		changed, err := end.space.settle(end.link, end.want)
		if err != nil {
			return err
		}
		if changed {
			c.did("settings of %s were mended", end.want.Name)
		}
	}
	return nil
}

// addressUplink gives both ends their addresses, and chooses the way where none is chosen yet.
func (c *convergence) addressUplink(there, here netlink.Link) error {
	s := c.s
	if err := s.n.step("uplink addresses"); err != nil {
		return err
	}
	number, changed, err := s.n.host.reserve(there, s.record.Transit, func(try int) int { return s.n.names.wish(s.id, try) })
	if err != nil {
		return err
	}
	if number != s.record.Transit {
		record := s.record
		record.Transit = number
		if err := s.n.store.save(networksDir, s.id, record); err != nil {
			return err
		}
		s.record = record
	}
	_, own := transit(number)
	mended, err := s.space.address(here, netip.PrefixFrom(own, 31))
	if changed || mended {
		c.did("addresses of the way to the host were set, network's end %s", own)
	}
	return err
}

// reserve gives a veth's end on the host the address of a way that nobody else on this host has: the one of number if that is not
// negative and free, else the first free one that wish names. It is there before it is looked whether it is alone, and who is
// not alone goes away again: of two runtimes that take one at the same moment, both may have to try on, and both end well.
func (h *host) reserve(l netlink.Link, number int, wish func(try int) int) (int, bool, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for try := range transitTries {
		if number < 0 || try > 0 {
			number = wish(try)
		}
		addr, _ := transit(number)
		free, err := h.free(addr, l)
		if err != nil {
			return 0, false, err
		}
		if !free {
			continue
		}
		changed, err := h.space.address(l, netip.PrefixFrom(addr, 31))
		if err != nil {
			return 0, false, fmt.Errorf("on the host: %w", err)
		}
		if !changed {
			return number, false, nil // it was ours all the time
		}
		if free, err = h.free(addr, l); err != nil {
			return 0, false, err
		}
		if free {
			return number, true, nil
		}
	}
	return 0, false, fmt.Errorf("choosing a way to the host: none of %d tried in 169.254.64.0/18 is free", transitTries)
}

// free says that no other device of the host has an address of the way.
func (h *host) free(low netip.Addr, but netlink.Link) (bool, error) {
	all, err := h.addresses()
	if err != nil {
		return false, err
	}
	way := netip.PrefixFrom(low, 31)
	for _, a := range all {
		ip, _ := netip.AddrFromSlice(a.IP.To4())
		ones, _ := a.Mask.Size()
		if a.LinkIndex != but.Attrs().Index && netip.PrefixFrom(ip, max(ones, 18)).Masked().Overlaps(way) {
			return false, nil
		}
	}
	return true, nil
}

// route makes the default route of the namespace lead to the host.
func (c *convergence) route() error {
	s := c.s
	if err := s.n.step("route"); err != nil {
		return err
	}
	hostEnd, _ := transit(s.record.Transit)
	routes, err := list(func() ([]netlink.Route, error) {
		return s.space.nl.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return fmt.Errorf("listing routes: %w", err)
	}
	there := false
	for _, r := range routes {
		gateway, _ := netip.AddrFromSlice(r.Gw.To4())
		switch {
		case prefixLength(r.Dst) == 0 && r.LinkIndex == s.indices.uplink && gateway == hostEnd:
			there = true
		case r.Protocol == unix.RTPROT_KERNEL:
		default:
			if err := s.space.nl.RouteDel(&r); err != nil && !gone(err) {
				return fmt.Errorf("removing route %s: %w", r, err)
			}
			c.did("foreign route %s was removed", r)
		}
	}
	if there {
		return nil
	}
	if err := s.space.nl.RouteReplace(&netlink.Route{LinkIndex: s.indices.uplink, Gw: hostEnd.AsSlice()}); err != nil {
		return fmt.Errorf("making default route: %w", err)
	}
	c.did("default route was made")
	return nil
}

// onHost tells the host's rules and routes.
func (c *convergence) onHost() error {
	s := c.s
	return s.n.host.put(s.id, s.member(c.under))
}

func (s *segment) member(under underlay) member {
	_, own := transit(s.record.Transit)
	m := member{veth: s.n.names.hostEnd(s.id), transit: own, subnet: s.plan.subnet, egress: s.plan.egress}
	if under.vtep.IsValid() {
		m.vni, m.vteps = s.plan.vni, s.vteps()
	}
	return m
}
