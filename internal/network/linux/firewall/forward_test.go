package firewall_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"imp.dev/imp/internal/network/linux/firewall"
)

func verdict(kind expr.VerdictKind) *expr.Verdict { return &expr.Verdict{Kind: kind} }

// foreign makes somebody's forward chain, with a rule for each list of expressions, and a chain "more" that it may jump to.
func foreign(family nftables.TableFamily, policy nftables.ChainPolicy, more []expr.Any, rules ...[]expr.Any) func(*nftables.Conn) {
	return func(conn *nftables.Conn) {
		table := conn.AddTable(&nftables.Table{Family: family, Name: "theirs"})
		other := conn.AddChain(&nftables.Chain{Table: table, Name: "more"})
		chain := conn.AddChain(&nftables.Chain{Table: table, Name: "FORWARD", Type: nftables.ChainTypeFilter,
			Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter, Policy: &policy})
		for _, exprs := range rules {
			conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: exprs})
		}
		if more != nil {
			conn.AddRule(&nftables.Rule{Table: table, Chain: other, Exprs: more})
		}
	}
}

// comments lists the comments of the foreign chain's rules, "" for those without.
func (ns namespace) comments(t testing.TB, family nftables.TableFamily) []string {
	t.Helper()
	found := []string{}
	for _, r := range ns.rules(t, family) {
		comment, _ := userdata.GetString(r.UserData, userdata.TypeComment)
		found = append(found, comment)
	}
	return found
}

func (ns namespace) rules(t testing.TB, family nftables.TableFamily) []*nftables.Rule {
	t.Helper()
	conn, err := nftables.New(nftables.WithNetNSFd(int(ns)))
	if err != nil {
		t.Fatal(err)
	}
	table := &nftables.Table{Family: family, Name: "theirs"}
	rules, err := conn.GetRules(table, &nftables.Chain{Table: table, Name: "FORWARD"})
	if err != nil {
		t.Fatal(err)
	}
	return rules
}

func (ns namespace) ensureForward(t testing.TB, instance, prefix string) []string {
	t.Helper()
	blocked, err := firewall.EnsureForward(int(ns), instance, prefix)
	if err != nil {
		t.Fatal(err)
	}
	return blocked
}

func TestForeignChainsThatDropLetOurVethsPass(t *testing.T) {
	t.Parallel()
	const ip, inet = nftables.TableFamilyIPv4, nftables.TableFamilyINet
	for sentence, theirs := range map[string]struct {
		family nftables.TableFamily
		make   func(*nftables.Conn)
	}{
		"the policy drops":              {ip, foreign(ip, nftables.ChainPolicyDrop, nil)},
		"the policy of both IPs drops":  {inet, foreign(inet, nftables.ChainPolicyDrop, nil)},
		"the last rule drops":           {ip, foreign(ip, nftables.ChainPolicyAccept, nil, []expr.Any{&expr.Counter{}}, []expr.Any{&expr.Counter{}, verdict(expr.VerdictDrop)})},
		"a rule rejects":                {inet, foreign(inet, nftables.ChainPolicyAccept, nil, []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_ADMIN_PROHIBITED}})},
		"a chain that it jumps to does": {ip, foreign(ip, nftables.ChainPolicyAccept, []expr.Any{verdict(expr.VerdictDrop)}, []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: "more"}})},
		"a chain that it goes to does":  {ip, foreign(ip, nftables.ChainPolicyAccept, []expr.Any{verdict(expr.VerdictDrop)}, []expr.Any{&expr.Verdict{Kind: expr.VerdictGoto, Chain: "more"}})},
	} {
		t.Run(sentence, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			guest := s.networks[0].inside[0]
			s.outside.listen(t, "198.51.100.9:80")
			s.pod.listen(t, "172.16.0.2:80")
			s.outside.route(t, "172.16.0.0/24", "192.0.2.1")
			s.host.nft(t, theirs.make)
			guest.mustNotConnect(t, "198.51.100.9:80")
			before := len(s.host.rules(t, theirs.family))
			for range 2 {
				if blocked := s.host.ensureForward(t, "one", prefix); blocked != nil {
					t.Errorf("blocked are %v", blocked)
				}
			}
			guest.mustConnect(t, "198.51.100.9:80", "192.0.2.1")
			s.outside.mustNotConnect(t, "172.16.0.2:80") // what is not ours is dropped as before
			if got := s.host.comments(t, theirs.family); len(got) != before+2 || got[0] != "imp-one" || got[1] != "imp-one" {
				t.Errorf("the rules' comments are %q", got)
			}
			if err := firewall.RemoveForward(int(s.host), "one"); err != nil {
				t.Fatal(err)
			}
			if after := len(s.host.rules(t, theirs.family)); after != before {
				t.Errorf("%d rules are left of %d", after, before)
			}
			guest.mustNotConnect(t, "198.51.100.9:80")
		})
	}
}

