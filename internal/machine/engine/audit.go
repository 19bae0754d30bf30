package engine

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/vmm"
)

const (
	auditPeriod = 5 * time.Minute
	// auditGrace is how long something is seen before it is removed as nobody's. It is not what makes a removal safe (see look): it
	// leaves an administrator time to see it, and spares what goes by itself.
	auditGrace = 2 * time.Minute
)

// Kinds of machine.Finding that are born here; those of drivers and networks are added to them.
const (
	kindDirectory = "directory"
	kindSocket    = "socket"
	kindDisk      = "disk"
	kindTrash     = "trash"
	kindRecord    = "record"
	kindNetwork   = "network"
	kindTAP       = "tap"
)

// AuditKinds are the kinds that Audited tells, in order.
func AuditKinds() []string {
	return []string{
		vmm.FoundProcess, vmm.FoundCgroup, vmm.FoundJail, "namespace", kindTAP, "device", "rules", kindDirectory, kindSocket, kindDisk, kindNetwork, kindRecord, kindTrash,
	}
}

// auditor is what the audit remembers, in memory: a runtime that starts sees everything for the first time.
type auditor struct {
	// mu lets one audit go on at a time; it may be held for minutes.
	mu   sync.Mutex
	seen map[thing]time.Time

	// figures guards left and removed alone.
	figures sync.Mutex
	left    map[string]int
	removed map[string]int64
}

// auditLoop compares the host with the records: at the start, now and then, and when something that was found has had its grace.
func (e *Engine) auditLoop() {
	defer e.group.Done()
	for first := true; ; first = false {
		// What is found now was made by an earlier process of the runtime, which is no more: nothing is gained by waiting.
		e.audit(e.life, first)
		e.forgetOldest(maxTombstones)
		if err := e.config.Images.Sweep(e.life); err != nil && e.life.Err() == nil {
			e.log.Warn("image cache not swept", "error", err)
		}
		timer := e.clock.NewTimer(e.untilAudit())
		select {
		case <-e.life.Done():
			timer.Stop()
			return
		case <-timer.C():
		}
	}
}

// untilAudit is the time until the next audit is due. What could not be removed is tried again with the next ordinary one.
func (e *Engine) untilAudit() time.Duration {
	e.auditor.mu.Lock()
	defer e.auditor.mu.Unlock()
	wait := auditPeriod
	for _, since := range e.auditor.seen {
		if rest := auditGrace - e.clock.Since(since); rest > 0 {
			wait = min(wait, rest)
		}
	}
	return wait
}

// Audit implements machine.Keeper.
func (e *Engine) Audit(ctx context.Context, repair bool) ([]machine.Finding, error) {
	if e.life.Err() != nil {
		return nil, errClosed()
	}
	found := e.audit(ctx, repair)
	return found, fault.New(fault.Unavailable, "auditing", ctx.Err())
}

// Audited gives how many things of each kind were not as they should be in the latest audit, and how many orphans were removed since
// the runtime began.
func (e *Engine) Audited() (left map[string]int, removed map[string]int64) {
	e.auditor.figures.Lock()
	defer e.auditor.figures.Unlock()
	return maps.Clone(e.auditor.left), maps.Clone(e.auditor.removed)
}

// audit looks, removes what is nobody's and has had its grace (at once, where now says so), and tells everything that is not as it
// should be.
func (e *Engine) audit(ctx context.Context, now bool) []machine.Finding {
	e.auditor.mu.Lock()
	defer e.auditor.mu.Unlock()
	before := e.runningNow()
	s := e.look(ctx)
	found := s.problems
	removed := map[string]int64{}
	seen := map[thing]time.Time{}
	gone := map[thing]error{} // by what removes it
	for _, t := range s.things {
		err, done := gone[t.removal()]
		if !done && !unowned(t, e.ownerOf(t.id)) {
			continue
		}
		since, known := e.auditor.seen[t]
		if !known {
			since = e.clock.Now()
			e.log.Warn("something on the host belongs to nobody", "step", "audit", "kind", t.kind, "vm", t.id, "name", t.name)
		}
		f := machine.Finding{Kind: t.kind, ID: t.id, Name: t.name, Since: since}
		if now || e.clock.Since(since) >= auditGrace {
			if !done {
				err = e.reap(ctx, t)
				gone[t.removal()] = err
			}
			switch {
			case err == nil:
				f.Repaired = true
				removed[t.kind]++
				e.log.Warn("orphan removed", "step", "audit", "kind", t.kind, "vm", t.id, "name", t.name, "since", since)
			case fault.Is(err, fault.NotFound):
				continue // it was on its way out by itself, or somebody's after all
			default:
				f.Problem = err.Error()
				e.log.Warn("orphan not removed", "step", "audit", "kind", t.kind, "vm", t.id, "name", t.name, "error", err)
			}
		}
		if !f.Repaired {
			seen[t] = since
		}
		found = append(found, f)
	}
	e.auditor.seen = seen
	found = append(found, e.auditNetwork(ctx, now, removed)...)
	found = append(found, e.auditTrash(removed)...)
	found = append(found, e.lost(before, s)...)
	slices.SortStableFunc(found, byKind)
	e.auditor.count(found, removed)
	return found
}

func byKind(a, b machine.Finding) int {
	order := AuditKinds()
	return slices.Index(order, a.Kind) - slices.Index(order, b.Kind)
}

func (a *auditor) count(found []machine.Finding, removed map[string]int64) {
	a.figures.Lock()
	defer a.figures.Unlock()
	if a.removed == nil {
		a.removed = map[string]int64{}
	}
	for kind, n := range removed {
		a.removed[kind] += n
	}
	a.left = map[string]int{}
	for _, f := range found {
		if !f.Repaired {
			a.left[f.Kind]++
		}
	}
}

// auditNetwork tells what the network found; it removes its orphans and mends what is lost itself, all the time.
func (e *Engine) auditNetwork(ctx context.Context, repair bool, removed map[string]int64) []machine.Finding {
	all, err := e.config.Network.Audit(ctx, repair)
	now := e.clock.Now()
	var out []machine.Finding
	if err != nil && ctx.Err() == nil {
		out = append(out, notLooked(kindNetwork, "networks", err, now))
	}
	for _, f := range all {
		if f.Repaired && f.Orphan {
			removed[f.Kind]++
		}
		out = append(out, machine.Finding{Kind: f.Kind, ID: f.Network, Name: f.Name, Since: now, Repaired: f.Repaired, Problem: f.Problem})
	}
	return out
}

// auditTrash empties the trash of what has had its time.
func (e *Engine) auditTrash(removed map[string]int64) []machine.Finding {
	stale, err := e.emptyTrash()
	now := e.clock.Now()
	var out []machine.Finding
	for _, path := range stale {
		removed[kindTrash]++
		e.log.Warn("orphan removed", "step", "audit", "kind", kindTrash, "name", path)
		out = append(out, machine.Finding{Kind: kindTrash, Name: path, Since: now, Repaired: true})
	}
	if err != nil {
		out = append(out, notLooked(kindTrash, e.paths.trash, err, now))
	}
	return out
}

func notLooked(kind, what string, err error, now time.Time) machine.Finding {
	return machine.Finding{Kind: kind, Name: what, Since: now, Problem: fmt.Sprintf("not audited: %v", err)}
}
