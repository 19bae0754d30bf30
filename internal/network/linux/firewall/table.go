package firewall

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
)

const (
	// bufferBytes of a socket: a transaction is one message, and its acknowledgements come at once. A network of 1000 guests with
	// 5000 denied nodes is half a MiB, the kernel's default a fifth.
	bufferBytes = 8 << 20
	// patience with the kernel: it answers a batch that it had no memory for with one error instead of one per message, and the
	// reader would wait for the others for ever.
	patience = 30 * time.Second
	// elementsAtOnce in one message: the list's length is a 16-bit number of bytes (struct nlattr).
	elementsAtOnce = 512
)

// table as it ought to be, or as it was found.
type table struct {
	family nftables.TableFamily
	name   string
	sets   []set
	chains []chain
}

// set holds keys; one that is an interval holds starts and ends of ranges. Each key of a counted set counts the packets that
// matched it, above the base that its comment holds: the library cannot say where a counter starts.
type set struct {
	name              string
	key               nftables.SetDatatype
	interval, counted bool
	elements          []nftables.SetElement
	// strange is set of one that was found with properties which none of ours has.
	strange bool
	// keys that were added.
	keys map[string]bool
}

// add takes an element in, once: the kernel would keep one of two, which is not what was wanted and never would be.
func (s *set) add(e nftables.SetElement) {
	if s.keys[string(e.Key)] {
		return
	}
	if s.keys == nil {
		s.keys = map[string]bool{}
	}
	s.keys[string(e.Key)] = true
	s.elements = append(s.elements, e)
}

type chain struct {
	name string
	// base is nil for a chain that others jump to.
	base  *base
	rules []rule
}

type base struct {
	kind     nftables.ChainType
	hook     nftables.ChainHook
	priority nftables.ChainPriority
	policy   nftables.ChainPolicy
}

type rule []expr.Any

// open gives a connection to nftables in the namespace. The caller closes it by CloseLasting.
func open(ns int) (*nftables.Conn, error) {
	conn, err := nftables.New(nftables.WithNetNSFd(ns), nftables.AsLasting(), nftables.WithSockOptions(
		func(c *netlink.Conn) error { return c.SetWriteBuffer(bufferBytes) },
		func(c *netlink.Conn) error { return c.SetReadBuffer(bufferBytes) },
		func(c *netlink.Conn) error { return c.SetDeadline(time.Now().Add(patience)) },
	))
	if err != nil {
		return nil, fmt.Errorf("opening nftables: %w", err)
	}
	return conn, nil
}

// write adds to the transaction what makes the kernel's table be t, whatever it was.
func (t table) write(conn *nftables.Conn) error {
	kernel := &nftables.Table{Family: t.family, Name: t.name}
	conn.AddTable(kernel) // or the deletion of one that is not there would fail
	conn.DelTable(kernel)
	conn.AddTable(kernel)
	for i, s := range t.sets {
		// An ID of its own keeps the library from counting in a variable that all connections share.
		in := &nftables.Set{Table: kernel, ID: uint32(i + 1), Name: s.name, KeyType: s.key, Interval: s.interval, Counter: s.counted} //nolint:gosec // a handful
		if err := conn.AddSet(in, nil); err != nil {
			return fmt.Errorf("writing set %s of table %s: %w", s.name, t.name, err)
		}
		for some := range slices.Chunk(s.elements, elementsAtOnce) {
			if err := conn.SetAddElements(in, some); err != nil {
				return fmt.Errorf("writing set %s of table %s: %w", s.name, t.name, err)
			}
		}
	}
	chains := make([]*nftables.Chain, len(t.chains))
	for i, c := range t.chains { // all before the first rule, which may jump to any
		chains[i] = &nftables.Chain{Table: kernel, Name: c.name}
		if c.base != nil {
			chains[i].Type, chains[i].Hooknum, chains[i].Priority, chains[i].Policy = c.base.kind, &c.base.hook, &c.base.priority, &c.base.policy
		}
		conn.AddChain(chains[i])
	}
	for i, c := range t.chains {
		for _, r := range c.rules {
			conn.AddRule(&nftables.Rule{Table: kernel, Chain: chains[i], Exprs: r})
		}
	}
	return nil
}

// find gives the kernel's table of that family and name, nil if there is none.
func find(conn *nftables.Conn, family nftables.TableFamily, name string) (*nftables.Table, error) {
	tables, err := conn.ListTablesOfFamily(family)
	if err != nil {
		return nil, fmt.Errorf("listing tables: %w", err)
	}
	for _, t := range tables {
		if t.Name == name && t.Family == family {
			return t, nil
		}
	}
	return nil, nil
}

