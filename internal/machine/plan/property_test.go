package plan

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"pgregory.net/rapid"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/restart"
	"imp.dev/imp/internal/vmm"
)

// world is a host with one VM, and a runtime that may die between any two things it does. It carries steps out by the same
// transitions as the engine does.
type world struct {
	t    *rapid.T
	dice *rand.Rand
	// saved is on disk, record in the runtime's memory.
	saved, record Record
	observed      Observation
	now           time.Time

	alive      bool // a VMM process lives
	run        int64
	started    bool // it was told to start its workload
	executions int  // of the workload, in all
	guestExit  *guestv1.Exit
	bootID     string

	forgotten bool
	calm      bool // nothing goes wrong any more
	busy      int  // steps since the last rest
	final     *machine.Exit
	network   bool
}

type crash struct{}

// chance is one in n, never when calm.
//
// The dice are one drawn seed and not a draw each: rapid prefers small numbers, and a world in which something always goes wrong
// never gets anywhere.
func (w *world) chance(n int) bool {
	return !w.calm && w.dice.IntN(n) == 0
}

// mayDie is put wherever the runtime can be killed.
func (w *world) mayDie() {
	if w.chance(12) {
		panic(crash{})
	}
}

func (w *world) save() {
	w.mayDie()
	w.saved = w.record.Clone()
	w.mayDie()
}

func (w *world) vmmEnds() {
	w.alive, w.guestExit = false, nil
	if w.observed.VMM == Alive {
		w.observed.VMM = Over
	}
}

func (w *world) view() View {
	return View{Record: w.record.Clone(), Observed: w.observed, Limits: DefaultLimits(), Now: w.now}
}

// turn is one step of the runtime, or its death.
func (w *world) turn() {
	defer func() {
		if r := recover(); r != nil {
			if _, ok := r.(crash); !ok {
				panic(r)
			}
			w.record, w.observed, w.busy = w.saved.Clone(), Observation{VMM: Unknown, HasCredentials: true}, 0
			if w.chance(6) {
				w.vmmEnds()
				w.bootID += "x"
			}
		}
	}()
	step := Next(w.view())
	if step.Rests() {
		w.rest(step)
		w.busy = 0
		return
	}
	if w.busy++; w.busy > 40 {
		w.t.Fatalf("hot loop: %d steps without a rest, now at %s (%s)", w.busy, step.Kind, step.Why)
	}
	if w.perform(step) {
		w.record.StepSucceeded(step.Kind)
	} else {
		n := 1
		if w.record.Retry != nil && w.record.Retry.Step == step.Kind {
			n += w.record.Retry.Failures
		}
		w.record.StepFailed(step.Kind, fault.Of(errors.New("did not work")), time.Duration(n)*time.Second, w.now)
		if again := Next(w.view()); again.Kind == step.Kind {
			w.t.Fatalf("%s failed and is tried again without a wait", step.Kind)
		}
	}
	w.check(step)
}

func (w *world) check(step Step) {
	if w.final != nil && (w.record.Final == nil || w.record.Final.Verdict != w.final.Verdict || !w.record.Final.At.Equal(w.final.At)) {
		w.t.Fatalf("after %s a terminal VM is not what it was: %+v, was %+v", step.Kind, w.record.Final, w.final)
	}
	if w.saved.Final != nil && w.final == nil {
		w.final = w.saved.Final
	}
	if w.record.Spec.Lifecycle == machine.Ephemeral && w.executions > 1 {
		w.t.Fatalf("the workload of an ephemeral VM was executed %d times", w.executions)
	}
	if w.record.RemovedAt != nil && (w.alive || w.network) {
		w.t.Fatalf("removed, and something is left: VMM %v, network %v", w.alive, w.network)
	}
}

func (w *world) rest(step Step) {
	if !step.Until.IsZero() {
		w.now = maxTime(w.now, step.Until)
	} else {
		w.now = w.now.Add(time.Hour)
	}
	switch {
	case w.calm || !w.alive:
	case w.chance(3):
		w.vmmEnds()
	case w.started && w.chance(2):
		w.guestExit = &guestv1.Exit{Code: w.dice.IntN(2)}
		w.observed.GuestExit = w.guestExit
	}
}

