package linux

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"

	"imp.dev/imp/internal/netns"
	"imp.dev/imp/internal/network"
)

// Run holds the kernel against the state until ctx ends: at once, and every ten seconds.
func (n *Network) Run(ctx context.Context) {
	ticker := n.o.Clock.NewTicker(sweepPeriod)
	defer ticker.Stop()
	for {
		n.Sweep(ctx)
		select {
		case <-ctx.Done():
			return
		case <-ticker.C():
		}
	}
}

// Sweep repairs what differs, on the host and in every network, and removes what is nobody's. Each repair is a line in the log;
// what cannot be repaired is the network's Status.Problem.
func (n *Network) Sweep(ctx context.Context) {
	n.audited.begin()
	if err := n.removeOrphans(); err != nil {
		n.o.Log.Error("leftovers of networks were not removed", "error", err)
	}
	for _, s := range n.all() {
		if ctx.Err() != nil {
			return
		}
		s.sweep()
	}
	n.host.sweep()
	if err := n.keepTallies(); err != nil {
		n.o.Log.Warn("counters of guests were not kept", "error", err)
	}
}

func (s *segment) sweep() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.forgot {
		return
	}
	var done []deed
	var err error
	if len(s.guests) == 0 {
		err = s.dismantle()
	} else {
		done, err = s.converge()
	}
	for _, d := range done {
		s.n.o.Log.Warn("network was repaired", "network", s.id, "namespace", s.namespace, "what", d.what)
		s.n.audited.add(network.Finding{Kind: d.kind, Network: s.id, Name: s.String() + ": " + d.what, Repaired: true})
	}
	problem := ""
	if err != nil {
		problem = s.in(err).Error()
	} else if len(s.guests) > 0 {
		problem = s.n.host.egressMissing(s.plan.egress)
	}
	if problem != s.problem && problem != "" {
		s.n.o.Log.Error("network is not as it should be", "network", s.id, "namespace", s.namespace, "error", problem)
	}
	s.problem = problem
	if problem != "" {
		s.n.audited.add(network.Finding{Kind: kindNetwork, Network: s.id, Name: s.String(), Problem: problem})
	}
}

// egressMissing says that the interface which guests' traffic has to leave by is not there.
func (h *host) egressMissing(name string) string {
	if name == "" {
		return ""
	}
	if l, err := h.space.link(name); err == nil && l == nil {
		return fmt.Sprintf("egress interface %s is not there on this host: nothing leaves the network", name)
	}
	return ""
}

func (h *host) sweep() {
	h.mu.Lock()
	defer h.mu.Unlock()
	done, err := h.ensure()
	for _, what := range done {
		h.n.o.Log.Warn("host's network was repaired", "what", what)
		h.n.audited.add(network.Finding{Kind: kindRules, Name: what, Repaired: true})
	}
	problem := ""
	if err != nil {
		problem = err.Error()
	}
	if problem != h.problem && problem != "" {
		h.n.o.Log.Error("host's network is not as it should be", "error", problem)
	}
	h.problem = problem
	if problem != "" {
		h.n.audited.add(network.Finding{Kind: kindNetwork, Name: "the host's network", Problem: problem})
	}
}

// removeOrphans removes namespaces and devices that bear our mark and belong to no network. What is there is listed before what
// should be, so that nothing is an orphan that was just born.
func (n *Network) removeOrphans() error {
	entries, err := os.ReadDir(n.o.NamespaceDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("listing namespaces: %w", err)
	}
	devices, err := list(n.host.space.nl.LinkList)
	if err != nil {
		return fmt.Errorf("listing the host's devices: %w", err)
	}
	namespaces, ends := map[string]bool{}, map[string]bool{}
	for _, s := range n.all() {
		namespaces[s.namespace], ends[n.names.hostEnd(s.id)] = true, true
	}
	var errs []error
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), n.names.namespacePrefix()) || namespaces[e.Name()] {
			continue
		}
		err := netns.Unname(filepath.Join(n.o.NamespaceDir, e.Name()))
		n.audited.orphan(kindNamespace, filepath.Join(n.o.NamespaceDir, e.Name()), err)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		n.o.Log.Warn("namespace of no network was removed", "namespace", e.Name())
	}
	for _, l := range devices {
		if ends[l.Attrs().Name] || !n.orphaned(l) {
			continue
		}
		err := n.host.space.unlink(l.Attrs().Name)
		kind := kindDevice
		if l.Type() == "tuntap" {
			kind = kindTAP
		}
		n.audited.orphan(kind, l.Attrs().Name, err)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		n.o.Log.Warn("device of no network was removed", "device", l.Attrs().Name)
	}
	return errors.Join(errs...)
}

// orphaned says that a device of the host is marked as ours. The name is not enough: it holds half of the instance.
func (n *Network) orphaned(l netlink.Link) bool {
	return strings.HasPrefix(l.Attrs().Name, n.names.prefix()) && len(l.Attrs().Name) == 15 && strings.HasPrefix(l.Attrs().Alias, n.names.alias(""))
}
