package runner

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"path/filepath"
	"sync"

	"imp.dev/imp/internal/guest"
	"imp.dev/imp/internal/process"
	"imp.dev/imp/internal/vmm"
	"imp.dev/imp/internal/vmm/socket"
)

// Run is one process of a VMM. A driver embeds it and has its monitor call MarkEnded when the machine ends before the process does.
type Run struct {
	runner  *Runner
	config  vmm.Config
	process process.Process
	data    handleData

	ctx    context.Context // the life of the run's goroutines, ended by Close
	cancel context.CancelFunc
	tasks  sync.WaitGroup
	once   sync.Once
	done   chan struct{}
}

// Go runs a task until Close, which waits for it; ctx ends then.
func (r *Run) Go(task func(ctx context.Context)) { r.tasks.Go(func() { task(r.ctx) }) }

// MarkStarted says that the VMM answered: what its log holds by now is no sign of its end.
func (r *Run) MarkStarted() { r.data.LogStart = size(filepath.Join(r.config.Dir, LogName)) }

// Keep puts what the driver needs to find the run again into the Handle.
func (r *Run) Keep(v any) {
	r.data.Driver, _ = json.Marshal(v) // of plain fields: cannot fail
}

// Kept reads what Keep put into a Handle.
func (r *Runner) Kept(h vmm.Handle, v any) error {
	d, err := r.read(h)
	if err != nil || d.Driver == nil {
		return err
	}
	if err := json.Unmarshal(d.Driver, v); err != nil {
		return fmt.Errorf("reading handle of VMM: %w", err)
	}
	return nil
}

// PIDOf gives the pid in a Handle, 0 if there is none.
func (r *Runner) PIDOf(h vmm.Handle) int {
	d, err := r.read(h)
	if err != nil {
		return 0
	}
	return d.Identity.PID
}

// MarkEnded closes Done.
func (r *Run) MarkEnded() { r.once.Do(func() { close(r.done) }) }

// Handle implements vmm.Instance.
func (r *Run) Handle() vmm.Handle {
	data, _ := json.Marshal(r.data) // of plain fields: cannot fail
	return vmm.Handle{Driver: r.runner.Driver, Version: r.runner.Version, Data: data}
}

// PID implements vmm.Instance.
func (r *Run) PID() int { return r.process.Identity().PID }

// Done implements vmm.Instance.
func (r *Run) Done() <-chan struct{} { return r.done }

// ProcessDone is closed when the process itself has ended.
func (r *Run) ProcessDone() <-chan struct{} { return r.process.Done() }

// Log gives what the VMM wrote to its log so far, without warnings.
func (r *Run) Log() string { return r.runner.logOf(r.config, 0) }

// errGone is for who asks the driver and for who asks the guest through it.
var errGone = fmt.Errorf("%w: %w", vmm.ErrGone, guest.ErrGone)

// DialSocket connects to a socket of the run; after its end the error is both vmm.ErrGone and guest.ErrGone.
func (r *Run) DialSocket(ctx context.Context, name string) (net.Conn, error) {
	return r.DialSocketIn(ctx, r.config.Dir, name)
}

// DialSocketIn is DialSocket for a socket in another directory.
func (r *Run) DialSocketIn(ctx context.Context, dir, name string) (net.Conn, error) {
	select {
	case <-r.done:
		return nil, errGone
	default:
	}
	conn, err := socket.Dial(ctx, dir, name)
	if err != nil {
		select {
		case <-r.process.Done():
			return nil, fmt.Errorf("%w: %w", errGone, err)
		default:
		}
	}
	return conn, err
}

// Kill implements vmm.Instance.
func (r *Run) Kill(ctx context.Context) error {
	if err := process.KillWait(ctx, r.process); err != nil {
		return err
	}
	r.MarkEnded()
	return nil
}

// Usage implements vmm.Instance.
func (r *Run) Usage(context.Context) (vmm.Usage, error) {
	if r.runner.Cgroups == nil {
		return vmm.Usage{}, nil
	}
	g, err := r.runner.Cgroups.Group(r.config.Cgroup)
	if err != nil {
		return vmm.Usage{}, fmt.Errorf("reading usage: %w", err)
	}
	u, err := g.Usage()
	return vmm.Usage{MemoryBytes: u.MemoryBytes, CPUNanos: u.CPUNanos}, err
}

// Close implements vmm.Instance.
func (r *Run) Close() error {
	r.cancel()
	r.tasks.Wait()
	return r.process.Close()
}

// Closed ends when Close was called.
func (r *Run) Closed() <-chan struct{} { return r.ctx.Done() }
