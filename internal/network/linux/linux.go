// Package linux is networks by the kernel's own means: for each network a network namespace with a bridge, TAPs, a VXLAN device and
// rules of its own, and a veth from there to the host. docs/adr/0007-networks.md says why.
//
//	state (files) ──► what must be there ──┐
//	                                       ├─ difference ──► mended, and told in the log and in Status
//	kernel, per namespace and on the host ─┘
//
// One function, segment.converge, makes a network from nothing, changes it and repairs it; Attach and Detach of further guests touch
// only what is theirs, and cost the same however many guests there are. Figures: docs/figures.md, by TestAttachingStaysFlat.
package linux

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/network"
)

// Options of networks on one host.
type Options struct {
	// StateDir is a folder of ours alone, on a disk that survives a reboot of the host. It is made if missing.
	StateDir string
	// Instance is the runtime's id, eight hexadecimal digits: the mark on everything that is made.
	Instance string
	// HostNamespace is the path of the network namespace that is the host's, "" for the one of this process.
	HostNamespace string
	// NamespaceDir holds the names of namespaces; "" is /run/netns, where ip-netns(8) looks.
	NamespaceDir string
	// VTEP is the node's address in the overlay. Zero: the source address of the default route; without one there is no overlay,
	// and networks work on this node alone.
	VTEP netip.Addr
	// Port of the overlay, 0 for network.DefaultPort. Two instances in one host namespace need two.
	Port int
	// NodeRoutes are the ranges in which the host may be given routes to guests' subnets.
	NodeRoutes []netip.Prefix
	// Clock and Log are required.
	Clock clock.WithTicker
	Log   *slog.Logger
	// Failpoint is asked before each step that changes the kernel or the state, and an error of it fails the step. For tests; nil is
	// none.
	Failpoint func(step string) error
}

// sweepPeriod is how often the kernel is held against the state.
const sweepPeriod = 10 * time.Second

// Network makes networks on one host.
type Network struct {
	o     Options
	names names
	store *store
	host  *host

	// mu is over the maps, not over what they hold: that has locks of its own. It is never held while another lock is waited for.
	mu       sync.Mutex
	segments map[string]*segment
	vms      map[string]*machine

	audited findings
}

var _ network.Network = (*Network)(nil)

// machine is one VM that has, or may have, something here.
type machine struct {
	mu     sync.Mutex // one Attach or Detach at a time
	record vmRecord
	known  bool // it is on disk
}

// New takes up what StateDir and the kernel hold; it changes nothing in the kernel. The caller runs Run, and Close in the end.
func New(o Options) (*Network, error) {
	if o.NamespaceDir == "" {
		o.NamespaceDir = "/run/netns"
	}
	if o.Port == 0 {
		o.Port = network.DefaultPort
	}
	if len(o.Instance) != 8 || strings.Trim(o.Instance, "0123456789abcdef") != "" {
		return nil, fmt.Errorf("opening networks: instance %q is not eight hexadecimal digits", o.Instance)
	}
	n := &Network{o: o, names: names{instance: o.Instance}, segments: map[string]*segment{}, vms: map[string]*machine{}}
	var err error
	if n.store, err = openStore(o.StateDir, o.Log); err != nil {
		return nil, fmt.Errorf("opening networks: %w", err)
	}
	if n.host, err = openHost(n); err != nil {
		return nil, fmt.Errorf("opening networks: %w", err)
	}
	if err := n.adopt(); err != nil {
		n.Close()
		return nil, fmt.Errorf("opening networks: %w", err)
	}
	return n, nil
}

// adopt reads the state, and opens the namespaces that are there.
func (n *Network) adopt() error {
	networks, vms, err := n.store.load()
	if err != nil {
		return err
	}
	for id, record := range networks {
		s, err := newSegment(n, record)
		if err != nil {
			n.o.Log.Error("network on disk cannot be understood and waits to be set again", "network", id, "error", err)
			continue
		}
		n.segments[id] = s
	}
	for id, record := range vms {
		n.vms[id] = &machine{record: record, known: true}
	}
	for _, s := range n.segments {
		n.populate(s)
	}
	for id, tallies := range n.store.loadTallies() {
		for name, t := range tallies {
			for _, s := range n.segments {
				if g := s.guests[key{id, name}]; g != nil {
					g.tally = t
				}
			}
		}
	}
	for _, s := range n.segments {
		if err := s.adopt(); err != nil {
			return err
		}
	}
	n.host.adopt(n.segments)
	return nil
}

