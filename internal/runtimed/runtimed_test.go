package runtimed_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	imagefake "imp.dev/imp/internal/image/fake"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/machinetest"
	"imp.dev/imp/internal/machine/rpc"
	networkfake "imp.dev/imp/internal/network/fake"
	"imp.dev/imp/internal/runtimed"
)

// asRuntime is the first argument that makes this test binary an imp-runtime.
const asRuntime = "be-imp-runtime"

func TestMain(m *testing.M) {
	if child := runtimed.Child(os.Args); child != nil {
		os.Exit(child())
	}
	if len(os.Args) > 1 && os.Args[1] == asRuntime {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		cmd := runtimed.NewCommand()
		cmd.SetArgs(os.Args[2:])
		if err := cmd.ExecuteContext(ctx); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(runtimed.ExitCode(err))
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

type logFile string

func (f logFile) String() string {
	b, _ := os.ReadFile(string(f))
	return string(b)
}

// process is one imp-runtime after another on the same directories.
type process struct {
	dir    string
	args   []string
	cmd    *exec.Cmd
	client *rpc.Client
}

func (p *process) socket() string { return filepath.Join(p.dir, "run", "runtime.sock") }

func (p *process) start(t *testing.T) {
	t.Helper()
	log, err := os.OpenFile(filepath.Join(p.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	args := append([]string{
		asRuntime, "--vmm=fake", "--state-dir=" + filepath.Join(p.dir, "state"), "--run-dir=" + filepath.Join(p.dir, "run"), "--metrics-addr=0",
		"--boot-deadline=5s", "--budget-cpu=32", "--budget-memory-mib=32768", "--budget-disk-gib=1024", "--log-level=debug",
		"--agent-uid=" + strconv.Itoa(os.Geteuid()),
	}, p.args...)
	p.cmd = exec.Command("/proc/self/exe", args...)
	p.cmd.Stderr = log
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if p.client, err = rpc.NewClient(p.socket()); err != nil {
		t.Fatal(err)
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(30 * time.Second); ; <-tick.C {
		if _, err := p.client.Info(t.Context()); err == nil {
			return
		} else if time.Now().After(end) {
			t.Fatalf("the runtime does not come up: %v\n%s", err, logFile(filepath.Join(p.dir, "log")))
		}
	}
}

func (p *process) kill() {
	_ = p.client.Close()
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

func newProcess(t *testing.T, args ...string) *process {
	t.Helper()
	dir, err := os.MkdirTemp("", "imp-runtime") // short enough for a socket's path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if id, err := os.ReadFile(filepath.Join(dir, "state", "instance")); err == nil && os.Geteuid() == 0 {
			for _, instance := range []string{strings.TrimSpace(string(id)), strings.TrimSpace(string(id)) + "-build"} {
				machinetest.RemoveCgroups(t, instance)
			}
		}
		_ = os.RemoveAll(dir)
	})
	return &process{dir: dir, args: args}
}

// TestKilledRuntime runs the suite with a real imp-runtime, each of whose ends is a kill -9.
func TestKilledRuntime(t *testing.T) {
	machinetest.RunWithoutImages(t, func(t *testing.T) *machinetest.Harness {
		p := newProcess(t)
		attached, err := networkfake.New(filepath.Join(p.dir, "state", "network"))
		if err != nil {
			t.Fatal(err)
		}
		h := &machinetest.Harness{
			StateDir: filepath.Join(p.dir, "state"), RunDir: filepath.Join(p.dir, "run"), Log: logFile(filepath.Join(p.dir, "log")),
			Digest: imagefake.Digest(machinetest.Reference), Network: attached,
		}
		h.Instance = func() string {
			b, err := os.ReadFile(filepath.Join(h.StateDir, "instance"))
			if err != nil {
				t.Fatal(err)
			}
			return strings.TrimSpace(string(b))
		}
		h.Start = func(t *testing.T) {
			t.Helper()
			p.start(t)
			h.Service = p.client
		}
		h.Stop = func(*testing.T) { p.kill() }
		h.SetSilence = func(d time.Duration) { p.args = append(p.args, "--guest-silence="+d.String()) }
		h.Start(t)
		t.Cleanup(func() {
			p.kill()
			for _, pid := range h.PIDs(t, "") {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		})
		return h
	})
}

func TestTheSocketIsForTheAgentAlone(t *testing.T) {
	p := newProcess(t)
	p.start(t)
	defer p.kill()
	for path, want := range map[string]os.FileMode{"run": 0o750 | os.ModeDir, "run/runtime.sock": 0o660 | os.ModeSocket, "run/vm": 0o700 | os.ModeDir, "state": 0o700 | os.ModeDir} {
		info, err := os.Stat(filepath.Join(p.dir, path))
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode() != want {
			t.Errorf("%s has mode %s, want %s", path, info.Mode(), want)
		}
	}
	entries, err := os.ReadDir(filepath.Join(p.dir, "run"))
	if err != nil || len(entries) != 2 {
		t.Errorf("run directory holds %v (%v), want the socket and vm", entries, err)
	}
}

func TestASecondRuntimeDoesNotTakeTheFirstOnesDirectories(t *testing.T) {
	first := newProcess(t)
	first.start(t)
	defer first.kill()
	for _, flag := range []string{"--state-dir=", "--run-dir="} {
		other := t.TempDir()
		args := []string{asRuntime, "--vmm=fake", "--metrics-addr=0", "--state-dir=" + filepath.Join(first.dir, "state"), "--run-dir=" + filepath.Join(first.dir, "run"), flag + other}
		out, err := exec.Command("/proc/self/exe", args...).CombinedOutput()
		if err == nil || !strings.Contains(string(out), "held by another process") {
			t.Errorf("a second runtime with another %s: %v, %s", flag, err, out)
		}
	}
	if _, err := first.client.List(t.Context()); err != nil {
		t.Errorf("the first runtime: %v", err)
	}
}

func TestAnOrderlyEndLeavesVMsRunning(t *testing.T) {
	p := newProcess(t)
	p.start(t)
	spec := machinetest.NewSpec()
	if _, err := p.client.Ensure(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	running := func(st machine.Status) bool { return st.State == machine.Running }
	before := watchFor(t, p.client, running)
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	_ = p.cmd.Wait()
	p.start(t)
	defer p.kill()
	after := watchFor(t, p.client, func(st machine.Status) bool { return st.Counters.Adopted == 1 && running(st) })
	if !after.StartedAt.Equal(*before.StartedAt) || after.Revision <= before.Revision {
		t.Errorf("after: %+v\nbefore: %+v", after, before)
	}
	if _, err := p.client.Remove(t.Context(), machine.Ref{ID: spec.ID, Assignment: 1}, machine.Removal{}); err != nil {
		t.Fatal(err)
	}
	watchFor(t, p.client, func(st machine.Status) bool { return st.State == machine.Removed })
}

func watchFor(t *testing.T, s machine.Service, wanted func(machine.Status) bool) machine.Status {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var found machine.Status
	err := s.Watch(ctx, func(u machine.Update) error {
		if u.Status != nil && wanted(*u.Status) {
			found = *u.Status
			return context.Canceled
		}
		return nil
	})
	if found.ID == "" {
		t.Fatalf("never seen: %v", err)
	}
	return found
}

// TestNoKubernetesCode: the process that is root has no Kubernetes API code in its build. Of k8s.io/utils only the clock is allowed.
func TestNoKubernetesCode(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "imp.dev/imp/cmd/imp-runtime").Output()
	if err != nil {
		t.Fatalf("listing dependencies: %v", err)
	}
	if !bytes.Contains(out, []byte("imp.dev/imp/internal/machine/engine\n")) {
		t.Fatalf("the list is not that of the runtime: %s", out)
	}
	for _, pkg := range strings.Fields(string(out)) {
		if (strings.HasPrefix(pkg, "k8s.io/") && !strings.HasPrefix(pkg, "k8s.io/utils/clock")) || strings.HasPrefix(pkg, "sigs.k8s.io/") ||
			strings.HasPrefix(pkg, "imp.dev/imp/api/v1alpha1") {
			t.Errorf("imp-runtime's build holds %s", pkg)
		}
	}
}
