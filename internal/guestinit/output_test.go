package guestinit

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestRingKeepsItsEndByAbsoluteOffset(t *testing.T) {
	r := newRing(10)
	read := func(offset int64) (int64, string) {
		first := r.first(offset)
		var b bytes.Buffer
		_, _ = (&ringReader{ctx: t.Context(), ring: r, offset: first}).WriteTo(&b)
		return first, b.String()
	}
	for _, step := range []struct {
		write  string
		offset int64
		first  int64
		want   string
	}{
		{"", 0, 0, ""}, {"", 5, 0, ""},
		{"abc", 0, 0, "abc"}, {"", 2, 2, "c"}, {"", 99, 3, ""}, {"", -1, 0, "abc"},
		{"defghij", 0, 0, "abcdefghij"},
		{"kl", 0, 2, "cdefghijkl"}, {"", 11, 11, "l"},
		{strings.Repeat("x", 25) + "END", 0, 30, "xxxxxxxEND"},
	} {
		_, _ = io.WriteString(r, step.write)
		if first, got := read(step.offset); first != step.first || got != step.want {
			t.Errorf("after %q, from %d: got %q at %d, want %q at %d", step.write, step.offset, got, first, step.want, step.first)
		}
	}
}

func TestAFollowerGetsEverythingUntilTheEnd(t *testing.T) {
	r := newRing(1 << 10)
	got := make(chan string)
	go func() {
		var b bytes.Buffer
		_, _ = (&ringReader{ctx: context.Background(), ring: r, follow: true}).WriteTo(&b)
		got <- b.String()
	}()
	want := strings.Builder{}
	for i := range 100 {
		text := fmt.Sprintf("%d ", i)
		want.WriteString(text)
		_, _ = io.WriteString(r, text)
	}
	_ = r.Close()
	if g := <-got; g != want.String() {
		t.Errorf("got %q", g)
	}
}

func TestAReaderThatWasOvertakenGetsNoHole(t *testing.T) {
	r := newRing(8)
	_, _ = io.WriteString(r, "12345678")
	slow := &ringReader{ctx: t.Context(), ring: r, offset: 0, follow: true}
	_, _ = io.WriteString(r, "9")
	var b bytes.Buffer
	if n, err := slow.WriteTo(&b); n != 0 || err != nil {
		t.Errorf("got %q, %v", b.String(), err)
	}
}

// gate is a console that takes nothing until it is opened.
type gate struct {
	open chan struct{}
	mu   sync.Mutex
	got  bytes.Buffer
}

func (g *gate) Write(p []byte) (int, error) {
	<-g.open
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.got.Write(p)
}

func (g *gate) String() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.got.String()
}

func TestAConsoleThatIsStuckHoldsNobodyUp(t *testing.T) {
	g := &gate{open: make(chan struct{})}
	f := newFeed(g)
	total := 0
	for range 100 {
		n, _ := f.Write(bytes.Repeat([]byte{'x'}, 10<<10))
		total += n
	}
	if f.Finish("IMP_SUCCESS id=n", time.Millisecond) {
		t.Error("Finish says that everything is on the console")
	}
	close(g.open)
	if !f.Finish("LAST", time.Minute) {
		t.Fatal("the console was opened, and Finish did not see the end")
	}
	out := g.String()
	if !strings.Contains(out, "\nIMP_SUCCESS id=n\n") || !strings.HasSuffix(out, "\nLAST\n") {
		t.Errorf("the markers are not lines of their own: …%q", out[max(0, len(out)-60):])
	}
	if !strings.Contains(out, "bytes of output not shown]") || strings.Count(out, "x") >= total {
		t.Error("nothing was dropped, or it was not told")
	}
	if n := strings.Count(out, "x"); n < finalTail/2 {
		t.Errorf("only %d bytes of the end were shown", n)
	}
}

