package linux

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/network"
)

// Attach implements network.Network. A VM that runs already is not disturbed, whatever happened to the runtime: its TAP is open
// elsewhere, which is an error.
func (n *Network) Attach(_ context.Context, vmID string, interfaces []network.Interface) ([]network.Attachment, error) {
	m := n.machine(vmID)
	defer n.release(vmID, m)
	out, err := n.attach(m, vmID, interfaces)
	return out, fault.New(fault.NetworkSetupFailed, "attaching network", err)
}

func (n *Network) attach(m *machine, vmID string, interfaces []network.Interface) (out []network.Attachment, err error) {
	if !fileName(vmID) {
		return nil, fmt.Errorf("%q is not a VM's ID", vmID)
	}
	segments, err := n.segmentsOf(interfaces)
	if err != nil {
		return nil, err
	}
	kept := slices.DeleteFunc(slices.Clone(m.record.Interfaces), func(old network.Interface) bool { return !slices.ContainsFunc(interfaces, sameAs(old)) })
	for _, old := range m.record.Interfaces {
		if slices.ContainsFunc(kept, sameAs(old)) {
			continue
		}
		if err := n.detachInterface(vmID, old); err != nil {
			return nil, err
		}
	}
	// Intent before act: what is made from here on is found by the state, whatever happens to this process.
	if err := n.write(vmID, m, interfaces); err != nil {
		return nil, err
	}
	defer func() {
		if err == nil {
			return
		}
		for _, a := range out {
			a.TAP.Close()
			if !slices.ContainsFunc(kept, sameAs(a.Interface)) {
				err = errors.Join(err, wrap("undoing it", n.detachInterface(vmID, a.Interface)))
			}
		}
		out = nil
		err = errors.Join(err, wrap("undoing it", n.write(vmID, m, kept)))
	}()
	for at, i := range interfaces {
		tap, err := segments[at].attach(vmID, i)
		if err != nil {
			return out, fmt.Errorf("interface %s: %w", i.Name, err)
		}
		out = append(out, network.Attachment{Interface: i, TAP: tap})
	}
	return out, nil
}

// sameAs compares what the kernel is told of an interface.
func sameAs(one network.Interface) func(network.Interface) bool {
	return func(other network.Interface) bool {
		return one.Name == other.Name && one.Network == other.Network && one.MAC == other.MAC && slices.Equal(one.Addresses, other.Addresses)
	}
}

// segmentsOf gives each interface's network, and refuses two interfaces of one name.
func (n *Network) segmentsOf(interfaces []network.Interface) ([]*segment, error) {
	var out []*segment
	seen := map[string]bool{}
	for _, i := range interfaces {
		if seen[i.Name] {
			return nil, fmt.Errorf("interface %s: there are two of this name", i.Name)
		}
		seen[i.Name] = true
		if i.Network == "" {
			return nil, fmt.Errorf("interface %s: %w", i.Name, errNoNetwork)
		}
		s := n.segment(i.Network)
		if s == nil {
			return nil, fmt.Errorf("interface %s: network %s is not known here", i.Name, i.Network)
		}
		out = append(out, s)
	}
	return out, nil
}

// write keeps what a VM has here; nothing is kept of one that has nothing.
func (n *Network) write(vmID string, m *machine, interfaces []network.Interface) error {
	if len(interfaces) == 0 {
		if !m.known {
			return nil
		}
		if err := n.step("vm state removed"); err != nil {
			return err
		}
		if err := n.store.remove(vmsDir, vmID); err != nil {
			return err
		}
		n.note(m, false, vmRecord{})
		return nil
	}
	if err := n.step("vm state"); err != nil {
		return err
	}
	record := vmRecord{Interfaces: interfaces}
	if err := n.store.save(vmsDir, vmID, record); err != nil {
		return err
	}
	n.note(m, true, record)
	return nil
}

func (n *Network) note(m *machine, known bool, record vmRecord) {
	n.mu.Lock()
	defer n.mu.Unlock()
	m.known, m.record = known, record
}

// attach plugs a guest in; a network that is not on the host yet is made. A failure leaves what was there before.
func (s *segment) attach(vmID string, i network.Interface) (*os.File, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.forgot || !s.known {
		return nil, fmt.Errorf("network %s is not known here", s.id)
	}
	g, err := s.guest(vmID, i)
	if err != nil {
		return nil, s.in(err)
	}
	before := s.guests[g.key]
	if before == nil && len(s.guests) >= network.MaxGuests {
		return nil, fmt.Errorf("%s is full on this node: it has %d guests here, the most that one bridge carries (1024 ports, some of them its own)", s, len(s.guests))
	}
	if err := s.clash(g); err != nil {
		return nil, s.in(err)
	}
	if before != nil {
		g.tally = before.tally.folded()
	}
	s.add(g)
	f, err := s.connect(g)
	if err == nil {
		return f, nil
	}
	if before != nil {
		s.add(before)
		return nil, s.in(err)
	}
	s.remove(g)
	return nil, s.in(errors.Join(err, wrap("undoing it", s.withdraw(g))))
}

// connect plugs a guest into a network that is as it ought to be. One of which that was only believed is looked at when it fails.
func (s *segment) connect(g *guest) (*os.File, error) {
	looked := s.space == nil || !s.verified
	if looked {
		if _, err := s.converge(); err != nil {
			return nil, err
		}
	}
	f, err := s.plug(g)
	if err == nil || looked || errors.Is(err, unix.EBUSY) {
		return f, err
	}
	if _, mending := s.converge(); mending != nil {
		return nil, errors.Join(err, wrap("mending the network", mending))
	}
	return s.plug(g)
}
