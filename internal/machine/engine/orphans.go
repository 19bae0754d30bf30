package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/plan"
	"imp.dev/imp/internal/vmm"
)

// thing is something on the host that a VM may own. id is the VM's; name what an administrator finds.
type thing struct{ kind, id, name string }

// removal gives what is the same for all things that go together: processes, cgroup and jail of a VM.
func (t thing) removal() thing {
	if t.kind == vmm.FoundProcess || t.kind == vmm.FoundJail {
		return thing{kind: vmm.FoundCgroup, id: t.id}
	}
	if t.kind == vmm.FoundCgroup {
		t.name = ""
	}
	return t
}

// owner is what is known of a VM at one moment.
type owner struct {
	known, unreadable bool
	record            plan.Record
	// resting says that its worker does nothing until something happens.
	resting  bool
	attached bool // it has TAPs open
	running  bool // its VMM lives and nobody is about to end it
	runDir   string
}

// unowned decides whether a thing is nobody's. A VM whose worker is at work may have anything: it makes and clears away. Of one whose
// record cannot be read nothing is touched.
func unowned(t thing, o owner) bool {
	switch {
	case o.unreadable:
		return false
	case !o.known:
		return true
	case !o.resting:
		return false
	}
	r := o.record
	switch t.kind {
	case vmm.FoundProcess, vmm.FoundCgroup, vmm.FoundJail:
		return r.Boot == nil
	case kindTAP:
		return !r.NetworkUsed && !o.attached
	case kindSocket:
		return r.Boot == nil || t.name != o.runDir
	case kindDisk:
		return r.Disk == nil
	default:
		return r.RemovedAt != nil
	}
}

// sight is what was found on the host.
type sight struct {
	things   []thing
	problems []machine.Finding
	// Of VMs, by ID: what their VMM's process is seen as, and whether they are attached to a network.
	processes map[string]vmm.Found
	attached  map[string]bool
	// Not looked at, so that nothing is missing.
	noProcesses, noAttached bool
}

// look lists what is there. The records are asked afterwards, and a VM is on record before anything of it is made: so that what was
// seen and has no record then is nobody's, however young it is.
func (e *Engine) look(ctx context.Context) sight {
	s := sight{processes: map[string]vmm.Found{}, attached: map[string]bool{}}
	fail := func(kind, what string, err error) {
		if ctx.Err() == nil {
			s.problems = append(s.problems, notLooked(kind, what, err, e.clock.Now()))
			e.log.Warn("something was not audited", "step", "audit", "what", what, "error", err)
		}
	}
	runs, err := e.config.Driver.Runs(ctx)
	if err != nil {
		s.noProcesses = true
		fail(vmm.FoundProcess, "VMMs", err)
	}
	for _, f := range runs {
		s.things = append(s.things, thing{f.Kind, f.Cgroup, f.Name})
		if had, ok := s.processes[f.Cgroup]; f.Kind == vmm.FoundProcess && (!ok || had.Outside) {
			s.processes[f.Cgroup] = f
		}
	}
	attached, err := e.config.Network.Attached(ctx)
	if err != nil {
		s.noAttached = true
		fail(kindTAP, "attachments to networks", err)
	}
	for _, id := range attached {
		s.attached[id] = true
		s.things = append(s.things, thing{kindTAP, id, "interfaces of VM " + id})
	}
	for _, parent := range []string{e.paths.run, e.paths.state} {
		entries, err := os.ReadDir(parent)
		if err != nil {
			fail(kindDirectory, parent, err)
		}
		for _, entry := range entries {
			s.things = append(s.things, e.lookInto(parent, entry.Name())...)
		}
	}
	return s
}

// lookInto lists a directory of a VM: its disk, or the directories of its runs.
func (e *Engine) lookInto(parent, id string) []thing {
	path := filepath.Join(parent, id)
	own := thing{kindDirectory, id, path}
	if parent == e.paths.state {
		if _, err := os.Lstat(e.paths.private(id)); err == nil {
			return []thing{{kindDisk, id, e.paths.private(id)}, own}
		}
		return []thing{own}
	}
	runs, err := os.ReadDir(path)
	if err != nil {
		return []thing{own} // a file, or gone by now
	}
	var out []thing
	for _, run := range runs {
		out = append(out, thing{kindSocket, id, filepath.Join(path, run.Name())})
	}
	return append(out, own)
}

// ownerOf gives what is known of VM id now.
func (e *Engine) ownerOf(id string) owner {
	e.mu.Lock()
	w := e.workers[id]
	_, unreadable := e.unreadable[id]
	e.mu.Unlock()
	if w == nil {
		return owner{unreadable: unreadable}
	}
	o := w.owner()
	o.unreadable = unreadable
	return o
}

func (w *worker) owner() owner {
	w.mu.Lock()
	defer w.mu.Unlock()
	o := owner{known: true, record: w.record, resting: w.step.Kind == plan.Forget || w.step.Kind != "" && w.step.Rests(), attached: w.attached}
	if b := w.record.Boot; b != nil {
		o.runDir = w.engine.paths.runDir(w.id, b.Run)
		o.running = o.resting && b.Handle != nil && b.Exit == nil && b.Failure == nil && b.Stop == nil && w.observed == plan.Alive
	}
	return o
}

// errOwned says that a thing is somebody's, or gone, at the second look.
func errOwned(t thing) error {
	return fault.Errorf(fault.NotFound, "removing orphan", "%s %s is not nobody's any more", t.kind, t.name)
}

