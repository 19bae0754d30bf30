// Package process launches one program so that it outlives its launcher, and finds it again afterwards. It is the only
// package that starts programs.
//
// A launch is a re-exec of the running binary (ChildCommand) that reads its Order from an inherited descriptor, joins the
// host's namespaces, enters the program's cgroup, drops its uid, capabilities and limits, and execs:
//
//	imp-runtime ──fork──► launcher child ──setns, cgroup, setuid, caps, rlimits──► exec program (own session, files as stdio)
//
// A program is known by Identity: pid AND start time AND boot id. A number alone is never trusted; from the moment of
// finding on a pidfd is held, so that a signal can reach no stranger.
package process

import (
	"context"
	"errors"
	"os"
	"syscall"
)

// ErrGone says that the process of an Identity no longer exists (or the host has been booted since).
var ErrGone = errors.New("process is gone")

// Identity of a process, as kept in a record.
type Identity struct {
	PID int `json:"pid"`
	// StartTime is field 22 of /proc/PID/stat (proc(5)): clock ticks after boot.
	StartTime uint64 `json:"startTime"`
	// BootID is /proc/sys/kernel/random/boot_id when the process was started.
	BootID string `json:"bootID"`
}

// Order is everything the launcher child does before it execs. Paths are the host's.
type Order struct {
	Path string   `json:"path"`
	Args []string `json:"args"` // without argv[0]
	Env  []string `json:"env"`  // complete
	Dir  string   `json:"dir"`
	UID  int      `json:"uid"`
	GID  int      `json:"gid"`
	// Groups are supplementary groups, for /dev/kvm for example.
	Groups []int `json:"groups,omitempty"`
	// Capabilities (capabilities(7), by number) are what a program that is started as root keeps, for one that drops them itself: a jailer.
	// Without any, none are left.
	Capabilities []int `json:"capabilities,omitempty"`
	// NetNS is a network namespace that is joined after those of Namespaces; nil joins none.
	NetNS *os.File `json:"-"`
	// CgroupProcs are cgroup.procs (or tasks) files to enter before anything else, one per hierarchy.
	CgroupProcs []string `json:"cgroupProcs,omitempty"`
	// Namespaces is a /proc/PID/ns directory whose mnt, net, uts, ipc and cgroup namespaces are joined; empty joins none.
	Namespaces string `json:"namespaces,omitempty"`
	// OpenFiles is RLIMIT_NOFILE, MaxFileBytes RLIMIT_FSIZE; 0 leaves them alone. RLIMIT_CORE is always 0.
	OpenFiles    uint64 `json:"openFiles,omitempty"`
	MaxFileBytes uint64 `json:"maxFileBytes,omitempty"`
	// OOMScoreAdj is written when not 0; a refusal is ignored (lowering needs CAP_SYS_RESOURCE).
	OOMScoreAdj int `json:"oomScoreAdj,omitempty"`
	// Files become descriptors 3, 4, … of the program. Stdout and Stderr are files, never pipes: a pipe dies with its reader.
	Files          []*os.File `json:"-"`
	Stdout, Stderr *os.File   `json:"-"`
}

// Process is a program that was launched or found again.
type Process interface {
	Identity() Identity
	// Done is closed when the process has ended, whoever its parent is.
	Done() <-chan struct{}
	// ExitStatus is the wait status for a child of this very process, ok only then and after Done; an adopted process has none.
	ExitStatus() (status syscall.WaitStatus, ok bool)
	// Signal sends by pidfd; ErrGone after the end.
	Signal(syscall.Signal) error
	// Close lets go of the pidfd; the process goes on.
	Close() error
}

// Launcher starts programs and finds them again.
type Launcher interface {
	// Start returns once the program has been exec'ed. Any failure before that is an error that names the step ("joining
	// net namespace", "executing /usr/bin/qemu: no such file"), and no process is left behind.
	Start(ctx context.Context, o Order) (Process, error)
	// Find gives the process of id, or ErrGone. It never matches a process with another start time or of another boot.
	Find(id Identity) (Process, error)
}
