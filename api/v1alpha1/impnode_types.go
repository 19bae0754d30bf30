package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// Budget is what VMs may take on a node in all. Placement counts guest memory plus overhead.
type Budget struct {
	VCPU      int64 `json:"vcpu"`
	MemoryMiB int64 `json:"memoryMiB"`
	DiskGiB   int64 `json:"diskGiB"`
}

// NodeCapabilities is what the node's runtime found it can do.
type NodeCapabilities struct {
	Arch string `json:"arch"`
	// Driver is the VM monitor in use: qemu, firecracker or fake.
	Driver string `json:"driver"`
	// +optional
	Accelerator string `json:"accelerator,omitempty"`
	// +optional
	VMMVersion string `json:"vmmVersion,omitempty"`
	// +optional
	KernelDigest string `json:"kernelDigest,omitempty"`
	// +optional
	CgroupVersion string `json:"cgroupVersion,omitempty"`
	// OverheadMiB that a VM takes beside its guest's memory.
	OverheadMiB int64 `json:"overheadMiB"`
}

// NodeNetwork is the node's part in the overlay.
type NodeNetwork struct {
	// Address other nodes send guests' frames to (VTEP); "" where the node has none and takes no VM with a network.
	// +optional
	Address string `json:"address,omitempty"`
	// Addresses are all addresses of the node's interfaces but loopback and link-local ones. Guests may not reach them.
	// +kubebuilder:validation:MaxItems=64
	// +listType=set
	// +optional
	Addresses []string `json:"addresses,omitempty"`
	// MTU of the interface with Address.
	// +optional
	MTU int32 `json:"mtu,omitempty"`
	// Port is the overlay's UDP port.
	// +optional
	Port int32 `json:"port,omitempty"`
}

// ImpNodeStatus is written by the node's agent.
type ImpNodeStatus struct {
	// +optional
	Budget Budget `json:"budget,omitempty"`
	// +optional
	Capabilities NodeCapabilities `json:"capabilities,omitempty"`
	// +optional
	Network NodeNetwork `json:"network,omitempty"`
	// BootID of the host: a change proves that nothing of before is running.
	// +optional
	BootID string `json:"bootID,omitempty"`
	// +optional
	AgentVersion string `json:"agentVersion,omitempty"`
	// +optional
	RuntimeVersion string `json:"runtimeVersion,omitempty"`
	// Conditions: RuntimeReady says whether VMs can be started here, and why not; ForwardBlocked that somebody else's firewall
	// drops what guests send through the node.
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// Conditions of an ImpNode.
const (
	ConditionRuntimeReady   = "RuntimeReady"
	ConditionForwardBlocked = "ForwardBlocked"
	// ConditionVMsAccountedFor is False while VMs of the node have no object and that is taken for a fault of the list, not for an
	// order: nothing happens to them. It is absent on a node on which that never was.
	ConditionVMsAccountedFor = "VMsAccountedFor"
)

// Reasons of the condition VMsAccountedFor.
const (
	ReasonAccountedFor     = "AccountedFor"
	ReasonSuspiciousList   = "SuspiciousList"   // more than half of the node's VMs have none at once
	ReasonDifferentCluster = "DifferentCluster" // VMs were ordered by another cluster
)

// ReasonVMAbsent is of the event about the ImpNode that a VM was stopped because its object was missing for long.
const ReasonVMAbsent = "VMAbsent"

// Reasons of the condition RuntimeReady.
const (
	ReasonRuntimeUsable      = "Usable"
	ReasonRuntimeUnusable    = "Unusable"    // the runtime answers and says that it cannot start VMs; one that is placed here waits with RuntimeStartFailed
	ReasonRuntimeUnreachable = "Unreachable" // it does not answer
)

// ImpNode is what one node can do for VMs. Its name is the Node's, its owner the node's agent.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:path=impnodes,singular=impnode,scope=Cluster,shortName=impnode
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="RuntimeReady")].status`
// +kubebuilder:printcolumn:name="Driver",type=string,JSONPath=`.status.capabilities.driver`
// +kubebuilder:printcolumn:name="Accel",type=string,JSONPath=`.status.capabilities.accelerator`
// +kubebuilder:printcolumn:name="VCPU",type=integer,JSONPath=`.status.budget.vcpu`
// +kubebuilder:printcolumn:name="Memory",type=integer,JSONPath=`.status.budget.memoryMiB`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type ImpNode struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`
	// +optional
	Status ImpNodeStatus `json:"status,omitempty"`
}

// ImpNodeList is a list of ImpNode.
// +kubebuilder:object:root=true
type ImpNodeList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []ImpNode `json:"items"`
}
