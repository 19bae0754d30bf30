package firewall

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Numbers of the wire. A frame's ether type is read from the frame: one with a VLAN tag has the tag's there, whatever is inside.
const (
	etherTypeOffset = 12
	macOffset       = 6  // of an Ethernet frame's source
	sourceOffset    = 12 // of an IPv4 packet's source
	targetOffset    = 16
	arpMACOffset    = 8 // of an ARP packet's sender
	arpSourceOffset = 14
	portOffset      = 2  // of a UDP datagram's destination
	vniOffset       = 12 // of a VXLAN header, after 8 bytes of UDP and 4 of flags (RFC 7348)
)

// word gives the register that is the n-th 32 bits of the registers' space, under the name that the kernel gives it back by: a rule
// that was read must be what was written.
func word(n uint32) uint32 {
	if n%4 == 0 {
		return unix.NFT_REG_1 + n/4
	}
	return unix.NFT_REG32_00 + n
}

// all joins matches and a verdict to a rule.
func all(parts ...rule) rule { return slices.Concat(parts...) }

func accept() rule              { return rule{&expr.Verdict{Kind: expr.VerdictAccept}} }
func drop() rule                { return rule{&expr.Verdict{Kind: expr.VerdictDrop}} }
func goTo(chain string) rule    { return rule{&expr.Verdict{Kind: expr.VerdictGoto, Chain: chain}} }
func from(device string) rule   { return meta(expr.MetaKeyIIFNAME, deviceName(device)) }
func to(device string) rule     { return meta(expr.MetaKeyOIFNAME, deviceName(device)) }
func protocol(number byte) rule { return meta(expr.MetaKeyL4PROTO, []byte{number}) }

// fromOurs and toOurs match devices whose names begin so: a comparison of as many bytes.
func fromOurs(prefix string) rule { return meta(expr.MetaKeyIIFNAME, []byte(prefix)) }
func toOurs(prefix string) rule   { return meta(expr.MetaKeyOIFNAME, []byte(prefix)) }

func meta(key expr.MetaKey, is []byte) rule {
	return rule{&expr.Meta{Key: key, Register: word(0)}, equals(is)}
}

func equals(data []byte) *expr.Cmp {
	return &expr.Cmp{Op: expr.CmpOpEq, Register: word(0), Data: data}
}

// not inverts the comparison that ends r.
func not(r rule) rule {
	last := *r[len(r)-1].(*expr.Cmp)
	last.Op = expr.CmpOpNeq
	return append(slices.Clone(r[:len(r)-1]), &last)
}

func load(base expr.PayloadBase, offset, length, register uint32) expr.Any {
	return &expr.Payload{DestRegister: register, Base: base, Offset: offset, Len: length}
}

func etherType(number uint16) rule {
	return rule{load(expr.PayloadBaseLLHeader, etherTypeOffset, 2, word(0)), equals(binary.BigEndian.AppendUint16(nil, number))}
}

func sourceIs(address netip.Addr) rule {
	return rule{load(expr.PayloadBaseNetworkHeader, sourceOffset, 4, word(0)), equals(address.AsSlice())}
}

func targetIs(address netip.Addr) rule {
	return rule{load(expr.PayloadBaseNetworkHeader, targetOffset, 4, word(0)), equals(address.AsSlice())}
}

func sourceWithin(prefix netip.Prefix) rule { return within(sourceOffset, prefix) }
func targetWithin(prefix netip.Prefix) rule { return within(targetOffset, prefix) }

func within(offset uint32, prefix netip.Prefix) rule {
	return rule{load(expr.PayloadBaseNetworkHeader, offset, 4, word(0)), masked(mask(prefix.Bits())), equals(prefix.Masked().Addr().AsSlice())}
}

func mask(bits int) []byte { return binary.BigEndian.AppendUint32(nil, ^uint32(0)<<(32-bits)) }

func masked(mask []byte) expr.Any {
	return &expr.Bitwise{SourceRegister: word(0), DestRegister: word(0), Len: uint32(len(mask)), Mask: mask, Xor: make([]byte, len(mask))} //nolint:gosec // a few bytes
}

func udpTo(port uint16) rule {
	return all(protocol(unix.IPPROTO_UDP), rule{load(expr.PayloadBaseTransportHeader, portOffset, 2, word(0)), equals(binary.BigEndian.AppendUint16(nil, port))})
}

// loadVNI puts the network's number into the first register; the byte behind it is reserved and anybody's.
func loadVNI() rule {
	return rule{load(expr.PayloadBaseTransportHeader, vniOffset, 4, word(0)), masked([]byte{0xff, 0xff, 0xff, 0})}
}

func vniKey(vni uint32) []byte { return binary.BigEndian.AppendUint32(nil, vni<<8) }

// in matches when what lies in the registers from the first on is in the set, outside when it is not.
func in(set string) rule { return rule{&expr.Lookup{SourceRegister: word(0), SetName: set}} }
func outside(set string) rule {
	return rule{&expr.Lookup{SourceRegister: word(0), SetName: set, Invert: true}}
}

// state matches packets that conntrack gives one of the states (expr.CtStateBit...).
func state(bits uint32) rule {
	return rule{&expr.Ct{Key: expr.CtKeySTATE, Register: word(0)}, masked(binaryutil.NativeEndian.PutUint32(bits)),
		&expr.Cmp{Op: expr.CmpOpNeq, Register: word(0), Data: make([]byte, 4)}}
}

// asked matches packets of the side that opened the connection, answered those of the other (enum ip_conntrack_dir).
func asked() rule    { return direction(0) }
func answered() rule { return direction(1) }

func direction(number byte) rule {
	return rule{&expr.Ct{Key: expr.CtKeyDIRECTION, Register: word(0)}, equals([]byte{number})}
}

// deviceName is a name as the kernel has it in a register.
func deviceName(name string) []byte {
	return append([]byte(name), make([]byte, unix.IFNAMSIZ-len(name))...)
}

// ranges gives the elements of an interval set that holds the prefixes, which may overlap: the kernel takes only ranges that do not.
func ranges(prefixes []netip.Prefix) []nftables.SetElement {
	ordered := slices.SortedFunc(slices.Values(prefixes), func(a, b netip.Prefix) int { return a.Masked().Addr().Compare(b.Masked().Addr()) })
	elements := []nftables.SetElement{}
	begin, end, open := uint32(0), uint64(0), false // end is the first address behind, which may be beyond all addresses
	closing := func() {
		if !open {
			return
		}
		elements = append(elements, nftables.SetElement{Key: binary.BigEndian.AppendUint32(nil, begin)})
		if end <= uint64(^uint32(0)) { // without an end a range goes on to the last address
			elements = append(elements, nftables.SetElement{Key: binary.BigEndian.AppendUint32(nil, uint32(end)), IntervalEnd: true})
		}
	}
	for _, p := range ordered {
		from := binary.BigEndian.Uint32(p.Masked().Addr().AsSlice())
		behind := uint64(from) + 1<<(32-p.Bits())
		if open && uint64(from) <= end {
			end = max(end, behind)
			continue
		}
		closing()
		begin, end, open = from, behind, true
	}
	closing()
	return elements
}
