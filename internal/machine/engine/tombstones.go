package engine

import (
	"slices"
	"time"

	"imp.dev/imp/internal/machine/plan"
)

// maxTombstones are kept for late orders. Each takes a file, a goroutine and a place in every list, and a node may see many ephemeral VMs
// in the day that a tombstone is kept otherwise: then the oldest are forgotten earlier.
const maxTombstones = 10_000

// forgetOldest lets the oldest tombstones beyond max go. What is forgotten early is refused no more if its order comes again; an
// agent that is connected has had its answer long ago.
func (e *Engine) forgetOldest(max int) {
	type tombstone struct {
		w  *worker
		at time.Time
	}
	var all []tombstone
	for _, w := range e.allWorkers() {
		if r := w.recordNow(); r.RemovedAt != nil && r.Successor == nil {
			all = append(all, tombstone{w, *r.RemovedAt})
		}
	}
	if len(all) <= max {
		return
	}
	slices.SortFunc(all, func(a, b tombstone) int { return a.at.Compare(b.at) })
	e.log.Warn("more VMs were removed than are remembered, the oldest are forgotten early", "step", "audit", "removed", len(all), "kept", max)
	for _, t := range all[:len(all)-max] {
		past := e.clock.Now().Add(-e.config.Limits.Tombstone)
		t.w.keep(func(next *plan.Record) {
			if next.RemovedAt != nil && next.Successor == nil {
				next.RemovedAt = &past
			}
		})
		t.w.wake()
	}
}
