package process_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"imp.dev/imp/internal/process"
)

// The test binary is its own launcher child, its own program, and its own runtime that dies.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case process.ChildCommand:
			process.ChildMain()
		case "die-after-launch":
			dieAfterLaunch()
		case "tell":
			tell()
			os.Exit(0)
		}
	}
	os.Exit(m.Run())
}

// dieAfterLaunch launches a sleeper, prints its identity, and is killed.
func dieAfterLaunch() {
	p, err := process.New(process.Options{}).Start(context.Background(), sleeper())
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	id := p.Identity()
	fmt.Println(id.PID, id.StartTime, id.BootID)
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
}

// tell prints what the program finds about itself.
func tell() {
	status, _ := os.ReadFile("/proc/self/status")
	for _, line := range strings.Split(string(status), "\n") {
		for _, key := range []string{"Uid:", "Gid:", "Groups:", "CapEff:", "CapBnd:", "NoNewPrivs:", "CapPrm:"} {
			if strings.HasPrefix(line, key) {
				fmt.Println(strings.Join(strings.Fields(line), " "))
			}
		}
	}
	fds, _ := os.ReadDir("/proc/self/fd")
	for _, fd := range fds {
		target, err := os.Readlink("/proc/self/fd/" + fd.Name())
		if err == nil && !strings.Contains(target, "anon_inode") && !strings.HasPrefix(target, "/proc/") {
			fmt.Println("fd", fd.Name(), target)
		}
	}
	ifs, _ := net.Interfaces()
	fmt.Println("interfaces", len(ifs))
	if len(os.Args) > 2 && os.Args[2] == "fd3" {
		b, err := io.ReadAll(os.NewFile(3, "given"))
		fmt.Printf("fd3 says %q %v\n", b, err)
	}
	wd, _ := os.Getwd()
	fmt.Println("wd", wd)
	sid, _, _ := syscall.RawSyscall(syscall.SYS_GETSID, 0, 0, 0)
	fmt.Println("own session", int(sid) == os.Getpid())
}

func sleeper() process.Order {
	return process.Order{Path: "/bin/sleep", Args: []string{"300"}, UID: os.Geteuid(), GID: os.Getegid()}
}

func requireRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("IMP_REQUIRE_ALL") == "1" {
		t.Fatal("this test needs root")
	}
	t.Skip("needs root")
}

func start(t *testing.T, o process.Order) process.Process {
	t.Helper()
	p, err := process.New(process.Options{}).Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.Signal(syscall.SIGKILL)
		<-p.Done()
		_ = p.Close()
	})
	return p
}

func awaitDone(t *testing.T, p process.Process) {
	t.Helper()
	select {
	case <-p.Done():
	case <-time.After(10 * time.Second):
		t.Fatal("the end of the process was not seen")
	}
}

func TestLaunchedProcessIsFoundBySignalledAndReapedExactlyOnce(t *testing.T) {
	p := start(t, sleeper())
	found, err := process.New(process.Options{}).Find(p.Identity())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = found.Close() }()
	if err := found.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	awaitDone(t, found)
	awaitDone(t, p)
	status, ok := p.ExitStatus()
	if !ok || status.Signal() != syscall.SIGTERM {
		t.Fatalf("exit status %v %v, want SIGTERM", status, ok)
	}
	if _, ok := found.ExitStatus(); ok {
		t.Error("an adopted process told an exit status nobody gave it")
	}
	if err := p.Signal(syscall.SIGTERM); !errors.Is(err, process.ErrGone) {
		t.Errorf("signal after the end: %v, want ErrGone", err)
	}
	if _, err := process.New(process.Options{}).Find(p.Identity()); !errors.Is(err, process.ErrGone) {
		t.Errorf("find after the end: %v, want ErrGone", err)
	}
}

func TestFindMatchesNoStranger(t *testing.T) {
	id := start(t, sleeper()).Identity()
	for name, change := range map[string]func(*process.Identity){
		"the pid was recycled":         func(i *process.Identity) { i.StartTime++ },
		"the host was booted since":    func(i *process.Identity) { i.BootID = "another" },
		"there was never a pid":        func(i *process.Identity) { i.PID = 0 },
		"a negative pid, a group's":    func(i *process.Identity) { i.PID = -i.PID },
		"no process has such a number": func(i *process.Identity) { i.PID = 1 << 30 },
	} {
		t.Run(name, func(t *testing.T) {
			other := id
			change(&other)
			if _, err := process.New(process.Options{}).Find(other); !errors.Is(err, process.ErrGone) {
				t.Fatalf("got %v, want ErrGone", err)
			}
		})
	}
}

func TestProgramOutlivesItsLauncherKilledByNine(t *testing.T) {
	cmd := exec.Command("/proc/self/exe", "die-after-launch")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	var id process.Identity
	if _, err := fmt.Sscan(line, &id.PID, &id.StartTime, &id.BootID); err != nil {
		t.Fatalf("%q: %v", line, err)
	}
	p, err := process.New(process.Options{}).Find(id)
	if err != nil {
		t.Fatalf("the program did not outlive its launcher: %v", err)
	}
	defer func() { _ = p.Close() }()
	if err := process.KillWait(t.Context(), p); err != nil {
		t.Fatal(err)
	}
}

