package linux

import (
	"cmp"
	"context"
	"slices"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/network"
	"imp.dev/imp/internal/network/linux/firewall"
)

// tally is what one interface has carried. A TAP counts from zero in each of its lives; the lives before are in Past.
type tally struct {
	Received count  `json:"received"`
	Sent     count  `json:"sent"`
	Dropped  uint64 `json:"dropped,omitempty"`
}

type count struct {
	Past uint64 `json:"past,omitempty"`
	Last uint64 `json:"last,omitempty"`
}

// seen takes a reading; one below the last is of another life.
func (c *count) seen(now uint64) {
	if now < c.Last {
		c.Past += c.Last
	}
	c.Last = now
}

func (c count) total() uint64 { return c.Past + c.Last }

// folded gives the tally with which a new TAP begins.
func (t tally) folded() tally {
	t.Received, t.Sent = count{Past: t.Received.total()}, count{Past: t.Sent.total()}
	return t
}

// sample reads the counters of every guest here. all are the devices of the namespace, nil if they were not read. s.mu is held.
func (s *segment) sample(all links) error {
	if s.space == nil || len(s.guests) == 0 {
		return nil
	}
	if all == nil {
		var err error
		if all, err = s.space.links(); err != nil {
			return err
		}
	}
	dropped, err := firewall.Dropped(s.space.fd())
	if err != nil {
		return err
	}
	for _, g := range s.guests {
		if l := all[g.tap]; l != nil && l.Attrs().Statistics != nil {
			// What the kernel sends into a TAP its guest receives.
			g.tally.Received.seen(l.Attrs().Statistics.TxBytes)
			g.tally.Sent.seen(l.Attrs().Statistics.RxBytes)
		}
		g.tally.Dropped = max(g.tally.Dropped, dropped[g.tap])
	}
	return nil
}

// Counters implements network.Network.
func (n *Network) Counters(context.Context) ([]network.Counters, error) {
	var out []network.Counters
	for _, s := range n.all() {
		counters, err := s.counters()
		if err != nil {
			return nil, fault.New(fault.NetworkSetupFailed, "counting traffic", err)
		}
		out = append(out, counters...)
	}
	slices.SortFunc(out, func(a, b network.Counters) int {
		return cmp.Or(cmp.Compare(a.VM, b.VM), cmp.Compare(a.Interface, b.Interface))
	})
	return out, nil
}

func (s *segment) counters() ([]network.Counters, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.sample(nil); err != nil {
		return nil, s.in(err)
	}
	var out []network.Counters
	for _, g := range s.guests {
		out = append(out, network.Counters{VM: g.key.vm, Interface: g.key.name, Network: s.id,
			ReceivedBytes: g.tally.Received.total(), SentBytes: g.tally.Sent.total(), Dropped: g.tally.Dropped})
	}
	return out, nil
}

// keepTallies writes down what was read last.
func (n *Network) keepTallies() error {
	all := map[string]map[string]tally{}
	for _, s := range n.all() {
		s.mu.Lock()
		for k, g := range s.guests {
			if all[k.vm] == nil {
				all[k.vm] = map[string]tally{}
			}
			all[k.vm][k.name] = g.tally
		}
		s.mu.Unlock()
	}
	return n.store.saveTallies(all)
}
