package process

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// ChildMain is the whole life of a launcher child: it reads its order, obeys it step by step, and execs. It never returns.
//
// Everything happens on one locked thread. Namespaces, credentials and capabilities belong to threads, and execve makes
// the calling thread's those of the whole program; the others end there.
func ChildMain() {
	runtime.LockOSThread()
	files := 0
	if len(os.Args) > 2 {
		files, _ = strconv.Atoi(os.Args[2])
	}
	status := os.NewFile(uintptr(4+files), "status")
	unix.CloseOnExec(4 + files)
	err := obey(files, status)
	report := childReport{Step: "launching", Err: err.Error()}
	if se := (*stepError)(nil); errors.As(err, &se) {
		report = childReport{Step: se.step, Err: se.text, Errno: int(se.errno)}
	}
	_ = json.NewEncoder(status).Encode(report)
	os.Exit(125)
}

// step names a failure by what was being done.
func step(name string, err error) error {
	if err == nil {
		return nil
	}
	se := &stepError{step: name, text: err.Error()}
	_ = errors.As(err, &se.errno)
	return se
}

// obey returns only when a step failed.
func obey(files int, status io.Writer) error {
	orders := os.NewFile(uintptr(3+files), "order")
	var o childOrder
	if err := json.NewDecoder(orders).Decode(&o); err != nil {
		return step("reading order", err)
	}
	_ = orders.Close()
	// A thread that shares its file system attributes may not join a mount namespace (setns(2)).
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return step("leaving shared file system attributes", err)
	}
	if err := enter(o); err != nil {
		return err
	}
	if err := limit(o); err != nil {
		return err
	}
	if o.Dir == "" {
		o.Dir = "/"
	}
	if err := unix.Chdir(o.Dir); err != nil {
		return step("entering directory "+o.Dir, err)
	}
	unix.Umask(o.Umask)
	if err := drop(o.Order); err != nil {
		return err
	}
	if o.KeepParentDeathSignal {
		if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
			return step("setting parent death signal", err)
		}
	}
	// All but stdio and the program's own files, the status descriptor too, end with the exec.
	if err := unix.CloseRange(uint(3+files), ^uint(0)>>1&0x7fffffff, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return step("closing descriptors", err)
	}
	if err := json.NewEncoder(status).Encode(childReport{Executing: true}); err != nil {
		return step("reporting", err)
	}
	return step("executing "+o.Path, syscall.Exec(o.Path, append([]string{o.Path}, o.Args...), o.Env))
}

// enter joins cgroups and namespaces. The cgroup namespace comes first: with nsdelegate a process may move only
// between groups that its own cgroup namespace shows. The files of the groups are named as the launching process sees them,
// so the mount namespace comes last.
func enter(o childOrder) error {
	join := func(kind string) error {
		if o.Namespaces == "" {
			return nil
		}
		f, err := os.Open(filepath.Join(o.Namespaces, kind))
		if kind == "cgroup" && errors.Is(err, os.ErrNotExist) {
			return nil // kernels before 4.6
		}
		if err != nil {
			return step("joining "+kind+" namespace", err)
		}
		defer f.Close()
		return step("joining "+kind+" namespace", unix.Setns(int(f.Fd()), 0))
	}
	if err := join("cgroup"); err != nil {
		return err
	}
	for _, path := range o.CgroupProcs {
		if err := os.WriteFile(path, []byte("0"), 0); err != nil {
			return step("entering cgroup", err)
		}
	}
	if o.OOMScoreAdj != 0 {
		_ = os.WriteFile("/proc/self/oom_score_adj", []byte(strconv.Itoa(o.OOMScoreAdj)), 0)
	}
	for _, kind := range []string{"ipc", "uts", "net", "mnt"} {
		if err := join(kind); err != nil {
			return err
		}
	}
	if o.NetNSFD == 0 {
		return nil
	}
	return step("joining network namespace", unix.Setns(o.NetNSFD, unix.CLONE_NEWNET))
}

func limit(o childOrder) error {
	set := func(name string, which int, value uint64) error {
		// syscall and not unix: package syscall otherwise puts its own saved RLIMIT_NOFILE back at the exec.
		return step("limiting "+name, syscall.Setrlimit(which, &syscall.Rlimit{Cur: value, Max: value}))
	}
	if err := set("core dumps", unix.RLIMIT_CORE, 0); err != nil {
		return err
	}
	if o.OpenFiles != 0 {
		if err := set("open files", unix.RLIMIT_NOFILE, o.OpenFiles); err != nil {
			return err
		}
	}
	if o.MaxFileBytes != 0 {
		if err := set("file size", unix.RLIMIT_FSIZE, o.MaxFileBytes); err != nil {
			return err
		}
	}
	if o.MaxAddressSpace != 0 {
		return set("address space", unix.RLIMIT_AS, o.MaxAddressSpace)
	}
	return nil
}

// drop gives up every privilege that the order does not name: new ones by exec, the bounding set, groups, ids, capabilities. Without root
// there is nothing to give up, and only the own ids can be kept.
func drop(o Order) error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return step("forbidding new privileges", err)
	}
	if os.Geteuid() != 0 {
		if o.UID != os.Geteuid() || o.GID != os.Getegid() {
			return step("changing user", fmt.Errorf("to %d:%d: needs root", o.UID, o.GID))
		}
		return nil
	}
	_ = unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
	for c := uintptr(0); c <= 63; c++ {
		if slices.Contains(o.Capabilities, int(c)) {
			continue
		}
		err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		if errors.Is(err, unix.EINVAL) {
			break // past the kernel's last capability
		}
		if err != nil {
			return step("dropping capability bounding set", err)
		}
	}
	groups := make([]int, 0, len(o.Groups)) // never nil: an empty list must be set, too
	groups = append(groups, o.Groups...)
	if err := syscall.Setgroups(groups); err != nil {
		return step("setting groups", err)
	}
	if err := syscall.Setresgid(o.GID, o.GID, o.GID); err != nil {
		return step("setting group", err)
	}
	if err := syscall.Setresuid(o.UID, o.UID, o.UID); err != nil {
		return step("setting user", err)
	}
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var kept [2]unix.CapUserData
	for _, c := range o.Capabilities {
		kept[c/32].Permitted |= 1 << (c % 32)
		kept[c/32].Effective |= 1 << (c % 32)
	}
	return step("dropping capabilities", unix.Capset(&head, &kept[0]))
}
