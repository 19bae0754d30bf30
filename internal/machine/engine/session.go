package engine

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/guest"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/plan"
	"imp.dev/imp/internal/vmm"
)

const (
	// lastWords is how long a report that is on its way is waited for once the machine has ended.
	lastWords = time.Second
	// overPatience is how long a guest that says it is gone may be ahead of its machine.
	overPatience = 2 * time.Second
	// eagerProbe is the pace until a guest was ready for the first time.
	eagerProbe = time.Second
	// silentAfter questions in a row without an answer a guest is silent.
	silentAfter = 3
	// calmAsk is the pace of asking whether a guest is there at all, and hastyAsk the fastest where guests may be silent for a short
	// time only.
	calmAsk, hastyAsk = 10 * time.Second, 50 * time.Millisecond
)

// session is the living side of one run: the VMM, the guest's client, and the goroutines that listen to both.
type session struct {
	worker   *worker
	instance vmm.Instance
	client   guest.Client
	opened   time.Time
	life     context.Context
	end      context.CancelFunc
	group    sync.WaitGroup

	attending, waiting bool
	waited             chan struct{} // closed when the guest's report is there or will never be
}

// openSession takes a run that was launched or recovered. It listens to the machine from now on.
func (w *worker) openSession(ctx context.Context, instance vmm.Instance) {
	s := &session{worker: w, instance: instance, waited: make(chan struct{})}
	s.life, s.end = context.WithCancel(context.WithoutCancel(ctx))
	s.client = w.engine.config.Guest(func(ctx context.Context) (c net.Conn, err error) {
		c, err = instance.DialGuest(ctx)
		if errors.Is(err, vmm.ErrGone) {
			err = errors.Join(guest.ErrGone, err)
		}
		return c, err
	})
	w.session = s
	w.heard()
	s.opened = w.lastHeard()
	w.setObserved(plan.Alive)
	s.listen(func() {
		select {
		case <-instance.Done():
			w.setObserved(plan.Over)
		case <-s.life.Done():
		}
	})
}

func (s *session) listen(f func()) {
	s.group.Add(1)
	go func() {
		defer s.group.Done()
		f()
	}()
}

// follow listens to the workload: its end, and its readiness. Repeating it is free.
func (s *session) follow() {
	if s.waiting {
		return
	}
	s.waiting = true
	s.listen(s.waitForExit)
	s.listen(s.probeLoop)
}

func (s *session) waitForExit() {
	defer close(s.waited)
	w := s.worker
	for {
		exit, err := s.client.Wait(s.life)
		switch {
		case err == nil:
			w.mu.Lock()
			w.guestExit = &exit
			w.abortLocked()
			w.mu.Unlock()
			return
		case s.life.Err() != nil, errors.Is(err, guest.ErrGone):
			return
		}
		w.log.Warn("guest's exit could not be asked for", "error", err)
		if !s.pause(time.Second) {
			return
		}
	}
}

// stop asks the guest to end its workload, for as long as it takes until it has heard.
func (s *session) stop(grace time.Duration) {
	s.listen(func() {
		for {
			err := s.client.Stop(s.life, guestv1.Stop{GraceMillis: grace.Milliseconds()})
			if err == nil || s.life.Err() != nil || errors.Is(err, guest.ErrGone) {
				return
			}
			s.worker.log.Warn("guest could not be asked to stop", "error", err)
			if !s.pause(time.Second) {
				return
			}
		}
	})
}

func (s *session) pause(d time.Duration) bool {
	t := s.worker.engine.clock.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C():
		return true
	case <-s.life.Done():
		return false
	}
}

// attend asks from now on whether the guest is there: the start of its workload was sent. Repeating it is free.
func (s *session) attend() {
	if s.attending {
		return
	}
	s.attending = true
	s.listen(s.ask)
}

// ask asks whether the guest is there at all: one that has halted or hangs keeps its VMM. A guest that was heard of meanwhile, by its
// probe for example, is not asked. What follows from silence is the plan's to say; without a probe it shows on the readiness.
func (s *session) ask() {
	w, clk := s.worker, s.worker.engine.clock
	period := calmAsk
	if silence := w.engine.config.Limits.Silence; silence > 0 {
		period = max(hastyAsk, min(period, silence/(2*silentAfter)))
	}
	for unanswered := 0; ; {
		began := clk.Now()
		last := w.lastHeard()
		recent := last.After(s.opened) && clk.Since(last) < period/2
		switch {
		case recent || s.answers(period):
			unanswered = 0
		case s.life.Err() != nil:
			return
		default:
			unanswered++
		}
		if w.recordNow().Spec.Probe == nil {
			switch {
			case unanswered == 0:
				w.probed(true, "", "")
			case unanswered >= silentAfter:
				w.probed(false, machine.ReasonGuestSilent, fmt.Sprintf("the guest has not answered %d times in a row, each within %s", unanswered, period))
			}
		}
		if !s.pause(period - clk.Since(began)) {
			return
		}
	}
}

