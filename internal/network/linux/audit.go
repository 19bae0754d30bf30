package linux

import (
	"context"
	"slices"
	"sync"

	"imp.dev/imp/internal/network"
)

// Kinds of findings.
const (
	kindNamespace = "namespace"
	kindTAP       = "tap"
	kindDevice    = "device"
	kindRules     = "rules"
	kindNetwork   = "network"
)

// deed is what was done to something of that kind, in one sentence about how it was before.
type deed struct{ kind, what string }

// maxRepairs that nobody asked for are kept; older ones are in the log.
const maxRepairs = 1000

// findings are what sweeps found, until somebody asks.
type findings struct {
	mu sync.Mutex
	// repaired since they were asked for; wrong as of the latest sweep.
	repaired, wrong []network.Finding
}

// begin is called by each sweep: what was wrong is found again, or is not.
func (f *findings) begin() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.wrong = nil
}

func (f *findings) add(one network.Finding) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !one.Repaired {
		f.wrong = append(f.wrong, one)
		return
	}
	f.repaired = append(f.repaired, one)
	f.repaired = f.repaired[max(0, len(f.repaired)-maxRepairs):]
}

// orphan notes what belonged to nothing, and whether it could be removed.
func (f *findings) orphan(kind, name string, err error) {
	one := network.Finding{Kind: kind, Name: name, Orphan: true, Repaired: err == nil}
	if err != nil {
		one.Problem = err.Error()
	}
	f.add(one)
}

func (f *findings) take() []network.Finding {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := slices.Concat(f.wrong, f.repaired)
	f.repaired = nil
	return out
}

// Audit implements network.Network.
func (n *Network) Audit(ctx context.Context, repair bool) ([]network.Finding, error) {
	if repair {
		n.Sweep(ctx)
	}
	return n.audited.take(), ctx.Err()
}
