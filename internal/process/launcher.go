package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Options of a Launcher.
type Options struct {
	// Exe is the binary whose main calls ChildMain; "" is the running one.
	Exe string
}

// New gives the Launcher of this host.
func New(o Options) Launcher { return &launcher{exe: o.Exe} }

type launcher struct{ exe string }

// umask of launched programs: what they create is theirs alone.
const privateUmask = 0o077

func (l *launcher) Start(ctx context.Context, o Order) (Process, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("launching %s: %w", o.Path, err)
	}
	child, err := prepareChild(l.exe, childOrder{Order: o, Umask: privateUmask})
	if err != nil {
		return nil, err
	}
	defer child.close()
	child.cmd.Stdout, child.cmd.Stderr = fileOrNil(o.Stdout), fileOrNil(o.Stderr)
	child.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := child.start(); err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = child.cmd.Process.Kill() })
	err = child.report()
	if !stop() {
		err = errors.Join(ctx.Err(), err)
	}
	var p *launched
	if err == nil {
		p, err = watchChild(child)
	}
	if err != nil {
		_ = child.cmd.Process.Kill()
		_ = child.cmd.Wait()
		return nil, fmt.Errorf("launching %s: %w", o.Path, err)
	}
	return p, nil
}

// fileOrNil keeps a nil *os.File from becoming a non-nil io.Writer.
func fileOrNil(f *os.File) interface{ Write([]byte) (int, error) } {
	if f == nil {
		return nil
	}
	return f
}

func (l *launcher) Find(id Identity) (Process, error) {
	boot, err := BootID()
	if err != nil {
		return nil, err
	}
	if id.BootID != boot || id.PID <= 0 {
		return nil, ErrGone
	}
	// The pidfd first: the process it refers to is the one whose start time is read next, or the read finds none.
	fd, err := openPidfd(id.PID)
	if err != nil {
		return nil, err
	}
	found, err := readStat(id.PID)
	if err == nil && (found.startTime != id.StartTime || found.dead()) {
		err = ErrGone
	}
	if err == nil {
		err = fd.signal(0) // ended between the two: the number may be another's by now
	}
	if err != nil {
		_ = fd.close()
		return nil, err
	}
	p := &adopted{id: id, fd: fd, done: make(chan struct{})}
	go func() {
		if fd.wait() == nil {
			close(p.done)
		}
	}()
	return p, nil
}

// adopted is a process found again; somebody else is its parent.
type adopted struct {
	id   Identity
	fd   *pidfd
	done chan struct{}
}

func (p *adopted) Identity() Identity                     { return p.id }
func (p *adopted) Done() <-chan struct{}                  { return p.done }
func (p *adopted) ExitStatus() (syscall.WaitStatus, bool) { return 0, false }
func (p *adopted) Close() error                           { return p.fd.close() }

func (p *adopted) Signal(sig syscall.Signal) error {
	select {
	case <-p.done:
		return ErrGone
	default:
		return p.fd.signal(sig)
	}
}

// launched is a child of this process. Whatever the caller does, it is waited for, so that no zombie stays.
type launched struct {
	id   Identity
	fd   *pidfd
	done chan struct{}

	mu     sync.Mutex
	status syscall.WaitStatus
}

func watchChild(child *pendingChild) (*launched, error) {
	pid := child.cmd.Process.Pid
	id, _, err := identify(pid) // a zombie will do: it is ours, and ended as quickly as it was started
	if err != nil {
		return nil, fmt.Errorf("identifying process: %w", err)
	}
	fd, err := openPidfd(pid)
	if err != nil {
		return nil, err
	}
	p := &launched{id: id, fd: fd, done: make(chan struct{})}
	go func() {
		// Waiting on the pidfd parks a goroutine; Wait alone would hold a thread for the program's whole life.
		_ = fd.wait()
		_ = child.cmd.Wait()
		p.mu.Lock()
		p.status, _ = child.cmd.ProcessState.Sys().(syscall.WaitStatus)
		p.mu.Unlock()
		close(p.done)
		_ = fd.close()
	}()
	return p, nil
}

func (p *launched) Identity() Identity    { return p.id }
func (p *launched) Done() <-chan struct{} { return p.done }

// Close keeps the pidfd: the wait for the child needs it.
func (p *launched) Close() error { return nil }

func (p *launched) ExitStatus() (syscall.WaitStatus, bool) {
	select {
	case <-p.done:
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.status, true
	default:
		return 0, false
	}
}

func (p *launched) Signal(sig syscall.Signal) error {
	select {
	case <-p.done:
		return ErrGone
	default:
	}
	err := p.fd.signal(sig)
	if errors.Is(err, os.ErrClosed) {
		return ErrGone
	}
	return err
}

// KillWait sends SIGKILL and waits for the end. A process that is gone is success.
func KillWait(ctx context.Context, p Process) error {
	if err := p.Signal(unix.SIGKILL); err != nil && !errors.Is(err, ErrGone) {
		return fmt.Errorf("killing process %d: %w", p.Identity().PID, err)
	}
	select {
	case <-p.Done():
		return nil
	case <-ctx.Done():
		return fmt.Errorf("waiting for the end of process %d: %w", p.Identity().PID, ctx.Err())
	}
}
