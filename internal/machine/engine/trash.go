package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/utils/clock"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/plan"
	"imp.dev/imp/internal/record"
)

// trashTime is how long a discarded disk can still be had back.
const trashTime = 72 * time.Hour

const (
	diskSuffix = ".ext4"
	noteSuffix = ".json"
)

// trash holds private disks that nobody ordered to be destroyed. Beside each disk lies a note of what it is: the note is written before
// the disk comes and removed after it has gone, so that a note without a disk is left over from a crash and a disk without a note
// is one of an earlier version, of which only the name is known.
type trash struct {
	dir   string
	clock clock.PassiveClock
	mu    sync.Mutex
}

// put moves the disk at path here. No disk there is success: name is "" then.
func (t *trash) put(path string, d machine.Discarded) (name string, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	if d.GiB == 0 { // of a VM that nothing is known of
		d.GiB = wholeGiB(info.Size())
	}
	if d.Name, err = t.freeName(d.ID); err != nil {
		return "", err
	}
	d.DiscardedAt = t.clock.Now().UTC().Round(0)
	d.ExpiresAt = d.DiscardedAt.Add(trashTime)
	note, err := json.Marshal(d)
	if err != nil {
		return "", fmt.Errorf("encoding note: %w", err)
	}
	if err := record.WriteFile(t.dir, d.Name+noteSuffix, note); err != nil {
		return "", fmt.Errorf("writing note: %w", err)
	}
	if err := os.Rename(path, t.disk(d.Name)); err != nil {
		_ = os.Remove(t.note(d.Name))
		return "", err
	}
	return d.Name, errors.Join(record.SyncDir(t.dir), record.SyncDir(filepath.Dir(path)))
}

// freeName is the VM's ID and the first number that no disk of it has: one VM may lose a disk more than once.
func (t *trash) freeName(id string) (string, error) {
	for n := 1; ; n++ {
		name := fmt.Sprintf("%s.%d", id, n)
		if _, err := os.Lstat(t.disk(name)); errors.Is(err, fs.ErrNotExist) {
			return name, nil
		} else if err != nil {
			return "", err
		}
	}
}

