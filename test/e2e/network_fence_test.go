package e2e

import (
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/devserver/fabric"
	"imp.dev/imp/internal/network"

	"sigs.k8s.io/controller-runtime/pkg/client"
)

const (
	metadataAddress = "169.254.169.254"
	podAddress      = "10.244.2.7" // one of node-2's pods
	serviceAddress  = "10.96.0.80"
)

// nodePorts are a login, a kubelet and a NodePort.
func nodePorts() []string { return []string{"22", "10250", "30080"} }

// refused fails the test for each address that the guest does reach.
func (g *guest) refused(t *testing.T, addresses ...string) {
	t.Helper()
	var waiting sync.WaitGroup
	for _, address := range addresses {
		waiting.Go(func() {
			if out, err := g.ask(t, "tcp", address); err == nil {
				t.Errorf("%s reaches %s, which says %q", g.vm.Name, address, strings.TrimSpace(out))
			} else if strings.Contains(err.Error(), "asking "+g.vm.Name) {
				t.Errorf("%s → %s: %v", g.vm.Name, address, err)
			}
		})
	}
	waiting.Wait()
}

func (m *mesh) fenced(t *testing.T) {
	for _, host := range []fabric.Host{m.node1, m.node2, m.node3} {
		for _, port := range nodePorts() {
			listen(t, host.Namespace, net.JoinHostPort("0.0.0.0", port))
		}
	}
	for _, address := range []string{metadataAddress, podAddress, serviceAddress} {
		addAddress(t, m.outside, address)
		listen(t, m.outside, net.JoinHostPort(address, "80"))
	}
	listen(t, m.outside, "198.51.100.1:8081")
	// What nobody can reach is no fence's merit.
	var forbidden []string
	for _, host := range []fabric.Host{m.node1, m.node2, m.node3} {
		for _, port := range nodePorts() {
			forbidden = append(forbidden, net.JoinHostPort(host.Address.String(), port))
		}
	}
	for _, address := range []string{metadataAddress, podAddress, serviceAddress} {
		forbidden = append(forbidden, net.JoinHostPort(address, "80"))
	}
	for _, address := range forbidden {
		if got, err := dials(m.node3.Namespace, address); err != nil || got == "" {
			t.Fatalf("node-3 itself does not reach %s (%v); then a guest that does not shows nothing", address, err)
		}
	}
	if out, err := m.ann.ask(t, "tcp", "198.51.100.1:8081"); err != nil {
		t.Fatalf("ann does not reach the outside: %v %s", err, out)
	}
	// The node's ends of the links to networks are addresses of a node, too.
	for _, address := range m.linkLocal(t, m.node1.Namespace) {
		forbidden = append(forbidden, net.JoinHostPort(address, "22"))
	}
	for _, port := range nodePorts() {
		forbidden = append(forbidden, net.JoinHostPort("10.61.0.1", port))
	}
	forbidden = append(forbidden, "127.0.0.1:22", "0.0.0.0:22")
	m.ann.refused(t, forbidden...)
	m.ben.refused(t, forbidden...)
}

// linkLocal gives the addresses of 169.254.0.0/16 in a namespace.
func (m *mesh) linkLocal(t *testing.T, n fabric.Namespace) (found []string) {
	t.Helper()
	must(t, n.Do(func() error {
		addresses, err := net.InterfaceAddrs()
		for _, a := range addresses {
			if ip := a.(*net.IPNet).IP; ip.IsLinkLocalUnicast() && ip.To4() != nil {
				found = append(found, ip.String())
			}
		}
		return err
	}))
	if len(found) == 0 {
		t.Error("node-1 has no link-local address, so no link to a network")
	}
	return found
}

func (m *mesh) clusterAccess(t *testing.T) {
	for _, address := range []string{podAddress, serviceAddress} {
		addAddress(t, m.outside, address)
		listen(t, m.outside, net.JoinHostPort(address, "80"))
	}
	listen(t, m.node2.Namespace, "0.0.0.0:10250")
	allow := func(yes bool) {
		t.Helper()
		now := &v1alpha1.ImpNetwork{}
		must(t, m.client.Get(t.Context(), client.ObjectKeyFromObject(m.network), now))
		before := now.DeepCopy()
		now.Spec.NAT.ClusterAccess = yes
		must(t, m.client.Patch(t.Context(), now, client.MergeFrom(before)))
	}
	allow(true)
	for _, address := range []string{podAddress, serviceAddress} {
		if !eventually(t.Context(), soon, func() bool { _, err := m.ann.ask(t, "tcp", address+":80"); return err == nil }) {
			_, err := m.ann.ask(t, "tcp", address+":80")
			t.Errorf("ann does not reach %s with clusterAccess: %v", address, err)
		}
	}
	m.ann.refused(t, net.JoinHostPort(m.node2.Address.String(), "10250"))
	m.tom.refused(t, podAddress+":80", serviceAddress+":80") // another network's permission is not its own
	allow(false)
	for _, address := range []string{podAddress, serviceAddress} {
		if !eventually(t.Context(), soon, func() bool { _, err := m.ann.ask(t, "tcp", address+":80"); return err != nil }) {
			t.Errorf("ann still reaches %s", address)
		}
	}
}

