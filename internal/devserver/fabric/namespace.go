package fabric

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"

	"imp.dev/imp/internal/netns"
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
	ns, err := netns.Find(n.Path())
	if err == nil && ns == nil {
		err = fmt.Errorf("network namespace %s: %w", n.Name, fs.ErrNotExist)
	}
	if err != nil {
		return err
	}
	defer ns.Close()
	return netns.Inside(int(ns.Fd()), f)
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

// Create makes a namespace of that name with a loopback that is up. There must be none. Remove ends it.
func Create(name string) (Namespace, error) {
	n := Namespace{Name: name}
	if _, err := os.Lstat(n.Path()); err == nil {
		return n, fmt.Errorf("network namespace %s: %w", name, fs.ErrExist)
	}
	ns, err := netns.Make(n.Path())
	if err != nil {
		return n, err
	}
	defer ns.Close()
	if err := netns.Inside(int(ns.Fd()), func() error { return setUp("lo") }); err != nil {
		return n, errors.Join(err, n.remove())
	}
	return n, nil
}

// remove takes the name away; the namespace goes with its last user.
func (n Namespace) remove() error { return netns.Unname(n.Path()) }

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
