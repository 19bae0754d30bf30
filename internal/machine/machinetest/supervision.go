package machinetest

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/fault"
	guestfake "imp.dev/imp/internal/guest/fake"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/restart"
	vmmfake "imp.dev/imp/internal/vmm/fake"
)

func supervisionChecks() []Check {
	checks := []Check{
		{Name: "a halted VM keeps its disk and is started anew, uncounted, when it may run", Run: haltAndAgain},
		{Name: "a VM that is created halted waits, and starts when it may run", Run: createdHalted},
		{Name: "a guest that does not stop is killed after its grace when it is halted", Run: stubbornHalt},
		{Name: "retries that are used up wait for a reset, which acts once", Run: manualReset},
		{Name: "retries that are used up are given back after the cool-down", Run: coolDown},
		{Name: "a VM whose next try is not this node's rests until it is placed anew, here with a fresh disk as well", Run: elsewhereAndBack},
		{Name: "a policy that is changed acts on the VM that waits", Run: policyEdit},
		{Name: "a persistent VM whose guest hangs is started again, counted, and told of before", Run: hungAndAgain},
		{Name: "a guest that hangs at its start has had its one time", Run: hungAtStart},
		{Name: "a VMM that is stopped by a signal counts as a guest that hangs", Run: stoppedVMM},
		{Name: "a guest whose probe fails but who answers does not hang", Run: busyGuest},
		{Name: "the private disk of a VM that is removed is kept when that is asked for", Run: keepDisk},
		{Name: "a failed start is remembered with the console's end, over the success after it", Run: rememberedFailure},
	}
	for name, c := range haltMoments() {
		checks = append(checks, Check{Name: "halting a VM that is " + name + " stops it, and it runs when it may", Images: c.images, Run: c.run})
	}
	return checks
}

func haltSpec(s *machine.Spec, reason fault.Reason) {
	s.Generation++
	s.Halt = &machine.Halt{Reason: reason, Message: "desiredState is Stopped"}
}

func unhaltSpec(s *machine.Spec) { s.Generation, s.Halt = s.Generation+1, nil }

func privateDisk(t *testing.T, h *Harness, id string) os.FileInfo {
	t.Helper()
	info, err := os.Stat(filepath.Join(h.StateDir, "vm", id, "private.ext4"))
	if err != nil {
		t.Fatal(err)
	}
	return info
}

func discardedDisks(t *testing.T, h *Harness) int {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(h.StateDir, "trash", "*.ext4"))
	if err != nil {
		t.Fatal(err)
	}
	return len(found)
}

func wantHalted(t *testing.T, h *Harness, s machine.Spec) machine.Status {
	t.Helper()
	st := awaitState(t, h, s.ID, machine.Halted)
	if c := st.Started; c.OK == nil || *c.OK || c.Reason != s.Halt.Reason || c.Message != s.Halt.Message || st.GuestReady.OK != nil || st.Final != nil {
		t.Fatalf("halted: %s", pretty(st))
	}
	if pids := h.PIDs(t, s.ID); len(pids) != 0 {
		t.Fatalf("a halted VM has VMMs %v", pids)
	}
	return st
}

func haltAndAgain(t *testing.T, h *Harness) {
	s := NewSpec(IsPersistent, WithScript(vmmfake.Script{}), In(setNetwork(t, h)))
	ensure(t, h, s)
	awaitState(t, h, s.ID, machine.Running)
	disk := privateDisk(t, h, s.ID)
	haltSpec(&s, "Stopped")
	ensure(t, h, s)
	st := wantHalted(t, h, s)
	if st.LastExit == nil || st.LastExit.Verdict != machine.Stopped || st.History.Attempts != 0 || st.LastFailure != nil {
		t.Fatalf("halted: %s", pretty(st))
	}
	h.Restart(t)
	s.Halt.Reason, s.Generation = "Evacuated", s.Generation+1
	ensure(t, h, s)
	wantHalted(t, h, s)
	unhaltSpec(&s)
	ensure(t, h, s)
	st = await(t, h, s.ID, "running again", func(st machine.Status) bool { return st.State == machine.Running && st.Incarnation == 2 })
	if !os.SameFile(disk, privateDisk(t, h, s.ID)) || st.DiskGeneration != 1 || st.History.Attempts != 0 || st.Counters.Ends[machine.Stopped] != 1 {
		t.Fatalf("running again: %s", pretty(st))
	}
	haltSpec(&s, "Stopped")
	ensure(t, h, s)
	remove(t, h, s, 0)
	awaitState(t, h, s.ID, machine.Removed)
	noLeftovers(t, h)
}

