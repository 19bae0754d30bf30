package netns_test

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"imp.dev/imp/internal/netns"
)

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("IMP_REQUIRE_ALL") == "1" {
		t.Fatal("needs root to make network namespaces, and IMP_REQUIRE_ALL=1 allows no skip")
	}
	t.Skip("needs root to make network namespaces")
}

// identity is what tells one namespace from another.
func identity(t *testing.T, fd int) uint64 {
	t.Helper()
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		t.Fatal(err)
	}
	return stat.Ino
}

// here is the namespace that the calling thread is in.
func here() (uint64, error) {
	var stat unix.Stat_t
	err := unix.Stat("/proc/thread-self/ns/net", &stat)
	return stat.Ino, err
}

func newOne(t *testing.T) *os.File {
	t.Helper()
	needRoot(t)
	ns, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	return ns
}

func TestOnlyTheCallIsInside(t *testing.T) {
	ns := newOne(t)
	home, err := here()
	if err != nil {
		t.Fatal(err)
	}
	if identity(t, int(ns.Fd())) == home {
		t.Fatal("the new namespace is the one of before")
	}
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			err := netns.Inside(int(ns.Fd()), func() error {
				links, err := net.Interfaces()
				if err == nil && (len(links) != 1 || links[0].Flags&net.FlagUp != 0) {
					err = errors.New("a new namespace has more than a loopback that is down")
				}
				return err
			})
			if err != nil {
				t.Error(err)
			}
			if after, err := here(); err != nil || after != home {
				t.Errorf("afterwards the caller is in namespace %d, not in %d (%v)", after, home, err)
			}
		})
	}
	all.Wait()
	// Every thread there is must be outside, or some other code would run in the namespace.
	threads, err := filepath.Glob("/proc/self/task/*/ns/net")
	if err != nil || len(threads) == 0 {
		t.Fatal(threads, err)
	}
	for _, thread := range threads {
		var stat unix.Stat_t
		if err := unix.Stat(thread, &stat); err == nil && stat.Ino != home {
			t.Errorf("%s is still another namespace", thread)
		}
	}
}

func TestWhatTheCallGivesIsGivenAndAClosedNamespaceIsToldSo(t *testing.T) {
	ns := newOne(t)
	want := errors.New("what went wrong")
	if err := netns.Inside(int(ns.Fd()), func() error { return want }); !errors.Is(err, want) {
		t.Errorf("got %v", err)
	}
	called := false
	err := netns.Inside(-1, func() error { called = true; return nil })
	if !errors.Is(err, unix.EBADF) || called {
		t.Errorf("a namespace that is none: %v, called: %t", err, called)
	}
}

func TestANameIsFoundUntilItIsTakenAway(t *testing.T) {
	needRoot(t)
	dir := filepath.Join(t.TempDir(), "names")
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	path := filepath.Join(dir, "one")
	if ns, err := netns.Find(path); ns != nil || err != nil {
		t.Fatalf("before: %v, %v", ns, err)
	}
	made, err := netns.Make(path)
	if err != nil {
		t.Fatal(err)
	}
	defer made.Close()
	found, err := netns.Find(path)
	if err != nil || found == nil {
		t.Fatalf("made: %v, %v", found, err)
	}
	defer found.Close()
	if identity(t, int(found.Fd())) != identity(t, int(made.Fd())) {
		t.Error("the name leads to another namespace")
	}
	// Mounted once more, as a second process with the same plan does.
	if err := netns.Name(made, path); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := netns.Unname(path); err != nil {
			t.Error(err)
		}
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 0 {
		t.Errorf("left: %v, %v", entries, err)
	}
	if err := netns.Name(made, path); err != nil {
		t.Errorf("a namespace that lost its name: %v", err)
	}
	if err := netns.Unname(path); err != nil {
		t.Error(err)
	}
}

func TestAFileThatACrashLeftIsNoNamespaceAndInNobodysWay(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	path := filepath.Join(dir, "half")
	if err := os.WriteFile(path, nil, 0o444); err != nil {
		t.Fatal(err)
	}
	if ns, err := netns.Find(path); ns != nil || err != nil {
		t.Errorf("found %v, %v", ns, err)
	}
	ns, err := netns.Make(path)
	if err != nil {
		t.Fatal(err)
	}
	ns.Close()
	if err := netns.Unname(path); err != nil {
		t.Error(err)
	}
}
