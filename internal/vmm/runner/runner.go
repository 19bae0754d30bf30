// Package runner is what drivers of VMMs that are plain processes have in common: a cgroup, a detached process, its Handle, its
// console kept short, its end, and the evidence of it.
package runner

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/utils/clock"

	"imp.dev/imp/internal/cgroup"
	"imp.dev/imp/internal/console"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/process"
	"imp.dev/imp/internal/vmm"
)

// LogName is the VMM's stderr in Config.Dir.
const LogName = "vmm.log"

// Runner launches and finds the runs of one driver. All fields but Cgroups must be set.
type Runner struct {
	// Driver's name and the version of its Handles.
	Driver  string
	Version int
	// Instance of the runtime; it marks every process.
	Instance string
	Launcher process.Launcher
	// Cgroups is nil on a host without them, or without root: runs are then found by the mark in their environment.
	Cgroups *cgroup.Tree
	Clock   clock.WithTicker
	Log     *slog.Logger
	// Sockets are the names in Config.Dir that Destroy removes.
	Sockets []string
	// Logs gives further files of a run that grow, and are kept short as the console is; nil: there are none.
	Logs func(vmm.Config) []string
	// IDFlag is set for a program that loses its environment: it is given ID(Config.Cgroup) behind this argument, and found by it.
	IDFlag string
}

// ID is the name of a run on the whole host.
func (r *Runner) ID(name string) string { return r.Instance + "-" + name }

// handleData is what Handle.Data holds.
type handleData struct {
	Identity process.Identity `json:"identity"`
	// ConsoleStart and LogStart are the sizes before this run, and after its start: what lies before says nothing about its end.
	ConsoleStart int64 `json:"consoleStart"`
	LogStart     int64 `json:"logStart"`
	// Driver is what the driver itself keeps.
	Driver json.RawMessage `json:"driver,omitempty"`
}

const stage = "starting VMM"

// oomScoreAdj of a VMM (proc(5)). Without it a VMM has the runtime's own, which on a node is that of what must not die: a host short of
// memory would then end everything else first. A VM can be started again.
const oomScoreAdj = 100

// mark is the variable in a VMM's environment by which it is found without cgroups.
func (r *Runner) mark(name string) string {
	return "IMP_RUN=" + r.Instance + "/" + r.Driver + "/" + name
}

// Vacant refuses a run whose name is still that of a living one: two VMMs on one disk destroy it. It comes before anything of the
// new run is made.
func (r *Runner) Vacant(c vmm.Config) error {
	var pids []int
	if r.Cgroups != nil {
		g, err := r.Cgroups.Group(c.Cgroup)
		if err != nil {
			return err
		}
		if pids, err = g.Procs(); err != nil {
			return err
		}
	} else {
		found, err := r.findMarked(c.Cgroup)
		if err != nil {
			return err
		}
		for _, m := range found {
			pids = append(pids, m.identity.PID)
		}
	}
	if len(pids) > 0 {
		return fmt.Errorf("an earlier run of this VM still lives (processes %v)", pids)
	}
	return nil
}

// Launch starts the program of o in the cgroup c.Cgroup with limits. Its stderr is LogName, its stdout too unless the order has another. On an
// error nothing is left.
func (r *Runner) Launch(ctx context.Context, c vmm.Config, o process.Order, limits cgroup.Limits) (run *Run, err error) {
	defer func() {
		if err != nil {
			// ctx may be over; what was made goes all the same.
			clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTime)
			defer cancel()
			err = fault.New(fault.RuntimeStartFailed, stage, errors.Join(err, r.Destroy(clean, c, vmm.Handle{})))
		}
	}()
	log, err := os.OpenFile(filepath.Join(c.Dir, LogName), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening log of the VMM: %w", err)
	}
	defer log.Close()
	if o.Stderr = log; o.Stdout == nil {
		o.Stdout = log
	}
	o.Env = append(slices.Clone(o.Env), r.mark(c.Cgroup))
	o.OOMScoreAdj = oomScoreAdj
	data := handleData{ConsoleStart: size(c.ConsoleLog)}
	if r.Cgroups != nil {
		g, err := r.Cgroups.Create(c.Cgroup, limits)
		if err != nil {
			return nil, err
		}
		o.CgroupProcs = g.ProcsFiles()
	}
	p, err := r.Launcher.Start(ctx, o)
	if err != nil {
		return nil, err
	}
	data.Identity = p.Identity()
	return r.newRun(c, p, data), nil
}

