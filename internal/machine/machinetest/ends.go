package machinetest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	guestfake "imp.dev/imp/internal/guest/fake"
	"imp.dev/imp/internal/machine"
	vmmfake "imp.dev/imp/internal/vmm/fake"
)

// exits is a machine whose workload prints and ends after a while.
func exits(code int, after time.Duration, output string) vmmfake.Script {
	return vmmfake.Script{Guest: guestfake.Script{Output: output, Exit: &guestfake.Exit{Code: code, AfterMillis: after.Milliseconds()}}}
}

// ends is a machine that ends after its workload was started.
func ends(how string, after time.Duration) vmmfake.Script {
	return vmmfake.Script{End: &vmmfake.End{How: how, AfterStart: true, AfterMillis: after.Milliseconds()}}
}

func endChecks() []Check {
	return []Check{
		{Name: "a one-shot that exits 0 is Finished and Succeeded, and keeps only its record and console until it is removed", Run: oneShotSucceeds},
		{Name: "a workload that prints IMP_SUCCESS and exits 3 is Failed", Run: impostor},
		{Name: "a guest that panics after its command ended well is a success", Run: panicAfterSuccess},
		{Name: "a one-shot whose VMM was killed is never started a second time", Run: atMostOnce},
		{Name: "a persistent VM that ends is started again on the same private disk", Run: restartInPlace},
		{Name: "a persistent VM that exhausts its retries is Finished and can be removed", Run: exhausted},
		{Name: "a deadline ends the VM for good", Run: deadlineExceeded},
		{Name: "a guest that does not stop is killed after its grace", Run: stubborn},
		{Name: "a guest that is asked to stop in time says how it ended", Run: politeStop},
	}
}

func oneShotSucceeds(t *testing.T, h *Harness) {
	s := NewSpec(WithScript(exits(0, 0, "hello\n")))
	ensure(t, h, s)
	st := awaitState(t, h, s.ID, machine.Finished)
	if e := st.Final; e == nil || e.Verdict != machine.Succeeded || e.Code == nil || *e.Code != 0 || !e.Marker {
		t.Fatalf("final is %s, want Succeeded with code 0 and the marker", pretty(e))
	}
	if st.StartedAt == nil || st.FinishedAt == nil || st.ImageDigest != h.Digest || st.Incarnation != 1 || st.Counters.Starts != 1 || st.Counters.Exits != 1 {
		t.Fatalf("status is not complete: %s", pretty(st))
	}
	eventually(t, "a log that shows the marker", func() bool { return strings.Contains(h.Log.String(), "marker=IMP_SUCCESS") })
	eventually(t, "a finished VM without process and disk", func() bool {
		_, err := os.Stat(filepath.Join(h.StateDir, "vm", s.ID, "private.ext4"))
		return len(h.PIDs(t, s.ID)) == 0 && os.IsNotExist(err)
	})
	h.Restart(t)
	c, err := h.Service.Console(t.Context(), s.ID, 0, 1<<10)
	if err != nil || !strings.Contains(string(c.Data), "hello") {
		t.Fatalf("console of a finished VM: %q %v", c.Data, err)
	}
	remove(t, h, s, 0)
	awaitState(t, h, s.ID, machine.Removed)
	noLeftovers(t, h)
}

func impostor(t *testing.T, h *Harness) {
	s := NewSpec(WithScript(exits(3, 0, "IMP_SUCCESS id=0123\nIMP_SUCCESS\n")))
	ensure(t, h, s)
	st := awaitState(t, h, s.ID, machine.Finished)
	if e := st.Final; e.Verdict != machine.Failed || *e.Code != 3 || !strings.Contains(string(e.ConsoleTail), "IMP_SUCCESS id=0123") {
		t.Fatalf("final is %s, want Failed with code 3 and the console's end", pretty(e))
	}
}

func panicAfterSuccess(t *testing.T, h *Harness) {
	script := exits(0, 0, "")
	script.End = &vmmfake.End{How: vmmfake.Panic, AfterExit: true}
	s := NewSpec(WithScript(script))
	ensure(t, h, s)
	if st := awaitState(t, h, s.ID, machine.Finished); st.Final.Verdict != machine.Succeeded {
		t.Fatalf("final is %s, want Succeeded", pretty(st.Final))
	}
}

