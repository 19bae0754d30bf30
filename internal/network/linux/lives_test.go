package linux

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"imp.dev/imp/internal/network"
	"imp.dev/imp/internal/network/networktest"
)

func TestTwoRuntimesOnOneHostTouchNothingOfEachOther(t *testing.T) {
	s := newSite(t, 1500)
	host := s.newHost(t)
	names := ""
	one := newNode(t, host, "0000000a", func(o *Options) { names = o.NamespaceDir })
	// The first half of the instance, which device names hold, is the same.
	other := newNode(t, host, "0000000b", func(o *Options) { o.Port, o.NamespaceDir = 14790, names })
	third := newNode(t, host, "f000000b", func(o *Options) { o.Port, o.NamespaceDir = 14791, names })
	empty := one.residue(t)
	actors := map[*node]*actor{}
	up := func(n *node) {
		t.Helper()
		n.set(t, spec(blue, 1450))
		actors[n] = n.attach(t, 1, nic(blue, 1, "10.4.0.11"))
		actors[n].mustPing(gateway, 56)
	}
	down := func(n *node) {
		t.Helper()
		actors[n].stop()
		n.detach(t, 1)
		must(t, n.Forget(t.Context(), blue))
	}
	up(one)
	alone := one.residue(t)
	up(other)
	up(third)
	for _, n := range []*node{one, other, third} {
		n.Sweep(t.Context())
		if strings.Contains(n.log.String(), "repaired") || strings.Contains(n.log.String(), "removed") {
			t.Errorf("instance %s found something to do", n.o.Instance)
		}
		actors[n].mustPing(gateway, 56)
	}
	down(other)
	other.Sweep(t.Context())
	actors[one].mustPing(gateway, 56)
	actors[third].mustPing(gateway, 56)
	down(third)
	third.Sweep(t.Context())
	same(t, "the others have gone", alone, one.residue(t))
	actors[one].mustPing(gateway, 56)
	down(one)
	// What the host's forwarding was before is not known: it stays on.
	same(t, "all have gone", empty, one.residue(t))
}

