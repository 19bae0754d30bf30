// Package firewall is the nftables rules of guests' networks: what a guest may send, what may leave its network, and what the
// host takes from it and from other nodes.
//
//	bridge imp (network's namespace)  from a TAP only ARP and IPv4 of the guest's own MAC and address; from the overlay no gateway's MAC, to it no ARP
//	inet   imp (network's namespace)  pings to the gateway; what may leave to the host and what may come from it; SNAT to the veth's address
//	ip     imp-INSTANCE (host)        no address of the node for guests; nothing from one network to another; masquerade; VXLAN from peers alone
//	foreign forward chains (host)     accept rules for our veths at their heads, marked with the instance
//
// Rules are constant for a network or host: what comes and goes with guests are elements of sets. A table is compared with the
// kernel's as a whole, and written as a whole in one transaction where it differs: no packet meets half a table.
//
// ns is always an open descriptor of the network namespace that is meant; it stays the caller's. Calls for one namespace must not
// overlap: between looking and writing the kernel's state must not be changed by us. Errors are plain and say what was being done
// to which table.
//
// What the rules count on, and the caller makes: ports of the bridge do not learn (a frame to 01-80-C2-00-00-0E is learned from
// before any rule sees it), and the bridge's group_fwd_mask has every bit that may be set (fff8), or such frames pass by the bridge's rules
// and are not counted.
package firewall

import (
	"net"
	"net/netip"
)

// Network is what the rules in a network's own namespace are made of. All addresses are IPv4.
type Network struct {
	// Bridge, Uplink (the veth to the host) and Overlay (the VXLAN device) are names of devices in the namespace. Overlay is ""
	// where there is none. Every other port of the bridge is held to be a guest's.
	Bridge, Uplink, Overlay string
	Subnet                  netip.Prefix
	Gateway                 netip.Addr
	GatewayMAC              net.HardwareAddr
	// Transit is the namespace's address on the way to the host, HostTransit the host's.
	Transit, HostTransit netip.Addr
	// NAT lets guests open connections to the outside. Without it, and to a prefix in Denied, connections that are open are cut too.
	NAT bool
	// Port is the overlay's UDP port, which no guest may send to, wherever.
	Port uint16
	// Denied are destinations that guests may not reach. They may overlap and need no order.
	Denied []netip.Prefix
}

// Guest is one interface of a VM.
type Guest struct {
	// Port is the TAP's name in the network's namespace. It belongs to this guest alone.
	Port    string
	MAC     net.HardwareAddr
	Address netip.Addr
	// Dropped is where the port's counter starts if the kernel has none: what was read last, so that it goes on when somebody
	// has removed the table. A counter that the kernel has is kept.
	Dropped uint64
}

// Host is what the rules of one instance in the host's namespace are made of.
type Host struct {
	// Instance makes the table's name, imp-INSTANCE.
	Instance string
	// Prefix of the names of our veths' ends in the host's namespace, and of no other device there.
	Prefix string
	// Transits are the networks' ends of the ways to the host: the only sources that connections are taken from, and masqueraded.
	Transits []netip.Addr
	// Egress holds the only interface that what comes out of a veth may leave by, by the veth's name. A veth that is not in it
	// is not restricted.
	Egress map[string]string
	// Port is the overlay's UDP port, VNIs our networks' numbers in it, Peers the senders to accept for them. A VNI that is not
	// in VNIs is somebody else's, and is left alone.
	Port  uint16
	VNIs  []uint32
	Peers []Peer
}

// Peer is a node that sends frames of a network.
type Peer struct {
	VNI  uint32
	VTEP netip.Addr
}
