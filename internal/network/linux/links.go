package linux

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// portFlags are a bridge port's settings, attribute by attribute (IFLA_BRPORT_*).
type portFlags map[int]byte

// guestPort hears only what is for its guest: the bridge answers ARP for everybody.
func guestPort() portFlags {
	return portFlags{nl.IFLA_BRPORT_LEARNING: 0, nl.IFLA_BRPORT_UNICAST_FLOOD: 0, nl.IFLA_BRPORT_MCAST_FLOOD: 0, nl.IFLA_BRPORT_BCAST_FLOOD: 0, nl.IFLA_BRPORT_PROXYARP: 1}
}

// overlayPort takes only frames to guests that are known to be elsewhere.
func overlayPort() portFlags {
	return portFlags{nl.IFLA_BRPORT_LEARNING: 0, nl.IFLA_BRPORT_UNICAST_FLOOD: 0, nl.IFLA_BRPORT_MCAST_FLOOD: 0, nl.IFLA_BRPORT_BCAST_FLOOD: 0, nl.IFLA_BRPORT_NEIGH_SUPPRESS: 1}
}

// setPort sets flags of the port of that index in one message.
func (s *space) setPort(index int, flags portFlags) error {
	req := nl.NewNetlinkRequest(unix.RTM_SETLINK, unix.NLM_F_ACK)
	req.Sockets = s.raw
	msg := nl.NewIfInfomsg(unix.AF_BRIDGE)
	msg.Index = int32(index)
	req.AddData(msg)
	info := nl.NewRtAttr(unix.IFLA_PROTINFO|unix.NLA_F_NESTED, nil)
	for attribute, value := range flags {
		info.AddRtAttr(attribute, []byte{value})
	}
	req.AddData(info)
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// enslave gives a device its MTU and alias and makes it a port of the bridge, in one message.
func (s *space) enslave(index, bridge, mtu int, alias string) error {
	req := nl.NewNetlinkRequest(unix.RTM_SETLINK, unix.NLM_F_ACK)
	req.Sockets = s.raw
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index = int32(index)
	req.AddData(msg)
	req.AddData(nl.NewRtAttr(unix.IFLA_MTU, nl.Uint32Attr(uint32(mtu))))
	req.AddData(nl.NewRtAttr(unix.IFLA_IFALIAS, []byte(alias)))
	req.AddData(nl.NewRtAttr(unix.IFLA_MASTER, nl.Uint32Attr(uint32(bridge))))
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// ports reads the flags of every port in the namespace, by the device's index.
func (s *space) ports() (map[int]portFlags, error) {
	messages, err := list(func() ([][]byte, error) {
		req := nl.NewNetlinkRequest(unix.RTM_GETLINK, unix.NLM_F_DUMP)
		req.Sockets = s.raw
		req.AddData(nl.NewIfInfomsg(unix.AF_BRIDGE))
		return req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWLINK)
	})
	if err != nil {
		return nil, fmt.Errorf("listing bridge ports: %w", err)
	}
	out := map[int]portFlags{}
	for _, m := range messages {
		link := nl.DeserializeIfInfomsg(m)
		attributes, err := nl.ParseRouteAttr(m[link.Len():])
		if err != nil {
			return nil, fmt.Errorf("listing bridge ports: %w", err)
		}
		for _, a := range attributes {
			if a.Attr.Type&^unix.NLA_F_NESTED != unix.IFLA_PROTINFO {
				continue
			}
			values, err := nl.ParseRouteAttr(a.Value)
			if err != nil {
				return nil, fmt.Errorf("listing bridge ports: %w", err)
			}
			flags := portFlags{}
			for _, v := range values {
				if len(v.Value) == 1 {
					flags[int(v.Attr.Type)] = v.Value[0]
				}
			}
			out[int(link.Index)] = flags
		}
	}
	return out, nil
}

// has says whether every flag of want is so.
func (f portFlags) has(want portFlags) bool {
	for attribute, value := range want {
		if is, told := f[attribute]; !told || is != value {
			return false
		}
	}
	return true
}

// links are the devices of a namespace by name.
type links map[string]netlink.Link

func (s *space) links() (links, error) {
	all, err := list(s.nl.LinkList)
	if err != nil {
		return nil, fmt.Errorf("listing devices: %w", err)
	}
	out := links{}
	for _, l := range all {
		out[l.Attrs().Name] = l
	}
	return out, nil
}

// link gives the device of that name, nil if there is none.
func (s *space) link(name string) (netlink.Link, error) {
	l, err := s.nl.LinkByName(name)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("looking for %s: %w", name, err)
	}
	return l, nil
}

