package linux

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/netns"
	"imp.dev/imp/internal/network"
	"imp.dev/imp/internal/network/linux/firewall"
)

// Detach implements network.Network. The record goes last: until then the VM is one that has something here.
func (n *Network) Detach(_ context.Context, vmID string) error {
	m := n.machine(vmID)
	defer n.release(vmID, m)
	if !m.known {
		return nil
	}
	for _, i := range m.record.Interfaces {
		if err := n.detachInterface(vmID, i); err != nil {
			return fault.New(fault.NetworkSetupFailed, "detaching network", err)
		}
	}
	return fault.New(fault.NetworkSetupFailed, "detaching network", n.write(vmID, m, nil))
}

func (n *Network) detachInterface(vmID string, i network.Interface) error {
	s := n.segment(i.Network)
	if s == nil {
		return nil // nobody has made anything for it, or the sweep removes it as nobody's
	}
	return wrap("interface "+i.Name, s.detach(key{vmID, i.Name}))
}

// detach removes everything of a guest. One that is not known is success.
func (s *segment) detach(k key) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.guests[k]
	if g == nil {
		return nil
	}
	s.remove(g)
	if err := s.withdraw(g); err != nil {
		s.add(g) // it has something here still
		return s.in(err)
	}
	return nil
}

// withdraw removes what is in the kernel for a guest that is not in s.guests any more; with the last one goes the network.
func (s *segment) withdraw(g *guest) error {
	if len(s.guests) == 0 {
		return s.dismantle()
	}
	if s.space == nil {
		return nil
	}
	if err := s.n.step("tap removed"); err != nil {
		return err
	}
	// Who is elsewhere with its address, and was not believed while it was here, is so from now on.
	_, elsewhere := s.plan.elsewhere[g.at.address]
	elsewhere = elsewhere && s.verified && s.indices.overlay != 0
	err := errors.Join(
		s.space.unlink(g.tap),
		wrap("removing rules of TAP "+g.tap, firewall.RemoveGuest(s.space.fd(), g.rule())),
	)
	if !elsewhere {
		err = errors.Join(err, s.forgetAddress(g.at.address))
	}
	err = errors.Join(err, s.space.forgetFlows(g.at.address))
	if err == nil && s.verified && (elsewhere || s.plan.elsewhereMAC[g.at.mac]) {
		return s.follow()
	}
	return err
}

// forgetFlows removes what connection tracking remembers of an address: whoever has it next inherits no open door.
func (s *space) forgetFlows(a netip.Addr) error {
	_, err := s.nl.ConntrackDeleteFilters(netlink.ConntrackTable, unix.AF_INET, flowsOf(a))
	if err == nil || errors.Is(err, netlink.ErrDumpInterrupted) {
		_, err = s.nl.ConntrackDeleteFilters(netlink.ConntrackTable, unix.AF_INET, flowsOf(a))
	}
	return wrap("forgetting connections of "+a.String(), err)
}

// flowsOf matches the connections that an address is an end of.
type flowsOf netip.Addr

// MatchConntrackFlow implements netlink.CustomConntrackFilter.
func (f flowsOf) MatchConntrackFlow(flow *netlink.ConntrackFlow) bool {
	for _, ip := range [][]byte{flow.Forward.SrcIP, flow.Forward.DstIP, flow.Reverse.SrcIP, flow.Reverse.DstIP} {
		if a, ok := netip.AddrFromSlice(ip); ok && a.Unmap() == netip.Addr(f) {
			return true
		}
	}
	return false
}

// dismantle takes the network off the host: devices first, because a namespace that somebody holds would keep them beyond its
// name. Nothing there is success.
func (s *segment) dismantle() error {
	if s.space == nil {
		if err := s.adopt(); err != nil {
			return err
		}
	}
	names := s.n.names
	if err := s.n.step("uplink removed"); err != nil {
		return err
	}
	if err := s.n.host.space.unlink(names.hostEnd(s.id)); err != nil {
		return fmt.Errorf("on the host: %w", err)
	}
	if s.space != nil {
		if err := s.n.step("devices removed"); err != nil {
			return err
		}
		links, err := s.space.links()
		if err != nil {
			return err
		}
		for name := range links {
			if !s.ours(name, links[name]) {
				continue
			}
			if err := s.space.unlink(name); err != nil {
				return err
			}
		}
	}
	if err := s.n.step("namespace removed"); err != nil {
		return err
	}
	s.leave()
	if err := netns.Unname(s.path()); err != nil {
		return err
	}
	return s.n.host.drop(s.id)
}

// ours says that a device of the namespace was made here: the kernel puts some into every namespace.
func (s *segment) ours(name string, l netlink.Link) bool {
	return l.Type() == "tuntap" || len(name) == 15 && name[:5] == s.n.names.prefix()
}

// sameFile says that two open files are one: here, one namespace.
func sameFile(a, b *os.File) bool {
	one, err := a.Stat()
	if err != nil {
		return false
	}
	other, err := b.Stat()
	return err == nil && os.SameFile(one, other)
}
