package linux

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"

	"imp.dev/imp/internal/netns"
	"imp.dev/imp/internal/network/linux/firewall"
)

// converge makes namespace and host what plan and guests say, and gives sentences about what was not so. It makes the whole
// network where there is nothing. s.mu is held.
func (s *segment) converge() (done []deed, err error) {
	s.verified = false
	under, err := s.n.host.underlay()
	if err != nil {
		return nil, err
	}
	if err := fits(s.plan, under); err != nil {
		return nil, err
	}
	c := &convergence{s: s, under: under}
	for _, step := range []struct {
		kind string
		do   func() error
	}{
		{kindNamespace, c.enter}, {kindNamespace, c.quiet}, {kindDevice, c.uplink}, {kindRules, c.rules}, {kindDevice, c.bridge}, {kindDevice, c.overlay},
		{kindNetwork, c.route}, {kindTAP, c.guests}, {kindNetwork, c.entries}, {kindNetwork, c.onHost}, {kindNamespace, c.forward},
	} {
		c.kind = step.kind
		if err := step.do(); err != nil {
			return c.done, err
		}
	}
	s.verified = true
	return c.done, s.sample(c.links)
}

// convergence is one run of converge.
type convergence struct {
	s     *segment
	under underlay
	links links
	kind  string // of the things that the step under way is about
	done  []deed
}

func (c *convergence) did(format string, args ...any) {
	c.done = append(c.done, deed{c.kind, fmt.Sprintf(format, args...)})
}

// enter opens the namespace, names it again where somebody has taken its name away, or makes it.
func (c *convergence) enter() error {
	s := c.s
	ns, err := netns.Find(s.path())
	if err != nil {
		return err
	}
	switch {
	case ns != nil && s.space != nil && sameFile(ns, s.space.ns):
		ns.Close()
	case ns != nil:
		// Another process has put one of its own under our name; or an earlier one of ours, before we looked.
		if s.space != nil {
			c.did("namespace %s is another one than before", s.namespace)
		}
		s.leave()
		if s.space, err = openSpace(ns); err != nil {
			return err
		}
	case s.space != nil:
		if err := s.n.step("namespace name"); err != nil {
			return err
		}
		if err := netns.Name(s.space.ns, s.path()); err != nil {
			return err
		}
		c.did("name of namespace %s was given again", s.namespace)
	default:
		if err := s.n.step("namespace"); err != nil {
			return err
		}
		ns, err := netns.Make(s.path())
		if err != nil {
			return err
		}
		if s.space, err = openSpace(ns); err != nil {
			return errors.Join(err, netns.Unname(s.path()))
		}
		s.fresh = true
		c.did("namespace %s was made", s.namespace)
	}
	c.links, err = s.space.links()
	return err
}

// quiet sets what the namespace must not do, before there are devices in it.
func (c *convergence) quiet() error {
	if err := c.s.n.step("namespace settings"); err != nil {
		return err
	}
	changed, err := c.s.space.sysctls([]sysctl{
		{"ipv6/conf/all/disable_ipv6", "1", true},
		{"ipv6/conf/default/disable_ipv6", "1", true},
		// A bridge's frames are none of iptables' business: the host's FORWARD policy would drop them.
		{"bridge/bridge-nf-call-iptables", "0", true},
		{"bridge/bridge-nf-call-ip6tables", "0", true},
		{"bridge/bridge-nf-call-arptables", "0", true},
		{"ipv4/conf/all/rp_filter", "1", false},
		{"ipv4/conf/default/rp_filter", "1", false},
		// Guests are told the gateway's address alone, not the way to the host.
		{"ipv4/conf/all/arp_ignore", "1", false},
		{"ipv4/conf/all/proxy_arp", "0", false},
		{"ipv4/conf/default/proxy_arp", "0", false},
		{"ipv4/conf/all/accept_redirects", "0", false},
		{"ipv4/conf/all/accept_source_route", "0", false},
		{"ipv4/conf/all/send_redirects", "0", false},
		{"ipv4/conf/default/send_redirects", "0", false},
		{"ipv4/conf/all/route_localnet", "0", false},
		{"ipv4/conf/default/route_localnet", "0", false},
	})
	for _, name := range changed {
		c.did("net/%s was set", name)
	}
	return err
}

