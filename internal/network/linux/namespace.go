package linux

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
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
		raw, err := nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_ROUTE)
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
	return onThread(func() error {
		if err := unix.Setns(s.fd(), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("entering network namespace: %w", err)
		}
		return f()
	})
}

// onThread runs f on a thread of its own and puts the thread back into the namespace that it came from. One that cannot be put
// back ends with its goroutine: it stays locked.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("remembering network namespace: %w", err)
			return
		}
		defer home.Close()
		err = f()
		if unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// nsfsMagic is what statfs(2) says of a namespace's file (NSFS_MAGIC in linux/magic.h); a file that waits for its mount is not one.
const nsfsMagic = 0x6e736673

// findNamespace opens the namespace of that name; nil: there is none.
func findNamespace(path string) (*os.File, error) {
	ns, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("opening network namespace: %w", err)
	}
	stat := unix.Statfs_t{}
	if err := unix.Fstatfs(int(ns.Fd()), &stat); err != nil {
		ns.Close()
		return nil, fmt.Errorf("looking at %s: %w", path, err)
	}
	if stat.Type != nsfsMagic {
		ns.Close()
		return nil, nil
	}
	return ns, nil
}

// makeNamespace makes a namespace and gives it the name.
func makeNamespace(path string) (*os.File, error) {
	if err := shareDir(filepath.Dir(path)); err != nil {
		return nil, err
	}
	var ns *os.File
	err := onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("making network namespace: %w", err)
		}
		var err error
		ns, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := nameNamespace(ns, path); err != nil {
		ns.Close()
		return nil, err
	}
	return ns, nil
}

// nameNamespace mounts an open namespace under its name.
func nameNamespace(ns *os.File, path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY, 0o444)
	if err != nil {
		return fmt.Errorf("making name of network namespace: %w", err)
	}
	f.Close()
	if err := unix.Mount(fmt.Sprintf("/proc/self/fd/%d", ns.Fd()), path, "", unix.MS_BIND, ""); err != nil {
		os.Remove(path)
		return fmt.Errorf("mounting network namespace as %s: %w", path, err)
	}
	return nil
}

// shareDir makes the directory of names a shared mount of its own, as ip-netns(8) does: otherwise a program that starts with a copy
// of the mounts holds every namespace beyond its removal, and a later ip-netns would lay its own mount over our names.
func shareDir(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("making directory of network namespaces: %w", err)
	}
	err := unix.Mount("", dir, "none", unix.MS_SHARED|unix.MS_REC, "")
	if !errors.Is(err, unix.EINVAL) {
		return wrap("sharing directory of network namespaces", err)
	}
	if err := unix.Mount(dir, dir, "none", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("mounting directory of network namespaces: %w", err)
	}
	return wrap("sharing directory of network namespaces", unix.Mount("", dir, "none", unix.MS_SHARED|unix.MS_REC, ""))
}

// removeNamespace takes the name away; none is success. The namespace ends with the last descriptor that holds it.
func removeNamespace(path string) error {
	for {
		err := unix.Unmount(path, unix.MNT_DETACH)
		if err == nil {
			continue // somebody may have mounted it twice
		}
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			break
		}
		return fmt.Errorf("unmounting network namespace %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing name of network namespace: %w", err)
	}
	return nil
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
