package sweep

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"imp.dev/imp/internal/devserver/fabric"

	"golang.org/x/sys/unix"
)

func needsRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("IMP_REQUIRE_ALL") != "" {
		t.Fatal("needs root for cgroups and mounts")
	}
	t.Skip("needs root for cgroups and mounts")
}

// program is a copy of a system's program under another name.
func program(t *testing.T, name, of string, args ...string) *exec.Cmd {
	t.Helper()
	source, err := os.ReadFile(of)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, source, 0o755); err != nil {
		t.Fatal(err)
	}
	return exec.Command(path, args...)
}

func start(t *testing.T, cmd *exec.Cmd) chan struct{} {
	t.Helper()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	gone := make(chan struct{})
	go func() { _ = cmd.Wait(); close(gone) }()
	t.Cleanup(func() { _ = cmd.Process.Kill(); <-gone })
	return gone
}

func TestCleanRemovesProcessesCgroupsMountsAndFolders(t *testing.T) {
	needsRoot(t)
	area := Area{Cgroup: fmt.Sprintf("/imp-sweep-test-%d", os.Getpid()), Dirs: []string{filepath.Join(t.TempDir(), "data")}}
	mounted := filepath.Join(area.Dirs[0], "node-1", "secret")
	if err := os.MkdirAll(mounted, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", mounted, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	vmm := program(t, "qemu-system-x86_64", "/bin/sleep", "300")
	gone := start(t, vmm)
	made := 0
	for _, m := range mounts() {
		if m.kind != "cgroup" && m.kind != "cgroup2" {
			continue
		}
		group := filepath.Join(m.point, area.Cgroup, "node-1", "vm")
		if err := os.MkdirAll(group, 0o755); err != nil {
			continue // a hierarchy that is not ours to use
		}
		if os.WriteFile(filepath.Join(group, "cgroup.procs"), []byte(strconv.Itoa(vmm.Process.Pid)), 0o644) == nil {
			made++
		}
	}
	if made == 0 {
		if os.Getenv("IMP_REQUIRE_ALL") != "" {
			t.Fatal("no cgroup hierarchy here takes a process")
		}
		t.Skip("no cgroup hierarchy here takes a process")
	}
	found, err := Clean(t.Context(), area)
	if err != nil {
		t.Fatal(err)
	}
	<-gone
	if len(found) != 1 || !strings.Contains(found[0], strconv.Itoa(vmm.Process.Pid)) {
		t.Errorf("Clean found %v, want process %d", found, vmm.Process.Pid)
	}
	if left := area.Cgroups(); len(left) > 0 {
		t.Errorf("cgroups are left: %v", left)
	}
	if left := area.Mounts(); len(left) > 0 {
		t.Errorf("mounts are left: %v", left)
	}
	if _, err := os.Stat(area.Dirs[0]); !os.IsNotExist(err) {
		t.Errorf("the folder is left: %v", err)
	}
	if found, err = Clean(t.Context(), area); err != nil || len(found) > 0 {
		t.Errorf("a second Clean found %v, %v", found, err)
	}
}

func TestOnlyImpsProgramsWithOurFilesAreOurs(t *testing.T) {
	dir := t.TempDir()
	area := Area{Cgroup: "/imp-sweep-test-none", Dirs: []string{dir}}
	for _, c := range []struct {
		name, program, file string
		ours                bool
	}{
		{"a VMM with a disk of ours is ours", "qemu-system-x86_64", filepath.Join(dir, "disk"), true},
		{"a VMM of somebody else is not", "qemu-system-x86_64", "/var/lib/other/disk", false},
		{"a VMM of a folder whose name goes on is not", "qemu-system-x86_64", dir + "-other/disk", false},
		{"an editor with a log of ours is not", "vim", filepath.Join(dir, "log"), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			cmd := program(t, c.program, "/bin/cat", "-", c.file) // reads its standard input until we close it
			in, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			start(t, cmd)
			defer in.Close()
			got := slices.ContainsFunc(area.Processes(), func(p Process) bool { return p.PID == cmd.Process.Pid })
			if got != c.ours {
				t.Errorf("found is %v, want %v", got, c.ours)
			}
		})
	}
}

func TestTheRootCgroupIsNobodys(t *testing.T) {
	for _, root := range []string{"", "/", "//"} {
		if got := (Area{Cgroup: root}).Cgroups(); len(got) > 0 {
			t.Errorf("an area with cgroup %q owns %v", root, got)
		}
	}
}

func TestAProcessIsFoundByAUniqueNameWhereverItIs(t *testing.T) {
	const name = "0b0f1b3a-5f0e-4c43-9f6c-b7e7a2f8a001"
	cmd := program(t, "qemu-system-x86_64", "/bin/cat", "-", "/nowhere/"+name)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	gone := start(t, cmd)
	if found := ProcessesNaming(name); len(found) != 1 || found[0].PID != cmd.Process.Pid {
		t.Errorf("found %v, want process %d", found, cmd.Process.Pid)
	}
	in.Close()
	<-gone
	if found := ProcessesNaming(name); len(found) > 0 {
		t.Errorf("found %v after its end", found)
	}
}

func TestNetworkNamespacesOfTheAreaGoAndOthersStay(t *testing.T) {
	needsRoot(t)
	prefix := fmt.Sprintf("impsweep-%d", os.Getpid())
	for _, name := range []string{prefix + "-a-one", prefix + "-a-two", prefix + "-b-one"} {
		if _, err := fabric.Create(name); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { _, _ = fabric.Remove(prefix + "-") })
	found, err := Clean(t.Context(), Area{Namespaces: []string{prefix + "-a-", prefix + "-none-"}})
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"network namespace " + prefix + "-a-one", "network namespace " + prefix + "-a-two"}; !slices.Equal(found, want) {
		t.Errorf("found %v, want %v", found, want)
	}
	if left, err := fabric.Namespaces(prefix); err != nil || len(left) != 1 || left[0].Name != prefix+"-b-one" {
		t.Errorf("left are %v (%v), want the one of another area", left, err)
	}
}