// unlink removes the device of that name; none is success.
func (s *space) unlink(name string) error {
	l, err := s.link(name)
	if err != nil || l == nil {
		return err
	}
	if err := s.nl.LinkDel(l); err != nil && !gone(err) {
		return fmt.Errorf("removing %s: %w", name, err)
	}
	return nil
}

// gone says that an error means that the thing to be removed is not there.
func gone(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EADDRNOTAVAIL)
}

// attrs starts the description of a new device; the library's own zero would mean a queue of no packets.
func attrs(name string, mtu int) netlink.LinkAttrs {
	a := netlink.NewLinkAttrs()
	a.Name, a.MTU, a.HardwareAddr = name, mtu, hardwareAddress(name)
	return a
}

// settle makes a device's MTU, alias and MAC what they are to be, and sets it up. It says whether something was not so.
func (s *space) settle(l netlink.Link, want netlink.LinkAttrs) (bool, error) {
	is, changed := l.Attrs(), false
	if !bytes.Equal(is.HardwareAddr, want.HardwareAddr) {
		if err := s.nl.LinkSetHardwareAddr(l, want.HardwareAddr); err != nil {
			return false, fmt.Errorf("setting MAC of %s: %w", is.Name, err)
		}
		changed = true
	}
	if is.MTU != want.MTU {
		if err := s.nl.LinkSetMTU(l, want.MTU); err != nil {
			return false, fmt.Errorf("setting MTU of %s to %d: %w", is.Name, want.MTU, err)
		}
		changed = true
	}
	if is.Alias != want.Alias {
		if err := s.nl.LinkSetAlias(l, want.Alias); err != nil {
			return false, fmt.Errorf("setting alias of %s: %w", is.Name, err)
		}
		changed = true
	}
	if is.RawFlags&unix.IFF_UP == 0 {
		if err := s.nl.LinkSetUp(l); err != nil {
			return false, fmt.Errorf("setting %s up: %w", is.Name, err)
		}
		changed = true
	}
	return changed, nil
}

// address makes a device have this IPv4 address and no other. It says whether that was not so.
func (s *space) address(l netlink.Link, want netip.Prefix) (bool, error) {
	have, err := list(func() ([]netlink.Addr, error) { return s.nl.AddrList(l, netlink.FAMILY_V4) })
	if err != nil {
		return false, fmt.Errorf("listing addresses of %s: %w", l.Attrs().Name, err)
	}
	is := func(a netlink.Addr) bool {
		ip, _ := netip.AddrFromSlice(a.IP.To4())
		ones, _ := a.Mask.Size()
		return netip.PrefixFrom(ip, ones) == want
	}
	changed := false
	if !slices.ContainsFunc(have, is) {
		if err := s.nl.AddrAdd(l, &netlink.Addr{IPNet: ipNet(want)}); err != nil {
			return false, fmt.Errorf("giving %s to %s: %w", want, l.Attrs().Name, err)
		}
		changed = true
	}
	for _, a := range have {
		if is(a) {
			continue
		}
		if err := s.nl.AddrDel(l, &a); err != nil && !gone(err) {
			return false, fmt.Errorf("taking %s from %s: %w", a.IPNet, l.Attrs().Name, err)
		}
		changed = true
	}
	return changed, nil
}
