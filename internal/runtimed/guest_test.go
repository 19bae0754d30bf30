package runtimed_test

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/crane"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"imp.dev/imp/internal/devserver/kernelfetch"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/initramfs"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/machinetest"
)

func need(t *testing.T, ok bool, what string) {
	t.Helper()
	switch {
	case ok:
	case os.Getenv("IMP_REQUIRE_ALL") == "1":
		t.Fatal("needs " + what)
	default:
		t.Skip("needs " + what)
	}
}

// parts of a real node, made once: kernel, initramfs, and the workload's binary.
type parts struct{ kernel, initramfs, workload string }

func makeParts(dir string) (parts, error) {
	cache := os.Getenv("IMP_CACHE")
	if cache == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return parts{}, err
		}
		cache = filepath.Join(home, ".cache", "imp")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	k, err := kernelfetch.FetchDebian(ctx, filepath.Join(cache, "kernel"), slog.New(slog.DiscardHandler))
	if err != nil {
		return parts{}, err
	}
	p := parts{kernel: k.Path, initramfs: filepath.Join(dir, "initramfs.cpio"), workload: filepath.Join(dir, "workload")}
	guest := filepath.Join(dir, "imp-guest")
	for out, pkg := range map[string]string{guest: "imp.dev/imp/cmd/imp-guest", p.workload: "./testdata/workload"} {
		build := exec.Command("go", "build", "-trimpath", "-tags", "imp_guest", "-ldflags", "-s -w", "-o", out, pkg)
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if text, err := build.CombinedOutput(); err != nil {
			return parts{}, fmt.Errorf("building %s: %w: %s", pkg, err, text)
		}
	}
	return p, initramfs.Build(p.initramfs, initramfs.Options{Guest: guest, ModulesDir: k.ModulesDir})
}

// pushImage serves an image whose entrypoint is the workload.
func pushImage(t *testing.T, workload string) string {
	t.Helper()
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(server.Close)
	binary, err := os.ReadFile(workload)
	if err != nil {
		t.Fatal(err)
	}
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	if err := w.WriteHeader(&tar.Header{Name: "workload", Mode: 0o755, Size: int64(len(binary)), Typeflag: tar.TypeReg}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(binary); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(layer.Bytes())), nil })
	if err != nil {
		t.Fatal(err)
	}
	image, err := mutate.AppendLayers(empty.Image, l)
	if err != nil {
		t.Fatal(err)
	}
	image, err = mutate.ConfigFile(image, &v1.ConfigFile{Architecture: "amd64", OS: "linux", Config: v1.Config{Entrypoint: []string{"/workload"}},
		RootFS: mustConfig(t, image).RootFS})
	if err != nil {
		t.Fatal(err)
	}
	reference := strings.TrimPrefix(server.URL, "http://") + "/test/workload:1"
	if err := crane.Push(image, reference); err != nil {
		t.Fatal(err)
	}
	return reference
}

