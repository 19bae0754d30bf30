package plan

import (
	"fmt"
	"maps"
	"reflect"
	"time"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/restart"
)

// resetAnnotation is what a user sets to give a VM its retries back (docs/contract.md).
const resetAnnotation = "imp.dev/restart-reset"

// Update takes a Spec of the same assignment; same says that nothing but its generation differs.
func (r *Record) Update(spec machine.Spec, same bool, now time.Time) {
	if spec.Generation < r.Spec.Generation || r.Removal != nil {
		return
	}
	before := r.Spec
	if before.Lifecycle == machine.Ephemeral {
		// An ephemeral VM is what it was created as; only how it ends may change.
		r.Spec.Grace, r.Spec.Deadline, r.Spec.Generation, r.Spec.Cluster = spec.Grace, spec.Deadline, spec.Generation, spec.Cluster
	} else {
		r.Spec = spec
		r.Spec.History = before.History
	}
	if same {
		return
	}
	r.Retry = nil
	if r.Final != nil {
		return
	}
	if r.Boot == nil && !sameBoot(before, r.Spec) {
		r.trySooner(now) // what failed was another Spec
	}
	if r.Spec.Lifecycle == machine.Ephemeral {
		return
	}
	r.reset(now)
	if !reflect.DeepEqual(before.Restart, r.Spec.Restart) {
		r.revise(now)
	}
	switch {
	case r.Spec.Halt != nil:
		r.showHalt(now)
	case before.Halt != nil:
		r.resume(now)
	}
}

// sameBoot says that a boot of b would be one of a: they differ only in what is not part of a boot.
func sameBoot(a, b machine.Spec) bool {
	for _, s := range []*machine.Spec{&a, &b} {
		s.Generation, s.Grace, s.Deadline, s.Probe, s.Restart, s.History = 0, 0, nil, nil, restart.Policy{}, restart.History{}
		s.Reset, s.Halt, s.Cluster, s.Image.Digest = "", nil, "", ""
	}
	return reflect.DeepEqual(a, b)
}

// trySooner ends a backoff. Retries that are used up stay so, and a try that is not this node's stays the operator's.
func (r *Record) trySooner(now time.Time) {
	switch h := &r.History; {
	case h.ExhaustedAt != nil || h.NextTryAt == nil:
	case !h.Elsewhere:
		h.NextTryAt = nil
	case now.Before(*h.NextTryAt):
		h.NextTryAt = &now
	}
}

// reset forgets the failures if Spec.Reset was not acted on yet. A VM that waits is tried at once.
func (r *Record) reset(now time.Time) {
	h, did := r.History.WithReset(r.Spec.Reset)
	if !did {
		return
	}
	r.History = h
	if r.waits() {
		r.Checks.Started = machine.Check{Since: now}
	}
}

// revise decides anew about a VM that waits, for its policy was changed.
func (r *Record) revise(now time.Time) {
	h := r.History
	if !r.waits() || (h.NextTryAt == nil && h.ExhaustedAt == nil) {
		return
	}
	d := restart.Revise(r.Spec.Restart, h, now)
	if reflect.DeepEqual(d.History, h) && !d.Terminal {
		return
	}
	r.History = d.History
	if d.Terminal {
		r.finish(r.usedUp(), now)
		return
	}
	why := "the VM failed before it came to this node"
	if e := r.LastExit; e != nil {
		why = fmt.Sprintf("%s: %s", e.Verdict, e.Message)
	}
	r.showWait(why, now)
}

// usedUp is the end of a VM whose retries are used up: that of its last incarnation.
func (r *Record) usedUp() machine.Exit {
	e := machine.Exit{Incarnation: r.Incarnation, Run: r.Run, Verdict: machine.Failed, Message: "it had failed before it came to this node"}
	if r.LastExit != nil {
		e = *r.LastExit
	} else if r.History.LastFailureAt != nil {
		e.At = *r.History.LastFailureAt
	}
	e.Message += "; " + r.retries()
	return e
}

// retries in words, once they are used up.
func (r *Record) retries() string {
	switch n := r.Spec.Restart.MaxRetries; {
	case n == nil:
		return "all retries are used up"
	case *n == 0:
		return "the policy allows no retry"
	case *n == 1:
		return "the 1 retry is used up"
	default:
		return fmt.Sprintf("the %d retries are used up", *n)
	}
}

// waits says that nothing of the VM runs, or only what is being cleared away.
func (r *Record) waits() bool { return r.Boot == nil || r.Boot.Exit != nil || r.Boot.Failure != nil }

// resume is the end of a halt: a try begins at once. The failures before are not forgotten: with all retries used up it is one try.
func (r *Record) resume(now time.Time) {
	if r.waits() {
		r.History.NextTryAt, r.History.ExhaustedAt, r.History.Elsewhere = nil, nil, false
		r.Checks.Started = machine.Check{Since: now}
	}
}

// showHalt tells that the VM stands still by order, once it does.
func (r *Record) showHalt(now time.Time) {
	if h := r.Spec.Halt; h != nil && r.Final == nil && r.Removal == nil && r.waits() {
		set(&r.Checks.Started, false, h.Reason, h.Message, now)
		r.Checks.GuestReady = machine.Check{Since: now}
	}
}

// stoodStill is the end of an incarnation by Spec.Halt. It is no failure, and not the VM's end.
func (r *Record) stoodStill(e machine.Exit, now time.Time) {
	r.History.NextTryAt = nil
	if r.Spec.Halt == nil { // withdrawn while the guest was stopping
		set(&r.Checks.Started, false, machine.ReasonBackingOff, fmt.Sprintf("%s: %s; starting again at once", e.Verdict, e.Message), now)
		return
	}
	r.showHalt(now)
}

