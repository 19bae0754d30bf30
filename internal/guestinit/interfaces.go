package guestinit

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	guestv1 "imp.dev/imp/api/guest/v1"
)

// ipv6Settings is the kernel's folder of settings by interface. It is held open: while the network is configured the root of the file
// system moves, and /proc with it.
const ipv6Settings = "/proc/sys/net/ipv6/conf"

// openIPv6Settings gives nil where the kernel has no IPv6.
func openIPv6Settings(log *logger) *os.Root {
	root, err := os.OpenRoot(ipv6Settings)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		log.Printf("%v", err)
	}
	return root
}

// configureNetwork brings up the loopback interface and every interface given, found by its MAC. It closes settings.
func configureNetwork(interfaces []guestv1.Interface, settings *os.Root) error {
	if settings != nil {
		defer func() { _ = settings.Close() }()
	}
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	if err != nil {
		return fmt.Errorf("loopback interface: %w", err)
	}
	if len(interfaces) == 0 {
		return nil
	}
	links, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("listing interfaces: %w", err)
	}
	for _, i := range interfaces {
		if err := configureInterface(links, i, settings); err != nil {
			return fmt.Errorf("interface %s: %w", i.MAC, err)
		}
	}
	return nil
}

func configureInterface(links []netlink.Link, i guestv1.Interface, settings *os.Root) error {
	link := netlink.Link(nil)
	for _, l := range links {
		if strings.EqualFold(l.Attrs().HardwareAddr.String(), i.MAC) {
			link = l
		}
	}
	if link == nil {
		return errors.New("not there")
	}
	if err := withoutDeadIPv6(link.Attrs().Name, i.Addresses, settings); err != nil {
		return err
	}
	if i.MTU > 0 {
		if err := netlink.LinkSetMTU(link, i.MTU); err != nil {
			return fmt.Errorf("setting MTU %d: %w", i.MTU, err)
		}
	}
	if err := setAddresses(link, i.Addresses); err != nil {
		return err
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("bringing it up: %w", err)
	}
	if i.Gateway == "" {
		return nil
	}
	// Onlink: a gateway need not be in the interface's subnet.
	route := &netlink.Route{LinkIndex: link.Attrs().Index, Gw: net.ParseIP(i.Gateway), Flags: int(netlink.FLAG_ONLINK)}
	if err := netlink.RouteReplace(route); err != nil {
		return fmt.Errorf("setting default route by %s: %w", i.Gateway, err)
	}
	return nil
}

// withoutDeadIPv6 keeps an interface that was given no IPv6 address from making one up: a path that leads nowhere costs every lookup of
// a name the time until it is given up.
func withoutDeadIPv6(name string, addresses []string, settings *os.Root) error {
	if settings == nil || slices.ContainsFunc(addresses, isIPv6) {
		return nil
	}
	f, err := settings.OpenFile(name+"/disable_ipv6", os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("switching IPv6 off: %w", err)
	}
	defer f.Close()
	if _, err := f.WriteString("1"); err != nil {
		return fmt.Errorf("switching IPv6 off: %w", err)
	}
	return nil
}

func isIPv6(prefix string) bool {
	p, err := netip.ParsePrefix(prefix)
	return err == nil && !p.Addr().Is4()
}

// setAddresses makes the interface's addresses the wanted ones: those of an earlier Configure go.
func setAddresses(link netlink.Link, wanted []string) error {
	keep := map[string]bool{}
	for _, w := range wanted {
		a, err := netlink.ParseAddr(w)
		if err != nil {
			return err
		}
		keep[a.IPNet.String()] = true
		a.Flags = unix.IFA_F_NODAD // the host gave this address to nobody else
		if err := netlink.AddrReplace(link, a); err != nil {
			return fmt.Errorf("adding address %s: %w", w, err)
		}
	}
	have, err := netlink.AddrList(link, netlink.FAMILY_ALL)
	if err != nil {
		return fmt.Errorf("listing addresses: %w", err)
	}
	for _, a := range have {
		if keep[a.IPNet.String()] || a.IP.IsLinkLocalUnicast() {
			continue
		}
		if err := netlink.AddrDel(link, &a); err != nil {
			return fmt.Errorf("removing address %s: %w", a.IPNet, err)
		}
	}
	return nil
}
