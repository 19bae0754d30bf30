package plan

import (
	"fmt"
	"time"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/restart"
	"imp.dev/imp/internal/vmm"
)

// New is the record of a VM that was just accepted.
func New(spec machine.Spec, now time.Time) Record {
	return begin(spec, accepted(spec, now), now)
}

func begin(spec machine.Spec, h restart.History, now time.Time) Record {
	r := Record{Spec: spec, History: h}
	for _, c := range []*machine.Check{&r.Checks.Disk, &r.Checks.Network, &r.Checks.Started, &r.Checks.GuestReady} {
		c.Since = now
	}
	if spec.Lifecycle != machine.Persistent {
		return r
	}
	if h.ExhaustedAt != nil {
		r.revise(now) // the policy may be another than the one they were used up under
	} else if h.NextTryAt != nil && now.Before(*h.NextTryAt) {
		r.showWait("the VM failed before it came to this node", now)
	}
	r.showHalt(now)
	return r
}

// OrderRemoval notes the order to remove; a repeat can only shorten the grace, and a disk that is to be kept once is kept.
func (r *Record) OrderRemoval(how machine.Removal, now time.Time) {
	if r.Removal == nil {
		r.Removal, r.Retry = &Removal{At: now, Grace: how.Grace, KeepDisk: how.KeepDisk}, nil
		return
	}
	r.Removal.Grace = min(r.Removal.Grace, how.Grace)
	r.Removal.KeepDisk = r.Removal.KeepDisk || how.KeepDisk
}

// ImageReady notes the base and that the VM holds a link to it.
func (r *Record) ImageReady(reference string, b image.Base) {
	r.Image = &Image{Reference: reference, Digest: b.Digest, UUID: b.UUID, Config: b.Config}
	r.Pin = &Pin{Reference: reference, Digest: b.Digest}
}

// WantedDigest is the digest the next boot's image must have, "" if it may be any.
func (r *Record) WantedDigest() string {
	switch pin := r.Pin; {
	case pin != nil && pin.Reference == r.Spec.Image.Reference:
		return pin.Digest
	case pin != nil && pin.Digest == r.Spec.Image.Digest:
		return "" // the object still carries the digest of the reference it had before
	}
	return r.Spec.Image.Digest
}

// DiskReady notes a private disk that was made anew for the present base.
func (r *Record) DiskReady(now time.Time) {
	r.Disk = &Disk{BaseDigest: r.Image.Digest, GiB: r.Spec.DiskGiB}
	r.DiskGeneration++
	set(&r.Checks.Disk, true, "", "", now)
}

// BeginBoot writes the intent to launch. The caller saves the record before it launches.
func (r *Record) BeginBoot(nonce, hostBootID string, consoleStart int64, now time.Time) {
	if r.Incarnation == 0 || r.IncarnationEnded {
		r.Incarnation++
		r.IncarnationEnded = false
		if r.Incarnation > 1 {
			r.Counters.Restarts++
		}
	}
	r.Run++
	r.History = r.History.Tried()
	set(&r.Checks.Disk, true, "", "", now)
	set(&r.Checks.Network, true, "", "", now)
	r.Boot = &Boot{
		Incarnation: r.Incarnation, Run: r.Run, Spec: r.Spec, Image: *r.Image, Nonce: nonce, ConsoleStart: consoleStart,
		HostBootID: hostBootID, LaunchAt: now,
	}
}

// Launched notes the handle of the VMM.
func (r *Record) Launched(h vmm.Handle, now time.Time) {
	r.Boot.Handle, r.Boot.LaunchedAt = &h, &now
	r.Counters.Starts++
	r.Timings.VMM = now.Sub(r.Boot.LaunchAt)
	r.Timings.Kernel, r.Timings.Guest, r.Timings.Workload = 0, 0, 0
}

// Recovered notes that the VMM of an earlier process of the runtime was looked for. A guest that was still on its way gets its
// whole time again: the runtime's absence is not its fault.
func (r *Record) Recovered(alive bool, now time.Time) {
	if alive {
		r.Counters.Adopted++
	}
	if r.Boot.StartSentAt == nil {
		r.Boot.LaunchAt = now
	}
}

// Answered notes that the guest's agent is there.
func (r *Record) Answered(now time.Time) {
	r.Boot.AnsweredAt = &now
	r.Timings.Kernel = since(r.Boot.LaunchedAt, now)
}

// ConfiguredNow notes that Configure was carried out.
func (r *Record) ConfiguredNow(now time.Time) {
	r.Boot.Configured = &now
	r.Timings.Guest = since(r.Boot.AnsweredAt, now)
}

