package guestinit

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	guestv1 "imp.dev/imp/api/guest/v1"
)

// workload is the one command of this boot and everything it starts.
type workload struct {
	start  guestv1.Start
	reaper *reaper
	output io.Writer

	drained chan struct{} // closed when its output is read to the end

	mu       sync.Mutex
	pid      int       // 0 before it runs
	ended    bool      // the main process was reaped
	stopped  bool      // the stop signal was asked for
	killed   bool      // the grace is over
	killTime time.Time // when it is
	kill     *time.Timer
}

func newWorkload(s guestv1.Start, r *reaper, output io.Writer) *workload {
	return &workload{start: s, reaper: r, output: output, drained: make(chan struct{})}
}

// run starts the main process and waits for its end.
func (w *workload) run() guestv1.Exit {
	before := oomKills()
	status, failure := w.launch()
	if failure != nil {
		return *failure
	}
	s := <-status
	w.mu.Lock()
	w.ended = true
	if w.kill != nil {
		w.kill.Stop()
	}
	w.mu.Unlock()
	exit := exitOf(s)
	if exit.Code == codeSignal+int(unix.SIGKILL) && oomKills() > before {
		exit.OOMKilled = true
		exit.Message = "killed by the guest's kernel: out of memory"
	}
	return exit
}

func exitOf(s unix.WaitStatus) guestv1.Exit {
	if s.Signaled() {
		n := int(s.Signal())
		return guestv1.Exit{Code: codeSignal + n, Signal: n, Message: "killed by " + signalText(s.Signal())}
	}
	return guestv1.Exit{Code: s.ExitStatus()}
}

// launch starts the main process, or says how it could not be.
func (w *workload) launch() (<-chan unix.WaitStatus, *guestv1.Exit) {
	refuse := func(code int, format string, args ...any) *guestv1.Exit {
		close(w.drained)
		return &guestv1.Exit{Code: code, Message: "cannot start workload: " + fmt.Sprintf(format, args...)}
	}
	id, err := imageUser(w.start.User)
	if err != nil {
		return nil, refuse(codeCannotExecute, "%v", err)
	}
	dir := w.start.WorkingDir
	if dir == "" {
		dir = "/"
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, refuse(codeCannotExecute, "working directory: %v", err)
	}
	env := environment(w.start.Env, id.home)
	path, code, err := lookCommand(string(w.start.Argv[0]), valueOf(env, "PATH"), dir, executableBy(id))
	if err != nil {
		return nil, refuse(code, "%v", err)
	}
	null, err := os.Open("/dev/null")
	if err != nil {
		return nil, refuse(codeCannotExecute, "%v", err)
	}
	defer null.Close()
	r, out, err := os.Pipe()
	if err != nil {
		return nil, refuse(codeCannotExecute, "making pipe: %v", err)
	}
	defer out.Close()
	// The workload must be able to open its own output by name: images have their logs linked to /dev/stdout.
	if err := out.Chown(int(id.uid), int(id.gid)); err != nil {
		_ = r.Close()
		return nil, refuse(codeCannotExecute, "giving the output to the user: %v", err)
	}
	argv := make([]string, len(w.start.Argv))
	for i, a := range w.start.Argv {
		argv[i] = string(a)
	}
	// The own group is among the supplementary ones too, as OCI runtimes have it: otherwise a file that denies its group would
	// be open to a process that can drop its gid (CVE-2022-36109).
	groups := append([]uint32{id.gid}, id.groups...)
	attr := &syscall.ProcAttr{
		Env:   env,
		Files: []uintptr{null.Fd(), out.Fd(), out.Fd()},
		Sys: &syscall.SysProcAttr{
			Setsid:     true,
			Credential: &syscall.Credential{Uid: id.uid, Gid: id.gid, Groups: groups},
		},
	}
	status, err := w.fork(path, argv, dir, attr)
	if err != nil {
		_ = r.Close()
		if workdir := (*workdirError)(nil); errors.As(err, &workdir) {
			return nil, refuse(codeCannotExecute, "%v", err)
		}
		code, message := execFailure(string(w.start.Argv[0]), err)
		return nil, refuse(code, "%s", message)
	}
	go func() {
		defer close(w.drained)
		defer r.Close()
		_, _ = io.CopyBuffer(struct{ io.Writer }{w.output}, struct{ io.Reader }{r}, make([]byte, 64<<10))
	}()
	return status, nil
}

