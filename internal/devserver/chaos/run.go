package chaos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/devserver"
	"imp.dev/imp/internal/devserver/demo"
	"imp.dev/imp/internal/devserver/imagefile"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Options of a run.
type Options struct {
	// Server as for devserver.Up. Dir, relays and flags are the run's own.
	Server devserver.Options
	Seed   uint64
	// Duration of the faults; starting, settling and removing come on top.
	Duration time.Duration
	VMs      int
	// Kinds that VMs may be of; none means all.
	Kinds []Kind
	// Bound within which every VM must have become what was wanted after the last fault; 0 is DefaultBound.
	Bound time.Duration
	// KeepLogs leaves the folder with the programs' logs in place and names it in the verdict, as a failed run always does.
	KeepLogs bool
	// Out receives the verdict, and a line for each violation when it happens.
	Out io.Writer
}

// DefaultBound: an operator that was killed leaves its office for 15 s, a partitioned agent waits up to 10 s for its next try, a VM up to
// its maxDelay or coolDownPeriod, 5 s here; the rest is for 200 VMs that start side by side on two processors.
const DefaultBound = 90 * time.Second

// ErrViolated is what Run gives when an invariant did not hold.
var ErrViolated = errors.New("an invariant was violated")

// runner is one run.
type runner struct {
	options  Options
	schedule Schedule
	server   *devserver.Server
	client   client.Client
	image    string
	began    time.Time

	slots    []*slot
	faults   *faults
	observer *observer
	writes   *writes
	tally    *tally
	verdict  Verdict
}

// ShapeOf gives what the schedule of a run is made for, so that it can be printed without a run.
func ShapeOf(o Options) Shape {
	nodes := make([]string, o.Server.Nodes)
	for i := range nodes {
		nodes[i] = fmt.Sprintf("node-%d", i+1)
	}
	return Shape{Seed: o.Seed, Duration: o.Duration, Nodes: nodes, VMs: o.VMs, Gentle: o.Server.VMM != "fake", Kinds: o.Kinds}
}

// Run starts a server, disturbs it by the schedule of the seed, and gives the verdict. The error is ErrViolated if an invariant did
// not hold, else what kept the run from being one. Nothing runs any more when it returns.
func Run(ctx context.Context, o Options) (_ Verdict, err error) {
	dir, err := os.MkdirTemp("", "imp-chaos-")
	if err != nil {
		return Verdict{}, fmt.Errorf("making the run's folder: %w", err)
	}
	if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // VMMs run as users of their own and must get to their files
		return Verdict{}, err
	}
	defer func() {
		if err == nil && !o.KeepLogs {
			_ = os.RemoveAll(dir)
		}
	}()
	if o.Bound == 0 {
		o.Bound = DefaultBound
	}
	r := &runner{options: o, schedule: Make(ShapeOf(o)), tally: newTally()}
	up := o.Server
	up.Dir, up.RegistryPort, up.Relays = dir, 0, true
	up.OperatorArgs = append(up.OperatorArgs, "--address-quarantine=3s")
	if up.VMM == "fake" {
		up.RuntimeArgs = append(up.RuntimeArgs, "--guest-silence=8s")
	}
	if r.server, err = devserver.Up(ctx, up); err != nil {
		return Verdict{}, err
	}
	stopped := false
	stop := func() error {
		if stopped {
			return nil
		}
		stopped = true
		return r.server.Stop(context.WithoutCancel(ctx))
	}
	defer func() { err = errors.Join(err, stop()) }()
	if err := r.prepare(ctx); err != nil {
		return Verdict{}, err
	}
	if err := r.run(ctx); err != nil {
		return Verdict{}, err
	}
	r.lookIntoLogs()
	if failed := stop(); failed != nil {
		r.observer.violate(NothingLeft, "the server", "%v", failed)
	}
	r.conclude(dir)
	r.verdict.Print(o.Out)
	if len(r.verdict.Violations) > 0 {
		return r.verdict, ErrViolated
	}
	return r.verdict, nil
}

