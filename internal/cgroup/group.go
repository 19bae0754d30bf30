package cgroup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Group is one run's group in every hierarchy that is used.
type Group struct {
	tree *Tree
	name string
}

// Name of the group within its Tree.
func (g *Group) Name() string { return g.name }

func (g *Group) dir(h hierarchy) string { return filepath.Join(h.mount, g.tree.base, g.name) }

// file gives the path of a controller's file, ok if the group has it.
func (g *Group) file(controller, v1, v2 string) (path string, isV2, ok bool) {
	for _, h := range g.tree.layout.hierarchies {
		if !h.has(controller) {
			continue
		}
		name := v1
		if h.v2 {
			name = v2
		}
		if name == "" { // this version has no such file
			return "", false, false
		}
		path := filepath.Join(g.dir(h), name)
		if _, err := os.Stat(path); err == nil {
			return path, h.v2, true
		}
	}
	return "", false, false
}

func (g *Group) limit(l Limits) error {
	set := func(controller, v1, v2, value string) error {
		path, _, ok := g.file(controller, v1, v2)
		if !ok {
			return nil
		}
		return os.WriteFile(path, []byte(value), 0)
	}
	var errs []error
	if l.MemoryBytes > 0 {
		errs = append(errs, set(controllerMemory, "memory.limit_in_bytes", "memory.max", strconv.FormatInt(l.MemoryBytes, 10)))
		// Guest memory on swap is slow and outlives the guest; both files exist only where swap accounting is on.
		errs = append(errs, set(controllerMemory, "memory.memsw.limit_in_bytes", "", strconv.FormatInt(l.MemoryBytes, 10)))
		if path, isV2, ok := g.file(controllerMemory, "memory.limit_in_bytes", "memory.swap.max"); ok && isV2 {
			errs = append(errs, os.WriteFile(path, []byte("0"), 0))
		}
		if path, isV2, ok := g.file(controllerMemory, "memory.limit_in_bytes", "memory.oom.group"); ok && isV2 {
			errs = append(errs, os.WriteFile(path, []byte("1"), 0))
		}
	}
	if l.Pids > 0 {
		errs = append(errs, set(controllerPids, "pids.max", "pids.max", strconv.FormatInt(l.Pids, 10)))
	}
	if l.MilliCPU > 0 {
		const period = 100_000 // µs
		quota := strconv.FormatInt(l.MilliCPU*period/1000, 10)
		if path, isV2, ok := g.file(controllerCPU, "cpu.cfs_quota_us", "cpu.max"); ok && isV2 {
			errs = append(errs, os.WriteFile(path, fmt.Appendf(nil, "%s %d", quota, period), 0))
		} else if ok {
			errs = append(errs, os.WriteFile(path, []byte(quota), 0))
		}
	}
	return errors.Join(errs...)
}

// Unlimited lists the controllers whose limits are not in force on this group, though it exists.
func (g *Group) Unlimited() []string {
	var missing []string
	for _, c := range []struct{ controller, v1, v2 string }{
		{controllerMemory, "memory.limit_in_bytes", "memory.max"},
		{controllerPids, "pids.max", "pids.max"},
		{controllerCPU, "cpu.cfs_quota_us", "cpu.max"},
	} {
		if _, _, ok := g.file(c.controller, c.v1, c.v2); !ok {
			missing = append(missing, c.controller)
		}
	}
	return missing
}

// ProcsFiles are the files to write a pid to in order to enter the group, one per hierarchy.
func (g *Group) ProcsFiles() []string {
	files := make([]string, 0, len(g.tree.layout.hierarchies))
	for _, h := range g.tree.layout.hierarchies {
		files = append(files, filepath.Join(g.dir(h), "cgroup.procs"))
	}
	return files
}

// Exists says whether the group is there in any hierarchy.
func (g *Group) Exists() bool {
	for _, h := range g.tree.layout.hierarchies {
		if _, err := os.Stat(g.dir(h)); err == nil {
			return true
		}
	}
	return false
}

// Procs gives the pids in the group, in any hierarchy, sorted; none if there is no group.
func (g *Group) Procs() ([]int, error) {
	var pids []int
	for _, path := range g.ProcsFiles() {
		b, err := os.ReadFile(path)
		if isAbsent(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("listing processes of cgroup %s: %w", g.name, err)
		}
		for _, f := range bytes.Fields(b) {
			if pid, err := strconv.Atoi(string(f)); err == nil && pid > 0 {
				pids = append(pids, pid)
			}
		}
	}
	slices.Sort(pids)
	return slices.Compact(pids), nil
}

