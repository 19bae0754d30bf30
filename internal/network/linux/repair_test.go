package linux

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/netns"
	"imp.dev/imp/internal/network"
	"imp.dev/imp/internal/network/networktest"
)

// outside is behind the node, where guests get by NAT.
var outside = netip.MustParseAddr("192.0.2.254")

func TestTheSweepRepairsWhatSomebodyRemoves(t *testing.T) {
	s := newSite(t, 1500)
	n, other := s.newNode(t), s.newNode(t)
	on, off := nic(blue, 1, "10.4.0.11"), nic(blue, 2, "10.4.0.12")
	sp := spec(blue, 1450, peer(off, 2))
	sp.NAT = true
	n.set(t, sp)
	other.set(t, spec(blue, 1450, peer(on, 1)))
	g, far := n.attach(t, 1, on), other.attach(t, 2, off)
	in := n.inside(t, blue)
	names := n.names
	del := func(s *space, name string) {
		t.Helper()
		must(t, s.nl.LinkDel(mustLink(t, s, name)))
	}
	set := func(s *space, name, value string) {
		t.Helper()
		must(t, s.inside(func() error { return os.WriteFile("/proc/sys/net/"+name, []byte(value), 0o600) }))
	}
	flush := func(s *space) {
		t.Helper()
		conn, err := nftables.New(nftables.WithNetNSFd(s.fd()))
		must(t, err)
		conn.FlushRuleset()
		must(t, conn.Flush())
	}
	good := n.residue(t)
	for sentence, harm := range map[string]func(){
		"rules of the network are flushed":    func() { flush(in) },
		"rules of the host are flushed":       func() { flush(n.host) },
		"the bridge is deleted":               func() { del(in, names.bridge(blue)) },
		"the overlay is deleted":              func() { del(in, names.overlay(blue)) },
		"the way to the host is deleted":      func() { del(n.host, names.hostEnd(blue)) },
		"the way is deleted at the other end": func() { del(in, names.uplink(blue)) },
		"the host's forwarding is turned off": func() { set(n.host, "ipv4/ip_forward", "0") },
		"the network's forwarding is off":     func() { set(in, "ipv4/ip_forward", "0") },
		"the bridge is set down":              func() { must(t, in.nl.LinkSetDown(mustLink(t, in, names.bridge(blue)))) },
		"a TAP is set down":                   func() { must(t, in.nl.LinkSetDown(mustLink(t, in, names.tap(networktest.VM(1), "eth0")))) },
		"a TAP is taken from the bridge":      func() { must(t, in.nl.LinkSetNoMaster(mustLink(t, in, names.tap(networktest.VM(1), "eth0")))) },
		"a TAP begins to learn":               func() { must(t, in.nl.LinkSetLearning(mustLink(t, in, names.tap(networktest.VM(1), "eth0")), true)) },
		"the overlay begins to learn":         func() { must(t, in.nl.LinkSetLearning(mustLink(t, in, names.overlay(blue)), true)) },
		"the default route is deleted":        func() { must(t, in.nl.RouteDel(&netlink.Route{Dst: ipNet(netip.MustParsePrefix("0.0.0.0/0"))})) },
		"a foreign route is made": func() {
			must(t, in.nl.RouteAdd(&netlink.Route{Dst: ipNet(netip.MustParsePrefix("192.0.2.254/32")), Type: unix.RTN_BLACKHOLE}))
		},
		"the gateway's address is deleted": func() { must(t, in.nl.AddrDel(mustLink(t, in, names.bridge(blue)), mustAddr(t, "10.4.0.1/16"))) },
		"another address is given":         func() { must(t, in.nl.AddrAdd(mustLink(t, in, names.bridge(blue)), mustAddr(t, "10.5.0.1/16"))) },
		"a forwarding entry is deleted": func() {
			must(t, in.nl.NeighDel(bridgeEntry(far.mac, mustLink(t, in, names.overlay(blue)).Attrs().Index)))
		},
		"an MTU is changed":      func() { must(t, in.nl.LinkSetMTU(mustLink(t, in, names.bridge(blue)), 1300)) },
		"a neighbour is deleted": func() { must(t, in.nl.NeighDel(n.segment(blue).neighbour(place{address: far.address}))) },
		"a neighbour gets another MAC": func() {
			must(t, in.nl.NeighSet(n.segment(blue).neighbour(place{address: far.address, mac: mac{2, 2, 2, 2, 2, 2}})))
		},
		"a guest elsewhere is sent to no node": func() {
			must(t, in.nl.NeighSet(n.segment(blue).remoteEntry(far.mac, netip.MustParseAddr("192.0.2.77"))))
		},
		"a stranger's entry is made": func() {
			must(t, in.nl.NeighSet(bridgeEntry(mac{2, 9, 9, 9, 9, 9}, mustLink(t, in, names.overlay(blue)).Attrs().Index)))
		},
		"the name of the namespace is taken":    func() { must(t, netns.Unname(filepath.Join(n.o.NamespaceDir, n.segment(blue).namespace))) },
		"a TAP of nobody is there":              func() { f, err := n.segment(blue).tryTAP("foreign"); must(t, err); t.Cleanup(func() { f.Close() }) },
		"the address of the way is deleted":     func() { must(t, n.host.nl.AddrDel(mustLink(t, n.host, names.hostEnd(blue)), hostAddr(t, n, blue))) },
		"the host's end of the way is set down": func() { must(t, n.host.nl.LinkSetDown(mustLink(t, n.host, names.hostEnd(blue)))) },
		"the rules of one guest are taken":      func() { flushSet(t, in, "guests") },
	} {
		t.Run(sentence, func(t *testing.T) {
			harm()
			before := len(n.log.String())
			n.Sweep(t.Context())
			if said := n.log.String()[before:]; !strings.Contains(said, "was repaired") {
				t.Errorf("the log says of the repair: %q", said)
			}
			if found, err := n.Audit(t.Context(), false); err != nil || len(found) == 0 || !found[0].Repaired || found[0].Orphan || found[0].Name == "" {
				t.Errorf("the audit tells of the repair: %+v, %v", found, err)
			}
			same(t, "repaired", good, n.residue(t))
			before = len(n.log.String())
			n.Sweep(t.Context())
			if said := n.log.String()[before:]; said != "" {
				t.Errorf("the next sweep found something still: %s", said)
			}
			g.t, far.t = t, t
			g.mustPing(gateway, 56)
			g.mustPing(far.address, 56)
			far.mustPing(g.address, 56)
			g.mustPing(outside, 56)
		})
	}
	statuses, err := n.Networks(t.Context())
	if err != nil || len(statuses) != 1 || statuses[0].Problem != "" {
		t.Errorf("status %+v %v", statuses, err)
	}
}