// populate gives a network the guests that the records of VMs say it has.
func (n *Network) populate(s *segment) {
	for id, m := range n.vms {
		for _, i := range m.record.Interfaces {
			if i.Network != s.id {
				continue
			}
			g, err := s.guest(id, i)
			if err != nil {
				n.o.Log.Error("interface of an attached VM cannot be understood", "vm", id, "interface", i.Name, "error", err)
				continue
			}
			s.add(g)
		}
	}
}

// Close lets go of descriptors. Networks and guests stay as they are.
func (n *Network) Close() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, s := range n.segments {
		s.close()
	}
	n.host.close()
}

// step is where a test may make something fail.
func (n *Network) step(name string) error {
	if n.o.Failpoint == nil {
		return nil
	}
	return n.o.Failpoint(name)
}

// Host implements network.Network.
func (n *Network) Host(context.Context) (network.Host, error) {
	h, err := n.host.look()
	return h, fault.New(fault.NetworkSetupFailed, "looking at the host's network", err)
}

// Set implements network.Network.
func (n *Network) Set(ctx context.Context, spec network.Spec) error {
	return fault.New(fault.NetworkSetupFailed, "setting network", n.set(ctx, spec))
}

func (n *Network) set(ctx context.Context, spec network.Spec) error {
	plan, err := parse(spec)
	if err != nil {
		return fault.Permanent(fault.Errorf(fault.NetworkSetupFailed, "setting network", "network %s/%s: %w", spec.Namespace, spec.Name, err))
	}
	for {
		s, err := n.segmentFor(spec)
		if err != nil {
			return err
		}
		if done, err := s.set(ctx, spec, plan); done {
			return err
		}
	}
}

// segmentFor gives the network of that spec, one that nothing is written of yet if it is new.
func (n *Network) segmentFor(spec network.Spec) (*segment, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if s := n.segments[spec.ID]; s != nil {
		return s, nil
	}
	taken := func(name string) bool {
		for _, s := range n.segments {
			if s.namespace == name {
				return true
			}
		}
		return false
	}
	s, err := newSegment(n, networkRecord{Spec: spec, Namespace: n.names.namespace(spec.ID, taken), Transit: -1})
	if err != nil {
		return nil, err
	}
	s.known = false
	n.populate(s) // its record may have been lost, and its guests' not
	n.segments[spec.ID] = s
	return s, nil
}

// Forget implements network.Network.
func (n *Network) Forget(_ context.Context, id string) error {
	n.mu.Lock()
	s := n.segments[id]
	n.mu.Unlock()
	if s == nil {
		return nil
	}
	return fault.New(fault.NetworkSetupFailed, "forgetting network", s.forget())
}

// drop takes a forgotten network out of the map.
func (n *Network) drop(s *segment) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.segments[s.id] == s {
		delete(n.segments, s.id)
	}
}

// all gives the networks in order of their IDs.
func (n *Network) all() []*segment {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := make([]*segment, 0, len(n.segments))
	for _, s := range n.segments {
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b *segment) int { return strings.Compare(a.id, b.id) })
	return out
}

func (n *Network) segment(id string) *segment {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.segments[id]
}

// Networks implements network.Network.
func (n *Network) Networks(context.Context) ([]network.Status, error) {
	var out []network.Status
	for _, s := range n.all() {
		if status, known := s.status(); known {
			out = append(out, status)
		}
	}
	return out, nil
}

// Attached implements network.Network.
func (n *Network) Attached(context.Context) ([]string, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	var ids []string
	for id, m := range n.vms {
		if m.known {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids, nil
}

// machine gives the VM of that ID, locked.
func (n *Network) machine(id string) *machine {
	for {
		n.mu.Lock()
		m := n.vms[id]
		if m == nil {
			m = &machine{}
			n.vms[id] = m
		}
		n.mu.Unlock()
		m.mu.Lock()
		n.mu.Lock()
		still := n.vms[id] == m
		n.mu.Unlock()
		if still {
			return m
		}
		m.mu.Unlock()
	}
}

// release unlocks a VM, and forgets one that has nothing here.
func (n *Network) release(id string, m *machine) {
	n.mu.Lock()
	if !m.known && n.vms[id] == m {
		delete(n.vms, id)
	}
	n.mu.Unlock()
	m.mu.Unlock()
}