// SendingStart writes that the workload's start is going to be sent. The caller saves the record before it sends; from here on
// an ephemeral VM is never booted again.
func (r *Record) SendingStart(now time.Time) {
	if r.Boot.StartSentAt == nil {
		r.Boot.StartSentAt = &now
	}
}

// StartAccepted notes that the workload runs.
func (r *Record) StartAccepted(now time.Time) {
	r.Boot.StartedAt = &now
	r.StartedAt = &now
	r.Timings.Workload = since(r.Boot.StartSentAt, now)
	r.QuickRetryUsed = false
	r.History.StartFailures = 0
	set(&r.Checks.Started, true, "", "", now)
	if r.Boot.Spec.Probe == nil {
		set(&r.Checks.GuestReady, true, "", "", now)
	} else {
		r.Checks.GuestReady = machine.Check{Since: now}
	}
}

// Stopping notes that the guest is asked to stop.
func (r *Record) Stopping(grace time.Duration, why machine.Verdict, now time.Time) {
	r.Boot.Stop = &StopOrder{At: now, Grace: grace, Why: why}
}

// FailedStart is a boot that came to nothing before its workload's start was sent.
type FailedStart struct {
	Failure
	// ConsoleTail is the raw end of the boot's console, at most 4 KiB: a guest that panics early has no other words.
	ConsoleTail []byte
	// Quick lets the first such failure be tried again at once.
	Quick bool
	// Jitter is drawn once for each failure (restart.End).
	Jitter float64
}

// StartFailed notes why a boot came to nothing, or with a nil Boot why a VMM could not be launched at all.
func (r *Record) StartFailed(f FailedStart, now time.Time) {
	d := restart.Next(r.startPolicy(), r.History, restart.End{Kind: restart.StartFailure, Jitter: f.Jitter}, now)
	r.History = d.History
	r.failed(machine.Failure{Reason: f.Reason, Message: f.Message, At: now, Incarnation: r.Incarnation, ConsoleTail: f.ConsoleTail})
	if f.Quick && !r.QuickRetryUsed {
		r.QuickRetryUsed, r.History.NextTryAt, r.History.Elsewhere = true, nil, false
	} else {
		r.QuickRetryUsed = false
	}
	if r.Boot != nil {
		r.Boot.Failure = &f.Failure
	}
	r.Checks.GuestReady = machine.Check{Since: now}
	if r.Spec.Halt != nil || r.History.Elsewhere {
		r.showWait(fmt.Sprintf("%s: %s", f.Reason, f.Message), now)
		return
	}
	set(&r.Checks.Started, false, f.Reason, fmt.Sprintf("%s; trying again %s", f.Message, in(r.History, now)), now)
}

// startPolicy is how failed starts back off. An ephemeral VM has no policy of its own.
func (r *Record) startPolicy() restart.Policy {
	if r.Spec.Lifecycle == machine.Ephemeral {
		return restart.Default()
	}
	return r.Spec.Restart
}

// Concluded writes the end of an incarnation and what follows from it: the VM's own end, or when it is tried again. jitter is drawn
// once for each end (restart.End).
func (r *Record) Concluded(e machine.Exit, reported bool, jitter float64, now time.Time) {
	b := r.Boot
	b.Exit, b.Reported = &e, reported
	r.ended(e)
	r.Checks.GuestReady = machine.Check{Since: now}
	kind, again := kindOf(e.Verdict)
	switch persists := r.Spec.Lifecycle == machine.Persistent && r.Removal == nil && r.Final == nil; {
	case persists && e.Verdict == machine.Stopped:
		r.stoodStill(e, now)
		return
	case !persists || !again:
		r.finish(e, now)
		return
	}
	ran := time.Duration(0)
	if b.StartedAt != nil {
		ran = e.At.Sub(*b.StartedAt)
	}
	d := restart.Next(r.Spec.Restart, r.History, restart.End{Kind: kind, Ran: ran, Jitter: jitter}, now)
	r.History = d.History
	if d.Terminal {
		r.finish(r.usedUp(), now)
		return
	}
	r.showWait(fmt.Sprintf("%s: %s", e.Verdict, e.Message), now)
}

// Finish writes an end without a boot.
func (r *Record) Finish(e machine.Exit, now time.Time) {
	if isFailure(e.Verdict, r.Spec.Lifecycle) {
		r.failed(machine.Failure{Reason: fault.Reason(e.Verdict), Message: e.Message, At: e.At, Incarnation: e.Incarnation})
	}
	r.finish(e, now)
}

