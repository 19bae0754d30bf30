package guestinit

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// closeFD closes a descriptor that was only read from or looked through: there is nothing an error could tell.
func closeFD(fd int) { _ = unix.Close(fd) }

// inode identifies a file, to find hard links again.
type inode struct{ dev, ino uint64 }

// treeCopy copies one tree with everything exact: owner, mode, times, extended attributes, hard links, holes, device nodes, sockets.
type treeCopy struct {
	target string
	linked map[inode]string // first place of files with several names, below target
}

// copyTree makes the existing directory target a copy of the directory behind the descriptor from. What target holds already stays.
func copyTree(from int, target string) error {
	var s unix.Stat_t
	if err := unix.Fstat(from, &s); err != nil {
		return err
	}
	c := &treeCopy{target: target, linked: map[inode]string{}}
	if err := c.directory(from, "", &s); err != nil {
		return fmt.Errorf("copying to %s: %w", target, err)
	}
	return nil
}

// directory fills target+at, which exists, and gives it the attributes of the directory behind from.
func (c *treeCopy) directory(from int, at string, s *unix.Stat_t) error {
	again, err := unix.Openat(from, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(again), at)
	names, err := f.Readdirnames(-1)
	_ = f.Close()
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := c.entry(from, name, at+"/"+name); err != nil {
			return fmt.Errorf("%s: %w", at+"/"+name, err)
		}
	}
	return attributes(fmt.Sprintf("/proc/self/fd/%d/.", from), c.target+at+"/.", s)
}

func (c *treeCopy) entry(dir int, name, at string) error {
	var s unix.Stat_t
	if err := unix.Fstatat(dir, name, &s, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	source, target := fmt.Sprintf("/proc/self/fd/%d/%s", dir, name), c.target+at
	kind := s.Mode & unix.S_IFMT
	if kind == unix.S_IFDIR {
		sub, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer closeFD(sub)
		if err := unix.Mkdir(target, 0o700); err != nil {
			return err
		}
		return c.directory(sub, at, &s)
	}
	if s.Nlink > 1 {
		key := inode{s.Dev, s.Ino}
		if first, ok := c.linked[key]; ok {
			return unix.Link(c.target+first, target)
		}
		c.linked[key] = at
	}
	var err error
	switch kind {
	case unix.S_IFREG:
		err = copyContent(source, target, s.Size)
	case unix.S_IFLNK:
		var to string
		if to, err = os.Readlink(source); err == nil {
			err = unix.Symlink(to, target)
		}
	default:
		err = unix.Mknod(target, kind|0o600, int(s.Rdev))
	}
	if err != nil {
		return err
	}
	return attributes(source, target, &s)
}

// attributes sets owner, mode, extended attributes and times, in the order in which one does not undo another: a change of owner clears
// setuid bits and capabilities.
func attributes(source, target string, s *unix.Stat_t) error {
	if err := unix.Lchown(target, int(s.Uid), int(s.Gid)); err != nil {
		return err
	}
	if s.Mode&unix.S_IFMT != unix.S_IFLNK {
		if err := unix.Chmod(target, s.Mode&0o7777); err != nil {
			return err
		}
	}
	if err := copyXattrs(source, target); err != nil {
		return err
	}
	times := []unix.Timespec{s.Atim, s.Mtim}
	return unix.UtimesNanoAt(unix.AT_FDCWD, target, times, unix.AT_SYMLINK_NOFOLLOW)
}

func copyXattrs(source, target string) error {
	names := make([]byte, 64<<10)
	n, err := unix.Llistxattr(source, names)
	if errors.Is(err, unix.ENOTSUP) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("listing attributes: %w", err)
	}
	value := make([]byte, 64<<10)
	for _, raw := range bytes.Split(names[:n], []byte{0}) {
		name := string(raw)
		if name == "" {
			continue
		}
		size, err := unix.Lgetxattr(source, name, value)
		if errors.Is(err, unix.ENODATA) {
			continue
		}
		if err == nil {
			err = unix.Lsetxattr(target, name, value[:size], 0)
		}
		if err != nil {
			return fmt.Errorf("copying attribute %s: %w", name, err)
		}
	}
	return nil
}

// copyContent copies a regular file; its holes stay holes.
func copyContent(source, target string, size int64) error {
	in, err := os.Open(source)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(target, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer out.Close()
	for at := int64(0); at < size; {
		begin, end := at, size
		if data, err := unix.Seek(int(in.Fd()), at, unix.SEEK_DATA); err == nil {
			begin = data
		} else if errors.Is(err, unix.ENXIO) {
			break // only a hole is left
		}
		if hole, err := unix.Seek(int(in.Fd()), begin, unix.SEEK_HOLE); err == nil {
			end = hole
		}
		if _, err := out.Seek(begin, io.SeekStart); err != nil {
			return err
		}
		if _, err := io.Copy(out, io.NewSectionReader(in, begin, end-begin)); err != nil {
			return err
		}
		at = end
	}
	return out.Truncate(size)
}
