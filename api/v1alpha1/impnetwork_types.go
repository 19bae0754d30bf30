package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// NetworkNAT says whether and how guests reach what lies outside their network.
type NetworkNAT struct {
	// Enabled lets guests open connections to the outside; they appear there under the node's address.
	// +optional
	Enabled bool `json:"enabled,omitempty"`
	// EgressInterface is the only interface of a node that guests' traffic may leave by, the same on every node. Without one it
	// leaves by the node's own routes: in general its default route.
	// +kubebuilder:validation:MaxLength=15
	// +kubebuilder:validation:XValidation:rule="self == '' || self.matches('^[^/ \\\\t\\\\n:]{1,15}$')",message="must be the name of a network interface of the nodes: at most 15 characters, no '/', ':' or blanks"
	// +optional
	EgressInterface string `json:"egressInterface,omitempty"`
	// ClusterAccess lets guests reach pod and Service addresses too. Nodes' own addresses stay out of their reach.
	// +optional
	ClusterAccess bool `json:"clusterAccess,omitempty"`
}

// ImpNetworkSpec is an IPv4 network of its own. Guests of one network reach each other on every node; nothing else reaches them but
// the node they are on. Two networks may have the same subnet. nat acts at once; dns and searchDomains at a guest's next start.
//
// +kubebuilder:validation:XValidation:rule="self.subnet == oldSelf.subnet",fieldPath=.subnet,message="cannot be changed: guests have addresses of it; create a new ImpNetwork"
// +kubebuilder:validation:XValidation:rule="has(self.gateway) == has(oldSelf.gateway) && (!has(self.gateway) || self.gateway == oldSelf.gateway)",fieldPath=.gateway,message="cannot be changed: guests have routes by it; create a new ImpNetwork"
// +kubebuilder:validation:XValidation:rule="has(self.mtu) == has(oldSelf.mtu) && (!has(self.mtu) || self.mtu == oldSelf.mtu)",fieldPath=.mtu,message="cannot be changed: running guests have it; create a new ImpNetwork"
type ImpNetworkSpec struct {
	// Subnet in CIDR form, /8 to /30: ADDRESS/LENGTH without host bits.
	Subnet string `json:"subnet"`
	// Gateway is the guests' default route and the node's address in this network. Default: the first host address of subnet.
	// +optional
	Gateway string `json:"gateway,omitempty"`
	// +optional
	NAT NetworkNAT `json:"nat,omitempty"`
	// DNS are the name servers that guests are given. Without any, the image's own resolv.conf is left as it is.
	// +kubebuilder:validation:MaxItems=3
	// +listType=set
	// +optional
	DNS []string `json:"dns,omitempty"`
	// SearchDomains are given to guests together with DNS.
	// +kubebuilder:validation:MaxItems=6
	// +listType=set
	// +optional
	SearchDomains []string `json:"searchDomains,omitempty"`
	// MTU of the guests' interfaces in bytes. Default: the smallest MTU between nodes, less the overlay's 50 bytes.
	// +optional
	MTU int32 `json:"mtu,omitempty"`
}

// ImpNetworkStatus is written by the operator.
type ImpNetworkStatus struct {
	// Conditions: Ready, SubnetOverlap, and while it is being deleted InUse.
	// +kubebuilder:validation:MaxItems=16
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Gateway that is in use.
	// +optional
	Gateway string `json:"gateway,omitempty"`
	// MTU that is in use, settled once.
	// +optional
	MTU int32 `json:"mtu,omitempty"`
	// VNI is the network's number in the overlay, claimed by a Lease imp-vni-N in imp-system.
	// +optional
	VNI int32 `json:"vni,omitempty"`
	// Capacity is how many guests the subnet has addresses for.
	Capacity int64 `json:"capacity"`
	// Used addresses belong to a VM; Held ones to a deleted VM whose node has not said that it is gone; Quarantined ones are
	// kept from use for a minute after their VM.
	Used        int64 `json:"used"`
	Held        int64 `json:"held"`
	Quarantined int64 `json:"quarantined"`
	// Usage is "used/capacity", for the eye.
	// +optional
	Usage string `json:"usage,omitempty"`
}

// Conditions of an ImpNetwork, beside Ready.
const (
	ConditionSubnetOverlap = "SubnetOverlap"
	ConditionInUse         = "InUse"
)

// Reasons of an ImpNetwork's conditions.
const (
	ReasonNetworkUsable  = "Usable"
	ReasonSubnetOverlap  = "SubnetOverlap"
	ReasonNoOverlap      = "NoOverlap"
	ReasonSettingUp      = "SettingUp" // no node has told its MTU yet, or the VNI is not claimed
	ReasonDeleting       = "Deleting"
	ReasonNetworkInUse   = "InUse"
	ReasonPoolExhausted  = "PoolExhausted"
	ReasonAddressInUse   = "AddressInUse"
	ReasonForwardBlocked = "ForwardBlocked"
)

// ImpNetwork gives VMs of its namespace a subnet, a gateway, and where wanted outbound NAT and DNS.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:path=impnetworks,singular=impnetwork,shortName=impnet
// +kubebuilder:printcolumn:name="Subnet",type=string,JSONPath=`.spec.subnet`
// +kubebuilder:printcolumn:name="Used",type=string,JSONPath=`.status.usage`
// +kubebuilder:printcolumn:name="NAT",type=boolean,JSONPath=`.spec.nat.enabled`
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Gateway",type=string,JSONPath=`.status.gateway`,priority=1
// +kubebuilder:printcolumn:name="MTU",type=integer,JSONPath=`.status.mtu`,priority=1
// +kubebuilder:printcolumn:name="VNI",type=integer,JSONPath=`.status.vni`,priority=1
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`,priority=1
type ImpNetwork struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              ImpNetworkSpec `json:"spec"`
	// +optional
	Status ImpNetworkStatus `json:"status,omitempty"`
}

// ImpNetworkList is a list of ImpNetwork.
// +kubebuilder:object:root=true
type ImpNetworkList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []ImpNetwork `json:"items"`
}