func maxTime(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// perform carries a step out; false is a failure.
func (w *world) perform(step Step) bool {
	if w.chance(6) && step.Kind != StartVMM {
		return false
	}
	r := &w.record
	switch step.Kind {
	case AwaitGuest, Configure, StartWorkload, Stop, Acknowledge:
		if r.Boot.Handle == nil || w.observed.VMM == Unknown {
			w.t.Fatalf("%s of a run that nobody holds", step.Kind)
		}
	}
	switch step.Kind {
	case Recover:
		w.observed.VMM = Over
		if w.alive && w.run == r.Boot.Run {
			w.observed.VMM = Alive
			w.observed.GuestExit = w.guestExit
		}
		r.Recovered(w.observed.VMM == Alive, w.now)
	case EnsureImage:
		r.ImageReady(r.Spec.Image.Reference, image.Base{Digest: "sha256:" + r.Spec.Image.Reference})
	case EnsureDisk:
		r.DiskReady(w.now)
	case AttachNetwork:
		r.NetworkUsed = true
		w.save()
		w.network, w.observed.Attached = true, true
	case StartVMM:
		return w.launch()
	case AwaitGuest, Configure:
		return w.guestStep(step)
	case StartWorkload:
		r.SendingStart(w.now)
		w.save()
		if !w.alive {
			w.observed.VMM = Over
			return true
		}
		if !w.started {
			w.started = true
			w.executions++
		}
		w.mayDie()
		r.StartAccepted(w.now)
	case FailStart:
		r.StartFailed(FailedStart{Failure: Failure{Reason: fault.RuntimeStartFailed, Message: "no guest"}, Quick: w.alive, Jitter: w.dice.Float64()}, w.now)
	case Stop:
		r.Stopping(step.Grace, step.Verdict, w.now)
		w.save()
		if w.alive && w.started && w.chance(2) {
			w.guestExit = &guestv1.Exit{Code: 143}
			w.observed.GuestExit = w.guestExit
		}
	case CollectVerdict:
		e, reported := Judge(Testimony{
			Boot: *r.Boot, Ordered: step.Verdict, Why: step.Why, Report: w.observed.GuestExit, HostBootID: w.bootID, Lifecycle: r.Spec.Lifecycle, Now: w.now,
			Evidence: vmm.Evidence{Cause: []vmm.Cause{vmm.CauseUnknown, vmm.CausePanic, vmm.CauseReboot, vmm.CausePowerOff}[w.dice.IntN(4)]},
		})
		r.Concluded(e, reported, w.dice.Float64(), w.now)
	case Acknowledge:
		if w.chance(2) {
			w.vmmEnds()
		}
		r.Acknowledged(w.now)
	case DestroyVMM:
		w.vmmEnds()
		w.mayDie()
		r.VMMDestroyed()
		w.observed.VMM, w.observed.GuestExit, w.observed.Attached = Unknown, nil, false
	case Detach:
		if w.alive {
			w.t.Fatal("network detached from a living VMM")
		}
		w.network, w.observed.Attached = false, false
		w.mayDie()
		r.NetworkUsed = false
	case FreeDisk:
		if w.alive {
			w.t.Fatal("disk freed under a living VMM")
		}
		r.DiskFreed()
	case Finish:
		r.Finish(machine.Exit{Verdict: step.Verdict, At: w.now}, w.now)
	case WriteTombstone:
		r.Tombstoned(w.now)
	case Succeed:
		*r = r.Succeeded(w.now)
		w.final = nil
	case Forget:
		w.forgotten = true
		return true
	default:
		w.t.Fatalf("unexpected step %s", step.Kind)
	}
	w.save()
	return true
}

func (w *world) launch() bool {
	w.record.BeginBoot("nonce", w.bootID, 0, w.now)
	w.save()
	if w.alive {
		w.t.Fatalf("run %d is launched while run %d lives", w.record.Run, w.run)
	}
	if w.chance(4) {
		w.record.StartFailed(FailedStart{Failure: Failure{Reason: fault.RuntimeStartFailed, Message: "no VMM"}}, w.now)
		w.save()
		return true
	}
	w.alive, w.run, w.started, w.guestExit = true, w.record.Run, false, nil
	w.mayDie()
	w.record.Launched(vmm.Handle{Driver: "fake"}, w.now)
	w.save()
	w.observed.VMM, w.observed.GuestExit, w.observed.Attached = Alive, nil, false
	return true
}

func (w *world) guestStep(step Step) bool {
	switch {
	case !w.alive || w.chance(5):
		w.vmmEnds()
		w.observed.VMM = Over
		return true
	case w.chance(4):
		w.now = maxTime(w.now, step.Until)
		return true
	case step.Kind == AwaitGuest:
		w.record.Answered(w.now)
	default:
		w.record.ConfiguredNow(w.now)
	}
	w.save()
	return true
}

func specs() *rapid.Generator[machine.Spec] {
	return rapid.Custom(func(t *rapid.T) machine.Spec {
		s := spec()
		s.Lifecycle = rapid.SampledFrom([]machine.Lifecycle{machine.Ephemeral, machine.Persistent}).Draw(t, "lifecycle")
		s.Grace = time.Duration(rapid.IntRange(0, 60).Draw(t, "grace")) * time.Second
		if rapid.Bool().Draw(t, "with network") {
			s.Interfaces = append(s.Interfaces, networkInterface())
		}
		if rapid.Bool().Draw(t, "with limit") {
			n := rapid.Int32Range(0, 3).Draw(t, "retries")
			s.Restart = restart.Policy{MaxRetries: &n, InitialDelay: time.Second, MaxDelay: time.Minute}
		}
		if rapid.IntRange(0, 3).Draw(t, "with deadline") == 0 {
			d := noon.Add(time.Duration(rapid.IntRange(0, 7200).Draw(t, "deadline")) * time.Second)
			s.Deadline = &d
		}
		return s
	})
}

// order gives the VM an order that may come at any moment.
func (w *world) order() {
	r := &w.record
	switch w.dice.IntN(40) {
	case 0:
		r.OrderRemoval(machine.Removal{Grace: time.Duration(w.dice.IntN(60)) * time.Second}, w.now)
	case 1:
		if r.Spec.Lifecycle == machine.Persistent {
			next := r.Spec
			next.Generation++
			next.Image.Reference = []string{"a", "b"}[w.dice.IntN(2)]
			r.Update(next, false, w.now)
		}
	case 2:
		if r.Successor == nil && r.Spec.Assignment < 3 {
			next := r.Spec
			next.Assignment++
			next.Lifecycle = machine.Persistent
			r.Successor = &next
			if r.Removal == nil {
				r.OrderRemoval(machine.Removal{}, w.now)
			}
		}
	default:
		return
	}
	w.saved = r.Clone()
}

// TestAnyHistoryOfCrashes lets everything go wrong that can, and then orders the removal, which must end.
func TestAnyHistoryOfCrashes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		spec, seed := specs().Draw(t, "spec"), rapid.Uint64().Draw(t, "seed")
		for i := range uint64(10) {
			history(t, spec, rand.New(rand.NewPCG(seed, i)))
		}
	})
}

func history(t *rapid.T, spec machine.Spec, dice *rand.Rand) {
	w := &world{t: t, dice: dice, now: noon, record: New(spec, noon), observed: Observation{VMM: Unknown, HasCredentials: true}, bootID: "boot"}
	w.saved = w.record.Clone()
	for range 200 {
		w.order()
		w.turn()
		if w.forgotten {
			return
		}
	}
	w.calm = true
	w.record.Successor = nil
	w.record.OrderRemoval(machine.Removal{}, w.now)
	w.saved = w.record.Clone()
	for n := 0; w.record.RemovedAt == nil; n++ {
		if n > 60 {
			t.Fatalf("removal does not end: %s", Next(w.view()).Kind)
		}
		w.turn()
	}
	if w.alive || w.network || w.record.Boot != nil {
		t.Fatalf("something is left after removal: VMM %v, network %v, boot %+v", w.alive, w.network, w.record.Boot)
	}
}
