package chaos

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/devserver"
	"imp.dev/imp/internal/devserver/relay"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// errNothing says that a step had nothing to act on.
var errNothing = errors.New("there is nothing to act on")

// faults carries out what happens to programs and nodes, and knows who is under a fault.
type faults struct {
	runner *runner

	mu     sync.Mutex
	active map[string]int       // by target
	ended  map[string]time.Time // of the latest fault of a target
	// holds one lock for each program, held for the length of a fault, so that the keeper does not start what is to be down.
	locks map[string]*sync.Mutex
}

func newFaults(r *runner) *faults {
	f := &faults{runner: r, active: map[string]int{}, ended: map[string]time.Time{}, locks: map[string]*sync.Mutex{}}
	for _, p := range r.programs() {
		f.locks[p.key()] = &sync.Mutex{}
	}
	return f
}

type target struct {
	program devserver.Program
	node    string
}

func (t target) key() string { return string(t.program) + "/" + t.node }

func programOf(name string) devserver.Program { return devserver.Program("imp-" + name) }

func (r *runner) programs() []target {
	all := []target{{devserver.Operator, ""}}
	for _, node := range r.server.NodeNames() {
		all = append(all, target{devserver.Agent, node}, target{devserver.Runtime, node})
	}
	return all
}

const api = "api"

// under marks a target as disturbed until the function it gives is called.
func (f *faults) under(key string) func() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.active[key]++
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.active[key]--
		f.ended[key] = time.Now()
	}
}

// undisturbedSince is observer's.
func (f *faults) undisturbedSince(node string) (since time.Time, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, key := range []string{api, target{devserver.Agent, node}.key(), target{devserver.Runtime, node}.key()} {
		if f.active[key] > 0 {
			return since, false
		}
		since = later(since, f.ended[key])
	}
	return since, true
}

// pause waits for the length of a fault, which a cancelled ctx cuts short: what was done is undone all the same.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// carryOut does a step, waits, and undoes it.
func (f *faults) carryOut(ctx context.Context, step Step) error {
	t := target{programOf(step.Program), step.Node}
	switch step.Action {
	case Kill, Freeze, Restart:
		defer f.under(t.key())()
		f.locks[t.key()].Lock()
		defer f.locks[t.key()].Unlock()
		return f.onProgram(ctx, step, t)
	case Refuse, Hang:
		defer f.under(t.key())()
		return f.partition(ctx, step, t)
	case Blackout:
		defer f.under(api)()
		var err error
		for _, t := range f.runner.programs() {
			if t.program != devserver.Runtime {
				err = errors.Join(err, f.runner.server.Partition(t.program, t.node, relay.Hang))
			}
		}
		pause(ctx, step.For)
		for _, t := range f.runner.programs() {
			if t.program != devserver.Runtime {
				err = errors.Join(err, f.runner.server.Partition(t.program, t.node, relay.Pass))
			}
		}
		return err
	case KillAPI:
		defer f.under(api)()
		f.runner.writes.sample(ctx) // its count ends with it
		if err := f.runner.server.KillAPIServer(); err != nil {
			return err
		}
		pause(ctx, step.For)
		return f.runner.server.StartAPIServer(context.WithoutCancel(ctx))
	case Cordon, Evacuate:
		return f.onNode(ctx, step)
	default:
		return fmt.Errorf("carrying out %s: no such fault", step.Action)
	}
}

func (f *faults) onProgram(ctx context.Context, step Step, t target) error {
	server := f.runner.server
	switch step.Action {
	case Freeze:
		if err := server.Signal(t.program, t.node, syscall.SIGSTOP); err != nil {
			return errNothing // it ended a moment ago, and the keeper starts it again
		}
		pause(ctx, step.For)
		return server.Signal(t.program, t.node, syscall.SIGCONT)
	case Restart:
		if server.Terminate(t.program, t.node) != nil {
			return errNothing
		}
		return server.Start(t.program, t.node)
	default:
		if server.Kill(t.program, t.node) != nil {
			return errNothing
		}
		pause(ctx, step.For)
		return server.Start(t.program, t.node)
	}
}

func (f *faults) partition(ctx context.Context, step Step, t target) error {
	mode := relay.Refuse
	if step.Action == Hang {
		mode = relay.Hang
	}
	if err := f.runner.server.Partition(t.program, t.node, mode); err != nil {
		return err
	}
	pause(ctx, step.For)
	return f.runner.server.Partition(t.program, t.node, relay.Pass)
}

// onNode edits the Node, and edits it back; an API server that is away meanwhile is waited for.
func (f *faults) onNode(ctx context.Context, step Step) error {
	set := func(on bool) error {
		return until(context.WithoutCancel(ctx), time.Minute, func(ctx context.Context) error {
			node := &corev1.Node{}
			if err := f.runner.client.Get(ctx, client.ObjectKey{Name: step.Node}, node); err != nil {
				return err
			}
			if step.Action == Cordon {
				node.Spec.Unschedulable = on
			} else {
				node.Spec.Taints = nil
				if on {
					node.Spec.Taints = []corev1.Taint{{Key: v1alpha1.TaintEvacuate, Effect: corev1.TaintEffectNoExecute}}
				}
			}
			return f.runner.client.Update(ctx, node)
		})
	}
	if err := set(true); err != nil {
		return err
	}
	pause(ctx, step.For)
	return set(false)
}

// until tries again until f gives no error or the time is up.
func until(ctx context.Context, within time.Duration, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	for {
		limited, stop := context.WithTimeout(ctx, 5*time.Second)
		err := f(limited)
		stop()
		if err == nil || ctx.Err() != nil {
			return err
		}
		pause(ctx, 200*time.Millisecond)
	}
}

// keep starts what has ended by itself, as a kubelet does: an operator that has lost its office ends, and is to. It counts them.
func (f *faults) keep() {
	for _, t := range f.runner.programs() {
		lock := f.locks[t.key()]
		if !lock.TryLock() {
			continue
		}
		if f.runner.server.PID(t.program, t.node) == 0 {
			done := f.under(t.key())
			if err := f.runner.server.Start(t.program, t.node); err == nil {
				f.runner.tally.add("ended by itself, started again: " + t.key())
			}
			done()
		}
		lock.Unlock()
	}
}

// onVMM acts on the process of a slot's VM.
func (f *faults) onVMM(ctx context.Context, step Step) error {
	uid, _, _ := f.runner.slots[step.Slot].now()
	live := f.runner.observer.reality.of(uid)
	if uid == "" || len(live) == 0 {
		return errNothing
	}
	if step.Action == KillVMM {
		return live[0].signal(syscall.SIGKILL)
	}
	if live[0].signal(syscall.SIGSTOP) != nil {
		return errNothing
	}
	pause(ctx, step.For)
	if live[0].alive() {
		_ = live[0].signal(syscall.SIGCONT) // it may have been killed as a hung guest this very moment
	}
	return nil
}