func createdHalted(t *testing.T, h *Harness) {
	s := NewSpec(IsPersistent, WithScript(vmmfake.Script{}))
	haltSpec(&s, "Stopped")
	ensure(t, h, s)
	if st := wantHalted(t, h, s); st.Counters.Starts != 0 {
		t.Fatalf("created halted: %s", pretty(st))
	}
	unhaltSpec(&s)
	ensure(t, h, s)
	awaitState(t, h, s.ID, machine.Running)
}

func stubbornHalt(t *testing.T, h *Harness) {
	s := NewSpec(IsPersistent, WithGrace(100*time.Millisecond), WithScript(vmmfake.Script{IgnoreSignals: true, Guest: guestfake.Script{IgnoreStop: true, IgnoreKill: true}}))
	ensure(t, h, s)
	awaitState(t, h, s.ID, machine.Running)
	haltSpec(&s, "Stopped")
	ensure(t, h, s)
	h.Restart(t)
	wantHalted(t, h, s)
}

type haltMoment struct {
	images bool
	run    func(t *testing.T, h *Harness)
}

// haltMoments are what a VM may be doing when it is halted. What holds it up there is gone when it may run again.
func haltMoments() map[string]haltMoment {
	is := func(state machine.State, reason fault.Reason) func(machine.Status) bool {
		return func(st machine.Status) bool {
			return st.State == state && (reason == "" || st.Started.Reason == reason)
		}
	}
	moment := func(images bool, hold func(*Harness) func(), script vmmfake.Script, option SpecOption, at func(machine.Status) bool) haltMoment {
		return haltMoment{images: images, run: func(t *testing.T, h *Harness) {
			release := func() {}
			if hold != nil {
				release = hold(h)
			}
			defer release()
			s := NewSpec(IsPersistent, WithScript(script), option)
			ensure(t, h, s)
			await(t, h, s.ID, "where it is to be halted", at)
			haltSpec(&s, "Stopped")
			ensure(t, h, s)
			before := wantHalted(t, h, s)
			release()
			unhaltSpec(&s)
			ensure(t, h, s)
			st := awaitState(t, h, s.ID, machine.Running)
			if st.History.Attempts > before.History.Attempts || st.DiskGeneration > 1 {
				t.Fatalf("running again: %s\nhalted: %s", pretty(st), pretty(before))
			}
			remove(t, h, s, 0)
			awaitState(t, h, s.ID, machine.Removed)
			noLeftovers(t, h)
		}}
	}
	slow := func(s *machine.Spec) { s.Restart.InitialDelay, s.Restart.MaxDelay = time.Hour, time.Hour }
	none := func(s *machine.Spec) {
		n := int32(0)
		s.Restart.MaxRetries, s.Restart.OnExhaustion = &n, restart.ManualReset
	}
	once := vmmfake.Script{Runs: []vmmfake.Script{exits(1, 0, ""), {}}}
	return map[string]haltMoment{
		"pulling": moment(true, func(h *Harness) func() { return h.Images.Block() }, vmmfake.Script{}, slow, func(s machine.Status) bool { return s.Progress != "" }),
		"waiting for another try at the image": moment(true, func(h *Harness) func() {
			h.Images.Fail(errors.New("registry is down"))
			return func() { h.Images.Fail(nil) }
		}, vmmfake.Script{}, slow, func(s machine.Status) bool {
			return s.Disk.Reason == fault.ImagePullFailed && s.State == machine.Pending
		}),
		"booting":           moment(false, nil, vmmfake.Script{Runs: []vmmfake.Script{{Guest: guestfake.Script{Silent: true}}, {}}}, slow, func(s machine.Status) bool { return s.Run == 1 }),
		"backing off":       moment(false, nil, once, slow, is(machine.Pending, machine.ReasonBackingOff)),
		"without a retry":   moment(false, nil, once, none, is(machine.Pending, machine.ReasonExhausted)),
		"to run elsewhere":  moment(false, nil, once, func(s *machine.Spec) { s.Restart.Mode = restart.Reschedule }, is(machine.Pending, machine.ReasonElsewhere)),
		"failing to launch": moment(false, nil, vmmfake.Script{Runs: []vmmfake.Script{{StartError: "no such kernel"}, {}}}, slow, is(machine.Pending, fault.RuntimeStartFailed)),
	}
}

func limitedTo(n int32, on restart.OnExhaustion) SpecOption {
	return func(s *machine.Spec) {
		IsPersistent(s)
		s.Restart.MaxRetries, s.Restart.OnExhaustion = &n, on
	}
}

