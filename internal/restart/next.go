package restart

import "time"

// Kind of an end, as far as restarting cares.
type Kind string

// Kinds of ends. Only Failure is counted against MaxRetries.
const (
	Reboot       Kind = "Reboot"       // the guest asked for it: at once
	HostBoot     Kind = "HostBoot"     // the host was booted under it: at once
	Ended        Kind = "Ended"        // exit 0, power-off: after InitialDelay
	Failure      Kind = "Failure"      // exit not 0, panic, killed, out of memory, hung: after the backoff, counted
	StartFailure Kind = "StartFailure" // before the workload was started: after a backoff of its own, never counted
)

// End of one incarnation.
type End struct {
	Kind Kind
	// Ran is how long the workload ran; 0 if it was never started.
	Ran time.Duration
	// Jitter in [0,1) parts VMs that failed together. It is drawn by the caller, once for each end.
	Jitter float64
}

// Decision about a VM that ended. History holds NextTryAt unless there is no next try to wait for.
type Decision struct {
	History History
	// Exhausted says that the retries are used up; Terminal that this is the VM's end.
	Exhausted, Terminal bool
	// Delay from now to the next try; 0 is at once.
	Delay time.Duration
	// Counted says that this end used up one of MaxRetries.
	Counted bool
	// Why is one line for a human.
	Why string
}

// Next decides what follows an end at now. It never changes its arguments.
func Next(p Policy, h History, end End, now time.Time) Decision {
	p = p.OrDefault()
	if h.ExhaustedAt != nil && p.OnExhaustion != CoolDown {
		return p.exhausted(h, now)
	}
	h = h.Tried()
	if end.Ran >= p.ResetAfter() {
		h.Attempts = 0
	}
	if end.Kind != StartFailure {
		h.StartFailures = 0
	}
	switch end.Kind {
	case Reboot:
		return h.again(now, 0, "the guest rebooted")
	case HostBoot:
		return h.again(now, 0, "the host was booted")
	case Ended:
		return h.again(now, p.backoff(1, end.Jitter), "the workload ended")
	case StartFailure:
		h.StartFailures++
		h.LastFailureAt = &now
		h.Elsewhere = p.Mode == Reschedule
		return h.again(now, p.backoff(h.StartFailures, end.Jitter), "the workload could not be started")
	default: // a Failure, and any Kind a newer version might invent: counting errs on the quiet side
		h.Attempts++
		h.LastFailureAt = &now
		d := p.waiting(h, end.Jitter, now)
		d.Counted = true
		return d
	}
}

// waiting decides about a VM whose last end was a counted failure.
func (p Policy) waiting(h History, jitter float64, now time.Time) Decision {
	if p.used(h.Attempts) {
		return p.exhausted(h, now)
	}
	h.Elsewhere = p.Mode == Reschedule
	return h.again(now, p.backoff(h.Attempts, jitter), "the workload failed")
}

// exhausted is what follows when the retries are used up, since now if they were not before.
func (p Policy) exhausted(h History, now time.Time) Decision {
	if h.ExhaustedAt == nil {
		h.ExhaustedAt = &now
	}
	h.NextTryAt, h.Elsewhere = nil, false
	d := Decision{History: h, Exhausted: true, Why: "retries are used up"}
	switch p.OnExhaustion {
	case CoolDown:
		at := h.ExhaustedAt.Add(p.CoolDown)
		d.History.NextTryAt, d.Delay = &at, max(at.Sub(now), 0)
	case ManualReset:
	default:
		d.Terminal = true
	}
	return d
}

func (h History) again(now time.Time, delay time.Duration, why string) Decision {
	at := now.Add(delay)
	h.NextTryAt = &at
	return Decision{History: h, Delay: delay, Why: why}
}

// Revise decides anew about a VM that waits, after its policy was changed: its next try may come sooner or later, retries may be
// used up now, or there may be some again. One that does not wait for a counted failure keeps its history.
func Revise(p Policy, h History, now time.Time) Decision {
	p = p.OrDefault()
	unchanged := Decision{History: h, Exhausted: h.ExhaustedAt != nil, Why: "nothing waits for the policy"}
	if h.NextTryAt != nil {
		unchanged.Delay = max(h.NextTryAt.Sub(now), 0)
	}
	if h.Attempts == 0 || h.LastFailureAt == nil || (h.NextTryAt == nil && h.ExhaustedAt == nil) || h.StartFailures > 0 {
		return unchanged
	}
	if p.used(h.Attempts) {
		return p.exhausted(h, now)
	}
	h.ExhaustedAt = nil
	h.Elsewhere = p.Mode == Reschedule
	wait := max(h.LastFailureAt.Add(p.backoff(h.Attempts, 0)).Sub(now), 0)
	return h.again(now, wait, "the policy was changed")
}
