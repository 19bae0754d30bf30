package engine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/plan"
	"imp.dev/imp/internal/vmm"
)

const (
	// markerBytes of the console's end are searched for the marker: what a kernel says when it dies after it is far shorter.
	markerBytes = 256 << 10
	// markerPatience is how long a reported exit waits for its marker to come through the serial port.
	markerPatience = 2 * time.Second
	markerPace     = 20 * time.Millisecond
	// evidenceTries is how often a driver is asked for evidence before there is none.
	evidenceTries = 3
	ackTime       = 5 * time.Second
)

func (w *worker) doStop(_ context.Context, step plan.Step) error {
	if err := w.commit(func(next *plan.Record) { next.Stopping(step.Grace, step.Verdict, w.engine.clock.Now()) }); err != nil {
		return err
	}
	w.log.Info("guest asked to stop", "grace", step.Grace, "why", step.Why)
	w.session.stop(step.Grace)
	return nil
}

func (w *worker) doCollectVerdict(ctx context.Context, step plan.Step) error {
	r := w.recordNow()
	t := plan.Testimony{
		Boot: *r.Boot, Ordered: step.Verdict, Why: step.Why, HostBootID: w.engine.config.HostBootID, Lifecycle: r.Spec.Lifecycle,
		Report: w.report(ctx),
	}
	if step.Verdict == machine.GuestHung {
		t.Ordered, t.Hung = "", true
	}
	t.Console = w.awaitMarker(ctx, r.Boot, t.Report != nil)
	if t.Report == nil && t.Ordered == "" {
		t.Evidence, t.EvidenceErr = w.engine.config.Driver.Evidence(ctx, w.machineConfig(r.Boot), *r.Boot.Handle)
		tries := 1
		if r.Retry != nil && r.Retry.Step == step.Kind {
			tries += r.Retry.Failures
		}
		if t.EvidenceErr != nil && !t.Hung && r.Boot.HostBootID == t.HostBootID && tries < evidenceTries {
			return fault.New(fault.Internal, "gathering evidence", t.EvidenceErr)
		}
	}
	t.Now = w.engine.clock.Now()
	exit, reported := plan.Judge(t)
	jitter := rand.Float64()
	if err := w.commit(func(next *plan.Record) { next.Concluded(exit, reported, jitter, t.Now) }); err != nil {
		return err
	}
	w.logEnd(exit)
	return nil
}

// awaitMarker gives the end of the console; of an exit that was reported it waits a moment for the marker, which comes by a slower way.
func (w *worker) awaitMarker(ctx context.Context, b *plan.Boot, reported bool) []byte {
	end := w.engine.clock.Now().Add(markerPatience)
	for {
		text := w.consoleSince(b, markerBytes)
		_, found := plan.Marker(text, b.Nonce)
		if found || !reported || !w.engine.clock.Now().Before(end) {
			return text
		}
		t := w.engine.clock.NewTimer(markerPace)
		select {
		case <-t.C():
		case <-ctx.Done():
			t.Stop()
			return text
		}
	}
}

// logEnd is the one line of a workload's end. It shows the marker (docs/contract.md).
func (w *worker) logEnd(e machine.Exit) {
	marker := ""
	if e.Code != nil {
		marker = guestv1.MarkerSuccess
		if *e.Code != 0 {
			marker = fmt.Sprintf("%s code=%d", guestv1.MarkerFailed, *e.Code)
		}
	}
	w.log.Info("workload ended", "verdict", e.Verdict, "marker", marker, "markerSeen", e.Marker, "message", e.Message, "incarnation", e.Incarnation, "run", e.Run)
}

// doAcknowledge is a courtesy: a guest that cannot be told is destroyed all the same.
func (w *worker) doAcknowledge(ctx context.Context, _ plan.Step) error {
	limited, cancel := w.limit(ctx, ackTime)
	defer cancel()
	if err := w.session.client.Acknowledge(limited); err != nil && ctx.Err() == nil {
		w.log.Debug("exit not acknowledged", "error", err)
	}
	return w.commit(func(next *plan.Record) { next.Acknowledged(w.engine.clock.Now()) })
}

