package linux

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"imp.dev/imp/internal/network"
	"imp.dev/imp/internal/network/networktest"
)

// virtioHeader is before each frame of a TAP with IFF_VNET_HDR: ten bytes, all zero where no offload is asked for.
const virtioHeader = 10

// actor is a guest in a few lines: behind an open TAP, it asks and answers ARP, and answers pings.
type actor struct {
	t       testing.TB
	tap     *os.File
	nic     network.Interface
	address netip.Addr
	mac     mac

	mu     sync.Mutex
	cache  map[netip.Addr]mac
	echoes map[uint16]chan []byte
	frames [][]byte // every frame that came, as it came
	seq    uint16
	done   chan struct{}
}

// attach attaches the n-th VM and plays its guest.
func (n *node) attach(t testing.TB, vm int, nic network.Interface) *actor {
	t.Helper()
	attachments, err := n.Attach(t.Context(), networktest.VM(vm), []network.Interface{nic})
	if err != nil {
		t.Fatal(err)
	}
	return play(t, attachments[0])
}

func play(t testing.TB, a network.Attachment) *actor {
	t.Helper()
	p, err := netip.ParsePrefix(a.Interface.Addresses[0])
	must(t, err)
	g := &actor{t: t, tap: a.TAP, nic: a.Interface, address: p.Addr(), cache: map[netip.Addr]mac{}, echoes: map[uint16]chan []byte{}, done: make(chan struct{})}
	at, err := parsePlace(p.Addr().String(), a.Interface.MAC, plan{subnet: p.Masked()})
	must(t, err)
	g.mac = at.mac
	go g.receive()
	t.Cleanup(g.stop)
	return g
}

// stop is the end of the VMM.
func (g *actor) stop() {
	g.tap.Close()
	<-g.done
}

func (g *actor) receive() {
	defer close(g.done)
	buffer := make([]byte, 1<<16+virtioHeader)
	for {
		n, err := g.tap.Read(buffer)
		if err != nil {
			return
		}
		if n < virtioHeader+14 {
			continue
		}
		frame := append([]byte(nil), buffer[virtioHeader:n]...)
		g.mu.Lock()
		g.frames = append(g.frames, frame)
		g.mu.Unlock()
		to := mac(frame[:6])
		if to != g.mac && to != everybody {
			continue
		}
		switch binary.BigEndian.Uint16(frame[12:]) {
		case 0x0806:
			g.arp(frame)
		case 0x0800:
			g.icmp(frame)
		}
	}
}

