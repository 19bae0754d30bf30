package plan

import (
	"errors"
	"fmt"
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
	hung      bool // the guest answers nothing
	disk      bool // a private disk is there
	keep      bool // its removal was ordered, and that it be kept
	discarded int  // disks that were removed for good
	sent      map[int64]bool
	// notBefore is when the next boot may begin after a failure, by the policy of that time; an order may make it sooner.
	notBefore, notBeforeSaved time.Time
}

func newWorld(t *rapid.T, spec machine.Spec, dice *rand.Rand) *world {
	w := &world{
		t: t, dice: dice, now: noon, record: New(spec, noon), observed: Observation{VMM: Unknown, HasCredentials: true}, bootID: "boot", sent: map[int64]bool{},
	}
	w.saved = w.record.Clone()
	return w
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
	w.saved, w.notBeforeSaved = w.record.Clone(), w.notBefore
	w.mayDie()
}

func (w *world) vmmEnds() {
	w.alive, w.guestExit, w.hung = false, nil, false
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
			w.observed, w.busy, w.notBefore = Observation{VMM: Unknown, HasCredentials: true}, 0, w.notBeforeSaved
			if w.chance(4) {
				w.now, w.notBefore, w.notBeforeSaved = w.now.Add(-time.Duration(w.dice.IntN(48))*time.Hour), time.Time{}, time.Time{}
			}
			w.record = Reloaded(w.saved, w.now)
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
	if step.Kind == FreeDisk && w.record.Removal == nil && w.record.Final == nil {
		w.t.Fatalf("the disk of a VM that is neither removed nor finished is freed")
	}
	if f := w.record.Final; f != nil && f.Verdict == machine.Stopped && w.record.Removal == nil {
		w.t.Fatalf("after %s a VM that was halted is at its end", step.Kind)
	}
	if b, h := w.record.Boot, w.record.History; b != nil && !w.record.waits() && (h.ExhaustedAt != nil || h.Elsewhere || h.NextTryAt != nil) {
		w.t.Fatalf("after %s a VM that is being tried waits: %+v", step.Kind, h)
	}
	if w.keep && w.record.Removal != nil && !w.record.Removal.KeepDisk {
		w.t.Fatalf("a disk that is to be kept is not any more")
	}
	if len(w.record.Counters.Ends) > 0 {
		n := int64(0)
		for _, of := range w.record.Counters.Ends {
			n += of
		}
		if n != w.record.Counters.Exits {
			w.t.Fatalf("%d ends by verdict, %d exits", n, w.record.Counters.Exits)
		}
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
	if w.alive && !w.hung && w.observed.VMM == Alive {
		w.observed.HeardAt = w.now
	}
	switch {
	case w.calm || !w.alive:
	case w.chance(8):
		w.hung = true
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
		w.observed.HeardAt = w.now
		r.Recovered(w.observed.VMM == Alive, w.now)
	case EnsureImage:
		r.ImageReady(r.Spec.Image.Reference, image.Base{Digest: "sha256:" + r.Spec.Image.Reference})
	case EnsureDisk:
		w.disk = true
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
		if w.sent[r.Boot.Run] = true; len(w.sent) > 1 && r.Spec.Lifecycle == machine.Ephemeral {
			w.t.Fatalf("a one-shot's start was sent to %d machines", len(w.sent))
		}
		if w.hung || w.chance(8) {
			w.hung = true // the start may or may not have arrived; nothing is answered any more
			w.now = maxTime(w.now, step.Until)
			return false
		}
		if !w.started {
			w.started = true
			w.executions++
		}
		w.mayDie()
		if w.chance(4) {
			return false // the answer is lost
		}
		w.observed.HeardAt = w.now
		r.StartAccepted(w.now)
	case FailStart:
		r.StartFailed(FailedStart{Failure: Failure{Reason: fault.RuntimeStartFailed, Message: "no guest"}, Quick: w.alive, Jitter: w.dice.Float64()}, w.now)
		w.backsOff(!r.QuickRetryUsed)
	case Stop:
		r.Stopping(step.Grace, step.Verdict, w.now)
		w.save()
		if w.alive && w.started && !w.hung && w.chance(2) {
			w.guestExit = &guestv1.Exit{Code: 143}
			w.observed.GuestExit = w.guestExit
		}
	case CollectVerdict:
		ordered, silent := step.Verdict, step.Verdict == machine.GuestHung
		if silent {
			ordered = ""
		}
		e, reported := Judge(Testimony{
			Boot: *r.Boot, Ordered: ordered, Hung: silent, Why: step.Why, Report: w.observed.GuestExit, HostBootID: w.bootID, Lifecycle: r.Spec.Lifecycle, Now: w.now,
			Evidence: vmm.Evidence{Cause: []vmm.Cause{vmm.CauseUnknown, vmm.CausePanic, vmm.CauseReboot, vmm.CausePowerOff}[w.dice.IntN(4)]},
		})
		r.Concluded(e, reported, w.dice.Float64(), w.now)
		kind, _ := kindOf(e.Verdict)
		w.backsOff(kind == restart.Failure)
	case Acknowledge:
		if w.chance(2) {
			w.vmmEnds()
		}
		r.Acknowledged(w.now)
	case DestroyVMM:
		w.vmmEnds()
		w.mayDie()
		r.VMMDestroyed(w.now)
		w.observed = Observation{VMM: Unknown, HasCredentials: true}
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
		if w.disk && (r.Removal == nil || !r.Removal.KeepDisk) {
			w.discarded++
		}
		w.disk = false
		r.DiskFreed()
	case Finish:
		r.Finish(machine.Exit{Verdict: step.Verdict, At: w.now}, w.now)
	case WriteTombstone:
		r.Tombstoned(w.now)
	case Succeed:
		*r = r.Succeeded(w.now)
		w.final, w.keep, w.sent, w.notBefore, w.executions = nil, false, map[int64]bool{}, time.Time{}, 0
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
	if w.now.Before(w.notBefore) {
		w.t.Fatalf("a boot begins at %s, %s too soon after a failure", w.now, w.notBefore.Sub(w.now))
	}
	if h := w.record.History; h.Elsewhere || (h.ExhaustedAt != nil && h.NextTryAt == nil) || w.record.Spec.Halt != nil {
		w.t.Fatalf("a boot begins that is not to be: history %+v, halt %+v", h, w.record.Spec.Halt)
	}
	w.record.BeginBoot("nonce", w.bootID, 0, w.now)
	w.save()
	if w.alive {
		w.t.Fatalf("run %d is launched while run %d lives", w.record.Run, w.run)
	}
	if w.chance(4) {
		w.record.StartFailed(FailedStart{Failure: Failure{Reason: fault.RuntimeStartFailed, Message: "no VMM"}}, w.now)
		w.backsOff(true)
		w.save()
		return true
	}
	w.alive, w.run, w.started, w.guestExit, w.hung = true, w.record.Run, false, nil, false
	w.mayDie()
	w.record.Launched(vmm.Handle{Driver: "fake"}, w.now)
	w.save()
	w.observed.VMM, w.observed.GuestExit, w.observed.Attached, w.observed.HeardAt = Alive, nil, false, w.now
	return true
}

// backsOff notes what a failure asks for: a wait of the initial delay at least.
func (w *world) backsOff(failure bool) {
	w.notBefore = time.Time{}
	if failure {
		p := w.record.startPolicy().OrDefault()
		w.notBefore = w.now.Add(p.InitialDelay)
	}
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

func policies(t *rapid.T) restart.Policy {
	p := restart.Policy{InitialDelay: time.Second, MaxDelay: time.Minute}
	p.Mode = rapid.SampledFrom([]restart.Mode{"", restart.InPlace, restart.Reschedule}).Draw(t, "mode")
	p.OnExhaustion = rapid.SampledFrom([]restart.OnExhaustion{"", restart.Fail, restart.ManualReset, restart.CoolDown}).Draw(t, "on exhaustion")
	if rapid.Bool().Draw(t, "with limit") {
		n := rapid.Int32Range(0, 3).Draw(t, "retries")
		p.MaxRetries = &n
	}
	return p
}

func specs() *rapid.Generator[machine.Spec] {
	return rapid.Custom(func(t *rapid.T) machine.Spec {
		s := spec()
		s.Lifecycle = rapid.SampledFrom([]machine.Lifecycle{machine.Ephemeral, machine.Persistent}).Draw(t, "lifecycle")
		s.Grace = time.Duration(rapid.IntRange(0, 60).Draw(t, "grace")) * time.Second
		if rapid.Bool().Draw(t, "with network") {
			s.Interfaces = append(s.Interfaces, networkInterface())
		}
		if rapid.Bool().Draw(t, "with policy") {
			s.Restart = policies(t)
		}
		if rapid.IntRange(0, 3).Draw(t, "with deadline") == 0 {
			d := noon.Add(time.Duration(rapid.IntRange(0, 7200).Draw(t, "deadline")) * time.Second)
			s.Deadline = &d
		}
		return s
	})
}

// edit changes the Spec as a user or the operator may, at any moment.
func (w *world) edit(change func(*machine.Spec)) {
	next := w.record.Spec
	next.Generation++
	change(&next)
	w.record.Update(next, false, w.now)
	w.notBefore = time.Time{}
}

// order gives the VM an order that may come at any moment.
func (w *world) order(other restart.Policy) {
	r := &w.record
	persistent := r.Spec.Lifecycle == machine.Persistent
	switch n := w.dice.IntN(60); {
	case n == 0:
		how := machine.Removal{Grace: time.Duration(w.dice.IntN(60)) * time.Second, KeepDisk: w.dice.IntN(2) == 0}
		w.keep = w.keep || how.KeepDisk
		r.OrderRemoval(how, w.now)
	case n == 1 && persistent:
		w.edit(func(s *machine.Spec) { s.Image.Reference = []string{"a", "b"}[w.dice.IntN(2)] })
	case n == 2 && r.Successor == nil && r.Spec.Assignment < 3:
		next := r.Spec
		next.Assignment++
		next.Lifecycle, next.Halt, next.History = machine.Persistent, nil, r.History
		r.Successor = &next
		if r.Removal == nil {
			r.OrderRemoval(machine.Removal{KeepDisk: true}, w.now)
		}
	case n == 3 && persistent:
		w.edit(func(s *machine.Spec) { s.Halt = &machine.Halt{Reason: "Stopped", Message: "by order"} })
	case n < 6 && persistent && r.Spec.Halt != nil:
		w.edit(func(s *machine.Spec) { s.Halt = nil })
	case n == 6 && persistent:
		w.edit(func(s *machine.Spec) { s.Restart, other = other, s.Restart })
	case n == 7 && persistent:
		w.edit(func(s *machine.Spec) { s.Reset += "x" })
	default:
		return
	}
	w.saved, w.notBeforeSaved = r.Clone(), w.notBefore
}

// TestAnyHistoryOfCrashes lets everything go wrong that can; once nothing does any more, the VM comes to be what is wished, and then
// its removal ends.
func TestAnyHistoryOfCrashes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		spec, other, seed := specs().Draw(t, "spec"), policies(t), rapid.Uint64().Draw(t, "seed")
		for i := range uint64(10) {
			history(t, spec, other, rand.New(rand.NewPCG(seed, i)))
		}
	})
}