// take moves the disk name to path, where nothing is.
func (t *trash) take(name, path string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := os.Rename(t.disk(name), path); err != nil {
		return err
	}
	if err := os.Remove(t.note(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return errors.Join(record.SyncDir(t.dir), record.SyncDir(filepath.Dir(path)))
}

// list gives every disk, the latest first.
func (t *trash) list() ([]machine.Discarded, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	entries, err := os.ReadDir(t.dir)
	if err != nil {
		return nil, err
	}
	out := []machine.Discarded{}
	for _, entry := range entries {
		name, ok := strings.CutSuffix(entry.Name(), diskSuffix)
		if !ok {
			continue
		}
		d, err := t.describe(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		out = append(out, d)
	}
	slices.SortFunc(out, func(a, b machine.Discarded) int {
		if c := b.DiscardedAt.Compare(a.DiscardedAt); c != 0 {
			return c
		}
		return strings.Compare(a.Name, b.Name)
	})
	return out, nil
}

// describe reads a disk's note, or makes up for one that is missing or damaged from what the file itself tells.
func (t *trash) describe(name string) (machine.Discarded, error) {
	var st unix.Stat_t
	if err := unix.Lstat(t.disk(name), &st); err != nil {
		return machine.Discarded{}, err
	}
	d := machine.Discarded{}
	note, err := os.ReadFile(t.note(name))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return d, err
	}
	if err != nil || json.Unmarshal(note, &d) != nil || d.DiscardedAt.IsZero() || d.Name != name {
		id, _, _ := strings.Cut(name, ".")
		at := time.Unix(st.Mtim.Unix()).UTC()
		d = machine.Discarded{Name: name, ID: id, GiB: wholeGiB(st.Size), DiscardedAt: at, ExpiresAt: at.Add(trashTime), Why: "not known: nothing readable was written beside it"}
	}
	d.Bytes = st.Blocks * 512 // stat(2): whatever the file system's block size is
	return d, nil
}

// sweep removes what has lain long enough, and what crashes left. It gives the disks that were removed for good, and the paths of the rest.
func (t *trash) sweep() (gone []machine.Discarded, left []string, err error) {
	all, err := t.list()
	if err != nil {
		return nil, nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	var errs []error
	for _, d := range all {
		if t.clock.Now().Before(d.ExpiresAt) {
			continue
		}
		if err := os.Remove(t.disk(d.Name)); errors.Is(err, fs.ErrNotExist) {
			continue // given back meanwhile
		} else if err != nil {
			errs = append(errs, err)
			continue
		}
		gone = append(gone, d)
	}
	entries, err := os.ReadDir(t.dir)
	if err != nil {
		return gone, nil, errors.Join(append(errs, err)...)
	}
	for _, entry := range entries {
		name, isNote := strings.CutSuffix(entry.Name(), noteSuffix)
		stale := strings.HasPrefix(entry.Name(), record.TempPrefix)
		if isNote && !stale {
			_, err := os.Lstat(t.disk(name))
			stale = errors.Is(err, fs.ErrNotExist)
		}
		if !stale {
			continue
		}
		path := filepath.Join(t.dir, entry.Name())
		if err := os.Remove(path); err != nil {
			errs = append(errs, err)
			continue
		}
		left = append(left, path)
	}
	return gone, left, errors.Join(errs...)
}

func wholeGiB(bytes int64) int64 { return (bytes + 1<<30 - 1) >> 30 }

func (t *trash) disk(name string) string { return filepath.Join(t.dir, name+diskSuffix) }
func (t *trash) note(name string) string { return filepath.Join(t.dir, name+noteSuffix) }

// discard moves the private disk at path, which is that of the VM of r, into the trash and says why in one line; no disk there
// is success. Repeating it after an interruption is free.
func (e *Engine) discard(path string, r plan.Record, why string) error {
	_, err := e.trash.put(path, discarded(r, why))
	return fault.New(fault.DiskFailed, "moving disk to trash", err)
}

func discarded(r plan.Record, why string) machine.Discarded {
	d := machine.Discarded{ID: r.Spec.ID, VMNamespace: r.Spec.Namespace, VM: r.Spec.Name, GiB: r.Spec.DiskGiB, Why: why}
	if r.Disk != nil {
		d.BaseDigest, d.GiB = r.Disk.BaseDigest, r.Disk.GiB
	}
	return d
}

// emptyTrash removes what has lain long enough. It gives what it removed beside.
func (e *Engine) emptyTrash() (left []string, err error) {
	gone, left, err := e.trash.sweep()
	for _, d := range gone {
		e.log.Info("discarded disk removed for good", "step", "audit", "disk", d.Name, "vm", d.ID, "namespace", d.VMNamespace, "name", d.VM, "discardedAt", d.DiscardedAt)
	}
	if err != nil {
		e.log.Warn("trash not emptied", "step", "audit", "error", err)
	}
	return left, err
}

// Trash implements machine.Keeper.
func (e *Engine) Trash(context.Context) ([]machine.Discarded, error) {
	all, err := e.trash.list()
	return all, fault.New(fault.DiskFailed, "listing trash", err)
}

// Restore implements machine.Keeper.
func (e *Engine) Restore(_ context.Context, name, id string) error {
	if err := machine.ValidateRef(machine.Ref{ID: id}); err != nil {
		return err
	}
	e.mu.Lock()
	w, closed := e.workers[id], e.closed
	e.mu.Unlock()
	if closed {
		return errClosed()
	}
	if w == nil {
		return fault.Errorf(fault.NotFound, "restoring disk", "no VM %s on this node: create it again with desiredState: Stopped, and give the disk to the UID it has then", id)
	}
	all, err := e.Trash(context.Background())
	if err != nil {
		return err
	}
	i := slices.IndexFunc(all, func(d machine.Discarded) bool { return d.Name == name })
	if i < 0 {
		return fault.Errorf(fault.NotFound, "restoring disk", "no disk %q in the trash", name)
	}
	return w.restore(all[i])
}
