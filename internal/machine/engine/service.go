package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"imp.dev/imp/internal/console"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/plan"
	"imp.dev/imp/internal/vmm"
)

// Info implements machine.Service.
func (e *Engine) Info(ctx context.Context) (machine.Info, error) {
	info := e.config.Info
	info.Instance, info.BootID, info.Architecture = e.Instance(), e.config.HostBootID, e.config.Architecture
	info.Driver = e.config.Driver.Name()
	c := e.probe(ctx)
	info.Usable, info.Problem, info.VMMVersion, info.Accelerator = c.Usable, c.Problem, c.VMMVersion, c.Accelerator
	b := e.config.Budget
	info.BudgetVCPU, info.BudgetMemoryMiB, info.BudgetDiskGiB = b.VCPU, b.MemoryMiB, b.DiskGiB
	info.OverheadMiB = e.overheadMiB()
	usage, err := e.config.Images.Usage(ctx)
	if err != nil {
		return machine.Info{}, fault.New(fault.DiskFailed, "measuring image cache", err)
	}
	info.ImageCache = usage
	info.Network = e.networkHost(ctx)
	return info, nil
}

// Ensure implements machine.Service.
func (e *Engine) Ensure(ctx context.Context, spec machine.Spec) (machine.Status, error) {
	if err := machine.Validate(spec); err != nil {
		return machine.Status{}, err
	}
	if len(spec.Script) > 0 && e.config.Driver.Name() != "fake" {
		return machine.Status{}, fault.Permanent(fault.Errorf(fault.InvalidSpec, "checking spec", "script is for the fake driver, this node has %s", e.config.Driver.Name()))
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return machine.Status{}, errClosed()
	}
	if why := e.unreadable[spec.ID]; why != "" {
		return machine.Status{}, fault.Errorf(fault.Internal, "accepting VM", "%s; remove the VM, or repair the record and restart the runtime", why)
	}
	w := e.workers[spec.ID]
	if w != nil {
		return w.ensure(spec, func() error { return e.fits(spec) })
	}
	if err := e.fits(spec); err != nil {
		return machine.Status{}, err
	}
	credentials := spec.Image.Credentials
	spec.Image.Credentials = nil
	r := plan.New(spec, e.clock.Now())
	r.Revision = revisionStep
	if err := e.save(spec.ID, r); err != nil {
		return machine.Status{}, fault.New(fault.DiskFailed, "accepting VM", err)
	}
	e.log.Info("VM accepted", "vm", spec.ID, "namespace", spec.Namespace, "name", spec.Name, "assignment", spec.Assignment)
	w = e.startWorkerWith(spec.ID, r, func(w *worker) { w.credentials = credentials })
	return w.status(), nil
}

// overheadMiB is what every VM counts for beside its guest's memory, here and in placement: one number for both, so that what
// the operator places is never refused for its overhead. The cgroup's limit follows the VM's size.
func (e *Engine) overheadMiB() int64 { return e.config.Driver.OverheadMiB(1, machine.MinMemoryMiB) }

// fits says NoCapacity when the budget cannot hold spec beside everything else. Called with mu held.
func (e *Engine) fits(spec machine.Spec) error {
	overhead := func(int, int64) int64 { return e.overheadMiB() }
	total := plan.NeedOfSpec(spec, overhead)
	for id, w := range e.workers {
		if id == spec.ID {
			continue
		}
		n := plan.NeedOf(w.recordNow(), overhead)
		total.VCPU, total.MemoryMiB, total.DiskGiB = total.VCPU+n.VCPU, total.MemoryMiB+n.MemoryMiB, total.DiskGiB+n.DiskGiB
	}
	var over []string
	for _, d := range []struct {
		what        string
		need, limit int64
	}{
		{"vCPU", total.VCPU, e.config.Budget.VCPU},
		{"MiB memory", total.MemoryMiB, e.config.Budget.MemoryMiB},
		{"GiB disk", total.DiskGiB, e.config.Budget.DiskGiB},
	} {
		if d.need > d.limit {
			over = append(over, fmt.Sprintf("%d of %d %s", d.need, d.limit, d.what))
		}
	}
	if len(over) > 0 {
		return fault.Errorf(fault.NoCapacity, "accepting VM", "with it the node's VMs would take %s", strings.Join(over, ", "))
	}
	return nil
}

