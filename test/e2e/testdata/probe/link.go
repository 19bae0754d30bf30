package main

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// device is a guest's first interface.
const device = "eth0"

const everyProtocol = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8 // in network order

// rawSocket sends and receives whole frames of the interface.
func rawSocket() (fd int, to *unix.SockaddrLinklayer, err error) {
	link, err := net.InterfaceByName(device)
	if err != nil {
		return 0, nil, err
	}
	if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, everyProtocol); err != nil {
		return 0, nil, err
	}
	to = &unix.SockaddrLinklayer{Protocol: everyProtocol, Ifindex: link.Index}
	return fd, to, unix.Bind(fd, to)
}

// frames COUNT HEX… sends each frame COUNT times, whatever is in it.
func frames(args []string) (string, error) {
	count, err := strconv.Atoi(args[0])
	if err != nil {
		return "", err
	}
	fd, to, err := rawSocket()
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	for range count {
		for _, text := range args[1:] {
			frame, err := hex.DecodeString(text)
			if err != nil {
				return "", err
			}
			if err := unix.Sendto(fd, frame, 0, to); err != nil {
				return "", err
			}
		}
	}
	return strconv.Itoa(count * (len(args) - 1)), nil
}

// watch MS HEX counts the frames that arrive within that time and have these bytes in them, and shows the first.
func watch(args []string) (string, error) {
	for_, err := strconv.Atoi(args[0])
	if err != nil {
		return "", err
	}
	wanted, err := hex.DecodeString(args[1])
	if err != nil {
		return "", err
	}
	fd, to, err := rawSocket()
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	// A frame to somebody else is as bad to have seen.
	all := &unix.PacketMreq{Ifindex: int32(to.Ifindex), Type: unix.PACKET_MR_PROMISC}
	if err := unix.SetsockoptPacketMreq(fd, unix.SOL_PACKET, unix.PACKET_ADD_MEMBERSHIP, all); err != nil {
		return "", err
	}
	end := time.Now().Add(time.Duration(for_) * time.Millisecond)
	seen, first := 0, ""
	buf := make([]byte, 65536)
	for left := time.Until(end); left > 0; left = time.Until(end) {
		wait := unix.NsecToTimeval(int64(max(left, time.Millisecond)))
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait); err != nil {
			return "", err
		}
		n, from, err := unix.Recvfrom(fd, buf, 0)
		if err != nil {
			continue // the time is up, or a signal
		}
		if source, ok := from.(*unix.SockaddrLinklayer); ok && source.Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		if bytes.Contains(buf[:n], wanted) {
			if seen++; first == "" {
				first = hex.EncodeToString(buf[:min(n, 128)])
			}
		}
	}
	return fmt.Sprintf("seen=%d %s", seen, first), nil
}

// Sight is what look finds.
type Sight struct {
	Hostname, MAC                 string
	MTU                           int
	Addresses, Routes, Neighbours []string
	Links                         []string
	Resolv                        string
}

// look tells how the guest is set up.
func look([]string) (string, error) {
	s := Sight{}
	s.Hostname, _ = os.Hostname()
	resolv, err := os.ReadFile("/etc/resolv.conf")
	if err != nil {
		resolv = []byte("none: " + err.Error())
	}
	s.Resolv = string(resolv)
	links, err := netlink.LinkList()
	if err != nil {
		return "", err
	}
	for _, link := range links {
		s.Links = append(s.Links, link.Attrs().Name)
		addresses, err := netlink.AddrList(link, netlink.FAMILY_ALL)
		if err != nil {
			return "", err
		}
		for _, address := range addresses {
			s.Addresses = append(s.Addresses, link.Attrs().Name+" "+address.IPNet.String())
		}
		if link.Attrs().Name == device {
			s.MAC, s.MTU = link.Attrs().HardwareAddr.String(), link.Attrs().MTU
		}
	}
	routes, err := netlink.RouteList(nil, netlink.FAMILY_V4)
	if err != nil {
		return "", err
	}
	for _, route := range routes {
		to := "default"
		if route.Dst != nil && route.Dst.String() != "0.0.0.0/0" {
			to = route.Dst.String()
		}
		if route.Gw != nil {
			to += " via " + route.Gw.String()
		}
		s.Routes = append(s.Routes, to)
	}
	neighbours, err := netlink.NeighList(0, netlink.FAMILY_V4)
	if err != nil {
		return "", err
	}
	for _, n := range neighbours {
		s.Neighbours = append(s.Neighbours, n.IP.String()+" "+n.HardwareAddr.String())
	}
	out, err := json.Marshal(s)
	return string(out), err
}
