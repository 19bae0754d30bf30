// Package sweep removes, or only finds, what the VMs of a development server leave on the machine when nobody was there
// to clean up: processes, cgroups, network namespaces, mounts and folders. It goes by places that belong to one server alone.
package sweep

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"imp.dev/imp/internal/devserver/fabric"
)

// Area is what belongs to one server.
type Area struct {
	// Cgroup is the path, from each hierarchy's root, of the subtree that holds its VMs.
	Cgroup string
	// Dirs are the folders that it alone uses.
	Dirs []string
	// Namespaces are what the names of its network namespaces begin with.
	Namespaces []string
}

// patience bounds the wait for killed processes to vanish; one in an uninterruptible read can take seconds.
const patience = 15 * time.Second

// Clean kills every process of the area and removes its cgroups, network namespaces, mounts and folders. It gives the processes
// and namespaces that it found.
func Clean(ctx context.Context, a Area) (found []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	seen := map[int]bool{}
	for {
		processes := a.Processes()
		for _, p := range processes {
			if !seen[p.PID] {
				seen[p.PID] = true
				found = append(found, p.String())
			}
			_ = syscall.Kill(p.PID, syscall.SIGKILL) // one that is gone is fine
		}
		a.thaw()
		left := a.removeCgroups()
		if len(processes) == 0 && left == nil {
			break
		}
		select {
		case <-ctx.Done():
			return found, errors.Join(fmt.Errorf("removing what VMs left: %w; these do not die: %v", ctx.Err(), processes), left)
		case <-ticker.C:
		}
	}
	namespaces, err := a.removeNamespaces()
	for _, name := range namespaces {
		found = append(found, "network namespace "+name)
	}
	if err != nil {
		return found, err // the folders stay: by them the next sweep knows whose the namespaces are
	}
	return found, errors.Join(a.unmount(), a.removeDirs())
}

// removeNamespaces takes away what is in them, too: links and rules.
func (a Area) removeNamespaces() (removed []string, err error) {
	for _, prefix := range a.Namespaces {
		names, failed := fabric.Remove(prefix)
		removed, err = append(removed, names...), errors.Join(err, failed)
	}
	return removed, err
}

// Process is one found.
type Process struct {
	PID     int
	Command string
}

func (p Process) String() string { return fmt.Sprintf("process %d (%s)", p.PID, p.Command) }

// Processes are those in the area's cgroups, and those of Imp's programs and VMMs whose arguments name a file in its folders.
func (a Area) Processes() []Process {
	pids := map[int]bool{}
	for _, dir := range a.Cgroups() {
		content, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		if err != nil {
			continue
		}
		for _, field := range strings.Fields(string(content)) {
			if pid, err := strconv.Atoi(field); err == nil && pid > 0 {
				pids[pid] = true
			}
		}
	}
	entries, _ := os.ReadDir("/proc")
	for _, entry := range entries {
		if pid, err := strconv.Atoi(entry.Name()); err == nil && a.owns(pid) {
			pids[pid] = true
		}
	}
	delete(pids, os.Getpid())
	var out []Process
	for pid := range pids {
		if state(pid) == "Z" {
			continue // dead; its parent reaps it
		}
		out = append(out, describe(pid))
	}
	slices.SortFunc(out, func(x, y Process) int { return x.PID - y.PID })
	return out
}

// ProcessesNaming are Imp's programs and VMMs, whosoever they are, that have name in an argument or in the path of a cgroup; for a
// name that is unique, such as a VM's UID.
func ProcessesNaming(name string) []Process {
	var named []Process
	entries, _ := os.ReadDir("/proc")
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil || pid == os.Getpid() || !isProgram(pid) || state(pid) == "Z" {
			continue
		}
		arguments, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		groups, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		if strings.Contains(string(arguments), name) || strings.Contains(string(groups), name) {
			named = append(named, describe(pid))
		}
	}
	return named
}

func describe(pid int) Process {
	command, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	return Process{PID: pid, Command: strings.TrimSpace(string(command))}
}

