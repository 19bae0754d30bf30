// Package netns makes network namespaces, names them as ip-netns(8) does, and runs code inside one. It does nothing in them: what is in a
// namespace is its maker's.
package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// New makes a network namespace without a name: a loopback device that is down, and nothing else. It ends when the last descriptor, name
// and process in it are gone. The file is the caller's.
func New() (ns *os.File, err error) {
	err = onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("making network namespace: %w", err)
		}
		ns, err = os.Open(own)
		return err
	})
	return ns, err
}

// Inside calls f on a thread that is in the namespace, which an open file stands for. What f opens stays in it: a socket, a listener. Goroutines that f starts are
// not in it.
func Inside(fd int, f func() error) error {
	return onThread(func() error {
		if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("entering network namespace: %w", err)
		}
		return f()
	})
}

// own is the namespace of the thread that opens it.
const own = "/proc/thread-self/ns/net"

// onThread calls f on a thread whose namespace may be changed, and takes the thread back to where it was. One that could not be taken
// back ends with its goroutine, so that no other code ever runs on it.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := os.Open(own)
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

// Find opens the namespace of that name, which is the path of a file; nil: there is none. The file is the caller's.
func Find(path string) (*os.File, error) {
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

// Name gives an open namespace a name, which is the path of a file. A name that another namespace has is laid over; a file that stands
// there without one, as a crash leaves it, is used.
func Name(ns *os.File, path string) error {
	if err := shareDir(filepath.Dir(path)); err != nil {
		return err
	}
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

// Make is New and Name.
func Make(path string) (*os.File, error) {
	ns, err := New()
	if err != nil {
		return nil, err
	}
	if err := Name(ns, path); err != nil {
		ns.Close()
		return nil, err
	}
	return ns, nil
}

// Unname takes the name away; none is success. The namespace ends with the last that holds it.
func Unname(path string) error {
	for {
		err := unix.Unmount(path, unix.MNT_DETACH)
		if err == nil {
			continue // somebody may have mounted it twice
		}
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) { // EINVAL: a plain file
			break
		}
		return fmt.Errorf("unmounting network namespace %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing name of network namespace: %w", err)
	}
	return nil
}

// shareDir makes the directory of names a shared mount of its own, as ip-netns(8) does: otherwise a program that starts with a copy
// of the mounts holds every namespace beyond its removal, and a later ip-netns would lay its own mount over our names.
func shareDir(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("making directory of network namespaces: %w", err)
	}
	share := func() error { return unix.Mount("", dir, "none", unix.MS_SHARED|unix.MS_REC, "") }
	err := share()
	if errors.Is(err, unix.EINVAL) { // it is no mount point yet
		if err = unix.Mount(dir, dir, "none", unix.MS_BIND|unix.MS_REC, ""); err == nil {
			err = share()
		}
	}
	if err != nil {
		return fmt.Errorf("sharing directory of network namespaces %s: %w", dir, err)
	}
	return nil
}
