package process

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Cmd is a short helper program, such as mke2fs.
type Cmd struct {
	// Path is the program; a name without a slash is looked up in PATH of the running process.
	Path string
	Args []string
	// Env is complete; nil is a fixed PATH and LC_ALL=C, nothing of the caller's.
	Env []string
	Dir string
	// Stdin nil is /dev/null.
	Stdin io.Reader
	// Files become descriptors 3, 4, ….
	Files []*os.File
	// Stdout, when set, receives the standard output as it comes, and Result has none.
	Stdout io.Writer
	// MaxOutput is how many bytes of each of stdout (its beginning) and stderr (its end) are kept; 0 is 64 KiB.
	MaxOutput int
}

// Result of a program that ran.
type Result struct {
	Stdout   []byte
	Stderr   []byte
	ExitCode int
	// OutputCut says that Stdout holds less than was written.
	OutputCut bool
	Duration  time.Duration
}

// ExitError says that a program ended badly. Stderr is its end, at most 2 KiB.
type ExitError struct {
	Path string
	// Code is the exit status, 128+n for signal n.
	Code   int
	Signal syscall.Signal
	Stderr string
}

func (e *ExitError) Error() string {
	how := fmt.Sprintf("exit status %d", e.Code)
	if e.Signal != 0 {
		how = "killed by " + e.Signal.String()
	}
	if e.Stderr == "" {
		return fmt.Sprintf("%s: %s", e.Path, how)
	}
	return fmt.Sprintf("%s: %s: %s", e.Path, how, e.Stderr)
}

const (
	defaultMaxOutput = 64 << 10
	stderrTail       = 2 << 10
	// pipeDelay is how long a helper's own children may hold its pipes after its end.
	pipeDelay = 2 * time.Second
)

// Run runs c to its end and gives what it wrote. A cancelled ctx kills it with its process group; so does the death
// of the calling process. An end that is not exit code 0 is an *ExitError, with the Result still filled in.
func Run(ctx context.Context, c Cmd) (Result, error) {
	path := c.Path
	if !strings.Contains(path, "/") {
		found, err := exec.LookPath(path)
		if err != nil {
			return Result{}, fmt.Errorf("finding program %s: %w", path, err)
		}
		path = found
	}
	cmd := exec.CommandContext(ctx, path, c.Args...)
	cmd.Env = c.Env
	if cmd.Env == nil {
		cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"}
	}
	cmd.Dir, cmd.Stdin, cmd.ExtraFiles = c.Dir, c.Stdin, c.Files
	return await(ctx, cmd, c, cmd.Start)
}

// await starts cmd by start and collects its Result.
func await(ctx context.Context, cmd *exec.Cmd, c Cmd, start func() error) (Result, error) {
	limit := c.MaxOutput
	if limit == 0 {
		limit = defaultMaxOutput
	}
	stdout, stderr := &headBuffer{limit: limit}, &tailBuffer{limit: limit}
	cmd.Stdout, cmd.Stderr = stdout, stderr
	if c.Stdout != nil {
		cmd.Stdout = c.Stdout
	}
	attr := cmd.SysProcAttr
	if attr == nil {
		attr = &syscall.SysProcAttr{}
	}
	attr.Setpgid, attr.Pdeathsig = true, unix.SIGKILL
	cmd.SysProcAttr = attr
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	cmd.WaitDelay = pipeDelay
	// The death signal is sent when the forking thread ends, so the thread must be ours until the program has ended.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	begun := time.Now()
	if err := start(); err != nil {
		return Result{}, fmt.Errorf("starting %s: %w", c.Path, err)
	}
	err := cmd.Wait()
	r := Result{Stdout: stdout.b.Bytes(), Stderr: stderr.bytes(), OutputCut: stdout.cut, Duration: time.Since(begun)}
	r.ExitCode = cmd.ProcessState.ExitCode()
	if ctx.Err() != nil {
		return r, fmt.Errorf("running %s: %w", c.Path, context.Cause(ctx))
	}
	var bad *exec.ExitError
	switch {
	case err == nil:
		return r, nil
	case errors.As(err, &bad):
		e := &ExitError{Path: c.Path, Code: r.ExitCode, Stderr: lastText(r.Stderr)}
		if ws, ok := bad.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
			e.Signal = ws.Signal()
			e.Code = 128 + int(e.Signal)
		}
		r.ExitCode = e.Code
		return r, e
	case errors.Is(err, exec.ErrWaitDelay):
		return r, nil // it ended well; something it left behind held the pipe
	default:
		return r, fmt.Errorf("running %s: %w", c.Path, err)
	}
}

func lastText(b []byte) string {
	if len(b) > stderrTail {
		b = b[len(b)-stderrTail:]
	}
	return strings.ToValidUTF8(strings.TrimSpace(string(b)), "?")
}

// headBuffer keeps the first limit bytes.
type headBuffer struct {
	b     bytes.Buffer
	limit int
	cut   bool
}

func (h *headBuffer) Write(p []byte) (int, error) {
	room := h.limit - h.b.Len()
	if room < len(p) {
		h.cut = true
		h.b.Write(p[:max(room, 0)])
		return len(p), nil
	}
	return h.b.Write(p)
}

// tailBuffer keeps the last limit bytes, and up to as many again until it is cut.
type tailBuffer struct {
	b     []byte
	limit int
}

func (t *tailBuffer) Write(p []byte) (int, error) {
	t.b = append(t.b, p...)
	if len(t.b) > 2*t.limit {
		t.b = append([]byte{}, t.bytes()...)
	}
	return len(p), nil
}

func (t *tailBuffer) bytes() []byte {
	if len(t.b) > t.limit {
		return t.b[len(t.b)-t.limit:]
	}
	return t.b
}