// watched does something several times while a guest watches for a mark, and gives what the guest has seen of it.
func (g *guest) watched(t *testing.T, pattern []byte, do func()) (seen int, first string) {
	t.Helper()
	outcome := g.later(t, "watch", "2500", hex.EncodeToString(pattern))
	ticker := time.NewTicker(200 * time.Millisecond)
	defer ticker.Stop()
	for range 9 { // the first before it watches, perhaps
		do()
		<-ticker.C
	}
	out := outcome()
	if _, err := fmt.Sscanf(out, "seen=%d", &seen); err != nil {
		t.Fatalf("reading %q: %v", out, err)
	}
	_, first, _ = strings.Cut(out, " ")
	return seen, first
}

func (m *mesh) injected(t *testing.T) {
	ip := func(text string) netip.Addr { return netip.MustParseAddr(text) }
	// frame is what ben might send to the victim, with a mark.
	frame := func(victim *guest, pattern []byte) []byte {
		packet := udp4(netip.AddrPortFrom(ip(m.ben.ip()), 9), netip.AddrPortFrom(ip(victim.ip()), 9), pattern)
		return ethernet(victim.mac(t), network.GuestMAC(string(m.ben.vm.UID), 0), typeIPv4, packet)
	}
	meshVNI, twinVNI := uint32(m.network.Status.VNI), uint32(m.twin.Status.VNI)
	vtep := m.node1.Address
	pod := m.pod(t, m.node1, "10.244.1.9")
	send := func(n fabric.Namespace, from netip.Addr, vni uint32) func([]byte) {
		return func(frame []byte) { must(t, inject(n, overlayPacket(from, vtep, vni, frame))) }
	}
	shoot := func(g *guest, vni uint32) func([]byte) {
		return func(frame []byte) {
			// An error is as good as silence: the guest's packet did not even leave it.
			_, _ = g.ask(t, "shoot", fmt.Sprintf("%s:%d", vtep, overlayPort), hex.EncodeToString(vxlan(vni, frame)))
		}
	}
	for _, c := range []struct {
		name   string
		victim *guest
		send   func(frame []byte)
		seen   bool
	}{
		{"from a node that has guests of the network, so that a frame is known to be good", m.ann, send(m.node2.Namespace, m.node2.Address, meshVNI), true},
		{"from a guest of the same network", m.ann, shoot(m.mal, meshVNI), false},
		{"from a guest of the same network on another node", m.ann, shoot(m.ben, meshVNI), false},
		{"from a guest of another network", m.ann, shoot(m.tim, meshVNI), false},
		{"from a guest into another network", m.tom, shoot(m.ben, twinVNI), false},
		{"from a pod on the node", m.ann, send(pod, ip("10.244.1.9"), meshVNI), false},
		{"from a pod that claims to be another node", m.ann, send(pod, m.node2.Address, meshVNI), false},
		{"from a node that has no guest of the network", m.tom, send(m.node3.Namespace, m.node3.Address, twinVNI), false},
		{"from the outside", m.ann, send(m.outside, fabric.OutsideAddress(), meshVNI), false},
	} {
		pattern := mark()
		content := frame(c.victim, pattern)
		seen, first := c.victim.watched(t, pattern, func() { c.send(content) })
		if (seen > 0) != c.seen {
			t.Errorf("%s: %s saw %d frames, want some: %v %s", c.name, c.victim.vm.Name, seen, c.seen, first)
		}
	}
}

func (m *mesh) apart(t *testing.T) {
	if m.tom.ip() != m.ann.ip() {
		t.Fatalf("tom is %s and ann %s; then this shows nothing", m.tom.ip(), m.ann.ip())
	}
	m.tom.reaches(t, m.tim)
	m.tim.reaches(t, m.tom) // and is answered by tom, not by ann, who has that address too
	if e := m.ann.ping(t, m.tim.ip(), 3, 20*time.Millisecond, 56); e.received != 0 {
		t.Errorf("ann → tim of another network: %s", e)
	}
	if e := m.tim.ping(t, m.ben.ip(), 3, 20*time.Millisecond, 56); m.ben.ip() != m.tim.ip() && e.received != 0 {
		t.Errorf("tim → ben of another network: %s", e)
	}
	pattern := mark()
	content := ethernet(broadcast(), network.GuestMAC(string(m.tom.vm.UID), 0), typeIPv4,
		udp4(netip.AddrPortFrom(netip.MustParseAddr(m.tom.ip()), 9), netip.MustParseAddrPort("10.61.0.255:9"), pattern))
	if seen, _ := m.ann.watched(t, pattern, func() { m.tom.tell(t, "frames", "1", hex.EncodeToString(content)) }); seen > 0 {
		t.Errorf("ann saw %d of the frames that tom sent to all of another network on the same node", seen)
	}
}