// prepare makes what the VMs share.
func (r *runner) prepare(ctx context.Context) (err error) {
	if r.client, err = devserver.NewClient(r.server.Config()); err != nil {
		return err
	}
	r.image = "fake/chaos:1"
	memory := int64(128)
	if r.options.Server.VMM != "fake" {
		memory = 192
		image, err := demo.Image(ctx, r.options.Server.CacheDir)
		if err != nil {
			return err
		}
		r.image = r.server.Registry + "/" + demo.ImageName
		if _, err := imagefile.Push(ctx, image, r.image, nil); err != nil {
			return err
		}
	}
	for _, object := range []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}},
		&v1alpha1.ImpVMClass{ObjectMeta: metav1.ObjectMeta{Name: className}, Spec: v1alpha1.ImpVMClassSpec{VCPU: 1, MemoryMiB: memory, DiskGiB: 1}},
		&v1alpha1.ImpNetwork{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: networkName}, Spec: v1alpha1.ImpNetworkSpec{Subnet: "10.77.0.0/22"}},
	} {
		if err := r.client.Create(ctx, object); err != nil {
			return fmt.Errorf("preparing: %w", err)
		}
	}
	dirs := make([]string, 0, len(r.server.NodeNames()))
	for _, node := range r.server.NodeNames() {
		dirs = append(dirs, filepath.Join(r.server.Places.Data, node))
	}
	reality, err := newReality(dirs)
	if err != nil {
		return err
	}
	r.writes = newWrites(r.server.Config())
	r.faults = newFaults(r)
	r.observer = &observer{
		client: r.client, reality: reality, stateDirs: dirs, undisturbedSince: r.faults.undisturbedSince,
		told: map[string]bool{}, checks: map[Invariant]int{}, vms: map[string]*history{},
	}
	for i := range r.options.VMs {
		r.slots = append(r.slots, &slot{number: i, runner: r, wake: make(chan struct{}, 1), wish: wish{exists: true, delay: shortDelay}})
	}
	return nil
}

// run is the schedule and what comes after it.
func (r *runner) run(ctx context.Context) error {
	working, stop := context.WithCancel(ctx)
	var workers sync.WaitGroup
	defer workers.Wait()
	defer stop()
	r.began = time.Now()
	r.observer.began = r.began
	workers.Go(func() { r.observer.run(working) })
	workers.Go(func() { each(working, 2*time.Second, func() { r.writes.sample(working) }) })
	workers.Go(func() { each(working, 500*time.Millisecond, r.faults.keep) })
	for _, s := range r.slots {
		workers.Go(func() { s.run(working) })
	}
	r.carryOut(ctx)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	r.writes.sample(ctx)
	r.verdict.Writes, r.verdict.WritesOver = r.writes.since(nil), time.Since(r.began)
	r.converge(ctx)
	r.rest(ctx)
	r.removeAll(ctx)
	return ctx.Err()
}

// carryOut does the steps at their times and returns when the last is undone.
func (r *runner) carryOut(ctx context.Context) {
	var going sync.WaitGroup
	defer going.Wait()
	for serial, step := range r.schedule.Steps {
		pause(ctx, time.Until(r.began.Add(step.At)))
		if ctx.Err() != nil {
			return
		}
		going.Go(func() {
			err := r.do(ctx, step, serial)
			switch {
			case errors.Is(err, errNothing):
				r.tally.add(string(step.Action) + " (nothing to act on)")
			case err != nil:
				r.tally.add(string(step.Action) + " (could not be done)")
				fmt.Fprintf(r.options.Out, "%s: %v\n", step, err)
			default:
				r.tally.add(string(step.Action))
			}
		})
	}
	pause(ctx, time.Until(r.began.Add(r.schedule.Shape.Duration)))
}

func (r *runner) do(ctx context.Context, step Step, serial int) error {
	switch step.Action {
	case Delete, Create, Replace, Stop, Start, Policy, Reset:
		r.slots[step.Slot].apply(func(w *wish) { w.change(step, serial) })
		return nil
	case KillVMM, FreezeVMM:
		return r.faults.onVMM(ctx, step)
	default:
		return r.faults.carryOut(ctx, step)
	}
}

// lookIntoLogs finds programs that crashed, which a restart would hide.
func (r *runner) lookIntoLogs() {
	logs, err := filepath.Glob(filepath.Join(r.server.Places.Logs(), "imp-*.log"))
	if err != nil {
		return
	}
	for _, path := range logs {
		content, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(content)) {
			if strings.HasPrefix(line, "panic: ") || strings.HasPrefix(line, "fatal error: ") {
				r.observer.violate(NoCrash, filepath.Base(path), "%s", strings.TrimSpace(line))
			}
		}
	}
	r.observer.checked(NoCrash, len(logs))
}