// The bridge is in a namespace of its own, so the host's rules see its frames never, wherever br_netfilter sends those of the host.
func TestNeighboursReachEachOtherWhateverTheHostDrops(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.host.sysctl(t, "bridge/bridge-nf-call-iptables", "1")
	s.host.nft(t, foreign(nftables.TableFamilyIPv4, nftables.ChainPolicyDrop, nil))
	g := s.networks[0]
	g.inside[0].listen(t, "0.0.0.0:80")
	g.inside[1].mustConnect(t, "10.4.0.10:80", "10.4.0.11")
}

func TestAForeignChainThatDropsNothingIsLeftAlone(t *testing.T) {
	t.Parallel()
	const ip = nftables.TableFamilyIPv4
	ns := newNamespace(t)
	ns.nft(t, foreign(ip, nftables.ChainPolicyAccept, []expr.Any{&expr.Counter{}}, []expr.Any{&expr.Counter{}},
		[]expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: "more"}}, []expr.Any{verdict(expr.VerdictAccept)}))
	if blocked := ns.ensureForward(t, "one", prefix); blocked != nil {
		t.Errorf("blocked are %v", blocked)
	}
	if got := ns.comments(t, ip); slices.Contains(got, "imp-one") {
		t.Errorf("it was amended: %q", got)
	}
}

func TestOurForwardRulesAreRepaired(t *testing.T) {
	t.Parallel()
	const ip = nftables.TableFamilyIPv4
	table := &nftables.Table{Family: ip, Name: "theirs"}
	chain := &nftables.Chain{Table: table, Name: "FORWARD"}
	for sentence, harm := range map[string]func(*nftables.Conn, []*nftables.Rule){
		"the chain was flushed":      func(c *nftables.Conn, _ []*nftables.Rule) { c.FlushChain(chain) },
		"one of them was removed":    func(c *nftables.Conn, r []*nftables.Rule) { _ = c.DelRule(r[1]) },
		"one of them is there twice": func(c *nftables.Conn, r []*nftables.Rule) { again := *r[0]; again.Handle = 0; c.InsertRule(&again) },
		"one says something else":    func(c *nftables.Conn, r []*nftables.Rule) { r[0].Exprs = r[1].Exprs; c.ReplaceRule(r[0]) },
		"a rule that drops stands ahead": func(c *nftables.Conn, _ []*nftables.Rule) {
			c.InsertRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{verdict(expr.VerdictDrop)}})
		},
		"the table was made anew": func(c *nftables.Conn, _ []*nftables.Rule) {
			c.DelTable(table)
			foreign(ip, nftables.ChainPolicyDrop, nil)(c)
		},
	} {
		t.Run(sentence, func(t *testing.T) {
			t.Parallel()
			ns := newNamespace(t)
			ns.nft(t, foreign(ip, nftables.ChainPolicyDrop, nil))
			ns.ensureForward(t, "one", prefix)
			ours := ns.rules(t, ip)
			ns.nft(t, func(c *nftables.Conn) { harm(c, ours) })
			if blocked := ns.ensureForward(t, "one", prefix); blocked != nil {
				t.Errorf("blocked are %v", blocked)
			}
			got := ns.comments(t, ip)
			if len(got) < 2 || got[0] != "imp-one" || got[1] != "imp-one" || slices.Contains(got[2:], "imp-one") {
				t.Errorf("the rules' comments are %q", got)
			}
			now := ns.rules(t, ip)
			if slices.EqualFunc(now[0].Exprs, now[1].Exprs, func(a, b expr.Any) bool {
				one, _ := expr.Marshal(byte(ip), a)
				other, _ := expr.Marshal(byte(ip), b)
				return string(one) == string(other)
			}) {
				t.Error("both of our rules say the same")
			}
		})
	}
}

