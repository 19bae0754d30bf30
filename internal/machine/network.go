package machine

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/network"
)

// Limits of a network.Spec. They keep what one message may cost the host within bounds; a network of that size is the product's.
const (
	MaxPeers  = 100_000
	MaxDenied = 20_000
	minMTU    = 576 // RFC 791: what every host must take
	maxMTU    = 65535
	maxVNI    = 1<<24 - 1
	// Lengths of a subnet's prefix: shorter ones are no network of one owner, in longer ones there is no room for a guest.
	minPrefix = 8
	maxPrefix = 30
	// maxInterfaceName of Linux, without the final zero (IFNAMSIZ is 16).
	maxInterfaceName = 15
)

// ValidateNetwork refuses, with a Permanent InvalidSpec that names the field, a network that the runtime will not set up. It is to
// SetNetwork what Validate is to Ensure: addresses become routes, rules and forwarding entries of the host, the ID part of paths.
func ValidateNetwork(s network.Spec) error {
	for _, check := range []func(network.Spec) error{validateNetworkIdentity, validateNetworkNumbers, validateDenied, validatePeers} {
		if err := check(s); err != nil {
			return fault.Permanent(fault.New(fault.InvalidSpec, "checking network", err))
		}
	}
	return nil
}

// ValidateNetworkID checks the name of an order that carries no network.Spec.
func ValidateNetworkID(id string) error {
	if !idPattern.MatchString(id) {
		return fault.Permanent(fault.Errorf(fault.InvalidSpec, "checking network", "id must match %s", idPattern))
	}
	return nil
}

func validateNetworkIdentity(s network.Spec) error {
	switch {
	case !idPattern.MatchString(s.ID):
		return fmt.Errorf("id must match %s", idPattern)
	case !namePattern.MatchString(s.Namespace):
		return fmt.Errorf("namespace must match %s", namePattern)
	case !namePattern.MatchString(s.Name):
		return fmt.Errorf("name must match %s", namePattern)
	}
	return nil
}

func validateNetworkNumbers(s network.Spec) error {
	subnet, err := ipv4Prefix(s.Subnet)
	switch {
	case err != nil:
		return fmt.Errorf("subnet %w", err)
	case subnet.Bits() < minPrefix || subnet.Bits() > maxPrefix:
		return fmt.Errorf("subnet is a /%d and must be a /%d to a /%d", subnet.Bits(), minPrefix, maxPrefix)
	}
	for _, r := range notForHosts() {
		if subnet.Overlaps(r) {
			return fmt.Errorf("subnet must not hold addresses of %s", r)
		}
	}
	gateway, err := ipv4(s.Gateway)
	switch {
	case err != nil:
		return fmt.Errorf("gateway %w", err)
	case !hostOf(subnet, gateway):
		return fmt.Errorf("gateway %s must be a host's address in subnet %s", gateway, subnet)
	case s.MTU < minMTU || s.MTU > maxMTU:
		return fmt.Errorf("mtu is %d and must be %d to %d", s.MTU, minMTU, maxMTU)
	case s.VNI < 1 || s.VNI > maxVNI:
		return fmt.Errorf("vni is %d and must be 1 to %d", s.VNI, maxVNI)
	case s.EgressInterface != "" && !interfaceName(s.EgressInterface):
		return fmt.Errorf("egressInterface must be the name of an interface: at most %d printable characters without '/', ':' and blanks", maxInterfaceName)
	}
	return nil
}

func validateDenied(s network.Spec) error {
	if len(s.Denied) > MaxDenied {
		return fmt.Errorf("%d denied prefixes were given, at most %d are allowed", len(s.Denied), MaxDenied)
	}
	for i, d := range s.Denied {
		if _, err := ipv4Prefix(d); err != nil {
			return fmt.Errorf("denied[%d] %w", i, err)
		}
	}
	return nil
}

func validatePeers(s network.Spec) error {
	if len(s.Peers) > MaxPeers {
		return fmt.Errorf("%d peers were given, at most %d are allowed", len(s.Peers), MaxPeers)
	}
	subnet, gateway := netip.MustParsePrefix(s.Subnet), netip.MustParseAddr(s.Gateway) // checked before
	before := netip.Addr{}
	for i, p := range s.Peers {
		a, err := ipv4(p.Address)
		switch {
		case err != nil:
			return fmt.Errorf("peers[%d].address %w", i, err)
		case !hostOf(subnet, a) || a == gateway:
			return fmt.Errorf("peers[%d].address %s must be a guest's address in subnet %s", i, a, subnet)
		case before.IsValid() && before.Compare(a) >= 0:
			return fmt.Errorf("peers[%d].address %s must be greater than that before it, %s", i, a, before)
		case !unicastMAC(p.MAC):
			return fmt.Errorf("peers[%d].mac must be six bytes in hexadecimal, of one station", i)
		}
		before = a
		if v, err := ipv4(p.VTEP); err != nil {
			return fmt.Errorf("peers[%d].vtep %w", i, err)
		} else if !unicast(v) {
			return fmt.Errorf("peers[%d].vtep %s must be a node's address", i, v)
		}
	}
	return nil
}

// ipv4 reads an address in the one form that it has: what another program might read otherwise is refused.
func ipv4(text string) (netip.Addr, error) {
	a, err := netip.ParseAddr(text)
	if err != nil || !a.Is4() || a.String() != text {
		return netip.Addr{}, fmt.Errorf("must be an IPv4 address")
	}
	return a, nil
}

// ipv4Prefix reads a prefix without host bits.
func ipv4Prefix(text string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(text)
	if err != nil || !p.Addr().Is4() || p.Masked().String() != text {
		return netip.Prefix{}, fmt.Errorf("must be an IPv4 prefix without host bits")
	}
	return p, nil
}

// notForHosts are ranges without a single address that a station reachable by routing can have: this network, loopback,
// link-local, multicast and reserved (RFC 6890).
func notForHosts() []netip.Prefix {
	p := netip.MustParsePrefix
	return []netip.Prefix{p("0.0.0.0/8"), p("127.0.0.0/8"), p("169.254.0.0/16"), p("224.0.0.0/3")}
}

// unicast says that a is an address that a station reachable by routing can have.
func unicast(a netip.Addr) bool {
	return !slices.ContainsFunc(notForHosts(), func(r netip.Prefix) bool { return r.Contains(a) })
}

// hostOf says that a is in subnet and neither the network's own address nor the broadcast address.
func hostOf(subnet netip.Prefix, a netip.Addr) bool {
	return subnet.Contains(a) && a != subnet.Addr() && a != lastOf(subnet)
}

// lastOf is the highest address of an IPv4 prefix.
func lastOf(p netip.Prefix) netip.Addr {
	a := p.Masked().Addr().As4()
	for bit := p.Bits(); bit < 32; bit++ {
		a[bit/8] |= 1 << (7 - bit%8)
	}
	return netip.AddrFrom4(a)
}

// unicastMAC says that text is a MAC of one station, not of a group and not empty.
func unicastMAC(text string) bool {
	mac, err := net.ParseMAC(text)
	return err == nil && len(mac) == 6 && mac[0]&1 == 0 && mac.String() != "00:00:00:00:00:00"
}

// interfaceName follows the kernel's own rule (dev_valid_name), less what cannot be printed.
func interfaceName(text string) bool {
	return len(text) <= maxInterfaceName && text != "." && text != ".." && printable(text) && !strings.ContainsAny(text, "/: \t\n\v\f\r")
}
