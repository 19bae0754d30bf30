package fake

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	"k8s.io/utils/clock"

	"imp.dev/imp/internal/cgroup"
	"imp.dev/imp/internal/console"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/process"
	"imp.dev/imp/internal/vmm"
	"imp.dev/imp/internal/vmm/runner"
	"imp.dev/imp/internal/vmm/socket"
)

const (
	driverName    = "fake"
	handleVersion = 1

	guestSocketName   = "guest.sock"
	controlSocketName = "control.sock"
	scriptName        = "script.json"
	stateName         = "state.log"

	stage = "starting VMM"
)

// Options of the driver. Launcher, Instance and Log must be set.
type Options struct {
	// Exe is the binary whose main knows Command; "" is the running one.
	Exe      string
	Launcher process.Launcher
	// Instance is the runtime's id.
	Instance string
	// Cgroups may be nil: no limits, and runs are found by their environment.
	Cgroups *cgroup.Tree
	// UID and GID of the VMMs; nil keeps the runtime's own.
	UID, GID *int
	Clock    clock.WithTicker
	Log      *slog.Logger
	// AnswerTimeout is how long Start waits for the VMM; 0 is 10 s.
	AnswerTimeout time.Duration
}

// Driver of fake VMMs.
type Driver struct {
	options Options
	runner  *runner.Runner
}

var _ vmm.Driver = (*Driver)(nil)

// New makes the driver.
func New(o Options) *Driver {
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	if o.AnswerTimeout == 0 {
		o.AnswerTimeout = 10 * time.Second
	}
	if o.Exe == "" {
		o.Exe = "/proc/self/exe"
	}
	return &Driver{options: o, runner: &runner.Runner{Driver: driverName, Version: handleVersion, Instance: o.Instance, Launcher: o.Launcher,
		Cgroups: o.Cgroups, Clock: o.Clock, Log: o.Log, Sockets: []string{guestSocketName, controlSocketName}}}
}

// Name implements vmm.Driver.
func (d *Driver) Name() string { return driverName }

// Probe implements vmm.Driver.
func (d *Driver) Probe(context.Context) vmm.Capabilities {
	return vmm.Capabilities{Usable: true, VMMVersion: "fake", Accelerator: ""}
}

// OverheadMiB implements vmm.Driver: a Go process needs a few dozen MiB at its start.
func (d *Driver) OverheadMiB(int, int64) int64 { return 32 }

// Start implements vmm.Driver.
func (d *Driver) Start(ctx context.Context, c vmm.Config) (vmm.Instance, error) {
	script, err := Parse(c.Script, c.Run)
	if err != nil {
		return nil, fault.New(fault.InvalidSpec, stage, err)
	}
	if err := d.runner.Vacant(c); err != nil {
		return nil, fault.New(fault.RuntimeStartFailed, stage, err)
	}
	o, err := d.order(c, script)
	if err != nil {
		return nil, fault.New(fault.RuntimeStartFailed, stage, errors.Join(err, d.Destroy(ctx, c, vmm.Handle{}))) // sockets made before the failure
	}
	defer func() {
		for _, f := range o.Files {
			_ = f.Close()
		}
	}()
	run, err := d.runner.Launch(ctx, c, o, cgroup.Limits{MemoryBytes: (c.MemoryMiB + d.OverheadMiB(c.VCPU, c.MemoryMiB)) << 20, Pids: 256})
	if err != nil {
		return nil, err
	}
	i := &instance{Run: run}
	if err := i.awaitAnswer(ctx, d.options.AnswerTimeout); err != nil {
		_ = i.Close()
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		return nil, fault.New(fault.RuntimeStartFailed, stage, errors.Join(err, d.Destroy(clean, c, i.Handle())))
	}
	i.MarkStarted()
	i.Go(i.watch)
	return i, nil
}

