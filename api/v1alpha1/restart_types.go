package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// RestartMode says who starts a failed VM again.
// +kubebuilder:validation:Enum=in-place;reschedule
type RestartMode string

// Restart modes.
const (
	RestartInPlace    RestartMode = "in-place"   // its node, with its disk; works while the API server is away
	RestartReschedule RestartMode = "reschedule" // the operator, on another node if one has room, with a fresh disk
)

// OnExhaustion says what follows when the retries are used up.
// +kubebuilder:validation:Enum=fail;manual-reset;cool-down
type OnExhaustion string

// What follows used-up retries.
const (
	OnExhaustionFail        OnExhaustion = "fail"         // the VM has failed for good
	OnExhaustionManualReset OnExhaustion = "manual-reset" // it waits for a new value of the annotation imp.dev/restart-reset
	OnExhaustionCoolDown    OnExhaustion = "cool-down"    // it is tried again by itself after coolDownPeriod, with all its retries
)

// RestartBackoff is how long a failed VM waits, and how often.
//
// +kubebuilder:validation:XValidation:rule="!has(self.maxDelay) || !self.maxDelay.matches('^([0-9]{1,9}(ms|s|m|h))+$') || (has(self.initialDelay) && !self.initialDelay.matches('^([0-9]{1,9}(ms|s|m|h))+$')) || duration(has(self.initialDelay) ? self.initialDelay : '10s') <= duration(self.maxDelay)",fieldPath=.maxDelay,message="must not be less than initialDelay, which is 10s where it is absent"
type RestartBackoff struct {
	// MaxRetries counts failures of the workload in a row: absent is no limit, 0 is never. Starts that fail before the workload
	// runs are retried with the same delays and never count.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000000
	// +optional
	MaxRetries *int32 `json:"maxRetries,omitempty"`
	// InitialDelay before the first retry, doubled for each after it; absent is 10s.
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="self.matches('^([0-9]{1,9}(ms|s|m|h))+$') && duration(self) >= duration('1s') && duration(self) <= duration('24h')",message="must be a duration from 1s to 24h, like 10s or 1m30s"
	// +optional
	InitialDelay *metav1.Duration `json:"initialDelay,omitempty"`
	// MaxDelay bounds the doubling; absent is 5m, or initialDelay if that is more.
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="self.matches('^([0-9]{1,9}(ms|s|m|h))+$') && duration(self) >= duration('1s') && duration(self) <= duration('24h')",message="must be a duration from 1s to 24h, like 5m"
	// +optional
	MaxDelay *metav1.Duration `json:"maxDelay,omitempty"`
}

// RestartPolicy says whether, when and where a persistent VM starts again after it failed. What is absent has the default:
// in-place, 10s doubling to 5m, without limit.
//
// +kubebuilder:validation:XValidation:rule="!has(self.onExhaustion) || (has(self.backoff) && has(self.backoff.maxRetries))",fieldPath=.onExhaustion,message="needs backoff.maxRetries: without a limit retries are never used up"
// +kubebuilder:validation:XValidation:rule="!has(self.coolDownPeriod) || (has(self.onExhaustion) && self.onExhaustion == 'cool-down')",fieldPath=.coolDownPeriod,message="belongs to onExhaustion: cool-down"
type RestartPolicy struct {
	// Mode: in-place (default) or reschedule.
	// +optional
	Mode RestartMode `json:"mode,omitempty"`
	// +optional
	Backoff *RestartBackoff `json:"backoff,omitempty"`
	// OnExhaustion: fail (default), manual-reset or cool-down.
	// +optional
	OnExhaustion OnExhaustion `json:"onExhaustion,omitempty"`
	// CoolDownPeriod after which a VM with onExhaustion cool-down is tried again; absent is 1h.
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="self.matches('^([0-9]{1,9}(ms|s|m|h))+$') && duration(self) >= duration('1s') && duration(self) <= duration('720h')",message="must be a duration from 1s to 720h, like 30m"
	// +optional
	CoolDownPeriod *metav1.Duration `json:"coolDownPeriod,omitempty"`
}

// DesiredState is what a user wants a persistent VM to do.
// +kubebuilder:validation:Enum=Running;Stopped;Suspended;ScaleToZero
type DesiredState string

// Desired states. Suspended and ScaleToZero are reserved: the API server refuses them for now.
const (
	DesiredRunning DesiredState = "Running"
	DesiredStopped DesiredState = "Stopped"
)

// Hold is the operator's order to a node to keep a VM stopped, whatever its desiredState says.
type Hold struct {
	// Reason in CamelCase: Evacuated.
	Reason string `json:"reason"`
	// +kubebuilder:validation:MaxLength=1024
	Message string `json:"message"`
}

// RestartStatus is the history of a VM's failures. It travels with the VM from node to node.
type RestartStatus struct {
	// Attempts is the number of counted failures in a row.
	// +optional
	Attempts int32 `json:"attempts,omitempty"`
	// StartFailures is the number of failures in a row before the workload was started; they back off and never count.
	// +optional
	StartFailures int32 `json:"startFailures,omitempty"`
	// +optional
	LastFailureAt *metav1.MicroTime `json:"lastFailureAt,omitempty"`
	// NextTryAt is when the next start is due.
	// +optional
	NextTryAt *metav1.MicroTime `json:"nextTryAt,omitempty"`
	// ExhaustedAt is when the retries were used up; absent while there are some.
	// +optional
	ExhaustedAt *metav1.MicroTime `json:"exhaustedAt,omitempty"`
	// Elsewhere says that the node does not try again: the operator takes the VM back and places it at nextTryAt.
	// +optional
	Elsewhere bool `json:"elsewhere,omitempty"`
	// Reset is the value of the annotation imp.dev/restart-reset that was acted on last.
	// +kubebuilder:validation:MaxLength=253
	// +optional
	Reset string `json:"reset,omitempty"`
}
