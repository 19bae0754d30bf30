package plan

import (
	"fmt"
	"time"

	"imp.dev/imp/internal/machine"
)

// Kind of a step.
type Kind string

// Steps.
const (
	Recover        Kind = "Recover"        // take up the VMM of an earlier process of the runtime
	EnsureImage    Kind = "EnsureImage"    // base in the cache and linked
	EnsureDisk     Kind = "EnsureDisk"     // private disk
	AttachNetwork  Kind = "AttachNetwork"  // TAPs open
	StartVMM       Kind = "StartVMM"       // write the intent, launch, write the handle
	AwaitGuest     Kind = "AwaitGuest"     // until the guest's agent answers
	Configure      Kind = "Configure"      // identity and file systems
	StartWorkload  Kind = "StartWorkload"  // write start-sent, send
	Watch          Kind = "Watch"          // nothing to do until something happens, or Until
	FailStart      Kind = "FailStart"      // write down why the boot came to nothing
	Stop           Kind = "Stop"           // ask the guest to end its workload within Grace
	CollectVerdict Kind = "CollectVerdict" // write down how the incarnation ended
	Acknowledge    Kind = "Acknowledge"    // let the guest stop its machine
	DestroyVMM     Kind = "DestroyVMM"     // nothing of the run is left afterwards
	Detach         Kind = "Detach"         // network
	FreeDisk       Kind = "FreeDisk"       // link, private disk and directories; the console stays until WriteTombstone
	Finish         Kind = "Finish"         // write Final without a boot
	WriteTombstone Kind = "WriteTombstone" // everything is gone
	Succeed        Kind = "Succeed"        // the successor takes over
	Forget         Kind = "Forget"         // the tombstone has done its time
	WaitUntil      Kind = "WaitUntil"      // for a try, at Until
	WaitForSecrets Kind = "WaitForSecrets" // for an Ensure with credentials
	WaitForSpec    Kind = "WaitForSpec"    // for another Spec: this one cannot work
)

// Step is one thing to do.
type Step struct {
	Kind Kind
	// Check that decided, and Why in one line.
	Check, Why string
	// Until ends Watch and WaitUntil; zero is only by an event. For AwaitGuest, Configure and StartWorkload it is the deadline.
	Until time.Time
	// Grace of Stop.
	Grace time.Duration
	// Verdict is what an ordered end (Stop, CollectVerdict, Finish) is to be called, "" if nothing was ordered.
	Verdict machine.Verdict
}

// Rests says that the step waits and does nothing.
func (s Step) Rests() bool {
	switch s.Kind {
	case Watch, WaitUntil, WaitForSecrets, WaitForSpec:
		return true
	default:
		return false
	}
}

// check is one named rule. It gives a step, or false if it has nothing to say.
type check struct {
	name   string
	decide func(View) (Step, bool)
}

// checks in their order: the first that has something to say decides.
func checks() []check {
	return []check{
		{"a removed VM answers until it is forgotten", tombstone},
		{"nothing is done to a VMM that was not looked for", unobserved},
		{"a launch that nobody knows of is undone", interruptedLaunch},
		{"a boot that is over has its end written down", bootOver},
		{"an ordered end is carried out", orderedEnd},
		{"a guest that hangs is ended", hung},
		{"what has ended is cleared away", windDown},
		{"a removal goes on to its end", removal},
		{"a deadline that passed ends the VM", deadline},
		{"a finished VM keeps nothing but its record and console", finished},
		{"a VM that is to stand still does", halted},
		{"a VM without retries waits to be given some", exhausted},
		{"a try that is not this node's is not made", elsewhere},
		{"a try waits for its time", backingOff},
		{"a boot is prepared in order", prepare},
		{"a guest is brought up in order", bringUp},
	}
}

