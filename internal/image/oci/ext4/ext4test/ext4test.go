// Package ext4test looks at a file system through the kernel: it mounts an image file and tells everything a program could
// see of each file in it. Tests compare such views. It needs root.
package ext4test

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// NeedRoot skips the test without root, or fails it where IMP_REQUIRE_ALL=1 says that nothing may be skipped.
func NeedRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("IMP_REQUIRE_ALL") == "1" {
		t.Fatal("needs root to mount file systems, and IMP_REQUIRE_ALL=1 allows no skip")
	}
	t.Skip("needs root to mount file systems")
}

// Mount mounts the image file read-only through a loop device and gives the directory. Both go when the test ends.
func Mount(t testing.TB, image string) string {
	t.Helper()
	return mount(t, image, unix.MS_RDONLY)
}

// MountWritable mounts the image file for reading and writing.
func MountWritable(t testing.TB, image string) string {
	t.Helper()
	return mount(t, image, 0)
}

func mount(t testing.TB, image string, flags uintptr) string {
	t.Helper()
	dir, unmount, err := Attach(image, flags)
	if err != nil {
		t.Fatalf("mounting %s: %v", image, err)
	}
	t.Cleanup(unmount)
	return dir
}

// Attach mounts for callers that end a mount before the test does.
func Attach(image string, flags uintptr) (dir string, unmount func(), err error) {
	mode := os.O_RDWR
	if flags&unix.MS_RDONLY != 0 {
		mode = os.O_RDONLY
	}
	backing, err := os.OpenFile(image, mode, 0)
	if err != nil {
		return "", nil, err
	}
	defer backing.Close()
	device, err := attachLoop(backing, flags)
	if err != nil {
		return "", nil, err
	}
	defer device.Close() // the mount holds the device; autoclear frees it afterwards
	if dir, err = os.MkdirTemp("", "imp-mount-"); err != nil {
		return "", nil, err
	}
	if err := unix.Mount(device.Name(), dir, "ext4", flags, ""); err != nil {
		_ = os.Remove(dir)
		return "", nil, fmt.Errorf("mount: %w", err)
	}
	return dir, func() {
		_ = unix.Unmount(dir, unix.MNT_DETACH)
		_ = os.Remove(dir)
	}, nil
}

func attachLoop(backing *os.File, flags uintptr) (*os.File, error) {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer control.Close()
	for range 100 { // another process may take the same free number
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("finding a loop device: %w", err)
		}
		name := fmt.Sprintf("/dev/loop%d", n)
		if _, err := os.Stat(name); os.IsNotExist(err) {
			_ = unix.Mknod(name, unix.S_IFBLK|0o600, int(unix.Mkdev(7, uint32(n))))
		}
		device, err := os.OpenFile(name, os.O_RDWR, 0)
		if err != nil {
			return nil, err
		}
		config := unix.LoopConfig{Fd: uint32(backing.Fd())}
		config.Info.Flags = unix.LO_FLAGS_AUTOCLEAR
		if flags&unix.MS_RDONLY != 0 {
			config.Info.Flags |= unix.LO_FLAGS_READ_ONLY
		}
		err = unix.IoctlLoopConfigure(int(device.Fd()), &config)
		if err == nil {
			return device, nil
		}
		_ = device.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, fmt.Errorf("attaching loop device: %w", err)
		}
		runtime.Gosched()
	}
	return nil, fmt.Errorf("attaching loop device: all are busy")
}

// Entry is all that is seen of one file, as text, one fact a word.
type Entry string

// Walk describes every file below dir by its path ("/" is dir itself). Attributes for which ignore is true are left out.
func Walk(t testing.TB, dir string, ignore func(xattr string) bool) map[string]Entry {
	t.Helper()
	out := map[string]Entry{}
	groups := map[uint64]string{}
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		at := "/" + strings.TrimPrefix(strings.TrimPrefix(path, dir), "/")
		entry, err := describe(path, at, groups, ignore)
		if err != nil {
			return fmt.Errorf("%q: %w", at, err)
		}
		out[at] = entry
		return nil
	})
	if err != nil {
		t.Fatalf("walking: %v", err)
	}
	return out
}

func describe(path, at string, groups map[uint64]string, ignore func(string) bool) (Entry, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return "", err
	}
	facts := []string{fmt.Sprintf("mode=%#o uid=%d gid=%d mtime=%d.%09d", st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec)}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		content, err := os.ReadFile(path)
		if err != nil {
			return "", err
		}
		sum := sha256.Sum256(content)
		facts = append(facts, fmt.Sprintf("size=%d sha256=%s", st.Size, hex.EncodeToString(sum[:8])))
	case unix.S_IFLNK:
		target, err := os.Readlink(path)
		if err != nil {
			return "", err
		}
		facts = append(facts, fmt.Sprintf("target=%q", target))
	case unix.S_IFCHR, unix.S_IFBLK:
		facts = append(facts, fmt.Sprintf("device=%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev)))
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		if _, known := groups[st.Ino]; !known {
			groups[st.Ino] = at
		}
		facts = append(facts, fmt.Sprintf("links=%d same=%q", st.Nlink, groups[st.Ino]))
	}
	xattrs, err := readXattrs(path, ignore)
	if err != nil {
		return "", err
	}
	return Entry(strings.Join(append(facts, xattrs...), " ")), nil
}

func readXattrs(path string, ignore func(string) bool) ([]string, error) {
	buffer := make([]byte, 64<<10)
	n, err := unix.Llistxattr(path, buffer)
	if err != nil {
		return nil, fmt.Errorf("listing attributes: %w", err)
	}
	var out []string
	for name := range strings.SplitSeq(string(buffer[:n]), "\x00") {
		if name == "" || ignore != nil && ignore(name) {
			continue
		}
		value := make([]byte, 64<<10)
		n, err := unix.Lgetxattr(path, name, value)
		if err != nil {
			return nil, fmt.Errorf("reading attribute %q: %w", name, err)
		}
		out = append(out, fmt.Sprintf("%q=%q", name, value[:n]))
	}
	slices.Sort(out)
	return out, nil
}
