package engine

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/guest"
	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/machine/plan"
	"imp.dev/imp/internal/network"
)

// errOvertaken says that a step was not begun: something happened since it was decided.
var errOvertaken = errors.New("overtaken by an event")

// revisionStep is how many revisions are told before the record is written only for their sake.
const revisionStep = 1000

// worker looks after one VM. Its goroutine alone carries out steps; orders come from others under mu.
type worker struct {
	engine *Engine
	id     string
	log    *slog.Logger
	// wakeup ends a rest; capacity 1.
	wakeup chan struct{}

	mu sync.Mutex
	// record is never changed in place: commit replaces it, so that a copy taken under mu stays true.
	record   plan.Record
	revision int64 // told last; record.Revision is at least as high
	step     plan.Step
	progress string
	// abort ends the step under way, nil if it must not be ended.
	abort       context.CancelFunc
	credentials []image.Credential
	observed    plan.VMM
	guestExit   *guestv1.Exit
	heardAt     time.Time // plan.Observation.HeardAt

	// Of the worker's goroutine alone.
	session     *session
	attachments []network.Attachment
	attachedFor []network.Interface // what attachments were made for
	attached    bool
	booting     bool // holds one of Engine.boots
}

func newWorker(e *Engine, id string, r plan.Record) *worker {
	return &worker{
		engine: e, id: id, record: r, revision: r.Revision, observed: plan.Unknown, wakeup: make(chan struct{}, 1),
		log: e.log.With("vm", id, "namespace", r.Spec.Namespace, "name", r.Spec.Name),
	}
}

// run is the worker's life: until ctx ends, or the VM is forgotten.
func (w *worker) run(ctx context.Context) {
	defer func() {
		w.closeSession()
		w.closeAttachments()
		w.giveBoot()
	}()
	for ctx.Err() == nil {
		step := plan.Next(w.view())
		w.enter(step)
		if step.Kind == plan.Forget {
			if w.forget() {
				return
			}
			continue
		}
		if step.Rests() {
			w.rest(ctx, step)
			continue
		}
		w.log.Debug("step", "step", step.Kind, "why", step.Why, "check", step.Check)
		w.settle(ctx, step, w.carryOut(ctx, step))
	}
}

// carryOut performs a step between its two failpoints.
func (w *worker) carryOut(ctx context.Context, step plan.Step) error {
	if err := w.engine.reach("before " + string(step.Kind)); err != nil {
		return err
	}
	err := w.perform(ctx, step)
	if died := w.engine.reach("after " + string(step.Kind)); died != nil {
		return died
	}
	return err
}

func (w *worker) view() plan.View {
	w.mu.Lock()
	defer w.mu.Unlock()
	return plan.View{
		Record: w.record, Limits: w.engine.config.Limits, Now: w.engine.clock.Now(),
		Observed: plan.Observation{VMM: w.observed, GuestExit: w.guestExit, Attached: w.attached, HasCredentials: len(w.credentials) > 0, HeardAt: w.heardAt},
	}
}

// enter notes the step under way, which is part of what Status tells.
func (w *worker) enter(step plan.Step) {
	w.mu.Lock()
	defer w.mu.Unlock()
	before := plan.StateOf(w.record, w.step)
	w.step = step
	if step.Kind == plan.WaitForSecrets {
		r := w.record.Clone()
		if r.LacksSecrets(step.Why, w.engine.clock.Now()) {
			w.keepLocked(r)
			return
		}
	}
	if plan.StateOf(w.record, step) != before {
		w.tellLocked()
	}
}

// rest waits for a wakeup, until, or ctx's end.
func (w *worker) rest(ctx context.Context, step plan.Step) {
	var timer <-chan time.Time
	if !step.Until.IsZero() {
		t := w.engine.clock.NewTimer(step.Until.Sub(w.engine.clock.Now()))
		defer t.Stop()
		timer = t.C()
	}
	select {
	case <-ctx.Done():
	case <-w.wakeup:
	case <-timer:
	}
}

// wake makes the worker look again.
func (w *worker) wake() {
	select {
	case w.wakeup <- struct{}{}:
	default:
	}
}

// abortLocked ends the step under way where that is allowed, and makes the worker look again.
func (w *worker) abortLocked() {
	if w.abort != nil {
		w.abort()
	}
	w.wake()
}