// differs says whether the kernel's table is not t. One that cannot be understood is not t: writing it anew is the cure, and fails
// where reading failed because the kernel cannot be talked to.
func (t table) differs(conn *nftables.Conn) bool {
	kernel, err := find(conn, t.family, t.name)
	if err != nil || kernel == nil || kernel.Flags != 0 { // a dormant table has rules that do nothing
		return true
	}
	found, err := read(conn, kernel)
	return err != nil || !t.equal(found)
}

func read(conn *nftables.Conn, kernel *nftables.Table) (table, error) {
	t := table{family: kernel.Family, name: kernel.Name}
	chains, err := conn.ListChainsOfTableFamily(kernel.Family)
	if err != nil {
		return table{}, fmt.Errorf("listing chains: %w", err)
	}
	for _, c := range chains {
		if c.Table.Name != kernel.Name {
			continue
		}
		found := chain{name: c.Name}
		if c.Hooknum != nil && c.Priority != nil && c.Policy != nil {
			found.base = &base{kind: c.Type, hook: *c.Hooknum, priority: *c.Priority, policy: *c.Policy}
		}
		rules, err := conn.GetRules(kernel, c)
		if err != nil {
			return table{}, fmt.Errorf("reading chain %s of table %s: %w", c.Name, kernel.Name, err)
		}
		for _, r := range rules {
			found.rules = append(found.rules, r.Exprs)
		}
		t.chains = append(t.chains, found)
	}
	sets, err := conn.GetSets(kernel)
	if err != nil {
		return table{}, fmt.Errorf("listing sets of table %s: %w", kernel.Name, err)
	}
	for _, s := range sets {
		found := set{name: s.Name, key: s.KeyType, interval: s.Interval}
		found.strange = s.IsMap || s.HasTimeout || s.Dynamic || s.Anonymous || s.Constant || s.Concatenation
		if found.elements, err = conn.GetSetElements(s); err != nil {
			return table{}, fmt.Errorf("reading set %s of table %s: %w", s.Name, kernel.Name, err)
		}
		t.sets = append(t.sets, found)
	}
	return t, nil
}

// equal says whether found, which was read, is t. Counts and the order of sets, chains and elements do not matter.
func (t table) equal(found table) bool {
	byName := func(a, b chain) int { return cmp.Compare(a.name, b.name) }
	if len(t.chains) != len(found.chains) || len(t.sets) != len(found.sets) {
		return false
	}
	mine, other := slices.SortedFunc(slices.Values(t.chains), byName), slices.SortedFunc(slices.Values(found.chains), byName)
	for i, c := range mine {
		o := other[i]
		if c.name != o.name || (c.base == nil) != (o.base == nil) || c.base != nil && *c.base != *o.base {
			return false
		}
		if !slices.EqualFunc(c.rules, o.rules, func(a, b rule) bool { return bytes.Equal(a.encode(t.family), b.encode(t.family)) }) {
			return false
		}
	}
	byNameOfSet := func(a, b set) int { return cmp.Compare(a.name, b.name) }
	return slices.EqualFunc(slices.SortedFunc(slices.Values(t.sets), byNameOfSet),
		slices.SortedFunc(slices.Values(found.sets), byNameOfSet), set.equal)
}

func (s set) equal(found set) bool {
	if found.strange || s.name != found.name || s.interval != found.interval || s.key.Bytes != found.key.Bytes || s.key.GetNFTMagic() != found.key.GetNFTMagic() {
		return false
	}
	for _, e := range found.elements {
		if s.counted != (e.Counter != nil) {
			return false
		}
	}
	order := func(a, b nftables.SetElement) int {
		if c := bytes.Compare(a.Key, b.Key); c != 0 || a.IntervalEnd == b.IntervalEnd {
			return c
		}
		if a.IntervalEnd {
			return 1
		}
		return -1
	}
	return slices.EqualFunc(slices.SortedFunc(slices.Values(s.elements), order), slices.SortedFunc(slices.Values(found.elements), order),
		func(a, b nftables.SetElement) bool { return order(a, b) == 0 && len(a.KeyEnd) == len(b.KeyEnd) })
}

// encode gives what the kernel would be sent for r: two rules with the same bytes do the same.
func (r rule) encode(family nftables.TableFamily) []byte {
	all := []byte{}
	for _, e := range r {
		one, err := expr.Marshal(byte(family), e)
		if err != nil { // what cannot be written was not written by us
			return []byte(err.Error())
		}
		all = append(append(all, strconv.Itoa(len(one))...), one...)
	}
	return all
}
