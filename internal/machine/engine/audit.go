package engine

import (
	"context"
	"os"
	"path/filepath"
	"slices"

	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/plan"
	"imp.dev/imp/internal/vmm"
)

// auditLoop reaps what has no record: at the start, and now and then, for the cases nobody thought of.
func (e *Engine) auditLoop() {
	defer e.group.Done()
	ticker := e.clock.NewTicker(auditPeriod)
	defer ticker.Stop()
	for {
		e.audit(e.life)
		e.emptyTrash()
		if err := e.config.Images.Sweep(e.life); err != nil && e.life.Err() == nil {
			e.log.Warn("image cache not swept", "error", err)
		}
		select {
		case <-e.life.Done():
			return
		case <-ticker.C():
		}
	}
}

// audit looks first and asks afterwards: a VM is on record before anything of it is made, so that what was seen and has no record
// then is nobody's.
func (e *Engine) audit(ctx context.Context) {
	runs, err := e.config.Driver.Runs(ctx)
	if err != nil && ctx.Err() == nil {
		e.log.Warn("runs not listed", "step", "audit", "error", err)
	}
	for _, id := range runs {
		e.reap(ctx, id, "run", func(ctx context.Context) error { return e.config.Driver.Destroy(ctx, e.orphan(id), vmm.Handle{}) })
	}
	attached, err := e.config.Network.Attached(ctx)
	if err != nil && ctx.Err() == nil {
		e.log.Warn("attachments not listed", "step", "audit", "error", err)
	}
	for _, id := range attached {
		e.reap(ctx, id, "network", func(ctx context.Context) error { return e.config.Network.Detach(ctx, id) })
	}
	for _, parent := range []string{e.paths.run, e.paths.state} {
		entries, err := os.ReadDir(parent)
		if err != nil {
			e.log.Warn("directories not listed", "step", "audit", "error", err)
			continue
		}
		for _, entry := range entries {
			path := filepath.Join(parent, entry.Name())
			e.reap(ctx, entry.Name(), "directory", func(context.Context) error { return e.clear(entry.Name(), path) })
		}
	}
}

// clear removes a directory that no record speaks of. Nobody ordered that: what a user may have written stays in the trash for a while.
func (e *Engine) clear(id, path string) error {
	unknown := plan.Record{Spec: machine.Spec{ID: id}}
	if err := e.discard(filepath.Join(path, filepath.Base(e.paths.private(id))), unknown, "no record speaks of its VM"); err != nil {
		return err
	}
	return os.RemoveAll(path)
}

func (e *Engine) orphan(id string) vmm.Config {
	return vmm.Config{VMID: id, Dir: e.paths.volatile(id), ConsoleLog: e.paths.console(id), Cgroup: id}
}

// reap removes something of VM id if the VM has no record. The lock is held meanwhile, so that no VM of this name can come to be.
func (e *Engine) reap(ctx context.Context, id, what string, remove func(context.Context) error) {
	ctx, cancel := context.WithTimeout(ctx, clearTime)
	defer cancel()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed || e.ownsLocked(id) {
		return
	}
	e.log.Warn("orphan reaped", "step", "audit", "vm", id, "what", what)
	if err := remove(ctx); err != nil {
		e.log.Warn("orphan not reaped", "step", "audit", "vm", id, "what", what, "error", err)
	}
}

// ownsLocked says that VM id may have things on this host.
func (e *Engine) ownsLocked(id string) bool {
	if _, ok := e.unreadable[id]; ok {
		return true
	}
	w := e.workers[id]
	if w == nil {
		return false
	}
	r := w.recordNow()
	return r.RemovedAt == nil || !slices.Contains([]plan.Kind{plan.Watch, plan.Forget}, w.stepNow())
}
