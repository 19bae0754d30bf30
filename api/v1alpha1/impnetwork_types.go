package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// NetworkNAT says whether and how guests reach what lies outside their network.
//
// +kubebuilder:validation:XValidation:rule=`self.?egressInterface.orValue("") == "" || self.?enabled.orValue(false)`,fieldPath=.egressInterface,message="says how guests' traffic leaves by NAT: set nat.enabled to true too, or leave it out"
// +kubebuilder:validation:XValidation:rule="!self.?clusterAccess.orValue(false) || self.?enabled.orValue(false)",fieldPath=.clusterAccess,message="widens what guests reach by NAT: set nat.enabled to true too, or leave it out"
type NetworkNAT struct {
	// Enabled lets guests open connections to the outside; they appear there under the node's address.
	// +kubebuilder:default=false
	// +optional
	Enabled bool `json:"enabled,omitempty"`
	// EgressInterface is the only interface of a node that guests' traffic may leave by, the same on every node. Without one it
	// leaves by the node's own routes: in general its default route.
	// +kubebuilder:validation:MaxLength=15
	// +kubebuilder:validation:XValidation:rule="self == '' || (self.matches('^[!-.0-9;-~]+$') && !(self in ['.', '..']))",message="must be the name of a network interface of the nodes, like eth0: no blanks, '/' or ':'"
	// +optional
	EgressInterface string `json:"egressInterface,omitempty"`
	// ClusterAccess lets guests reach pod and Service addresses too. Nodes' own addresses stay out of their reach.
	// +optional
	ClusterAccess bool `json:"clusterAccess,omitempty"`
}