// forged has mal send what is not its to send, while its neighbours talk.
func (m *mesh) forged(t *testing.T) {
	malMAC, annMAC, benMAC := m.mal.mac(t), m.ann.mac(t), network.GuestMAC(string(m.ben.vm.UID), 0)
	gatewayMAC := network.GatewayMAC(string(m.network.UID))
	ip := func(text string) netip.Addr { return netip.MustParseAddr(text) }
	mal, ann, ben, gateway := ip(m.mal.ip()), ip(m.ann.ip()), ip(m.ben.ip()), ip("10.61.0.1")
	pattern := mark()
	datagram := func(from netip.Addr) []byte {
		return udp4(netip.AddrPortFrom(from, 9), netip.AddrPortFrom(ann, 9), pattern)
	}
	honest := ethernet(annMAC, malMAC, typeIPv4, datagram(mal))
	if seen, _ := m.ann.watched(t, pattern, func() { m.mal.tell(t, "frames", "1", hex.EncodeToString(honest)) }); seen == 0 {
		t.Fatal("ann does not see what mal may send; then what she does not see shows nothing")
	}
	forgeries := map[string][]byte{
		"its neighbour's address":             ethernet(annMAC, malMAC, typeIPv4, datagram(ben)),
		"its neighbour's MAC":                 ethernet(annMAC, benMAC, typeIPv4, datagram(mal)),
		"its neighbour's MAC and address":     ethernet(annMAC, benMAC, typeIPv4, datagram(ben)),
		"the gateway's MAC":                   ethernet(annMAC, gatewayMAC, typeIPv4, datagram(mal)),
		"an answer to ARP for the gateway":    ethernet(annMAC, malMAC, typeARP, append(arpReply(malMAC, gateway, annMAC, ann), pattern...)),
		"the same, to all":                    ethernet(broadcast(), malMAC, typeARP, append(arpReply(malMAC, gateway, broadcast(), gateway), pattern...)),
		"an answer to ARP for its neighbour":  ethernet(annMAC, malMAC, typeARP, append(arpReply(malMAC, ben, annMAC, ann), pattern...)),
		"an answer to ARP with another's MAC": ethernet(annMAC, malMAC, typeARP, append(arpReply(benMAC, mal, annMAC, ann), pattern...)),
		"a VLAN's tag":                        vlan(honest, 5),
		"a tag of VLAN 0":                     vlan(honest, 0),
		"an IPv6 router's advertisement":      ethernet(net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1}, malMAC, typeIPv6, append(routerAdvertisement(malMAC), pattern...)),
		"a spanning tree's root":              append(bridgeProtocol(malMAC), pattern...),
		"a protocol that nobody knows":        ethernet(annMAC, malMAC, 0x88b5, pattern),
	}
	const each = 20
	words := []string{"frames", fmt.Sprint(each)}
	for _, frame := range forgeries {
		words = append(words, hex.EncodeToString(frame))
	}
	before, others := m.dropped(t, m.mal.vm), m.dropped(t, m.ann.vm)
	toGateway := m.ann.later(t, pingWords(gateway.String(), 40, 100*time.Millisecond, 56)...)
	toBen := m.ann.later(t, pingWords(ben.String(), 40, 100*time.Millisecond, 56)...)
	onBen := m.ben.later(t, "watch", "3500", hex.EncodeToString(pattern))
	seen, first := m.ann.watched(t, pattern, func() { m.mal.tell(t, words...) })
	if seen > 0 {
		t.Errorf("ann saw %d forged frames: %s", seen, first)
	}
	if out := onBen(); !strings.HasPrefix(out, "seen=0 ") {
		t.Errorf("ben saw forged frames: %s", out)
	}
	for to, outcome := range map[string]func() string{"gateway": toGateway, "ben": toBen} {
		if e := readEchoes(t, outcome()); e.received != e.sent {
			t.Errorf("ann → %s meanwhile: %s", to, e)
		}
	}
	for _, line := range m.ann.look(t).Neighbours {
		if address, mac, _ := strings.Cut(line, " "); mac == malMAC.String() && address != mal.String() {
			t.Errorf("ann takes mal for %s", address)
		}
	}
	m.mal.reaches(t, m.ann) // itself it goes on
	sent := 9 * each * len(forgeries)
	if got := m.dropped(t, m.mal.vm) - before; got < sent {
		t.Errorf("%d frames are counted as dropped, %d were forged", got, sent)
	}
	if got := m.dropped(t, m.ann.vm); got != others {
		t.Errorf("ann's drops went from %d to %d", others, got)
	}
}
