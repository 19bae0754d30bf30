package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// AddressState is where an address stands in its life.
// +kubebuilder:validation:Enum=Bound;Held;Quarantined
type AddressState string

// States of an address. After its quarantine the object is gone.
const (
	// AddressBound: it is its VM's, whether or not the VM is on a node at the moment.
	AddressBound AddressState = "Bound"
	// AddressHeld: the VM was deleted while its node was silent. What still runs there may use the address until the node, or
	// proof that it runs nothing any more, speaks. For the node it is the order to remove that VM.
	AddressHeld AddressState = "Held"
	// AddressQuarantined: nobody's, but not given out yet, for a minute from status.since.
	AddressQuarantined AddressState = "Quarantined"
)

// AddressVM is the VM an address belongs to.
type AddressVM struct {
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace"`
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`
	// UID of that object and no other of its name.
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MinLength=8
	// +kubebuilder:validation:MaxLength=64
	UID types.UID `json:"uid"`
}

// AddressNetwork is the network an address belongs to.
type AddressNetwork struct {
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace"`
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`
	// UID of that object and no other of its name.
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MinLength=8
	// +kubebuilder:validation:MaxLength=64
	UID types.UID `json:"uid"`
}

// ImpAddressSpec is the claim. It never changes.
//
// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="cannot be changed: a claim is made once and deleted"
type ImpAddressSpec struct {
	Network AddressNetwork `json:"network"`
	VM      AddressVM      `json:"vm"`
	// Address in dotted form.
	// +kubebuilder:validation:MaxLength=15
	// +kubebuilder:validation:XValidation:rule="isIP(self) && ip(self).family() == 4",message="must be an IPv4 address, like 10.44.0.10"
	Address string `json:"address"`
	// MAC of the guest's interface, made from the VM's UID: locally administered, no group address, in lower case.
	// +kubebuilder:validation:MaxLength=17
	// +kubebuilder:validation:XValidation:rule="self.matches('^[0-9a-f][26ae](:[0-9a-f]{2}){5}$')",message="must be a locally administered unicast MAC address in lower case, like 02:00:5e:10:00:01"
	MAC string `json:"mac"`
}

// ImpAddressStatus is where the address can be reached. It is no subresource, so that a claim is one write.
type ImpAddressStatus struct {
	State AddressState `json:"state"`
	// Since is when State became what it is.
	Since metav1.Time `json:"since"`
	// Node the VM is bound to with this Assignment, "" while it has none; VTEP is the node's address in the overlay.
	// +kubebuilder:validation:MaxLength=253
	// +optional
	Node string `json:"node,omitempty"`
	// +kubebuilder:validation:Minimum=0
	// +optional
	Assignment int64 `json:"assignment,omitempty"`
	// +kubebuilder:validation:MaxLength=15
	// +kubebuilder:validation:XValidation:rule="self == '' || (isIP(self) && ip(self).family() == 4)",message="must be the IPv4 address of a node"
	// +optional
	VTEP string `json:"vtep,omitempty"`
	// ReleasedAssignment of a Held address is written by its node's agent: nothing of this or an older assignment is left there.
	// +kubebuilder:validation:Minimum=0
	// +optional
	ReleasedAssignment int64 `json:"releasedAssignment,omitempty"`
}

// ImpAddress is the claim of one address of a network by one VM, made and freed by the operator. Its name is
// AddressName of network and address, so that the API server lets nobody claim an address twice. Nodes take
// from it where each guest of their networks is. It has no owner: whatever happens to VM or network, it goes by rule.
//
// +kubebuilder:validation:XValidation:rule="self.metadata.name == self.spec.network.uid.substring(0, 8) + '-' + self.spec.address",messageExpression="'metadata.name must be ' + self.spec.network.uid.substring(0, 8) + '-' + self.spec.address + ': the network and the address make the claim unique'"
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=impaddresses,singular=impaddress,scope=Cluster,shortName=impaddr
// +kubebuilder:selectablefield:JSONPath=`.spec.network.uid`
// +kubebuilder:selectablefield:JSONPath=`.status.node`
// +kubebuilder:printcolumn:name="Address",type=string,JSONPath=`.spec.address`
// +kubebuilder:printcolumn:name="State",type=string,JSONPath=`.status.state`
// +kubebuilder:printcolumn:name="Network",type=string,JSONPath=`.spec.network.name`
// +kubebuilder:printcolumn:name="VM",type=string,JSONPath=`.spec.vm.name`
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.status.node`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Namespace",type=string,JSONPath=`.spec.vm.namespace`,priority=1
// +kubebuilder:printcolumn:name="MAC",type=string,JSONPath=`.spec.mac`,priority=1
type ImpAddress struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              ImpAddressSpec   `json:"spec"`
	Status            ImpAddressStatus `json:"status"`
}

// ImpAddressList is a list of ImpAddress.
// +kubebuilder:object:root=true
type ImpAddressList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []ImpAddress `json:"items"`
}

// AddressName is the name of the ImpAddress that claims address in the network of that UID.
func AddressName(network types.UID, address string) string {
	return string(network)[:min(8, len(network))] + "-" + address
}
