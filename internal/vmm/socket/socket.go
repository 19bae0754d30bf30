// Package socket makes and reaches UNIX sockets in directories of any depth.
//
// A socket's address holds 107 bytes (unix(7)), and a run's directory may be longer. So a name is always reached through a
// descriptor of its directory: /proc/self/fd/N/name.
package socket

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

func through(dir *os.File, name string) string {
	return fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), name)
}

func open(dir string) (*os.File, error) {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: dir, Err: err}
	}
	return os.NewFile(uintptr(fd), dir), nil
}

// Listen makes a listening stream socket called name in dir, in place of a leftover one, and gives its descriptor to hand to another program.
// That program needs no right to dir.
func Listen(dir, name string) (*os.File, error) {
	d, err := open(dir)
	if err != nil {
		return nil, fmt.Errorf("opening directory of socket %s: %w", name, err)
	}
	defer d.Close()
	if err := os.Remove(filepath.Join(dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("removing stale socket: %w", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: through(d, name), Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("making socket %s: %w", name, err)
	}
	defer func() { _ = l.Close() }()
	l.SetUnlinkOnClose(false)
	f, err := l.File()
	if err != nil {
		return nil, fmt.Errorf("making socket %s: %w", name, err)
	}
	return f, nil
}

// Dial connects to the socket called name in dir. The directory may be one that the socket's owner can write to: anything but a socket, a link to
// one elsewhere on the host too, is refused.
func Dial(ctx context.Context, dir, name string) (net.Conn, error) {
	d, err := open(dir)
	if err != nil {
		return nil, fmt.Errorf("opening directory of socket %s: %w", name, err)
	}
	defer d.Close()
	fd, err := unix.Openat(int(d.Fd()), name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "connecting to socket", Path: name, Err: err}
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("looking at socket %s: %w", name, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFSOCK {
		return nil, fmt.Errorf("connecting to socket %s: there is something else of this name", name)
	}
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return nil, fmt.Errorf("connecting to socket %s: %w", name, err)
	}
	return conn, nil
}
