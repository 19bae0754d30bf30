package linux

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"k8s.io/utils/clock"

	"imp.dev/imp/internal/netns"
)

// site is some nodes' hosts, each a network namespace of its own, joined by a bridge: the machine's own is not touched.
type site struct {
	middle *space
	mtu    int
	nodes  int
}

// node is one host with a Network.
type node struct {
	*Network
	host *space
	o    Options
	log  *logBuffer
	// fail is asked at each step; nil is none.
	mu   sync.Mutex
	fail func(step string) error
}

func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("IMP_REQUIRE_ALL") == "1" {
		t.Fatal("needs root to make network namespaces, and IMP_REQUIRE_ALL=1 allows no skip")
	}
	t.Skip("needs root to make network namespaces")
}

func newSpace(t testing.TB) *space {
	t.Helper()
	ns, err := netns.New()
	must(t, err)
	s, err := openSpace(ns)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.close)
	must(t, s.nl.LinkSetUp(mustLink(t, s, "lo")))
	return s
}

// newSite makes the wire between nodes, of that MTU.
func newSite(t testing.TB, mtu int) *site {
	t.Helper()
	needRoot(t)
	s := &site{middle: newSpace(t), mtu: mtu}
	a := netlink.NewLinkAttrs()
	a.Name, a.MTU = "middle", mtu
	must(t, s.middle.nl.LinkAdd(&netlink.Bridge{LinkAttrs: a}))
	l := mustLink(t, s.middle, "middle")
	must(t, s.middle.nl.LinkSetMTU(l, mtu))
	must(t, s.middle.nl.AddrAdd(l, mustAddr(t, "192.0.2.254/24")))
	must(t, s.middle.nl.LinkSetUp(l))
	return s
}

// newHost makes the next node's namespace: 192.0.2.1 and onwards on "wire", and a default route.
func (s *site) newHost(t testing.TB) *space {
	t.Helper()
	s.nodes++
	h := newSpace(t)
	a := netlink.NewLinkAttrs()
	a.Name, a.MTU = fmt.Sprintf("to%d", s.nodes), s.mtu
	v := netlink.NewVeth(a)
	v.PeerName, v.PeerNamespace = "wire", netlink.NsFd(h.fd())
	must(t, s.middle.nl.LinkAdd(v))
	port := mustLink(t, s.middle, a.Name)
	must(t, s.middle.nl.LinkSetMaster(port, mustLink(t, s.middle, "middle")))
	must(t, s.middle.nl.LinkSetUp(port))
	wire := mustLink(t, h, "wire")
	must(t, h.nl.AddrAdd(wire, mustAddr(t, fmt.Sprintf("192.0.2.%d/24", s.nodes))))
	must(t, h.nl.LinkSetUp(wire))
	must(t, h.nl.RouteAdd(&netlink.Route{LinkIndex: wire.Attrs().Index, Gw: netip.MustParseAddr("192.0.2.254").AsSlice()}))
	return h
}

// newNode makes the next host and its Network.
func (s *site) newNode(t testing.TB) *node {
	t.Helper()
	return newNode(t, s.newHost(t), fmt.Sprintf("0000000%d", s.nodes), func(*Options) {})
}

func newNode(t testing.TB, host *space, instance string, change func(*Options)) *node {
	t.Helper()
	n := &node{host: host, log: &logBuffer{}}
	names := t.TempDir()
	n.o = Options{
		StateDir: t.TempDir(), Instance: instance, HostNamespace: fmt.Sprintf("/proc/self/fd/%d", host.fd()), NamespaceDir: names,
		Clock: clock.RealClock{}, Log: slog.New(slog.NewTextHandler(n.log, nil)),
		Failpoint: func(step string) error {
			n.mu.Lock()
			defer n.mu.Unlock()
			if n.fail == nil {
				return nil
			}
			return n.fail(step)
		},
	}
	change(&n.o)
	n.open(t)
	t.Cleanup(func() {
		n.Close()
		for _, name := range n.namespaces(t) {
			if err := netns.Unname(filepath.Join(names, name)); err != nil {
				t.Error(err)
			}
		}
		for unix.Unmount(names, unix.MNT_DETACH) == nil {
			continue // until it is a plain directory again
		}
		if t.Failed() {
			t.Logf("log of instance %s:\n%s", instance, n.log)
		}
	})
	return n
}

func (n *node) open(t testing.TB) {
	t.Helper()
	var err error
	if n.Network, err = New(n.o); err != nil {
		t.Fatal(err)
	}
}

// reopen is what a runtime does that was killed and started again.
func (n *node) reopen(t testing.TB) {
	t.Helper()
	n.Close()
	n.open(t)
}

func (n *node) failing(f func(step string) error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.fail = f
}