func (w *worker) doDestroyVMM(ctx context.Context, _ plan.Step) error {
	r := w.recordNow()
	w.closeSession()
	w.giveBoot()
	limited, cancel := w.limit(ctx, clearTime)
	defer cancel()
	handle := vmm.Handle{}
	if r.Boot.Handle != nil {
		handle = *r.Boot.Handle
	}
	c := w.machineConfig(r.Boot)
	err := w.engine.config.Driver.Destroy(limited, c, handle)
	if err != nil && r.Removal != nil && r.Boot.Handle != nil && ctx.Err() == nil {
		w.log.Warn("run not destroyed by its handle, trying by its cgroup", "error", err)
		err = w.engine.config.Driver.Destroy(limited, c, vmm.Handle{})
	}
	if err != nil {
		return fault.New(fault.Internal, "destroying VMM", err)
	}
	if err := os.RemoveAll(c.Dir); err != nil {
		return fault.New(fault.Internal, "removing directory of run", err)
	}
	w.closeAttachments()
	w.mu.Lock()
	defer w.mu.Unlock()
	next := w.record.Clone()
	next.VMMDestroyed(w.engine.clock.Now())
	if err := w.commitLocked(next); err != nil {
		return err
	}
	w.observed, w.guestExit, w.heardAt = plan.Unknown, nil, time.Time{}
	return nil
}

func (w *worker) doDetach(ctx context.Context, _ plan.Step) error {
	w.closeAttachments()
	limited, cancel := w.limit(ctx, clearTime)
	defer cancel()
	if err := w.engine.config.Network.Detach(limited, w.id); err != nil {
		return fault.New(fault.NetworkSetupFailed, "detaching network", err)
	}
	return w.commit(func(next *plan.Record) { next.NetworkUsed = false })
}

// keepDisk moves the private disk into the trash if the order to remove says so.
func (w *worker) keepDisk() error {
	r := w.recordNow()
	if r.Removal == nil || !r.Removal.KeepDisk {
		return nil
	}
	return w.engine.discard(w.engine.paths.private(w.id), r, "the VM was taken from the node, and nobody ordered its disk's end")
}

// doFreeDisk removes everything of the VM but its console.
func (w *worker) doFreeDisk(context.Context, plan.Step) error {
	if err := w.keepDisk(); err != nil {
		return err
	}
	if err := os.RemoveAll(w.engine.paths.volatile(w.id)); err != nil {
		return fault.New(fault.DiskFailed, "removing sockets", err)
	}
	dir, keep := w.engine.paths.dir(w.id), filepath.Base(w.engine.paths.console(w.id))
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fault.New(fault.DiskFailed, "reading directory of VM", err)
	}
	for _, e := range entries {
		if e.Name() == keep {
			continue
		}
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return fault.New(fault.DiskFailed, "removing disk", err)
		}
	}
	return w.commit(func(next *plan.Record) { next.DiskFreed() })
}

func (w *worker) doFinish(_ context.Context, step plan.Step) error {
	now := w.engine.clock.Now()
	r := w.recordNow()
	exit := machine.Exit{Incarnation: r.Incarnation, Run: r.Run, Verdict: step.Verdict, At: now, Message: step.Why}
	if err := w.commit(func(next *plan.Record) { next.Finish(exit, now) }); err != nil {
		return err
	}
	w.logEnd(exit)
	return nil
}

func (w *worker) doWriteTombstone(context.Context, plan.Step) error {
	if err := w.keepDisk(); err != nil {
		return err
	}
	for _, dir := range []string{w.engine.paths.volatile(w.id), w.engine.paths.dir(w.id)} {
		if err := os.RemoveAll(dir); err != nil {
			return fault.New(fault.DiskFailed, "removing directory of VM", err)
		}
	}
	if err := w.commit(func(next *plan.Record) { next.Tombstoned(w.engine.clock.Now()) }); err != nil {
		return err
	}
	w.log.Info("VM removed", "assignment", w.recordNow().Spec.Assignment)
	return nil
}

// doSucceed makes way for the successor, unless an order did so, or withdrew it, since the step was decided.
func (w *worker) doSucceed(context.Context, plan.Step) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.record.RemovedAt == nil || w.record.Successor == nil {
		return nil
	}
	next := w.record.Clone()
	return w.commitLocked(next.Succeeded(w.engine.clock.Now()))
}
