package engine

import (
	"reflect"
	"slices"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/plan"
	"imp.dev/imp/internal/restart"
)

func (w *worker) recordNow() plan.Record {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.record
}

func (w *worker) status() machine.Status {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.statusLocked()
}

func (w *worker) statusLocked() machine.Status {
	st := plan.Status(w.record, w.step, w.progress)
	st.Revision = w.revision
	return st
}

// commit changes the record durably: when it has returned nil the change survives any crash; when it fails nothing has changed,
// neither on disk nor in memory.
func (w *worker) commit(change func(*plan.Record)) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	next := w.record.Clone()
	change(&next)
	return w.commitLocked(next)
}

func (w *worker) commitLocked(next plan.Record) error {
	next.Revision = w.revision + revisionStep
	if err := w.engine.save(w.id, next); err != nil {
		return fault.New(fault.DiskFailed, "writing record", err)
	}
	w.record = next
	w.tellLocked()
	return nil
}

// keep changes the record in memory at once and on disk when that works: for what may be found out again.
func (w *worker) keep(change func(*plan.Record)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	next := w.record.Clone()
	change(&next)
	w.keepLocked(next)
}

func (w *worker) keepLocked(next plan.Record) {
	if err := w.commitLocked(next); err != nil {
		w.log.Warn("record not written", "error", err)
		w.record = next
		w.revision++
		w.engine.hub.publish(w.id)
	}
}

// tellLocked makes the present state news.
func (w *worker) tellLocked() {
	w.revision++
	if w.revision >= w.record.Revision {
		next := w.record
		next.Revision = w.revision + revisionStep
		if err := w.engine.save(w.id, next); err != nil {
			w.log.Warn("record not written", "error", err)
		}
		w.record = next
	}
	w.engine.hub.publish(w.id)
}

func (w *worker) setProgress(text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.progress != text {
		w.progress = text
		w.tellLocked()
	}
}

// ensure is Engine.Ensure for a VM that is known. fits is asked where a new VM takes the place of this one, or the
// VM is to grow.
func (w *worker) ensure(spec machine.Spec, fits func() error) (machine.Status, error) {
	credentials := spec.Image.Credentials
	spec.Image.Credentials = nil
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.record
	known := r.Spec.Assignment
	if r.Successor != nil {
		known = r.Successor.Assignment
	}
	switch {
	case spec.Assignment < known:
		return machine.Status{}, stale("assignment %d is older than %d", spec.Assignment, known)
	case spec.Assignment == known && r.Successor == nil && r.Removal != nil:
		return machine.Status{}, stale("assignment %d was ordered to be removed", spec.Assignment)
	case spec.Assignment == r.Spec.Assignment:
		return w.updateLocked(spec, credentials, fits)
	}
	if err := fits(); err != nil {
		return machine.Status{}, err
	}
	now := w.engine.clock.Now()
	next := r.Clone()
	if next.RemovedAt != nil {
		next.Successor = &spec
		next = next.Succeeded(now)
		w.observed, w.guestExit, w.step = plan.Unknown, nil, plan.Step{}
	} else {
		if next.Removal == nil {
			// Nobody ordered the disk's end: the VM comes to its node again with a fresh one, as it would to another.
			next.OrderRemoval(machine.Removal{Grace: spec.Grace, KeepDisk: true}, now)
		}
		next.Successor = &spec
	}
	if err := w.commitLocked(next); err != nil {
		return machine.Status{}, err
	}
	w.log.Info("VM accepted in place of an older assignment", "assignment", spec.Assignment)
	w.credentials = credentials
	w.abortLocked()
	return w.statusLocked(), nil
}

// updateLocked takes a Spec of the present assignment. Taking what is known already is free.
func (w *worker) updateLocked(spec machine.Spec, credentials []image.Credential, fits func() error) (machine.Status, error) {
	if has := w.record.Spec; spec.VCPU > has.VCPU || spec.MemoryMiB > has.MemoryMiB || spec.DiskGiB > has.DiskGiB {
		if err := fits(); err != nil {
			w.log.Warn("no room for the VM's new size, it keeps the earlier one", "error", err)
			spec.VCPU, spec.MemoryMiB, spec.DiskGiB = has.VCPU, has.MemoryMiB, has.DiskGiB
		}
	}
	fresh := !reflect.DeepEqual(w.credentials, credentials) && len(credentials) > 0
	next := w.record.Clone()
	same := equal(next.Spec, spec)
	if same && !fresh && next.Spec.Generation >= spec.Generation {
		return w.statusLocked(), nil
	}
	next.Update(spec, same && !fresh, w.engine.clock.Now())
	if err := w.commitLocked(next); err != nil {
		return machine.Status{}, err
	}
	if fresh {
		w.credentials = credentials
	}
	if !same || fresh {
		w.abortLocked()
	}
	return w.statusLocked(), nil
}

// equal says that taking b in place of a would change nothing. What an ephemeral VM does not take cannot differ.
func equal(a, b machine.Spec) bool {
	a, b = canonical(a), canonical(b)
	if a.Lifecycle == machine.Ephemeral {
		a = machine.Spec{Grace: a.Grace, Deadline: a.Deadline, Cluster: a.Cluster}
		b = machine.Spec{Grace: b.Grace, Deadline: b.Deadline, Cluster: b.Cluster}
	}
	return reflect.DeepEqual(a, b)
}

// canonical leaves out what is known better here: the object learns history and digest from this very node, and sends them back.
func canonical(s machine.Spec) machine.Spec {
	s.Generation, s.History, s.Image.Credentials, s.Image.Digest = 0, restart.History{}, nil, ""
	if s.Deadline != nil {
		d := s.Deadline.UTC().Round(0)
		s.Deadline = &d
	}
	s.Workload.Command, s.Workload.Args = empty(s.Workload.Command), empty(s.Workload.Args)
	s.Workload.Env, s.Workload.DataPaths = empty(s.Workload.Env), empty(s.Workload.DataPaths)
	s.Interfaces, s.Script = empty(slices.Clone(s.Interfaces)), empty(s.Script)
	for i := range s.Interfaces {
		n := &s.Interfaces[i]
		n.Addresses, n.Nameservers, n.SearchDomains = empty(n.Addresses), empty(n.Nameservers), empty(n.SearchDomains)
	}
	return s
}

// empty makes one of the two ways to write an empty list.
func empty[T any](s []T) []T {
	if len(s) == 0 {
		return nil
	}
	return s
}

// remove is Engine.Remove for a VM that is known.
func (w *worker) remove(assignment int64, how machine.Removal) (machine.Status, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	next := w.record.Clone()
	known := next.Spec.Assignment
	if next.Successor != nil {
		known = next.Successor.Assignment
	}
	if assignment < known {
		return machine.Status{}, stale("assignment %d is older than %d", assignment, known)
	}
	changed := next.Successor != nil || assignment > known
	next.Successor = nil
	next.Spec.Assignment = assignment
	if next.RemovedAt == nil {
		before := w.record.Removal
		next.OrderRemoval(how, w.engine.clock.Now())
		changed = changed || before == nil || *before != *next.Removal
	}
	if !changed {
		return w.statusLocked(), nil
	}
	if err := w.commitLocked(next); err != nil {
		return machine.Status{}, err
	}
	w.log.Info("VM ordered to be removed", "assignment", assignment, "grace", how.Grace, "keepDisk", how.KeepDisk)
	w.abortLocked()
	return w.statusLocked(), nil
}

func stale(format string, args ...any) error {
	return fault.Errorf(fault.StaleAssignment, "accepting order", format, args...)
}