// ImpNetworkSpec is an IPv4 network of its own. Guests of one network reach each other on every node; nothing else reaches them but
// the node they are on. Two networks may have the same subnet. nat acts at once; dns and searchDomains at a guest's next start.
// ---
// A rule on gateway or dns is silent where subnet or the address itself is none: those have rules of their own. The broadcast
// address is the one before a multiple of the subnet's size, the default gateway the one that shares a /31 with the subnet's own.
// The API server's estimate knows the cost of == between addresses, but not that of !=.
//
// +kubebuilder:validation:XValidation:rule="self.subnet == oldSelf.subnet",fieldPath=.subnet,message="cannot be changed: guests have addresses of it; create a new ImpNetwork"
// +kubebuilder:validation:XValidation:rule=`(has(self.gateway) ? self.gateway : "") == (has(oldSelf.gateway) ? oldSelf.gateway : "")`,fieldPath=.gateway,message="cannot be changed: guests have routes by it; create a new ImpNetwork"
// +kubebuilder:validation:XValidation:rule="self.?mtu.orValue(0) == oldSelf.?mtu.orValue(0)",fieldPath=.mtu,message="cannot be changed: running guests have it; create a new ImpNetwork"
// +kubebuilder:validation:XValidation:rule="!(isCIDR(self.subnet) && cidr(self.subnet).ip().family() == 4 && has(self.gateway) && isIP(self.gateway) && ip(self.gateway).family() == 4) || cidr(self.subnet).containsIP(self.gateway)",fieldPath=.gateway,messageExpression="'must be an address of subnet ' + self.subnet + '; left out it is the first host address'"
// +kubebuilder:validation:XValidation:rule="!(isCIDR(self.subnet) && cidr(self.subnet).ip().family() == 4 && has(self.gateway) && isIP(self.gateway) && ip(self.gateway).family() == 4) || !(ip(self.gateway) == cidr(self.subnet).masked().ip())",fieldPath=.gateway,messageExpression="'is the address of subnet ' + self.subnet + ' itself: take one of its host addresses, or leave it out for the first'"
// +kubebuilder:validation:XValidation:rule="!(isCIDR(self.subnet) && cidr(self.subnet).ip().family() == 4 && has(self.gateway) && isIP(self.gateway) && ip(self.gateway).family() == 4) || !cidr(self.subnet).containsIP(self.gateway) || cidr(self.subnet).prefixLength() > 30 || [self.gateway.split('.')].all(b, (int(b[0]) * 16777216 + int(b[1]) * 65536 + int(b[2]) * 256 + int(b[3]) + 1) % ([1, 2, 4, 8, 16, 32, 64, 128][(32 - cidr(self.subnet).prefixLength()) % 8] * [1, 256, 65536, 16777216, 4294967296][(32 - cidr(self.subnet).prefixLength()) / 8]) != 0)",fieldPath=.gateway,messageExpression="'is the broadcast address of subnet ' + self.subnet + ': take one of its host addresses, or leave it out for the first'"
// +kubebuilder:validation:XValidation:rule=`!(isCIDR(self.subnet) && cidr(self.subnet).ip().family() == 4 && has(self.dns)) || self.dns.all(d, !isIP(d) || ip(d).family() != 4 || ((has(self.gateway) ? self.gateway : "") != "" ? d != self.gateway : ip(d) == cidr(self.subnet).ip() || !(cidr(d + '/31').masked().ip() == cidr(self.subnet).ip())))`,fieldPath=.dns,message="must not hold the gateway: it answers no DNS"
// +kubebuilder:validation:XValidation:rule="!has(self.searchDomains) || self.searchDomains.size() == 0 || (has(self.dns) && self.dns.size() > 0)",fieldPath=.searchDomains,message="need dns: without name servers the image's own resolv.conf is left as it is"
type ImpNetworkSpec struct {
	// Subnet in CIDR form, /8 to /30: ADDRESS/LENGTH without host bits.
	// ---
	// What to write in place of a subnet with host bits is made out of its letters and digits, because the API server's estimate of cost
	// knows no bound for string(cidr(self).masked()).
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:XValidation:rule="isCIDR(self) && cidr(self).ip().family() == 4",message="must be an IPv4 subnet in CIDR form, like 10.44.0.0/24"
	// +kubebuilder:validation:XValidation:rule="!isCIDR(self) || cidr(self).ip().family() != 4 || cidr(self) == cidr(self).masked()",messageExpression="'has host bits set: write ' + self.substring(0, [0, self.indexOf('.') + 1, self.indexOf('.', self.indexOf('.') + 1) + 1, self.lastIndexOf('.') + 1][cidr(self).prefixLength() / 8]) + [int(self.substring(0, self.indexOf('/')).split('.')[cidr(self).prefixLength() / 8]) - int(self.substring(0, self.indexOf('/')).split('.')[cidr(self).prefixLength() / 8]) % [256, 128, 64, 32, 16, 8, 4, 2][cidr(self).prefixLength() % 8]].map(b, (b > 99 ? '0123456789'.substring(b / 100, b / 100 + 1) : '') + (b > 9 ? '0123456789'.substring(b / 10 % 10, b / 10 % 10 + 1) : '') + '0123456789'.substring(b % 10, b % 10 + 1))[0] + ['.0.0.0', '.0.0', '.0', ''][cidr(self).prefixLength() / 8] + self.substring(self.indexOf('/'))"
	// +kubebuilder:validation:XValidation:rule="!isCIDR(self) || cidr(self).ip().family() != 4 || cidr(self).prefixLength() >= 8",message="is too large: take /8 or a longer prefix"
	// +kubebuilder:validation:XValidation:rule="!isCIDR(self) || cidr(self).ip().family() != 4 || cidr(self).prefixLength() <= 30",message="is too small for a gateway and a guest: take /30 or a shorter prefix"
	// +kubebuilder:validation:XValidation:rule="!isCIDR(self) || cidr(self).ip().family() != 4 || ['0.0.0.0/8', '127.0.0.0/8', '169.254.0.0/16', '224.0.0.0/4', '240.0.0.0/4'].all(r, !cidr(r).containsCIDR(self) && !cidr(self).containsCIDR(r))",messageExpression="'overlaps ' + ['0.0.0.0/8', '127.0.0.0/8', '169.254.0.0/16', '224.0.0.0/4', '240.0.0.0/4'].filter(r, cidr(r).containsCIDR(self) || cidr(self).containsCIDR(r))[0] + ', reserved for other purposes: take a part of 10.0.0.0/8, 172.16.0.0/12 or 192.168.0.0/16'"
	Subnet string `json:"subnet"`
	// Gateway is the guests' default route and the node's address in this network. It answers pings and nothing else.
	// Default: the first host address of subnet.
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:XValidation:rule="self == '' || (isIP(self) && ip(self).family() == 4)",message="must be an IPv4 address, like 10.44.0.1"
	// +optional
	Gateway string `json:"gateway,omitempty"`
	// +kubebuilder:default={}
	// +optional
	NAT NetworkNAT `json:"nat,omitempty"`
	// DNS are the name servers that guests are given. Without any, the image's own resolv.conf is left as it is.
	// +kubebuilder:validation:MaxItems=3
	// +kubebuilder:validation:items:MaxLength=64
	// +kubebuilder:validation:items:XValidation:rule="isIP(self) && ip(self).family() == 4",message="must be the IPv4 address of a name server, like 1.1.1.1: guests have no IPv6"
	// +kubebuilder:validation:items:XValidation:rule="!isIP(self) || ip(self).family() != 4 || !(cidr('127.0.0.0/8').containsIP(self) || cidr('0.0.0.0/8').containsIP(self))",message="is the guest itself, where no name server listens: take the address of one in the network or outside"
	// +kubebuilder:validation:items:XValidation:rule="!isIP(self) || ip(self).family() != 4 || !(cidr('169.254.0.0/16').containsIP(self) || cidr('224.0.0.0/3').containsIP(self))",message="cannot be reached by guests, as all link-local and multicast addresses: take the name server's own address"
	// +listType=set
	// +optional
	DNS []string `json:"dns,omitempty"`
	// SearchDomains are given to guests together with DNS.
	// +kubebuilder:validation:MaxItems=6
	// +kubebuilder:validation:items:MaxLength=253
	// +kubebuilder:validation:items:XValidation:rule="!format.dns1123Subdomain().validate(self).hasValue()",message="must be a DNS domain in lower case, like apps.example.com"
	// +listType=set
	// +optional
	SearchDomains []string `json:"searchDomains,omitempty"`
	// MTU of the guests' interfaces in bytes, 576 (what IPv4 demands of every host) to 65485. Default: the smallest MTU between
	// nodes, less the overlay's 50 bytes.
	// +kubebuilder:validation:XValidation:rule="self >= 576 && self <= 65485",message="must be from 576 to 65485; left out it is what the nodes' network carries"
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
