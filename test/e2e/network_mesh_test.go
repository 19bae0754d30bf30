package e2e

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/devserver/fabric"
	"imp.dev/imp/internal/network"

	"sigs.k8s.io/controller-runtime/pkg/client"
)

const (
	meshSubnet  = "10.61.0.0/24"
	overlayPort = network.DefaultPort
	nameServer  = "198.51.100.53"
)

// mesh is what the tests of guests' networks share, because a guest takes seconds to boot: a network over three nodes, and a second
// one with the same subnet.
//
//	mesh  ann, mal on node-1 · ben on node-2 · cat on node-3
//	twin  tom on node-1, with ann's address · tim on node-2
//	tight has one address, for which two wait in turn
type mesh struct {
	*cluster
	ns                           string
	network, twin                *v1alpha1.ImpNetwork
	ann, mal, ben, cat, tom, tim *guest
	node1, node2, node3          fabric.Host
	outside                      fabric.Namespace
	tight                        *v1alpha1.ImpNetwork
	formerAddress                string
	former, heir, second         *guest
}

func TestGuestsOfNetworks(t *testing.T) {
	c := shared(t, "qemu")
	c.pushProbe(t)
	m := &mesh{cluster: c, ns: c.namespace(t), outside: c.server.Fabric().Outside()}
	for i, host := range []*fabric.Host{&m.node1, &m.node2, &m.node3} {
		*host = c.server.Fabric().Node(fmt.Sprintf("node-%d", i+1))
	}
	m.network = c.network(t, m.ns, "mesh", meshSubnet, nat, func(n *v1alpha1.ImpNetwork) {
		n.Spec.DNS, n.Spec.SearchDomains = []string{nameServer}, []string{"apps.example.test"}
	})
	m.twin = c.network(t, m.ns, "twin", meshSubnet, nat)
	m.ann = c.startGuest(t, m.network, "ann", "node-1", "10.61.0.10")
	m.ben = c.startGuest(t, m.network, "ben", "node-2", "")
	m.cat = c.startGuest(t, m.network, "cat", "node-3", "")
	m.mal = c.startGuest(t, m.network, "mal", "node-1", "")
	m.formerAddress = "10.61.0.50"
	m.former = c.startGuest(t, m.network, "former", "node-3", m.formerAddress)
	for _, g := range []*guest{m.ann, m.ben, m.cat, m.mal, m.former} {
		g.await(t)
	}
	// Of two networks with one subnet the first has the node's route.
	m.tom = c.startGuest(t, m.twin, "tom", "node-1", "10.61.0.10")
	m.tim = c.startGuest(t, m.twin, "tim", "node-2", "10.61.0.77")
	for _, g := range []*guest{m.tom, m.tim} {
		g.await(t)
	}
	// Its address is used again after a minute; what is below takes that long anyway.
	m.handOver(t)
	for _, part := range []struct {
		name string
		test func(*testing.T)
	}{
		{"a guest has what its network says", m.configured},
		{"guests reach each other on every node", m.connected},
		{"100 MB arrive intact on another node", m.bulk},
		{"networks whose subnets read alike do not meddle", m.alike},
		{"names are found with musl and with glibc", m.names},
		{"a node reaches its own guests", m.fromNode},
		{"the outside is reached by NAT, whatever else the node's firewall drops", m.translated},
		{"egressInterface is the only way out", m.egress},
		{"what a guest may not reach, it does not reach", m.fenced},
		{"pods and Services are reached with clusterAccess and only then", m.clusterAccess},
		{"frames that another sends to the overlay's port reach nobody", m.injected},
		{"networks with one subnet are apart", m.apart},
		{"a guest that forges reaches nobody and harms nobody", m.forged},
		{"daemons that restart lose no packet to speak of", m.restarts},
		{"rules that somebody flushes are mended", m.flushed},
		{"an address outlives its guest's reboot", m.rebooted},
		{"a name can be used again at once", m.reborn},
		{"kubectl shows networks and addresses", m.columns},
		{"an address that is used again is reached at once from everywhere, and a network in use is not deleted", m.inherited},
	} {
		t.Run(part.name, part.test)
	}
	m.leavesNothing(t)
}

