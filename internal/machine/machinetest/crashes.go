package machinetest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"imp.dev/imp/internal/machine"
	vmmfake "imp.dev/imp/internal/vmm/fake"
)

// passage is something a VM goes through, during which the runtime may die at any point.
type passage struct {
	name string
	spec func() machine.Spec
	// with says that the VM has a network.
	network bool
	// before brings the VM where the passage begins, nil if that is nowhere.
	before func(t *testing.T, h *Harness, s *machine.Spec)
	// order begins the passage. It is given again once the runtime is back, as the agent would.
	order func(ctx context.Context, h *Harness, s machine.Spec) error
	// start begins the passage with the start of the runtime instead.
	start bool
	// reached is the passage's end as it is told, last the point after which nothing more is done.
	reached func(machine.Status) bool
	last    string
	// after checks what holds then.
	after func(t *testing.T, h *Harness, s machine.Spec, st machine.Status)
}

const crashWord = "workload-was-here"

// firstTime ends the name of a point that was not passed before.
const firstTime = ", time 1"

func bringUp(t *testing.T, h *Harness, s *machine.Spec) {
	t.Helper()
	ensure(t, h, *s)
	awaitState(t, h, s.ID, machine.Running)
}

func reEnsure(ctx context.Context, h *Harness, s machine.Spec) error {
	_, err := h.Service.Ensure(ctx, s)
	return err
}

func removing(how machine.Removal) func(context.Context, *Harness, machine.Spec) error {
	return func(ctx context.Context, h *Harness, s machine.Spec) error {
		_, err := h.Service.Remove(ctx, machine.Ref{ID: s.ID, Assignment: s.Assignment}, how)
		return err
	}
}

