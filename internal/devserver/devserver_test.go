package devserver

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"imp.dev/imp/internal/devserver/controlplane"
	"imp.dev/imp/internal/devserver/fabric"
	"imp.dev/imp/internal/devserver/sweep"
)

// options gives a server of stand-ins, with a bin folder of its own.
func options(t *testing.T) Options {
	t.Helper()
	cache, err := controlplane.CacheDir()
	if err != nil {
		t.Fatal(err)
	}
	_, err = controlplane.Find(cache)
	required := os.Getenv("IMP_REQUIRE_ALL") != ""
	switch {
	case err != nil && required:
		t.Fatal(err)
	case err != nil:
		t.Skipf("needs a Kubernetes API server: %v", err)
	case os.Geteuid() != 0 && required:
		t.Fatal("needs root")
	case os.Geteuid() != 0:
		t.Skip("needs root, as imp-dev up does")
	}
	bin := t.TempDir()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, program := range []string{operatorProgram, agentProgram, runtimeProgram, upProgram} {
		if err := os.Link(self, filepath.Join(bin, program)); err != nil {
			if err := copyFile(self, filepath.Join(bin, program)); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(filepath.Join(bin, program), 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	dir := t.TempDir() // bin stays closed to other users: the server has to see to that
	openToOthers(t, dir)
	return Options{Dir: dir, CacheDir: cache, BinDir: bin, Nodes: 2, VMM: "fake", Accel: "tcg", Progress: func(s string) { t.Log(s) }}
}

// openToOthers lets other users pass the test's folders, which the programs run as.
func openToOthers(t *testing.T, dir string) {
	t.Helper()
	for ; dir != filepath.Clean(os.TempDir()) && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

// clean fails the test if anything is left of a server over dir but its logs and images.
func clean(t *testing.T, dir string) {
	t.Helper()
	places, err := PlacesOf(dir)
	if err != nil {
		t.Fatal(err)
	}
	area := sweep.Area{Cgroup: places.Cgroup, Dirs: []string{places.Data, places.Run}}
	for _, prefix := range []string{places.Namespaces, "imp-"} {
		left, err := fabric.Namespaces(prefix)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range left {
			if strings.HasPrefix(n.Name, places.Namespaces) || strings.HasSuffix(n.Name, "-stub") {
				t.Errorf("network namespace %s is left", n.Name)
			}
		}
	}
	if left := area.Processes(); len(left) > 0 {
		t.Errorf("processes are left: %v", left)
	}
	if left := area.Cgroups(); len(left) > 0 {
		t.Errorf("cgroups are left: %v", left)
	}
	for _, gone := range []string{places.Data, places.Run, places.Kubeconfig()} {
		if _, err := os.Stat(gone); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is left", gone)
		}
	}
}

func TestUpRunsEachProgramAsItselfAndStopLeavesNothing(t *testing.T) {
	opts := options(t)
	server, err := Up(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	stopped := false
	defer func() {
		if !stopped {
			_ = server.Stop(t.Context())
		}
	}()
	for _, c := range []struct {
		program Program
		node    string
		uid     string
	}{{Operator, "", "65532"}, {Runtime, "node-1", "0"}, {Agent, "node-1", "47110"}, {Agent, "node-2", "47110"}} {
		status, err := os.ReadFile("/proc/" + strconv.Itoa(server.PID(c.program, c.node)) + "/status")
		if err != nil {
			t.Errorf("%s of %q does not run: %v", c.program, c.node, err)
			continue
		}
		if !strings.Contains(string(status), "Uid:\t"+c.uid+"\t"+c.uid+"\t"+c.uid) {
			t.Errorf("%s runs as another user than %s", c.program, c.uid)
		}
	}
	if _, err := Up(t.Context(), opts); err == nil || !strings.Contains(err.Error(), "already runs") {
		t.Errorf("a second server over the same folder gave %v, want to be told of the first", err)
	}
	if err := server.Kill(Agent, "node-1"); err != nil {
		t.Error(err)
	}
	if err := server.Start(Agent, "node-1"); err != nil {
		t.Error(err)
	}
	if server.PID(Agent, "node-1") == 0 {
		t.Error("the agent does not run after Kill and Start")
	}
	select {
	case err := <-server.Ended():
		t.Errorf("what Kill ended is reported as a surprise: %v", err)
	default:
	}
	// Its stand-in leaves a VMM behind, which Stop must find and say so.
	stopped = true
	if err := server.Stop(t.Context()); err == nil || !strings.Contains(err.Error(), "sleep") {
		t.Errorf("Stop gave %v, want the VMMs that were left named", err)
	}
	clean(t, opts.Dir)
}

func TestUpCleansUpAfterAServerThatWasKilled(t *testing.T) {
	opts := options(t)
	first := exec.Command(filepath.Join(opts.BinDir, upProgram), "--dir="+opts.Dir, "--cache="+opts.CacheDir)
	first.Env = []string{"PATH=" + os.Getenv("PATH")}
	var said strings.Builder
	first.Stderr = &said
	if err := first.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { _ = first.Wait(); close(ended) }()
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	for up := false; !up; {
		select {
		case <-ended:
			t.Fatalf("the first server ended: %s", said.String())
		case <-t.Context().Done():
			t.Fatal("the first server did not come up")
		case <-ticker.C:
			_, err := os.Stat(filepath.Join(opts.Dir, "is-up"))
			up = err == nil
		}
	}
	places, err := PlacesOf(opts.Dir)
	if err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(filepath.Join(places.stateDir("node-1"), "vmm.pid"))
	if err != nil {
		t.Fatal(err)
	}
	vmm, err := strconv.Atoi(string(content))
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-ended
	if err := syscall.Kill(vmm, 0); err != nil {
		t.Fatalf("the VMM died with the server (%v); then this test shows nothing", err)
	}

	var told []string
	opts.Nodes, opts.Progress = 1, func(line string) { told = append(told, line) }
	second, err := Up(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	all := strings.Join(told, "\n")
	for _, words := range []string{"process " + string(content), "network namespace " + places.Namespaces + "-node-1", "-stub"} {
		if !strings.Contains(all, words) {
			t.Errorf("the second server does not tell of %q that it removed:\n%s", words, all)
		}
	}
	if state, err := os.ReadFile("/proc/" + string(content) + "/stat"); err == nil && !strings.Contains(string(state), ") Z ") {
		t.Error("the first server's VMM lives on")
	}
	_ = second.Stop(t.Context()) // names the stand-in's VMM again
	clean(t, opts.Dir)
}

func TestUpTellsWhichProgramsAreMissing(t *testing.T) {
	opts := options(t)
	if err := os.Remove(filepath.Join(opts.BinDir, agentProgram)); err != nil {
		t.Fatal(err)
	}
	_, err := Up(t.Context(), opts)
	if err == nil || !strings.Contains(err.Error(), "imp-agent missing (run: make build)") {
		t.Errorf("Up without an agent gave %v", err)
	}
	clean(t, opts.Dir)
}

func TestAProgramThatDiesAtOnceEndsTheStartWithItsOwnWords(t *testing.T) {
	opts := options(t)
	script := "#!/bin/sh\necho the kernel is too old >&2\nexit 1\n"
	path := filepath.Join(opts.BinDir, runtimeProgram)
	if err := errors.Join(os.Remove(path), os.WriteFile(path, []byte(script), 0o755)); err != nil {
		t.Fatal(err)
	}
	// The agent's stand-in says ready by itself; without one the node waits for its runtime.
	path = filepath.Join(opts.BinDir, agentProgram)
	if err := errors.Join(os.Remove(path), os.WriteFile(path, []byte("#!/bin/sh\nexec sleep 600\n"), 0o755)); err != nil {
		t.Fatal(err)
	}
	_, err := Up(t.Context(), opts)
	if err == nil || !strings.Contains(err.Error(), "the kernel is too old") {
		t.Errorf("Up with a runtime that dies gave %v", err)
	}
	clean(t, opts.Dir)
}

func TestPlacesOfDifferentFoldersDiffer(t *testing.T) {
	one, err := PlacesOf("/srv/one")
	if err != nil {
		t.Fatal(err)
	}
	two, err := PlacesOf("/srv/two")
	if err != nil {
		t.Fatal(err)
	}
	if one.Run == two.Run || one.Cgroup == two.Cgroup || one.Data == two.Data {
		t.Errorf("two servers share places: %+v and %+v", one, two)
	}
	if socket := one.RuntimeSocket("node-100"); len(socket) > 107 {
		t.Errorf("%s is longer than a socket's path may be", socket)
	}
}

func TestDataMovesOutOfAFolderThatOthersCannotPass(t *testing.T) {
	closed := filepath.Join(t.TempDir(), "home")
	if err := os.Mkdir(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	places, err := PlacesOf(filepath.Join(closed, "imp", ".dev"))
	if err != nil {
		t.Fatal(err)
	}
	if strings.HasPrefix(places.Data, closed) {
		t.Errorf("data lies in %s, which a VMM's user cannot reach", places.Data)
	}
}
