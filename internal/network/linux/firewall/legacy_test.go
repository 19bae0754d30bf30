package firewall_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// xtRule is a rule of legacy iptables as its program would be asked for it.
type xtRule struct {
	in, out string // a name, or the beginning of one and a +
	not     byte   // 1: any device to come by but in, 2: to leave by but out
	source  string // an address
	states  uint16 // of connections
	to      string // DROP, ACCEPT, RETURN, REJECT, LOG or a chain's name
}

// iptables replaces the legacy filter table of the namespace: the forward chain's rules and policy, and chains of the user's.
func (ns namespace) iptables(t *testing.T, policy string, forward []xtRule, chains map[string][]xtRule) {
	t.Helper()
	blob, starts, count := []byte{}, map[string]int{}, 0
	add := func(r []byte) { blob, count = append(blob, r...), count+1 }
	standard := func(verdict int32) []byte {
		return xtExtension("", 0, binary.NativeEndian.AppendUint32(nil, uint32(verdict)))
	}
	// Chains of the user come behind the hooks' in the table, so their places must be known: every rule's length is.
	const hook, end = 112 + 40, 112 + 40
	at := 3 * hook
	for _, r := range forward {
		at += len(xtEncode(r, nil))
	}
	for name, rules := range chains {
		starts[name] = at + 112 + 64
		at = starts[name] + end
		for _, r := range rules {
			at += len(xtEncode(r, nil))
		}
	}
	verdicts := map[string]int32{"DROP": -1, "ACCEPT": -2}
	hooks := [5]uint32{}
	under := [5]uint32{}
	add(xtJoin(make([]byte, 112), nil, standard(-2))) // INPUT
	hooks[2] = uint32(len(blob))
	for _, r := range forward {
		add(xtEncode(r, starts))
	}
	under[2] = uint32(len(blob))
	add(xtJoin(make([]byte, 112), nil, standard(verdicts[policy])))
	hooks[3], under[3] = uint32(len(blob)), uint32(len(blob))
	add(xtJoin(make([]byte, 112), nil, standard(-2))) // OUTPUT
	for name := range starts {
		add(xtJoin(make([]byte, 112), nil, xtExtension("ERROR", 0, append([]byte(name), make([]byte, 32-len(name))...))))
		if len(blob) != starts[name] {
			t.Fatal("only one chain of the user's, or their order must be kept")
		}
		for _, r := range chains[name] {
			add(xtEncode(r, starts))
		}
		add(xtJoin(make([]byte, 112), nil, standard(-5)))
	}
	add(xtJoin(make([]byte, 112), nil, xtExtension("ERROR", 0, append([]byte("ERROR"), make([]byte, 27)...))))

	if err := ns.try(func() error {
		socket, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(socket)
		info := append([]byte("filter"), make([]byte, 84-6)...) // the question makes the table
		length := uint32(len(info))
		if _, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(socket), unix.SOL_IP, 64, uintptr(unsafe.Pointer(&info[0])), uintptr(unsafe.Pointer(&length)), 0); errno != 0 {
			return errno
		}
		before := binary.NativeEndian.Uint32(info[76:])
		counters := make([]byte, 16*before)
		replace := append([]byte("filter"), make([]byte, 32-6)...)
		for _, n := range append([]uint32{0xe, uint32(count), uint32(len(blob))}, append(hooks[:], under[:]...)...) {
			replace = binary.NativeEndian.AppendUint32(replace, n)
		}
		replace = binary.NativeEndian.AppendUint32(replace, before)
		replace = binary.NativeEndian.AppendUint64(replace, uint64(uintptr(unsafe.Pointer(&counters[0]))))
		replace = append(replace, blob...)
		if _, _, errno := unix.Syscall6(unix.SYS_SETSOCKOPT, uintptr(socket), unix.SOL_IP, 64, uintptr(unsafe.Pointer(&replace[0])), uintptr(len(replace)), 0); errno != 0 {
			return fmt.Errorf("replacing table: %w", errno)
		}
		return nil
	}); errors.Is(err, unix.ENOPROTOOPT) {
		missing(t, "a kernel with legacy iptables")
	} else if err != nil {
		t.Fatal(err)
	}
}

func xtEncode(r xtRule, chains map[string]int) []byte {
	h := make([]byte, 112)
	if r.source != "" {
		copy(h[0:], addr(r.source).AsSlice())
		copy(h[8:], []byte{255, 255, 255, 255})
	}
	for _, d := range []struct {
		name        string
		name0, mask int
	}{{r.in, 16, 48}, {r.out, 32, 64}} {
		begin, many := strings.CutSuffix(d.name, "+")
		copy(h[d.name0:], begin)
		for i := range len(begin) {
			h[d.mask+i] = 0xff
		}
		if !many && d.name != "" {
			h[d.mask+len(begin)] = 0xff // its end
		}
	}
	h[83] = r.not
	matches := []byte{}
	if r.states != 0 {
		m := make([]byte, 164)
		binary.NativeEndian.PutUint16(m[146:], 1)
		binary.NativeEndian.PutUint16(m[150:], r.states)
		matches = xtExtension("conntrack", 3, m)
	}
	verdict, ok := map[string]int32{"DROP": -1, "ACCEPT": -2, "RETURN": -5}[r.to]
	switch {
	case r.to == "REJECT":
		return xtJoin(h, matches, xtExtension("REJECT", 0, make([]byte, 4)))
	case r.to == "LOG":
		return xtJoin(h, matches, xtExtension("LOG", 0, make([]byte, 32)))
	case !ok:
		verdict = int32(chains[r.to])
	}
	return xtJoin(h, matches, xtExtension("", 0, binary.NativeEndian.AppendUint32(nil, uint32(verdict))))
}