// perform carries out one step. A step that may take long ends early when an order comes, at the step's own deadline, and at
// the VM's.
func (w *worker) perform(ctx context.Context, step plan.Step) error {
	if err := w.engine.awaitReap(ctx, w.id); err != nil {
		return err
	}
	do, abortable := w.action(step.Kind)
	if speaksToGuest(step.Kind) && w.session == nil {
		w.setObserved(plan.Unknown) // it was let go of by a step that did not get to its end: look again
		return nil
	}
	if !abortable {
		return do(ctx, step)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	w.mu.Lock()
	until, end := step.Until, w.record.Spec.Deadline
	if end != nil && w.record.Removal == nil && (until.IsZero() || end.Before(until)) {
		until = *end
	}
	w.abort = cancel
	w.mu.Unlock()
	defer func() {
		w.mu.Lock()
		w.abort = nil
		w.mu.Unlock()
	}()
	// An order may have come between the decision and this line; it has left its wakeup.
	select {
	case <-w.wakeup:
		return errOvertaken
	default:
	}
	if !until.IsZero() {
		t := w.engine.clock.NewTimer(until.Sub(w.engine.clock.Now()))
		defer t.Stop()
		go func() {
			select {
			case <-t.C():
				cancel()
			case <-ctx.Done():
			}
		}()
	}
	return do(ctx, step)
}

// action gives what carries out a step, and whether an order may end it early.
func (w *worker) action(kind plan.Kind) (do func(context.Context, plan.Step) error, abortable bool) {
	switch kind {
	case plan.Recover:
		return w.doRecover, false
	case plan.EnsureImage:
		return w.doEnsureImage, true
	case plan.EnsureDisk:
		return w.doEnsureDisk, true
	case plan.AttachNetwork:
		return w.doAttachNetwork, false
	case plan.StartVMM:
		return w.doStartVMM, true
	case plan.AwaitGuest:
		return w.doAwaitGuest, true
	case plan.Configure:
		return w.doConfigure, true
	case plan.StartWorkload:
		return w.doStartWorkload, true
	case plan.FailStart:
		return w.doFailStart, false
	case plan.Stop:
		return w.doStop, false
	case plan.CollectVerdict:
		return w.doCollectVerdict, false
	case plan.Acknowledge:
		return w.doAcknowledge, false
	case plan.DestroyVMM:
		return w.doDestroyVMM, false
	case plan.Detach:
		return w.doDetach, false
	case plan.FreeDisk:
		return w.doFreeDisk, false
	case plan.Finish:
		return w.doFinish, false
	case plan.WriteTombstone:
		return w.doWriteTombstone, false
	case plan.Succeed:
		return w.doSucceed, false
	default:
		return func(context.Context, plan.Step) error {
			return fault.Errorf(fault.Internal, "carrying out step", "no action for step %s", kind)
		}, false
	}
}

func speaksToGuest(kind plan.Kind) bool {
	switch kind {
	case plan.AwaitGuest, plan.Configure, plan.StartWorkload, plan.Stop, plan.Acknowledge:
		return true
	default:
		return false
	}
}

// settle writes down what came of a step.
func (w *worker) settle(ctx context.Context, step plan.Step, err error) {
	if w.engine.died.Load() {
		return
	}
	w.setProgress("")
	now := w.engine.clock.Now()
	switch {
	case err == nil:
		w.mu.Lock()
		defer w.mu.Unlock()
		if r := w.record.Retry; r != nil && r.Step == step.Kind {
			next := w.record.Clone()
			next.StepSucceeded(step.Kind)
			w.keepLocked(next)
		}
	case ctx.Err() != nil || errors.Is(err, errOvertaken):
		// The runtime is ending, or the step was not begun.
	case interrupted(err) && (w.overtaken() || (!step.Until.IsZero() && !now.Before(step.Until)) || w.deadlinePassed(now)):
		// An order or a deadline came: the plan knows what follows.
	case errors.Is(err, guest.ErrGone) && w.awaitOver(ctx):
		// The machine has ended: likewise.
	default:
		w.failed(step, fault.Of(err), now)
	}
}

func (w *worker) failed(step plan.Step, f *fault.Error, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 1
	if r := w.record.Retry; r != nil && r.Step == step.Kind {
		n = r.Failures + 1
	}
	limit := time.Minute
	if step.Kind == plan.EnsureImage {
		limit = 5 * time.Minute
	}
	delay := backoff(n, limit)
	next := w.record.Clone()
	next.StepFailed(step.Kind, f, delay, now)
	w.log.Warn("step failed", "step", step.Kind, "reason", f.Reason, "error", f, "failures", n, "retry", delay, "incarnation", next.Incarnation)
	w.keepLocked(next)
}

// overtaken says that there is a wakeup that nobody has looked at yet.
func (w *worker) overtaken() bool { return len(w.wakeup) > 0 }

func (w *worker) deadlinePassed(now time.Time) bool {
	d := w.recordNow().Spec.Deadline
	return d != nil && !now.Before(*d)
}

// forget drops the tombstone. It fails when an order has come meanwhile.
func (w *worker) forget() bool {
	e := w.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.record.RemovedAt == nil || w.record.Successor != nil || e.reach("before "+string(plan.Forget)) != nil {
		return false
	}
	if err := e.records.Forget(w.id); err != nil {
		w.log.Warn("tombstone not removed", "error", err)
	}
	delete(e.workers, w.id)
	e.hub.publish(w.id)
	return true
}