type workdirError struct{ error }

// fork starts the process in dir. The directory is entered here, as root, on a thread with a working directory of its own: a
// workload may be started in a directory that its user could not enter, as OCI runtimes allow.
func (w *workload) fork(path string, argv []string, dir string, attr *syscall.ProcAttr) (<-chan unix.WaitStatus, error) {
	type result struct {
		status <-chan unix.WaitStatus
		err    error
	}
	done := make(chan result)
	go func() {
		// Never unlocked: the thread has another working directory than the rest and ends with this goroutine.
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			done <- result{nil, &workdirError{fmt.Errorf("separating working directory: %w", err)}}
			return
		}
		if err := unix.Chdir(dir); err != nil {
			done <- result{nil, &workdirError{fmt.Errorf("working directory %s: %w", dir, err)}}
			return
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		pid, status, err := w.reaper.start(func() (int, error) { return syscall.ForkExec(path, argv, attr) })
		w.pid = pid
		if err == nil && w.stopped {
			w.signal()
		}
		if err == nil && w.killed {
			_ = w.reaper.signal(pid, unix.SIGKILL)
		}
		done <- result{status, err}
	}()
	r := <-done
	return r.status, r.err
}

// drain waits until the output is read to its end, or limit has passed.
func (w *workload) drain(limit time.Duration) {
	select {
	case <-w.drained:
	case <-time.After(limit):
	}
}

// stop sends the stop signal and, after grace, SIGKILL to everything. A second call can only shorten the grace.
func (w *workload) stop(grace time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended {
		return
	}
	if grace > 0 && !w.stopped {
		w.stopped = true
		w.signal()
	}
	killTime := time.Now().Add(grace)
	if w.kill != nil && !killTime.Before(w.killTime) {
		return
	}
	if w.kill != nil {
		w.kill.Stop()
	}
	w.killTime = killTime
	w.kill = time.AfterFunc(grace, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.killed = true
		if !w.ended {
			_ = unix.Kill(-1, unix.SIGKILL)
		}
	})
}

// signal sends the stop signal to the main process. The caller holds mu.
func (w *workload) signal() {
	s, err := parseSignal(w.start.StopSignal)
	if err != nil {
		s = unix.SIGTERM
	}
	if w.pid != 0 {
		_ = w.reaper.signal(w.pid, s)
	}
}

// imageUser looks the user up in the image's files.
func imageUser(spec string) (identity, error) {
	var passwd, group io.Reader
	if f, err := os.Open("/etc/passwd"); err == nil {
		defer f.Close()
		passwd = f
	}
	if f, err := os.Open("/etc/group"); err == nil {
		defer f.Close()
		group = f
	}
	return lookupUser(spec, passwd, group)
}

func executableBy(id identity) executable {
	return func(p string) error {
		var s unix.Stat_t
		if err := unix.Stat(p, &s); err != nil {
			return err
		}
		switch {
		case s.Mode&unix.S_IFMT == unix.S_IFDIR:
			return errors.New("is a directory")
		case s.Mode&unix.S_IFMT != unix.S_IFREG, !mayExecute(s.Mode, s.Uid, s.Gid, id):
			return errors.New("permission denied: not executable")
		}
		return nil
	}
}

// killRest ends every process but this one: SIGTERM, a moment, SIGKILL, until none is left.
func killRest(r *reaper, limit time.Duration) {
	const (
		politeness = 200 * time.Millisecond
		interval   = 5 * time.Millisecond
	)
	if r.sweep() {
		return
	}
	_ = unix.Kill(-1, unix.SIGTERM)
	if await(politeness, interval, r.sweep) {
		return
	}
	await(limit, interval, func() bool {
		_ = unix.Kill(-1, unix.SIGKILL)
		return r.sweep()
	})
}

// await tries until done, every interval, and gives up after limit. It says whether done was seen.
func await(limit, interval time.Duration, done func() bool) bool {
	over := time.After(limit)
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for !done() {
		select {
		case <-tick.C:
		case <-over:
			return done()
		}
	}
	return true
}