// namespaces lists the names there are.
func (n *node) namespaces(t testing.TB) []string {
	t.Helper()
	entries, err := os.ReadDir(n.o.NamespaceDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

// inside opens the namespace of a network of the node.
func (n *node) inside(t testing.TB, id string) *space {
	t.Helper()
	s := n.segment(id)
	if s == nil {
		t.Fatalf("network %s is not known", id)
	}
	ns, err := netns.Find(s.path())
	if err != nil || ns == nil {
		t.Fatalf("no namespace of network %s: %v", id, err)
	}
	opened, err := openSpace(ns)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(opened.close)
	return opened
}

// residue is all that can be left of networks on a host: files, namespaces, and what is in the host's and theirs.
func (n *node) residue(t testing.TB) []string {
	t.Helper()
	var out []string
	if err := filepath.WalkDir(n.o.StateDir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() && e.Name() != talliesFile {
			out = append(out, "file "+strings.TrimPrefix(path, n.o.StateDir))
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	out = append(out, dump(t, "host", n.host)...)
	for _, name := range n.namespaces(t) {
		ns, err := netns.Find(filepath.Join(n.o.NamespaceDir, name))
		if err != nil || ns == nil {
			out = append(out, "name "+name)
			continue
		}
		s, err := openSpace(ns)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, dump(t, name, s)...)
		s.close()
	}
	slices.Sort(out)
	return out
}

// dump lists devices, addresses, routes, neighbours, forwarding entries and rules of a namespace, without numbers that a
// new device has anew.
func dump(t testing.TB, where string, s *space) []string {
	t.Helper()
	var out []string
	add := func(format string, args ...any) { out = append(out, where+" "+fmt.Sprintf(format, args...)) }
	all, err := s.links()
	must(t, err)
	name := map[int]string{}
	for _, l := range all {
		name[l.Attrs().Index] = l.Attrs().Name
	}
	flags, err := s.ports()
	must(t, err)
	for _, l := range all {
		a := l.Attrs()
		add("link %s %s mtu %d master %q alias %q up %t learning %d", a.Name, l.Type(), a.MTU, name[a.MasterIndex], a.Alias, a.RawFlags&unix.IFF_UP != 0, flags[a.Index][8])
	}
	addresses, err := s.nl.AddrList(nil, netlink.FAMILY_ALL)
	must(t, err)
	for _, a := range addresses {
		if !a.IP.IsLinkLocalUnicast() || a.IP.To4() != nil {
			add("address %s %s", name[a.LinkIndex], a.IPNet)
		}
	}
	routes, err := s.nl.RouteList(nil, netlink.FAMILY_V4)
	must(t, err)
	for _, r := range routes {
		add("route %s via %s dev %s", r.Dst, r.Gw, name[r.LinkIndex])
	}
	for _, family := range []int{unix.AF_INET, unix.AF_BRIDGE} {
		entries, err := s.nl.NeighList(0, family)
		must(t, err)
		for _, e := range entries {
			if e.State&(netlink.NUD_PERMANENT|netlink.NUD_NOARP) != 0 && len(e.HardwareAddr) == 6 && e.HardwareAddr[0]&1 == 0 && (family == unix.AF_INET || e.State&netlink.NUD_PERMANENT == 0 || e.Flags&netlink.NTF_SELF != 0 && e.IP != nil) {
				add("entry %s %s dev %s", e.HardwareAddr, e.IP, name[e.LinkIndex])
			}
		}
	}
	conn, err := nftables.New(nftables.WithNetNSFd(s.fd()))
	must(t, err)
	chains, err := conn.ListChains()
	must(t, err)
	for _, c := range chains {
		rules, err := conn.GetRules(c.Table, c)
		must(t, err)
		add("chain %d %s %s of %d rules", c.Table.Family, c.Table.Name, c.Name, len(rules))
	}
	tables, err := conn.ListTables()
	must(t, err)
	for _, table := range tables {
		sets, err := conn.GetSets(table)
		must(t, err)
		for _, set := range sets {
			elements, err := conn.GetSetElements(set)
			must(t, err)
			for _, e := range elements {
				add("element %d %s %s %x", table.Family, table.Name, set.Name, e.Key)
			}
		}
	}
	slices.Sort(out)
	return out
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func mustLink(t testing.TB, s *space, name string) netlink.Link {
	t.Helper()
	l, err := s.nl.LinkByName(name)
	if err != nil {
		t.Fatalf("device %s: %v", name, err)
	}
	return l
}

func mustAddr(t testing.TB, cidr string) *netlink.Addr {
	t.Helper()
	a, err := netlink.ParseAddr(cidr)
	must(t, err)
	return a
}

// eventually awaits a condition.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(10 * time.Second); !condition(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
