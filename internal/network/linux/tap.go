package linux

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"imp.dev/imp/internal/network/linux/firewall"
)

// rule is a guest as the firewall wants it.
func (g *guest) rule() firewall.Guest {
	return firewall.Guest{Port: g.tap, MAC: g.at.mac.hardware(), Address: g.at.address, Dropped: g.tally.Dropped}
}

// A descriptor that a dying VMM, or a child between fork and exec, still holds keeps a TAP busy for a moment.
const (
	busyPatience = 2 * time.Second
	busyPace     = 20 * time.Millisecond
)

// openTAP makes a TAP in the namespace and opens it. It is not persistent: it goes with its last descriptor. One queue, no packet
// information, a virtio header before each frame: what QEMU takes by fd= and Firecracker by name.
func (s *segment) openTAP(name string) (*os.File, error) {
	clock := s.n.o.Clock
	for end := clock.Now().Add(busyPatience); ; {
		f, err := s.tryTAP(name)
		if !errors.Is(err, unix.EBUSY) {
			return f, wrap("making TAP "+name, err)
		}
		if !clock.Now().Before(end) {
			return nil, fmt.Errorf("making TAP %s: another process has it open still: %w", name, err)
		}
		<-clock.After(busyPace)
	}
}

func (s *segment) tryTAP(name string) (*os.File, error) {
	request, err := unix.NewIfreq(name)
	if err != nil {
		return nil, err
	}
	request.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	fd := -1
	// The device is made in the namespace of the thread that opens the file.
	err = s.space.inside(func() error {
		if fd, err = unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0); err != nil {
			return fmt.Errorf("opening /dev/net/tun: %w", err)
		}
		return unix.IoctlIfreq(fd, unix.TUNSETIFF, request)
	})
	if err != nil {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

// plug makes a guest's TAP and lets it in: everything about it is settled before it can send or hear a frame. A failure leaves
// no TAP; rules and neighbour are the caller's to take back.
func (s *segment) plug(g *guest) (_ *os.File, err error) {
	if err := s.n.step("tap"); err != nil {
		return nil, fmt.Errorf("TAP %s: %w", g.tap, err)
	}
	f, err := s.openTAP(g.tap)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	link, err := s.space.nl.LinkByName(g.tap)
	if err != nil {
		return nil, fmt.Errorf("looking at TAP %s: %w", g.tap, err)
	}
	index := link.Attrs().Index
	for _, do := range []struct {
		step string
		do   func() error
	}{
		{"tap port", func() error { return s.space.enslave(index, s.indices.bridge, s.plan.mtu, g.alias) }},
		{"tap flags", func() error { return s.space.setPort(index, guestPort()) }},
		{"tap rules", func() error { return firewall.AddGuest(s.space.fd(), g.rule()) }},
		{"tap up", func() error { return s.space.nl.LinkSetUp(link) }},
		{"tap entries", func() error { return s.tell(g.at, index) }},
		{"tap replaces peer", func() error { return s.supersede(g) }},
	} {
		if err := s.n.step(do.step); err != nil {
			return nil, fmt.Errorf("TAP %s: %w", g.tap, err)
		}
		if err := do.do(); err != nil {
			return nil, fmt.Errorf("TAP %s: %s: %w", g.tap, do.step, err)
		}
	}
	s.announce(g.at)
	return f, nil
}

// supersede takes from the overlay who has come here.
func (s *segment) supersede(g *guest) error {
	for address, p := range s.remotes {
		if address != g.at.address && p.mac != g.at.mac {
			continue
		}
		if err := s.forgetMAC(p.mac, p.vtep); err != nil {
			return err
		}
		if address != g.at.address {
			if err := s.forgetAddress(address); err != nil {
				return err
			}
		}
		delete(s.remotes, address)
	}
	return nil
}

// guests holds the TAPs that are there against the guests there should be. A TAP that is missing is its VMM's to open again.
func (c *convergence) guests() error {
	s := c.s
	ports, err := s.space.ports()
	if err != nil {
		return err
	}
	mine := map[string]*guest{}
	for _, g := range s.guests {
		mine[g.tap] = g
	}
	names := s.n.names
	own := map[string]bool{names.bridge(s.id): true, names.uplink(s.id): true, names.overlay(s.id): true}
	for _, name := range slices.Sorted(maps.Keys(c.links)) {
		g, l := mine[name], c.links[name]
		switch {
		case g != nil:
			if err := c.tap(g, l, ports); err != nil {
				return err
			}
		case !own[name] && s.ours(name, l):
			if err := s.n.step("tap removed"); err != nil {
				return err
			}
			if err := s.space.unlink(name); err != nil {
				return err
			}
			delete(c.links, name)
			c.did("%s was removed, no guest here has it", name)
		}
	}
	return nil
}

func (c *convergence) tap(g *guest, l netlink.Link, ports map[int]portFlags) error {
	if err := c.s.n.step("tap settled"); err != nil {
		return err
	}
	changed, err := c.s.port(l, g.alias, guestPort(), ports)
	if err != nil {
		return err
	}
	want := netlink.LinkAttrs{MTU: c.s.plan.mtu, Alias: g.alias, HardwareAddr: l.Attrs().HardwareAddr}
	settled, err := c.s.space.settle(l, want)
	if err != nil {
		return err
	}
	if changed || settled {
		c.did("settings of TAP %s of VM %s were mended", g.tap, g.key.vm)
	}
	return nil
}
