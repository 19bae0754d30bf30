package firewall

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Names in the host's namespace.
const (
	hostTables    = "imp-"     // and the instance
	transitsSet   = "transits" // the only sources that come out of our veths
	restrictedSet = "restricted"
	egressSet     = "egress" // veth . device: the only way out for what is restricted
	vnisSet       = "vnis"
	peersSet      = "peers" // VNI . sender

	maxVNI = 1<<24 - 1
)

// EnsureHost makes the instance's table in the host's namespace be what h says.
func EnsureHost(ns int, h Host) (changed bool, err error) {
	if err := h.check(); err != nil {
		return false, fmt.Errorf("writing rules of the host: %w", err)
	}
	conn, err := open(ns)
	if err != nil {
		return false, err
	}
	defer conn.CloseLasting() //nolint:errcheck // nothing was left to send
	t := h.table()
	if !t.differs(conn) {
		return false, nil
	}
	if err := t.write(conn); err != nil {
		return false, err
	}
	if err := conn.Flush(); err != nil {
		return false, fmt.Errorf("writing table %s of the host: %w", t.name, err)
	}
	return true, nil
}

// RemoveHost removes the instance's table; none is success.
func RemoveHost(ns int, instance string) error {
	conn, err := open(ns)
	if err != nil {
		return err
	}
	defer conn.CloseLasting() //nolint:errcheck // nothing was left to send
	kernel := &nftables.Table{Family: nftables.TableFamilyIPv4, Name: hostTables + instance}
	conn.AddTable(kernel) // or the deletion of one that is not there would fail
	conn.DelTable(kernel)
	if err := conn.Flush(); err != nil {
		return fmt.Errorf("removing table %s of the host: %w", kernel.Name, err)
	}
	return nil
}

func (h Host) table() table {
	const known = expr.CtStateBitESTABLISHED | expr.CtStateBitRELATED
	filter := func(hook *nftables.ChainHook, priority *nftables.ChainPriority) *base {
		return &base{nftables.ChainTypeFilter, *hook, *priority, nftables.ChainPolicyAccept}
	}
	source := rule{load(expr.PayloadBaseNetworkHeader, sourceOffset, 4, word(0))}
	// VNI and sender, as they lie in the set.
	sender := all(loadVNI(), rule{load(expr.PayloadBaseNetworkHeader, sourceOffset, 4, word(1))})
	wayBack := rule{&expr.Fib{Register: word(0), ResultOIF: true, FlagSADDR: true, FlagIIF: true}, equals(make([]byte, 4))} // there is none

	prerouting := []rule{
		// Whoever claims to be a peer must come from where the peer is. This is judged here, because the way back can be asked for
		// only here before Linux 6.0; and whatever the port, because another's DNAT may yet make it ours.
		all(protocol(unix.IPPROTO_UDP), sender, in(peersSet), wayBack, drop()),
		all(fromOurs(h.Prefix), state(known), accept()), // a guest's answer to the node has the guest's address
		all(fromOurs(h.Prefix), source, outside(transitsSet), drop()),
	}
	// What a guest asks the node itself for ends before anybody's DNAT, so that a NodePort is no way to it either.
	for _, kind := range []byte{unix.RTN_LOCAL, unix.RTN_BROADCAST, unix.RTN_ANYCAST, unix.RTN_MULTICAST} {
		mine := rule{&expr.Fib{Register: word(0), ResultADDRTYPE: true, FlagDADDR: true}, equals(binary.NativeEndian.AppendUint32(nil, uint32(kind)))}
		prerouting = append(prerouting, all(fromOurs(h.Prefix), mine, drop()))
	}
	leaves := all(rule{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: word(0)}, &expr.Meta{Key: expr.MetaKeyOIFNAME, Register: word(4)}}, outside(egressSet))
	return table{
		family: nftables.TableFamilyIPv4, name: hostTables + h.Instance, sets: h.sets(),
		chains: []chain{
			{name: "prerouting", base: filter(nftables.ChainHookPrerouting, nftables.ChainPriorityMangle), rules: prerouting},
			{name: "input", base: filter(nftables.ChainHookInput, nftables.ChainPriorityFilter), rules: []rule{
				all(udpTo(h.Port), loadVNI(), in(vnisSet), sender, outside(peersSet), drop()),
			}},
			{name: "forward", base: filter(nftables.ChainHookForward, nftables.ChainPriorityFilter), rules: []rule{
				// The node's own frames in the overlay are never forwarded. What a pod sends there would leave under the node's address
				// where its CNI masquerades, and be a peer's to the next node.
				all(udpTo(h.Port), loadVNI(), in(vnisSet), drop()),
				// Only the node itself opens connections to guests: not the outside, not pods, not another network's guests.
				all(toOurs(h.Prefix), fromOurs(h.Prefix), drop()),
				all(toOurs(h.Prefix), answered(), state(known), accept()),
				all(toOurs(h.Prefix), drop()),
				all(fromAny(), in(restrictedSet), leaves, drop()),
			}},
			{name: "postrouting", base: &base{nftables.ChainTypeNAT, *nftables.ChainHookPostrouting, *nftables.ChainPriorityNATSource, nftables.ChainPolicyAccept}, rules: []rule{
				all(not(toOurs(h.Prefix)), source, in(transitsSet), rule{&expr.Masq{}}),
			}},
		},
	}
}