func TestStartFailuresNameTheirStepAndLeaveNothing(t *testing.T) {
	requireRoot(t)
	for name, c := range map[string]struct {
		change func(*process.Order)
		want   string
	}{
		"a missing binary":        {func(o *process.Order) { o.Path = "/no/such/qemu" }, "executing /no/such/qemu: no such file"},
		"a missing directory":     {func(o *process.Order) { o.Dir = "/no/such/dir" }, "entering directory /no/such/dir"},
		"a missing cgroup":        {func(o *process.Order) { o.CgroupProcs = []string{"/no/cgroup.procs"} }, "entering cgroup"},
		"a missing namespace":     {func(o *process.Order) { o.Namespaces = "/no/ns" }, "joining ipc namespace"},
		"a file that cannot exec": {func(o *process.Order) { o.Path = "/etc/passwd" }, "executing /etc/passwd: permission denied"},
	} {
		t.Run(name, func(t *testing.T) {
			before := children(t)
			o := sleeper()
			c.change(&o)
			_, err := process.New(process.Options{}).Start(t.Context(), o)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("error %v, want it to contain %q", err, c.want)
			}
			if after := children(t); after != before {
				t.Errorf("children before %q, after %q", before, after)
			}
		})
	}
	_, err := process.New(process.Options{}).Start(t.Context(), process.Order{Path: "/no/such"})
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v does not unwrap to ErrNotExist", err)
	}
}

func children(t *testing.T) string {
	t.Helper()
	tasks, _ := filepath.Glob("/proc/self/task/*/children")
	var all []string
	for _, f := range tasks {
		b, _ := os.ReadFile(f)
		all = append(all, strings.Fields(string(b))...)
	}
	return strings.Join(all, " ")
}

func TestProgramHasNoPowersAndOnlyItsDescriptors(t *testing.T) {
	requireRoot(t)
	dir := t.TempDir()
	out, err := os.Create(filepath.Join(dir, "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	// A descriptor without close-on-exec must not leak into the program.
	leak, err := syscall.Open("/etc/hostname", syscall.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Close(leak) }()
	given, _ := os.CreateTemp(dir, "given")
	fmt.Fprint(given, "hello")
	_, _ = given.Seek(0, 0)
	exe := copyOfSelf(t)
	p := start(t, process.Order{Path: exe, Args: []string{"tell", "fd3"}, Env: []string{"A=b"}, Dir: "/", UID: 4711, GID: 4712,
		Groups: []int{4713}, Files: []*os.File{given}, Stdout: out, Stderr: out, Namespaces: "/proc/self/ns", OpenFiles: 256})
	awaitDone(t, p)
	b, _ := os.ReadFile(out.Name())
	got := string(b)
	for _, want := range []string{"Uid: 4711 4711 4711 4711", "Gid: 4712 4712 4712 4712", "Groups: 4713", "CapEff: 0000000000000000",
		"CapPrm: 0000000000000000", "CapBnd: 0000000000000000", "NoNewPrivs: 1", `fd3 says "hello"`, "wd /\n", "own session true"} {
		if !strings.Contains(got, want) {
			t.Errorf("program says\n%s\nwant %q", got, want)
		}
	}
	if strings.Contains(got, "hostname") || strings.Contains(got, "pipe:") {
		t.Errorf("a descriptor leaked:\n%s", got)
	}
}

// copyOfSelf puts the test binary where any user may execute it.
func copyOfSelf(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "imp-process")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "self")
	if err := os.WriteFile(path, b, 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestStartEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	before := children(t)
	if _, err := process.New(process.Options{}).Start(ctx, sleeper()); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
	if after := children(t); after != before {
		t.Errorf("children before %q, after %q", before, after)
	}
}

func TestRunGivesOutputAndTheReasonOfAFailure(t *testing.T) {
	r, err := process.Run(t.Context(), process.Cmd{Path: "sh", Args: []string{"-c", "cat; echo oops >&2"}, Stdin: strings.NewReader("in")})
	if err != nil || string(r.Stdout) != "in" || string(r.Stderr) != "oops\n" {
		t.Fatalf("%+v %v", r, err)
	}
	_, err = process.Run(t.Context(), process.Cmd{Path: "sh", Args: []string{"-c", "echo disk full >&2; exit 3"}})
	var bad *process.ExitError
	if !errors.As(err, &bad) || bad.Code != 3 || bad.Error() != "sh: exit status 3: disk full" {
		t.Fatalf("got %v", err)
	}
	r, err = process.Run(t.Context(), process.Cmd{Path: "sh", Args: []string{"-c", "yes | head -c 300000; kill -9 $$"}, MaxOutput: 1000})
	if !errors.As(err, &bad) || bad.Code != 137 || len(r.Stdout) != 1000 || !r.OutputCut {
		t.Fatalf("got %d bytes, %v", len(r.Stdout), err)
	}
	if _, err = process.Run(t.Context(), process.Cmd{Path: "no-such-program"}); !errors.Is(err, exec.ErrNotFound) {
		t.Fatalf("got %v", err)
	}
}

func TestRunKillsTheWholeGroupWhenTheContextEnds(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	begun := time.Now()
	_, err := process.Run(ctx, process.Cmd{Path: "sh", Args: []string{"-c", "sleep 300 & sleep 300"}})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v", err)
	}
	if took := time.Since(begun); took > 5*time.Second {
		t.Errorf("took %v", took)
	}
}

