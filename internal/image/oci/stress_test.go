package oci_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/image/oci"
	"imp.dev/imp/internal/image/oci/build"
	"imp.dev/imp/internal/image/oci/ext4/ext4test"
	"imp.dev/imp/internal/process"
)

const builderCommand = "build-image"

// TestMain lets this binary be the launcher and the builder that TestBuildingInASandbox starts.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == process.ChildCommand {
		process.ChildMain()
	}
	if len(os.Args) > 1 && os.Args[1] == builderCommand {
		os.Exit(build.Main(context.Background(), os.Stdin, os.Stdout))
	}
	os.Exit(m.Run())
}

func TestBuildingInASandbox(t *testing.T) {
	ext4test.NeedRoot(t)
	h := newHub(t)
	h.push("good", plain(t, "content"))
	starts := 0
	builder := build.Child(func(ctx context.Context, stdin io.Reader, stdout io.Writer, files []*os.File) error {
		starts++
		_, err := process.RunSandboxed(ctx, process.Sandbox{
			Cmd: process.Cmd{Path: "/proc/self/exe", Args: []string{builderCommand}, Stdin: stdin, Stdout: stdout, Files: files},
			UID: 65533, GID: 65533, OpenFiles: 1024, MaxFileBytes: 1 << 40,
		})
		return err
	})
	root := t.TempDir()
	s := open(t, func(c *oci.Config) { c.Dir, c.Builder = filepath.Join(root, "images"), builder })
	base := ensure(t, s, image.Request{Reference: h.ref("good"), Architecture: amd64})
	mounted := ext4test.Mount(t, base.Path)
	if b, err := os.ReadFile(filepath.Join(mounted, "file")); err != nil || string(b) != "content" || starts != 1 {
		t.Errorf("the base holds %q (%v) after %d starts", b, err, starts)
	}
	var st unix.Stat_t
	if err := unix.Stat(base.Path, &st); err != nil || st.Uid != 0 || st.Mode&0o7777 != 0o444 {
		t.Errorf("the base is uid %d mode %o (%v)", st.Uid, st.Mode, err)
	}
}

// TestAnythingAtOnce lets many do what they like at the same time, and looks at what is left.
func TestAnythingAtOnce(t *testing.T) {
	h := newHub(t)
	names := []string{"a", "b", "c"}
	for _, n := range names {
		h.push(n, plain(t, strings.Repeat(n, 200_000)))
	}
	h.protect("c", "pw-of-c")
	root := t.TempDir()
	s := open(t, func(c *oci.Config) { c.Dir, c.BudgetBytes = filepath.Join(root, "images"), 500_000 })
	var wait sync.WaitGroup
	for worker := range 12 {
		dir := filepath.Join(root, fmt.Sprint(worker))
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		random := rand.New(rand.NewPCG(1, uint64(worker)))
		wait.Go(func() {
			for i := range 25 {
				name := names[random.IntN(len(names))]
				req := image.Request{Reference: h.ref(name), Architecture: amd64, LinkTo: filepath.Join(dir, name), Policy: []image.PullPolicy{image.Always, image.IfNotPresent}[random.IntN(2)]}
				if name == "c" {
					req.Credentials = []image.Credential{{Registry: h.host(), Username: "user", Password: "pw-of-c"}}
				}
				ctx, cancel := context.WithCancel(context.Background())
				stage := random.IntN(8)
				_, _, err := s.Ensure(ctx, req, func(image.Progress) {
					if stage--; stage == 0 {
						cancel()
					}
				})
				cancel()
				if err != nil && !errors.Is(err, context.Canceled) {
					t.Errorf("%s: %v", name, err)
				}
				if err == nil && i%3 != 0 {
					if err := os.Remove(req.LinkTo); err != nil {
						t.Error(err)
					}
				}
				if random.IntN(6) == 0 {
					if err := s.Sweep(context.Background()); err != nil {
						t.Errorf("sweeping: %v", err)
					}
				}
			}
			_ = os.RemoveAll(dir)
		})
	}
	wait.Wait()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(filepath.Join(root, "images", "tmp")); err != nil || len(left) != 0 {
		t.Errorf("of pulls there is left: %v %v", left, err)
	}
	s = open(t, func(c *oci.Config) { c.Dir, c.BudgetBytes = filepath.Join(root, "images"), 500_000 })
	if err := s.Sweep(context.Background()); err != nil {
		t.Fatal(err)
	}
	u, err := s.Usage(context.Background())
	if err != nil || u.InUse != 0 || u.Bytes > 500_000 {
		t.Errorf("usage %+v, %v", u, err)
	}
	if left := leftovers(t, root); len(left) > 3*u.Bases {
		t.Errorf("%d bases, and there is %v", u.Bases, left)
	}
}