func history(t *rapid.T, spec machine.Spec, other restart.Policy, dice *rand.Rand) {
	w := newWorld(t, spec, dice)
	for range 200 {
		w.order(other)
		w.turn()
		if w.forgotten {
			return
		}
	}
	w.calm = true
	if w.record.Removal == nil {
		w.comesToBeWhatIsWished()
	}
	before := w.record.Removal
	w.record.Successor = nil
	w.record.OrderRemoval(machine.Removal{}, w.now)
	if before != nil && before.KeepDisk && !w.record.Removal.KeepDisk {
		t.Fatal("a repeated order to remove gives up a disk that is to be kept")
	}
	w.saved = w.record.Clone()
	for n := 0; w.record.RemovedAt == nil; n++ {
		if n > 60 {
			t.Fatalf("removal does not end: %s", Next(w.view()).Kind)
		}
		w.turn()
	}
	if w.alive || w.network || w.record.Boot != nil || w.disk {
		t.Fatalf("something is left after removal: VMM %v, network %v, disk %v, boot %+v", w.alive, w.network, w.disk, w.record.Boot)
	}
}

// settled turns until nothing is done any more but waiting for an event.
func (w *world) settled(what string) Step {
	began, log := w.now, ""
	for range 120 {
		step := Next(w.view())
		if step.Rests() && (step.Until.IsZero() || (step.Kind == Watch && w.record.Boot != nil && w.record.Boot.StartedAt != nil && w.record.Boot.Exit == nil && w.record.Boot.Stop == nil && !w.hung)) {
			if took := w.now.Sub(began); took > 3*time.Hour {
				w.t.Fatalf("%s took %s: %s, lifecycle %s", what, took, log, w.record.Spec.Lifecycle)
			}
			return step
		}
		log += fmt.Sprintf("\n%s %s (%s) until %s", w.now, step.Kind, step.Why, step.Until)
		w.turn()
	}
	w.t.Fatalf("%s does not come: %s", what, Next(w.view()).Kind)
	return Step{}
}