func manualReset(t *testing.T, h *Harness) {
	s := NewSpec(limitedTo(1, restart.ManualReset), WithScript(exits(7, 0, "")))
	ensure(t, h, s)
	rests := func(incarnation int64) func(machine.Status) bool {
		return func(st machine.Status) bool {
			return st.State == machine.Pending && st.Started.Reason == machine.ReasonExhausted && st.Incarnation == incarnation
		}
	}
	st := await(t, h, s.ID, "without retries", rests(2))
	if st.Final != nil || st.History.ExhaustedAt == nil || !strings.Contains(st.Started.Message, "imp.dev/restart-reset") || st.LastFailure.Code == nil {
		t.Fatalf("without retries: %s", pretty(st))
	}
	s.Reset, s.Generation = "1", 2
	ensure(t, h, s)
	await(t, h, s.ID, "without retries a second time", rests(4))
	h.Restart(t)
	st = ensure(t, h, s)
	if st.Incarnation != 4 || st.History.Reset != "1" {
		t.Fatalf("one value acted twice: %s", pretty(st))
	}
	remove(t, h, s, 0)
	awaitState(t, h, s.ID, machine.Removed)
	noLeftovers(t, h)
}

func coolDown(t *testing.T, h *Harness) {
	s := NewSpec(limitedTo(0, restart.CoolDown), WithScript(vmmfake.Script{Runs: []vmmfake.Script{exits(7, 0, ""), {}}}))
	s.Restart.CoolDown = 2 * time.Second
	ensure(t, h, s)
	st := await(t, h, s.ID, "cooling down", func(st machine.Status) bool { return st.Started.Reason == machine.ReasonCoolingDown })
	if st.History.NextTryAt == nil || st.History.ExhaustedAt == nil {
		t.Fatalf("cooling down: %s", pretty(st))
	}
	end := *st.History.NextTryAt
	h.Restart(t)
	st = awaitState(t, h, s.ID, machine.Running)
	if st.StartedAt.Before(end) || st.History.ExhaustedAt != nil || st.History.Attempts != 0 || st.Incarnation != 2 {
		t.Fatalf("after the cool-down until %s: %s", end, pretty(st))
	}
}

func elsewhereAndBack(t *testing.T, h *Harness) {
	s := NewSpec(IsPersistent, WithScript(exits(3, 0, "")))
	s.Restart.Mode = restart.Reschedule
	ensure(t, h, s)
	st := await(t, h, s.ID, "another node's", func(st machine.Status) bool {
		return st.State == machine.Pending && st.Started.Reason == machine.ReasonElsewhere
	})
	if !st.History.Elsewhere || st.History.NextTryAt == nil || st.History.Attempts != 1 {
		t.Fatalf("another node's: %s", pretty(st))
	}
	eventually(t, "no VMM of a VM that is another node's", func() bool { return len(h.PIDs(t, s.ID)) == 0 })
	h.Restart(t)
	if st, _ = status(t, h, s.ID); !st.History.Elsewhere || st.Incarnation != 1 || st.State != machine.Pending {
		t.Fatalf("after a restart: %s", pretty(st))
	}
	s.Assignment, s.Script, s.History = 2, nil, st.History
	ensure(t, h, s)
	st = await(t, h, s.ID, "placed here again", func(st machine.Status) bool { return st.Assignment == 2 && st.State == machine.Running })
	if st.History.Elsewhere || st.History.Attempts != 1 || st.Incarnation != 1 || discardedDisks(t, h) != 1 {
		t.Fatalf("placed here again, with %d disks in the trash: %s", discardedDisks(t, h), pretty(st))
	}
	remove(t, h, s, 0)
	awaitState(t, h, s.ID, machine.Removed)
	noLeftovers(t, h)
}

func policyEdit(t *testing.T, h *Harness) {
	s := NewSpec(IsPersistent, WithScript(vmmfake.Script{Runs: []vmmfake.Script{exits(1, 0, ""), {}}}))
	s.Restart.InitialDelay, s.Restart.MaxDelay = time.Hour, time.Hour
	ensure(t, h, s)
	await(t, h, s.ID, "backing off", func(st machine.Status) bool {
		return st.State == machine.Pending && st.Started.Reason == machine.ReasonBackingOff
	})
	limitedTo(0, restart.ManualReset)(&s)
	s.Generation++
	ensure(t, h, s)
	await(t, h, s.ID, "without retries", func(st machine.Status) bool { return st.Started.Reason == machine.ReasonExhausted })
	IsPersistent(&s)
	s.Generation++
	ensure(t, h, s)
	st := awaitState(t, h, s.ID, machine.Running)
	if st.Incarnation != 2 || st.History.ExhaustedAt != nil || st.History.Attempts != 1 {
		t.Fatalf("with a shorter delay: %s", pretty(st))
	}
}

