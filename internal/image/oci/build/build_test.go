package build_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"imp.dev/imp/internal/image/oci/build"
	"imp.dev/imp/internal/image/oci/ext4/ext4test"
	"imp.dev/imp/internal/image/oci/flatten"
)

func gzipped(t testing.TB, b []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	if _, err := w.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func zstandard(t testing.TB, b []byte) []byte {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	return w.EncodeAll(b, nil)
}

func TestLayersAreReadWhateverTheirCompression(t *testing.T) {
	plain := layer(t, file("f", strings.Repeat("content ", 10_000), owned(5, 6)))
	want := view(t, plain)
	for name, blob := range map[string][]byte{
		"gzip": gzipped(t, plain), "zstd": zstandard(t, plain),
		"gzip in two members":              append(gzipped(t, plain[:1000]), gzipped(t, plain[1000:])...),
		"zstd behind a skippable frame":    append([]byte{0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3}, zstandard(t, plain)...),
		"bytes behind the end of the tar":  append(append([]byte{}, plain...), "trailing"...),
		"a layer that is a tar of nothing": nil,
	} {
		t.Run(name, func(t *testing.T) {
			got := view(t, plain, blob)
			if fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("got %v, want %v", got, want)
			}
		})
	}
}

func TestSparseFilesAreReadAsWhatTheyStandFor(t *testing.T) {
	work := t.TempDir()
	sparse := filepath.Join(work, "sparse")
	f, err := os.Create(sparse)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, at := range []int64{0, 3 << 20, 10<<20 - 4} {
		if _, err := f.WriteAt([]byte("data"), at); err != nil {
			t.Fatal(err)
		}
	}
	content, err := os.ReadFile(sparse)
	if err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("size=10485760 sha256=%x ", sha256.Sum256(content))
	for _, format := range []string{"--format=gnu", "--format=pax"} {
		t.Run("tar "+format, func(t *testing.T) {
			blob, err := exec.Command("tar", "-C", work, "--sparse", format, "-cf", "-", "sparse").Output()
			if err != nil {
				t.Fatal(err)
			}
			if len(blob) > 1<<20 {
				t.Fatalf("tar made %d bytes: not sparse, the test shows nothing", len(blob))
			}
			got := string(view(t, blob)["/sparse"])
			if !strings.Contains(got, want[:len("size=10485760 sha256=")+16]) {
				t.Errorf("got %s, want %s", got, want)
			}
		})
	}
}

