package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
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
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="!format.dns1123Subdomain().validate(self).hasValue()",message="must be the name of an ImpVMClass: lower-case letters, digits, '-' and '.'"
	Name string `json:"name"`
}

// NetworkReference names an ImpNetwork.
type NetworkReference struct {
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="!format.dns1123Subdomain().validate(self).hasValue()",message="must be the name of an ImpNetwork in the VM's namespace: lower-case letters, digits, '-' and '.'"
	Name string `json:"name"`
}

// EnvVar is one environment variable of the workload.
type EnvVar struct {
	// Name is any printable ASCII but '='.
	// +kubebuilder:validation:MaxLength=1024
	// +kubebuilder:validation:XValidation:rule="self.matches('^[ -<>-~]+$')",message="must be one or more printable ASCII characters other than '='"
	Name string `json:"name"`
	// Value is passed as it is: nothing is expanded.
	// +kubebuilder:validation:MaxLength=131072
	// +kubebuilder:validation:Pattern=`^[^\x00]*$`
	// +optional
	Value string `json:"value,omitempty"`
}

// ImpVMSpec is what a user wants.
//
// What may be edited: of an ephemeral VM terminationGracePeriodSeconds, ttlSecondsAfterFinished, and classRef while it is
// not bound to a node. Of a persistent VM all but lifecycle, nodeName, networkRef, address and dataPaths: image, imagePullPolicy, imagePullSecrets, command, args, env,
// workingDir and classRef act at the next start (condition RestartRequired meanwhile), nodeSelector and tolerations at
// the next placement, the rest at once.
//
// +kubebuilder:validation:XValidation:rule="self.lifecycle == oldSelf.lifecycle",fieldPath=.lifecycle,message="cannot be changed; delete the ImpVM and create it anew"
// +kubebuilder:validation:XValidation:rule=`(has(self.nodeName) ? self.nodeName : "") == (has(oldSelf.nodeName) ? oldSelf.nodeName : "")`,fieldPath=.nodeName,message="cannot be changed: the VM's disk belongs to its node; delete the ImpVM and create it anew"
// +kubebuilder:validation:XValidation:rule="has(self.dataPaths) == has(oldSelf.dataPaths) && (!has(self.dataPaths) || self.dataPaths == oldSelf.dataPaths)",fieldPath=.dataPaths,message="cannot be changed: what was written below them would be hidden; delete the ImpVM and create it anew"
// +kubebuilder:validation:XValidation:rule="self.lifecycle != 'ephemeral' || self.image == oldSelf.image",fieldPath=.image,message="cannot be changed on an ephemeral VM; create a new ImpVM"
// +kubebuilder:validation:XValidation:rule="self.lifecycle != 'ephemeral' || (has(self.imagePullPolicy) == has(oldSelf.imagePullPolicy) && (!has(self.imagePullPolicy) || self.imagePullPolicy == oldSelf.imagePullPolicy))",fieldPath=.imagePullPolicy,message="cannot be changed on an ephemeral VM; create a new ImpVM"
// +kubebuilder:validation:XValidation:rule="self.lifecycle != 'ephemeral' || (has(self.imagePullSecrets) == has(oldSelf.imagePullSecrets) && (!has(self.imagePullSecrets) || self.imagePullSecrets == oldSelf.imagePullSecrets))",fieldPath=.imagePullSecrets,message="cannot be changed on an ephemeral VM; create a new ImpVM"
// +kubebuilder:validation:XValidation:rule="self.lifecycle != 'ephemeral' || (has(self.command) == has(oldSelf.command) && (!has(self.command) || self.command == oldSelf.command))",fieldPath=.command,message="cannot be changed on an ephemeral VM; create a new ImpVM"
// +kubebuilder:validation:XValidation:rule="self.lifecycle != 'ephemeral' || (has(self.args) == has(oldSelf.args) && (!has(self.args) || self.args == oldSelf.args))",fieldPath=.args,message="cannot be changed on an ephemeral VM; create a new ImpVM"
// +kubebuilder:validation:XValidation:rule="self.lifecycle != 'ephemeral' || (has(self.env) == has(oldSelf.env) && (!has(self.env) || self.env == oldSelf.env))",fieldPath=.env,message="cannot be changed on an ephemeral VM; create a new ImpVM"
// +kubebuilder:validation:XValidation:rule=`self.lifecycle != 'ephemeral' || (has(self.workingDir) ? self.workingDir : "") == (has(oldSelf.workingDir) ? oldSelf.workingDir : "")`,fieldPath=.workingDir,message="cannot be changed on an ephemeral VM; create a new ImpVM"
// +kubebuilder:validation:XValidation:rule="self.lifecycle != 'ephemeral' || (has(self.nodeSelector) == has(oldSelf.nodeSelector) && (!has(self.nodeSelector) || self.nodeSelector == oldSelf.nodeSelector))",fieldPath=.nodeSelector,message="cannot be changed on an ephemeral VM; create a new ImpVM"
// +kubebuilder:validation:XValidation:rule="self.lifecycle != 'ephemeral' || (has(self.tolerations) == has(oldSelf.tolerations) && (!has(self.tolerations) || self.tolerations == oldSelf.tolerations))",fieldPath=.tolerations,message="cannot be changed on an ephemeral VM; create a new ImpVM"
// +kubebuilder:validation:XValidation:rule="self.lifecycle != 'ephemeral' || (has(self.activeDeadlineSeconds) == has(oldSelf.activeDeadlineSeconds) && (!has(self.activeDeadlineSeconds) || self.activeDeadlineSeconds == oldSelf.activeDeadlineSeconds))",fieldPath=.activeDeadlineSeconds,message="cannot be changed on an ephemeral VM; create a new ImpVM"
// +kubebuilder:validation:XValidation:rule="has(self.networkRef) == has(oldSelf.networkRef) && (!has(self.networkRef) || self.networkRef.name == oldSelf.networkRef.name)",fieldPath=.networkRef,message="cannot be changed: the VM's address belongs to its network; delete the ImpVM and create it anew"
// +kubebuilder:validation:XValidation:rule=`(has(self.address) ? self.address : "") == (has(oldSelf.address) ? oldSelf.address : "")`,fieldPath=.address,message="cannot be changed; delete the ImpVM and create it anew"
// +kubebuilder:validation:XValidation:rule="self.lifecycle != 'ephemeral' || !has(self.restartPolicy)",fieldPath=.restartPolicy,message="must be absent on an ephemeral VM: its workload runs at most once; set lifecycle: persistent"
// +kubebuilder:validation:XValidation:rule="self.lifecycle != 'ephemeral' || !has(self.desiredState) || self.desiredState == 'Running'",fieldPath=.desiredState,message="must be Running or absent on an ephemeral VM, which cannot start again: delete it to stop it"
// +kubebuilder:validation:XValidation:rule=`!has(self.address) || self.address == "" || has(self.networkRef)`,fieldPath=.address,message="is an address of a network: set networkRef too, or leave it out"
type ImpVMSpec struct {
	// ClassRef names the ImpVMClass that gives the size. Without one, or while it does not exist, the VM waits with reason InvalidSpec.
	// +optional
	ClassRef *ClassReference `json:"classRef,omitempty"`
	// Image is an OCI image reference: [REGISTRY[:PORT]/]REPOSITORY[:TAG][@sha256:DIGEST].
	// +kubebuilder:validation:MaxLength=1024
	// +kubebuilder:validation:XValidation:rule="self.matches('^(([A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?([.][A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*|\\\\[[0-9a-fA-F:]+\\\\])(:[0-9]{1,5})?/)?[a-z0-9]+(([.]|_{1,2}|-+)[a-z0-9]+)*(/[a-z0-9]+(([.]|_{1,2}|-+)[a-z0-9]+)*)*(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[a-f0-9]{64})?$')",message="must be an image reference, [REGISTRY[:PORT]/]REPOSITORY[:TAG][@sha256:DIGEST], with the repository in lower case"
	Image string `json:"image"`
	// ImagePullPolicy is Always, IfNotPresent or Never. Without one it is Always for the tag latest or none, else IfNotPresent;
	// that rule is the agent's, so that the field says only what a user wrote.
	// +kubebuilder:validation:Enum=Always;IfNotPresent;Never
	// +optional
	ImagePullPolicy corev1.PullPolicy `json:"imagePullPolicy,omitempty"`
	// ImagePullSecrets are Secrets of type kubernetes.io/dockerconfigjson in the VM's namespace.
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:XValidation:rule="self.all(s, s.?name.orValue('') != '')",message="each must name a Secret in the VM's namespace: name must not be empty"
	// +listType=atomic
	// +optional
	ImagePullSecrets []corev1.LocalObjectReference `json:"imagePullSecrets,omitempty"`
	// Command replaces the image's Entrypoint and drops its Cmd.
	// +kubebuilder:validation:MaxItems=512
	// +kubebuilder:validation:items:MaxLength=131072
	// +kubebuilder:validation:items:Pattern=`^[^\x00]*$`
	// +listType=atomic
	// +optional
	Command []string `json:"command,omitempty"`
	// Args replace the image's Cmd.
	// +kubebuilder:validation:MaxItems=512
	// +kubebuilder:validation:items:MaxLength=131072
	// +kubebuilder:validation:items:Pattern=`^[^\x00]*$`
	// +listType=atomic
	// +optional
	Args []string `json:"args,omitempty"`
	// Env is added to the image's, and wins over it.
	// +kubebuilder:validation:MaxItems=512
	// +listType=map
	// +listMapKey=name
	// +optional
	Env []EnvVar `json:"env,omitempty"`
	// WorkingDir replaces the image's. It is made if it does not exist.
	// +kubebuilder:validation:MaxLength=4095
	// +kubebuilder:validation:XValidation:rule="self.matches('^(/[^\\\\x00]*)?$')",message="must be an absolute path: it begins with '/'"
	// +optional
	WorkingDir string `json:"workingDir,omitempty"`
	// DataPaths are absolute paths in the guest that live on the VM's own disk as a real file system instead of the overlay.
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MaxLength=1024
	// +kubebuilder:validation:items:XValidation:rule="self.matches('^(/[^/\\\\x00-\\\\x1f\\\\x7f]+)+$') && !self.matches('/[.][.]?(/|$)')",message="must be an absolute path below '/', without '.', '..', '//', a '/' at its end or control characters"
	// +kubebuilder:validation:items:XValidation:rule="!self.matches('^/(proc|sys|dev|run|tmp)(/|$)')",message="must not be /proc, /sys, /dev, /run, /tmp or below one of them: the guest mounts these itself"
	// +kubebuilder:validation:XValidation:rule="self.all(a, !self.exists(b, a.startsWith(b + '/')))",message="must not hold a path that lies below another one of them"
	// +listType=set
	// +optional
	DataPaths []string `json:"dataPaths,omitempty"`
	// NetworkRef names an ImpNetwork of the VM's namespace. A VM without one has a loopback interface only.
	// +optional
	NetworkRef *NetworkReference `json:"networkRef,omitempty"`
	// Address of the VM in its network. Without one it is given a free one, and keeps it as long as it exists and has not finished.
	// +kubebuilder:validation:MaxLength=15
	// +kubebuilder:validation:XValidation:rule="self == '' || (isIP(self) && ip(self).family() == 4)",message="must be an IPv4 address, like 10.44.0.10"
	// +optional
	Address string `json:"address,omitempty"`
	// Lifecycle: ephemeral runs the workload at most once; persistent restarts it by policy.
	// +kubebuilder:default=ephemeral
	// +optional
	Lifecycle Lifecycle `json:"lifecycle,omitempty"`
	// NodeName pins the VM to one node. The node must still be one that takes VMs and has room.
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self == '' || !format.dns1123Subdomain().validate(self).hasValue()",message="must be the name of a Node: lower-case letters, digits, '-' and '.'"
	// +optional
	NodeName string `json:"nodeName,omitempty"`
	// NodeSelector are labels the node must have. The values' syntax, as that of keys and values in tolerations, is checked by
	// the policy imp-vm-placement: these strings have no bounded length in the schema, so that a rule here would exceed the API server's cost budget.
	// +kubebuilder:validation:MaxProperties=32
	// +kubebuilder:validation:XValidation:rule="self.all(k, !format.qualifiedName().validate(k).hasValue())",message="keys must be label keys: [PREFIX/]NAME of at most 63 letters, digits, '-', '_' and '.'"
	// +optional
	NodeSelector map[string]string `json:"nodeSelector,omitempty"`
	// Tolerations of the node's taints, as a pod's: at placement, and for a persistent VM also while it runs, where a taint of effect
	// NoExecute that is not tolerated moves it or, if its restarts are in-place, stops it until the taint is gone.
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:XValidation:rule="self.all(t, t.?operator.orValue('') in ['', 'Equal', 'Exists'])",message="operator must be Exists or Equal"
	// +kubebuilder:validation:XValidation:rule="self.all(t, t.?effect.orValue('') in ['', 'NoSchedule', 'PreferNoSchedule', 'NoExecute'])",message="effect must be NoSchedule, PreferNoSchedule, NoExecute, or empty for all"
	// +kubebuilder:validation:XValidation:rule="self.all(t, t.?key.orValue('') != '' || t.?operator.orValue('') == 'Exists')",message="operator must be Exists where key is empty, which means all keys"
	// +kubebuilder:validation:XValidation:rule="self.all(t, t.?operator.orValue('') != 'Exists' || t.?value.orValue('') == '')",message="value must be empty where operator is Exists"
	// +kubebuilder:validation:XValidation:rule="self.all(t, !has(t.tolerationSeconds) || t.?effect.orValue('') == 'NoExecute')",message="effect must be NoExecute where tolerationSeconds is set"
	// +listType=atomic
	// +optional
	Tolerations []corev1.Toleration `json:"tolerations,omitempty"`
	// TerminationGracePeriodSeconds between the stop signal and the kill; 0 kills at once.
	// +kubebuilder:default=30
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=86400
	// +optional
	TerminationGracePeriodSeconds *int64 `json:"terminationGracePeriodSeconds,omitempty"`
	// ActiveDeadlineSeconds after it was placed on a node the VM is ended with DeadlineExceeded.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=2147483647
	// +optional
	ActiveDeadlineSeconds *int64 `json:"activeDeadlineSeconds,omitempty"`
	// TTLSecondsAfterFinished after its end the object is deleted.
	// +kubebuilder:validation:Minimum=0
	// +optional
	TTLSecondsAfterFinished *int32 `json:"ttlSecondsAfterFinished,omitempty"`
	// RestartPolicy of a persistent VM. It replaces its class's as a whole; without either the default holds. A change takes effect at once,
	// also on a VM that waits for its next try.
	// +optional
	RestartPolicy *RestartPolicy `json:"restartPolicy,omitempty"`
	// DesiredState of a persistent VM: Running (default), or Stopped, which stops it at any moment and keeps its disk and address.
	// +kubebuilder:validation:XValidation:rule="!(self in ['Suspended', 'ScaleToZero'])",message="is not supported yet: use Running or Stopped"
	// +optional
	DesiredState DesiredState `json:"desiredState,omitempty"`
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
	// ReadinessProbe follows the class at once, as RestartPolicy; the sizes do not.
	// +optional
	ReadinessProbe *ReadinessProbe `json:"readinessProbe,omitempty"`
	// RestartPolicy of the class, for a VM that has none of its own.
	// +optional
	RestartPolicy *RestartPolicy `json:"restartPolicy,omitempty"`
}