func hostAddr(t testing.TB, n *node, id string) *netlink.Addr {
	t.Helper()
	host, _ := transit(n.segment(id).record.Transit)
	return mustAddr(t, host.String()+"/31")
}

// flushSet empties a set of the bridge's table.
func flushSet(t testing.TB, s *space, name string) {
	t.Helper()
	conn, err := nftables.New(nftables.WithNetNSFd(s.fd()))
	must(t, err)
	tables, err := conn.ListTablesOfFamily(nftables.TableFamilyBridge)
	must(t, err)
	for _, table := range tables {
		set, err := conn.GetSetByName(table, name)
		must(t, err)
		conn.FlushSet(set)
	}
	must(t, conn.Flush())
}

func TestWhatCannotBeRepairedIsTold(t *testing.T) {
	s := newSite(t, 1500)
	n := s.newNode(t)
	sp := spec(blue, 1450)
	sp.EgressInterface = "wan7"
	n.set(t, sp)
	n.attach(t, 1, nic(blue, 1, "10.4.0.11"))
	problem := func() string {
		n.Sweep(t.Context())
		statuses, err := n.Networks(t.Context())
		if err != nil || len(statuses) != 1 {
			t.Fatalf("%+v %v", statuses, err)
		}
		return statuses[0].Problem
	}
	if p := problem(); !strings.Contains(p, "wan7") {
		t.Errorf("a missing egress interface is told as %q", p)
	}
	n.set(t, spec(blue, 1450))
	if p := problem(); p != "" {
		t.Errorf("a network that is well has the problem %q", p)
	}
	wire := mustLink(t, n.host, "wire")
	must(t, n.host.nl.LinkSetMTU(wire, 1400))
	if p := problem(); !strings.Contains(p, "1450") || !strings.Contains(p, "1500") || !strings.Contains(p, "wire") || !strings.Contains(p, "1400") {
		t.Errorf("an underlay that is too small is told as %q", p)
	}
	must(t, n.host.nl.LinkSetMTU(wire, 1500))
	if p := problem(); p != "" {
		t.Errorf("a network that is well again has the problem %q", p)
	}
}

func TestANetworkThatDoesNotFitTheUnderlayIsRefusedByBothNumbers(t *testing.T) {
	n := newSite(t, 1500).newNode(t)
	n.set(t, spec(blue, 1451))
	_, err := n.Attach(t.Context(), networktest.VM(1), []network.Interface{nic(blue, 1, "10.4.0.11")})
	if !fault.Is(err, fault.NetworkSetupFailed) || !strings.Contains(err.Error(), "1501") || !strings.Contains(err.Error(), "1500") || !strings.Contains(err.Error(), "wire") {
		t.Errorf("got %v", err)
	}
	if names := n.namespaces(t); len(names) != 0 {
		t.Errorf("namespaces were left: %v", names)
	}
	n.set(t, spec(blue, 1450))
	g := n.attach(t, 1, nic(blue, 1, "10.4.0.11"))
	g.mustPing(gateway, 1450-28)
	if err := n.Set(t.Context(), spec(blue, 1452)); err == nil || !strings.Contains(err.Error(), "1502") {
		t.Errorf("a live network got an MTU that does not fit: %v", err)
	}
	g.mustPing(gateway, 1450-28)
	n.set(t, spec(blue, 1400))
	if got := mustLink(t, n.inside(t, blue), n.names.tap(networktest.VM(1), "eth0")).Attrs().MTU; got != 1400 {
		t.Errorf("the TAP has an MTU of %d after the network's became 1400", got)
	}
}