func passages() []passage {
	running := func(st machine.Status) bool { return st.State == machine.Running }
	is := func(state machine.State) func(machine.Status) bool {
		return func(st machine.Status) bool { return st.State == state }
	}
	calm := vmmfake.Script{}
	calm.Guest.Output = crashWord + "\n"
	once := exits(0, 100*time.Millisecond, crashWord+"\n")
	return []passage{
		{
			last: "after FreeDisk", name: "a one-shot that is created and ends", spec: func() machine.Spec { return NewSpec(WithScript(once)) }, order: reEnsure, reached: is(machine.Finished),
			after: func(t *testing.T, h *Harness, s machine.Spec, st machine.Status) {
				if st.Final.Verdict != machine.Succeeded || executions(h, s.ID) != 1 {
					t.Errorf("executed %d times: %s", executions(h, s.ID), pretty(st))
				}
				eventually(t, "a finished VM without process and disk", func() bool {
					_, err := os.Stat(filepath.Join(h.StateDir, "vm", s.ID, "private.ext4"))
					return len(h.PIDs(t, s.ID)) == 0 && os.IsNotExist(err)
				})
			},
		},
		{
			last: "after StartWorkload", name: "a persistent VM that is created", spec: func() machine.Spec { return NewSpec(IsPersistent, WithScript(calm)) }, network: true, order: reEnsure, reached: running,
			after: func(t *testing.T, h *Harness, s machine.Spec, st machine.Status) {
				if st.Incarnation != 1 || st.DiskGeneration != 1 || len(h.PIDs(t, s.ID)) != 1 {
					t.Errorf("VMMs %v: %s", h.PIDs(t, s.ID), pretty(st))
				}
			},
		},
		{
			last: "after DestroyVMM", name: "a VM that is halted", spec: func() machine.Spec { return NewSpec(IsPersistent, WithScript(calm)) }, network: true,
			before: func(t *testing.T, h *Harness, s *machine.Spec) { bringUp(t, h, s); haltSpec(s, "Stopped") },
			order:  reEnsure, reached: is(machine.Halted),
			after: func(t *testing.T, h *Harness, s machine.Spec, st machine.Status) {
				privateDisk(t, h, s.ID)
				if st.LastExit.Verdict != machine.Stopped || st.History.Attempts != 0 || st.Counters.Ends[machine.Stopped] != 1 || len(h.PIDs(t, s.ID)) != 0 {
					t.Errorf("VMMs %v: %s", h.PIDs(t, s.ID), pretty(st))
				}
			},
		},
		{
			last: "after StartWorkload", name: "a VM that is started again in place", network: true,
			spec: func() machine.Spec {
				return NewSpec(IsPersistent, WithScript(vmmfake.Script{Runs: []vmmfake.Script{exits(7, 1500*time.Millisecond, ""), calm}}))
			},
			before: bringUp, order: func(context.Context, *Harness, machine.Spec) error { return nil },
			reached: func(st machine.Status) bool { return st.State == machine.Running && st.Incarnation == 2 },
			after: func(t *testing.T, h *Harness, s machine.Spec, st machine.Status) {
				if st.History.Attempts != 1 || st.LastExit.Verdict != machine.Failed || st.Counters.Exits != 1 || st.DiskGeneration != 1 || len(h.PIDs(t, s.ID)) != 1 {
					t.Errorf("VMMs %v: %s", h.PIDs(t, s.ID), pretty(st))
				}
			},
		},
		{
			last: "after Recover", name: "a VM that is adopted", spec: func() machine.Spec { return NewSpec(WithScript(calm)) }, before: bringUp, start: true,
			reached: func(st machine.Status) bool { return running(st) && st.Counters.Adopted > 0 },
			after: func(t *testing.T, h *Harness, s machine.Spec, st machine.Status) {
				if st.Incarnation != 1 || st.Counters.Starts != 1 || executions(h, s.ID) != 1 || len(h.PIDs(t, s.ID)) != 1 {
					t.Errorf("executed %d times, VMMs %v: %s", executions(h, s.ID), h.PIDs(t, s.ID), pretty(st))
				}
			},
		},
		{
			last: "after WriteTombstone", name: "a VM that is deleted", spec: func() machine.Spec { return NewSpec(WithScript(calm)) }, network: true, before: bringUp,
			order: removing(machine.Removal{}), reached: is(machine.Removed),
			after: func(t *testing.T, h *Harness, _ machine.Spec, _ machine.Status) {
				if n := discardedDisks(t, h); n != 0 {
					t.Errorf("%d disks are in the trash of a VM that was deleted", n)
				}
			},
		},
		{
			last: "after WriteTombstone", name: "a VM that is released with its disk kept", spec: func() machine.Spec { return NewSpec(IsPersistent, WithScript(calm)) }, network: true, before: bringUp,
			order: removing(machine.Removal{Grace: 5 * time.Second, KeepDisk: true}), reached: is(machine.Removed),
			after: func(t *testing.T, h *Harness, _ machine.Spec, _ machine.Status) {
				if n := discardedDisks(t, h); n != 1 {
					t.Errorf("%d disks are in the trash, want the VM's", n)
				}
			},
		},
		{
			last: "after StartWorkload", name: "a VM that is assigned to its node anew", spec: func() machine.Spec { return NewSpec(IsPersistent, WithScript(calm)) },
			before: func(t *testing.T, h *Harness, s *machine.Spec) { bringUp(t, h, s); s.Assignment, s.Grace = 2, 0 },
			order:  reEnsure, reached: func(st machine.Status) bool { return st.Assignment == 2 && running(st) },
			after: func(t *testing.T, h *Harness, s machine.Spec, st machine.Status) {
				if n := discardedDisks(t, h); n != 1 || len(h.PIDs(t, s.ID)) != 1 || st.Incarnation != 1 {
					t.Errorf("%d disks in the trash, VMMs %v: %s", n, h.PIDs(t, s.ID), pretty(st))
				}
			},
		},
	}
}

// executions of the workload of VM id, over all its boots.
func executions(h *Harness, id string) int {
	b, _ := os.ReadFile(filepath.Join(h.StateDir, "vm", id, "console.log"))
	return strings.Count(string(b), crashWord)
}