// comesToBeWhatIsWished: once nothing goes wrong any more a VM that is neither finished nor to be removed can be halted and started.
func (w *world) comesToBeWhatIsWished() {
	persistent := w.record.Spec.Lifecycle == machine.Persistent
	disk := w.disk
	if persistent && w.dice.IntN(2) == 0 {
		w.edit(func(s *machine.Spec) { s.Halt, s.Deadline = &machine.Halt{Reason: "Stopped", Message: "by order"}, nil })
		step := w.settled("halting")
		if w.record.Final == nil {
			if got := StateOf(w.record, step); got != machine.Halted || w.alive || (disk && !w.disk) || w.record.Checks.Started.Reason != "Stopped" {
				w.t.Fatalf("halted VM is %s, VMM %v, disk %v (before %v), started %+v", got, w.alive, w.disk, disk, w.record.Checks.Started)
			}
		}
	}
	if persistent {
		w.edit(func(s *machine.Spec) { s.Halt, s.Deadline = nil, nil })
	}
	if persistent && w.dice.IntN(2) == 0 {
		for range w.dice.IntN(12) { // and a halt that is withdrawn in the middle of it
			w.turn()
		}
		w.edit(func(s *machine.Spec) { s.Halt = &machine.Halt{Reason: "Stopped", Message: "by order"} })
		for range w.dice.IntN(3) {
			w.turn()
		}
		w.edit(func(s *machine.Spec) { s.Halt = nil })
	}
	step := w.settled("starting")
	r := &w.record
	if r.Final == nil && persistent && (r.History.Elsewhere || r.History.ExhaustedAt != nil) {
		if w.alive || r.Boot != nil || r.Checks.Started.OK == nil || *r.Checks.Started.OK {
			w.t.Fatalf("a VM that is not to be started here lives: %+v", r.Checks.Started)
		}
		w.edit(func(s *machine.Spec) { s.Reset += "y" })
		step = w.settled("starting after a reset")
	}
	if got := StateOf(*r, step); got != machine.Running && got != machine.Finished {
		w.t.Fatalf("VM is %s (%s: %s), history %+v", got, step.Kind, step.Why, r.History)
	}
	if (r.Final == nil) != w.alive {
		w.t.Fatalf("final %+v, and a VMM lives: %v", r.Final, w.alive)
	}
}
