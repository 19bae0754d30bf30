package engine

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"os"
	"time"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/console"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/guest"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/plan"
	"imp.dev/imp/internal/vmm"
)

const (
	entropyBytes = 64
	// answerTime bounds a repeated start that is not answered, before it is tried on a new connection.
	answerTime = 30 * time.Second
	// wordsBytes of the console go into the message of a failed start.
	wordsBytes = 1 << 10
	// tailBytes of the console are kept with an end or a failed start.
	tailBytes = 4 << 10
	// clearTime bounds what is done to clear away.
	clearTime = time.Minute
)

// machineConfig is what the driver is told of a boot. It is the same for Start, Recover, Evidence and Destroy.
func (w *worker) machineConfig(b *plan.Boot) vmm.Config {
	p, c := w.engine.paths, w.engine.config
	return vmm.Config{
		VMID: w.id, Run: b.Run, Dir: p.runDir(w.id, b.Run), ConsoleLog: p.console(w.id), VCPU: b.Spec.VCPU, MemoryMiB: b.Spec.MemoryMiB,
		Kernel: c.Kernel, Initramfs: c.Initramfs, Cgroup: w.id, Script: b.Spec.Script,
		Disks: []vmm.Disk{
			{Serial: guestv1.SerialBase, Path: p.base(w.id), ReadOnly: true},
			{Serial: guestv1.SerialPrivate, Path: p.private(w.id)},
		},
	}
}

func (w *worker) doRecover(ctx context.Context, _ plan.Step) error {
	r := w.recordNow()
	b := r.Boot
	instance, err := w.engine.config.Driver.Recover(ctx, w.machineConfig(b), *b.Handle)
	switch {
	case err == nil:
	case errors.Is(err, vmm.ErrGone):
		w.log.Info("VMM is gone", "incarnation", b.Incarnation, "run", b.Run)
		instance = nil
	case r.Removal != nil:
		// Removal must end even if the handle can be read no more: the driver finds what lives by its cgroup.
		w.log.Error("VMM cannot be recovered and is removed unseen", "error", err)
		instance = nil
	default:
		return fault.New(fault.RuntimeStartFailed, "recovering VMM", err)
	}
	w.keep(func(next *plan.Record) { next.Recovered(instance != nil, w.engine.clock.Now()) })
	if instance == nil {
		w.setObserved(plan.Over)
		return nil
	}
	w.openSession(ctx, instance)
	w.log.Info("VMM adopted", "incarnation", b.Incarnation, "run", b.Run, "pid", instance.PID())
	if b.StartSentAt != nil && b.Exit == nil {
		w.session.attend()
	}
	if b.StartedAt != nil {
		w.session.follow()
	}
	if b.Stop != nil {
		w.session.stop(max(0, b.Stop.Grace-w.engine.clock.Since(b.Stop.At)))
	}
	return nil
}

func (w *worker) doStartVMM(ctx context.Context, _ plan.Step) error {
	if base, private := w.missing(); base || private {
		w.log.Error("disk is not there any more and is made anew", "base", base, "private", private)
		return w.commit(func(next *plan.Record) {
			if base {
				next.Image = nil
			}
			if private {
				next.Disk = nil
			}
		})
	}
	if err := w.takeBoot(ctx); err != nil {
		return err
	}
	if !w.attachedAsWished() {
		w.giveBoot()
		w.closeAttachments() // the plan attaches them anew
		return nil
	}
	if err := w.beginBoot(); err != nil {
		w.giveBoot() // nothing boots; the step that gives it back otherwise never comes
		return err
	}
	b := w.recordNow().Boot
	instance, err := w.launch(ctx, b)
	switch {
	case err != nil && ctx.Err() != nil:
		return err // the plan clears away what an interrupted launch may have left
	case err != nil:
		f := fault.Of(fault.New(fault.RuntimeStartFailed, "starting VMM", err))
		w.log.Warn("VMM not started", "reason", f.Reason, "error", f, "incarnation", b.Incarnation, "run", b.Run)
		return w.startFailed(plan.FailedStart{Failure: plan.Failure{Reason: f.Reason, Message: f.Error()}}, b)
	}
	w.closeAttachments()
	if err := w.commit(func(next *plan.Record) { next.Launched(instance.Handle(), w.engine.clock.Now()) }); err != nil {
		if w.engine.died.Load() {
			_ = instance.Close()
			return err
		}
		// What cannot be written down must not live: nobody would find it again.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), clearTime)
		defer cancel()
		killErr := instance.Kill(ctx)
		_ = instance.Close()
		return errors.Join(err, killErr)
	}
	w.log.Info("VMM started", "incarnation", b.Incarnation, "run", b.Run, "pid", instance.PID())
	w.openSession(ctx, instance)
	return nil
}