func TestSandboxHasNoNetworkAndNoPowers(t *testing.T) {
	requireRoot(t)
	given, _ := os.CreateTemp(t.TempDir(), "given")
	fmt.Fprint(given, "layer")
	_, _ = given.Seek(0, 0)
	r, err := process.RunSandboxed(t.Context(), process.Sandbox{Cmd: process.Cmd{Path: "/proc/self/exe", Args: []string{"tell", "fd3"},
		Files: []*os.File{given}, Dir: "/"}, UID: 4711, GID: 4711})
	if err != nil {
		t.Fatalf("%v\n%s", err, r.Stderr)
	}
	for _, want := range []string{"Uid: 4711 ", "CapBnd: 0000000000000000", "interfaces 1", `fd3 says "layer"`} {
		if !strings.Contains(string(r.Stdout), want) {
			t.Errorf("program says\n%s\nwant %q", r.Stdout, want)
		}
	}
}

func TestSandboxEndsBadlyInWords(t *testing.T) {
	requireRoot(t)
	run := func(ctx context.Context, s process.Sandbox) error {
		s.UID, s.GID = 4711, 4711
		_, err := process.RunSandboxed(ctx, s)
		return err
	}
	err := run(t.Context(), process.Sandbox{Cmd: process.Cmd{Path: "/bin/sh", Args: []string{"-c", "echo bad layer >&2; exit 2"}}})
	var bad *process.ExitError
	if !errors.As(err, &bad) || bad.Code != 2 || bad.Stderr != "bad layer" {
		t.Errorf("got %v", err)
	}
	if err = run(t.Context(), process.Sandbox{Cmd: process.Cmd{Path: "/no/such"}}); err == nil || !strings.Contains(err.Error(), "executing /no/such") {
		t.Errorf("got %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if err = run(ctx, process.Sandbox{Cmd: process.Cmd{Path: "/bin/sleep", Args: []string{"300"}}}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	if _, err := process.RunSandboxed(t.Context(), process.Sandbox{Cmd: process.Cmd{Path: "/bin/true"}}); err == nil {
		t.Error("uid 0 was accepted")
	}
}

func TestIdentityIsReadRightWhateverTheProgramIsCalled(t *testing.T) {
	src, err := os.ReadFile("/bin/sleep")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "a) S 1 (b")
	if err := os.WriteFile(path, src, 0o755); err != nil {
		t.Fatal(err)
	}
	o := sleeper()
	o.Path = path
	id := start(t, o).Identity()
	b, _ := os.ReadFile("/proc/" + strconv.Itoa(id.PID) + "/stat")
	if !strings.Contains(string(b), " "+strconv.FormatUint(id.StartTime, 10)+" ") || id.StartTime == 0 {
		t.Errorf("start time %d is not in %s", id.StartTime, b)
	}
}

func TestProgramJoinsTheNamespacesItIsTold(t *testing.T) {
	requireRoot(t)
	other := exec.Command("sleep", "300")
	other.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = other.Process.Kill()
		_ = other.Wait()
	}()
	ns := func(pid int, kind string) string {
		link, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
		if err != nil {
			t.Fatal(err)
		}
		return link
	}
	o := sleeper()
	o.Namespaces = fmt.Sprintf("/proc/%d/ns", other.Process.Pid)
	p := start(t, o)
	for _, kind := range []string{"mnt", "net", "uts", "ipc"} {
		if got, want := ns(p.Identity().PID, kind), ns(other.Process.Pid, kind); got != want || got == ns(os.Getpid(), kind) {
			t.Errorf("%s namespace %s, want %s", kind, got, want)
		}
	}
}

func TestWaitingForManyProgramsCostsNoThreads(t *testing.T) {
	threads := func() int {
		tasks, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Fatal(err)
		}
		return len(tasks)
	}
	start(t, sleeper()) // the poller's own thread is there from now on
	before := threads()
	const many = 30
	for range many {
		p := start(t, sleeper())
		found, err := process.New(process.Options{}).Find(p.Identity())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = found.Close() })
	}
	if after := threads(); after > before+many/2 {
		t.Errorf("%d threads, %d before", after, before)
	}
}
