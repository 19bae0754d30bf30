package linux

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"reflect"
	"sync"

	"imp.dev/imp/internal/netns"
	"imp.dev/imp/internal/network"
)

// segment is one network on this host.
type segment struct {
	n         *Network
	id        string
	namespace string

	// mu is held over every look at and change of the namespace. The host's lock comes after it.
	mu       sync.Mutex
	known    bool // it is on disk
	forgot   bool
	record   networkRecord
	plan     plan
	guests   map[key]*guest
	at       map[netip.Addr]*guest
	by       map[mac]*guest
	space    *space // nil: not on the host
	indices  indices
	verified bool // the kernel was held against the plan since the namespace was opened
	// remotes are the guests elsewhere that the kernel knows of, as far as we have told it.
	remotes map[netip.Addr]place
	// heard is which MAC an address had when guests here were told last. fresh says that nobody was told anything before.
	heard   map[netip.Addr]mac
	fresh   bool
	problem string
}

// indices of devices in the namespace; overlay is 0 where there is none.
type indices struct{ bridge, uplink, overlay int }

func newSegment(n *Network, record networkRecord) (*segment, error) {
	p, err := parse(record.Spec)
	if err != nil {
		return nil, err
	}
	return &segment{
		n: n, id: record.Spec.ID, namespace: record.Namespace, known: true, record: record, plan: p,
		guests: map[key]*guest{}, at: map[netip.Addr]*guest{}, by: map[mac]*guest{}, remotes: map[netip.Addr]place{}, heard: map[netip.Addr]mac{},
	}, nil
}

// adopt opens the namespace that an earlier process has made.
func (s *segment) adopt() error {
	ns, err := netns.Find(s.path())
	if err != nil || ns == nil {
		return err
	}
	if s.space, err = openSpace(ns); err != nil {
		return err
	}
	names := s.n.names
	for name, index := range map[string]*int{names.bridge(s.id): &s.indices.bridge, names.uplink(s.id): &s.indices.uplink, names.overlay(s.id): &s.indices.overlay} {
		l, err := s.space.link(name)
		if err != nil {
			return err
		}
		if l != nil {
			*index = l.Attrs().Index
		}
	}
	return nil
}

func (s *segment) path() string { return filepath.Join(s.n.o.NamespaceDir, s.namespace) }

func (s *segment) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leave()
}

// leave closes the namespace.
func (s *segment) leave() {
	if s.space != nil {
		s.space.close()
	}
	s.space, s.verified, s.fresh, s.indices = nil, false, false, indices{}
	clear(s.remotes)
	clear(s.heard)
}

// String names the network to a human.
func (s *segment) String() string {
	return fmt.Sprintf("network %s/%s", s.record.Spec.Namespace, s.record.Spec.Name)
}

// in says where an error happened.
func (s *segment) in(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s, namespace %s: %w", s, s.namespace, err)
}

func (s *segment) status() (network.Status, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	problem := s.problem
	if problem == "" && s.space != nil {
		problem = s.n.host.trouble()
	}
	return network.Status{ID: s.id, Guests: len(s.guests), Problem: problem}, s.known && !s.forgot
}

// set takes a new spec. done is false when the network was forgotten meanwhile, and is to be looked up again.
func (s *segment) set(_ context.Context, spec network.Spec, p plan) (done bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.forgot {
		return false, nil
	}
	if s.known && reflect.DeepEqual(s.record.Spec, spec) {
		return true, nil
	}
	if err := s.mayBecome(p); err != nil {
		return true, s.in(err)
	}
	before, beforePlan, wasKnown := s.record, s.plan, s.known
	s.record.Spec, s.plan = spec, p
	if err = s.n.step("network state"); err == nil {
		err = s.n.store.save(networksDir, s.id, s.record)
	}
	if err == nil {
		s.known = true
		err = s.apply(beforePlan)
	}
	if err == nil {
		return true, nil
	}
	s.record, s.plan = before, beforePlan
	if wasKnown {
		err = errors.Join(err, s.n.store.save(networksDir, s.id, s.record))
		if s.space != nil {
			_, undoing := s.converge()
			err = errors.Join(err, wrap("undoing it", undoing))
		}
		return true, s.in(err)
	}
	s.known, s.forgot = false, true
	s.n.drop(s)
	return true, s.in(errors.Join(err, s.n.store.remove(networksDir, s.id)))
}

// mayBecome refuses what guests that are here could not follow.
func (s *segment) mayBecome(p plan) error {
	if len(s.guests) == 0 {
		return nil
	}
	if p.subnet != s.plan.subnet || p.gateway != s.plan.gateway {
		return fmt.Errorf("subnet and gateway cannot become %s and %s: %d guests are here with the old ones", p.subnet, p.gateway, len(s.guests))
	}
	if s.space == nil {
		return nil
	}
	under, err := s.n.host.underlay()
	if err != nil {
		return err
	}
	return fits(p, under)
}

// fits says whether the overlay's frames pass the underlay whole.
func fits(p plan, under underlay) error {
	if !under.vtep.IsValid() || under.mtu >= p.mtu+network.OverlayOverhead {
		return nil
	}
	return fmt.Errorf("its MTU of %d needs %d between nodes, and interface %s of this host has an MTU of %d", p.mtu, p.mtu+network.OverlayOverhead, under.device, under.mtu)
}

// apply brings a network that is on the host from its last plan to the present one.
func (s *segment) apply(last plan) error {
	if s.space == nil {
		return nil
	}
	same := s.plan
	same.peers = last.peers
	if !s.verified || !reflect.DeepEqual(same, last) {
		_, err := s.converge()
		return err
	}
	return s.follow()
}

// forget removes what is kept of the network.
func (s *segment) forget() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.forgot {
		return nil
	}
	for k := range s.guests {
		return fmt.Errorf("%s has VM %s attached here, and %d guests in all", s, k.vm, len(s.guests))
	}
	if err := s.dismantle(); err != nil {
		return s.in(err)
	}
	if err := s.n.step("network state removed"); err != nil {
		return s.in(err)
	}
	if err := s.n.store.remove(networksDir, s.id); err != nil {
		return s.in(err)
	}
	s.forgot = true
	s.n.drop(s)
	return nil
}