func hungAndAgain(t *testing.T, h *Harness) {
	h.SetSilence(shortSilence)
	h.Restart(t)
	s := NewSpec(IsPersistent, WithScript(vmmfake.Script{Runs: []vmmfake.Script{{Guest: guestfake.Script{HangAfterMillis: 300}}, {}}}))
	ensure(t, h, s)
	st := await(t, h, s.ID, "silent", func(st machine.Status) bool { return st.GuestReady.Reason == machine.ReasonGuestSilent })
	if st.State != machine.Running || st.Counters.Silent != 1 {
		t.Fatalf("silent: %s", pretty(st))
	}
	st = await(t, h, s.ID, "running again", func(st machine.Status) bool { return st.Incarnation == 2 && st.State == machine.Running })
	if st.LastExit.Verdict != machine.GuestHung || st.History.Attempts != 1 || st.Counters.Ends[machine.GuestHung] != 1 || st.LastFailure.Reason != fault.Reason(machine.GuestHung) {
		t.Fatalf("after a hung guest: %s", pretty(st))
	}
	remove(t, h, s, 0)
	awaitState(t, h, s.ID, machine.Removed)
	noLeftovers(t, h)
}

func hungAtStart(t *testing.T, h *Harness) {
	h.SetSilence(shortSilence)
	h.Restart(t)
	s := NewSpec(WithScript(vmmfake.Script{Guest: guestfake.Script{HangAtStart: true}}))
	ensure(t, h, s)
	st := awaitState(t, h, s.ID, machine.Finished)
	if st.Final.Verdict != machine.GuestHung || st.Counters.Starts != 1 || st.StartedAt != nil {
		t.Fatalf("a one-shot that hangs at its start: %s", pretty(st))
	}
	remove(t, h, s, 0)
	awaitState(t, h, s.ID, machine.Removed)
	noLeftovers(t, h)
}

func stoppedVMM(t *testing.T, h *Harness) {
	h.SetSilence(shortSilence)
	h.Restart(t)
	s := NewSpec(WithScript(vmmfake.Script{}))
	ensure(t, h, s)
	awaitState(t, h, s.ID, machine.Running)
	if err := syscall.Kill(h.PIDs(t, s.ID)[0], syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	h.Restart(t)
	if st := awaitState(t, h, s.ID, machine.Finished); st.Final.Verdict != machine.GuestHung {
		t.Fatalf("a VMM that was stopped: %s", pretty(st))
	}
	eventually(t, "an end of the stopped VMM", func() bool { return len(h.PIDs(t, s.ID)) == 0 })
}

func busyGuest(t *testing.T, h *Harness) {
	h.SetSilence(time.Second)
	h.Restart(t)
	s := NewSpec(WithScript(vmmfake.Script{Guest: guestfake.Script{
		Probes: []guestv1.ProbeResult{{Message: "connection refused"}}, Exit: &guestfake.Exit{AfterMillis: 4000},
	}}))
	s.Probe = &machine.Probe{Path: "/", Port: 80, Period: time.Hour, Timeout: time.Second, FailureThreshold: 1}
	ensure(t, h, s)
	await(t, h, s.ID, "not ready", func(st machine.Status) bool { return st.GuestReady.Reason == machine.ReasonProbeFailing })
	if st := awaitState(t, h, s.ID, machine.Finished); st.Final.Verdict != machine.Succeeded {
		t.Fatalf("four seconds of work: %s", pretty(st))
	}
}

func keepDisk(t *testing.T, h *Harness) {
	s := NewSpec(IsPersistent, WithScript(vmmfake.Script{}))
	ensure(t, h, s)
	awaitState(t, h, s.ID, machine.Running)
	disk := privateDisk(t, h, s.ID)
	ref := machine.Ref{ID: s.ID, Assignment: s.Assignment}
	for _, how := range []machine.Removal{{Grace: time.Minute, KeepDisk: true}, {}} { // nobody gives it up later
		if _, err := h.Service.Remove(t.Context(), ref, how); err != nil {
			t.Fatal(err)
		}
	}
	awaitState(t, h, s.ID, machine.Removed)
	noLeftovers(t, h)
	found, err := filepath.Glob(filepath.Join(h.StateDir, "trash", s.ID+"*.ext4"))
	if err != nil || len(found) != 1 {
		t.Fatalf("the trash holds %v (%v), want the disk", found, err)
	}
	kept, err := os.Stat(found[0])
	if err != nil || !os.SameFile(disk, kept) {
		t.Fatalf("the trash holds another disk (%v)", err)
	}
}

func rememberedFailure(t *testing.T, h *Harness) {
	s := NewSpec(IsPersistent, WithScript(vmmfake.Script{Runs: []vmmfake.Script{
		{Guest: guestfake.Script{Silent: true}, End: &vmmfake.End{How: vmmfake.Panic, Message: "no init found"}}, {},
	}}))
	ensure(t, h, s)
	st := awaitState(t, h, s.ID, machine.Running)
	f := st.LastFailure
	if f == nil || f.Reason != fault.RuntimeStartFailed || !strings.Contains(string(f.ConsoleTail), "no init found") || f.Incarnation != 1 {
		t.Fatalf("last failure: %s", pretty(f))
	}
}
