package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Lifecycle says what the end of a workload means.
// +kubebuilder:validation:Enum=ephemeral;persistent
type Lifecycle string

// Lifecycles.
const (
	LifecycleEphemeral  Lifecycle = "ephemeral"
	LifecyclePersistent Lifecycle = "persistent"
)

// ClassReference names an ImpVMClass.
type ClassReference struct {
	Name string `json:"name"`
}

// EnvVar is one environment variable of the workload.
type EnvVar struct {
	Name string `json:"name"`
	// Value is passed as it is: nothing is expanded.
	// +optional
	Value string `json:"value,omitempty"`
}

// ImpVMSpec is what a user wants.
type ImpVMSpec struct {
	// ClassRef names the ImpVMClass that gives the size. Without one, or while it does not exist, the VM waits with reason InvalidSpec.
	// +optional
	ClassRef *ClassReference `json:"classRef,omitempty"`
	// Image is an OCI image reference.
	Image string `json:"image"`
	// ImagePullPolicy: Always, IfNotPresent or Never. Default: Always for tag latest or none, else IfNotPresent.
	// +optional
	ImagePullPolicy corev1.PullPolicy `json:"imagePullPolicy,omitempty"`
	// ImagePullSecrets are Secrets of type kubernetes.io/dockerconfigjson in the VM's namespace.
	// +optional
	ImagePullSecrets []corev1.LocalObjectReference `json:"imagePullSecrets,omitempty"`
	// Command replaces the image's Entrypoint and drops its Cmd.
	// +optional
	Command []string `json:"command,omitempty"`
	// Args replace the image's Cmd.
	// +optional
	Args []string `json:"args,omitempty"`
	// +optional
	Env []EnvVar `json:"env,omitempty"`
	// +optional
	WorkingDir string `json:"workingDir,omitempty"`
	// DataPaths are absolute paths in the guest that live on the VM's own disk as a real file system instead of the overlay.
	// +optional
	DataPaths []string `json:"dataPaths,omitempty"`
	// Lifecycle: ephemeral runs the workload at most once; persistent restarts it by policy.
	// +kubebuilder:default=ephemeral
	// +optional
	Lifecycle Lifecycle `json:"lifecycle,omitempty"`
	// NodeName pins the VM to one node.
	// +optional
	NodeName string `json:"nodeName,omitempty"`
	// +optional
	NodeSelector map[string]string `json:"nodeSelector,omitempty"`
	// +optional
	Tolerations []corev1.Toleration `json:"tolerations,omitempty"`
	// TerminationGracePeriodSeconds between the stop signal and the kill; 0 kills at once.
	// +kubebuilder:default=30
	// +optional
	TerminationGracePeriodSeconds *int64 `json:"terminationGracePeriodSeconds,omitempty"`
	// ActiveDeadlineSeconds after it was placed on a node the VM is ended with DeadlineExceeded.
	// +optional
	ActiveDeadlineSeconds *int64 `json:"activeDeadlineSeconds,omitempty"`
	// TTLSecondsAfterFinished after its end the object is deleted.
	// +optional
	TTLSecondsAfterFinished *int32 `json:"ttlSecondsAfterFinished,omitempty"`
}

// Phase is a summary for the eye. Code reads conditions.
// +kubebuilder:validation:Enum=Starting;Running;Stopping;Stopped;Suspended;Succeeded;Failed;Unknown
type Phase string

// Phases.
const (
	PhaseStarting  Phase = "Starting"
	PhaseRunning   Phase = "Running"
	PhaseStopping  Phase = "Stopping"
	PhaseStopped   Phase = "Stopped"
	PhaseSuspended Phase = "Suspended"
	PhaseSucceeded Phase = "Succeeded"
	PhaseFailed    Phase = "Failed"
	PhaseUnknown   Phase = "Unknown"
)

// Resources is the class as the operator resolved it when it placed the VM, so that agents watch no classes.
type Resources struct {
	VCPU      int32 `json:"vcpu"`
	MemoryMiB int64 `json:"memoryMiB"`
	DiskGiB   int64 `json:"diskGiB"`
	// Arch in Go's spelling.
	Arch string `json:"arch"`
	// OverheadMiB the VMM takes beside the guest's memory on this node.
	OverheadMiB int64 `json:"overheadMiB,omitempty"`
	// ReadinessProbe follows the class at once; the sizes do not.
	// +optional
	ReadinessProbe *ReadinessProbe `json:"readinessProbe,omitempty"`
}

// Release is the operator's order to give a VM up: stop it, remove everything of it, and say so in releasedAssignment.
type Release struct {
	// Assignment that is to be given up.
	Assignment int64 `json:"assignment"`
	// Reason in CamelCase: Deleted.
	Reason string `json:"reason"`
}

