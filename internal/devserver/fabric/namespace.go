package fabric

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// namespaceDir is where `ip netns` looks for namespaces by name.
const namespaceDir = "/run/netns"

// Namespace is a network namespace with a name, as `ip netns` makes and lists them.
type Namespace struct{ Name string }

// Path is the file that stands for the namespace.
func (n Namespace) Path() string { return filepath.Join(namespaceDir, n.Name) }

// Do calls f on a thread that is in the namespace. What f opens stays in it: a socket, a listener. Goroutines that f starts are
// not in it.
func (n Namespace) Do(f func() error) error {
	target, err := os.Open(n.Path())
	if err != nil {
		return fmt.Errorf("entering network namespace: %w", err)
	}
	defer target.Close()
	return onOwnThread(func() error {
		if err := unix.Setns(int(target.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("entering network namespace %s: %w", n.Name, err)
		}
		return f()
	})
}

// Listen listens inside the namespace.
func (n Namespace) Listen(network, address string) (listener net.Listener, err error) {
	err = n.Do(func() (err error) {
		listener, err = (&net.ListenConfig{}).Listen(context.Background(), network, address)
		return err
	})
	return listener, err
}

// ListenPacket is Listen for datagrams.
func (n Namespace) ListenPacket(network, address string) (conn net.PacketConn, err error) {
	err = n.Do(func() (err error) {
		conn, err = (&net.ListenConfig{}).ListenPacket(context.Background(), network, address)
		return err
	})
	return conn, err
}

// Dial connects from inside the namespace. The address must be a number: names are looked up outside of it.
func (n Namespace) Dial(ctx context.Context, network, address string) (conn net.Conn, err error) {
	err = n.Do(func() (err error) {
		conn, err = (&net.Dialer{}).DialContext(ctx, network, address)
		return err
	})
	return conn, err
}

// onOwnThread calls f on a thread whose network namespace may be changed, and takes the thread back to where it was. One that
// could not be taken back ends with its goroutine, so that no other code ever runs on it.
func onOwnThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		home, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("opening the thread's network namespace: %w", err)
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

// Create makes a namespace of that name with a loopback that is up. There must be none. Remove ends it.
func Create(name string) (n Namespace, err error) {
	n = Namespace{Name: name}
	if err := shareDir(); err != nil {
		return n, err
	}
	file, err := os.OpenFile(n.Path(), os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o444)
	if err != nil {
		return n, err
	}
	_ = file.Close()
	defer func() {
		if err != nil {
			err = errors.Join(err, n.remove())
		}
	}()
	return n, onOwnThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		if err := unix.Mount("/proc/thread-self/ns/net", n.Path(), "none", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("naming it %s: %w", n.Path(), err)
		}
		return setUp("lo")
	})
}

// shareDir makes the folder of names a shared mount, as `ip netns` does. Whoever makes the first namespace has to: mounted over
// later, by a runtime or by `ip`, the folder would hide the names of before, and none of them could be removed.
func shareDir() error {
	if err := os.MkdirAll(namespaceDir, 0o755); err != nil {
		return err
	}
	share := func() error { return unix.Mount("", namespaceDir, "none", unix.MS_SHARED|unix.MS_REC, "") }
	err := share()
	if errors.Is(err, unix.EINVAL) { // it is no mount point yet
		if err = unix.Mount(namespaceDir, namespaceDir, "none", unix.MS_BIND|unix.MS_REC, ""); err == nil {
			err = share()
		}
	}
	if err != nil {
		return fmt.Errorf("sharing %s: %w", namespaceDir, err)
	}
	return nil
}

// remove takes the name away; the namespace goes with its last user.
func (n Namespace) remove() error {
	err := unix.Unmount(n.Path(), unix.MNT_DETACH)
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) { // EINVAL: a plain file
		return fmt.Errorf("unmounting %s: %w", n.Path(), err)
	}
	if err := os.Remove(n.Path()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("removing network namespace: %w", err)
	}
	return nil
}

// Namespaces are those whose name begins with prefix, in order of name.
func Namespaces(prefix string) ([]Namespace, error) {
	entries, err := os.ReadDir(namespaceDir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("listing network namespaces: %w", err)
	}
	var found []Namespace
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), prefix) {
			found = append(found, Namespace{Name: entry.Name()})
		}
	}
	return found, nil
}

// Remove removes the namespaces whose name begins with prefix and gives their names. What is in them, links above all, goes
// with them, unless a process is still there.
func Remove(prefix string) (removed []string, err error) {
	all, err := Namespaces(prefix)
	if err != nil {
		return nil, err
	}
	for _, n := range all {
		if failed := n.remove(); failed != nil {
			err = errors.Join(err, failed)
			continue
		}
		removed = append(removed, n.Name)
	}
	return removed, err
}