func TestAHoleOfAGigabyteTakesNoRoom(t *testing.T) {
	work := t.TempDir()
	if err := os.WriteFile(filepath.Join(work, "f"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(work, "f"), 1<<30); err != nil {
		t.Fatal(err)
	}
	blob, err := exec.Command("tar", "-C", work, "--sparse", "-cf", "-", "f").Output()
	if err != nil {
		t.Fatal(err)
	}
	o := order(t, t.TempDir(), blob)
	o.Limits.TotalBytes = 2 << 30
	if _, err := build.Run(context.Background(), o, nil); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(o.Output.Path, &st); err != nil {
		t.Fatal(err)
	}
	if st.Size < 1<<30 || st.Blocks*512 > 1<<20 {
		t.Errorf("the base is %d bytes long and takes %d", st.Size, st.Blocks*512)
	}
}

// Each of these images is used by somebody, and each was got wrong by a tool that flattens.
func TestRulesOfLayers(t *testing.T) {
	sum := func(s string) string { return fmt.Sprintf("sha256=%x", sha256.Sum256([]byte(s)))[:23] }
	for name, c := range map[string]struct {
		layers [][]item
		want   map[string]string // path → what its entry contains; "" is absence
	}{
		"a name whited out and made again in one layer is there": {
			[][]item{{file("x", "old")}, {file("x", "new"), whiteout(".wh.x")}}, map[string]string{"/x": sum("new")}},
		"of two entries with one name the last wins": {
			[][]item{{file("x", "first"), file("x", "last")}}, map[string]string{"/x": sum("last")}},
		"replacing one of two hard links leaves the other": {
			[][]item{{file("a", "old"), hardlink("b", "a")}, {file("a", "new")}}, map[string]string{"/a": sum("new") + ` links=1`, "/b": sum("old") + ` links=1`}},
		"deleting a hard link's first name leaves the second": {
			[][]item{{file("a", "old"), hardlink("b", "a")}, {whiteout(".wh.a")}}, map[string]string{"/a": "", "/b": sum("old") + ` links=1`}},
		"a hard link may name a file of a lower layer": {
			[][]item{{file("a", "old")}, {hardlink("b", "a")}}, map[string]string{"/b": sum("old") + ` links=2 same="/a"`}},
		"an entry below a link to a directory goes to that directory": {
			[][]item{{dir("usr/bin"), symlink("bin", "usr/bin")}, {file("bin/foo", "x")}}, map[string]string{"/usr/bin/foo": sum("x"), "/bin": `target="usr/bin"`}},
		"a link that climbs above the root stays inside": {
			[][]item{{symlink("d", "../../../etc")}, {file("d/passwd", "x")}}, map[string]string{"/etc/passwd": sum("x")}},
		"a directory put in place of a link hides nothing of the link's target": {
			[][]item{{file("run/lock/a", "x"), symlink("var/lock", "../run/lock")}, {dir("var/lock"), whiteout("var/lock/.wh..wh..opq"), file("var/lock/b", "y")}},
			map[string]string{"/run/lock/a": sum("x"), "/var/lock/b": sum("y"), "/var/lock/a": ""}},
		"an opaque directory hides what lies below and keeps its own": {
			[][]item{{file("d/a", "x"), file("d/s/b", "x")}, {file("d/c", "y"), whiteout("d/.wh..wh..opq")}}, map[string]string{"/d/a": "", "/d/s": "", "/d/c": sum("y")}},
		"a directory's new attributes replace all old ones": {
			[][]item{{dir("d", mode(0o700), owned(1, 2), xattr("user.a", "1")), file("d/f", "x")}, {dir("d", mode(0o711), xattr("user.b", "2"))}},
			map[string]string{"/d": `mode=040711 uid=0 gid=0 mtime=0.000000000 "user.b"="2"`, "/d/f": sum("x")}},
		"a global pax header is no file": {
			[][]item{{{header: tar.Header{Typeflag: tar.TypeXGlobalHeader, PAXRecords: map[string]string{"comment": "x"}}}, file("a", "x")}}, map[string]string{"/a": sum("x"), "/pax_global_header": ""}},
		"files of aufs are passed over": {
			[][]item{{dir(".wh..wh.plnk"), file(".wh..wh.plnk/1.2", "x"), whiteout(".wh..wh.aufs"), file("a", "x")}}, map[string]string{"/.wh..wh.plnk": "", "/a": sum("x")}},
		"a file called lost+found is a file": {
			[][]item{{file("lost+found", "x")}}, map[string]string{"/lost+found": sum("x")}},
		"an access list says the same as the mode, and one that adds nothing is dropped": {
			[][]item{{file("a", "x", mode(0o600), xattr("system.posix_acl_access", "\x02\x00\x00\x00\x01\x00\x07\x00\xff\xff\xff\xff\x04\x00\x05\x00\xff\xff\xff\xff\x20\x00\x01\x00\xff\xff\xff\xff"))}},
			map[string]string{"/a": "mode=0100751"}},
		"orders to an overlay are not kept": {
			[][]item{{dir("d", xattr("trusted.overlay.opaque", "y"), xattr("trusted.other", "y"))}}, map[string]string{"/d": `mtime=0.000000000 "trusted.other"="y"`}},
		"names that are not UTF-8 or hold a newline stay as they are": {
			[][]item{{file("caf\xe9", "x"), file("a\nb", "y")}}, map[string]string{"/caf\xe9": sum("x"), "/a\nb": sum("y")}},
		"dates before 1970 and after 2038 are kept with their nanoseconds": {
			[][]item{{file("a", "", at(time.Unix(-1, 5))), file("b", "", at(time.Unix(1<<33, 7)))}}, map[string]string{"/a": "mtime=-1.000000005", "/b": "mtime=8589934592.000000007"}},
	} {
		t.Run(name, func(t *testing.T) {
			var blobs [][]byte
			for _, items := range c.layers {
				blobs = append(blobs, layer(t, items...))
			}
			got := view(t, blobs...)
			for path, want := range c.want {
				entry, ok := got[path]
				if want == "" && ok || !strings.Contains(string(entry), want) {
					t.Errorf("%q is %q, want %q", path, entry, want)
				}
			}
		})
	}
}

// raw is one tar block written by hand, for what Go's writer refuses to write.
func raw(name string, kind byte, size string, edit func(block []byte)) []byte {
	b := make([]byte, 512)
	copy(b, name)
	copy(b[100:], "0000644\x00")
	copy(b[108:], "0000000\x00")
	copy(b[116:], "0000000\x00")
	copy(b[124:], size)
	copy(b[136:], "00000000000\x00")
	b[156] = kind
	copy(b[257:], "ustar\x0000")
	if edit != nil {
		edit(b)
	}
	copy(b[148:], "        ")
	sum := 0
	for _, c := range b {
		sum += int(c)
	}
	copy(b[148:], fmt.Sprintf("%06o\x00 ", sum))
	return b
}

func bomb(t testing.TB, size int64) []byte {
	t.Helper()
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	if _, err := io.CopyN(w, zeros{}, size); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

func many(n int, each func(int) item) []item {
	out := make([]item, n)
	for i := range out {
		out[i] = each(i)
	}
	return out
}

func TestHostileLayersAreRefusedWithTheReason(t *testing.T) {
	long := strings.Repeat("x", 256)
	good := layer(t, file("good", strings.Repeat("y", 5000)))
	claim := raw("liar", '0', "00000100000\x00", nil)
	for name, c := range map[string]struct {
		blobs [][]byte
		want  string
	}{
		"a name that climbs":                        {[][]byte{layer(t, file("../../escape", "x"))}, `"../../escape": a name that climbs`},
		"a name that climbs in the middle":          {[][]byte{layer(t, file("a/../../escape", "x"))}, "a name that climbs"},
		"a hard link that climbs":                   {[][]byte{layer(t, hardlink("passwd", "../../etc/passwd"))}, "a name that climbs"},
		"a hard link to a file of the host":         {[][]byte{layer(t, hardlink("passwd", "/etc/passwd"))}, `"etc/passwd" does not exist at that place of the layers`},
		"a hard link through a symbolic link":       {[][]byte{layer(t, symlink("d", "/etc"), hardlink("passwd", "d/passwd"))}, "does not exist"},
		"a hard link to itself":                     {[][]byte{layer(t, hardlink("a", "a"))}, "does not exist"},
		"a hard link to a later file":               {[][]byte{layer(t, hardlink("a", "b"), file("b", ""))}, "does not exist"},
		"a hard link to a directory":                {[][]byte{layer(t, dir("d"), hardlink("a", "d"))}, "is a directory"},
		"a hard link to the root":                   {[][]byte{layer(t, hardlink("a", "/"))}, "is a directory"},
		"an entry below a file":                     {[][]byte{layer(t, file("a", ""), file("a/b", ""))}, `entry "a/b": "a" on the way is not a directory`},
		"a loop of symbolic links":                  {[][]byte{layer(t, symlink("a", "b"), symlink("b", "a"), file("a/f", ""))}, "more than 40 symbolic links"},
		"a root that is a file":                     {[][]byte{layer(t, file(".", "x"))}, "replace the root"},
		"a whiteout of nothing":                     {[][]byte{layer(t, whiteout("d/.wh."))}, "a whiteout of nothing"},
		"a whiteout of the directory itself":        {[][]byte{layer(t, whiteout("d/.wh.."))}, "a whiteout of nothing"},
		"a whiteout of the parent":                  {[][]byte{layer(t, whiteout("d/.wh..."))}, "a whiteout of nothing"},
		"a name below a whiteout":                   {[][]byte{layer(t, file(".wh.a/b", ""))}, "a name below a whiteout"},
		"a component that is too long":              {[][]byte{layer(t, file(long, ""))}, "a component of more than 255 bytes"},
		"a path that is too long":                   {[][]byte{layer(t, file(strings.Repeat("abc/", 1024)+"f", ""))}, "more than 4095 bytes"},
		"a symbolic link with a component too long": {[][]byte{layer(t, symlink("l", long), file("l/f", ""))}, "component of more than 255 bytes"},
		"directories too deep through links":        {[][]byte{layer(t, append(many(5, func(i int) item { return symlink(strings.Repeat("a/", i*200)+"a"+strings.Repeat("/a", 198)+"/l", "x") }), file(strings.Repeat("d/", 1030)+"f", ""))...)}, "directories deep"},
		"a symbolic link to nothing":                {[][]byte{raw("l", '2', "00000000000\x00", nil)}, "a symbolic link to 0 bytes"},
		"an owner that is negative":                 {[][]byte{raw("f", '0', "00000000000\x00", func(b []byte) { copy(b[108:], "\xff\xff\xff\xff\xff\xff\xff\xff") })}, "owner -1:0 is not between"},
		"a device number out of range":              {[][]byte{raw("dev", '3', "00000000000\x00", func(b []byte) { copy(b[329:], "0777777\x00") })}, "device number 262143:0 is out of range"},
		"an entry of unknown type":                  {[][]byte{raw("odd", 'Z', "00000000000\x00", nil)}, `"odd": entry type 'Z'`},
		"a size of exabytes":                        {[][]byte{raw("huge", '0', "\x80\x00\x00\x00\x40\x00\x00\x00\x00\x00\x00\x00", nil)}, `"huge" claims 4611686018427387904 bytes`},
		"a negative size":                           {[][]byte{raw("neg", '0', "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", nil)}, "entry 1 of the archive cannot be read"},
		"a size the archive does not have":          {[][]byte{claim}, "ends in the middle of entry"},
		"a truncated tar":                           {[][]byte{good[:3000]}, "ends in the middle of entry"},
		"a truncated gzip":                          {[][]byte{gzipped(t, good)[:40]}, "damaged"},
		"a gzip with a wrong sum":                   {[][]byte{func() []byte { b := gzipped(t, good); b[len(b)-6] ^= 1; return b }()}, "damaged"},
		"a damaged zstd":                            {[][]byte{func() []byte { b := zstandard(t, good); b[len(b)-2] ^= 1; return b }()}, "damaged"},
		"text instead of a tar":                     {[][]byte{[]byte(strings.Repeat("<html>not found</html>", 100))}, "entry 1 of the archive cannot be read"},
		"a bomb of gzip":                            {[][]byte{bomb(t, 100<<20)}, "unpack to more than 67108864 bytes"},
		"layers that together are too much":         {[][]byte{bomb(t, 40<<20), bomb(t, 40<<20)}, "layer 2 of 2: the layers unpack to more than"},
		"more entries than are allowed":             {[][]byte{gzipped(t, layer(t, many(20_001, func(i int) item { return file(fmt.Sprint(i), "") })...))}, "more than 20000 entries"},
		"one name more often than is allowed":       {[][]byte{gzipped(t, layer(t, many(20_001, func(int) item { return file("same", "") })...))}, "more than 20000 entries"},
		"more subdirectories than are allowed":      {[][]byte{layer(t, many(1001, func(i int) item { return dir(fmt.Sprintf("d/%d", i)) })...)}, `"/d" has 1001 subdirectories, the limit is 1000`},
		"attributes larger than is allowed":         {[][]byte{layer(t, file("f", "", xattr("user.big", strings.Repeat("x", 3600))))}, `"f": its extended attributes take more than 3584 bytes`},
		"an attribute without a name":               {[][]byte{layer(t, file("f", "", xattr("user.", "x")))}, "has no name a file can hold"},
		"an access list that is junk":               {[][]byte{layer(t, file("f", "", xattr("system.posix_acl_access", "junk")))}, `"f": system.posix_acl_access: not an access control list`},
	} {
		t.Run(name, func(t *testing.T) {
			o := order(t, t.TempDir(), c.blobs...)
			before := listing(t, filepath.Dir(o.Output.Path))
			_, err := build.Run(context.Background(), o, nil)
			if err == nil || !strings.Contains(err.Error(), c.want) || !flatten.IsRefused(err) {
				t.Errorf("got %v, want a refusal with %q", err, c.want)
			}
			if err != nil && len(err.Error()) > 600 {
				t.Errorf("the message has %d bytes", len(err.Error()))
			}
			if after := listing(t, filepath.Dir(o.Output.Path)); after != before {
				t.Errorf("files changed from %s to %s", before, after)
			}
		})
	}
}

func listing(t *testing.T, dir string) string {
	t.Helper()
	var out []string
	for path, entry := range ext4test.Walk(t, dir, nil) {
		if path != "/base.ext4" && path != "/" {
			out = append(out, path, string(entry))
		}
	}
	return fmt.Sprint(len(out))
}

func TestMetadataIsLimited(t *testing.T) {
	o := order(t, t.TempDir(), layer(t, many(300, func(i int) item { return symlink(fmt.Sprint(i), strings.Repeat("x", 4000)) })...))
	o.Limits.MetadataBytes = 1 << 20
	if _, err := build.Run(context.Background(), o, nil); err == nil || !strings.Contains(err.Error(), "names and attributes take more than 1048576 bytes") {
		t.Errorf("got %v", err)
	}
}

func TestALayerWithAnotherDiffIDIsRefused(t *testing.T) {
	plain := layer(t, file("f", "x"))
	o := order(t, t.TempDir(), gzipped(t, plain))
	o.Layers[0].DiffID = diffID(plain)
	if _, err := build.Run(context.Background(), o, nil); err != nil {
		t.Fatal(err)
	}
	o.Layers[0].DiffID = diffID([]byte("other"))
	if _, err := build.Run(context.Background(), o, nil); err == nil || !strings.Contains(err.Error(), "configuration promises") || !flatten.IsRefused(err) {
		t.Errorf("got %v", err)
	}
}

func TestAnOrderGivesTheSameBytesEachTime(t *testing.T) {
	blob := layer(t, many(200, func(i int) item {
		return file(fmt.Sprint("d/", i%7, "/", i), fmt.Sprint(i), xattr("user.a", "1"), xattr("trusted.z", strings.Repeat("z", 100)))
	})...)
	var sums [2][32]byte
	for i := range sums {
		o := order(t, t.TempDir(), blob)
		if _, err := build.Run(context.Background(), o, nil); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(o.Output.Path)
		if err != nil {
			t.Fatal(err)
		}
		sums[i] = sha256.Sum256(b)
	}
	if sums[0] != sums[1] {
		t.Error("two builds differ")
	}
}

func TestBuildingStopsAtTheReserveAndWithTheContext(t *testing.T) {
	o := order(t, t.TempDir(), layer(t, file("f", "x")))
	o.ReserveBytes = 1 << 60
	if _, err := build.Run(context.Background(), o, nil); !errors.Is(err, build.ErrReserve) {
		t.Errorf("got %v, want ErrReserve", err)
	}
	o.ReserveBytes = 0
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := build.Run(ctx, o, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
}

func TestAFullDiskIsToldAsSuch(t *testing.T) {
	ext4test.NeedRoot(t)
	full := t.TempDir()
	if err := unix.Mount("tmpfs", full, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(full, unix.MNT_DETACH) }()
	o := order(t, t.TempDir(), layer(t, file("f", strings.Repeat("x", 4<<20))))
	o.Output.Path = filepath.Join(full, "base.ext4")
	if err := os.WriteFile(o.Output.Path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := build.Run(context.Background(), o, nil); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("got %v, want ENOSPC", err)
	}
}

// TestMain lets this binary be the child of TestAChildNeedsOnlyDescriptors.
func TestMain(m *testing.M) {
	if os.Getenv("IMP_TEST_BUILD_CHILD") == "1" {
		os.Exit(build.Main(context.Background(), os.Stdin, os.Stdout))
	}
	os.Exit(m.Run())
}

func TestAChildNeedsOnlyDescriptors(t *testing.T) {
	ext4test.NeedRoot(t)
	binary := filepath.Join(t.TempDir(), "child") // a place another user may execute from
	if err := os.Chmod(filepath.Dir(filepath.Dir(binary)), 0o755); err != nil {
		t.Fatal(err)
	}
	start := func(ctx context.Context, stdin io.Reader, stdout io.Writer, files []*os.File) error {
		cmd := exec.CommandContext(ctx, "/proc/self/exe")
		cmd.Env = []string{"IMP_TEST_BUILD_CHILD=1"}
		cmd.Stdin, cmd.Stdout, cmd.Stderr, cmd.ExtraFiles, cmd.Dir = stdin, stdout, os.Stderr, files, "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET, Credential: &syscall.Credential{Uid: 65533, Gid: 65533}}
		return cmd.Run()
	}
	run := func(o build.Order) (build.Result, []build.Progress, error) {
		var files []*os.File
		for _, l := range o.Layers {
			f, err := os.Open(l.Path)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			files = append(files, f)
		}
		out, err := os.OpenFile(o.Output.Path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer out.Close()
		var told []build.Progress
		r, err := build.Child(start)(context.Background(), o, files, out, func(p build.Progress) { told = append(told, p) })
		return r, told, err
	}
	blobs := [][]byte{gzipped(t, layer(t, file("f", "one"))), layer(t, file("g", "two", owned(7, 8)))}
	inside, beside := order(t, t.TempDir(), blobs...), order(t, t.TempDir(), blobs...)
	got, told, err := run(beside)
	if err != nil {
		t.Fatal(err)
	}
	want, err := build.Run(context.Background(), inside, nil)
	if err != nil || got != want || len(told) == 0 || told[len(told)-1].Done != 6 {
		t.Errorf("the child says %+v after %+v, in this process it is %+v (%v)", got, told, want, err)
	}
	a, _ := os.ReadFile(inside.Output.Path)
	b, _ := os.ReadFile(beside.Output.Path)
	if !bytes.Equal(a, b) {
		t.Error("the child's base differs from this process'")
	}
	if _, _, err := run(order(t, t.TempDir(), layer(t, file("../x", "")))); !flatten.IsRefused(err) || !strings.Contains(err.Error(), "climbs") {
		t.Errorf("got %v, want the child's refusal", err)
	}
	full := order(t, t.TempDir(), blobs...)
	full.ReserveBytes = 1 << 60
	if _, _, err := run(full); !errors.Is(err, build.ErrReserve) {
		t.Errorf("got %v, want ErrReserve", err)
	}
}