// leavesNothing removes everything and compares the nodes with what a node is without guests.
func (m *mesh) leavesNothing(t *testing.T) {
	for _, g := range []*guest{m.ann, m.ben, m.cat, m.mal, m.tom, m.tim, m.heir} {
		if g != nil {
			must(t, m.client.Delete(t.Context(), g.vm))
		}
	}
	for _, g := range []*guest{m.ann, m.ben, m.cat, m.mal, m.tom, m.tim, m.heir} {
		if g != nil {
			m.awaitGone(t, g.vm, soon)
			m.nothingLeft(t, g.vm)
		}
	}
	for address, claim := range m.claims(t, m.network.UID) {
		if claim.Status.State != v1alpha1.AddressQuarantined {
			t.Errorf("%s is %s for %s, which is gone", address, claim.Status.State, claim.Spec.VM.Name)
		}
	}
	var left []string
	if !eventually(t.Context(), soon, func() bool {
		left = slices.DeleteFunc(m.hostState(t), func(line string) bool {
			return !strings.Contains(line, " namespace ") && !strings.Contains(line, "link i")
		})
		return len(left) == 0
	}) {
		t.Errorf("no guest is left, but these are:\n  %s", strings.Join(left, "\n  "))
	}
}

func (m *mesh) configured(t *testing.T) {
	s := m.ann.look(t)
	mac := network.GuestMAC(string(m.ann.vm.UID), 0).String()
	for _, c := range []struct{ what, got, want string }{
		{"hostname", s.Hostname, "ann"},
		{"MAC", s.MAC, mac},
		{"MTU", fmt.Sprint(s.MTU), fmt.Sprint(guestMTU)},
		{"links", strings.Join(s.Links, " "), "lo eth0"},
		{"routes", strings.Join(s.Routes, ", "), "default via 10.61.0.1, 10.61.0.0/24"},
		{"status.ip", m.ann.vm.Status.IP, "10.61.0.10"},
		{"claim's MAC", m.claims(t, m.network.UID)["10.61.0.10"].Spec.MAC, mac},
		{"network's MTU", fmt.Sprint(m.network.Status.MTU), fmt.Sprint(guestMTU)},
	} {
		if c.got != c.want {
			t.Errorf("%s is %q, want %q", c.what, c.got, c.want)
		}
	}
	if !slices.Contains(s.Addresses, "eth0 10.61.0.10/24") {
		t.Errorf("addresses are %v", s.Addresses)
	}
	for _, line := range []string{"nameserver " + nameServer, "search apps.example.test"} {
		if !hasLine(s.Resolv, line) {
			t.Errorf("no line %q in resolv.conf:\n%s", line, s.Resolv)
		}
	}
	if resolv := m.tom.look(t).Resolv; !strings.HasPrefix(resolv, "none: ") {
		t.Errorf("a network without dns wrote a resolv.conf:\n%s", resolv)
	}
	alone := m.create(t, m.vm(m.ns, "alone", image(m.server.Registry+"/"+probeImage), func(vm *v1alpha1.ImpVM) { vm.Spec.Command = []string{"/probe", "look"} }))
	now := m.await(t, alone, booting, "finished", finished)
	if console := m.console(t, now); !strings.Contains(console, `"Links":["lo"]`) || now.Status.IP != "" {
		t.Errorf("a VM without a network has more than a loopback (%q):\n%s", now.Status.IP, console)
	}
}

func (m *mesh) connected(t *testing.T) {
	all := []*guest{m.ann, m.mal, m.ben, m.cat}
	for _, from := range all {
		for _, to := range all {
			if from != to {
				from.reaches(t, to)
			}
		}
		if e := from.ping(t, "10.61.0.1", 5, 20*time.Millisecond, 56); e.received != 5 {
			t.Errorf("%s → gateway: %s", from.vm.Name, e)
		}
	}
	for _, c := range []struct {
		what string
		size int
		want echoes
	}{
		{"8 KiB", 8192, echoes{sent: 3, received: 3}},
		{"all that the MTU allows", guestMTU - 28, echoes{sent: 3, received: 3}},
		{"one byte more", guestMTU - 27, echoes{sent: 3, gap: 3, refused: 3}},
	} {
		for _, to := range []*guest{m.ben, m.mal} {
			if e := m.ann.ping(t, to.ip(), 3, 20*time.Millisecond, c.size); e != c.want {
				t.Errorf("ann → %s, %s in one piece: %s", to.vm.Name, c.what, e)
			}
		}
	}
	if out, err := m.cat.ask(t, "udp", net.JoinHostPort(m.ann.ip(), "7"), "words"); err != nil || out != "ann words" {
		t.Errorf("cat → ann by UDP: %q (%v)", out, err)
	}
}