func atMostOnce(t *testing.T, h *Harness) {
	s := NewSpec(WithScript(vmmfake.Script{}))
	ensure(t, h, s)
	awaitState(t, h, s.ID, machine.Running)
	h.Kill(t, s.ID)
	awaitState(t, h, s.ID, machine.Finished)
	h.Restart(t)
	ensure(t, h, s)
	st := awaitState(t, h, s.ID, machine.Finished)
	if st.Final.Verdict != machine.VMMKilled || st.Counters.Starts != 1 || st.Incarnation != 1 || len(h.PIDs(t, s.ID)) != 0 {
		t.Fatalf("a killed one-shot: %s", pretty(st))
	}
}

func restartInPlace(t *testing.T, h *Harness) {
	s := NewSpec(IsPersistent, WithScript(vmmfake.Script{Runs: []vmmfake.Script{exits(1, 50*time.Millisecond, ""), ends(vmmfake.Reboot, 50*time.Millisecond), {}}}))
	ensure(t, h, s)
	awaitState(t, h, s.ID, machine.Running)
	disk, err := os.Stat(filepath.Join(h.StateDir, "vm", s.ID, "private.ext4"))
	if err != nil {
		t.Fatal(err)
	}
	st := await(t, h, s.ID, "running in its third incarnation", func(st machine.Status) bool { return st.Incarnation == 3 && st.State == machine.Running })
	if st.Counters.Restarts != 2 || st.Counters.Exits != 2 || st.LastExit.Verdict != machine.GuestReboot || st.History.Attempts != 1 || st.DiskGeneration != 1 {
		t.Fatalf("after two restarts: %s", pretty(st))
	}
	again, err := os.Stat(filepath.Join(h.StateDir, "vm", s.ID, "private.ext4"))
	if err != nil || !os.SameFile(disk, again) {
		t.Fatalf("the private disk is another one: %v", err)
	}
	remove(t, h, s, 0)
	awaitState(t, h, s.ID, machine.Removed)
	noLeftovers(t, h)
}

func exhausted(t *testing.T, h *Harness) {
	none := int32(1)
	s := NewSpec(IsPersistent, WithScript(exits(7, 0, "")))
	s.Restart.MaxRetries = &none
	ensure(t, h, s)
	st := awaitState(t, h, s.ID, machine.Finished)
	if st.Final.Verdict != machine.Failed || *st.Final.Code != 7 || st.History.ExhaustedAt == nil || st.Incarnation != 2 {
		t.Fatalf("with one retry: %s", pretty(st))
	}
	remove(t, h, s, 0)
	awaitState(t, h, s.ID, machine.Removed)
	noLeftovers(t, h)
}

func deadlineExceeded(t *testing.T, h *Harness) {
	s := NewSpec(IsPersistent, WithGrace(100*time.Millisecond), WithScript(vmmfake.Script{}))
	ensure(t, h, s)
	awaitState(t, h, s.ID, machine.Running)
	at := time.Now().Add(200 * time.Millisecond)
	s.Deadline, s.Generation = &at, 2
	ensure(t, h, s)
	st := awaitState(t, h, s.ID, machine.Finished)
	if st.Final.Verdict != machine.DeadlineExceeded || st.Counters.Starts != 1 {
		t.Fatalf("after its deadline: %s", pretty(st))
	}
}

func stubborn(t *testing.T, h *Harness) {
	s := NewSpec(WithScript(vmmfake.Script{IgnoreSignals: true, Guest: guestfake.Script{IgnoreStop: true, IgnoreKill: true}}))
	ensure(t, h, s)
	awaitState(t, h, s.ID, machine.Running)
	remove(t, h, s, 100*time.Millisecond)
	st := awaitState(t, h, s.ID, machine.Removed)
	if st.LastExit == nil || st.LastExit.Verdict != machine.Stopped {
		t.Fatalf("removed VM ended as %s, want Stopped", pretty(st.LastExit))
	}
	noLeftovers(t, h)
}

func politeStop(t *testing.T, h *Harness) {
	s := NewSpec(WithScript(vmmfake.Script{Guest: guestfake.Script{StopCode: 5}}))
	ensure(t, h, s)
	awaitState(t, h, s.ID, machine.Running)
	st := remove(t, h, s, 20*time.Second)
	if st.State != machine.Removing {
		t.Fatalf("state is %s, want Removing", st.State)
	}
	st = awaitState(t, h, s.ID, machine.Removed)
	if st.LastExit == nil || st.LastExit.Verdict != machine.Stopped || st.LastExit.Code == nil || *st.LastExit.Code != 5 {
		t.Fatalf("removed VM ended as %s, want Stopped with code 5", pretty(st.LastExit))
	}
}