// probeLoop asks for readiness by the probe of the present Spec, which may change while the guest runs.
func (s *session) probeLoop() {
	w, clk := s.worker, s.worker.engine.clock
	began, failures, ready := clk.Now(), 0, false
	for {
		p := w.recordNow().Spec.Probe
		if p == nil {
			failures, ready = 0, true
			if !s.pause(calmAsk) {
				return
			}
			continue
		}
		ok, reason, message := s.probe(*p)
		switch {
		case s.life.Err() != nil:
			return
		case ok:
			failures, ready = 0, true
			w.probed(true, "", "")
		default:
			failures++
			patience := time.Duration(p.FailureThreshold-1) * p.Period
			if (ready && failures >= p.FailureThreshold) || (!ready && clk.Since(began) >= patience) {
				w.probed(false, reason, message)
			}
		}
		period := p.Period
		if !ready {
			period = min(period, eagerProbe)
		}
		if !s.pause(period) {
			return
		}
	}
}

// within gives a context of the session that ends after d by the engine's clock.
func (s *session) within(d time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(s.life)
	t := s.worker.engine.clock.NewTimer(d)
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

func (s *session) answers(within time.Duration) bool {
	ctx, cancel := s.within(within)
	defer cancel()
	if _, err := s.client.Hello(ctx); err != nil {
		return false
	}
	s.worker.heard()
	return true
}

func (s *session) probe(p machine.Probe) (ok bool, reason fault.Reason, message string) {
	ctx, cancel := s.within(p.Timeout + p.Period)
	defer cancel()
	r, err := s.client.Probe(ctx, guestv1.Probe{Port: p.Port, Path: p.Path, TimeoutMillis: p.Timeout.Milliseconds()})
	if err == nil {
		s.worker.heard()
	}
	switch {
	case err != nil:
		return false, machine.ReasonGuestSilent, "the guest could not be asked to probe: " + err.Error()
	case !r.Healthy:
		return false, machine.ReasonProbeFailing, r.Message
	}
	return true, "", ""
}

// probed notes a probe's answer where the workload runs.
func (w *worker) probed(ok bool, reason fault.Reason, message string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	b := w.record.Boot
	if b == nil || b.StartedAt == nil || b.Exit != nil {
		return
	}
	next := w.record.Clone()
	if next.Probed(ok, reason, message, w.engine.clock.Now()) {
		w.keepLocked(next)
	}
}

// heard notes that the guest has answered.
func (w *worker) heard() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.heardAt = w.engine.clock.Now()
}

func (w *worker) lastHeard() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.heardAt
}

func (w *worker) setObserved(v plan.VMM) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.observed = v
	if v == plan.Over {
		w.abortLocked()
	}
}

// awaitOver waits until the machine is known to have ended; false if it does not soon.
func (w *worker) awaitOver(ctx context.Context) bool {
	if w.session == nil {
		return true
	}
	t := w.engine.clock.NewTimer(overPatience)
	defer t.Stop()
	select {
	case <-w.session.instance.Done():
		w.setObserved(plan.Over)
		return true
	case <-t.C():
		return false
	case <-ctx.Done():
		return false
	}
}

// report gives the guest's exit; once the machine has ended it waits a moment for one that is on its way.
func (w *worker) report(ctx context.Context) *guestv1.Exit {
	if s := w.session; s != nil && s.waiting {
		t := w.engine.clock.NewTimer(lastWords)
		defer t.Stop()
		w.mu.Lock()
		over := w.observed == plan.Over
		w.mu.Unlock()
		if over {
			select {
			case <-s.waited:
			case <-t.C():
			case <-ctx.Done():
			}
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.guestExit
}

// closeSession lets go of the run; the VMM goes on.
func (w *worker) closeSession() {
	s := w.session
	if s == nil {
		return
	}
	w.session = nil
	s.end()
	_ = s.client.Close()
	s.group.Wait()
	_ = s.instance.Close()
}
