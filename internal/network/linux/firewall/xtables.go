package firewall

import (
	"encoding/binary"
	"slices"

	"golang.org/x/sys/unix"
)

// Structures of a rule of legacy iptables, offsets in bytes (struct ipt_entry, xt_entry_match, xt_entry_target). A rule begins with
// what it says about addresses and devices, goes on with matches, and ends with a target.
const (
	maskOffset                       = 8 // of source and destination, four bytes each
	inName, outName, inMask, outMask = 16, 32, 48, 64
	protocolOffset, flagsOffset      = 80, 82
	invertOffset                     = 83
	targetAt, nextAt                 = 88, 90 // distances from the rule's beginning, 16 bits
	matchesOffset                    = 112
	extensionHeader                  = 32 // size, name of 29 bytes, revision
	flagGoto                         = 2
	invertIn, invertOut              = 1, 2
)

// Verdicts of the standard target; others are offsets of chains.
const (
	xtDrop, xtAccept, xtQueue, xtReturn = -1, -2, -4, -5
)

// legacy is a table of iptables' legacy variant: rules as the kernel has them, and where the chain of the forward hook begins.
type legacy struct {
	rules   []byte
	forward int
}

// device is known by its name or by how its name begins. One without a name is any.
type device struct {
	name   string
	begins bool
}

// passage is a kind of packets: by which device they come and go, and whether they open a connection or answer in one.
type passage struct {
	in, out device
	opens   bool
}

// sureness of a match.
type sureness int

const (
	never sureness = iota
	perhaps
	always
)

// fate of a kind of packets in a chain.
type fate int

const (
	returned fate = iota
	unsure
	passed
	ended
)

// ends says whether packets of that kind surely end in the forward chain. Where some may be accepted by what cannot be judged
// from here, they do not.
func (t legacy) ends(p passage) bool {
	return len(t.rules) > 0 && t.walk(t.forward, p, 0) == ended
}

// walk follows the packets from the rule at that offset to the end of its chain.
func (t legacy) walk(at int, p passage, depth int) fate {
	doubt := false
	for depth < 64 && at >= 0 && at+matchesOffset <= len(t.rules) {
		r := t.rules[at:]
		next, target := int(binary.NativeEndian.Uint16(r[nextAt:])), int(binary.NativeEndian.Uint16(r[targetAt:]))
		if next < matchesOffset || target < matchesOffset || target+extensionHeader > next || next > len(r) {
			return unsure
		}
		r = r[:next]
		at += next
		sure := p.matches(r[:target])
		if sure == never {
			continue
		}
		f, ok := t.judge(r, target, at, p, depth)
		switch {
		case !ok:
			continue
		case sure == always && f == ended && doubt:
			return unsure
		case sure == always:
			return f
		case f != ended:
			doubt = true // some went another way
		}
	}
	return unsure // a chain ends with a rule that always matches
}

// judge gives the fate of packets that match the rule, whose target is at that offset in it; not ok if they go on to the next.
func (t legacy) judge(r []byte, target, next int, p passage, depth int) (f fate, ok bool) {
	switch name := extensionName(r[target:]); name {
	case "":
	case "REJECT":
		return ended, true
	case "LOG", "NFLOG", "MARK", "CONNMARK", "TCPMSS", "AUDIT", "TRACE", "DSCP", "CLASSIFY", "CT":
		return returned, false
	default:
		return unsure, true
	}
	if target+extensionHeader+4 > len(r) {
		return unsure, true
	}
	switch verdict := int(int32(number(r[target+extensionHeader:]))); { //nolint:gosec // it is signed
	case verdict == xtDrop:
		return ended, true
	case verdict == xtAccept:
		return passed, true
	case verdict == xtReturn:
		return returned, true
	case verdict < 0: // xtQueue: to a program, which may do anything
		return unsure, true
	case verdict == next: // a rule without a target
		return returned, false
	default:
		f := t.walk(verdict, p, depth+1)
		return f, f != returned || r[flagsOffset]&flagGoto != 0
	}
}

// matches says whether the rule, without its target, matches packets of that kind.
func (p passage) matches(r []byte) sureness {
	sure := always
	for _, b := range r[maskOffset : maskOffset+8] {
		if b != 0 {
			sure = perhaps // an address
		}
	}
	if binary.NativeEndian.Uint16(r[protocolOffset:]) != 0 || r[flagsOffset]&^flagGoto != 0 {
		sure = perhaps
	}
	sure = min(sure, p.in.matches(r[inName:], r[inMask:], r[invertOffset]&invertIn != 0))
	sure = min(sure, p.out.matches(r[outName:], r[outMask:], r[invertOffset]&invertOut != 0))
	for m := r[matchesOffset:]; len(m) >= extensionHeader; {
		size := int(binary.NativeEndian.Uint16(m))
		if size < extensionHeader || size > len(m) {
			return min(sure, perhaps)
		}
		sure = min(sure, p.matchesExtension(extensionName(m), m[extensionHeader-1], m[extensionHeader:size]))
		m = m[size:]
	}
	return sure
}

// matches compares bytes of a name where the mask says so: all of them for a device, those before the + for many.
func (d device) matches(name, mask []byte, inverted bool) sureness {
	known := []byte(d.name)
	if !d.begins && d.name != "" {
		known = deviceName(d.name)
	}
	sure := always
	for i := range unix.IFNAMSIZ {
		switch {
		case mask[i] == 0:
		case i >= len(known):
			sure = min(sure, perhaps)
		case known[i] != name[i]:
			sure = never
		}
	}
	if inverted {
		return always - sure
	}
	return sure
}

// matchesExtension judges comments and states of connections; of others nothing is known.
func (p passage) matchesExtension(name string, revision byte, data []byte) sureness {
	const (
		established, opening = 1 << 1, 1 << 3 // XT_CONNTRACK_STATE_BIT
		flags, inverts, mask = 146, 148, 150  // in struct xt_conntrack_mtinfo1 to 3
		stateFlag            = 1
	)
	var states uint32
	switch {
	case name == "comment":
		return always
	case name == "state" && len(data) >= 4:
		states = number(data)
	case name == "conntrack" && slices.Contains([]byte{1, 2, 3}, revision) && len(data) >= mask+2:
		if binary.NativeEndian.Uint16(data[flags:]) != stateFlag || binary.NativeEndian.Uint16(data[inverts:]) != 0 {
			return perhaps
		}
		if states = uint32(binary.NativeEndian.Uint16(data[mask:])); revision == 1 {
			states = uint32(data[mask]) // it is a byte there
		}
	default:
		return perhaps
	}
	if p.opens && states&opening != 0 || !p.opens && states&established != 0 {
		return always
	}
	return never
}

// extensionName of a match or target; the standard target has none.
func extensionName(e []byte) string { return unix.ByteSliceToString(e[2 : extensionHeader-1]) }

func number(b []byte) uint32 { return binary.NativeEndian.Uint32(b) }