// reap removes t. Meanwhile the VM of its ID, if there is one or one comes to be, begins no step; all others go on.
func (e *Engine) reap(ctx context.Context, t thing) error {
	free, ok := e.reserve(t.id)
	if !ok {
		return errClosed()
	}
	defer free()
	ctx, cancel := context.WithTimeout(ctx, clearTime)
	defer cancel()
	if !e.still(ctx, t) || !unowned(t, e.ownerOf(t.id)) {
		return errOwned(t)
	}
	switch t.kind {
	case vmm.FoundProcess, vmm.FoundCgroup, vmm.FoundJail:
		c := vmm.Config{VMID: t.id, Dir: e.paths.volatile(t.id), ConsoleLog: e.paths.console(t.id), Cgroup: t.id}
		return e.config.Driver.Destroy(ctx, c, vmm.Handle{})
	case kindTAP:
		return e.config.Network.Detach(ctx, t.id)
	case kindDisk:
		return e.discard(t.name, e.lastKnown(t.id), "no record speaks of it")
	case kindDirectory:
		return e.clear(t.id, t.name)
	default:
		return os.RemoveAll(t.name)
	}
}

// lastKnown is the record of VM id, or one that knows nothing but the ID.
func (e *Engine) lastKnown(id string) plan.Record {
	if w := e.known(id); w != nil {
		return w.recordNow()
	}
	return plan.Record{Spec: machine.Spec{ID: id}}
}

// clear removes a directory that no record speaks of. Nobody ordered that: what a user may have written stays in the trash for a while.
func (e *Engine) clear(id, path string) error {
	if err := e.discard(filepath.Join(path, filepath.Base(e.paths.private(id))), e.lastKnown(id), "no record speaks of its VM"); err != nil {
		return err
	}
	return os.RemoveAll(path)
}

// still looks a second time: between the first look and this one the VM may have cleared away itself.
func (e *Engine) still(ctx context.Context, t thing) bool {
	switch t.kind {
	case vmm.FoundProcess, vmm.FoundCgroup, vmm.FoundJail:
		runs, err := e.config.Driver.Runs(ctx)
		return err != nil || slices.ContainsFunc(runs, func(f vmm.Found) bool { return f.Cgroup == t.id })
	case kindTAP:
		attached, err := e.config.Network.Attached(ctx)
		return err != nil || slices.Contains(attached, t.id)
	default:
		_, err := os.Lstat(t.name)
		return !errors.Is(err, os.ErrNotExist)
	}
}

// reserve keeps the worker of VM id, whether it is there or comes to be, from beginning a step until free is called. false: the engine is
// closing.
func (e *Engine) reserve(id string) (free func(), ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, false
	}
	done := make(chan struct{})
	e.reaping[id] = done
	return func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		delete(e.reaping, id)
		close(done)
	}, true
}

// awaitReap is called by a worker that is about to begin a step, after it has told so (worker.enter): either the reaper sees that the
// worker is at work, or the worker sees the reservation.
func (e *Engine) awaitReap(ctx context.Context, id string) error {
	e.mu.Lock()
	done := e.reaping[id]
	e.mu.Unlock()
	if done == nil {
		return nil
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// runningNow gives the VMs that run, each with what it runs as.
func (e *Engine) runningNow() map[string]owner {
	out := map[string]owner{}
	for _, w := range e.allWorkers() {
		if o := w.owner(); o.running {
			out[w.id] = o
		}
	}
	return out
}

// lost tells what records speak of and the host has not: of VMs that ran in the same run before the look and after it. Nothing is made
// up for it: a VMM cannot be given back what it holds open.
func (e *Engine) lost(before map[string]owner, s sight) []machine.Finding {
	var out []machine.Finding
	now := e.clock.Now()
	for id, after := range e.runningNow() {
		b := after.record.Boot
		if was, ok := before[id]; !ok || was.record.Boot.Run != b.Run {
			continue
		}
		for _, what := range e.missingOf(id, *b, s) {
			e.log.Error("something of a running VM is missing", "step", "audit", "vm", id, "run", b.Run, "what", what)
			out = append(out, machine.Finding{Kind: kindRecord, ID: id, Name: fmt.Sprintf("run %d", b.Run), Since: now, Problem: what})
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for id, why := range e.unreadable {
		out = append(out, machine.Finding{Kind: kindRecord, ID: id, Name: "record", Since: now, Problem: why + "; nothing of the VM is touched: repair the file and restart the runtime, or remove the VM"})
	}
	return out
}

func (e *Engine) missingOf(id string, b plan.Boot, s sight) []string {
	var out []string
	switch found, ok := s.processes[id]; {
	case s.noProcesses:
	case !ok:
		out = append(out, "its VMM has neither a cgroup nor a mark: its limits are not in force; restart the VM")
	case found.Outside:
		out = append(out, found.Name+": its limits are not in force; restart the VM")
	}
	if len(b.Spec.Interfaces) > 0 && !s.noAttached && !s.attached[id] {
		out = append(out, "its interfaces are attached to no network any more: it is cut off; restart the VM")
	}
	if _, err := os.Lstat(e.paths.private(id)); errors.Is(err, os.ErrNotExist) {
		out = append(out, "its private disk "+e.paths.private(id)+" was removed: what it writes is lost when it stops")
	}
	return out
}