// trap notes the points an engine reaches and makes it die at one.
type trap struct {
	mu     sync.Mutex
	seen   map[string]int
	points []string // in order, each with how often it was reached before
	at     string
	died   bool
}

func (c *trap) reach(point string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.seen == nil {
		c.seen = map[string]int{}
	}
	c.seen[point]++
	name := fmt.Sprintf("%s, time %d", point, c.seen[point])
	c.points = append(c.points, name)
	if name == c.at && !c.died {
		c.died = true
		return errors.New("killed by the test")
	}
	return nil
}

func (c *trap) passed(point string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.seen[point] > 0
}

func (c *trap) sprung() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.died
}

// RunCrashes lets the runtime die before and after each step and each write of everything a VM goes through, and checks that what was
// ordered comes to be all the same, once, and leaves nothing. The points are those that the engine itself passes, whatever its steps are.
func RunCrashes(t *testing.T, newHarness func(t *testing.T) *Harness) {
	for _, p := range passages() {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			calm := &trap{}
			t.Run("without a crash", func(t *testing.T) { p.run(t, newHarness(t), calm) })
			if len(calm.points) < 4 || t.Failed() {
				t.Fatalf("%d points were passed: %v", len(calm.points), calm.points)
			}
			var missed atomic.Int32
			t.Run("with a crash", func(t *testing.T) {
				for _, at := range calm.points {
					t.Run(at, func(t *testing.T) {
						t.Parallel()
						c := &trap{at: at}
						p.run(t, newHarness(t), c)
						switch {
						case c.died:
						case strings.HasSuffix(at, firstTime):
							t.Error("the point was not passed again")
						default:
							missed.Add(1)
							t.Log("the engine came through without taking the step so often")
						}
					})
				}
			})
			// A step that waits for an answer is taken again when something else wakes the engine, so how often is partly chance. Seldom though.
			if n := int(missed.Load()); 10*n > len(calm.points)+10 {
				t.Errorf("%d of %d points were not passed again", n, len(calm.points))
			}
		})
	}
}

func (p passage) run(t *testing.T, h *Harness, c *trap) {
	s := p.spec()
	if p.network {
		In(setNetwork(t, h))(&s)
	}
	if p.before != nil {
		p.before(t, h, &s)
	}
	if p.start {
		h.Stop(t)
	}
	h.SetFailpoint(c.reach)
	if p.start {
		h.Start(t)
	} else if err := p.order(t.Context(), h, s); err != nil && !c.sprung() {
		t.Fatal(err)
	}
	if !p.comesThrough(t, h, s.ID, c) {
		h.SetFailpoint(nil)
		h.Restart(t)
		if n := len(h.PIDs(t, s.ID)); n > 1 {
			t.Errorf("%d VMMs at once", n)
		}
		if !p.start {
			if err := p.order(t.Context(), h, s); err != nil {
				t.Fatalf("ordered again: %v", err)
			}
		}
	}
	st := await(t, h, s.ID, "through", p.reached)
	h.SetFailpoint(nil)
	p.after(t, h, s, st)
	remove(t, h, s, 0)
	awaitState(t, h, s.ID, machine.Removed)
	noLeftovers(t, h)
}

// comesThrough waits for the passage's end (true) or for the runtime's.
func (p passage) comesThrough(t *testing.T, h *Harness, id string, c *trap) bool {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	through := errors.New("through")
	err := h.Service.Watch(ctx, func(u machine.Update) error {
		if u.Status != nil && u.Status.ID == id && p.reached(*u.Status) {
			return through
		}
		return nil
	})
	if !errors.Is(err, through) && !c.sprung() {
		t.Fatalf("neither through nor dead: %v\n%s", err, logTail(h, id))
	}
	eventually(t, "the last point, or death", func() bool { return c.sprung() || c.passed(p.last) })
	return !c.sprung()
}