// RestartStatus is the history of a VM's failures.
type RestartStatus struct {
	// Attempts is the number of counted failures in a row.
	// +optional
	Attempts int32 `json:"attempts,omitempty"`
	// +optional
	LastFailureAt *metav1.MicroTime `json:"lastFailureAt,omitempty"`
	// NextTryAt is when the next start is due.
	// +optional
	NextTryAt *metav1.MicroTime `json:"nextTryAt,omitempty"`
	// +optional
	ExhaustedAt *metav1.MicroTime `json:"exhaustedAt,omitempty"`
}

// LastFailure is the latest end of an incarnation that was not as it should be.
type LastFailure struct {
	Reason      string           `json:"reason"`
	Message     string           `json:"message"`
	Time        metav1.MicroTime `json:"time"`
	Incarnation int64            `json:"incarnation"`
	// +optional
	ExitCode *int32 `json:"exitCode,omitempty"`
}

// Timings of the latest start, in milliseconds by stage.
type Timings struct {
	PullMillis     int64 `json:"pullMillis"`
	DiskMillis     int64 `json:"diskMillis"`
	NetworkMillis  int64 `json:"networkMillis"`
	VMMMillis      int64 `json:"vmmMillis"`
	KernelMillis   int64 `json:"kernelMillis"`
	GuestMillis    int64 `json:"guestMillis"`
	WorkloadMillis int64 `json:"workloadMillis"`
}

// ImpVMStatus is what is. Each field has one writer (see docs/architecture.md).
type ImpVMStatus struct {
	// Phase is for the eye.
	// +optional
	Phase Phase `json:"phase,omitempty"`
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// NodeName is the node the VM is bound to. Written by imp-place.
	// +optional
	NodeName string `json:"nodeName,omitempty"`
	// Assignment grows with every binding: the fencing token. Written by imp-place.
	// +optional
	Assignment int64 `json:"assignment,omitempty"`
	// PlacedAt is when it was bound. Written by imp-place.
	// +optional
	PlacedAt *metav1.Time `json:"placedAt,omitempty"`
	// Release orders the node to give the VM up. Written by imp-place.
	// +optional
	Release *Release `json:"release,omitempty"`
	// Resources the VM was placed with. Written by imp-place.
	// +optional
	Resources *Resources `json:"resources,omitempty"`

	// ReportedAssignment is the assignment that the agent's part of this status speaks of. Written by imp-agent, as all below.
	// +optional
	ReportedAssignment int64 `json:"reportedAssignment,omitempty"`
	// ReleasedAssignment: nothing of this or an older assignment is left on its node.
	// +optional
	ReleasedAssignment int64 `json:"releasedAssignment,omitempty"`
	// ObservedGeneration of the spec the node works by.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Incarnation counts the boots of the guest in this assignment.
	// +optional
	Incarnation int64 `json:"incarnation,omitempty"`
	// Run counts the VMM processes of this incarnation.
	// +optional
	Run int64 `json:"run,omitempty"`
	// RestartCount is the number of boots after the first.
	// +optional
	RestartCount int64 `json:"restartCount,omitempty"`
	// +optional
	Restart *RestartStatus `json:"restart,omitempty"`
	// ExitCode of a finished VM's workload, where the guest told one.
	// +optional
	ExitCode *int32 `json:"exitCode,omitempty"`
	// +optional
	LastFailure *LastFailure `json:"lastFailure,omitempty"`
	// ConsoleTail is the end of the serial console at the latest end: at most 1 KiB of printable UTF-8.
	// +optional
	ConsoleTail string `json:"consoleTail,omitempty"`
	// StartedAt is when the current workload was started.
	// +optional
	StartedAt *metav1.MicroTime `json:"startedAt,omitempty"`
	// +optional
	FinishedAt *metav1.MicroTime `json:"finishedAt,omitempty"`
	// ImageDigest that was pinned at the first start.
	// +optional
	ImageDigest string `json:"imageDigest,omitempty"`
	// DiskGeneration counts the private disks made for this VM.
	// +optional
	DiskGeneration int64 `json:"diskGeneration,omitempty"`
	// +optional
	Timings *Timings `json:"timings,omitempty"`
}

// ImpVM is a microVM: a Linux guest on its own kernel, booted from an OCI image.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:path=impvms,singular=impvm,shortName=impvm
// +kubebuilder:selectablefield:JSONPath=`.status.nodeName`
// +kubebuilder:printcolumn:name="Phase",type=string,JSONPath=`.status.phase`
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.status.nodeName`
// +kubebuilder:printcolumn:name="Restarts",type=integer,JSONPath=`.status.restartCount`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Image",type=string,JSONPath=`.spec.image`,priority=1
// +kubebuilder:printcolumn:name="Exit",type=integer,JSONPath=`.status.exitCode`,priority=1
type ImpVM struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              ImpVMSpec `json:"spec"`
	// +optional
	Status ImpVMStatus `json:"status,omitempty"`
}

// ImpVMList is a list of ImpVM.
// +kubebuilder:object:root=true
type ImpVMList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []ImpVM `json:"items"`
}
