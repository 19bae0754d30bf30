package firewall_test

import (
	"errors"
	"net"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"imp.dev/imp/internal/netns"
)

// namespace is a network namespace that a test has made; it ends with the test, and every device in it.
type namespace int

// missing ends a test that cannot be run here.
func missing(t testing.TB, what string) {
	t.Helper()
	if os.Getenv("IMP_REQUIRE_ALL") == "1" {
		t.Fatalf("needs %s, and IMP_REQUIRE_ALL=1 allows no skip", what)
	}
	t.Skip("needs " + what)
}

// newNamespace makes one with its loopback up.
func newNamespace(t testing.TB) namespace {
	t.Helper()
	if os.Geteuid() != 0 {
		missing(t, "root")
	}
	f, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	ns := namespace(f.Fd())
	ns.do(t, func() error { return up("lo") })
	return ns
}

// do runs f on a thread that is in the namespace; sockets that f opens stay there.
func (ns namespace) do(t testing.TB, f func() error) {
	t.Helper()
	if err := ns.try(f); err != nil {
		t.Fatal(err)
	}
}

func (ns namespace) try(f func() error) error { return netns.Inside(int(ns), f) }

func up(device string) error {
	link, err := netlink.LinkByName(device)
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(link)
}

// address gives the device an address and puts it up.
func (ns namespace) address(t testing.TB, device, cidr string) {
	t.Helper()
	ns.do(t, func() error {
		link, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		a, err := netlink.ParseAddr(cidr)
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(link, a); err != nil {
			return err
		}
		return netlink.LinkSetUp(link)
	})
}

// route sends what is for the destination to via; "default" is the rest.
func (ns namespace) route(t testing.TB, destination, via string) {
	t.Helper()
	ns.do(t, func() error {
		r := netlink.Route{Gw: net.ParseIP(via)}
		if destination != "default" {
			_, to, err := net.ParseCIDR(destination)
			if err != nil {
				return err
			}
			r.Dst = to
		}
		return netlink.RouteAdd(&r)
	})
}

// sysctl sets /proc/sys/net/NAME of the namespace.
func (ns namespace) sysctl(t testing.TB, name, value string) {
	t.Helper()
	ns.do(t, func() error { return os.WriteFile("/proc/sys/net/"+name, []byte(value), 0o600) })
}

// narrow sets a device's MTU.
func (ns namespace) narrow(t testing.TB, device string, mtu int) {
	t.Helper()
	ns.do(t, func() error {
		link, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		return netlink.LinkSetMTU(link, mtu)
	})
}

// wire makes a veth between both namespaces, up on both sides. A zero MAC is the kernel's choice.
func wire(t testing.TB, one namespace, oneName string, oneMAC net.HardwareAddr, other namespace, otherName string, otherMAC net.HardwareAddr) {
	t.Helper()
	one.do(t, func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.HardwareAddr = oneName, oneMAC
		veth := &netlink.Veth{LinkAttrs: attrs, PeerName: otherName, PeerHardwareAddr: otherMAC, PeerNamespace: netlink.NsFd(int(other))}
		if err := netlink.LinkAdd(veth); err != nil {
			return err
		}
		return up(oneName)
	})
	other.do(t, func() error { return up(otherName) })
}

// unreachable is how long a test waits for what must not come.
const unreachable = 300 * time.Millisecond

// listen answers every TCP connection on the address by the client's address, until the test ends.
func (ns namespace) listen(t testing.TB, address string) {
	t.Helper()
	ns.do(t, func() error {
		l, err := net.Listen("tcp4", address)
		if err != nil {
			return err
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
				_, _ = c.Write([]byte(host))
				c.Close()
			}
		}()
		return nil
	})
}

// connect gives whom the listener sees.
func (ns namespace) connect(address string) (seen string, err error) {
	return ns.connectFrom("0.0.0.0", address)
}

// connectFrom does so under an address of the namespace.
func (ns namespace) connectFrom(from, address string) (seen string, err error) {
	err = ns.try(func() error {
		d := net.Dialer{Timeout: unreachable, LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
		c, err := d.Dial("tcp4", address)
		if err != nil {
			return err
		}
		defer c.Close()
		if err := c.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
			return err
		}
		buffer := make([]byte, 64)
		n, err := c.Read(buffer)
		seen = string(buffer[:n])
		return err
	})
	return seen, err
}

func (ns namespace) mustConnect(t *testing.T, address, wantSeen string) {
	t.Helper()
	seen, err := ns.connect(address)
	if err != nil {
		t.Errorf("%s cannot be reached: %v", address, err)
	} else if wantSeen != "" && seen != wantSeen {
		t.Errorf("%s sees %s, want %s", address, seen, wantSeen)
	}
}

func (ns namespace) mustNotConnect(t *testing.T, address string) {
	t.Helper()
	if seen, err := ns.connect(address); err == nil {
		t.Errorf("%s was reached and sees %s", address, seen)
	} else if timeout := net.Error(nil); !errors.As(err, &timeout) {
		t.Errorf("connecting to %s: %v", address, err)
	}
}
