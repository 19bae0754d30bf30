package ext4_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"imp.dev/imp/internal/image/oci/ext4"
	"imp.dev/imp/internal/image/oci/ext4/ext4test"
)

// Builders: one small function per kind of file.
func dir(children map[string]*ext4.Inode) *ext4.Inode {
	if children == nil {
		children = map[string]*ext4.Inode{}
	}
	return &ext4.Inode{Mode: unix.S_IFDIR | 0o755, Children: children}
}
func file(size int64) *ext4.Inode { return &ext4.Inode{Mode: unix.S_IFREG | 0o644, Size: size} }
func link(target string) *ext4.Inode {
	return &ext4.Inode{Mode: unix.S_IFLNK | 0o777, Target: target}
}

func write(t testing.TB, root *ext4.Inode, content func(out *os.File, plan *ext4.Plan)) string {
	t.Helper()
	plan, err := ext4.NewPlan(root, [16]byte{1, 2, 3, 4, 5, 6, 0x47, 8, 0x89}, nil)
	if err != nil {
		t.Fatalf("planning: %v", err)
	}
	out, err := os.Create(filepath.Join(t.TempDir(), "base.ext4"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	if content != nil {
		content(out, plan)
	}
	if err := plan.WriteMetadata(out); err != nil {
		t.Fatalf("writing: %v", err)
	}
	if err := out.Truncate(plan.Size()); err != nil {
		t.Fatal(err)
	}
	return out.Name()
}

func fsck(t testing.TB, image string) {
	t.Helper()
	out, err := exec.Command("e2fsck", "-fn", image).CombinedOutput()
	if err != nil {
		t.Fatalf("e2fsck -fn is not content: %v\n%s", err, out)
	}
}

func TestFileSystemCheckFindsNothing(t *testing.T) {
	many := func(n int, format string) map[string]*ext4.Inode {
		out := map[string]*ext4.Inode{}
		for i := range n {
			out[fmt.Sprintf(format, i)] = file(0)
		}
		return out
	}
	for name, root := range map[string]*ext4.Inode{
		"an empty root":                            dir(nil),
		"one small file":                           dir(map[string]*ext4.Inode{"a": file(10)}),
		"a directory of many blocks":               dir(many(3000, "a-rather-long-name-%d-"+strings.Repeat("x", 100))),
		"names that fill a block to the last byte": dir(many(300, strings.Repeat("y", 252)+"%03d")),
		"more inodes than one group holds":         dir(many(70_000, "f%d")),
		"a sparse file of 1 GiB":                   dir(map[string]*ext4.Inode{"a": file(1 << 30)}),
		"files on both sides of each extent limit": dir(map[string]*ext4.Inode{
			"4 runs": file(4 * 128 << 20), "5 runs": file(4*128<<20 + 1), "340 runs": file(340 * 128 << 20), "341 runs": file(340*128<<20 + 1), "1360 runs": file(ext4.MaxFileSize),
		}),
		"short and long symbolic links": dir(map[string]*ext4.Inode{"59": link(strings.Repeat("a", 59)), "60": link(strings.Repeat("b", 60)), "4095": link(strings.Repeat("c", 4095))}),
		"dates in four centuries": dir(map[string]*ext4.Inode{
			"1800": {Mode: unix.S_IFREG, ModTime: time.Date(1800, 1, 1, 0, 0, 0, 0, time.UTC)}, "2100": {Mode: unix.S_IFREG, ModTime: time.Date(2100, 1, 1, 0, 0, 0, 0, time.UTC)},
			"9999": {Mode: unix.S_IFREG, ModTime: time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)},
		}),
	} {
		t.Run(name, func(t *testing.T) { fsck(t, write(t, root, nil)) })
	}
}

func acl(entries ...[3]uint32) []byte {
	out := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range entries {
		out = binary.LittleEndian.AppendUint16(out, uint16(e[0]))
		out = binary.LittleEndian.AppendUint16(out, uint16(e[1]))
		out = binary.LittleEndian.AppendUint32(out, e[2])
	}
	return out
}

func TestTheKernelShowsEverythingThatWasPutIn(t *testing.T) {
	ext4test.NeedRoot(t)
	none := ^uint32(0)
	list := acl([3]uint32{1, 6, none}, [3]uint32{2, 7, 1000}, [3]uint32{4, 4, none}, [3]uint32{8, 5, 4_000_000_000}, [3]uint32{0x10, 7, none}, [3]uint32{0x20, 0, none})
	shared := file(5)
	spilled := map[string][]byte{"security.capability": {1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}}
	for i := range 40 {
		spilled[fmt.Sprintf("user.%s", strings.Repeat("n", 1+i*7%13)+fmt.Sprint(i))] = bytes.Repeat([]byte{byte(i)}, i%9)
		spilled[fmt.Sprintf("trusted.%d", i)] = []byte{byte(i), 0}
	}
	root := dir(map[string]*ext4.Inode{
		"suid":        {Mode: unix.S_IFREG | 0o4755, UID: 4_294_967_294, GID: 70_000, Size: 3, ModTime: time.Unix(4_102_444_800, 123_456_789)},
		"before 1970": {Mode: unix.S_IFREG | 0o600, ModTime: time.Unix(-315_619_200, 5)},
		"hard":        shared, "links": dir(map[string]*ext4.Inode{"hard2": shared, "up": link("../hard")}),
		"fifo": {Mode: unix.S_IFIFO | 0o620}, "null": {Mode: unix.S_IFCHR | 0o666, Major: 1, Minor: 3}, "disk": {Mode: unix.S_IFBLK | 0o660, GID: 6, Major: 259, Minor: 1_000_000},
		"long": link(strings.Repeat("d/", 2000)), "not\xffutf8\n": file(0), "spilled": {Mode: unix.S_IFREG | 0o644, Xattrs: spilled},
		"acl":  {Mode: unix.S_IFREG | 0o670, Xattrs: map[string][]byte{ext4.ACLAccess: list}},
		"dacl": {Mode: unix.S_IFDIR | 0o1777, Children: map[string]*ext4.Inode{}, Xattrs: map[string][]byte{ext4.ACLDefault: list, "trusted.big": bytes.Repeat([]byte("v"), 3400), "user.empty": nil}},
	})
	image := write(t, root, func(out *os.File, plan *ext4.Plan) {
		for n, text := range map[*ext4.Inode]string{shared: "hello", root.Children["suid"]: "abc"} {
			at, ok := plan.Offset(n)
			if _, err := out.WriteAt([]byte(text), at); err != nil || !ok {
				t.Fatal(ok, err)
			}
		}
	})
	fsck(t, image)
	got := ext4test.Walk(t, ext4test.Mount(t, image), nil)
	sum := func(s string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(s)))[:16] }
	for at, want := range map[string]string{
		"/":              "mode=040755 uid=0 gid=0 mtime=0.000000000",
		"/suid":          "mode=0104755 uid=4294967294 gid=70000 mtime=4102444800.123456789 size=3 sha256=" + sum("abc") + ` links=1 same="/suid"`,
		"/before 1970":   "mode=0100600 uid=0 gid=0 mtime=-315619200.000000005 size=0 sha256=" + sum("") + ` links=1 same="/before 1970"`,
		"/hard":          "mode=0100644 uid=0 gid=0 mtime=0.000000000 size=5 sha256=" + sum("hello") + ` links=2 same="/hard"`,
		"/links/hard2":   "mode=0100644 uid=0 gid=0 mtime=0.000000000 size=5 sha256=" + sum("hello") + ` links=2 same="/hard"`,
		"/disk":          `mode=060660 uid=0 gid=6 mtime=0.000000000 device=259:1000000 links=1 same="/disk"`,
		"/null":          `mode=020666 uid=0 gid=0 mtime=0.000000000 device=1:3 links=1 same="/null"`,
		"/fifo":          `mode=010620 uid=0 gid=0 mtime=0.000000000 links=1 same="/fifo"`,
		"/not\xffutf8\n": "mode=0100644 uid=0 gid=0 mtime=0.000000000 size=0 sha256=" + sum("") + ` links=1 same="/not\xffutf8\n"`,
		"/acl":           "mode=0100670 uid=0 gid=0 mtime=0.000000000 size=0 sha256=" + sum("") + ` links=1 same="/acl" ` + fmt.Sprintf("%q=%q", ext4.ACLAccess, list),
		"/dacl":          "mode=041777 uid=0 gid=0 mtime=0.000000000 " + fmt.Sprintf("%q=%q", ext4.ACLDefault, list) + fmt.Sprintf(` "trusted.big"=%q "user.empty"=""`, strings.Repeat("v", 3400)),
		"/long":          fmt.Sprintf(`mode=0120777 uid=0 gid=0 mtime=0.000000000 target=%q links=1 same="/long"`, strings.Repeat("d/", 2000)),
	} {
		if string(got[at]) != want {
			t.Errorf("%q is\n%s, want\n%s", at, got[at], want)
		}
	}
	if len(got) != 15 {
		t.Errorf("%d files are seen, want 15: %v", len(got), got)
	}
	for name, value := range spilled {
		if !strings.Contains(string(got["/spilled"]), fmt.Sprintf("%q=%q", name, value)) {
			t.Errorf("attribute %s is not as it was put in: %s", name, got["/spilled"])
		}
	}
}