// xtExtension is a match or a target, filled up to eight bytes.
func xtExtension(name string, revision byte, data []byte) []byte {
	e := make([]byte, 32, 256)
	copy(e[2:], name)
	e[31] = revision
	e = append(e, data...)
	for len(e)%8 != 0 {
		e = append(e, 0)
	}
	binary.NativeEndian.PutUint16(e, uint16(len(e)))
	return e
}

func xtJoin(head, matches, target []byte) []byte {
	r := append(append(append([]byte{}, head...), matches...), target...)
	binary.NativeEndian.PutUint16(r[88:], uint16(112+len(matches)))
	binary.NativeEndian.PutUint16(r[90:], uint16(len(r)))
	return r
}

func TestLegacyIptablesIsNamedWhereItSurelyDrops(t *testing.T) {
	t.Parallel()
	const established, opening = 1<<1 | 1<<2, 1 << 3
	ours := prefix + "+"
	for sentence, tc := range map[string]struct {
		policy         string
		forward, chain []xtRule // the chain is "users"
		named, reaches bool
	}{
		"nothing is dropped":                       {"ACCEPT", nil, nil, false, true},
		"the policy drops":                         {"DROP", nil, nil, true, false},
		"the last rule rejects":                    {"ACCEPT", []xtRule{{to: "REJECT"}}, nil, true, false},
		"a rule drops what another bridge sends":   {"ACCEPT", []xtRule{{in: "docker0", to: "DROP"}}, nil, false, true},
		"a rule drops what comes by no bridge":     {"ACCEPT", []xtRule{{in: "docker0", not: 1, to: "DROP"}}, nil, true, false},
		"it was amended by hand":                   {"DROP", []xtRule{{in: ours, to: "ACCEPT"}, {out: ours, to: "ACCEPT"}}, nil, false, true},
		"it was amended for one way alone":         {"DROP", []xtRule{{in: ours, to: "ACCEPT"}}, nil, true, false},
		"answers pass already":                     {"DROP", []xtRule{{states: established, to: "ACCEPT"}, {in: ours, to: "ACCEPT"}}, nil, false, true},
		"only answers pass":                        {"DROP", []xtRule{{states: established, to: "ACCEPT"}}, nil, true, false},
		"new connections pass, answers do not":     {"DROP", []xtRule{{states: opening, to: "ACCEPT"}}, nil, true, false},
		"Docker's chains lead to nothing of ours":  {"DROP", []xtRule{{to: "users"}, {out: "docker0", states: established, to: "ACCEPT"}, {in: "docker0", to: "ACCEPT"}}, []xtRule{{to: "RETURN"}}, true, false},
		"the user's chain lets ours pass":          {"DROP", []xtRule{{to: "users"}}, []xtRule{{in: ours, to: "ACCEPT"}, {out: ours, to: "ACCEPT"}}, false, true},
		"the user's chain drops":                   {"ACCEPT", []xtRule{{in: ours, to: "users"}}, []xtRule{{to: "LOG"}, {to: "DROP"}}, true, false},
		"the way to the outside passes":            {"DROP", []xtRule{{out: "eth0", to: "ACCEPT"}, {in: "eth0", to: "ACCEPT"}}, nil, false, true},
		"some addresses pass, ours perhaps":        {"DROP", []xtRule{{source: "169.254.1.1", to: "ACCEPT"}, {out: ours, to: "ACCEPT"}}, nil, false, true},
		"some addresses pass, ours do not, unsure": {"DROP", []xtRule{{source: "203.0.113.1", to: "ACCEPT"}, {out: ours, to: "ACCEPT"}}, nil, false, false},
	} {
		t.Run(sentence, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			s.outside.listen(t, "198.51.100.9:80")
			s.host.iptables(t, tc.policy, tc.forward, map[string][]xtRule{"users": tc.chain})
			blocked := s.host.ensureForward(t, "one", prefix)
			if named := len(blocked) == 1 && strings.HasPrefix(blocked[0], "ip filter FORWARD: it is of legacy iptables"); named != tc.named || len(blocked) > 1 {
				t.Errorf("blocked are %q", blocked)
			}
			if tc.reaches {
				s.networks[0].inside[0].mustConnect(t, "198.51.100.9:80", "192.0.2.1")
			} else {
				s.networks[0].inside[0].mustNotConnect(t, "198.51.100.9:80")
			}
		})
	}
}

func TestLookingForLegacyIptablesMakesNoTable(t *testing.T) {
	t.Parallel()
	ns := newNamespace(t)
	if blocked := ns.ensureForward(t, "one", prefix); blocked != nil {
		t.Errorf("blocked are %q", blocked)
	}
	ns.do(t, func() error {
		names, err := os.ReadFile("/proc/thread-self/net/ip_tables_names")
		if errors.Is(err, os.ErrNotExist) {
			missing(t, "a kernel with legacy iptables")
		}
		if len(names) != 0 {
			t.Errorf("there are tables %q", names)
		}
		return err
	})
}
