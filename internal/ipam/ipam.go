// Package ipam decides which address of a subnet a guest may have. It is pure: what is taken is told by the caller.
package ipam

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"net/netip"
)

// The lengths of subnets that there are pools of: /8 to /30. A /31 has no room for a gateway and a guest.
const (
	minBits = 8
	maxBits = 30
)

// Pool is the addresses of a subnet that guests may have: all but the network's own, the broadcast address and the gateway. It
// takes the same room whatever the subnet's size. The zero value is none; Parse makes one.
type Pool struct {
	subnet  netip.Prefix
	gateway netip.Addr
}

// Parse reads an IPv4 subnet in CIDR form and its gateway in dotted form; "" is the first host address.
func Parse(subnet, gateway string) (Pool, error) {
	prefix, err := netip.ParsePrefix(subnet)
	switch {
	case err != nil || !prefix.Addr().Is4():
		return Pool{}, fmt.Errorf("subnet %q is not an IPv4 subnet in CIDR form, like 10.44.0.0/24", subnet)
	case prefix != prefix.Masked():
		return Pool{}, fmt.Errorf("subnet %s has host bits set: write %s", subnet, prefix.Masked())
	case prefix.Bits() < minBits || prefix.Bits() > maxBits:
		return Pool{}, fmt.Errorf("subnet %s is none of /%d to /%d", subnet, minBits, maxBits)
	}
	p := Pool{subnet: prefix}
	p.gateway = p.at(1)
	if gateway == "" {
		return p, nil
	}
	address, err := netip.ParseAddr(gateway)
	if err != nil || !address.Is4() {
		return Pool{}, fmt.Errorf("gateway %q is not an IPv4 address", gateway)
	}
	if reason := p.refuse(address); reason != "" {
		return Pool{}, fmt.Errorf("gateway %s is %s", gateway, reason)
	}
	p.gateway = address
	return p, nil
}

// Subnet of the pool.
func (p Pool) Subnet() netip.Prefix { return p.subnet }

// Gateway of the subnet.
func (p Pool) Gateway() netip.Addr { return p.gateway }

// Capacity is how many guests there are addresses for.
func (p Pool) Capacity() int64 { return int64(p.size()) - 3 }

// size is the number of all addresses of the subnet, at most 2^24.
func (p Pool) size() uint32 { return 1 << (32 - p.subnet.Bits()) }

// at gives the n-th address of the subnet; 0 is the network's own.
func (p Pool) at(n uint32) netip.Addr {
	address := p.subnet.Addr().As4()
	binary.BigEndian.PutUint32(address[:], binary.BigEndian.Uint32(address[:])+n)
	return netip.AddrFrom4(address)
}

// refuse says what address is that a guest or a gateway cannot have, in words that follow "is"; "" if it is a host address.
func (p Pool) refuse(address netip.Addr) string {
	switch {
	case !p.subnet.Contains(address):
		return "outside subnet " + p.subnet.String()
	case address == p.at(0):
		return "the address of subnet " + p.subnet.String() + " itself"
	case address == p.at(p.size()-1):
		return "the broadcast address of subnet " + p.subnet.String()
	}
	return ""
}

// Check says why no guest can have the address, in words that follow it: "is outside subnet 10.44.0.0/24". nil: one can.
func (p Pool) Check(address netip.Addr) error {
	reason := p.refuse(address)
	if address == p.gateway {
		reason = "the gateway of subnet " + p.subnet.String()
	}
	if reason != "" {
		return fmt.Errorf("is %s", reason)
	}
	return nil
}

// Pick gives a free address; false if there is none. The search begins at a place made of seed, in general a VM's UID: two that
// pick at one time, without seeing each other's picks, seldom pick the same, and one that picks again with the same knowledge picks
// the same. taken is asked of at most as many addresses as it says yes to, and one more.
func (p Pool) Pick(seed string, taken func(netip.Addr) bool) (netip.Addr, bool) {
	hash := fnv.New64a()
	_, _ = hash.Write([]byte(seed)) // it never fails
	hosts := p.size() - 2
	first := uint32(mix(hash.Sum64()) % uint64(hosts))
	for i := range hosts {
		address := p.at(1 + (first+i)%hosts)
		if address != p.gateway && !taken(address) {
			return address, true
		}
	}
	return netip.Addr{}, false
}

// mix spreads what differs in a few bits over all of them (the end of MurmurHash3): UIDs that are made one after another share most
// of their digits, and FNV keeps such neighbours near each other.
func mix(h uint64) uint64 {
	h ^= h >> 33
	h *= 0xff51afd7ed558ccd
	h ^= h >> 33
	h *= 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}

// Range is a part of the address space that somebody else has. Of says whose it is, in words for a user: "the address of node a".
type Range struct {
	Prefix netip.Prefix
	Of     string
}

// Overlapping gives those of ranges that share an address with the pool's subnet, in their order.
func (p Pool) Overlapping(ranges []Range) []Range {
	var found []Range
	for _, r := range ranges {
		if p.subnet.Overlaps(r.Prefix) {
			found = append(found, r)
		}
	}
	return found
}
