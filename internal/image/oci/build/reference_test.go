package build_test

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"imp.dev/imp/internal/image/oci/build"
	"imp.dev/imp/internal/image/oci/ext4"
	"imp.dev/imp/internal/image/oci/ext4/ext4test"
)

// The reference applies layers as root to a real directory, inside a chroot, so that the kernel resolves every name; it is
// slow and needs a directory's trust, but each line of it is a system call whose meaning is known.

// timeMark keeps a directory's time until everything in it is made.
const timeMark = "trusted.reference_mtime"

func applyReference(dir string, layers [][]byte) error {
	done := make(chan error)
	go func() { // the thread ends with the goroutine: it is never unlocked
		runtime.LockOSThread()
		err := unix.Unshare(unix.CLONE_FS)
		if err == nil {
			err = unix.Chroot(dir)
		}
		if err == nil {
			err = os.Chdir("/")
		}
		for i := 0; err == nil && i < len(layers); i++ {
			err = applyLayer(layers[i])
		}
		if err == nil {
			err = filepath.WalkDir("/", setDirectoryTime)
		}
		done <- err
	}()
	return <-done
}

func applyLayer(blob []byte) error {
	type file struct {
		*tar.Header
		content []byte
	}
	var all []file
	own := map[string]bool{}
	for r := tar.NewReader(bytes.NewReader(blob)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		content, err := io.ReadAll(r)
		if err != nil {
			return err
		}
		h.Name = path.Clean("/" + h.Name)
		own[h.Name] = own[h.Name] || h.Typeflag == tar.TypeDir
		all = append(all, file{h, content})
	}
	for _, f := range all {
		if strings.HasPrefix(path.Base(f.Name), ".wh.") {
			if err := removeHidden(f.Name, own); err != nil {
				return err
			}
		}
	}
	for _, f := range all {
		if strings.HasPrefix(path.Base(f.Name), ".wh.") {
			continue
		}
		if err := makeParents(path.Dir(f.Name)); err != nil {
			return err
		}
		written := f.Name
		real, err := filepath.EvalSymlinks(path.Dir(written)) // once: the entry may replace a link of its own path
		if err != nil {
			return err
		}
		f.Name = path.Join(real, path.Base(written))
		if err := applyEntry(f.Header, f.content, written); err != nil {
			return fmt.Errorf("%s: %w", f.Name, err)
		}
	}
	return nil
}

func removeHidden(name string, own map[string]bool) error {
	parent := path.Dir(name)
	for p := parent; p != "/"; p = path.Dir(p) {
		if info, err := os.Lstat(p); own[p] && err == nil && !info.IsDir() {
			return nil
		}
	}
	if !isDirectory(parent) {
		return nil
	}
	if path.Base(name) != ".wh..wh..opq" {
		return os.RemoveAll(parent + "/" + strings.TrimPrefix(path.Base(name), ".wh."))
	}
	list, err := os.ReadDir(parent)
	for _, child := range list {
		err = errors.Join(err, os.RemoveAll(parent+"/"+child.Name()))
	}
	return err
}

func isDirectory(name string) bool {
	info, err := os.Stat(name)
	return err == nil && info.IsDir()
}