// VMAddress is one address of a VM and what belongs to it.
type VMAddress struct {
	// Address in dotted form; Prefix is the length of its network's subnet.
	Address string `json:"address"`
	Prefix  int32  `json:"prefix"`
	// MAC of the interface.
	MAC string `json:"mac"`
	// Network is the ImpNetwork's name, NetworkUID its UID.
	Network    string    `json:"network"`
	NetworkUID types.UID `json:"networkUID"`
}

// Release is the operator's order to give a VM up: stop it, remove everything of it, and say so in releasedAssignment.
type Release struct {
	// Assignment that is to be given up.
	Assignment int64 `json:"assignment"`
	// Reason in CamelCase: Deleted, Rescheduled, Evacuated.
	Reason string `json:"reason"`
}

// LastFailure is the latest end of an incarnation that was not as it should be.
type LastFailure struct {
	// +kubebuilder:validation:MaxLength=1024
	Reason string `json:"reason"`
	// +kubebuilder:validation:MaxLength=32768
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
//
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.assignment) || (has(self.assignment) && self.assignment >= oldSelf.assignment)",fieldPath=.assignment,message="only grows: it is what tells an order from an older one"
// +kubebuilder:validation:XValidation:rule=`self.?nodeName.orValue("") in ["", oldSelf.?nodeName.orValue("")] || self.?assignment.orValue(0) > oldSelf.?assignment.orValue(0)`,optionalOldSelf=true,fieldPath=.nodeName,message="cannot be changed by itself, or the VM of before is left on its node: to move a VM delete and create it; the operator gives another node with a higher assignment"
type ImpVMStatus struct {
	// Phase is for the eye.
	// +optional
	Phase Phase `json:"phase,omitempty"`
	// +kubebuilder:validation:MaxItems=32
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
	// Hold orders the node to keep the VM stopped. Written by imp-place.
	// +optional
	Hold *Hold `json:"hold,omitempty"`
	// Resources the VM was placed with. Written by imp-place.
	// +optional
	Resources *Resources `json:"resources,omitempty"`
	// IP is the first of Addresses. Written by imp-place, as Addresses: with the first placement, and taken away when the VM has
	// finished and its address is free again.
	// +optional
	IP string `json:"ip,omitempty"`
	// +kubebuilder:validation:MaxItems=8
	// +listType=atomic
	// +optional
	Addresses []VMAddress `json:"addresses,omitempty"`

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
	// +kubebuilder:validation:MaxLength=1024
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
// ---
// The API server has seen to it that metadata.name is a DNS name; a rule by format.dns1123Label would be too dear for Kubernetes 1.33.
//
// +kubebuilder:validation:XValidation:rule="oldSelf.hasValue() || (self.metadata.name.size() <= 63 && !self.metadata.name.contains('.'))",optionalOldSelf=true,message="metadata.name must be at most 63 lower-case letters, digits and '-', and begin and end with a letter or digit: it is the guest's hostname"
// +kubebuilder:validation:XValidation:rule="self.spec.lifecycle != 'ephemeral' || (has(self.spec.classRef) == has(oldSelf.spec.classRef) && (!has(self.spec.classRef) || self.spec.classRef.name == oldSelf.spec.classRef.name)) || !has(oldSelf.status) || !has(oldSelf.status.nodeName) || size(oldSelf.status.nodeName) == 0",fieldPath=.spec.classRef,message="cannot be changed on an ephemeral VM that has been placed on a node; create a new ImpVM"
// +kubebuilder:validation:XValidation:rule="self.spec.lifecycle != 'ephemeral' || !has(oldSelf.status) || !has(oldSelf.status.conditions) || !oldSelf.status.conditions.exists(c, c.type == 'Finished' && c.status == 'True') || (has(self.status) && has(self.status.conditions) && self.status.conditions.exists(c, c.type == 'Finished' && c.status == 'True'))",fieldPath=.status.conditions,message="Finished=True cannot be taken back from an ephemeral VM: its workload runs at most once"
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:path=impvms,singular=impvm,shortName=impvm
// +kubebuilder:selectablefield:JSONPath=`.status.nodeName`
// +kubebuilder:printcolumn:name="Phase",type=string,JSONPath=`.status.phase`
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.status.nodeName`
// +kubebuilder:printcolumn:name="IP",type=string,JSONPath=`.status.ip`
// +kubebuilder:printcolumn:name="Restarts",type=integer,JSONPath=`.status.restartCount`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Next Try",type=string,JSONPath=`.status.restart.nextTryAt`
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