// A rule in between that lets packets go on is somebody's who wants to be first: moving ours would begin a fight.
func TestOurForwardRulesMayHaveHarmlessOnesAhead(t *testing.T) {
	t.Parallel()
	const ip = nftables.TableFamilyIPv4
	ns := newNamespace(t)
	ns.nft(t, foreign(ip, nftables.ChainPolicyDrop, nil))
	ns.ensureForward(t, "one", prefix)
	ns.nft(t, func(c *nftables.Conn) {
		table := &nftables.Table{Family: ip, Name: "theirs"}
		c.InsertRule(&nftables.Rule{Table: table, Chain: &nftables.Chain{Name: "FORWARD"}, Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: "more"}}})
	})
	ns.ensureForward(t, "one", prefix)
	if got := ns.comments(t, ip); !slices.Equal(got, []string{"", "imp-one", "imp-one"}) {
		t.Errorf("the rules' comments are %q", got)
	}
}

// iptables' nftables variant refuses to work on a table in which it finds an expression that it does not make itself.
func TestOurForwardRulesAreOfWhatIptablesUnderstands(t *testing.T) {
	t.Parallel()
	const ip = nftables.TableFamilyIPv4
	ns := newNamespace(t)
	ns.nft(t, foreign(ip, nftables.ChainPolicyDrop, nil))
	ns.ensureForward(t, "one", prefix)
	rules := ns.rules(t, ip)
	if len(rules) != 2 {
		t.Fatalf("there are %d rules", len(rules))
	}
	for _, r := range rules {
		for _, e := range r.Exprs {
			switch e.(type) {
			case *expr.Meta, *expr.Cmp, *expr.Verdict:
			default:
				t.Errorf("there is a %T", e)
			}
		}
	}
}

func TestInstancesDoNotTouchEachOthersRules(t *testing.T) {
	t.Parallel()
	const ip = nftables.TableFamilyIPv4
	ns := newNamespace(t)
	ns.nft(t, foreign(ip, nftables.ChainPolicyDrop, nil))
	hosts := []firewall.Host{{Instance: "one", Prefix: "i0001", Port: 14789}, {Instance: "one2", Prefix: "i0002", Port: 14789}}
	for range 2 { // the second time there is nothing to do for either
		for _, h := range hosts {
			ns.ensureForward(t, h.Instance, h.Prefix)
			if _, err := firewall.EnsureHost(int(ns), h); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, h := range hosts {
		if changed, err := firewall.EnsureHost(int(ns), h); err != nil || changed {
			t.Errorf("the table of instance %s was touched (%v)", h.Instance, err)
		}
	}
	if got := ns.comments(t, ip); !slices.Equal(got, []string{"imp-one2", "imp-one2", "imp-one", "imp-one"}) {
		t.Errorf("the rules' comments are %q", got)
	}
	if err := firewall.RemoveForward(int(ns), "one"); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time there is nothing to remove
		if err := firewall.RemoveHost(int(ns), "one"); err != nil {
			t.Fatal(err)
		}
	}
	if got := ns.comments(t, ip); !slices.Equal(got, []string{"imp-one2", "imp-one2"}) {
		t.Errorf("the rules' comments are %q", got)
	}
	if changed, err := firewall.EnsureHost(int(ns), hosts[1]); err != nil || changed {
		t.Errorf("the table of the other instance was touched (%v)", err)
	}
	if got := ns.tables(t); !slices.Equal(got, []string{"imp-one2", "theirs"}) {
		t.Errorf("there are tables %v", got)
	}
}

func (ns namespace) tables(t testing.TB) []string {
	t.Helper()
	conn, err := nftables.New(nftables.WithNetNSFd(int(ns)))
	if err != nil {
		t.Fatal(err)
	}
	tables, err := conn.ListTables()
	if err != nil {
		t.Fatal(err)
	}
	names := []string{}
	for _, table := range tables {
		names = append(names, table.Name)
	}
	return slices.Sorted(slices.Values(names))
}

// Flags of a table (enum nft_table_flags).
const tableDormant, tableOwned = 1, 2

// ownedTable makes a table as a program does that lets no other change it, with a forward chain that drops. It is gone when the test ends.
func (ns namespace) ownedTable(t testing.TB) {
	t.Helper()
	socket := ns.newTable(t, nftables.TableFamilyINet, "firewalld", tableOwned)
	name := netlink.Attribute{Type: unix.NFTA_CHAIN_TABLE, Data: []byte("firewalld\x00")}
	hook, err := netlink.MarshalAttributes([]netlink.Attribute{
		{Type: unix.NFTA_HOOK_HOOKNUM, Data: []byte{0, 0, 0, 2}}, {Type: unix.NFTA_HOOK_PRIORITY, Data: []byte{0, 0, 0, 10}},
	})
	if err != nil {
		t.Fatal(err)
	}
	batch(t, socket, unix.NFT_MSG_NEWCHAIN, nftables.TableFamilyINet, []netlink.Attribute{name,
		{Type: unix.NFTA_CHAIN_NAME, Data: []byte("filter_FORWARD\x00")}, {Type: unix.NFTA_CHAIN_TYPE, Data: []byte("filter\x00")},
		{Type: unix.NFTA_CHAIN_HOOK | unix.NLA_F_NESTED, Data: hook}, {Type: unix.NFTA_CHAIN_POLICY, Data: []byte{0, 0, 0, 0}}})
}

// newTable makes a table, or gives one other flags, which the library cannot. The socket stays open until the test ends.
func (ns namespace) newTable(t testing.TB, family nftables.TableFamily, name string, flags byte) *netlink.Conn {
	t.Helper()
	socket, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{NetNS: int(ns)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = socket.Close() })
	batch(t, socket, unix.NFT_MSG_NEWTABLE, family, []netlink.Attribute{
		{Type: unix.NFTA_TABLE_NAME, Data: []byte(name + "\x00")}, {Type: unix.NFTA_TABLE_FLAGS, Data: []byte{0, 0, 0, flags}}})
	return socket
}

