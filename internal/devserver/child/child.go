// Package child runs the processes a development server is made of, so that none of them outlives it: each is its own
// process group, is stopped in reverse order of start, and is killed by the kernel when the server itself dies, even by SIGKILL.
package child

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// Spec says how one process is started.
type Spec struct {
	// Name is what people call it in messages; it is also the stem of its log file.
	Name string
	// Path is the program; Args are its arguments without the program's name.
	Path string
	Args []string
	// Env is the whole environment; nothing of the caller's is inherited.
	Env []string
	// Dir is the working directory, "" for the root directory.
	Dir string
	// LogFile receives stdout and stderr, appended. Its folder must exist.
	LogFile string
	// UID and GID, when not 0, are whom the process runs as, without supplementary groups.
	UID, GID uint32
	// Grace is how long Stop waits after SIGTERM before SIGKILL; 0 is 10 s.
	Grace time.Duration
}

const defaultGrace = 10 * time.Second

// Group starts processes and owns them until Close.
//
// The kernel's parent-death signal is tied to the thread that forked, not to the process. So every fork of a Group
// happens on one locked thread that lives until Close, and never on a thread the Go scheduler may retire.
type Group struct {
	orders chan func()

	mu       sync.Mutex
	children []*Process
	closed   bool
}

// NewGroup makes an empty group. Close frees it.
func NewGroup() *Group {
	g := &Group{orders: make(chan func())}
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
		for order := range g.orders {
			order()
		}
	}()
	return g
}

// Process is one started process. It is reaped by its own goroutine.
type Process struct {
	Name    string
	LogFile string

	cmd   *exec.Cmd
	grace time.Duration
	done  chan struct{}
	err   error // set before done is closed
}

// ErrClosed is what Start gives after Close.
var ErrClosed = errors.New("the group is closed")

// Start runs one process.
func (g *Group) Start(spec Spec) (*Process, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil, ErrClosed
	}
	log, err := os.OpenFile(spec.LogFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening log of %s: %w", spec.Name, err)
	}
	defer log.Close()
	cmd := exec.Command(spec.Path, spec.Args...)
	cmd.Env = spec.Env
	if cmd.Env == nil {
		cmd.Env = []string{}
	}
	cmd.Dir = spec.Dir
	if cmd.Dir == "" {
		cmd.Dir = "/"
	}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if spec.UID != 0 || spec.GID != 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: spec.UID, Gid: spec.GID}
	}
	started := make(chan error)
	g.orders <- func() { started <- cmd.Start() }
	if err := <-started; err != nil {
		return nil, fmt.Errorf("starting %s (%s): %w", spec.Name, spec.Path, err)
	}
	p := &Process{Name: spec.Name, LogFile: spec.LogFile, cmd: cmd, grace: spec.Grace, done: make(chan struct{})}
	if p.grace == 0 {
		p.grace = defaultGrace
	}
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	g.children = append(g.children, p)
	return p, nil
}

// Close stops every process, the last started first, and waits for each.
func (g *Group) Close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return
	}
	g.closed = true
	for i := len(g.children) - 1; i >= 0; i-- {
		g.children[i].Stop()
	}
	close(g.orders)
}

// PID is the process id, which is also the id of its process group.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Done is closed once the process has ended and was reaped.
func (p *Process) Done() <-chan struct{} { return p.done }

// Err says how the process ended: nil is exit code 0. It is valid after Done.
func (p *Process) Err() error {
	<-p.done
	return p.err
}

// Running says whether the process has not ended yet.
func (p *Process) Running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// Signal sends a signal to the process alone.
func (p *Process) Signal(sig os.Signal) error { return p.cmd.Process.Signal(sig) }

// Stop asks with SIGTERM, waits for the grace, then kills the whole process group. It returns once the process is gone.
func (p *Process) Stop() {
	if p.Running() {
		_ = p.cmd.Process.Signal(syscall.SIGTERM) // an error means it has ended meanwhile
		timer := time.NewTimer(p.grace)
		defer timer.Stop()
		select {
		case <-p.done:
		case <-timer.C:
		}
	}
	// The group may hold processes although its leader has ended; -pgid cannot hit a stranger while one of them lives.
	_ = syscall.Kill(-p.PID(), syscall.SIGKILL)
	<-p.done
}

// Await returns when the process ends: an error that carries the end of its log. A cancelled ctx gives ctx's error.
func (p *Process) Await(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-p.done:
		return p.Ended()
	}
}

// Ended describes the end of the process with the tail of its log, as an error a person can act on.
func (p *Process) Ended() error {
	how := "exit status 0"
	if err := p.Err(); err != nil {
		how = err.Error()
	}
	return fmt.Errorf("%s ended (%s); the end of %s:\n%s", p.Name, how, filepath.Clean(p.LogFile), Tail(p.LogFile, 2048))
}

// Tail gives the last whole lines of a file that fit into limit bytes; "" if it cannot be read.
func Tail(path string, limit int64) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return ""
	}
	start := max(0, info.Size()-limit)
	buf := make([]byte, info.Size()-start)
	n, _ := f.ReadAt(buf, start)
	buf = buf[:n]
	if start > 0 {
		for i, c := range buf {
			if c == '\n' {
				buf = buf[i+1:]
				break
			}
		}
	}
	return string(buf)
}