// Next decides. It always gives a step; one that failed lately becomes a wait.
func Next(v View) Step {
	for _, c := range checks() {
		s, ok := c.decide(v)
		if !ok {
			continue
		}
		s.Check = c.name
		return untilDeadline(v, held(v, s))
	}
	return untilDeadline(v, Step{Kind: Watch, Check: "none", Why: "nothing to do"})
}

// untilDeadline lets no rest go past the VM's deadline.
func untilDeadline(v View, s Step) Step {
	d := v.Record.Spec.Deadline
	if d == nil || !s.Rests() || v.Record.Removal != nil || v.Record.Final != nil || !v.Now.Before(*d) {
		return s
	}
	if s.Until.IsZero() || d.Before(s.Until) {
		s.Until = *d
	}
	return s
}

// held turns a step that failed lately into a wait for its next try.
func held(v View, s Step) Step {
	r := v.Record.Retry
	if r == nil || r.Step != s.Kind || s.Rests() {
		return s
	}
	if r.Permanent {
		return Step{Kind: WaitForSpec, Check: s.Check, Why: fmt.Sprintf("%s cannot work with this spec", s.Kind)}
	}
	if v.Now.Before(r.NotBefore) {
		until := r.NotBefore
		if !s.Until.IsZero() && s.Until.Before(until) {
			until = s.Until // the step's own deadline
		}
		return Step{Kind: WaitUntil, Check: s.Check, Until: until, Why: fmt.Sprintf("%s failed %d times", s.Kind, r.Failures)}
	}
	return s
}

func tombstone(v View) (Step, bool) {
	r := v.Record
	if r.RemovedAt == nil {
		return Step{}, false
	}
	if r.Successor != nil {
		return Step{Kind: Succeed, Why: fmt.Sprintf("assignment %d waits", r.Successor.Assignment)}, true
	}
	if end := r.RemovedAt.Add(v.Limits.Tombstone); v.Now.Before(end) {
		return Step{Kind: Watch, Until: end, Why: "removed"}, true
	}
	return Step{Kind: Forget, Why: "removed long ago"}, true
}

func unobserved(v View) (Step, bool) {
	b := v.Record.Boot
	if b == nil || b.Handle == nil || v.Observed.VMM != Unknown {
		return Step{}, false
	}
	return Step{Kind: Recover, Why: fmt.Sprintf("run %d is on record", b.Run)}, true
}

// interruptedLaunch: the record says that a VMM was going to be launched and not that it was. It may live; no workload was started.
func interruptedLaunch(v View) (Step, bool) {
	if b := v.Record.Boot; b != nil && b.Handle == nil {
		return Step{Kind: DestroyVMM, Why: fmt.Sprintf("the launch of run %d was interrupted", b.Run)}, true
	}
	return Step{}, false
}

func bootOver(v View) (Step, bool) {
	b := v.Record.Boot
	if b == nil || b.Exit != nil || b.Failure != nil {
		return Step{}, false
	}
	switch {
	case v.Observed.VMM != Over && v.Observed.GuestExit == nil:
		return Step{}, false
	case b.StartSentAt == nil && !ordered(v):
		return Step{Kind: FailStart, Why: "the machine ended before the workload was started"}, true
	default:
		s := Step{Kind: CollectVerdict, Why: "the workload or its machine has ended"}
		if b.Stop != nil {
			s.Verdict = b.Stop.Why
		} else if b.StartSentAt == nil {
			s.Verdict = orderedVerdict(v)
		}
		return s, true
	}
}

// ordered says that what runs is to end, whether for good or not.
func ordered(v View) bool { return v.Record.Removal != nil || deadlinePassed(v) || halting(v) }

func halting(v View) bool { return v.Record.Spec.Halt != nil && v.Record.Final == nil }

func deadlinePassed(v View) bool {
	d := v.Record.Spec.Deadline
	return d != nil && v.Record.Final == nil && !v.Now.Before(*d)
}

func orderedVerdict(v View) machine.Verdict {
	if v.Record.Removal == nil && deadlinePassed(v) {
		return machine.DeadlineExceeded
	}
	return machine.Stopped
}