func fromAny() rule { return rule{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: word(0)}} }

func (h Host) sets() []set {
	concat := func(types ...nftables.SetDatatype) nftables.SetDatatype {
		key, err := nftables.ConcatSetType(types...)
		if err != nil {
			panic(err) // two types of the library's own are not too many
		}
		return key
	}
	transits := set{name: transitsSet, key: nftables.TypeIPAddr}
	restricted := set{name: restrictedSet, key: nftables.TypeIFName}
	egress := set{name: egressSet, key: concat(nftables.TypeIFName, nftables.TypeIFName)}
	vnis := set{name: vnisSet, key: nftables.TypeInteger}
	peers := set{name: peersSet, key: concat(nftables.TypeInteger, nftables.TypeIPAddr)}
	add := func(s *set, key []byte) { s.add(nftables.SetElement{Key: key}) }
	for _, a := range h.Transits {
		add(&transits, a.AsSlice())
	}
	for veth, device := range h.Egress {
		add(&restricted, deviceName(veth))
		add(&egress, slices.Concat(deviceName(veth), deviceName(device)))
	}
	for _, vni := range h.VNIs {
		add(&vnis, vniKey(vni))
	}
	for _, p := range h.Peers {
		add(&peers, slices.Concat(vniKey(p.VNI), p.VTEP.AsSlice()))
	}
	return []set{transits, restricted, egress, vnis, peers}
}

func (h Host) check() error {
	if h.Instance == "" {
		return fmt.Errorf("an instance without a name has no table")
	}
	if err := checkName(h.Prefix); err != nil {
		return err
	}
	for veth, device := range h.Egress {
		if err := checkName(device); err != nil {
			return fmt.Errorf("egress of %s: %w", veth, err)
		}
		if err := checkName(veth); err != nil || !strings.HasPrefix(veth, h.Prefix) {
			return fmt.Errorf("%q is not a veth of ours", veth)
		}
	}
	for _, vni := range h.VNIs {
		if vni > maxVNI {
			return fmt.Errorf("%d is not a VNI of 24 bits", vni)
		}
	}
	addresses := slices.Clone(h.Transits)
	for _, p := range h.Peers {
		if p.VNI > maxVNI {
			return fmt.Errorf("%d is not a VNI of 24 bits", p.VNI)
		}
		addresses = append(addresses, p.VTEP)
	}
	for _, a := range addresses {
		if !a.Is4() {
			return fmt.Errorf("%q is not an IPv4 address", a)
		}
	}
	return nil
}