func (d *Driver) order(c vmm.Config, s Script) (process.Order, error) {
	o := process.Order{Path: d.options.Exe, Args: []string{Command}, Env: []string{"GOMAXPROCS=1"}, Dir: c.Dir, UID: os.Geteuid(), GID: os.Getegid()}
	if d.options.UID != nil && d.options.GID != nil {
		o.UID, o.GID = *d.options.UID, *d.options.GID
	}
	fail := func(err error) (process.Order, error) {
		for _, f := range o.Files {
			_ = f.Close()
		}
		return o, err
	}
	b, err := json.Marshal(s)
	if err != nil {
		return fail(err)
	}
	if err := os.WriteFile(filepath.Join(c.Dir, scriptName), b, 0o600); err != nil {
		return fail(fmt.Errorf("writing script: %w", err))
	}
	// In the order of the fd constants.
	for _, open := range []func() (*os.File, error){
		func() (*os.File, error) { return socket.Listen(c.Dir, guestSocketName) },
		func() (*os.File, error) { return socket.Listen(c.Dir, controlSocketName) },
		func() (*os.File, error) { return os.OpenFile(c.ConsoleLog, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600) },
		func() (*os.File, error) { return os.Open(filepath.Join(c.Dir, scriptName)) },
		func() (*os.File, error) {
			return os.OpenFile(filepath.Join(c.Dir, stateName), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		},
	} {
		f, err := open()
		if err != nil {
			return fail(err)
		}
		o.Files = append(o.Files, f)
	}
	return o, nil
}

// Recover implements vmm.Driver.
func (d *Driver) Recover(_ context.Context, c vmm.Config, h vmm.Handle) (vmm.Instance, error) {
	run, err := d.runner.Adopt(c, h)
	if err != nil {
		return nil, err
	}
	i := &instance{Run: run}
	i.Go(i.watch)
	return i, nil
}

// Evidence implements vmm.Driver.
func (d *Driver) Evidence(_ context.Context, c vmm.Config, h vmm.Handle) (vmm.Evidence, error) {
	facts, err := d.runner.Gather(c, h)
	if err != nil {
		return vmm.Evidence{}, fmt.Errorf("gathering evidence: %w", err)
	}
	chunk, err := console.Read(filepath.Join(c.Dir, stateName), 0, 64<<10)
	if err != nil {
		return vmm.Evidence{}, fmt.Errorf("gathering evidence: %w", err)
	}
	var w word
	if json.Unmarshal(chunk.Data, &w) == nil {
		facts.Event, facts.EventDetail = w.Cause, w.Detail
	}
	return runner.Decide(facts), nil
}

// Destroy implements vmm.Driver.
func (d *Driver) Destroy(ctx context.Context, c vmm.Config, h vmm.Handle) error {
	return d.runner.Destroy(ctx, c, h)
}

// Runs implements vmm.Driver.
func (d *Driver) Runs(context.Context) ([]vmm.Found, error) { return d.runner.Runs() }

type instance struct {
	*runner.Run
}

// DialGuest implements vmm.Instance.
func (i *instance) DialGuest(ctx context.Context) (net.Conn, error) {
	return i.DialSocket(ctx, guestSocketName)
}

// awaitAnswer returns when the VMM has said its first word.
func (i *instance) awaitAnswer(ctx context.Context, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	conn, err := i.DialSocket(ctx, controlSocketName)
	if err != nil {
		return i.explain(err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	go func() { // an accepted connection of a dead listener's backlog never answers
		select {
		case <-i.ProcessDone():
			_ = conn.Close()
		case <-ctx.Done():
		}
	}()
	var w word
	if err := json.NewDecoder(conn).Decode(&w); err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("VMM did not answer: %w", ctx.Err())
		}
		return i.explain(err)
	}
	return nil
}

// explain prefers the VMM's own words.
func (i *instance) explain(err error) error {
	if words := i.Log(); words != "" {
		return errors.New(words)
	}
	return err
}

const retry = 100 * time.Millisecond

// watch listens for the machine's end and listens again whenever the connection is lost, until the process has ended.
func (i *instance) watch(ctx context.Context) {
	for {
		if i.listen(ctx) {
			i.MarkEnded()
			return
		}
		pause := time.NewTimer(retry)
		select {
		case <-ctx.Done():
		case <-i.ProcessDone():
		case <-pause.C:
			continue
		}
		pause.Stop()
		return
	}
}

func (i *instance) listen(ctx context.Context) (ended bool) {
	conn, err := i.DialSocket(ctx, controlSocketName)
	if err != nil {
		return false
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	lines := json.NewDecoder(bufio.NewReader(conn))
	for {
		var w word
		if lines.Decode(&w) != nil {
			return false
		}
		if w.Cause != vmm.CauseUnknown {
			return true
		}
	}
}