// isAbsent: a group removed between opening and reading its file gives ENODEV.
func isAbsent(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENODEV)
}

const pause = 10 * time.Millisecond

// Kill kills everything in the group and waits until it is empty or ctx ends.
//
// A pid read from the list could be recycled before its signal; the list is of this group only, so before each signal by
// number the membership is still true but for that instant, and with a v2 hierarchy the kernel does it all in one step.
func (g *Group) Kill(ctx context.Context) error {
	for {
		pids, err := g.Procs()
		if err != nil {
			return err
		}
		if len(pids) == 0 {
			return nil
		}
		if !g.killAtOnce() {
			for _, pid := range pids {
				g.killOne(pid)
			}
		}
		if err := wait(ctx); err != nil {
			return fmt.Errorf("waiting for the end of %d processes in cgroup %s: %w", len(pids), g.name, err)
		}
	}
}

// killAtOnce uses cgroup.kill (Linux 5.14), provided that the v2 group holds everything the others hold.
func (g *Group) killAtOnce() bool {
	if g.tree.layout.version != V2 {
		return false
	}
	for _, h := range g.tree.layout.hierarchies {
		if h.v2 {
			return os.WriteFile(filepath.Join(g.dir(h), "cgroup.kill"), []byte("1"), 0) == nil
		}
	}
	return false
}

// killOne takes a pidfd first and then looks whether the pid is still in the group, so that the signal can hit no stranger.
func (g *Group) killOne(pid int) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return
	}
	defer func() { _ = unix.Close(fd) }()
	if now, err := g.Procs(); err == nil && slices.Contains(now, pid) {
		_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
	}
}

// wait is the pause between two looks; the kernel offers no event that all versions have.
func wait(ctx context.Context) error {
	t := time.NewTimer(pause)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// OOMKills is how many processes of the group the kernel has killed for want of memory. No group or no memory controller: 0.
func (g *Group) OOMKills() (int64, error) {
	path, _, ok := g.file(controllerMemory, "memory.oom_control", "memory.events")
	if !ok {
		return 0, nil
	}
	n, err := readKey(path, "oom_kill")
	if isAbsent(err) {
		return 0, nil // v1 before Linux 4.13 does not count
	}
	if err != nil {
		return 0, fmt.Errorf("reading OOM kills of cgroup %s: %w", g.name, err)
	}
	return n, nil
}

// Usage of a group.
type Usage struct {
	MemoryBytes int64
	CPUNanos    int64
}

// Usage gives the group's figures; those of a missing controller are 0.
func (g *Group) Usage() (Usage, error) {
	var u Usage
	var errs []error
	if path, _, ok := g.file(controllerMemory, "memory.usage_in_bytes", "memory.current"); ok {
		n, err := readInt(path)
		u.MemoryBytes = n
		errs = append(errs, err)
	}
	if path, _, ok := g.file(controllerCPUAcct, "cpuacct.usage", ""); ok {
		n, err := readInt(path)
		u.CPUNanos = n
		errs = append(errs, err)
	} else if path, isV2, ok := g.file(controllerCPU, "", "cpu.stat"); ok && isV2 {
		n, err := readKey(path, "usage_usec")
		u.CPUNanos = n * 1000
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return u, fmt.Errorf("reading usage of cgroup %s: %w", g.name, err)
	}
	return u, nil
}

// Remove removes the group, waiting until ctx ends for processes that are still leaving it. It kills nothing. No group is
// success.
func (g *Group) Remove(ctx context.Context) error {
	for {
		err := g.removeDirs()
		if err == nil {
			return nil
		}
		if !errors.Is(err, syscall.EBUSY) {
			return fmt.Errorf("removing cgroup %s: %w", g.name, err)
		}
		if ended := wait(ctx); ended != nil {
			return fmt.Errorf("removing cgroup %s: %w", g.name, errors.Join(ended, err))
		}
	}
}

func (g *Group) removeDirs() error {
	var errs []error
	for _, h := range g.tree.layout.hierarchies {
		// rmdir(2) itself: the kernel's files in the directory do not count and cannot be unlinked.
		if err := unix.Rmdir(g.dir(h)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
			continue
		}
		_ = g.tree.removeEmpty(h) // refused while the instance has other runs
	}
	return errors.Join(errs...)
}