func mustConfig(t *testing.T, i v1.Image) *v1.ConfigFile {
	t.Helper()
	c, err := i.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func awaitVM(t *testing.T, p *process, id, what string, wanted func(machine.Status) bool) machine.Status {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	var last machine.Status
	found := false
	err := p.client.Watch(ctx, func(u machine.Update) error {
		if u.Status != nil && u.Status.ID == id {
			if last = *u.Status; wanted(last) {
				found = true
				return context.Canceled
			}
		}
		return nil
	})
	if !found {
		c, _ := p.client.Console(t.Context(), id, -8<<10, 8<<10)
		t.Fatalf("VM never was %s: %v\n%+v\nconsole: %s\nlog: %s", what, err, last, c.Data, logFile(filepath.Join(p.dir, "log")))
	}
	return last
}

func inState(s machine.State) func(machine.Status) bool {
	return func(st machine.Status) bool { return st.State == s }
}

// TestRealGuests boots Linux from an image out of a registry by imp-runtime, with QEMU.
func TestRealGuests(t *testing.T) {
	need(t, os.Geteuid() == 0, "root")
	_, err := exec.LookPath("qemu-system-x86_64")
	need(t, err == nil, "QEMU")
	made, err := makeParts(t.TempDir())
	need(t, err == nil, fmt.Sprintf("a guest kernel and imp-guest: %v", err))
	reference := pushImage(t, made.workload)
	p := newProcess(t, "--vmm=qemu", "--accel=tcg", "--kernel="+made.kernel, "--initramfs="+made.initramfs, "--boot-deadline=90s")
	p.start(t)
	defer p.kill()
	var all []machine.Spec
	var lock sync.Mutex
	order := func(t *testing.T, options ...machinetest.SpecOption) machine.Spec {
		t.Helper()
		s := machinetest.NewSpec(append([]machinetest.SpecOption{func(s *machine.Spec) { s.Image.Reference, s.MemoryMiB = reference, 192 }}, options...)...)
		if _, err := p.client.Ensure(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		lock.Lock()
		defer lock.Unlock()
		all = append(all, s)
		return s
	}
	args := func(words ...string) machinetest.SpecOption {
		return func(s *machine.Spec) { s.Workload.Args = words }
	}
	t.Run("arguments and environment arrive byte for byte", func(t *testing.T) {
		tricky := "a \"b\" 'c' $d\n\tü"
		s := order(t, args("show", tricky, ""), func(s *machine.Spec) { s.Workload.Env = []machine.EnvVar{{Name: "TRICKY", Value: tricky}} })
		st := awaitVM(t, p, s.ID, "finished", inState(machine.Finished))
		if st.Final.Verdict != machine.Succeeded || !st.Final.Marker || st.Timings.Kernel <= 0 {
			t.Errorf("final is %+v, timings %+v", st.Final, st.Timings)
		}
		c, err := p.client.Console(t.Context(), s.ID, 0, 1<<20)
		if want := fmt.Sprintf("args=%q env=%q", []string{tricky, ""}, tricky); err != nil || !bytes.Contains(c.Data, []byte(want)) {
			t.Errorf("console (%v) does not hold %s:\n%s", err, want, c.Data)
		}
	})
	for word, verdict := range map[string]machine.Verdict{"exit": machine.Failed, "panic": machine.GuestPanic, "poweroff": machine.GuestPowerOff, "reboot": machine.GuestReboot} {
		t.Run("a workload's "+word+" is told as "+string(verdict), func(t *testing.T) {
			s := order(t, args(word, "3"))
			st := awaitVM(t, p, s.ID, "finished", inState(machine.Finished))
			if st.Final.Verdict != verdict || (word == "exit") != (st.Final.Code != nil && *st.Final.Code == 3) {
				t.Errorf("final is %+v", st.Final)
			}
		})
	}
	t.Run("a running guest outlives a killed runtime, is stopped politely by the next, and keeps its disk from boot to boot", func(t *testing.T) {
		s := order(t, args("count"), machinetest.IsPersistent)
		ref := machine.Ref{ID: s.ID, Assignment: 1}
		awaitVM(t, p, s.ID, "running", inState(machine.Running))
		says := func(words string) {
			t.Helper()
			tick := time.NewTicker(100 * time.Millisecond)
			defer tick.Stop()
			for end := time.Now().Add(time.Minute); ; <-tick.C {
				c, err := p.client.Console(t.Context(), s.ID, 0, 1<<20)
				if err == nil && bytes.Contains(c.Data, []byte(words)) {
					return
				}
				if time.Now().After(end) {
					t.Fatalf("the console never says %q: %s", words, c.Data)
				}
			}
		}
		says("boots=+")
		p.kill()
		p.start(t)
		awaitVM(t, p, s.ID, "adopted", func(st machine.Status) bool { return st.Counters.Adopted == 1 && st.State == machine.Running })
		pid, err := exec.Command("pgrep", "-f", s.ID).Output()
		if err != nil || len(strings.Fields(string(pid))) != 1 {
			t.Fatalf("QEMUs of the VM: %q %v", pid, err)
		}
		if out, err := exec.Command("kill", "-9", strings.TrimSpace(string(pid))).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		st := awaitVM(t, p, s.ID, "running again", func(st machine.Status) bool { return st.Incarnation == 2 && st.State == machine.Running })
		if st.LastExit.Verdict != machine.VMMKilled || st.Counters.Restarts != 1 {
			t.Errorf("status is %+v", st)
		}
		says("boots=++")
		if _, err := p.client.Remove(t.Context(), ref, machine.Removal{Grace: 30 * time.Second}); err != nil {
			t.Fatal(err)
		}
		st = awaitVM(t, p, s.ID, "removed", inState(machine.Removed))
		if st.LastExit.Verdict != machine.Stopped || st.LastExit.Code == nil || *st.LastExit.Code != 5 {
			t.Errorf("it ended as %+v, want Stopped with the workload's own code 5", st.LastExit)
		}
	})
	t.Run("a kernel that is none is told with its path, and a repaired one is used without a restart", func(t *testing.T) {
		broken := newProcess(t, "--vmm=qemu", "--kernel="+filepath.Join(t.TempDir(), "kernel"), "--initramfs="+made.initramfs, "--boot-deadline=90s")
		path := strings.TrimPrefix(broken.args[1], "--kernel=")
		if err := os.WriteFile(path, []byte("not a kernel"), 0o600); err != nil {
			t.Fatal(err)
		}
		broken.start(t)
		defer broken.kill()
		info, err := broken.client.Info(t.Context())
		if err != nil || info.Usable || !strings.Contains(info.Problem, path) {
			t.Errorf("info is %+v, %v", info, err)
		}
		s := machinetest.NewSpec(machinetest.IsPersistent, args("wait"), func(s *machine.Spec) { s.Image.Reference = reference })
		if _, err := broken.client.Ensure(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		st := awaitVM(t, broken, s.ID, "told of the kernel", func(st machine.Status) bool { return st.Started.Reason == fault.RuntimeStartFailed })
		if !strings.Contains(st.Started.Message, path) {
			t.Errorf("started is %+v", st.Started)
		}
		good, err := os.ReadFile(made.kernel)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, good, 0o600); err != nil {
			t.Fatal(err)
		}
		awaitVM(t, broken, s.ID, "running", inState(machine.Running))
		if _, err := broken.client.Remove(t.Context(), machine.Ref{ID: s.ID, Assignment: 1}, machine.Removal{}); err != nil {
			t.Fatal(err)
		}
		awaitVM(t, broken, s.ID, "removed", inState(machine.Removed))
	})
	for _, s := range all {
		if _, err := p.client.Remove(t.Context(), machine.Ref{ID: s.ID, Assignment: 1}, machine.Removal{}); err != nil {
			t.Fatal(err)
		}
		awaitVM(t, p, s.ID, "removed", inState(machine.Removed))
	}
	for _, dir := range []string{"state/vm", "run/vm"} {
		if entries, err := os.ReadDir(filepath.Join(p.dir, dir)); err != nil || len(entries) != 0 {
			t.Errorf("%s holds %v (%v) after all were removed", dir, entries, err)
		}
	}
}
