package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// HTTPGet is one HTTP request to the guest's own loopback address.
type HTTPGet struct {
	// Path with its query, if any.
	// +kubebuilder:default="/"
	// +kubebuilder:validation:MaxLength=1024
	// +kubebuilder:validation:XValidation:rule="self.matches('^/[!-~]*$')",message="must begin with '/' and hold no blanks and only ASCII characters"
	// +optional
	Path string `json:"path,omitempty"`
	// +kubebuilder:validation:XValidation:rule="self >= 1 && self <= 65535",message="must be a port from 1 to 65535"
	Port int32 `json:"port"`
}

// ReadinessProbe decides the condition GuestReady. A status of 200 to 399 is success.
//
// +kubebuilder:validation:XValidation:rule="self.timeoutSeconds <= self.periodSeconds",fieldPath=.timeoutSeconds,message="must not be more than periodSeconds"
type ReadinessProbe struct {
	HTTP HTTPGet `json:"http"`
	// +kubebuilder:default=10
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=3600
	// +optional
	PeriodSeconds int32 `json:"periodSeconds,omitempty"`
	// FailureThreshold failures in a row turn the VM unready.
	// +kubebuilder:default=3
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000
	// +optional
	FailureThreshold int32 `json:"failureThreshold,omitempty"`
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=3600
	// +optional
	TimeoutSeconds int32 `json:"timeoutSeconds,omitempty"`
}

// Probes of a class.
type Probes struct {
	// +optional
	ReadinessProbe *ReadinessProbe `json:"readinessProbe,omitempty"`
}

// ImpVMClassSpec is a size of VM. Only probes and restartPolicy may be edited: VMs were placed by the sizes. A new size is a new class.
//
// +kubebuilder:validation:XValidation:rule="self.vcpu == oldSelf.vcpu",fieldPath=.vcpu,message="cannot be changed; create a new ImpVMClass"
// +kubebuilder:validation:XValidation:rule="self.memoryMiB == oldSelf.memoryMiB",fieldPath=.memoryMiB,message="cannot be changed; create a new ImpVMClass"
// +kubebuilder:validation:XValidation:rule="self.diskGiB == oldSelf.diskGiB",fieldPath=.diskGiB,message="cannot be changed; create a new ImpVMClass"
// +kubebuilder:validation:XValidation:rule="self.arch == oldSelf.arch",fieldPath=.arch,message="cannot be changed; create a new ImpVMClass"
type ImpVMClassSpec struct {
	// VCPU is the number of virtual CPUs, 1 to 32.
	// +kubebuilder:validation:XValidation:rule="self >= 1 && self <= 32",message="must be from 1 to 32"
	VCPU int32 `json:"vcpu"`
	// MemoryMiB of the guest, 128 to 1048576 (1 TiB).
	// +kubebuilder:validation:XValidation:rule="self >= 128 && self <= 1048576",message="must be from 128 to 1048576 (1 TiB)"
	MemoryMiB int64 `json:"memoryMiB"`
	// DiskGiB of the VM's private disk, 1 to 16384 (16 TiB).
	// +kubebuilder:validation:XValidation:rule="self >= 1 && self <= 16384",message="must be from 1 to 16384 (16 TiB)"
	DiskGiB int64 `json:"diskGiB"`
	// Arch of the guest in Go's spelling.
	// +kubebuilder:default=amd64
	// +kubebuilder:validation:Enum=amd64;arm64
	// +optional
	Arch string `json:"arch,omitempty"`
	// +optional
	Probes *Probes `json:"probes,omitempty"`
	// RestartPolicy of persistent VMs that have none of their own; ephemeral ones ignore it.
	// +optional
	RestartPolicy *RestartPolicy `json:"restartPolicy,omitempty"`
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
