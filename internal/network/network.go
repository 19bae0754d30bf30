// Package network is the contract for giving a VM an interface on this host.
//
// A network is known by its Spec (Set) and exists on the host while a VM here has an interface in it (Attach … Detach). What an
// implementation makes carries the runtime's instance and the VM's or the network's ID, so that it tells its own from a
// stranger's. It writes down what it is about to make, so that after any death of the runtime, or a reboot of the host, it
// knows what must be there and what must not.
//
//	Set(spec) ──► known ──(first Attach)──► on the host ──(last Detach)──► known ──► Forget
//
// It must: let a guest send only from its own MAC and address; let guests of one network reach each other wherever they are (by
// Spec.Peers); keep guests from every listener of the host but the gateway's answer to a ping, from Spec.Denied, from
// link-local addresses and from other networks; repair what somebody else removes; leave nothing after the last Detach.
// It must not: decide about addresses, talk to guests, or touch what is not its own.
package network

import (
	"context"
	"crypto/sha256"
	"net"
	"os"
)

// MaxGuests of one network on one node: a Linux bridge has 1024 ports (BR_MAX_PORTS), some of them the network's own.
const MaxGuests = 1000

// DefaultPort is the overlay's UDP port: 4789 and 8472 are taken by CNIs.
const DefaultPort = 14789

// OverlayOverhead is what VXLAN over IPv4 takes from the underlay's MTU, in bytes: outer IP 20, UDP 8, VXLAN 8, inner Ethernet 14.
const OverlayOverhead = 50

// Spec is one network as this node has to know it. Addresses are IPv4 in dotted form, prefixes in CIDR form.
type Spec struct {
	// ID is the ImpNetwork's UID; Namespace and Name are for messages.
	ID        string `json:"id"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Subnet    string `json:"subnet"`
	Gateway   string `json:"gateway"`
	// MTU of the guests' interfaces. The underlay must carry OverlayOverhead more.
	MTU int `json:"mtu"`
	// VNI in the overlay, 1 to 2^24-1.
	VNI uint32 `json:"vni"`
	// NAT lets guests open connections to the outside, by EgressInterface only where that is not "".
	NAT             bool   `json:"nat,omitempty"`
	EgressInterface string `json:"egressInterface,omitempty"`
	// Denied are destinations outside the network that guests may not reach, beside what no guest may reach.
	Denied []string `json:"denied,omitempty"`
	// Peers are the network's guests on other nodes, in order of address.
	Peers []Peer `json:"peers,omitempty"`
}

// Peer is a guest on another node. VTEP is that node's address in the overlay.
type Peer struct {
	Address string `json:"address"`
	MAC     string `json:"mac"`
	VTEP    string `json:"vtep"`
}

// Interface is one NIC as the VM's spec wants it.
type Interface struct {
	// Name inside the spec; unique within the VM.
	Name string `json:"name"`
	// Network is the ID of a Spec.
	Network string `json:"network,omitempty"`
	MAC     string `json:"mac"`
	// Addresses in CIDR form, Gateway, MTU, Nameservers and SearchDomains go to the guest through Configure.
	Addresses     []string `json:"addresses,omitempty"`
	Gateway       string   `json:"gateway,omitempty"`
	MTU           int      `json:"mtu,omitempty"`
	Nameservers   []string `json:"nameservers,omitempty"`
	SearchDomains []string `json:"searchDomains,omitempty"`
}

// Attachment is an interface that is ready for a VMM. TAP is open and inherited by the VMM; the caller closes it after
// the VMM was started.
type Attachment struct {
	Interface Interface
	TAP       *os.File
}

// Status of one network on this node.
type Status struct {
	ID string
	// Guests here.
	Guests int
	// Problem is why the network is not as it should be and what keeps it from being repaired, "" if all is well.
	Problem string
}

// Counters of one interface since its VM was attached first; they go on over restarts of VMM and runtime. A packet counts as
// dropped when it was not the guest's to send: a foreign MAC or address, a VLAN tag, anything but ARP and IPv4.
type Counters struct {
	VM, Interface, Network string
	// Received by the guest, sent by it.
	ReceivedBytes, SentBytes uint64
	Dropped                  uint64
}

// Host is what this node's place in networks is.
type Host struct {
	// VTEP is the node's address in the overlay, "" where there is none; MTU that of its interface; Port the overlay's UDP port.
	VTEP string
	MTU  int
	Port int
	// Addresses of the host's interfaces but loopback and link-local ones, and those made here.
	Addresses []string
	// ForwardBlocked names the foreign chain that drops what guests send through the host and that could not be amended, and
	// says why; "" when nothing stands in the way.
	ForwardBlocked string
}

// Finding is something on the host that was not as it should be.
type Finding struct {
	// Kind: namespace, tap, device, rules or network. Network is the ID of the network it is of, "" for the host's or nobody's.
	Kind, Network string
	// Name as an administrator finds it on the host, or what was wrong in one sentence.
	Name string
	// Orphan says that it was there and belonged to nothing; else something was missing or changed.
	Orphan bool
	// Repaired says that all is well now; Problem, else, why not.
	Repaired bool
	Problem  string
}

// Network wires VMs on this host. Every method is idempotent and may be called from many goroutines; errors are fault.Errors
// with NetworkSetupFailed that say what failed, where and why, and a failed method has undone what it did.
type Network interface {
	// Host looks at the host.
	Host(ctx context.Context) (Host, error)
	// Set makes the network known, or changes it: guests that are attached feel it at once. It is durable.
	Set(ctx context.Context, spec Spec) error
	// Forget undoes Set. It fails while a VM is attached; a network that is not known is success.
	Forget(ctx context.Context, id string) error
	// Networks lists what was Set, ordered by ID.
	Networks(ctx context.Context) ([]Status, error)
	// Attach makes what the VM's interfaces need and opens the TAPs. Other interfaces that the VM had are detached.
	// A network that is not known, or is full (MaxGuests), is an error.
	Attach(ctx context.Context, vmID string, interfaces []Interface) ([]Attachment, error)
	// Detach removes everything of the VM; no attachment is success. The VMM must be gone (an open TAP cannot be reused).
	Detach(ctx context.Context, vmID string) error
	// Attached lists the IDs of VMs that have something here, for the audit.
	Attached(ctx context.Context) ([]string, error)
	// Audit gives what is not as it should be at the moment, and what was repaired since it was asked last: orphans are removed and
	// networks are kept as they should be all the time. With repair it looks at once.
	Audit(ctx context.Context, repair bool) ([]Finding, error)
	// Counters of every interface there is, ordered by VM and interface.
	Counters(ctx context.Context) ([]Counters, error)
}

// GatewayMAC is the gateway's address in the network of that ID, the same on every node: a guest that moves need not learn it anew.
func GatewayMAC(id string) net.HardwareAddr { return hardwareAddr("gateway/" + id) }

// GuestMAC is the address of the n-th interface of the VM of that ID.
func GuestMAC(vmID string, n int) net.HardwareAddr {
	return hardwareAddr("guest/" + vmID + "/" + string(rune('0'+n)))
}

// hardwareAddr makes a locally administered unicast address (IEEE 802: bit 1 set, bit 0 clear in the first byte).
func hardwareAddr(of string) net.HardwareAddr {
	sum := sha256.Sum256([]byte(of))
	mac := net.HardwareAddr(sum[:6])
	mac[0] = mac[0]&0xfc | 0x02
	return mac
}