// isProgram says whether a process runs one of Imp's programs, imp-dev aside, or a VMM.
func isProgram(pid int) bool {
	exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		return false
	}
	program := filepath.Base(strings.TrimSuffix(exe, " (deleted)"))
	return strings.HasPrefix(program, "imp-") && program != "imp-dev" ||
		strings.HasPrefix(program, "qemu-system-") || program == "firecracker"
}

// owns looks at a process's program first, so that an editor with one of our files open is not ours.
func (a Area) owns(pid int) bool {
	if !isProgram(pid) {
		return false
	}
	arguments, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return false
	}
	for _, dir := range a.Dirs {
		if strings.Contains(string(arguments), dir+"/") {
			return true
		}
	}
	return false
}

// state is the one-letter state of a process, "" if it is gone.
func state(pid int) string {
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	_, rest, _ := strings.Cut(string(content), ") ") // the name before it may hold anything but ends with this
	return rest[:min(1, len(rest))]
}

// Cgroups are the area's folders in every mounted hierarchy, a parent before its children.
func (a Area) Cgroups() []string {
	if strings.Trim(a.Cgroup, "/") == "" {
		return nil // the root is nobody's alone
	}
	var dirs []string
	for _, m := range mounts() {
		if m.kind != "cgroup" && m.kind != "cgroup2" {
			continue
		}
		_ = filepath.WalkDir(filepath.Join(m.point, a.Cgroup), func(path string, entry fs.DirEntry, err error) error {
			if err == nil && entry.IsDir() {
				dirs = append(dirs, path)
			}
			return nil // what vanishes meanwhile is no error
		})
	}
	return dirs
}

// removeCgroups removes from the leaves up and gives the first that could not be, which is while a process is in it.
func (a Area) removeCgroups() (left error) {
	dirs := a.Cgroups()
	slices.Reverse(dirs)
	for _, dir := range dirs {
		if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) && left == nil {
			left = err
		}
	}
	return left
}

// thaw lets frozen processes run, because those of cgroup v1 do not die frozen.
func (a Area) thaw() {
	for _, dir := range a.Cgroups() {
		for file, value := range map[string]string{"freezer.state": "THAWED", "cgroup.freeze": "0"} {
			if f, err := os.OpenFile(filepath.Join(dir, file), os.O_WRONLY, 0); err == nil {
				_, _ = f.WriteString(value)
				_ = f.Close()
			}
		}
	}
}

// Mounts are the mount points in the area's folders.
func (a Area) Mounts() []string {
	var points []string
	for _, m := range mounts() {
		for _, dir := range a.Dirs {
			if m.point == dir || strings.HasPrefix(m.point, dir+"/") {
				points = append(points, m.point)
			}
		}
	}
	return points
}

// unmount goes backwards, since what was mounted later may lie on what was mounted earlier.
func (a Area) unmount() error {
	points := a.Mounts()
	slices.Reverse(points)
	for _, point := range points {
		if err := syscall.Unmount(point, syscall.MNT_DETACH); err != nil && !errors.Is(err, syscall.EINVAL) {
			return fmt.Errorf("unmounting %s: %w", point, err)
		}
	}
	return nil
}

// removeDirs refuses while something is mounted there: what lies on another file system is not ours to remove.
func (a Area) removeDirs() error {
	if left := a.Mounts(); len(left) > 0 {
		return fmt.Errorf("removing folders: still mounted: %v", left)
	}
	for _, dir := range a.Dirs {
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("removing folders: %w", err)
		}
	}
	return nil
}

type mount struct{ point, kind string }

// mounts reads /proc/self/mountinfo: field 5 is the mount point, the type follows a lone dash (proc(5)).
func mounts() []mount {
	content, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil
	}
	unescape := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	var all []mount
	for line := range strings.Lines(string(content)) {
		before, after, ok := strings.Cut(line, " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if ok && len(left) >= 5 && len(right) >= 1 {
			all = append(all, mount{point: unescape.Replace(left[4]), kind: right[0]})
		}
	}
	return all
}
