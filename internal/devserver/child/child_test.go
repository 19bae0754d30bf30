package child

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// parentEnv makes this test binary a program that starts a child in a Group, prints its pid, and waits to be killed.
const parentEnv = "IMP_TEST_CHILD_PARENT"

func TestMain(m *testing.M) {
	if dir := os.Getenv(parentEnv); dir != "" {
		g := NewGroup()
		p, err := g.Start(Spec{Name: "sleeper", Path: "/bin/sleep", Args: []string{"300"}, LogFile: filepath.Join(dir, "log")})
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println(p.PID())
		select {}
	}
	os.Exit(m.Run())
}

func alive(pid int) bool { return syscall.Kill(pid, 0) == nil }

func await(t *testing.T, what string, done func() bool) {
	t.Helper()
	deadline := time.After(20 * time.Second)
	ticker := time.NewTicker(10 * time.Millisecond)
	defer ticker.Stop()
	for !done() {
		select {
		case <-deadline:
			t.Fatalf("waited in vain for %s", what)
		case <-ticker.C:
		}
	}
}

func TestChildrenDieWithAParentThatIsKilled(t *testing.T) {
	parent := exec.Command(os.Args[0])
	parent.Env = append(os.Environ(), parentEnv+"="+t.TempDir())
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatalf("the parent said %q", line)
	}
	if !alive(pid) {
		t.Fatal("the child does not live before the parent is killed")
	}
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = parent.Wait()
	await(t, "the child's death", func() bool {
		state, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		return err != nil || strings.Contains(string(state), ") Z ") // a zombie waits for whoever reaps orphans here
	})
}

func TestStopKillsWhatIgnoresSIGTERMAndItsOwnChildren(t *testing.T) {
	dir := t.TempDir()
	g := NewGroup()
	defer g.Close()
	p, err := g.Start(Spec{
		Name: "stubborn", Path: "/bin/sh", LogFile: filepath.Join(dir, "log"), Grace: 50 * time.Millisecond, Env: []string{"PATH=/bin:/usr/bin"},
		Args: []string{"-c", `trap '' TERM; sleep 300 & echo $! > "$0"; while :; do wait; done`, filepath.Join(dir, "pid")},
	})
	if err != nil {
		t.Fatal(err)
	}
	grandchild := 0
	await(t, "the grandchild's pid", func() bool {
		content, _ := os.ReadFile(filepath.Join(dir, "pid"))
		grandchild, err = strconv.Atoi(strings.TrimSpace(string(content)))
		return err == nil
	})
	p.Stop()
	if p.Running() {
		t.Error("the process runs after Stop")
	}
	await(t, "the grandchild's death", func() bool {
		state, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", grandchild))
		return err != nil || strings.Contains(string(state), ") Z ")
	})
}

func TestEndedTellsHowAndShowsTheLog(t *testing.T) {
	g := NewGroup()
	defer g.Close()
	log := filepath.Join(t.TempDir(), "log")
	p, err := g.Start(Spec{Name: "failing", Path: "/bin/sh", Args: []string{"-c", "echo no such port >&2; exit 7"}, LogFile: log})
	if err != nil {
		t.Fatal(err)
	}
	got := p.Await(t.Context()).Error()
	for _, want := range []string{"failing ended", "exit status 7", "no such port"} {
		if !strings.Contains(got, want) {
			t.Errorf("the error is %q, want %q in it", got, want)
		}
	}
}

func TestAClosedGroupStartsNothing(t *testing.T) {
	g := NewGroup()
	g.Close()
	_, err := g.Start(Spec{Name: "late", Path: "/bin/true", LogFile: filepath.Join(t.TempDir(), "log")})
	if !errors.Is(err, ErrClosed) {
		t.Errorf("starting in a closed group gave %v, want ErrClosed", err)
	}
}

func TestAProcessRunsAsTheUserItWasGiven(t *testing.T) {
	if os.Geteuid() != 0 {
		if os.Getenv("IMP_REQUIRE_ALL") != "" {
			t.Fatal("needs root")
		}
		t.Skip("needs root to run a process as another user")
	}
	g := NewGroup()
	defer g.Close()
	log := filepath.Join(t.TempDir(), "log")
	p, err := g.Start(Spec{Name: "id", Path: "/bin/sh", Args: []string{"-c", "id -u; id -G; env"}, LogFile: log,
		UID: 47110, GID: 47110, Env: []string{"PATH=/bin:/usr/bin"}})
	if err != nil {
		t.Fatal(err)
	}
	<-p.Done()
	if got := Tail(log, 4096); !strings.HasPrefix(got, "47110\n47110\n") {
		t.Errorf("uid and groups are %q, want 47110 and 47110 only", got)
	}
}

func TestTailGivesWholeLines(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	if err := os.WriteFile(path, []byte("first line\nsecond line\nthird\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, want := Tail(path, 20), "second line\nthird\n"; got != want && got != "third\n" {
		t.Errorf("Tail gave %q, want %q or less by whole lines", got, want)
	}
	if got, want := Tail(path, 1000), "first line\nsecond line\nthird\n"; got != want {
		t.Errorf("Tail gave %q, want %q", got, want)
	}
}
