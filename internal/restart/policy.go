// Package restart decides whether, when and where a VM that ended starts again. It is pure: policy, history and time in, a
// decision out. The node asks it after each end, and again when the policy of a waiting VM is changed; the operator only acts
// on Elsewhere.
package restart

import "time"

// Mode says who starts a failed VM again.
type Mode string

// Modes; "" is InPlace.
const (
	InPlace    Mode = "in-place"   // its node, with its disk
	Reschedule Mode = "reschedule" // the operator, on another node if one has room, with a fresh disk
)

// OnExhaustion says what follows when the retries are used up.
type OnExhaustion string

// What follows; "" is Fail.
const (
	Fail        OnExhaustion = "fail"         // the VM has failed for good
	ManualReset OnExhaustion = "manual-reset" // it waits for Reset
	CoolDown    OnExhaustion = "cool-down"    // it is tried again by itself after Policy.CoolDown, with all its retries
)

// Policy of a persistent VM.
type Policy struct {
	Mode Mode `json:"mode,omitempty"`
	// MaxRetries counts failed starts of the workload; nil is no limit, 0 is never.
	MaxRetries   *int32        `json:"maxRetries,omitempty"`
	InitialDelay time.Duration `json:"initialDelay"`
	MaxDelay     time.Duration `json:"maxDelay"`
	OnExhaustion OnExhaustion  `json:"onExhaustion,omitempty"`
	CoolDown     time.Duration `json:"coolDown,omitempty"`
}

// Default is the policy of a VM that has none: in place, 10 s doubling to 5 min, no limit (docs/contract.md).
func Default() Policy {
	return Policy{Mode: InPlace, InitialDelay: 10 * time.Second, MaxDelay: 5 * time.Minute, OnExhaustion: Fail, CoolDown: time.Hour}
}

// OrDefault gives p with Default in the place of what it leaves open.
func (p Policy) OrDefault() Policy {
	d := Default()
	if p.Mode == "" {
		p.Mode = d.Mode
	}
	if p.InitialDelay <= 0 {
		p.InitialDelay = d.InitialDelay
	}
	if p.MaxDelay < p.InitialDelay {
		p.MaxDelay = max(p.InitialDelay, d.MaxDelay)
	}
	if p.OnExhaustion == "" {
		p.OnExhaustion = d.OnExhaustion
	}
	if p.CoolDown <= 0 {
		p.CoolDown = d.CoolDown
	}
	return p
}

// minHealthy is the least time a workload must have run to be forgiven its earlier failures.
const minHealthy = 10 * time.Minute

// ResetAfter is how long a workload must run until its failures are forgotten.
func (p Policy) ResetAfter() time.Duration { return max(p.OrDefault().MaxDelay, minHealthy) }

// used says that n counted failures are more than the policy allows.
func (p Policy) used(n int32) bool { return p.MaxRetries != nil && n > *p.MaxRetries }

// jitterShare is the largest part of a delay that jitter changes: enough to part VMs that failed together.
const jitterShare = 0.1

// backoff is InitialDelay doubled n-1 times, at most MaxDelay, and spread by jitter in [0,1) without leaving those two.
func (p Policy) backoff(n int32, jitter float64) time.Duration {
	d := p.InitialDelay
	for i := int32(1); i < n && d < p.MaxDelay; i++ {
		d *= 2
	}
	spread := time.Duration(jitterShare * jitter * float64(min(d, p.MaxDelay)))
	if d+spread > p.MaxDelay {
		return max(p.MaxDelay-spread, p.InitialDelay)
	}
	return d + spread
}

// History of a VM's failures. It lives in the record and in the object's status.restart, and travels with an assignment.
type History struct {
	// Attempts is the number of counted failures in a row.
	Attempts int32 `json:"attempts,omitempty"`
	// StartFailures is the number of failures in a row before a workload was started; they back off but are never counted.
	StartFailures int32      `json:"startFailures,omitempty"`
	LastFailureAt *time.Time `json:"lastFailureAt,omitempty"`
	NextTryAt     *time.Time `json:"nextTryAt,omitempty"`
	// ExhaustedAt is when the retries were used up; nil while there are some.
	ExhaustedAt *time.Time `json:"exhaustedAt,omitempty"`
	// Elsewhere says that the next try is not its node's: the operator takes the VM back and places it at NextTryAt.
	Elsewhere bool `json:"elsewhere,omitempty"`
	// Reset is the last value that Reset acted on.
	Reset string `json:"reset,omitempty"`
}

// Tried is the history once a try has begun: the wait is over, and a cool-down has given all retries back.
func (h History) Tried() History {
	h.NextTryAt, h.Elsewhere = nil, false
	if h.ExhaustedAt != nil {
		h.ExhaustedAt, h.Attempts = nil, 0
	}
	return h
}

// WithReset forgets all failures when value is one that was not acted on yet. It says whether it did.
func (h History) WithReset(value string) (History, bool) {
	if value == "" || value == h.Reset {
		return h, false
	}
	return History{Reset: value}, true
}
