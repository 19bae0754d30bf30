package engine

import (
	"errors"
	"os"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/plan"
)

const restoreStage = "restoring disk"

// restore gives the VM the disk d of the trash. Whatever happens on the way, no disk is lost: the VM's own goes to the trash first;
// then the record says whose disk lies at its place, because a disk that no record speaks of is taken for the rest of an interrupted
// try and removed; then the disk is moved. After a crash in between, both are in the trash and the VM has none.
func (w *worker) restore(d machine.Discarded) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	base, err := baseFor(w.statusLocked().State, w.step, w.record, d)
	if err != nil {
		return err
	}
	t, path := &w.engine.trash, w.engine.paths.private(w.id)
	if err := os.MkdirAll(w.engine.paths.dir(w.id), 0o700); err != nil {
		return fault.New(fault.DiskFailed, restoreStage, err)
	}
	own, err := t.put(path, discarded(w.record, "replaced by disk "+d.Name+" of the trash"))
	if err != nil {
		return fault.New(fault.DiskFailed, restoreStage, err)
	}
	back := func(err error) error {
		if own != "" {
			err = errors.Join(err, t.take(own, path))
		}
		return fault.New(fault.DiskFailed, restoreStage, err)
	}
	before, next := w.record, w.record.Clone()
	next.Disk = &plan.Disk{BaseDigest: base, GiB: d.GiB}
	next.DiskGeneration++
	next.StepSucceeded(plan.EnsureDisk)
	if err := w.commitLocked(next); err != nil {
		return back(err)
	}
	if err := t.take(d.Name, path); err != nil {
		undone := before.Clone()
		return back(errors.Join(err, w.commitLocked(undone)))
	}
	w.log.Info("disk of the trash given to VM", "disk", d.Name, "of", d.ID, "digest", base, "gib", d.GiB, "own", own)
	w.wake()
	return nil
}

// baseFor says which base a disk of the trash is used with if VM r may have it now, and else what to do first. A step under way may be
// using the disk that is there.
func baseFor(state machine.State, now plan.Step, r plan.Record, d machine.Discarded) (string, error) {
	refuse := func(format string, args ...any) (string, error) {
		return "", fault.Errorf(fault.DiskFailed, restoreStage, format, args...)
	}
	fresh := state == machine.Pending && r.StartedAt == nil && r.LastExit == nil
	if r.Boot != nil || (now.Kind != "" && !now.Rests()) || (state != machine.Halted && !fresh) {
		return refuse("VM %s is %s: set desiredState: Stopped and wait until it is stopped, so that nothing uses its disk", r.Spec.ID, state)
	}
	base := r.WantedDigest()
	if r.Image != nil && r.Image.Reference == r.Spec.Image.Reference {
		base = r.Image.Digest
	}
	switch {
	case base == "" && d.BaseDigest == "":
		return refuse("neither the base of the disk nor that of VM %s is known: start the VM once, then set desiredState: Stopped", r.Spec.ID)
	case base == "":
		return d.BaseDigest, nil
	case d.BaseDigest != "" && d.BaseDigest != base:
		return refuse("the disk holds the changes to base image %s and VM %s is on %s: set the VM's image to one of that digest (repository@%s) and try again",
			d.BaseDigest, r.Spec.ID, base, d.BaseDigest)
	}
	return base, nil
}