// orderedEnd stops a living guest: politely if its workload may run, within the shortest grace that was ordered, else at once. A guest
// that was asked to stop is ended even if the order was withdrawn: it will not go on.
func orderedEnd(v View) (Step, bool) {
	b := v.Record.Boot
	if b == nil || b.Exit != nil || b.Failure != nil || (b.Stop == nil && !ordered(v)) {
		return Step{}, false
	}
	grace, verdict := v.Record.Spec.Grace, orderedVerdict(v)
	if r := v.Record.Removal; r != nil {
		grace = r.Grace
	}
	if b.Stop != nil {
		verdict = b.Stop.Why
		if !ordered(v) {
			grace = b.Stop.Grace
		}
	}
	switch {
	case b.StartSentAt == nil:
		return Step{Kind: CollectVerdict, Verdict: verdict, Why: "ordered to end before the workload was started"}, true
	case grace <= 0:
		return Step{Kind: CollectVerdict, Verdict: verdict, Why: "ordered to end without grace"}, true
	case b.Stop == nil || b.Stop.Grace > grace:
		return Step{Kind: Stop, Grace: grace, Verdict: verdict, Why: "ordered to end"}, true
	}
	if kill := b.Stop.At.Add(b.Stop.Grace + v.Limits.Kill); v.Now.Before(kill) {
		return Step{Kind: Watch, Until: kill, Why: "the guest was asked to stop"}, true
	}
	return Step{Kind: CollectVerdict, Verdict: verdict, Why: "the guest did not stop within its grace"}, true
}

// hung: a machine that lives and a guest that says nothing. What the guest said before it fell silent is still looked for.
func hung(v View) (Step, bool) {
	b := v.Record.Boot
	if b == nil || b.StartSentAt == nil || b.Exit != nil || v.Observed.VMM != Alive {
		return Step{}, false
	}
	if end := silenceEnds(v); end.IsZero() || v.Now.Before(end) {
		return Step{}, false
	}
	return Step{Kind: CollectVerdict, Verdict: machine.GuestHung, Why: fmt.Sprintf("the guest has answered nothing for %s while its VMM lived", v.Limits.Silence)}, true
}

// silenceEnds is when a guest that answers nothing more counts as hung; zero is never.
func silenceEnds(v View) time.Time {
	if v.Limits.Silence <= 0 || v.Observed.HeardAt.IsZero() {
		return time.Time{}
	}
	return v.Observed.HeardAt.Add(v.Limits.Silence)
}

func windDown(v View) (Step, bool) {
	b := v.Record.Boot
	if b == nil || (b.Exit == nil && b.Failure == nil) {
		return Step{}, false
	}
	if b.Exit != nil && b.Reported && v.Record.Removal == nil && v.Observed.VMM == Alive {
		if b.AckedAt == nil {
			return Step{Kind: Acknowledge, Why: "the exit is on record"}, true
		}
		if off := b.AckedAt.Add(v.Limits.Off); v.Now.Before(off) {
			return Step{Kind: Watch, Until: off, Why: "the guest is stopping its machine"}, true
		}
	}
	return Step{Kind: DestroyVMM, Why: fmt.Sprintf("run %d has ended", b.Run)}, true
}

func removal(v View) (Step, bool) {
	if v.Record.Removal == nil {
		return Step{}, false
	}
	if s, ok := release(v); ok {
		return s, true
	}
	return Step{Kind: WriteTombstone, Why: "nothing is left but the record"}, true
}

func release(v View) (Step, bool) {
	switch r := v.Record; {
	case r.NetworkUsed || v.Observed.Attached:
		return Step{Kind: Detach, Why: "the VM has ended"}, true
	case r.Image != nil || r.Disk != nil:
		return Step{Kind: FreeDisk, Why: "the VM has ended"}, true
	}
	return Step{}, false
}