func (m *mesh) bulk(t *testing.T) {
	const size = 100 << 20
	sum := sha256.New()
	_, err := io.CopyN(sum, rand.NewChaCha8([32]byte{}), size)
	must(t, err)
	out := m.ann.tell(t, "fetch", fmt.Sprintf("http://%s/blob?bytes=%d", net.JoinHostPort(m.ben.ip(), "7000"), size))
	if want := fmt.Sprintf("%d %s ", size, hex.EncodeToString(sum.Sum(nil))); !strings.HasPrefix(out, want) {
		t.Errorf("ben sent ann %q, want %q", out, want)
	}
	t.Logf("bytes, SHA-256, ms: %s", out)
}

func (m *mesh) names(t *testing.T) {
	addAddress(t, m.outside, nameServer)
	serveNames(t, m.outside, map[string]string{"web.example.test.": "203.0.113.7", "api.apps.example.test.": "203.0.113.8"})
	for _, library := range []string{"musl", "glibc"} {
		for name, want := range map[string]string{"web.example.test": "203.0.113.7", "api": "203.0.113.8"} {
			out, err := m.ann.ask(t, "exec", "/resolve-"+library, name)
			ms := 0
			found, took, _ := strings.Cut(out, " ms=")
			_, _ = fmt.Sscan(took, &ms)
			if err != nil || found != want {
				t.Errorf("%s: %s is %q (%v), want %s", library, name, out, err, want)
			}
			if ms > 2500 { // a name server that is not there costs 5 s
				t.Errorf("%s: %s took %d ms", library, name, ms)
			}
		}
	}
}

// serveNames answers questions for A records; other questions about a name that there is have no answer, as for hosts without IPv6.
func serveNames(t *testing.T, n fabric.Namespace, names map[string]string) {
	t.Helper()
	conn, err := n.ListenPacket("udp4", net.JoinHostPort(nameServer, "53"))
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	go func() {
		buf := make([]byte, 4096)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			if n > 12 {
				_, _ = conn.WriteTo(answerName(buf[:n], names), from)
			}
		}
	}()
}

// answerName answers one DNS message (RFC 1035, 4.1) with one question.
func answerName(question []byte, names map[string]string) []byte {
	name, end := "", 12
	for end < len(question) && question[end] != 0 {
		length := int(question[end])
		name += strings.ToLower(string(question[end+1:min(len(question), end+1+length)])) + "."
		end += 1 + length
	}
	end += 5 // the root's label, type, class
	if end > len(question) {
		return nil
	}
	address, known := names[name]
	answer := append([]byte{}, question[:end]...)
	copy(answer[2:], []byte{0x81, 0x80, 0, 1, 0, 0, 0, 0, 0, 0})
	switch {
	case !known:
		answer[3] |= 3 // no such name
	case binary.BigEndian.Uint16(question[end-4:]) == 1:
		answer[7] = 1
		answer = append(answer, 0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4)
		answer = append(answer, net.ParseIP(address).To4()...)
	}
	return answer
}

