package cgroup

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
)

// host builds a file tree that looks like one.
func host(t *testing.T, mountinfo string, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	files["/proc/self/mountinfo"] = mountinfo
	for path, content := range files {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

const (
	otherMounts = "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n23 22 0:5 / /proc rw - proc proc rw\n"
	v1Mounts    = otherMounts +
		"31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n" +
		"32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct\n" +
		"35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n" +
		"36 31 0:33 / /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices\n" +
		"37 31 0:34 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n" +
		"38 31 0:35 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n"
	unified = "40 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
	v2Mount = otherMounts + "31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup rw,nsdelegate\n"
)

func TestLayoutIsReadFromTheMounts(t *testing.T) {
	for name, c := range map[string]struct {
		mounts      string
		controllers map[string]string
		version     string
		missing     string
		hierarchies int
	}{
		"v1 with cpu and cpuacct in one mount":            {v1Mounts, nil, V1, "", 3},
		"hybrid, where the v2 tree has no controllers":    {v1Mounts + unified, map[string]string{"/sys/fs/cgroup/unified/cgroup.controllers": "\n"}, Hybrid, "", 4},
		"v2 with everything":                              {v2Mount, map[string]string{"/sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids\n"}, V2, "", 1},
		"v2 in a container that is handed only memory":    {v2Mount, map[string]string{"/sys/fs/cgroup/cgroup.controllers": "memory\n"}, V2, "cpu pids", 1},
		"v1 with memory only":                             {otherMounts + "35 31 0:32 / /cg/memory rw - cgroup cgroup rw,memory\n", nil, V1, "cpu pids", 1},
		"a blank in a mount point":                        {otherMounts + "35 31 0:32 / /c\\040g rw - cgroup cgroup rw,memory\n", nil, V1, "cpu pids", 1},
		"systemd's named hierarchy alone is no use to us": {otherMounts + "38 31 0:35 / /cg/systemd rw - cgroup cgroup rw,name=systemd\n" + "40 31 0:38 / /cg/unified rw - cgroup2 cgroup2 rw\n", map[string]string{"/cg/unified/cgroup.controllers": ""}, V2, "memory cpu pids", 1},
	} {
		t.Run(name, func(t *testing.T) {
			if c.controllers == nil {
				c.controllers = map[string]string{}
			}
			l, err := detect(host(t, c.mounts, c.controllers))
			if err != nil {
				t.Fatal(err)
			}
			if l.version != c.version || strings.Join(l.missing, " ") != c.missing || len(l.hierarchies) != c.hierarchies {
				t.Errorf("got %+v", l)
			}
		})
	}
	if _, err := detect(host(t, otherMounts, map[string]string{})); !errors.Is(err, ErrNone) {
		t.Errorf("a host without cgroups: %v", err)
	}
}

func TestNamesCannotClimb(t *testing.T) {
	root := host(t, v1Mounts, map[string]string{})
	if _, err := Open(Options{Root: root, Instance: "../x"}); err == nil {
		t.Error("a climbing instance was accepted")
	}
	tree, err := Open(Options{Root: root, Instance: "i"})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"", ".", "..", "../other", "a/b", "memory.max", strings.Repeat("x", 200)} {
		if _, err := tree.Create(name, Limits{}); err == nil {
			t.Errorf("name %q was accepted", name)
		}
	}
}

// In a plain directory tree the kernel's files do not appear by themselves, so they are made first: the test is about which file
// gets which value.
func TestLimitsAreWrittenInTheWordsOfEachVersion(t *testing.T) {
	limits := Limits{MemoryBytes: 256 << 20, Pids: 64, MilliCPU: 1500}
	for name, c := range map[string]struct {
		mounts string
		files  map[string]string
		want   map[string]string
	}{
		"v1": {v1Mounts, map[string]string{
			"/sys/fs/cgroup/memory/top/imp/i/vm/memory.limit_in_bytes": "", "/sys/fs/cgroup/pids/top/imp/i/vm/pids.max": "",
			"/sys/fs/cgroup/cpu,cpuacct/top/imp/i/vm/cpu.cfs_quota_us": ""}, map[string]string{
			"/sys/fs/cgroup/memory/top/imp/i/vm/memory.limit_in_bytes": "268435456", "/sys/fs/cgroup/pids/top/imp/i/vm/pids.max": "64",
			"/sys/fs/cgroup/cpu,cpuacct/top/imp/i/vm/cpu.cfs_quota_us": "150000"}},
		"v2": {v2Mount, map[string]string{"/sys/fs/cgroup/cgroup.controllers": "cpu memory pids",
			"/sys/fs/cgroup/top/imp/i/vm/memory.max": "", "/sys/fs/cgroup/top/imp/i/vm/memory.swap.max": "max", "/sys/fs/cgroup/top/imp/i/vm/memory.oom.group": "",
			"/sys/fs/cgroup/top/imp/i/vm/pids.max": "", "/sys/fs/cgroup/top/imp/i/vm/cpu.max": ""}, map[string]string{
			"/sys/fs/cgroup/top/imp/i/vm/memory.max": "268435456", "/sys/fs/cgroup/top/imp/i/vm/memory.swap.max": "0", "/sys/fs/cgroup/top/imp/i/vm/memory.oom.group": "1",
			"/sys/fs/cgroup/top/imp/i/vm/pids.max": "64", "/sys/fs/cgroup/top/imp/i/vm/cpu.max": "150000 100000"}},
	} {
		t.Run(name, func(t *testing.T) {
			root := host(t, c.mounts, c.files)
			tree, err := Open(Options{Root: root, Parent: "top", Instance: "i"})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tree.Create("vm", limits); err != nil {
				t.Fatal(err)
			}
			for path, want := range c.want {
				if b, _ := os.ReadFile(filepath.Join(root, path)); string(b) != want {
					t.Errorf("%s holds %q, want %q", path, b, want)
				}
			}
			names, err := tree.List()
			if err != nil || !slices.Equal(names, []string{"vm"}) {
				t.Errorf("list: %v %v", names, err)
			}
		})
	}
}

func TestOOMKillsAreReadFromEachVersionsFile(t *testing.T) {
	for name, c := range map[string]struct{ mounts, file, content string }{
		"v1": {v1Mounts, "/sys/fs/cgroup/memory/imp/i/vm/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"},
		"v2": {v2Mount, "/sys/fs/cgroup/imp/i/vm/memory.events", "low 0\nhigh 0\nmax 11\noom 3\noom_kill 2\noom_group_kill 1\n"},
	} {
		t.Run(name, func(t *testing.T) {
			tree, err := Open(Options{Root: host(t, c.mounts, map[string]string{"/sys/fs/cgroup/cgroup.controllers": "memory", c.file: c.content}), Instance: "i"})
			if err != nil {
				t.Fatal(err)
			}
			g, _ := tree.Group("vm")
			if n, err := g.OOMKills(); n != 2 || err != nil {
				t.Errorf("got %d, %v", n, err)
			}
		})
	}
}

// realTree is a tree of this machine.
func realTree(t *testing.T) *Tree {
	t.Helper()
	missing := func(why string) {
		if os.Getenv("IMP_REQUIRE_ALL") == "1" {
			t.Fatal(why)
		}
		t.Skip(why)
	}
	if os.Geteuid() != 0 {
		missing("needs root")
	}
	tree, err := Open(Options{Instance: "test-" + uuid.NewString()[:8]})
	if err != nil {
		missing(err.Error())
	}
	t.Cleanup(func() {
		if err := tree.Close(); err != nil {
			t.Errorf("the instance's group could not be removed: %v", err)
		}
	})
	return tree
}

func runIn(t *testing.T, g *Group, script string) *exec.Cmd {
	t.Helper()
	enter := ""
	for _, f := range g.ProcsFiles() {
		enter += "echo 0 > " + f + " || exit 99; "
	}
	cmd := exec.Command("/bin/sh", "-c", enter+script)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return cmd
}

func TestRealGroupHoldsCountsKillsAndGoes(t *testing.T) {
	tree := realTree(t)
	g, err := tree.Create("vm-1", Limits{MemoryBytes: 64 << 20, Pids: 32, MilliCPU: 500})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("cgroups here: %s, missing %v, unlimited %v", tree.Version(), tree.Missing(), g.Unlimited())
	cmd := runIn(t, g, "trap '' TERM; sleep 300 & sleep 300 & wait")
	go func() { _ = cmd.Wait() }()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for {
		if pids, err := g.Procs(); err != nil {
			t.Fatal(err)
		} else if len(pids) == 3 {
			break
		}
		if wait(ctx) != nil {
			t.Fatal("the processes did not appear in the group")
		}
	}
	if u, err := g.Usage(); err != nil || u.MemoryBytes == 0 || u.CPUNanos == 0 {
		t.Errorf("usage %+v, %v", u, err)
	}
	busy, cancelBusy := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancelBusy()
	if err := g.Remove(busy); err == nil {
		t.Error("a group with processes was removed")
	}
	if err := g.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	if err := g.Remove(ctx); err != nil {
		t.Fatal(err)
	}
	if g.Exists() {
		t.Error("the group is still there")
	}
	if err := errors.Join(g.Kill(ctx), g.Remove(ctx)); err != nil {
		t.Errorf("killing and removing what is gone: %v", err)
	}
	if names, err := tree.List(); err != nil || len(names) != 0 {
		t.Errorf("list: %v %v", names, err)
	}
}

func TestLastGroupTakesItsInstanceAwayAndTheNextMakesItAgain(t *testing.T) {
	tree := realTree(t)
	var done sync.WaitGroup
	for i := range 4 { // at once: one removes what another is about to use
		done.Go(func() {
			for range 25 {
				g, err := tree.Create("vm-"+strconv.Itoa(i), Limits{Pids: 8})
				if err == nil {
					err = g.Remove(t.Context())
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	done.Wait()
	for _, h := range tree.layout.hierarchies {
		if _, err := os.Stat(filepath.Join(h.mount, tree.base)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the instance's group is left: %v", err)
		}
	}
}

func TestRealGroupOverItsMemoryIsAnOOMKill(t *testing.T) {
	tree := realTree(t)
	if slices.Contains(tree.Missing(), controllerMemory) {
		if os.Getenv("IMP_REQUIRE_ALL") == "1" {
			t.Fatal("this host has no memory controller")
		}
		t.Skip("this host has no memory controller")
	}
	g, err := tree.Create("vm-2", Limits{MemoryBytes: 8 << 20})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := errors.Join(g.Kill(ctx), g.Remove(ctx)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Error(err)
		}
	})
	if n, err := g.OOMKills(); n != 0 || err != nil {
		t.Fatalf("before: %d %v", n, err)
	}
	cmd := runIn(t, g, "head -c 200000000 /dev/zero | tail -c 100000000 > /dev/null") // tail keeps 100 MB
	_ = cmd.Wait()
	if n, err := g.OOMKills(); n == 0 || err != nil {
		t.Errorf("after: %d %v; %v", n, err, cmd.ProcessState)
	}
}
