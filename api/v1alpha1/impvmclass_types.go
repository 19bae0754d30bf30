package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// HTTPGet is one HTTP request to the guest's own loopback address.
type HTTPGet struct {
	// +kubebuilder:default="/"
	// +optional
	Path string `json:"path,omitempty"`
	Port int32  `json:"port"`
}

// ReadinessProbe decides the condition GuestReady. A status of 200 to 399 is success.
type ReadinessProbe struct {
	HTTP HTTPGet `json:"http"`
	// +kubebuilder:default=10
	// +optional
	PeriodSeconds int32 `json:"periodSeconds,omitempty"`
	// FailureThreshold failures in a row turn the VM unready.
	// +kubebuilder:default=3
	// +optional
	FailureThreshold int32 `json:"failureThreshold,omitempty"`
	// +kubebuilder:default=1
	// +optional
	TimeoutSeconds int32 `json:"timeoutSeconds,omitempty"`
}

// Probes of a class.
type Probes struct {
	// +optional
	ReadinessProbe *ReadinessProbe `json:"readinessProbe,omitempty"`
}

// ImpVMClassSpec is a size of VM.
type ImpVMClassSpec struct {
	// VCPU is the number of virtual CPUs.
	VCPU int32 `json:"vcpu"`
	// MemoryMiB of the guest, at least 128.
	MemoryMiB int64 `json:"memoryMiB"`
	// DiskGiB of the VM's private disk.
	DiskGiB int64 `json:"diskGiB"`
	// Arch of the guest in Go's spelling.
	// +kubebuilder:default=amd64
	// +optional
	Arch string `json:"arch,omitempty"`
	// +optional
	Probes *Probes `json:"probes,omitempty"`
}

// ImpVMClass is a size of VM that ImpVMs refer to.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=impvmclasses,singular=impvmclass,scope=Cluster,shortName=impcls
// +kubebuilder:printcolumn:name="VCPU",type=integer,JSONPath=`.spec.vcpu`
// +kubebuilder:printcolumn:name="Memory",type=integer,JSONPath=`.spec.memoryMiB`
// +kubebuilder:printcolumn:name="Disk",type=integer,JSONPath=`.spec.diskGiB`
// +kubebuilder:printcolumn:name="Arch",type=string,JSONPath=`.spec.arch`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type ImpVMClass struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              ImpVMClassSpec `json:"spec"`
}

// ImpVMClassList is a list of ImpVMClass.
// +kubebuilder:object:root=true
type ImpVMClassList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []ImpVMClass `json:"items"`
}