func TestCopyTreeKeepsEverythingExact(t *testing.T) {
	if os.Getuid() != 0 {
		if os.Getenv("IMP_REQUIRE_ALL") == "1" {
			t.Fatal("root is required here")
		}
		t.Skip("needs root, for owners and device nodes")
	}
	from, to := t.TempDir(), t.TempDir()
	at := func(name string) string { return filepath.Join(from, name) }
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.MkdirAll(at("dir/sub"), 0o755))
	must(os.WriteFile(at("dir/file"), []byte("content"), 0o600))
	must(os.Link(at("dir/file"), at("dir/sub/again")))
	must(os.Symlink("file", at("dir/link")))
	must(os.Symlink("/nowhere", at("dir/dangling")))
	must(unix.Mkfifo(at("pipe"), 0o640))
	must(unix.Mknod(at("null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	must(unix.Mknod(at("socket"), unix.S_IFSOCK|0o755, 0))
	must(os.Chown(at("dir/file"), 1000, 50))
	must(os.Chmod(at("dir/file"), 0o750|os.ModeSetuid))
	must(os.Lchown(at("dir/link"), 3, 4))
	sparse, err := os.Create(at("sparse"))
	must(err)
	_, err = sparse.WriteAt([]byte("end"), 10<<20)
	must(err)
	must(sparse.Truncate(20 << 20))
	must(sparse.Close())
	must(os.WriteFile(at("empty\xff"), nil, 0o644))
	_ = unix.Setxattr(at("dir/file"), "user.color", []byte("blue\x00"), 0)
	must(unix.Setxattr(at("dir/file"), "trusted.note", []byte("kept"), 0))
	old := []unix.Timespec{{Sec: 1, Nsec: 5}, {Sec: 1234567890, Nsec: 123456789}}
	must(unix.UtimesNanoAt(unix.AT_FDCWD, at("dir/file"), old, 0))
	must(os.Chown(from, 7, 8))
	must(os.Chmod(from, 0o770|os.ModeSetgid))
	must(unix.UtimesNanoAt(unix.AT_FDCWD, at("dir"), old, 0))

	dir, err := os.Open(from)
	must(err)
	defer dir.Close()
	must(copyTree(int(dir.Fd()), to))

	want, got := snapshot(t, from), snapshot(t, to)
	for name, w := range want {
		if got[name] != w {
			t.Errorf("%q: got %s, want %s", name, got[name], w)
		}
		delete(got, name)
	}
	for name := range got {
		t.Errorf("%q should not be there", name)
	}
	var s unix.Stat_t
	must(unix.Stat(filepath.Join(to, "sparse"), &s))
	if s.Blocks*512 > 1<<20 {
		t.Errorf("the hole was filled: %d bytes on disk", s.Blocks*512)
	}
	var a, b unix.Stat_t
	must(unix.Stat(filepath.Join(to, "dir/file"), &a))
	must(unix.Stat(filepath.Join(to, "dir/sub/again"), &b))
	if a.Ino != b.Ino || a.Nlink != 2 {
		t.Error("the hard link became a file of its own")
	}
}

// snapshot describes every file of a tree.
func snapshot(t *testing.T, root string) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(root, func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var s unix.Stat_t
		if err := unix.Lstat(path, &s); err != nil {
			return err
		}
		text := fmt.Sprintf("mode %o owner %d:%d links %d device %d mtime %d.%09d", s.Mode, s.Uid, s.Gid, s.Nlink, s.Rdev, s.Mtim.Sec, s.Mtim.Nsec)
		switch s.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			text += fmt.Sprintf(" content %d %q", len(content), bytes.Trim(content, "\x00"))
			for _, name := range []string{"user.color", "trusted.note"} {
				value := make([]byte, 100)
				if n, err := unix.Lgetxattr(path, name, value); err == nil {
					text += fmt.Sprintf(" %s=%q", name, value[:n])
				}
			}
		case unix.S_IFLNK:
			to, err := os.Readlink(path)
			if err != nil {
				return err
			}
			text += " to " + to
		}
		rel, _ := filepath.Rel(root, path)
		all[rel] = text
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}