func (r *Record) finish(e machine.Exit, now time.Time) {
	set(&r.Checks.Started, false, fault.Reason(e.Verdict), e.Message, now)
	r.Checks.GuestReady = machine.Check{Since: now}
	if r.Final == nil {
		r.Final, r.FinishedAt = &e, &now
		r.History.NextTryAt = nil
	}
}

// kindOf says what a verdict means to restart; false: there is no next time.
func kindOf(v machine.Verdict) (restart.Kind, bool) {
	switch v {
	case machine.Stopped, machine.DeadlineExceeded:
		return "", false
	case machine.Succeeded, machine.GuestPowerOff:
		return restart.Ended, true
	case machine.GuestReboot:
		return restart.Reboot, true
	case machine.LostWithHost:
		return restart.HostBoot, true
	default:
		return restart.Failure, true
	}
}

// Acknowledged notes that the guest was told, or could not be told, that its exit is on record.
func (r *Record) Acknowledged(now time.Time) { r.Boot.AckedAt = &now }

// VMMDestroyed notes that nothing of the run is left on the host.
func (r *Record) VMMDestroyed(now time.Time) {
	r.Boot = nil
	r.showHalt(now)
}

// DiskFreed notes that link and private disk are gone.
func (r *Record) DiskFreed() { r.Image, r.Disk = nil, nil }

// Tombstoned notes that everything but the record is gone.
func (r *Record) Tombstoned(now time.Time) {
	r.RemovedAt = &now
	r.Retry = nil
	r.History.NextTryAt = nil
}

// Succeeded is the record of the successor. Revision goes on, so that a consumer sees the change of assignment as news.
func (r *Record) Succeeded(now time.Time) Record {
	spec := *r.Successor
	spec.History = newer(r.History, spec.History, spec.Reset)
	next := New(spec, now)
	next.Revision = r.Revision
	return next
}

// StepFailed notes a failure of a step and when it is tried again.
func (r *Record) StepFailed(kind Kind, f *fault.Error, delay time.Duration, now time.Time) {
	if r.Retry == nil || r.Retry.Step != kind {
		r.Retry = &Retry{Step: kind}
	}
	r.Retry.Failures++
	r.Retry.NotBefore = now.Add(delay)
	r.Retry.Permanent = f.Permanent && mayNeverWork(kind)
	r.Counters.Retries++
	if c := r.checkOf(kind); c != nil && r.Removal == nil && r.Final == nil {
		set(c, false, f.Reason, f.Error(), now)
	}
}

// mayNeverWork: only what depends on the Spec may be given up until the Spec changes; clearing away never is.
func mayNeverWork(kind Kind) bool {
	return kind == EnsureImage || kind == EnsureDisk || kind == AttachNetwork
}

// checkOf is the check a step's failure shows on.
func (r *Record) checkOf(kind Kind) *machine.Check {
	switch kind {
	case EnsureImage, EnsureDisk, WaitForSecrets:
		return &r.Checks.Disk
	case AttachNetwork:
		return &r.Checks.Network
	case StartVMM, AwaitGuest, Configure, StartWorkload:
		return &r.Checks.Started
	default:
		return nil
	}
}

// StepSucceeded forgets the failures of the step.
func (r *Record) StepSucceeded(kind Kind) {
	if r.Retry != nil && r.Retry.Step == kind {
		r.Retry = nil
	}
}

// TryNow ends the wait of a step that failed. How often it failed stays: if it fails again it waits longer than before.
func (r *Record) TryNow() {
	if r.Retry != nil {
		r.Retry.NotBefore, r.Retry.Permanent = time.Time{}, false
	}
}

// LacksSecrets shows that the pull waits for secrets. It says whether that is news.
func (r *Record) LacksSecrets(why string, now time.Time) bool {
	return set(&r.Checks.Disk, false, fault.WaitingForSecrets, why, now)
}

// Probed notes what the readiness probe found. It says whether that is news.
func (r *Record) Probed(ok bool, reason fault.Reason, message string, now time.Time) bool {
	if !ok && reason == machine.ReasonGuestSilent && r.Checks.GuestReady.Reason != reason {
		r.Counters.Silent++
	}
	return set(&r.Checks.GuestReady, ok, reason, message, now)
}

// set changes a check; Since moves only when its answer or reason does. It says whether anything changed.
func set(c *machine.Check, ok bool, reason fault.Reason, message string, now time.Time) bool {
	if c.OK != nil && *c.OK == ok && c.Reason == reason {
		changed := c.Message != message
		c.Message = message
		return changed
	}
	*c = machine.Check{OK: &ok, Reason: reason, Message: message, Since: now}
	return true
}

func since(from *time.Time, now time.Time) time.Duration {
	if from == nil {
		return 0
	}
	return now.Sub(*from)
}
