// Package restart decides whether and when a VM that ended starts again on its node. It is pure: policy, history and
// time in, a decision out.
package restart

import "time"

// Policy of a persistent VM.
type Policy struct {
	// MaxRetries counts failed starts of the workload; nil is no limit, 0 is never.
	MaxRetries   *int32        `json:"maxRetries,omitempty"`
	InitialDelay time.Duration `json:"initialDelay"`
	MaxDelay     time.Duration `json:"maxDelay"`
}

// Default is the policy of a VM that has none: in place, 10 s doubling to 5 min, no limit (docs/contract.md).
func Default() Policy {
	return Policy{InitialDelay: 10 * time.Second, MaxDelay: 5 * time.Minute}
}

// History of a VM's failures. It lives in the record and in the object's status.restart, and travels with an assignment.
type History struct {
	// Attempts is the number of counted failures in a row.
	Attempts int32 `json:"attempts,omitempty"`
	// StartFailures is the number of failures in a row before a workload was started; they back off but are never counted.
	StartFailures int32      `json:"startFailures,omitempty"`
	LastFailureAt *time.Time `json:"lastFailureAt,omitempty"`
	NextTryAt     *time.Time `json:"nextTryAt,omitempty"`
	ExhaustedAt   *time.Time `json:"exhaustedAt,omitempty"`
}
