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

// minHealthy is the least time a workload must have run to be forgiven its earlier failures.
const minHealthy = 10 * time.Minute

// End of one incarnation.
type End struct {
	Kind Kind
	// Ran is how long the workload ran; 0 if it was never started.
	Ran time.Duration
}

// Decision about a VM that ended. History holds NextTryAt, or ExhaustedAt when there is to be no next try.
type Decision struct {
	History History
	// Exhausted says that the policy allows no further try.
	Exhausted bool
	// Delay from now to the next try; 0 is at once.
	Delay time.Duration
	// Counted says that this end used up one of MaxRetries.
	Counted bool
	// Why is one line for a human.
	Why string
}

// OrDefault gives p, or Default for the zero policy.
func (p Policy) OrDefault() Policy {
	if p == (Policy{}) {
		return Default()
	}
	if p.InitialDelay <= 0 {
		p.InitialDelay = Default().InitialDelay
	}
	if p.MaxDelay < p.InitialDelay {
		p.MaxDelay = max(p.InitialDelay, Default().MaxDelay)
	}
	return p
}

// ResetAfter is how long a workload must run until its failures are forgotten.
func (p Policy) ResetAfter() time.Duration { return max(p.OrDefault().MaxDelay, minHealthy) }

// Next decides what follows an end at now. It never changes its arguments.
func Next(p Policy, h History, end End, now time.Time) Decision {
	p = p.OrDefault()
	if h.ExhaustedAt != nil {
		return Decision{History: h, Exhausted: true, Why: "retries were used up earlier"}
	}
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
		return h.again(now, p.InitialDelay, "the workload ended")
	case StartFailure:
		h.StartFailures++
		h.LastFailureAt = &now
		return h.again(now, p.backoff(h.StartFailures), "the workload could not be started")
	default:
		return p.count(h, now)
	}
}

// count is Next for a Failure, and for any Kind a newer version might invent: counting errs on the quiet side.
func (p Policy) count(h History, now time.Time) Decision {
	h.Attempts++
	h.LastFailureAt = &now
	if p.MaxRetries != nil && h.Attempts > *p.MaxRetries {
		h.ExhaustedAt = &now
		h.NextTryAt = nil
		return Decision{History: h, Exhausted: true, Counted: true, Why: "retries are used up"}
	}
	d := h.again(now, p.backoff(h.Attempts), "the workload failed")
	d.Counted = true
	return d
}

func (h History) again(now time.Time, delay time.Duration, why string) Decision {
	at := now.Add(delay)
	h.NextTryAt = &at
	return Decision{History: h, Delay: delay, Why: why}
}

// backoff is InitialDelay doubled n-1 times, at most MaxDelay.
func (p Policy) backoff(n int32) time.Duration {
	d := p.InitialDelay
	for i := int32(1); i < n && d < p.MaxDelay; i++ {
		d *= 2
	}
	return min(d, p.MaxDelay)
}