// attachedAsWished says that the open TAPs are those of the present Spec: it may have changed since they were opened, and the guest is
// told what the Spec says.
func (w *worker) attachedAsWished() bool {
	return plan.SameInterfaces(w.attachedFor, w.recordNow().Spec.Interfaces)
}

// beginBoot writes the intent to launch.
func (w *worker) beginBoot() error {
	if r := w.recordNow(); r.Disk.GiB != r.Spec.DiskGiB {
		w.log.Warn("private disk keeps the size it was made with", "gib", r.Disk.GiB, "wanted", r.Spec.DiskGiB)
	}
	nonce := make([]byte, 16)
	if _, err := rand.Read(nonce); err != nil {
		return fault.New(fault.Internal, "making nonce", err)
	}
	before, err := console.Read(w.engine.paths.console(w.id), 0, 0)
	if err != nil {
		return fault.New(fault.DiskFailed, "reading console", err)
	}
	return w.commit(func(next *plan.Record) {
		next.BeginBoot(hex.EncodeToString(nonce), w.engine.config.HostBootID, before.Size, w.engine.clock.Now())
	})
}

// takeBoot waits until one more guest may boot. Repeating it is free.
func (w *worker) takeBoot(ctx context.Context) error {
	boots := w.engine.boots
	if boots == nil || w.booting {
		return nil
	}
	select {
	case boots <- struct{}{}:
	default:
		w.setProgress("waiting for other guests to boot")
		select {
		case boots <- struct{}{}:
			w.setProgress("")
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	w.booting = true
	return nil
}

func (w *worker) giveBoot() {
	if w.booting {
		w.booting = false
		<-w.engine.boots
	}
}

// launch makes the run's directory and starts its VMM.
func (w *worker) launch(ctx context.Context, b *plan.Boot) (vmm.Instance, error) {
	c := w.machineConfig(b)
	if err := os.RemoveAll(c.Dir); err != nil {
		return nil, fault.New(fault.DiskFailed, "clearing directory of run", err)
	}
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, fault.New(fault.DiskFailed, "making directory of run", err)
	}
	for _, a := range w.attachments {
		c.NICs = append(c.NICs, vmm.NIC{MAC: a.Interface.MAC, TAP: a.TAP})
	}
	return w.engine.config.Driver.Start(ctx, c)
}

func (w *worker) doAwaitGuest(ctx context.Context, _ plan.Step) error {
	hello, err := w.session.client.Hello(ctx)
	if err != nil {
		return w.startError("waiting for guest", err)
	}
	w.heard()
	if hello.Version != guestv1.Version {
		return w.failStart(fmt.Sprintf("the guest speaks version %d of the protocol, this runtime %d", hello.Version, guestv1.Version), false)
	}
	w.log.Info("guest answered", "kernel", hello.KernelRelease, "agent", hello.AgentVersion, "initMillis", hello.InitMillis, "portMillis", hello.PortMillis)
	return w.commit(func(next *plan.Record) { next.Answered(w.engine.clock.Now()) })
}

func (w *worker) doConfigure(ctx context.Context, _ plan.Step) error {
	b := w.recordNow().Boot
	entropy := make([]byte, entropyBytes)
	if _, err := rand.Read(entropy); err != nil {
		return fault.New(fault.Internal, "making entropy", err)
	}
	if err := w.session.client.Configure(ctx, configure(b, entropy, w.engine.clock.Now())); err != nil {
		return w.startError("configuring guest", err)
	}
	w.heard()
	return w.commit(func(next *plan.Record) { next.ConfiguredNow(w.engine.clock.Now()) })
}

func (w *worker) doStartWorkload(ctx context.Context, _ plan.Step) error {
	b := w.recordNow().Boot
	start, err := start(b)
	if err != nil {
		return w.failStart(err.Error(), false)
	}
	if err := w.commit(func(next *plan.Record) { next.SendingStart(w.engine.clock.Now()) }); err != nil {
		return err
	}
	w.session.attend()
	w.giveBoot() // the guest has booted; one that never answers must not keep others from it
	ctx, cancel := w.limit(ctx, answerTime)
	defer cancel()
	refused := (*guest.RefusedError)(nil)
	err = w.session.client.Start(ctx, start)
	switch {
	case err == nil:
	case errors.As(err, &refused), errors.Is(err, guest.ErrConflict):
		// The guest's own word that nothing was executed. For a one-shot the mark stays all the same: at most once.
		return w.refusedStart(b, err)
	default:
		return fault.New(fault.RuntimeStartFailed, "starting workload", err)
	}
	w.heard()
	if err := w.commit(func(next *plan.Record) { next.StartAccepted(w.engine.clock.Now()) }); err != nil {
		return err
	}
	r := w.recordNow()
	w.log.Info("workload started", "incarnation", b.Incarnation, "run", b.Run, "vmm", r.Timings.VMM, "kernel", r.Timings.Kernel, "guest", r.Timings.Guest)
	w.session.follow()
	return nil
}

// startError makes a failed start of a guest's refusal; everything else is for settle.
func (w *worker) startError(stage string, err error) error {
	if refused := (*guest.RefusedError)(nil); errors.As(err, &refused) {
		return w.failStart(stage+": "+refused.Message, false)
	}
	return fault.New(fault.RuntimeStartFailed, stage, err)
}

func (w *worker) doFailStart(ctx context.Context, step plan.Step) error {
	w.mu.Lock()
	over := w.observed == plan.Over
	w.mu.Unlock()
	message := step.Why
	if over {
		b := w.recordNow().Boot
		if ev, err := w.engine.config.Driver.Evidence(ctx, w.machineConfig(b), *b.Handle); err == nil {
			message += " (" + endInWords(ev) + ")"
		}
	}
	return w.failStart(message, !over)
}

// endInWords tells how a machine ended before its workload was started. No evidence at all means that its VMM was killed.
func endInWords(ev vmm.Evidence) string {
	words := string(ev.Cause)
	if ev.Cause == vmm.CauseUnknown {
		words = "its VMM was killed and left no word"
	}
	if ev.Detail != "" {
		words += ": " + ev.Detail
	}
	return words
}

// failStart writes down why the boot came to nothing, with the guest's last words.
func (w *worker) failStart(message string, quick bool) error {
	b := w.recordNow().Boot
	if words := console.Sanitise(w.consoleSince(b, wordsBytes), wordsBytes); words != "" {
		message += "; the console ends with: " + words
	}
	w.log.Warn("guest not started", "reason", fault.RuntimeStartFailed, "error", message, "incarnation", b.Incarnation, "run", b.Run)
	return w.startFailed(plan.FailedStart{Failure: plan.Failure{Reason: fault.RuntimeStartFailed, Message: message}, Quick: quick}, b)
}

// startFailed writes a failed start down with the end of its console.
func (w *worker) startFailed(f plan.FailedStart, b *plan.Boot) error {
	f.ConsoleTail, f.Jitter = w.consoleSince(b, tailBytes), mathrand.Float64()
	return w.commit(func(next *plan.Record) {
		next.StartFailed(f, w.engine.clock.Now())
		next.Counters.Retries++
	})
}

// consoleSince gives at most n bytes of the end of the console, none from before the boot.
func (w *worker) consoleSince(b *plan.Boot, n int) []byte {
	path := w.engine.paths.console(w.id)
	at, err := console.Read(path, 0, 0)
	if err != nil || at.Size <= b.ConsoleStart {
		return nil
	}
	var out []byte
	for offset := max(b.ConsoleStart, at.Size-int64(n)); len(out) < n; {
		c, err := console.Read(path, offset, n-len(out))
		if err != nil || len(c.Data) == 0 {
			break
		}
		out = append(out, c.Data...)
		offset = c.Offset + int64(len(c.Data))
	}
	return out
}

// limit is context.WithTimeout by the engine's clock.
func (w *worker) limit(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	t := w.engine.clock.NewTimer(d)
	go func() {
		defer t.Stop()
		select {
		case <-t.C():
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

// refusedStart ends an incarnation whose workload the guest would not run. Nothing was executed, but the start is on record as
// sent: a one-shot has had its one time.
func (w *worker) refusedStart(b *plan.Boot, err error) error {
	now := w.engine.clock.Now()
	exit := machine.Exit{
		Incarnation: b.Incarnation, Run: b.Run, Verdict: machine.Failed, At: now, Message: "the guest refused to start the workload: " + err.Error(),
		ConsoleTail: w.consoleSince(b, tailBytes),
	}
	if err := w.commit(func(next *plan.Record) { next.Concluded(exit, false, mathrand.Float64(), now) }); err != nil {
		return err
	}
	w.logEnd(exit)
	return nil
}
