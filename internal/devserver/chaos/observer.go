package chaos

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"imp.dev/imp/api/v1alpha1"

	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Invariant is one thing that must hold at every moment.
type Invariant string

// Invariants.
const (
	OneCopy      Invariant = "never two live VMMs of one VM"
	OnceOnly     Invariant = "the workload of a one-shot is started at most once"
	StaysDone    Invariant = "a VM that has finished stays finished"
	OnlyForwards Invariant = "assignment, incarnation and failures in a row never go back"
	NeverLies    Invariant = "no VM is Ready for long without its process"
	Converges    Invariant = "every VM becomes what was wanted once faults stop"
	NothingLeft  Invariant = "nothing is left of what was deleted"
	Quiet        Invariant = "nothing is written at rest"
	NoCrash      Invariant = "no program of Imp crashes"
)

func invariants() []Invariant {
	return []Invariant{OneCopy, OnceOnly, StaysDone, OnlyForwards, NeverLies, Converges, NothingLeft, Quiet, NoCrash}
}

const (
	lookEvery   = 200 * time.Millisecond
	objectEvery = 500 * time.Millisecond
	// LieBound is how long a dead VMM's VM may still be Ready while its node's programs and the API server work. A figure of its own
	// says that it is a second at rest; here it is met by 200 VMs that start and end on the processors of a laptop.
	LieBound = 5 * time.Second
	// settled is how long programs must have been let alone before they can be held to LieBound: an agent waits up to 10 s
	// before it tries again what was refused, and a runtime adopts what it finds first.
	settled = 15 * time.Second
)

// Violation of an invariant.
type Violation struct {
	After     time.Duration // since the start of the schedule
	Invariant Invariant
	What      string
}

// observer checks the invariants against what is, until its context ends.
type observer struct {
	client    client.Client
	reality   *reality
	stateDirs []string
	began     time.Time
	// undisturbedSince says since when the programs of a node, and the API server, have been let alone; ok is false while they are not.
	undisturbedSince func(node string) (since time.Time, ok bool)

	mu         sync.Mutex
	violations []Violation
	told       map[string]bool
	checks     map[Invariant]int
	vms        map[string]*history // by UID, of all that ever were
	lookedAt   time.Time           // when the objects were last read
	worstLie   time.Duration
}

// history is what the objects of one VM have said.
type history struct {
	name     string
	oneShot  bool
	steady   bool
	finished string
	position [3]int64 // assignment, incarnation, run
	placed   int64
	attempts int32
	starts   int
	ready    time.Time // since when Ready
}

func (o *observer) violate(i Invariant, subject, format string, args ...any) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if key := string(i) + subject; o.told[key] {
		return
	} else {
		o.told[key] = true
	}
	o.violations = append(o.violations, Violation{After: time.Since(o.began), Invariant: i, What: subject + ": " + fmt.Sprintf(format, args...)})
}

func (o *observer) checked(i Invariant, n int) {
	o.mu.Lock()
	o.checks[i] += n
	o.mu.Unlock()
}

// run looks until ctx ends.
func (o *observer) run(ctx context.Context) {
	var both sync.WaitGroup
	both.Go(func() { each(ctx, lookEvery, o.lookAtProcesses) })
	both.Go(func() { each(ctx, objectEvery, func() { o.lookAtObjects(ctx) }) })
	both.Wait()
}