func TestARestartLosesAtMostOnePing(t *testing.T) {
	s := newSite(t, 1500)
	n, other := s.newNode(t), s.newNode(t)
	on, off := nic(blue, 1, "10.4.0.11"), nic(blue, 2, "10.4.0.12")
	sp := spec(blue, 1450, peer(off, 2))
	sp.NAT = true
	n.set(t, sp)
	n.set(t, spec(red, 1450))
	other.set(t, spec(blue, 1450, peer(on, 1)))
	g, far := n.attach(t, 1, on), other.attach(t, 2, off)
	n.attach(t, 5, nic(red, 5, "10.4.0.15"))
	before := n.residue(t)
	stop, lost := make(chan struct{}), make(chan int, 2)
	for _, target := range []netip.Addr{far.address, outside} {
		go func() {
			missing := 0
			tick := time.NewTicker(100 * time.Millisecond)
			defer tick.Stop()
			for {
				select {
				case <-stop:
					lost <- missing
					return
				case <-tick.C:
					if g.ping(target, 56, 90*time.Millisecond) != nil {
						missing++
					}
				}
			}
		}()
	}
	for range 10 {
		n.reopen(t)
		if _, err := n.Attached(t.Context()); err != nil {
			t.Error(err)
		}
		n.Sweep(t.Context())
		n.set(t, sp)
	}
	before2 := n.residue(t)
	close(stop)
	if a, b := <-lost, <-lost; a+b > 1 {
		t.Errorf("%d and %d pings were lost in ten restarts", a, b)
	}
	same(t, "the runtime has restarted", before, before2)
	if strings.Contains(n.log.String(), "repaired") {
		t.Error("a restart found something to repair")
	}

	// A running VM is not disturbed by an Attach either: its TAP is another's.
	_, err := n.Attach(t.Context(), networktest.VM(1), []network.Interface{on})
	if !errors.Is(err, unix.EBUSY) {
		t.Errorf("attaching a VM that runs: %v", err)
	}
	same(t, "a running VM was attached", before, n.residue(t))
	g.mustPing(far.address, 56)
}

func TestAHostThatWasRebootedIsRebuilt(t *testing.T) {
	s := newSite(t, 1500)
	n := s.newNode(t)
	n.set(t, spec(blue, 1450))
	n.attach(t, 1, nic(blue, 1, "10.4.0.11")).stop()
	// The kernel forgets all; the disk does not.
	n.Close()
	must(t, netns.Unname(filepath.Join(n.o.NamespaceDir, n.segment(blue).namespace)))
	n.o.HostNamespace = fmt.Sprintf("/proc/self/fd/%d", s.newHost(t).fd())
	n.open(t)
	if ids, err := n.Attached(t.Context()); err != nil || len(ids) != 1 {
		t.Errorf("attached are %v %v", ids, err)
	}
	g := n.attach(t, 1, nic(blue, 1, "10.4.0.11"))
	g.mustPing(gateway, 56)
	n.detach(t, 1)
	if names := n.namespaces(t); len(names) != 0 {
		t.Errorf("namespaces were left: %v", names)
	}
}

func TestLeftoversOfNobodyAreRemoved(t *testing.T) {
	n := newSite(t, 1500).newNode(t)
	before := n.residue(t)
	n.set(t, spec(blue, 1450))
	n.attach(t, 1, nic(blue, 1, "10.4.0.11")).stop()
	n.Close()
	must(t, n.store.remove(networksDir, blue))
	must(t, n.store.remove(vmsDir, networktest.VM(1)))
	n.open(t)
	n.Sweep(t.Context())
	eventually(t, "the namespace's end", func() bool { l, err := n.host.link(n.names.hostEnd(blue)); return err == nil && l == nil })
	same(t, "swept", before, n.residue(t))
}

func TestADamagedRecordIsSetAsideAndToldOf(t *testing.T) {
	n := newSite(t, 1500).newNode(t)
	n.set(t, spec(blue, 1450))
	n.attach(t, 1, nic(blue, 1, "10.4.0.11")).stop()
	n.attach(t, 2, nic(blue, 2, "10.4.0.12"))
	must(t, os.WriteFile(filepath.Join(n.o.StateDir, vmsDir, networktest.VM(1)+suffix), []byte("{"), 0o600))
	for range 2 {
		n.reopen(t)
		if ids, err := n.Attached(t.Context()); err != nil || len(ids) != 2 {
			t.Errorf("a VM with a damaged record is not listed any more: %v %v", ids, err)
		}
	}
	if !strings.Contains(n.log.String(), "set aside") {
		t.Errorf("nothing was said")
	}
	n.detach(t, 1)
	n.Sweep(t.Context())
	n.detach(t, 2)
	if names := n.namespaces(t); len(names) != 0 {
		t.Errorf("namespaces were left: %v", names)
	}
}
