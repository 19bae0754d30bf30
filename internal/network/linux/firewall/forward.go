package firewall

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"
)

// EnsureForward lets traffic from and to our veths pass foreign chains of the host that may drop what is forwarded, by rules at
// their heads that concern our veths alone. It finds those it has made by their mark and repairs them. blocked names what drops,
// or may drop, and could not be amended, each "family table chain: why"; nil when nothing stands in the way.
//
// What is accepted there is still judged by the instance's own table, which lets to our veths nothing but answers.
func EnsureForward(ns int, instance, prefix string) (blocked []string, err error) {
	if err := checkName(prefix); err != nil {
		return nil, fmt.Errorf("amending forward chains: %w", err)
	}
	chains, err := forwardChains(ns)
	if err != nil {
		return nil, err
	}
	for _, c := range chains {
		why, err := amend(ns, c, hostTables+instance, prefix)
		if err != nil {
			return nil, err
		}
		if why != "" {
			blocked = append(blocked, c.String()+": "+why)
		}
	}
	legacy, err := legacyBlocks(ns, prefix)
	if err != nil {
		return nil, err
	}
	return append(blocked, legacy...), nil
}

// RemoveForward takes the rules of EnsureForward out again. None is success; so is a chain that is gone.
func RemoveForward(ns int, instance string) error {
	chains, err := forwardChains(ns)
	if err != nil {
		return err
	}
	errs := []error{}
	for _, c := range chains {
		if err := c.remove(ns, hostTables+instance); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// foreign is a chain of somebody else that forwarded packets go through.
type foreign struct{ *nftables.Chain }

func (c foreign) String() string {
	family := map[nftables.TableFamily]string{nftables.TableFamilyIPv4: "ip", nftables.TableFamilyINet: "inet"}[c.Table.Family]
	return family + " " + c.Table.Name + " " + c.Name
}

// forwardChains lists the base chains that IPv4 packets go through on their way through the host, but those of Imp's instances.
func forwardChains(ns int) ([]foreign, error) {
	conn, err := open(ns)
	if err != nil {
		return nil, err
	}
	defer conn.CloseLasting() //nolint:errcheck // nothing was left to send
	all, err := conn.ListChains()
	if err != nil {
		return nil, fmt.Errorf("listing forward chains: %w", err)
	}
	chains := []foreign{}
	for _, c := range all {
		ours := c.Table.Family == nftables.TableFamilyIPv4 && strings.HasPrefix(c.Table.Name, hostTables)
		ip := c.Table.Family == nftables.TableFamilyIPv4 || c.Table.Family == nftables.TableFamilyINet
		if ip && !ours && c.Hooknum != nil && *c.Hooknum == *nftables.ChainHookForward {
			chains = append(chains, foreign{c})
		}
	}
	return chains, nil
}

// amend makes the chain let our veths' traffic pass, and says why it could not. A chain that drops nothing is left alone. A chain
// that is gone meanwhile drops nothing.
func amend(ns int, c foreign, mark, prefix string) (why string, err error) {
	conn, err := open(ns)
	if err != nil {
		return "", err
	}
	defer conn.CloseLasting() //nolint:errcheck // nothing was left to send
	rules, err := conn.GetRules(c.Table, c.Chain)
	if err != nil {
		if gone(conn, c) {
			return "", nil
		}
		// Without its rules ours in it cannot be told from others, and would become more with every call.
		return fmt.Sprintf("its rules cannot be read: %v", err), nil
	}
	wanted := passes(prefix)
	others, mine := []*nftables.Rule{}, []*nftables.Rule{}
	ahead := false // of one of ours stands a rule that drops
	drops := false
	for _, r := range rules {
		if marked(r, mark) {
			ahead = ahead || drops
			mine = append(mine, r)
			continue
		}
		others = append(others, r)
		drops = drops || ends(r)
	}
	same := slices.EqualFunc(mine, wanted, func(r *nftables.Rule, w rule) bool {
		return slices.Equal(rule(r.Exprs).encode(c.Table.Family), w.encode(c.Table.Family))
	})
	if same && !ahead {
		return "", nil
	}
	if len(mine) == 0 && !c.mayDrop(conn, others) {
		return "", nil
	}
	for _, r := range mine {
		if err := conn.DelRule(&nftables.Rule{Table: c.Table, Chain: c.Chain, Handle: r.Handle}); err != nil {
			return "", fmt.Errorf("amending chain %s: %w", c, err)
		}
	}
	for _, w := range slices.Backward(wanted) { // each goes before the last
		conn.InsertRule(&nftables.Rule{Table: c.Table, Chain: c.Chain, Exprs: w, UserData: userdata.AppendString(nil, userdata.TypeComment, mark)})
	}
	switch err := conn.Flush(); {
	case errors.Is(err, unix.ENOENT) && gone(conn, c):
		return "", nil
	case errors.Is(err, unix.EPERM):
		return "its table belongs to another program, which alone may change it (flag owner)", nil
	case err != nil:
		return fmt.Sprintf("the kernel refuses rules of ours: %v", err), nil
	}
	return "", nil
}

// passes gives our rules in a foreign chain. They are of what iptables' nftables variant understands: it refuses to work on a table
// that holds any other expression, conntrack's among them.
func passes(prefix string) []rule {
	return []rule{all(fromOurs(prefix), accept()), all(toOurs(prefix), accept())}
}

// remove takes out what bears the mark.
func (c foreign) remove(ns int, mark string) error {
	conn, err := open(ns)
	if err != nil {
		return err
	}
	defer conn.CloseLasting() //nolint:errcheck // nothing was left to send
	rules, err := conn.GetRules(c.Table, c.Chain)
	for _, r := range rules {
		if err == nil && marked(r, mark) {
			err = conn.DelRule(&nftables.Rule{Table: c.Table, Chain: c.Chain, Handle: r.Handle})
		}
	}
	if err == nil {
		err = conn.Flush()
	}
	if err != nil && !gone(conn, c) {
		return fmt.Errorf("removing rules from chain %s: %w", c, err)
	}
	return nil
}

func gone(conn *nftables.Conn, c foreign) bool {
	chains, err := conn.ListChainsOfTableFamily(c.Table.Family)
	return err == nil && !slices.ContainsFunc(chains, func(o *nftables.Chain) bool { return o.Name == c.Name && o.Table.Name == c.Table.Name })
}

// marked says whether the rule's comment is the mark. The comment is looked for here, because the library's own reader trusts the
// lengths that a stranger has written.
func marked(r *nftables.Rule, mark string) bool {
	for rest := r.UserData; len(rest) >= 2; {
		kind, length := rest[0], int(rest[1])
		if len(rest) < 2+length {
			return false
		}
		if kind == byte(userdata.TypeComment) {
			return unix.ByteSliceToString(rest[2:2+length]) == mark
		}
		rest = rest[2+length:]
	}
	return false
}

// mayDrop says whether a packet can end in the chain or in one that it leads to.
func (c foreign) mayDrop(conn *nftables.Conn, rules []*nftables.Rule) bool {
	if c.Policy != nil && *c.Policy == nftables.ChainPolicyDrop {
		return true
	}
	seen := map[string]bool{c.Name: true}
	for todo := rules; len(todo) > 0; {
		r := todo[0]
		todo = todo[1:]
		if ends(r) {
			return true
		}
		for _, next := range jumps(r) {
			if seen[next] {
				continue
			}
			seen[next] = true
			more, err := conn.GetRules(c.Table, &nftables.Chain{Name: next})
			if err != nil {
				return true // what cannot be read may drop
			}
			todo = append(todo, more...)
		}
	}
	return false
}

// ends says whether a packet may end at the rule itself.
func ends(r *nftables.Rule) bool {
	return slices.ContainsFunc(r.Exprs, func(e expr.Any) bool {
		switch e := e.(type) {
		case *expr.Verdict:
			return e.Kind == expr.VerdictDrop || e.Kind == expr.VerdictQueue || e.Kind == expr.VerdictStolen
		case *expr.Reject, *expr.Queue, *expr.SynProxy:
			return true
		case *expr.Lookup:
			return e.IsDestRegSet && e.DestRegister == unix.NFT_REG_VERDICT // a map of verdicts
		case *expr.Target:
			// Of iptables' targets those that let the packet go on are known; what is not may drop.
			return !slices.Contains([]string{"AUDIT", "CLASSIFY", "CONNMARK", "CT", "DSCP", "LOG", "MARK", "NFLOG", "TCPMSS", "TRACE"}, e.Name)
		}
		return false
	})
}

func jumps(r *nftables.Rule) []string {
	chains := []string{}
	for _, e := range r.Exprs {
		if v, ok := e.(*expr.Verdict); ok && (v.Kind == expr.VerdictJump || v.Kind == expr.VerdictGoto) {
			chains = append(chains, v.Chain)
		}
	}
	return chains
}
