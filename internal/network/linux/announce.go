package linux

import (
	"encoding/binary"
	"errors"

	"golang.org/x/sys/unix"
)

// announce tells the guests here that an address has another MAC now. Their own caches would keep the old one: for seconds, or for
// as long as they have nothing to send. Whoever was here before knows nothing that could be wrong of an address that nobody had.
//
// It is a gratuitous ARP to each guest by its own MAC, not one broadcast: a bridge gives no broadcast, its own neither, to a
// port with proxyarp (br_flood).
func (s *segment) announce(p place) {
	last, told := s.heard[p.address]
	s.heard[p.address] = p.mac
	if told && last == p.mac || !told && s.fresh {
		return
	}
	frame := gratuitousARP(p, s.plan.mac)
	for _, g := range s.guests {
		if g.at.address == p.address {
			continue
		}
		copy(frame, g.at.mac[:])
		to := &unix.SockaddrLinklayer{Ifindex: s.indices.bridge, Halen: 6, Protocol: binary.NativeEndian.Uint16([]byte{0x08, 0x06})}
		copy(to.Addr[:], g.at.mac[:])
		if err := unix.Sendto(s.space.packet, frame, 0, to); err != nil && !errors.Is(err, unix.ENOBUFS) {
			s.n.o.Log.Warn("guest was not told of a neighbour's new MAC", "network", s.id, "vm", g.key.vm, "address", p.address.String(), "error", err)
		}
	}
}

// gratuitousARP is an Ethernet frame with the request of an address for itself (RFC 5227, section 3), to nobody yet.
func gratuitousARP(p place, from []byte) []byte {
	a := p.address.As4()
	frame := make([]byte, 0, 42)
	frame = append(frame, make([]byte, 6)...)
	frame = append(frame, from...)
	frame = append(frame, 0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, 1)
	frame = append(frame, p.mac[:]...)
	frame = append(frame, a[:]...)
	frame = append(frame, make([]byte, 6)...)
	return append(frame, a[:]...)
}