func makeParents(name string) error {
	prefix := ""
	for part := range strings.SplitSeq(name, "/") {
		if part == "" {
			continue
		}
		prefix += "/" + part
		info, err := os.Stat(prefix)
		switch {
		case err == nil && info.IsDir():
		case err == nil:
			return fmt.Errorf("%s: %w", prefix, unix.ENOTDIR)
		case !errors.Is(err, fs.ErrNotExist):
			return err
		default:
			if target, linkErr := os.Readlink(prefix); linkErr == nil { // dangling
				if !strings.HasPrefix(target, "/") {
					target = path.Dir(prefix) + "/" + target
					if strings.HasSuffix(prefix, "/..") {
						return errors.New("unexpected")
					}
				}
				err = makeParents(target)
			} else {
				err = errors.Join(unix.Mkdir(prefix, 0o755), setAttributes(&tar.Header{Name: prefix, Mode: 0o755, Typeflag: tar.TypeDir, ModTime: time.Unix(0, 0)}))
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

func applyEntry(h *tar.Header, content []byte, written string) error {
	old, oldErr := os.Lstat(h.Name)
	if h.Typeflag == tar.TypeLink {
		target := path.Clean("/" + h.Linkname)
		if to, err := os.Lstat(target); err == nil && oldErr == nil && !to.IsDir() && os.SameFile(old, to) && written != target {
			return nil
		}
		if err := os.RemoveAll(h.Name); err != nil {
			return err
		}
		return unix.Linkat(unix.AT_FDCWD, target, unix.AT_FDCWD, h.Name, 0)
	}
	if h.Typeflag == tar.TypeDir && oldErr == nil && old.IsDir() {
		return setAttributes(h)
	}
	if h.Name == "/" {
		return unix.EBUSY
	}
	err := os.RemoveAll(h.Name)
	if err != nil {
		return err
	}
	switch h.Typeflag {
	case tar.TypeReg:
		err = os.WriteFile(h.Name, content, 0o600)
	case tar.TypeDir:
		err = os.Mkdir(h.Name, 0o700)
	case tar.TypeSymlink:
		err = os.Symlink(h.Linkname, h.Name)
	case tar.TypeFifo:
		err = unix.Mkfifo(h.Name, 0o600)
	case tar.TypeChar:
		err = unix.Mknod(h.Name, unix.S_IFCHR, int(unix.Mkdev(uint32(h.Devmajor), uint32(h.Devminor))))
	case tar.TypeBlock:
		err = unix.Mknod(h.Name, unix.S_IFBLK, int(unix.Mkdev(uint32(h.Devmajor), uint32(h.Devminor))))
	}
	if err != nil {
		return err
	}
	return setAttributes(h)
}

func setAttributes(h *tar.Header) error {
	list := make([]byte, 4096)
	n, err := unix.Llistxattr(h.Name, list)
	if err != nil {
		return err
	}
	for name := range strings.SplitSeq(string(list[:n]), "\x00") {
		if name != "" {
			err = errors.Join(err, unix.Lremovexattr(h.Name, name))
		}
	}
	err = errors.Join(err, unix.Lchown(h.Name, h.Uid, h.Gid))
	if h.Typeflag != tar.TypeSymlink {
		err = errors.Join(err, unix.Chmod(h.Name, uint32(h.Mode&0o7777)))
	}
	for key, value := range h.PAXRecords {
		name, ok := strings.CutPrefix(key, "SCHILY.xattr.")
		if !ok {
			continue
		}
		if xerr := unix.Lsetxattr(h.Name, name, []byte(value), 0); !errors.Is(xerr, unix.EPERM) && !errors.Is(xerr, unix.ENOTSUP) && !errors.Is(xerr, unix.EACCES) {
			err = errors.Join(err, xerr)
		}
	}
	if h.Typeflag == tar.TypeDir {
		return errors.Join(err, unix.Lsetxattr(h.Name, timeMark, fmt.Append(nil, h.ModTime.UnixNano()), 0))
	}
	return errors.Join(err, setTime(h.Name, h.ModTime.UnixNano()))
}

func setTime(name string, ns int64) error {
	ts := unix.NsecToTimespec(ns)
	return unix.UtimesNanoAt(unix.AT_FDCWD, name, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
}

func setDirectoryTime(name string, d fs.DirEntry, err error) error {
	if err != nil || !d.IsDir() {
		return err
	}
	value := make([]byte, 64)
	n, err := unix.Lgetxattr(name, timeMark, value)
	if errors.Is(err, unix.ENODATA) {
		return setTime(name, 0)
	}
	ns, _ := strconv.ParseInt(string(value[:max(n, 0)]), 10, 64)
	return errors.Join(err, setTime(name, ns))
}

// Generators.

func anyName(t *rapid.T) string {
	parts := rapid.SliceOfN(rapid.SampledFrom([]string{"a", "b", "c", "dd"}), 1, 3).Draw(t, "name")
	return strings.Join(parts, "/")
}

func anyOption(t *rapid.T) option {
	named := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range [][3]uint32{{1, 6, ^uint32(0)}, {2, 5, 33}, {4, 4, ^uint32(0)}, {0x10, 7, ^uint32(0)}, {0x20, 1, ^uint32(0)}} {
		named = binary.LittleEndian.AppendUint16(named, uint16(e[0]))
		named = binary.LittleEndian.AppendUint16(named, uint16(e[1]))
		named = binary.LittleEndian.AppendUint32(named, e[2])
	}
	return rapid.SampledFrom([]option{
		owned(1000, 70_000), owned(4_000_000_000, 1), mode(0o4755), mode(0o2710), mode(0o1777), mode(0),
		at(time.Unix(1_700_000_000, 987_654_321)), at(time.Unix(-1000, 1)), at(time.Unix(5_000_000_000, 0)),
		xattr("user.a", "1"), xattr("user.long", strings.Repeat("v", 300)), xattr("trusted.b", "\x00\xff"), xattr("user.empty", ""),
		xattr("security.capability", "\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"),
		xattr(ext4.ACLAccess, string(named)), xattr(ext4.ACLDefault, string(named)), xattr("btrfs.compression", "zstd"),
	}).Draw(t, "attribute")
}

func anyItem(t *rapid.T) item {
	name := anyName(t)
	attributes := rapid.SliceOfN(rapid.Custom(anyOption), 0, 3).Draw(t, "attributes")
	kinds := map[string]func() item{
		"file": func() item {
			return file(name, strings.Repeat("x", rapid.SampledFrom([]int{0, 1, 4096, 9000}).Draw(t, "size"))+name, attributes...)
		},
		"empty file": func() item { return file(name, "", attributes...) },
		"directory":  func() item { return dir(name+rapid.SampledFrom([]string{"", "/"}).Draw(t, "slash"), attributes...) },
		"root":       func() item { return dir("./", attributes...) },
		"symlink": func() item {
			target := rapid.SampledFrom([]string{"", "/", "../", "../../../", "./"}).Draw(t, "from") + anyName(t) + rapid.SampledFrom([]string{"", "/", "/..", "/../b"}).Draw(t, "to")
			return symlink(name, target, attributes...)
		},
		"hard link": func() item { return hardlink(name, anyName(t)) },
		"fifo":      func() item { return fifo(name, attributes...) },
		"device":    func() item { return device(name, tar.TypeBlock, 300, 5000, attributes...) },
		"whiteout":  func() item { d, b := path.Split(name); return whiteout(d + ".wh." + b) },
		"opaque":    func() item { return whiteout(name + "/.wh..wh..opq") },
	}
	kind := rapid.SampledFrom([]string{"file", "file", "empty file", "directory", "directory", "directory", "root", "symlink", "hard link", "fifo", "device", "whiteout", "whiteout", "opaque"}).Draw(t, "kind")
	i := kinds[kind]()
	i.header.Name = rapid.SampledFrom([]string{"", "./", "/"}).Draw(t, "prefix") + i.header.Name
	return i
}

func TestAnyStackOfLayersEqualsTheReference(t *testing.T) {
	ext4test.NeedRoot(t)
	refused := 0
	total := 0
	rapid.Check(t, func(r *rapid.T) {
		total++
		stack := rapid.SliceOfN(rapid.SliceOfN(rapid.Custom(anyItem), 0, 8), 1, 4).Draw(r, "layers")
		var blobs [][]byte
		for _, items := range stack {
			blobs = append(blobs, layer(t, items...))
		}
		work, err := os.MkdirTemp(t.TempDir(), "stack")
		if err != nil {
			r.Fatal(err)
		}
		defer os.RemoveAll(work)
		root := filepath.Join(work, "reference")
		if err := os.Mkdir(root, 0o755); err != nil {
			r.Fatal(err)
		}
		o := order(r, work, blobs...)
		want := applyReference(root, blobs)
		_, got := build.Run(context.Background(), o, nil)
		if (want == nil) != (got == nil) {
			r.Fatalf("the reference says %v, the builder %v", want, got)
		}
		if want != nil {
			refused++
			return
		}
		fsck(r, o.Output.Path)
		mounted, unmount, err := ext4test.Attach(o.Output.Path, unix.MS_RDONLY)
		if err != nil {
			r.Fatal(err)
		}
		defer unmount()
		if diff := cmp.Diff(ext4test.Walk(t, root, func(name string) bool { return name == timeMark }), ext4test.Walk(t, mounted, nil)); diff != "" {
			r.Fatalf("reference (-) and base (+) differ:\n%s", diff)
		}
	})
	if total-refused < total/4 {
		t.Errorf("%d of %d stacks were refused by both: the generator shows too little", refused, total)
	}
}