// batch sends one message as a transaction.
func batch(t testing.TB, socket *netlink.Conn, kind uint16, family nftables.TableFamily, attributes []netlink.Attribute) {
	t.Helper()
	data, err := netlink.MarshalAttributes(attributes)
	if err != nil {
		t.Fatal(err)
	}
	edge := func(kind netlink.HeaderType) netlink.Message {
		return netlink.Message{Header: netlink.Header{Type: kind, Flags: netlink.Request}, Data: []byte{0, 0, 0, unix.NFNL_SUBSYS_NFTABLES}}
	}
	if _, err := socket.SendMessages([]netlink.Message{edge(unix.NFNL_MSG_BATCH_BEGIN), {
		Header: netlink.Header{Type: netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | kind), Flags: netlink.Request | netlink.Acknowledge | netlink.Create},
		Data:   append([]byte{byte(family), 0, 0, 0}, data...),
	}, edge(unix.NFNL_MSG_BATCH_END)}); err != nil {
		t.Fatal(err)
	}
	if _, err := socket.Receive(); err != nil {
		t.Fatal(err)
	}
}

func TestAChainThatOnlyItsOwnerMayChangeIsNamed(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.outside.listen(t, "198.51.100.9:80")
	s.host.ownedTable(t)
	s.host.nft(t, foreign(nftables.TableFamilyIPv4, nftables.ChainPolicyDrop, nil)) // the other is amended nevertheless
	blocked := s.host.ensureForward(t, "one", prefix)
	if len(blocked) != 1 || !strings.HasPrefix(blocked[0], "inet firewalld filter_FORWARD: ") || !strings.Contains(blocked[0], "belongs to another program") {
		t.Errorf("blocked are %q", blocked)
	}
	if got := s.host.comments(t, nftables.TableFamilyIPv4); len(got) != 2 {
		t.Errorf("the other chain's rules have the comments %q", got)
	}
	s.networks[0].inside[0].mustNotConnect(t, "198.51.100.9:80")
	if err := firewall.RemoveForward(int(s.host), "one"); err != nil {
		t.Errorf("what could not be amended cannot be taken out: %v", err)
	}
}
