package engine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/machine/plan"
)

// progressPeriod is the least time between two lines of progress.
const progressPeriod = 500 * time.Millisecond

func (w *worker) doEnsureImage(ctx context.Context, _ plan.Step) error {
	w.mu.Lock()
	r, credentials := w.record, w.credentials
	w.mu.Unlock()
	if err := os.MkdirAll(w.engine.paths.dir(w.id), 0o700); err != nil {
		return fault.New(fault.DiskFailed, "making directory of VM", err)
	}
	base, timing, err := w.engine.config.Images.Ensure(ctx, image.Request{
		Reference: r.Spec.Image.Reference, Digest: r.WantedDigest(), Policy: r.Spec.Image.Policy,
		Architecture: w.engine.config.Architecture, Credentials: credentials, LinkTo: w.engine.paths.base(w.id),
	}, w.pullProgress())
	if err != nil {
		return err
	}
	if _, err := argv(r.Spec.Workload, base.Config); err != nil {
		return err
	}
	w.log.Info("image ready", "image", r.Spec.Image.Reference, "digest", base.Digest, "cached", timing.Cached, "resolve", timing.Resolve,
		"pull", timing.Pull, "build", timing.Build)
	return w.commit(func(next *plan.Record) {
		next.ImageReady(r.Spec.Image.Reference, base)
		next.Timings.Pull = 0
		if !timing.Cached {
			next.Timings.Pull = timing.Resolve + timing.Pull + timing.Build
		}
	})
}

// pullProgress tells of the pull, not oftener than progressPeriod but for a new stage.
func (w *worker) pullProgress() func(image.Progress) {
	var stage string
	var told time.Time
	return func(p image.Progress) {
		now := w.engine.clock.Now()
		if p.Stage == stage && now.Sub(told) < progressPeriod {
			return
		}
		if p.Stage != stage {
			w.log.Info("image stage", "stage", p.Stage)
		}
		stage, told = p.Stage, now
		w.setProgress(progressLine(p))
	}
}

func progressLine(p image.Progress) string {
	const mib = 1 << 20
	switch {
	case p.Total > 0:
		return fmt.Sprintf("%s image: %d of %d MiB", p.Stage, (p.Done+mib-1)/mib, (p.Total+mib-1)/mib)
	case p.Done > 0:
		return fmt.Sprintf("%s image: %d MiB", p.Stage, (p.Done+mib-1)/mib)
	default:
		return p.Stage + " image"
	}
}

func (w *worker) doEnsureDisk(ctx context.Context, _ plan.Step) error {
	r, path, began := w.recordNow(), w.engine.paths.private(w.id), w.engine.clock.Now()
	if r.Disk != nil && r.Image != nil && r.Disk.BaseDigest == r.Image.Digest {
		return nil // it was given back from the trash since this step was decided
	}
	if r.Disk != nil {
		// Nothing a user wrote is thrown away on the word of a spec: it stays in the trash for a while.
		w.log.Warn("private disk discarded: it belongs to another image", "was", r.Disk.BaseDigest, "now", r.Image.Digest, "kept", trashTime)
		if err := w.engine.discard(path, r, fmt.Sprintf("the image changed from %s to %s", r.Disk.BaseDigest, r.Image.Digest)); err != nil {
			return err
		}
		// At once: a disk made below whose record cannot be written is not one to discard in its turn.
		if err := w.commit(func(next *plan.Record) { next.Disk = nil }); err != nil {
			return err
		}
	}
	// A file that is not on record is left over from a try that was interrupted; it holds nothing.
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fault.New(fault.DiskFailed, "removing old private disk", err)
	}
	if err := w.engine.config.Disks.Create(ctx, path, r.Spec.DiskGiB); err != nil {
		return err
	}
	return w.commit(func(next *plan.Record) {
		now := w.engine.clock.Now()
		next.DiskReady(now)
		next.Timings.Disk = now.Sub(began)
	})
}

func (w *worker) doAttachNetwork(ctx context.Context, _ plan.Step) error {
	began := w.engine.clock.Now()
	// Intent before act: what may be attached must be detached one day, whatever happens to this process.
	if err := w.commit(func(next *plan.Record) { next.NetworkUsed = true }); err != nil {
		return err
	}
	interfaces := w.recordNow().Spec.Interfaces
	attachments, err := w.engine.config.Network.Attach(ctx, w.id, interfaces)
	if err != nil {
		return fault.New(fault.NetworkSetupFailed, "attaching network", err)
	}
	w.attachments, w.attachedFor = attachments, interfaces
	w.setAttached(true)
	w.keep(func(next *plan.Record) { next.Timings.Network = w.engine.clock.Since(began) })
	return nil
}

func (w *worker) setAttached(v bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.attached = v
}

func (w *worker) closeAttachments() {
	for _, a := range w.attachments {
		if a.TAP != nil {
			_ = a.TAP.Close()
		}
	}
	w.attachments, w.attachedFor = nil, nil
	w.setAttached(false)
}

// missing says which of the disks on record is not on the host any more: somebody cleared it away, and it is made anew.
func (w *worker) missing() (base, private bool) {
	gone := func(path string) bool {
		_, err := os.Stat(path)
		return errors.Is(err, fs.ErrNotExist)
	}
	return gone(w.engine.paths.base(w.id)), gone(w.engine.paths.private(w.id))
}
