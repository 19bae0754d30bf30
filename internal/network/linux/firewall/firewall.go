// Package firewall is the nftables rules of guests' networks: what a guest may send, what may leave its network, and what the
// host takes from it and from other nodes.
//
//	bridge imp (network's namespace)  from a TAP only ARP and IPv4 of the guest's own MAC and address; from the overlay no gateway's MAC
//	ip     imp (network's namespace)  pings to the gateway; what may leave to the host and what may come from it; SNAT to the veth's address
//	ip     imp-INSTANCE (host)        no address of the node for guests; nothing from one network to another; masquerade; VXLAN from peers alone
//	foreign forward chains (host)     accept rules for our veths at their heads, marked with the instance
//
// Rules are constant for a network or host: what comes and goes with guests are elements of sets. A table is compared with the
// kernel's as a whole, and written as a whole in one transaction where it differs: no packet meets half a table.
//
// ns is always an open descriptor of the network namespace that is meant; it stays the caller's. Calls for one namespace must not
// overlap: between looking and writing the kernel's state must not be changed by us. Errors are plain and say what was being done
// to which table.
package firewall

import (
	"errors"
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
	// Transits are the networks' ends of the ways to the host: sources that are masqueraded.
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

// EnsureNetwork makes both tables of the network's namespace be what n and guests say; guests are all there are. Counters of ports
// that stay are kept over a rewrite; packets dropped between its reading and its commit, some microseconds, are not counted.
// changed says that something was written: a sweep that expects nothing to do has found a stranger's hand.
func EnsureNetwork(ns int, n Network, guests []Guest) (changed bool, err error) {
	return false, errNotWritten
}

// AddGuest lets a guest send, in one transaction that touches sets alone and costs the same however many guests there are. A guest
// that is there already is success. It fails when EnsureNetwork has not been called or its tables are gone.
func AddGuest(ns int, g Guest) error { return errNotWritten }

// RemoveGuest undoes AddGuest; the port's counter goes with it, read it before. A guest that is not there, or has no table to be in,
// is success.
func RemoveGuest(ns int, g Guest) error { return errNotWritten }

// Dropped gives how many packets each port has sent that were not its to send, by the port's name. No table gives an empty map.
func Dropped(ns int) (map[string]uint64, error) { return nil, errNotWritten }

// EnsureHost makes the instance's table in the host's namespace be what h says.
func EnsureHost(ns int, h Host) (changed bool, err error) { return false, errNotWritten }

// RemoveHost removes the instance's table; none is success.
func RemoveHost(ns int, instance string) error { return errNotWritten }

// EnsureForward lets traffic from and to our veths pass foreign chains of the host that may drop what is forwarded, by rules at
// their heads that concern our veths alone. It finds those it has made by their mark and repairs them. blocked names what drops,
// or may drop, and could not be amended, each "family table chain: why"; nil when nothing stands in the way.
func EnsureForward(ns int, instance, prefix string) (blocked []string, err error) {
	return nil, errNotWritten
}

// RemoveForward takes the rules of EnsureForward out again. None is success; so is a chain that is gone.
func RemoveForward(ns int, instance string) error { return errNotWritten }

var errNotWritten = errors.New("not written yet") //nolint:gochecknoglobals // goes with the first body