// showWait tells what a VM waits for that is not to be started now, and why.
func (r *Record) showWait(why string, now time.Time) {
	if r.Spec.Halt != nil {
		r.showHalt(now)
		return
	}
	h := r.History
	switch {
	case h.ExhaustedAt != nil && h.NextTryAt == nil:
		set(&r.Checks.Started, false, machine.ReasonExhausted,
			fmt.Sprintf("%s; %s: set the annotation %s to a new value to start it again", why, r.retries(), resetAnnotation), now)
	case h.ExhaustedAt != nil:
		set(&r.Checks.Started, false, machine.ReasonCoolingDown, fmt.Sprintf("%s; %s: starting again %s", why, r.retries(), in(h, now)), now)
	case h.Elsewhere:
		set(&r.Checks.Started, false, machine.ReasonElsewhere, fmt.Sprintf("%s; to be placed anew %s", why, in(h, now)), now)
	default:
		set(&r.Checks.Started, false, machine.ReasonBackingOff, fmt.Sprintf("%s; starting again %s", why, in(h, now)), now)
	}
}

// in gives the next try in words.
func in(h restart.History, now time.Time) string {
	if h.NextTryAt == nil || !now.Before(*h.NextTryAt) {
		return "at once"
	}
	return fmt.Sprintf("in %s, at %s", h.NextTryAt.Sub(now).Round(100*time.Millisecond), h.NextTryAt.UTC().Format(time.RFC3339))
}

// accepted is the history a VM begins with on this node.
func accepted(spec machine.Spec, now time.Time) restart.History {
	h := bounded(spec.History, spec.Restart, now)
	if h.Elsewhere {
		h = h.Tried() // it was placed anew: this is the try it waited for
	}
	if spec.Lifecycle == machine.Persistent {
		h, _ = h.WithReset(spec.Reset)
	}
	return h
}

// newer gives the one of two histories of a VM that knows more: what a node knew may not have reached the object.
func newer(node, object restart.History, reset string) restart.History {
	switch {
	case reset != "" && node.Reset == reset && object.Reset != reset:
		return node
	case reset != "" && object.Reset == reset && node.Reset != reset:
		return object
	case node.LastFailureAt == nil, object.LastFailureAt != nil && object.LastFailureAt.After(*node.LastFailureAt):
		return object
	default:
		return node
	}
}

// failed notes the latest failure; it stays over later successes.
func (r *Record) failed(f machine.Failure) { r.LastFailure = &f }

// isFailure says that an end is not as it should be: a persistent VM's guest may reboot or switch itself off, a one-shot must
// end with a report.
func isFailure(v machine.Verdict, l machine.Lifecycle) bool {
	switch v {
	case machine.Succeeded, machine.Stopped:
		return false
	case machine.GuestReboot, machine.GuestPowerOff:
		return l != machine.Persistent
	default:
		return true
	}
}

// ended notes the end of an incarnation in all that remembers ends.
func (r *Record) ended(e machine.Exit) {
	r.LastExit = &e
	r.IncarnationEnded = true
	r.Counters.Exits++
	r.Counters.Ends = maps.Clone(r.Counters.Ends) // records share what is not changed
	if r.Counters.Ends == nil {
		r.Counters.Ends = map[machine.Verdict]int64{}
	}
	r.Counters.Ends[e.Verdict]++
	if isFailure(e.Verdict, r.Spec.Lifecycle) {
		r.failed(machine.Failure{
			Reason: fault.Reason(e.Verdict), Message: e.Message, At: e.At, Incarnation: e.Incarnation, Code: e.Code, ConsoleTail: e.ConsoleTail,
		})
	}
}

// maxStepRetry is more than any step that failed ever waits.
const maxStepRetry = 10 * time.Minute

// noLater gives t, or now if that is sooner.
func noLater(t *time.Time, now time.Time) *time.Time {
	if t != nil && t.After(now) {
		return &now
	}
	return t
}

// bounded is a history by another clock, as it can be by this one: nothing has happened yet that is to come, and no wait is longer
// than the policy makes any.
func bounded(h restart.History, p restart.Policy, now time.Time) restart.History {
	p = p.OrDefault()
	longest := max(p.MaxDelay, restart.Default().MaxDelay) // failed starts of one-shots go by the default
	if h.ExhaustedAt != nil {
		longest = max(longest, p.CoolDown)
	}
	h.ExhaustedAt, h.LastFailureAt = noLater(h.ExhaustedAt, now), noLater(h.LastFailureAt, now)
	end := now.Add(longest)
	h.NextTryAt = noLater(h.NextTryAt, end)
	return h
}

// Reloaded is a record as another process of the runtime takes it up at now. The host's clock may have been set back meanwhile: no
// wait becomes longer by that than it was meant to be. (Within one process waits go by the monotonic clock.)
func Reloaded(r Record, now time.Time) Record {
	r = r.Clone()
	r.History = bounded(r.History, r.Spec.Restart, now)
	past := func(t *time.Time) *time.Time { return noLater(t, now) }
	r.RemovedAt = past(r.RemovedAt)
	if r.Retry != nil && r.Retry.NotBefore.Sub(now) > maxStepRetry {
		r.Retry.NotBefore = now.Add(maxStepRetry)
	}
	if b := r.Boot; b != nil {
		b.AckedAt = past(b.AckedAt)
		if b.LaunchAt.After(now) {
			b.LaunchAt = now
		}
		if b.Stop != nil && b.Stop.At.After(now) {
			stop := *b.Stop
			stop.At = now
			b.Stop = &stop
		}
	}
	return r
}