func TestFilesBeyondOneExtentLeafReadBackRight(t *testing.T) {
	ext4test.NeedRoot(t)
	const size = 60 << 30
	root := dir(map[string]*ext4.Inode{"big": file(size)})
	marks := []int64{0, 42 << 30, 43 << 30, size - 8}
	image := write(t, root, func(out *os.File, plan *ext4.Plan) {
		at, _ := plan.Offset(root.Children["big"])
		for _, m := range marks {
			if _, err := out.WriteAt(fmt.Appendf(nil, "%8d", m>>20), at+m); err != nil {
				t.Fatal(err)
			}
		}
	})
	big, err := os.Open(filepath.Join(ext4test.Mount(t, image), "big"))
	if err != nil {
		t.Fatal(err)
	}
	defer big.Close()
	for _, m := range marks {
		var b [8]byte
		if _, err := big.ReadAt(b[:], m); err != nil || string(b[:]) != fmt.Sprintf("%8d", m>>20) {
			t.Errorf("at %d GiB the file reads %q, %v", m>>30, b, err)
		}
	}
}

func TestTheKernelRefusesToMountTheBaseForWriting(t *testing.T) {
	ext4test.NeedRoot(t)
	image := write(t, dir(nil), nil)
	mounted := ext4test.MountWritable(t, image)
	if err := os.WriteFile(filepath.Join(mounted, "x"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("writing gives %v, want read-only file system", err)
	}
}

func TestOneTreeGivesTheSameBytesEachTime(t *testing.T) {
	build := func() []byte {
		children := map[string]*ext4.Inode{}
		for i := range 500 {
			children[fmt.Sprint(i)] = &ext4.Inode{Mode: unix.S_IFREG, Size: int64(i), Xattrs: map[string][]byte{"user.a": {1}, "user.b": bytes.Repeat([]byte{2}, 200)}}
		}
		b, err := os.ReadFile(write(t, dir(children), nil))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	if !bytes.Equal(build(), build()) {
		t.Error("two builds of one tree differ")
	}
}

func TestWhatTheFormatCannotHoldIsRefusedByName(t *testing.T) {
	for want, bad := range map[string]*ext4.Inode{
		"size": file(ext4.MaxFileSize + 1), "target of 0 bytes": link(""), "target of 4096 bytes": link(strings.Repeat("x", 4096)),
		"device number 4096:0": {Mode: unix.S_IFBLK, Major: 4096}, "unknown file type": {Mode: 0o644},
		"do not fit": {Mode: unix.S_IFREG, Xattrs: map[string][]byte{"user.a": make([]byte, 4096)}},
		"the name":   {Mode: unix.S_IFREG, Xattrs: map[string][]byte{"btrfs.a": nil}},
		"version 2":  {Mode: unix.S_IFREG, Xattrs: map[string][]byte{ext4.ACLAccess: []byte("junk")}},
	} {
		_, err := ext4.NewPlan(dir(map[string]*ext4.Inode{"d": dir(map[string]*ext4.Inode{"bad": bad})}), [16]byte{}, nil)
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), `"/d/bad"`) {
			t.Errorf("got %v, want an error about %q of /d/bad", err, want)
		}
	}
}