func TestTwoRuntimesThatTakeOneWayAtOnceBothEndWell(t *testing.T) {
	s := newSite(t, 1500)
	host := s.newHost(t)
	one := newNode(t, host, "0000000a", func(*Options) {})
	other := newNode(t, host, "f000000b", func(o *Options) { o.Port = 14790 })
	var links []netlink.Link
	for _, name := range []string{"w1", "w2"} {
		a := netlink.NewLinkAttrs()
		a.Name = name
		must(t, host.nl.LinkAdd(&netlink.Bridge{LinkAttrs: a}))
		links = append(links, mustLink(t, host, name))
	}
	for round := range 30 {
		took := make([]int, 2)
		wait := sync.WaitGroup{}
		for i, n := range []*node{one, other} {
			wait.Go(func() {
				var err error
				// Both wish the same ways in the same order at first.
				took[i], _, err = n.Network.host.reserve(links[i], -1, func(try int) int {
					if try < 3 {
						return try
					}
					return n.names.wish(fmt.Sprint(round), try)
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
		wait.Wait()
		if took[0] == took[1] {
			t.Fatalf("round %d: both have way %d", round, took[0])
		}
		for _, l := range links {
			all, err := host.nl.AddrList(l, netlink.FAMILY_V4)
			if err != nil || len(all) != 1 {
				t.Fatalf("%s has %v %v", l.Attrs().Name, all, err)
			}
			must(t, host.nl.AddrDel(l, &all[0]))
		}
	}
}

// A round of a random walk may fail at any step, and the process may die there: then nothing more is done, not even undone.
func TestFailuresAndDeathsAtAnyStepLeaveNothing(t *testing.T) {
	rounds := 200
	if testing.Short() {
		rounds = 40
	}
	for _, dies := range []bool{false, true} {
		t.Run(fmt.Sprintf("the runtime dies: %t", dies), func(t *testing.T) {
			n := newSite(t, 1500).newNode(t)
			random := rand.New(rand.NewPCG(3, 7)) //nolint:gosec // chance that can be repeated
			baseline := n.residue(t)
			failures, dead, steps := 0, false, map[string]int{}
			n.failing(func(step string) error {
				if dead || random.IntN(10) == 0 {
					failures++
					steps[step]++
					dead = dies
					return fmt.Errorf("%w at step %q", errChance, step)
				}
				return nil
			})
			attached := map[int]bool{}
			expect := func(what string, err error) bool {
				if err != nil && !errors.Is(err, errChance) {
					t.Errorf("%s: %v", what, err)
				}
				return err == nil
			}
			for round := range rounds {
				id, vm := []string{blue, red}[random.IntN(2)], random.IntN(4)
				switch random.IntN(5) {
				case 0:
					sp := spec(id, 1400+random.IntN(50), peer(nic(id, 8, "10.4.0.88"), 2+random.IntN(3)))
					sp.NAT = random.IntN(2) == 0
					expect("setting", n.Set(t.Context(), sp))
				case 1:
					if err := n.Forget(t.Context(), id); err != nil && !errors.Is(err, errChance) && !strings.Contains(err.Error(), "attached") {
						t.Errorf("forgetting: %v", err)
					}
				case 2:
					if expect("detaching", n.Detach(t.Context(), networktest.VM(vm))) {
						delete(attached, vm)
					}
				default:
					// The interface moves to the other network or another address now and then.
					attachments, err := n.Attach(t.Context(), networktest.VM(vm), []network.Interface{nic(id, vm, fmt.Sprintf("10.4.%d.%d", random.IntN(2), 20+vm))})
					if err == nil {
						attachments[0].TAP.Close()
						attached[vm] = true
					} else if !errors.Is(err, errChance) && !strings.Contains(err.Error(), "not known") {
						t.Errorf("attaching: %v", err)
					}
				}
				if round%20 == 19 {
					n.Sweep(t.Context())
				}
				if dead {
					dead = false
					n.reopen(t)
				}
			}
			n.failing(nil)
			n.Sweep(t.Context())
			statuses, err := n.Networks(t.Context())
			must(t, err)
			for _, s := range statuses {
				if s.Problem != "" {
					t.Errorf("once nothing fails, network %s still has the problem %s", s.ID, s.Problem)
				}
			}
			ids, err := n.Attached(t.Context())
			must(t, err)
			for vm := range attached {
				if !dies && !slices.Contains(ids, networktest.VM(vm)) {
					t.Errorf("VM %d was attached and is not listed", vm)
				}
			}
			for _, id := range ids {
				must(t, n.Detach(t.Context(), id))
			}
			for _, s := range statuses {
				must(t, n.Forget(t.Context(), s.ID))
			}
			n.Sweep(t.Context())
			same(t, "all has gone", baseline, n.residue(t))
			t.Logf("%d failures in %d rounds, at %d different steps", failures, rounds, len(steps))
			if failures < rounds/8 || len(steps) < 15 {
				t.Errorf("%d failures in %d rounds at %d steps prove little: %v", failures, rounds, len(steps), steps)
			}
		})
	}
}

var errChance = errors.New("chance")

func TestTheHostReachesItsGuestsOnlyWhereItMay(t *testing.T) {
	s := newSite(t, 1500)
	n := newNode(t, s.newHost(t), "00000001", func(o *Options) { o.NodeRoutes = []netip.Prefix{netip.MustParsePrefix("10.4.0.0/15")} })
	other := spec(red, 1450)
	other.Subnet, other.Gateway = "10.44.0.0/16", "10.44.0.1"
	n.set(t, spec(blue, 1450))
	n.set(t, other)
	routes := func() string {
		t.Helper()
		all, err := n.host.nl.RouteList(nil, netlink.FAMILY_V4)
		must(t, err)
		var out []string
		for _, r := range all {
			if p := toPrefix(r.Dst); strings.HasPrefix(p.String(), "10.") {
				l, err := n.host.nl.LinkByIndex(r.LinkIndex)
				must(t, err)
				out = append(out, p.String()+" "+l.Attrs().Name)
			}
		}
		return strings.Join(out, ", ")
	}
	if got := routes(); got != "" {
		t.Errorf("routes without guests: %s", got)
	}
	n.attach(t, 1, nic(blue, 1, "10.4.0.11"))
	outOfRange := networktest.NIC("eth0", red, 2)
	outOfRange.Addresses = []string{"10.44.0.11/16"}
	n.attach(t, 2, outOfRange)
	want := "10.4.0.0/16 " + n.names.hostEnd(blue)
	if got := routes(); got != want {
		t.Errorf("routes are %q, want %q", got, want)
	}
	// A second network with the subnet of the first waits until that one is gone.
	const green = "c35e8f61-94bb-4a8d-9b63-1d6e0f7a2e03"
	n.set(t, spec(green, 1450))
	n.attach(t, 3, nic(green, 3, "10.4.0.13"))
	if got := routes(); got != want {
		t.Errorf("beside a network with the same subnet routes are %q, want %q", got, want)
	}
	n.detach(t, 1)
	n.Sweep(t.Context())
	if got, want := routes(), "10.4.0.0/16 "+n.names.hostEnd(green); got != want {
		t.Errorf("once the first is gone routes are %q, want %q", got, want)
	}
	must(t, n.host.inside(func() error { return dialUDP("10.4.0.13:9") }))
	if n.host.nl.RouteDel(&netlink.Route{Dst: ipNet(netip.MustParsePrefix("10.4.0.0/16"))}) != nil {
		t.Error("the route cannot be deleted")
	}
	n.Sweep(t.Context())
	if got, want := routes(), "10.4.0.0/16 "+n.names.hostEnd(green); got != want {
		t.Errorf("after a repair routes are %q, want %q", got, want)
	}
}

// dialUDP fails where there is no route.
func dialUDP(to string) error {
	a := netip.MustParseAddrPort(to)
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Connect(fd, &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())})
}

func TestConnectionsOfAnAddressEndWithItsVM(t *testing.T) {
	n := newSite(t, 1500).newNode(t)
	sp := spec(blue, 1450)
	sp.NAT = true
	n.set(t, sp)
	g, other := n.attach(t, 1, nic(blue, 1, "10.4.0.11")), n.attach(t, 2, nic(blue, 2, "10.4.0.12"))
	g.mustPing(outside, 56)
	other.mustPing(outside, 56)
	in := n.inside(t, blue)
	flows := func(a netip.Addr) int {
		t.Helper()
		all, err := list(func() ([]*netlink.ConntrackFlow, error) {
			return in.nl.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
		})
		must(t, err)
		count := 0
		for _, f := range all {
			if flowsOf(a).MatchConntrackFlow(f) {
				count++
			}
		}
		return count
	}
	if flows(g.address) == 0 || flows(other.address) == 0 {
		t.Fatal("no connections are known, so the test proves nothing")
	}
	g.stop()
	n.detach(t, 1)
	if left := flows(g.address); left != 0 {
		t.Errorf("%d connections of the detached guest are remembered", left)
	}
	if flows(other.address) == 0 {
		t.Error("connections of another guest were forgotten")
	}
}

func TestCountersGoOnOverRestartsOfVMMAndRuntime(t *testing.T) {
	n := newSite(t, 1500).newNode(t)
	n.set(t, spec(blue, 1450))
	n.attach(t, 2, nic(blue, 2, "10.4.0.12"))
	g := n.attach(t, 1, nic(blue, 1, "10.4.0.11"))
	count := func() network.Counters {
		t.Helper()
		all, err := n.Counters(t.Context())
		if err != nil || len(all) != 2 || all[0].VM != networktest.VM(1) || all[0].Network != blue || all[0].Interface != "eth0" {
			t.Fatalf("%+v %v", all, err)
		}
		return all[0]
	}
	g.mustPing(gateway, 1000)
	first := count()
	if first.SentBytes < 1000 || first.SentBytes > 3000 || first.ReceivedBytes < 1000 || first.ReceivedBytes > 3000 || first.Dropped != 0 {
		t.Errorf("after a ping of 1000 bytes: %+v", first)
	}
	// A frame from another's MAC is dropped, and counted for who sent it.
	forged := ipFrame(mac(n.segment(blue).plan.mac), mac{2, 1, 1, 1, 1, 1}, g.address, gateway, 1, make([]byte, 8))
	for range 3 {
		must(t, g.send(forged))
	}
	g.mustPing(gateway, 1000)
	second := count()
	if second.Dropped != 3 || second.SentBytes < 2000 {
		t.Errorf("after three forged frames and a ping: %+v", second)
	}
	n.Sweep(t.Context())
	g.stop()
	n.reopen(t)
	g = n.attach(t, 1, nic(blue, 1, "10.4.0.11"))
	if third := count(); third.SentBytes < second.SentBytes || third.ReceivedBytes < second.ReceivedBytes || third.Dropped != 3 {
		t.Errorf("after a restart of both %+v, before %+v", third, second)
	}
	must(t, g.send(forged))
	g.mustPing(gateway, 1000)
	if fourth := count(); fourth.SentBytes < second.SentBytes+1000 || fourth.Dropped != 4 {
		t.Errorf("later %+v, before %+v", fourth, second)
	}
	n.detach(t, 1)
	fresh := n.attach(t, 1, nic(blue, 1, "10.4.0.11"))
	fresh.mustPing(gateway, 56)
	if c := count(); c.SentBytes >= 1000 || c.Dropped != 0 {
		t.Errorf("a VM that was detached and attached counts on: %+v", c)
	}
}

func TestTheHostIsLookedAt(t *testing.T) {
	s := newSite(t, 1500)
	host := s.newHost(t)
	n := newNode(t, host, "00000001", func(*Options) {})
	n.set(t, spec(blue, 1450))
	n.attach(t, 1, nic(blue, 1, "10.4.0.11"))
	wire := mustLink(t, host, "wire")
	must(t, host.nl.AddrAdd(wire, mustAddr(t, "198.51.100.7/32")))
	look := func() network.Host {
		t.Helper()
		h, err := n.Host(t.Context())
		must(t, err)
		return h
	}
	if h := look(); h.VTEP != "192.0.2.1" || h.MTU != 1500 || h.Port != network.DefaultPort || !slices.Equal(h.Addresses, []string{"192.0.2.1", "198.51.100.7"}) || h.ForwardBlocked != "" {
		t.Errorf("host %+v", h)
	}
	must(t, host.nl.RouteDel(&netlink.Route{Dst: ipNet(netip.MustParsePrefix("0.0.0.0/0"))}))
	if h := look(); h.VTEP != "" || h.MTU != 0 {
		t.Errorf("a host without a default route %+v", h)
	}
	n.o.VTEP = netip.MustParseAddr("198.51.100.7")
	n.reopen(t)
	if h := look(); h.VTEP != "198.51.100.7" || h.MTU != 1500 {
		t.Errorf("a host whose address was told %+v", h)
	}
	n.o.VTEP = netip.MustParseAddr("203.0.113.1")
	n.reopen(t)
	if _, err := n.Host(t.Context()); err == nil || !strings.Contains(err.Error(), "203.0.113.1") {
		t.Errorf("an address that the host does not have: %v", err)
	}
}

func TestWithoutADefaultRouteNetworksWorkOnOneNode(t *testing.T) {
	n := newSite(t, 1500).newNode(t)
	must(t, n.host.nl.RouteDel(&netlink.Route{Dst: ipNet(netip.MustParsePrefix("0.0.0.0/0"))}))
	n.set(t, spec(blue, 1500, peer(nic(blue, 9, "10.4.0.19"), 2)))
	g, other := n.attach(t, 1, nic(blue, 1, "10.4.0.11")), n.attach(t, 2, nic(blue, 2, "10.4.0.12"))
	g.mustPing(gateway, 1472)
	g.mustPing(other.address, 1472)
	// The overlay comes with the route.
	must(t, n.host.nl.RouteAdd(&netlink.Route{LinkIndex: mustLink(t, n.host, "wire").Attrs().Index, Gw: outside.AsSlice()}))
	n.Sweep(t.Context())
	if statuses, err := n.Networks(t.Context()); err != nil || !strings.Contains(statuses[0].Problem, "1550") {
		t.Errorf("an overlay that does not fit is told as %+v %v", statuses, err)
	}
	n.set(t, spec(blue, 1450, peer(nic(blue, 9, "10.4.0.19"), 2)))
	mustLink(t, n.inside(t, blue), n.names.overlay(blue))
	g.mustPing(other.address, 1400)
	must(t, n.host.nl.RouteDel(&netlink.Route{Dst: ipNet(netip.MustParsePrefix("0.0.0.0/0"))}))
	n.Sweep(t.Context())
	if l, err := n.inside(t, blue).link(n.names.overlay(blue)); err != nil || l != nil {
		t.Errorf("an overlay without an address: %v %v", l, err)
	}
	g.mustPing(other.address, 1400)
}

func TestNamesOfDevicesFitAndTellWhose(t *testing.T) {
	n := names{instance: "0a1b2c3d"}
	taken := map[string]bool{}
	for _, id := range []string{blue, "6f1c2a9e-ffff-4a64-9f0a-2f6e4e1b7c01", "no-uuid", "also-none", strings.Repeat("x", 128)} {
		ns := n.namespace(id, func(s string) bool { return taken[s] })
		if taken[ns] || !strings.HasPrefix(ns, "imp-0a1b2c3d-") || len(ns) != len("imp-0a1b2c3d-")+8 {
			t.Errorf("namespace of %s is %s", id, ns)
		}
		taken[ns] = true
		for _, name := range []string{n.bridge(id), n.overlay(id), n.uplink(id), n.hostEnd(id), n.tap(networktest.VM(1), id)} {
			if len(name) > unix.IFNAMSIZ-1 || !strings.HasPrefix(name, "i0a1b") || taken[name] {
				t.Errorf("device of %s is %s", id, name)
			}
			taken[name] = true
		}
	}
	if ns := n.namespace(blue, func(string) bool { return false }); ns != "imp-0a1b2c3d-6f1c2a9e" {
		t.Errorf("namespace of a UID is %s", ns)
	}
}

// Attaching costs the same however many guests there are: two nodes take turns, so that a busy machine slows both. The figure stands in
// docs/figures.md.
func TestAttachingStaysFlat(t *testing.T) {
	if testing.Short() {
		t.Skip("300 guests take long, and this is short mode")
	}
	const guests, samples = 300, 31
	st := newSite(t, 1500)
	quiet, full := newAttacher(t, st), newAttacher(t, st)
	first := quiet.attach(1) // with the whole network
	for vm := 1; vm < guests; vm++ {
		full.attach(vm)
	}
	var few, many []time.Duration
	for range samples {
		few, many = append(few, quiet.attach(guests)), append(many, full.attach(guests))
		quiet.detach(guests)
		full.detach(guests)
	}
	slices.Sort(few)
	slices.Sort(many)
	ratio := float64(many[samples/2]) / float64(few[samples/2])
	t.Logf("attach the first guest, with its network: %v; the 2nd: %v; the 300th: %v; ratio %.2f", first, few[samples/2], many[samples/2], ratio)
	if ratio > 1.3 {
		t.Errorf("the 300th guest costs %.2f times the 2nd, more than 1.3", ratio)
	}
}

// attacher is a node whose guests come and go under a clock.
type attacher struct {
	*node
	t    *testing.T
	taps map[int]*os.File
}

func newAttacher(t *testing.T, st *site) *attacher {
	a := &attacher{node: st.newNode(t), t: t, taps: map[int]*os.File{}}
	a.set(t, spec(blue, 1450))
	t.Cleanup(func() {
		for _, f := range a.taps {
			f.Close()
		}
	})
	return a
}

func (a *attacher) attach(vm int) time.Duration {
	a.t.Helper()
	began := time.Now()
	attachments, err := a.Attach(a.t.Context(), networktest.VM(vm), []network.Interface{networktest.NIC("eth0", blue, vm)})
	took := time.Since(began)
	must(a.t, err)
	a.taps[vm] = attachments[0].TAP
	return took
}

func (a *attacher) detach(vm int) {
	a.t.Helper()
	must(a.t, a.taps[vm].Close())
	delete(a.taps, vm)
	must(a.t, a.Detach(a.t.Context(), networktest.VM(vm)))
}