// forward lets packets through, last of all: everything that says which is there.
func (c *convergence) forward() error {
	if err := c.s.n.step("namespace forwarding"); err != nil {
		return err
	}
	changed, err := c.s.space.sysctls([]sysctl{{"ipv4/ip_forward", "1", false}})
	for _, name := range changed {
		c.did("net/%s was set", name)
	}
	return err
}

// rules writes the firewall.
func (c *convergence) rules() error {
	s := c.s
	if err := s.n.step("rules"); err != nil {
		return err
	}
	guests := make([]firewall.Guest, 0, len(s.guests))
	for _, g := range s.guests {
		guests = append(guests, g.rule())
	}
	wrote, err := firewall.EnsureNetwork(s.space.fd(), s.rules(c.under), guests)
	if wrote {
		c.did("rules were written")
	}
	return wrap("writing rules", err)
}

func (s *segment) rules(under underlay) firewall.Network {
	names := s.n.names
	hostEnd, ownEnd := transit(s.record.Transit)
	n := firewall.Network{
		Bridge: names.bridge(s.id), Uplink: names.uplink(s.id), Subnet: s.plan.subnet, Gateway: s.plan.gateway, GatewayMAC: s.plan.mac,
		Transit: ownEnd, HostTransit: hostEnd, NAT: s.plan.nat, Port: uint16(s.n.o.Port), Denied: s.plan.denied,
	}
	if under.vtep.IsValid() {
		n.Overlay = names.overlay(s.id)
	}
	return n
}

// groupsForwarded makes the bridge treat frames to group addresses like others, so that the rules see, drop and count them. The
// kernel keeps the first three bits for itself (BR_GROUPFWD_RESTRICTED).
const groupsForwarded uint16 = 0xfff8

// bridge makes the bridge with the gateway's MAC and address.
func (c *convergence) bridge() error {
	s := c.s
	if err := s.n.step("bridge"); err != nil {
		return err
	}
	want := attrs(s.n.names.bridge(s.id), s.plan.mtu)
	want.HardwareAddr, want.Alias = s.plan.mac, s.n.names.alias("bridge of network "+s.id)
	off, groups := false, groupsForwarded
	l, made, err := c.device(want, func(a netlink.LinkAttrs) error {
		return s.space.nl.LinkAdd(&netlink.Bridge{LinkAttrs: a, MulticastSnooping: &off, GroupFwdMask: &groups})
	}, func(l netlink.Link) bool {
		b, ok := l.(*netlink.Bridge)
		return ok && b.MulticastSnooping != nil && !*b.MulticastSnooping && (b.VlanFiltering == nil || !*b.VlanFiltering) &&
			b.GroupFwdMask != nil && *b.GroupFwdMask == groups
	})
	if err != nil {
		return err
	}
	s.indices.bridge = l.Attrs().Index
	changed, err := s.space.address(l, netip.PrefixFrom(s.plan.gateway, s.plan.subnet.Bits()))
	if changed && !made {
		c.did("address of bridge was set to %s", s.plan.gateway)
	}
	return err
}

// device makes a device of the namespace be there and be settled. One of another kind in its place is removed.
func (c *convergence) device(want netlink.LinkAttrs, add func(netlink.LinkAttrs) error, right func(netlink.Link) bool) (l netlink.Link, made bool, err error) {
	space := c.s.space
	if l = c.links[want.Name]; l != nil && !right(l) {
		if err := space.unlink(want.Name); err != nil {
			return nil, false, err
		}
		c.did("%s was not what it has to be and was removed", want.Name)
		l = nil
	}
	if l == nil {
		if err := add(want); err != nil {
			return nil, false, fmt.Errorf("making %s: %w", want.Name, err)
		}
		made = true
		if l, err = space.nl.LinkByName(want.Name); err != nil {
			return nil, made, fmt.Errorf("looking at %s: %w", want.Name, err)
		}
		c.links[want.Name] = l
		c.did("%s was made", want.Name)
	}
	changed, err := space.settle(l, want)
	if changed && !made {
		c.did("settings of %s were mended", want.Name)
	}
	return l, made, err
}
