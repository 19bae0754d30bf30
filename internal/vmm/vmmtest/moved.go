package vmmtest

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"imp.dev/imp/internal/vmm"
)

// destroyMoved: an administrator, or a container runtime that clears up, may move processes from one cgroup to another.
func (s suite) destroyMoved(t *testing.T) {
	d, c := s.NewDriver(t), s.Config(t, RunsOn)
	i := s.start(t, d, c)
	pid := i.PID()
	if !takenOut(t, pid) {
		t.Skip("the VMM is in no cgroup of its own: needs root and cgroups")
	}
	moved := false
	for _, f := range s.found(t, d, c) {
		moved = moved || f.Kind == vmm.FoundProcess && strings.HasPrefix(f.Name, "pid "+strconv.Itoa(pid)+", outside")
	}
	if !moved {
		t.Errorf("the process %d is not found outside its cgroup: %v", pid, s.found(t, d, c))
	}
	if err := i.Close(); err != nil {
		t.Errorf("closing: %v", err)
	}
	if err := s.NewDriver(t).Destroy(s.context(t), c, vmm.Handle{}); err != nil {
		t.Errorf("destroying by mark: %v", err)
	}
	s.await(t, "the process has ended", func() bool { return !alive(pid) })
	s.nothingLeft(t, d, c, pid)
}

// takenOut moves a process into the topmost group of each hierarchy that it is in with a group of ours. It says whether there was one.
func takenOut(t *testing.T, pid int) bool {
	t.Helper()
	groups, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	any := false
	for _, line := range strings.Split(strings.TrimSpace(string(groups)), "\n") {
		fields := strings.SplitN(line, ":", 3) // cgroups(7): ID:controllers:path
		if len(fields) != 3 || !strings.Contains(fields[2], "/imp/") {
			continue
		}
		top := filepath.Join("/sys/fs/cgroup", fields[1]) // v2 mounts have no controllers in their name
		if _, err := os.Stat(filepath.Join(top, "cgroup.procs")); err != nil && fields[1] == "" {
			top = "/sys/fs/cgroup/unified"
		}
		if err := os.WriteFile(filepath.Join(top, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0); err != nil {
			t.Fatalf("moving the VMM out of its cgroup: %v", err)
		}
		any = true
	}
	return any
}

// found gives what Runs tells of the run of c.
func (s suite) found(t *testing.T, d vmm.Driver, c vmm.Config) []vmm.Found {
	t.Helper()
	all, err := d.Runs(s.context(t))
	if err != nil {
		t.Errorf("listing runs: %v", err)
	}
	return slices.DeleteFunc(all, func(f vmm.Found) bool { return f.Cgroup != c.Cgroup })
}