// Remove implements machine.Service.
func (e *Engine) Remove(ctx context.Context, ref machine.Ref, how machine.Removal) (machine.Status, error) {
	if err := machine.ValidateRef(ref); err != nil {
		return machine.Status{}, err
	}
	how.Grace = max(how.Grace, 0)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return machine.Status{}, errClosed()
	}
	if w := e.workers[ref.ID]; w != nil {
		return w.remove(ref.Assignment, how)
	}
	now := e.clock.Now()
	r := plan.New(machine.Spec{ID: ref.ID, Assignment: ref.Assignment}, now)
	r.Revision = revisionStep
	r.OrderRemoval(how, now)
	if _, ok := e.unreadable[ref.ID]; ok {
		// Nothing is known of it: whatever it may have is cleared away as if all of it were there.
		r.Boot, r.Image, r.NetworkUsed = &plan.Boot{}, &plan.Image{}, true
	} else {
		r.Tombstoned(now)
	}
	if err := e.save(ref.ID, r); err != nil {
		return machine.Status{}, fault.New(fault.DiskFailed, "accepting removal", err)
	}
	if _, ok := e.unreadable[ref.ID]; ok {
		if err := e.records.ForgetAside(ref.ID); err != nil {
			return machine.Status{}, fault.New(fault.DiskFailed, "accepting removal", err)
		}
		delete(e.unreadable, ref.ID)
	}
	return e.startWorker(ref.ID, r).status(), nil
}

// List implements machine.Service.
func (e *Engine) List(context.Context) ([]machine.Status, error) {
	workers := e.allWorkers()
	out := make([]machine.Status, 0, len(workers))
	for _, w := range workers {
		out = append(out, w.status())
	}
	slices.SortFunc(out, func(a, b machine.Status) int { return strings.Compare(a.ID, b.ID) })
	return out, nil
}

// Watch implements machine.Service.
func (e *Engine) Watch(ctx context.Context, each func(machine.Update) error) error {
	sub := e.hub.subscribe()
	defer e.hub.unsubscribe(sub)
	list, err := e.List(ctx)
	if err != nil {
		return err
	}
	seen := map[string]int64{}
	send := func(st machine.Status) error {
		if seen[st.ID] >= st.Revision {
			return nil
		}
		seen[st.ID] = st.Revision
		return each(machine.Update{Status: &st})
	}
	for _, st := range list {
		if err := send(st); err != nil {
			return err
		}
	}
	if err := each(machine.Update{Synced: true}); err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-e.life.Done():
			return errClosed()
		case <-sub.news:
		}
		for id := range sub.take() {
			w := e.known(id)
			if w == nil {
				delete(seen, id)
				continue
			}
			if err := send(w.status()); err != nil {
				return err
			}
		}
	}
}

// Console implements machine.Service.
func (e *Engine) Console(_ context.Context, id string, offset int64, limit int) (machine.ConsoleChunk, error) {
	if err := machine.ValidateRef(machine.Ref{ID: id}); err != nil {
		return machine.ConsoleChunk{}, err
	}
	if e.known(id) == nil {
		return machine.ConsoleChunk{}, fault.Errorf(fault.NotFound, "reading console", "no VM %s here", id)
	}
	c, err := console.Read(e.paths.console(id), offset, limit)
	if err != nil {
		return machine.ConsoleChunk{}, fault.New(fault.Internal, "reading console", err)
	}
	return machine.ConsoleChunk{Offset: c.Offset, Data: c.Data, Size: c.Size}, nil
}

// probe asks the driver what it can do, now and then.
func (e *Engine) probe(ctx context.Context) vmm.Capabilities {
	e.capabilitiesMu.Lock()
	defer e.capabilitiesMu.Unlock()
	if e.probedAt.IsZero() || e.clock.Since(e.probedAt) >= probePeriod || !e.capabilities.Usable {
		e.capabilities, e.probedAt = e.config.Driver.Probe(ctx), e.clock.Now()
	}
	return e.capabilities
}

// interrupted says that an error is only the end of a context.
func interrupted(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}