const (
	cleanTime    = 10 * time.Second
	trimInterval = 5 * time.Second
)

func (r *Runner) newRun(c vmm.Config, p process.Process, d handleData) *Run {
	ctx, cancel := context.WithCancel(context.Background())
	run := &Run{runner: r, config: c, process: p, data: d, ctx: ctx, cancel: cancel, done: make(chan struct{})}
	kept := []string{c.ConsoleLog, filepath.Join(c.Dir, LogName)}
	if r.Logs != nil {
		kept = append(kept, r.Logs(c)...)
	}
	run.tasks.Go(func() { console.Keep(ctx, r.Clock, trimInterval, r.Log, kept...) })
	run.tasks.Go(func() {
		select {
		case <-p.Done():
			run.MarkEnded()
		case <-ctx.Done():
		}
	})
	return run
}

// Adopt takes up the run of h: vmm.ErrGone if its process lives no more.
func (r *Runner) Adopt(c vmm.Config, h vmm.Handle) (*Run, error) {
	d, err := r.read(h)
	if err != nil {
		return nil, err
	}
	p, err := r.Launcher.Find(d.Identity)
	if errors.Is(err, process.ErrGone) {
		return nil, vmm.ErrGone
	}
	if err != nil {
		return nil, fmt.Errorf("finding VMM: %w", err)
	}
	return r.newRun(c, p, d), nil
}

func (r *Runner) read(h vmm.Handle) (handleData, error) {
	var d handleData
	if h.Driver != r.Driver || h.Version != r.Version {
		return d, fmt.Errorf("reading handle of VMM: made by driver %q version %d, this is %q version %d", h.Driver, h.Version, r.Driver, r.Version)
	}
	if err := json.Unmarshal(h.Data, &d); err != nil {
		return d, fmt.Errorf("reading handle of VMM: %w", err)
	}
	return d, nil
}

// Gather collects the facts that do not depend on the kind of VMM. Event and EventDetail are the driver's to fill in.
func (r *Runner) Gather(c vmm.Config, h vmm.Handle) (Facts, error) {
	var f Facts
	if h.Driver == "" {
		return f, nil // started, or not, by a runtime that died before it wrote that down: nothing is known
	}
	d, err := r.read(h)
	if err != nil {
		return f, err
	}
	boot, err := process.BootID()
	if err != nil {
		return f, err
	}
	f.OtherBoot = d.Identity.BootID != boot
	p, err := r.Launcher.Find(d.Identity)
	switch {
	case err == nil:
		f.Alive = true
		_ = p.Close()
	case !errors.Is(err, process.ErrGone):
		return f, fmt.Errorf("finding VMM: %w", err)
	}
	if r.Cgroups != nil {
		if g, err := r.Cgroups.Group(c.Cgroup); err == nil {
			if f.OOMKills, err = g.OOMKills(); err != nil {
				return f, err
			}
		}
	}
	const words = 16 << 10
	chunk, err := console.Read(c.ConsoleLog, max(d.ConsoleStart, size(c.ConsoleLog)-words), words)
	if err != nil {
		return f, err
	}
	f.Console = chunk.Data
	f.Log = r.logOf(c, d.LogStart)
	return f, nil
}

