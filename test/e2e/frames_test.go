package e2e

import (
	"crypto/rand"
	"encoding/binary"
	"net"
	"net/netip"
)

// Frames and packets as they are on the wire, of which forgeries are made.

const (
	typeIPv4 = 0x0800
	typeARP  = 0x0806
	typeIPv6 = 0x86dd
	typeVLAN = 0x8100
	// minFrame is what an Ethernet frame has at least, without its checksum.
	minFrame = 60
)

func broadcast() net.HardwareAddr { return net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff} }

func ethernet(to, from net.HardwareAddr, kind uint16, payload []byte) []byte {
	frame := append(append([]byte{}, to...), from...)
	frame = append(binary.BigEndian.AppendUint16(frame, kind), payload...)
	for len(frame) < minFrame {
		frame = append(frame, 0)
	}
	return frame
}

// vlan puts a tag into a frame.
func vlan(frame []byte, id uint16) []byte {
	tagged := append([]byte{}, frame[:12]...)
	tagged = binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(tagged, typeVLAN), id)
	return append(tagged, frame[12:]...)
}

// udp4 is a UDP datagram in an IPv4 packet. It has no checksum of its own, which IPv4 allows.
func udp4(from, to netip.AddrPort, payload []byte) []byte {
	datagram := binary.BigEndian.AppendUint16(nil, from.Port())
	datagram = binary.BigEndian.AppendUint16(datagram, to.Port())
	datagram = binary.BigEndian.AppendUint16(datagram, uint16(8+len(payload)))
	datagram = append(append(datagram, 0, 0), payload...)
	header := []byte{0x45, 0, 0, 0, 0, 1, 0x40, 0, 64, 17, 0, 0}
	binary.BigEndian.PutUint16(header[2:], uint16(20+len(datagram)))
	header = append(append(header, from.Addr().AsSlice()...), to.Addr().AsSlice()...)
	binary.BigEndian.PutUint16(header[10:], internetChecksum(header))
	return append(header, datagram...)
}

func internetChecksum(words []byte) uint16 {
	sum := uint32(0)
	for i := 0; i < len(words); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(words[i:]))
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

// arpReply says that an address is at a MAC.
func arpReply(mac net.HardwareAddr, address netip.Addr, toMAC net.HardwareAddr, to netip.Addr) []byte {
	packet := append([]byte{0, 1, 8, 0, 6, 4, 0, 2}, mac...)
	packet = append(append(packet, address.AsSlice()...), toMAC...)
	return append(packet, to.AsSlice()...)
}

// routerAdvertisement is an IPv6 packet that makes a host take its sender for a router, if it is believed.
func routerAdvertisement(from net.HardwareAddr) []byte {
	source := netip.MustParseAddr("fe80::bad")
	all := netip.MustParseAddr("ff02::1")
	body := []byte{134, 0, 0, 0, 64, 0, 0x07, 0x08, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1} // 1800 s; then its MAC as an option
	body = append(body, from...)
	pseudo := append(append(append([]byte{}, source.AsSlice()...), all.AsSlice()...), 0, 0, 0, byte(len(body)), 0, 0, 0, 58)
	binary.BigEndian.PutUint16(body[2:], internetChecksum(append(pseudo, body...)))
	header := append([]byte{0x60, 0, 0, 0, 0, byte(len(body)), 58, 255}, source.AsSlice()...)
	return append(append(header, all.AsSlice()...), body...)
}

// bridgeProtocol is a frame of the spanning tree protocol that claims to be the root of the tree.
func bridgeProtocol(from net.HardwareAddr) []byte {
	frame := append([]byte{0x01, 0x80, 0xc2, 0, 0, 0}, from...)
	frame = append(frame, 0, 38, 0x42, 0x42, 0x03, 0, 0, 0, 0, 0, 0, 0) // length, LLC, STP configuration; root priority 0
	frame = append(append(frame, from...), 0, 0, 0, 0, 0, 0)
	frame = append(append(frame, from...), 0x80, 1, 0, 0, 20, 0, 2, 0, 15, 0)
	for len(frame) < minFrame {
		frame = append(frame, 0)
	}
	return frame
}

// vxlan is the payload of a datagram of the overlay (RFC 7348).
func vxlan(vni uint32, frame []byte) []byte {
	header := binary.BigEndian.AppendUint32([]byte{0x08, 0, 0, 0}, vni<<8)
	return append(header, frame...)
}

// mark is a pattern that no other frame has in it.
func mark() []byte {
	pattern := make([]byte, 16)
	_, _ = rand.Read(pattern) // never fails
	return pattern
}