func deadline(v View) (Step, bool) {
	if !deadlinePassed(v) {
		return Step{}, false
	}
	return Step{Kind: Finish, Verdict: machine.DeadlineExceeded, Why: "the deadline has passed"}, true
}

func finished(v View) (Step, bool) {
	if v.Record.Final == nil {
		return Step{}, false
	}
	if s, ok := release(v); ok {
		return s, true
	}
	return Step{Kind: Watch, Why: "finished"}, true
}

// halted keeps disk, image and network: nothing of them runs.
func halted(v View) (Step, bool) {
	if v.Record.Boot != nil || !halting(v) {
		return Step{}, false
	}
	return Step{Kind: Watch, Why: "halted: " + string(v.Record.Spec.Halt.Reason)}, true
}

func exhausted(v View) (Step, bool) {
	r := v.Record
	if r.Boot != nil || r.Spec.Lifecycle != machine.Persistent || r.History.ExhaustedAt == nil || r.History.NextTryAt != nil {
		return Step{}, false
	}
	return Step{Kind: Watch, Why: "retries are used up"}, true
}

func elsewhere(v View) (Step, bool) {
	r := v.Record
	if r.Boot != nil || r.Spec.Lifecycle != machine.Persistent || !r.History.Elsewhere {
		return Step{}, false
	}
	return Step{Kind: Watch, Why: "the operator places the next try"}, true
}

func backingOff(v View) (Step, bool) {
	at := v.Record.History.NextTryAt
	if v.Record.Boot != nil || at == nil || !v.Now.Before(*at) {
		return Step{}, false
	}
	return Step{Kind: WaitUntil, Until: *at, Why: "backing off"}, true
}

func prepare(v View) (Step, bool) {
	r := v.Record
	if r.Boot != nil {
		return Step{}, false
	}
	switch {
	case needsImage(r) && r.Spec.Image.NeedsCredentials && !v.Observed.HasCredentials:
		return Step{Kind: WaitForSecrets, Why: "pull secrets live in memory only and have not been sent since the runtime's start"}, true
	case needsImage(r):
		return Step{Kind: EnsureImage, Why: "no base for " + r.Spec.Image.Reference}, true
	case r.Disk == nil || r.Disk.BaseDigest != r.Image.Digest:
		return Step{Kind: EnsureDisk, Why: "no private disk on this base"}, true
	case len(r.Spec.Interfaces) > 0 && !v.Observed.Attached:
		return Step{Kind: AttachNetwork, Why: "interfaces are not open"}, true
	}
	return Step{Kind: StartVMM, Why: "everything is prepared"}, true
}

// needsImage: a base once linked serves every later boot of the same reference, with the registry away as well.
func needsImage(r Record) bool { return r.Image == nil || r.Image.Reference != r.Spec.Image.Reference }

func bringUp(v View) (Step, bool) {
	b := v.Record.Boot
	if b == nil {
		return Step{}, false
	}
	// A start that was sent is only ever repeated or watched.
	if b.StartSentAt != nil {
		if b.StartedAt == nil {
			return Step{Kind: StartWorkload, Until: silenceEnds(v), Why: "the start was sent and not yet answered"}, true
		}
		return Step{Kind: Watch, Until: silenceEnds(v), Why: "running"}, true
	}
	end := b.LaunchAt.Add(v.Limits.Boot)
	switch {
	case !v.Now.Before(end):
		return Step{Kind: FailStart, Until: end, Why: fmt.Sprintf("the guest was not ready for its workload within %s", v.Limits.Boot)}, true
	case b.AnsweredAt == nil:
		return Step{Kind: AwaitGuest, Until: end, Why: "the VMM runs"}, true
	case b.Configured == nil:
		return Step{Kind: Configure, Until: end, Why: "the guest answers"}, true
	}
	return Step{Kind: StartWorkload, Until: end, Why: "the guest is configured"}, true
}