var everybody = mac{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

func (g *actor) send(frame []byte) error {
	_, err := g.tap.Write(append(make([]byte, virtioHeader), frame...))
	return err
}

func arpFrame(to, from mac, op uint16, sender place, targetMAC mac, target netip.Addr) []byte {
	s, a := sender.address.As4(), target.As4()
	f := append(append(append([]byte{}, to[:]...), from[:]...), 0x08, 0x06, 0, 1, 8, 0, 6, 4, byte(op>>8), byte(op))
	f = append(append(append(f, sender.mac[:]...), s[:]...), targetMAC[:]...)
	return append(f, a[:]...)
}

// arp learns as Linux does: an answer to a question, or a gratuitous one about somebody it knows.
func (g *actor) arp(frame []byte) {
	if len(frame) < 42 {
		return
	}
	op, sender := binary.BigEndian.Uint16(frame[20:]), place{mac: mac(frame[22:28])}
	sender.address, _ = netip.AddrFromSlice(frame[28:32])
	target, _ := netip.AddrFromSlice(frame[38:42])
	g.mu.Lock()
	_, known := g.cache[sender.address]
	if known || op == 2 && target == g.address {
		g.cache[sender.address] = sender.mac
	}
	g.mu.Unlock()
	if op == 1 && target == g.address && sender.address != target {
		_ = g.send(arpFrame(sender.mac, g.mac, 2, place{address: g.address, mac: g.mac}, sender.mac, sender.address))
	}
}

// resolve asks for a MAC until patience ends.
func (g *actor) resolve(a netip.Addr, patience time.Duration) (mac, error) {
	end := time.Now().Add(patience)
	ask := time.Time{}
	for {
		g.mu.Lock()
		m, ok := g.cache[a]
		g.mu.Unlock()
		if ok {
			return m, nil
		}
		now := time.Now()
		if now.After(end) {
			return m, fmt.Errorf("%s: nobody answers for %s", g.address, a)
		}
		if now.Sub(ask) > 100*time.Millisecond {
			ask = now
			if err := g.send(arpFrame(everybody, g.mac, 1, place{address: g.address, mac: g.mac}, mac{}, a)); err != nil {
				return m, err
			}
		}
		<-time.After(200 * time.Microsecond)
	}
}

func (g *actor) icmp(frame []byte) {
	if len(frame) < 42 || frame[23] != 1 {
		return
	}
	source, _ := netip.AddrFromSlice(frame[26:30])
	target, _ := netip.AddrFromSlice(frame[30:34])
	if target != g.address {
		return
	}
	body := append([]byte(nil), frame[34:14+int(binary.BigEndian.Uint16(frame[16:]))]...)
	switch body[0] {
	case 8:
		body[0], body[2], body[3] = 0, 0, 0
		binary.BigEndian.PutUint16(body[2:], checksum(body))
		_ = g.send(ipFrame(mac(frame[6:12]), g.mac, g.address, source, 1, body))
	case 0:
		g.mu.Lock()
		waiter := g.echoes[binary.BigEndian.Uint16(body[6:])]
		g.mu.Unlock()
		if waiter != nil {
			select {
			case waiter <- body[8:]:
			default:
			}
		}
	}
}

// ipFrame has DF set: nothing on the way may cut it.
func ipFrame(to, from mac, source, target netip.Addr, protocol byte, body []byte) []byte {
	s, d := source.As4(), target.As4()
	header := []byte{0x45, 0, 0, 0, 0, 1, 0x40, 0, 64, protocol, 0, 0}
	binary.BigEndian.PutUint16(header[2:], uint16(20+len(body)))
	header = append(append(header, s[:]...), d[:]...)
	binary.BigEndian.PutUint16(header[10:], checksum(header))
	f := append(append(append([]byte{}, to[:]...), from[:]...), 0x08, 0)
	return append(append(f, header...), body...)
}

func checksum(b []byte) uint16 {
	sum := uint32(0)
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	if len(b)%2 == 1 {
		sum += uint32(b[len(b)-1]) << 8
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

const patience = 2 * time.Second

// ping sends one echo request of that many bytes and awaits the answer, byte for byte. What lies outside the subnet goes by
// the gateway.
func (g *actor) ping(a netip.Addr, size int, wait time.Duration) error {
	hop := a
	if p := netip.MustParsePrefix(g.nic.Addresses[0]); !p.Contains(a) {
		hop = netip.MustParseAddr(g.nic.Gateway)
	}
	to, err := g.resolve(hop, wait)
	if err != nil {
		return err
	}
	g.mu.Lock()
	g.seq++
	seq, answer := g.seq, make(chan []byte, 1)
	g.echoes[seq] = answer
	g.mu.Unlock()
	defer func() {
		g.mu.Lock()
		delete(g.echoes, seq)
		g.mu.Unlock()
	}()
	body := make([]byte, 8+size)
	body[0] = 8
	binary.BigEndian.PutUint16(body[4:], 77)
	binary.BigEndian.PutUint16(body[6:], seq)
	for i := range size {
		body[8+i] = byte(i * 7)
	}
	binary.BigEndian.PutUint16(body[2:], checksum(body))
	if err := g.send(ipFrame(to, g.mac, g.address, a, 1, body)); err != nil {
		return fmt.Errorf("sending a ping from %s: %w", g.address, err)
	}
	select {
	case got := <-answer:
		if string(got) != string(body[8:]) {
			return fmt.Errorf("the answer of %s to %s has other bytes", a, g.address)
		}
		return nil
	case <-time.After(wait):
		return fmt.Errorf("%s at %s: %w by %s", a, to, errNoAnswer, g.address)
	}
}

var errNoAnswer = errors.New("no answer was heard")

func (g *actor) mustPing(a netip.Addr, size int) {
	g.t.Helper()
	if err := g.ping(a, size, patience); err != nil {
		g.t.Error(err)
	}
}

// heard counts the frames that came and that match.
func (g *actor) heard(match func(frame []byte) bool) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	count := 0
	for _, f := range g.frames {
		if match(f) {
			count++
		}
	}
	return count
}
