package process

import (
	"context"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Sandbox is a program that reads what strangers wrote, such as image layers: it gets another uid, no capabilities, no
// new privileges, no network, an IPC namespace of its own, a memory limit, and exactly the descriptors it is given.
type Sandbox struct {
	Cmd
	// Exe is the binary whose main calls ChildMain; "" is the running one.
	Exe string
	// UID and GID must not be 0.
	UID, GID int
	// CgroupProcs are the cgroup.procs files of the group that limits it (cgroup.Group.ProcsFiles).
	CgroupProcs []string
	// MaxFileBytes, OpenFiles and MaxAddressSpace are RLIMIT_FSIZE, RLIMIT_NOFILE and RLIMIT_AS; 0 leaves them alone.
	MaxFileBytes, OpenFiles, MaxAddressSpace uint64
}

// RunSandboxed runs s to its end, as Run does. An error before the program ran names the step. It needs root. Path must
// be absolute; "/proc/self/exe" is the launching binary itself.
func RunSandboxed(ctx context.Context, s Sandbox) (Result, error) {
	if s.UID <= 0 || s.GID <= 0 {
		return Result{}, fmt.Errorf("running %s sandboxed: uid %d and gid %d must not be root's", s.Path, s.UID, s.GID)
	}
	if os.Geteuid() != 0 {
		return Result{}, fmt.Errorf("running %s sandboxed: %w: needs root", s.Path, os.ErrPermission)
	}
	env := s.Env
	if env == nil {
		env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"}
	}
	child, err := prepareChild(s.Exe, childOrder{
		Order: Order{Path: s.Path, Args: s.Args, Env: env, Dir: s.Dir, UID: s.UID, GID: s.GID, CgroupProcs: s.CgroupProcs,
			OpenFiles: s.OpenFiles, MaxFileBytes: s.MaxFileBytes, Files: s.Files, OOMScoreAdj: 500},
		Umask: privateUmask, MaxAddressSpace: s.MaxAddressSpace, KeepParentDeathSignal: true,
	})
	if err != nil {
		return Result{}, err
	}
	defer child.close()
	cmd := child.cmd
	cmd.Stdin = s.Stdin
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWIPC}
	var launch error
	r, err := awaitSandboxed(ctx, child, s.Cmd, &launch)
	if launch != nil && ctx.Err() == nil {
		return r, fmt.Errorf("running %s sandboxed: %w", s.Path, launch)
	}
	return r, err
}

func awaitSandboxed(ctx context.Context, child *pendingChild, c Cmd, launch *error) (Result, error) {
	// exec.Cmd made by hand has no context of its own: the kill is arranged here.
	var stop func() bool
	r, err := await(ctx, child.cmd, c, func() error {
		cancel := child.cmd.Cancel
		child.cmd.Cancel = nil // allowed only together with exec.CommandContext
		if err := child.start(); err != nil {
			return err
		}
		stop = context.AfterFunc(ctx, func() { _ = cancel() })
		*launch = child.report()
		return nil
	})
	if stop != nil {
		stop()
	}
	return r, err
}