// each calls f now and then every d until ctx ends.
func each(ctx context.Context, d time.Duration, f func()) {
	ticker := time.NewTicker(d)
	defer ticker.Stop()
	for {
		f()
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

func (o *observer) lookAtProcesses() {
	live := o.reality.look()
	for uid, processes := range live {
		if len(processes) < 2 {
			continue
		}
		// They were seen one after another: only if the first still lives have they lived side by side.
		if processes[0].alive() && processes[1].alive() {
			o.violate(OneCopy, o.name(uid), "processes %d and %d live side by side", processes[0].pid, processes[1].pid)
		}
	}
	o.checked(OneCopy, len(live))
	o.countStarts()
}

func (o *observer) name(uid string) string {
	o.mu.Lock()
	defer o.mu.Unlock()
	if h := o.vms[uid]; h != nil {
		return h.name + " (" + uid + ")"
	}
	return uid
}

// countStarts reads what the workloads of one-shots have written themselves.
func (o *observer) countStarts() {
	o.mu.Lock()
	var shots []string
	for uid, h := range o.vms {
		if h.oneShot {
			shots = append(shots, uid)
		}
	}
	o.mu.Unlock()
	for _, uid := range shots {
		n := starts(o.stateDirs, uid)
		o.mu.Lock()
		o.vms[uid].starts = max(o.vms[uid].starts, n)
		o.mu.Unlock()
		if n > 1 {
			o.violate(OnceOnly, o.name(uid), "its workload was started %d times", n)
		}
	}
	o.checked(OnceOnly, len(shots))
}

// lookAtObjects reads all VMs. While the API server is away there is nothing to see.
func (o *observer) lookAtObjects(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	vms := &v1alpha1.ImpVMList{}
	if o.client.List(limited, vms, client.InNamespace(namespace)) != nil {
		return
	}
	now := time.Now()
	o.mu.Lock()
	o.lookedAt = now
	o.mu.Unlock()
	for i := range vms.Items {
		o.compare(&vms.Items[i], now)
	}
	for _, i := range []Invariant{StaysDone, OnlyForwards, NeverLies} {
		o.checked(i, len(vms.Items))
	}
}

// compare holds an object against what it said before and against the machine.
func (o *observer) compare(vm *v1alpha1.ImpVM, now time.Time) {
	uid, subject := string(vm.UID), vm.Name+" ("+string(vm.UID)+")"
	kind := Kind(vm.Annotations[kindAnnotation])
	o.mu.Lock()
	h := o.vms[uid]
	if h == nil {
		h = &history{name: vm.Name, oneShot: !kind.persistent(), steady: kind.steadyAttempts()}
		o.vms[uid] = h
	}
	o.mu.Unlock()
	s := vm.Status

	done := ""
	if c := meta.FindStatusCondition(s.Conditions, v1alpha1.ConditionFinished); c != nil && c.Status == "True" {
		done = c.Reason
	}
	if h.finished != "" && done != h.finished {
		o.violate(StaysDone, subject, "had finished for the reason %s, and now %q", h.finished, done)
	}
	h.finished = done

	position := [3]int64{s.ReportedAssignment, s.Incarnation, s.Run}
	for i := range position {
		if position[i] > h.position[i] {
			break
		}
		if position[i] < h.position[i] {
			o.violate(OnlyForwards, subject, "was at assignment, incarnation, run %v, and now at %v", h.position, position)
			break
		}
	}
	h.position = position
	if s.Assignment < h.placed {
		o.violate(OnlyForwards, subject, "assignment was %d and is %d", h.placed, s.Assignment)
	}
	h.placed = s.Assignment
	attempts := int32(0)
	if s.Restart != nil {
		attempts = s.Restart.Attempts
	}
	if h.steady && attempts < h.attempts {
		o.violate(OnlyForwards, subject, "had failed %d times in a row, and now %d times", h.attempts, attempts)
	}
	h.attempts = attempts
	o.believe(vm, h, subject, now)
}

// believe compares Ready with the process.
func (o *observer) believe(vm *v1alpha1.ImpVM, h *history, subject string, now time.Time) {
	if !meta.IsStatusConditionTrue(vm.Status.Conditions, v1alpha1.ConditionReady) {
		h.ready = time.Time{}
		return
	}
	if h.ready.IsZero() {
		h.ready = now
	}
	alone, ok := o.undisturbedSince(vm.Status.NodeName)
	if !ok || now.Sub(alone) < settled {
		return
	}
	lie := o.reality.missingFor(string(vm.UID), later(h.ready, alone))
	o.mu.Lock()
	o.worstLie = max(o.worstLie, lie)
	o.mu.Unlock()
	if lie > LieBound {
		o.violate(NeverLies, subject, "is Ready on %s, and has had no process for %s", vm.Status.NodeName, lie.Round(10*time.Millisecond))
	}
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// uids of all VMs that ever were.
func (o *observer) uids() (all []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for uid := range o.vms {
		all = append(all, uid)
	}
	return all
}

// state describes an object in one line, for a verdict.
func state(vm *v1alpha1.ImpVM) string {
	var words []string
	for _, c := range vm.Status.Conditions {
		if c.Type == v1alpha1.ConditionReady || c.Type == v1alpha1.ConditionFinished || c.Type == v1alpha1.ConditionScheduled {
			words = append(words, fmt.Sprintf("%s=%s/%s (%s)", c.Type, c.Status, c.Reason, c.Message))
		}
	}
	restart := ""
	if r := vm.Status.Restart; r != nil {
		restart = fmt.Sprintf(" attempts %d elsewhere %v next %v exhausted %v", r.Attempts, r.Elsewhere, r.NextTryAt, r.ExhaustedAt)
	}
	return fmt.Sprintf("%s on %q, phase %s, assignment %d (reported %d), incarnation %d,%s deleted %v, release %v: %s",
		vm.Annotations[kindAnnotation], vm.Status.NodeName, vm.Status.Phase, vm.Status.Assignment, vm.Status.ReportedAssignment,
		vm.Status.Incarnation, restart, vm.DeletionTimestamp != nil, vm.Status.Release, strings.Join(words, "; "))
}