// alike has two networks on a node of which one is easily taken for the other by whoever compares text.
func (m *mesh) alike(t *testing.T) {
	four := m.cluster.network(t, m.ns, "four", "10.4.0.0/24", nat)
	fortyFour := m.cluster.network(t, m.ns, "forty-four", "10.44.0.0/24", nat)
	listen(t, m.outside, "198.51.100.1:8085")
	goes := m.startGuest(t, four, "goes", "node-1", "10.4.0.2")
	stays := m.startGuest(t, fortyFour, "stays", "node-1", "10.44.0.2")
	for _, g := range []*guest{goes, stays} {
		g.await(t)
		if _, err := g.ask(t, "tcp", "198.51.100.1:8085"); err != nil {
			t.Errorf("%s → outside: %v", g.vm.Name, err)
		}
	}
	if e := goes.ping(t, stays.ip(), 3, 20*time.Millisecond, 56); e.received != 0 {
		t.Errorf("10.4.0.2 → 10.44.0.2: %s", e)
	}
	goes.gone(t)
	must(t, m.client.Delete(t.Context(), four))
	if _, err := stays.ask(t, "tcp", "198.51.100.1:8085"); err != nil {
		t.Errorf("10.44.0.2 → outside after 10.4.0.0/24 has gone: %v", err)
	}
	if got, err := dials(m.node1.Namespace, "10.44.0.2:7"); err != nil || got != "stays" {
		t.Errorf("node-1 → 10.44.0.2 after 10.4.0.0/24 has gone: %q (%v)", got, err)
	}
	stays.gone(t)
}

// egress has the networks of one node leave by different ways: one of them is none.
func (m *mesh) egress(t *testing.T) {
	listen(t, m.outside, "198.51.100.1:8086")
	by := func(name string) {
		t.Helper()
		now := &v1alpha1.ImpNetwork{}
		must(t, m.client.Get(t.Context(), client.ObjectKeyFromObject(m.twin), now))
		before := now.DeepCopy()
		now.Spec.NAT.EgressInterface = name
		must(t, m.client.Patch(t.Context(), now, client.MergeFrom(before)))
	}
	for _, c := range []struct {
		name    string
		reaches bool
	}{{"eth0", true}, {"eth9", false}, {"", true}} {
		by(c.name)
		if !eventually(t.Context(), soon, func() bool { _, err := m.tom.ask(t, "tcp", "198.51.100.1:8086"); return (err == nil) == c.reaches }) {
			t.Errorf("tom → outside by egressInterface %q: want it to succeed: %v", c.name, c.reaches)
		}
		if _, err := m.ann.ask(t, "tcp", "198.51.100.1:8086"); err != nil {
			t.Errorf("ann → outside while another network leaves by %q: %v", c.name, err)
		}
	}
}

func (m *mesh) fromNode(t *testing.T) {
	if got, err := dials(m.node1.Namespace, net.JoinHostPort(m.ann.ip(), "7")); err != nil || got != "ann" {
		t.Errorf("node-1 → ann: %q (%v)", got, err)
	}
	if got, err := dials(m.node2.Namespace, net.JoinHostPort(m.ben.ip(), "7")); err != nil || got != "ben" {
		t.Errorf("node-2 → ben: %q (%v)", got, err)
	}
}

func (m *mesh) translated(t *testing.T) {
	listen(t, m.outside, "198.51.100.1:8080")
	reaches := func(g *guest, within time.Duration) {
		t.Helper()
		var out string
		var err error
		want := g.host().Address.String()
		if !eventually(t.Context(), within, func() bool {
			out, err = g.ask(t, "tcp", "198.51.100.1:8080")
			return err == nil && strings.TrimSpace(out) == want
		}) {
			t.Errorf("%s → outside: seen as %q (%v), want %s", g.vm.Name, out, err, want)
		}
	}
	for _, g := range []*guest{m.ann, m.ben, m.cat, m.tom} {
		reaches(g, time.Second)
	}
	pod := m.pod(t, m.node1, "10.244.1.9")
	if got, err := dials(pod, "198.51.100.1:8080"); err != nil || got != "10.244.1.9" {
		t.Errorf("a pod → outside: seen as %q (%v)", got, err)
	}
	for _, host := range []fabric.Host{m.node1, m.node2} {
		dropForwarding(t, host.Namespace)
	}
	if got, err := dials(pod, "198.51.100.1:8080"); err == nil {
		t.Errorf("a pod, for whom there is no exception, → outside: seen as %q; then that a guest gets through shows nothing", got)
	}
	for _, g := range []*guest{m.ann, m.ben, m.tom} {
		reaches(g, soon)
	}
	m.ann.reaches(t, m.mal) // a bridge's frames are not passed to the node's chains
	m.ann.reaches(t, m.ben)
	if got, err := dials(m.node1.Namespace, net.JoinHostPort(m.ann.ip(), "7")); err != nil || got != "ann" {
		t.Errorf("node-1 → ann: %q (%v)", got, err)
	}
}
