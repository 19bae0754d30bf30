package linux

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	vishnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"imp.dev/imp/internal/netns"
)

// space is an open network namespace: sockets in it are kept open, so that nothing has to be looked for at each change.
type space struct {
	ns *os.File
	// nl carries what netlink.Handle can say; raw is for port flags, which it cannot. Each has a lock of its own.
	nl  *netlink.Handle
	raw map[int]*nl.SocketHandle
	// packet sends announcements: a raw socket that receives nothing.
	packet int
}

// netlinkPatience is how long the kernel may take for one answer.
const netlinkPatience = 15 * time.Second

// openSpace opens sockets in the namespace, and takes ns over.
func openSpace(ns *os.File) (*space, error) {
	s := &space{ns: ns, packet: -1}
	err := s.inside(func() error {
		var err error
		if s.nl, err = netlink.NewHandle(unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER); err != nil {
			return fmt.Errorf("opening netlink: %w", err)
		}
		if err := s.nl.SetSocketTimeout(netlinkPatience); err != nil {
			return fmt.Errorf("opening netlink: %w", err)
		}
		raw, err := nl.GetNetlinkSocketAt(vishnetns.None(), vishnetns.None(), unix.NETLINK_ROUTE)
		if err != nil {
			return fmt.Errorf("opening netlink: %w", err)
		}
		patience := unix.NsecToTimeval(netlinkPatience.Nanoseconds())
		_, _ = raw.SetSendTimeout(&patience), raw.SetReceiveTimeout(&patience) // both only keep the value
		s.raw = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: raw}}
		if s.packet, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
			return fmt.Errorf("opening packet socket: %w", err)
		}
		return nil
	})
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func (s *space) close() {
	if s.nl != nil {
		s.nl.Close()
	}
	for _, raw := range s.raw {
		raw.Close()
	}
	if s.packet >= 0 {
		_ = unix.Close(s.packet)
	}
	s.ns.Close()
}

func (s *space) fd() int { return int(s.ns.Fd()) }

// inside runs f on a thread that is in the namespace.
func (s *space) inside(f func() error) error {
	return netns.Inside(s.fd(), f)
}

// sysctl is a value below /proc/sys/net of a namespace. An optional one may be missing: a kernel without IPv6, or without
// br_netfilter.
type sysctl struct {
	name, want string
	optional   bool
}

// sysctls makes values what they are to be, and gives the names of those that were not.
func (s *space) sysctls(values []sysctl) ([]string, error) {
	var changed []string
	err := s.inside(func() error {
		for _, v := range values {
			path := filepath.Join("/proc/sys/net", v.name)
			is, err := os.ReadFile(path)
			if v.optional && errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err == nil && strings.TrimSpace(string(is)) == v.want {
				continue
			}
			if err == nil {
				err = os.WriteFile(path, []byte(v.want), 0o644)
			}
			if err != nil {
				return fmt.Errorf("setting net/%s to %s: %w", v.name, v.want, err)
			}
			changed = append(changed, v.name)
		}
		return nil
	})
	return changed, err
}

// wrap adds what was being done to an error, if there is one.
func wrap(doing string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", doing, err)
}
