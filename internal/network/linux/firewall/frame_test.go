package firewall_test

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var broadcast = net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

func ether(to, from net.HardwareAddr, kind uint16, payload []byte) []byte {
	f := append(append([]byte{}, to...), from...)
	return append(binary.BigEndian.AppendUint16(f, kind), payload...)
}

// tagged puts a VLAN tag of that protocol into a frame.
func tagged(frame []byte, protocol, vlan uint16) []byte {
	f := append([]byte{}, frame[:12]...)
	f = binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(f, protocol), vlan)
	return append(f, frame[12:]...)
}

// arp is a packet about MACs of that many bytes; operation 1 asks, 2 answers. The marker is behind it, as padding.
func arp(operation byte, length byte, sender net.HardwareAddr, senderIP netip.Addr, targetIP netip.Addr, marker string) []byte {
	p := []byte{0, 1, 8, 0, length, 4, 0, operation}
	p = append(append(p, sender...), senderIP.AsSlice()...)
	p = append(append(p, 0, 0, 0, 0, 0, 0), targetIP.AsSlice()...)
	return append(p, marker...)
}

// ipv4 is a packet of that protocol.
func ipv4(protocol byte, from, to netip.Addr, payload []byte) []byte {
	h := make([]byte, 20, 20+len(payload))
	h[0], h[8], h[9] = 0x45, 64, protocol
	binary.BigEndian.PutUint16(h[2:], uint16(20+len(payload)))
	copy(h[12:], from.AsSlice())
	copy(h[16:], to.AsSlice())
	binary.BigEndian.PutUint16(h[10:], checksum(h))
	return append(h, payload...)
}

// udp is a datagram without a checksum.
func udp(from, to uint16, payload []byte) []byte {
	h := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, from), to)
	h = binary.BigEndian.AppendUint16(h, uint16(8+len(payload)))
	return append(append(h, 0, 0), payload...)
}

func checksum(b []byte) uint16 {
	sum := uint32(0)
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	if len(b)%2 == 1 {
		sum += uint32(b[len(b)-1]) << 8
	}
	for sum>>16 != 0 {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// send puts a frame onto a device of the namespace.
func (ns namespace) send(t testing.TB, device string, frame []byte) {
	t.Helper()
	ns.do(t, func() error { return sendFrames(device, frame) })
}

// sendFrames does so in the calling thread's namespace.
func sendFrames(device string, frames ...[]byte) error {
	socket, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(socket)
	link, err := net.InterfaceByName(device)
	if err != nil {
		return err
	}
	for _, f := range frames {
		if err := unix.Sendto(socket, f, 0, &unix.SockaddrLinklayer{Ifindex: link.Index}); err != nil {
			return err
		}
	}
	return nil
}

// watcher keeps every frame that a device received.
type watcher struct {
	mu     sync.Mutex
	frames [][]byte
	more   chan struct{}
}

// watch looks at a device until the test ends.
func (ns namespace) watch(t testing.TB, device string) *watcher {
	t.Helper()
	w := &watcher{more: make(chan struct{}, 1)}
	ns.do(t, func() error {
		all := uint16(unix.ETH_P_ALL)
		socket, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(all<<8|all>>8))
		if err != nil {
			return err
		}
		link, err := net.InterfaceByName(device)
		if err != nil {
			return err
		}
		if err := unix.Bind(socket, &unix.SockaddrLinklayer{Protocol: all<<8 | all>>8, Ifindex: link.Index}); err != nil {
			return err
		}
		// A read that ends by itself, so that the goroutine does.
		if err := unix.SetsockoptTimeval(socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 50000}); err != nil {
			return err
		}
		stop, stopped := make(chan struct{}), make(chan struct{})
		t.Cleanup(func() { close(stop); <-stopped })
		go w.read(socket, stop, stopped)
		return nil
	})
	return w
}

func (w *watcher) read(socket int, stop, stopped chan struct{}) {
	defer close(stopped)
	defer unix.Close(socket)
	buffer := make([]byte, 65536)
	for {
		select {
		case <-stop:
			return
		default:
		}
		n, from, err := unix.Recvfrom(socket, buffer, 0)
		if err != nil {
			continue
		}
		if ll, ok := from.(*unix.SockaddrLinklayer); ok && ll.Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		w.mu.Lock()
		w.frames = append(w.frames, append([]byte{}, buffer[:n]...))
		w.mu.Unlock()
		select {
		case w.more <- struct{}{}:
		default:
		}
	}
}

// has says whether a frame with the marker was received.
func (w *watcher) has(marker string) bool {
	return w.any(func(f []byte) bool { return bytes.Contains(f, []byte(marker)) })
}

// received says whether that very frame was.
func (w *watcher) received(frame []byte) bool {
	return w.any(func(f []byte) bool { return bytes.Equal(f, frame) })
}

func (w *watcher) any(is func([]byte) bool) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.ContainsFunc(w.frames, is)
}

// await waits for a frame with the marker.
func (w *watcher) await(t *testing.T, marker string) {
	t.Helper()
	limit := time.After(5 * time.Second)
	for !w.has(marker) {
		select {
		case <-w.more:
		case <-limit:
			t.Fatalf("no frame with %q has come", marker)
		}
	}
}

// eventually waits for what must become true.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(5 * time.Second); !holds(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("%s: not within five seconds", what)
		}
	}
}