// logOf gives what the VMM wrote after its start, without its warnings.
func (r *Runner) logOf(c vmm.Config, from int64) string {
	chunk, err := console.Read(filepath.Join(c.Dir, LogName), from, 64<<10)
	if err != nil {
		return ""
	}
	var kept []string
	for _, line := range strings.Split(string(chunk.Data), "\n") {
		if !strings.Contains(line, "warning: ") {
			kept = append(kept, line)
		}
	}
	return strings.TrimSpace(strings.Join(kept, "\n"))
}

// Destroy kills what lives of a run and removes its cgroup and sockets.
func (r *Runner) Destroy(ctx context.Context, c vmm.Config, h vmm.Handle) error {
	var errs []error
	if h.Driver != "" {
		d, err := r.read(h)
		if err != nil {
			return err
		}
		errs = append(errs, r.killIdentity(ctx, d.Identity))
	}
	if r.Cgroups != nil {
		g, err := r.Cgroups.Group(c.Cgroup)
		if err != nil {
			return fmt.Errorf("destroying run: %w", err)
		}
		errs = append(errs, g.Kill(ctx), g.Remove(ctx))
	}
	// Without a handle a process that was taken out of its cgroup is found by its mark alone.
	if r.Cgroups == nil || h.Driver == "" {
		marked, err := r.findMarked(c.Cgroup)
		errs = append(errs, err)
		for _, m := range marked {
			errs = append(errs, r.killIdentity(ctx, m.identity))
		}
	}
	for _, name := range r.Sockets {
		if err := os.Remove(filepath.Join(c.Dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("removing socket: %w", err))
		}
	}
	return errors.Join(errs...)
}

func (r *Runner) killIdentity(ctx context.Context, id process.Identity) error {
	p, err := r.Launcher.Find(id)
	if errors.Is(err, process.ErrGone) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("finding VMM: %w", err)
	}
	defer func() { _ = p.Close() }()
	return process.KillWait(ctx, p)
}

// Runs lists the cgroups of this instance with what is in them, and its marked processes wherever they are.
func (r *Runner) Runs() ([]vmm.Found, error) {
	var found []vmm.Found
	inside := map[int]bool{}
	if r.Cgroups != nil {
		names, err := r.Cgroups.List()
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			found = append(found, vmm.Found{Cgroup: name, Kind: vmm.FoundCgroup, Name: r.Cgroups.Path(name)})
			g, err := r.Cgroups.Group(name)
			if err != nil {
				continue // not of our making: nothing is known of what is in it
			}
			pids, err := g.Procs()
			if err != nil {
				return nil, err
			}
			for _, pid := range pids {
				inside[pid] = true
				found = append(found, vmm.Found{Cgroup: name, Kind: vmm.FoundProcess, Name: fmt.Sprintf("pid %d", pid)})
			}
		}
	}
	marked, err := r.findMarked("")
	for _, m := range marked {
		if inside[m.identity.PID] {
			continue
		}
		name := fmt.Sprintf("pid %d", m.identity.PID)
		if r.Cgroups != nil {
			name += ", outside its cgroup"
		}
		found = append(found, vmm.Found{Cgroup: m.name, Kind: vmm.FoundProcess, Name: name, Outside: r.Cgroups != nil})
	}
	return found, err
}

// size of a file, 0 if it cannot be read.
func size(path string) int64 {
	info, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return info.Size()
}

// PIDs gives every process of this instance's runs.
func (r *Runner) PIDs() ([]int, error) {
	if r.Cgroups == nil {
		marked, err := r.findMarked("")
		pids := make([]int, 0, len(marked))
		for _, m := range marked {
			pids = append(pids, m.identity.PID)
		}
		return pids, err
	}
	names, err := r.Cgroups.List()
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, name := range names {
		g, err := r.Cgroups.Group(name)
		if err != nil {
			continue // not of our making
		}
		found, err := g.Procs()
		if err != nil {
			return nil, err
		}
		pids = append(pids, found...)
	}
	return pids, nil
}
