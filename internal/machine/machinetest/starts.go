package machinetest

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/fault"
	guestfake "imp.dev/imp/internal/guest/fake"
	"imp.dev/imp/internal/machine"
	vmmfake "imp.dev/imp/internal/vmm/fake"
)

// secretWord must never be seen in a file or a log.
const secretWord = "correct-horse-battery"

func errorsContain(err error, word string) bool {
	return err != nil && strings.Contains(err.Error(), word)
}

func startChecks() []Check {
	return []Check{
		{Name: "an image that cannot be pulled is told with its cause, and runs once it can", Run: imageRepaired, Images: true},
		{Name: "a guest that never answers is tried again at once, then told with its last words", Run: silentGuest},
		{Name: "a VMM that cannot be launched is told with its own words and leaves nothing", Run: launchFails},
		{Name: "a machine that ends before its workload was started is a failed start, of a one-shot as well", Run: diesBooting},
		{Name: "a guest that refuses its configuration is told in its words", Run: refusedConfigure},
		{Name: "guests that boot take turns, and a VM that waits for its turn can be removed", Run: bootTurns},
		{Name: "readiness follows the probe", Run: probing},
		{Name: "without a probe a VM is ready once its workload was started", Run: readyWithoutProbe},
		{Name: "a pull that needs secrets waits for them after a restart, and no file or log holds them", Run: secrets, Images: true},
	}
}

func imageRepaired(t *testing.T, h *Harness) {
	h.Images.Fail(errors.New("registry.test answers 401"))
	s := NewSpec(WithScript(vmmfake.Script{}))
	ensure(t, h, s)
	st := await(t, h, s.ID, "told of the failed pull", func(st machine.Status) bool { return st.Disk.OK != nil && !*st.Disk.OK })
	if st.Disk.Reason != fault.ImagePullFailed || !strings.Contains(st.Disk.Message, "registry.test answers 401") {
		t.Fatalf("check is %s", pretty(st.Disk))
	}
	await(t, h, s.ID, "tried again", func(st machine.Status) bool { return st.Counters.Retries >= 2 })
	if n := len(h.Images.Asked()); n > 3 {
		t.Fatalf("asked %d times within two tries", n)
	}
	h.Images.Fail(nil)
	st = awaitState(t, h, s.ID, machine.Running)
	if !*st.Disk.OK || st.Disk.Reason != "" {
		t.Fatalf("check is %s after the repair", pretty(st.Disk))
	}
}

func silentGuest(t *testing.T, h *Harness) {
	s := NewSpec(WithScript(vmmfake.Script{Console: "cannot mount root\n", Guest: guestfake.Script{Silent: true}}))
	ensure(t, h, s)
	st := await(t, h, s.ID, "given up for a while", func(st machine.Status) bool {
		return st.State == machine.Pending && st.Started.Reason == fault.RuntimeStartFailed
	})
	if st.Run != 2 || st.Incarnation != 1 || !strings.Contains(st.Started.Message, "cannot mount root") || st.History.StartFailures != 2 || st.History.Attempts != 0 {
		t.Fatalf("after a silent guest: %s", pretty(st))
	}
	if st.History.NextTryAt == nil || time.Until(*st.History.NextTryAt) > time.Minute {
		t.Fatalf("next try at %v", st.History.NextTryAt)
	}
	eventually(t, "no VMM while backing off", func() bool { return len(h.PIDs(t, s.ID)) == 0 })
}

func launchFails(t *testing.T, h *Harness) {
	s := NewSpec(IsPersistent, WithScript(vmmfake.Script{Runs: []vmmfake.Script{{StartError: "no such kernel"}, {}}}))
	ensure(t, h, s)
	st := await(t, h, s.ID, "told of the failed launch", func(st machine.Status) bool { return st.Started.Reason == fault.RuntimeStartFailed })
	if !strings.Contains(st.Started.Message, "no such kernel") {
		t.Fatalf("check is %s", pretty(st.Started))
	}
	st = awaitState(t, h, s.ID, machine.Running)
	if st.Run != 2 || st.Incarnation != 1 || st.Counters.Restarts != 0 || st.History.StartFailures != 0 {
		t.Fatalf("after the second launch: %s", pretty(st))
	}
}

func diesBooting(t *testing.T, h *Harness) {
	s := NewSpec(WithScript(vmmfake.Script{Guest: guestfake.Script{Silent: true}, End: &vmmfake.End{How: vmmfake.Panic, Message: "no init found"}}))
	ensure(t, h, s)
	st := await(t, h, s.ID, "told of the failed boot", func(st machine.Status) bool { return st.Started.Reason == fault.RuntimeStartFailed })
	if !strings.Contains(st.Started.Message, "no init found") || st.Final != nil {
		t.Fatalf("after a panic while booting: %s", pretty(st))
	}
	remove(t, h, s, 0)
	awaitState(t, h, s.ID, machine.Removed)
	noLeftovers(t, h)
}

func refusedConfigure(t *testing.T, h *Harness) {
	s := NewSpec(WithScript(vmmfake.Script{Guest: guestfake.Script{ConfigureError: "mounting overlay: stale file handle"}}))
	ensure(t, h, s)
	st := await(t, h, s.ID, "told of the refusal", func(st machine.Status) bool { return st.Started.Reason == fault.RuntimeStartFailed })
	if !strings.Contains(st.Started.Message, "stale file handle") {
		t.Fatalf("check is %s", pretty(st.Started))
	}
}

func bootTurns(t *testing.T, h *Harness) {
	slow := WithScript(vmmfake.Script{Guest: guestfake.Script{BootMillis: 1000}})
	var specs []machine.Spec
	for range 12 {
		s := NewSpec(slow)
		ensure(t, h, s)
		specs = append(specs, s)
	}
	last := specs[len(specs)-1]
	remove(t, h, last, 0)
	awaitState(t, h, last.ID, machine.Removed)
	for _, s := range specs[:len(specs)-1] {
		if st := awaitState(t, h, s.ID, machine.Running); st.Run != 1 {
			t.Errorf("VM needed %d launches", st.Run)
		}
		remove(t, h, s, 0)
	}
	for _, s := range specs {
		awaitState(t, h, s.ID, machine.Removed)
	}
	noLeftovers(t, h)
}

func probing(t *testing.T, h *Harness) {
	bad, good := guestv1.ProbeResult{Status: 503, Message: "status 503"}, guestv1.ProbeResult{Healthy: true, Status: 200}
	s := NewSpec(IsPersistent, WithScript(vmmfake.Script{Guest: guestfake.Script{Probes: []guestv1.ProbeResult{good, bad, good, bad, bad, bad, good}}}))
	s.Probe = &machine.Probe{Path: "/healthz", Port: 80, Period: 200 * time.Millisecond, Timeout: time.Second, FailureThreshold: 3}
	ensure(t, h, s)
	is := func(want bool) func(machine.Status) bool {
		return func(st machine.Status) bool { return st.GuestReady.OK != nil && *st.GuestReady.OK == want }
	}
	first := await(t, h, s.ID, "ready", is(true))
	st := await(t, h, s.ID, "not ready after three failures", is(false))
	if st.GuestReady.Reason != machine.ReasonProbeFailing || !strings.Contains(st.GuestReady.Message, "503") {
		t.Fatalf("check is %s", pretty(st.GuestReady))
	}
	if d := st.GuestReady.Since.Sub(first.GuestReady.Since); d < 4*s.Probe.Period {
		t.Fatalf("one failure among good answers was enough: not ready after %s", d)
	}
	await(t, h, s.ID, "ready again", is(true))
}

func readyWithoutProbe(t *testing.T, h *Harness) {
	s := NewSpec(WithScript(vmmfake.Script{}))
	ensure(t, h, s)
	st := awaitState(t, h, s.ID, machine.Running)
	for name, c := range map[string]machine.Check{"disk": st.Disk, "network": st.Network, "started": st.Started, "guestReady": st.GuestReady} {
		if c.OK == nil || !*c.OK {
			t.Errorf("%s is %s", name, pretty(c))
		}
	}
}

func secrets(t *testing.T, h *Harness) {
	release := h.Images.Block()
	defer release()
	s := NewSpec(withCredentials, WithScript(vmmfake.Script{}))
	ensure(t, h, s)
	await(t, h, s.ID, "pulling", func(st machine.Status) bool { return st.Progress != "" })
	h.Restart(t)
	await(t, h, s.ID, "waiting for secrets", func(st machine.Status) bool { return st.Disk.Reason == fault.WaitingForSecrets })
	ensure(t, h, s)
	await(t, h, s.ID, "pulling again", func(st machine.Status) bool { return st.Progress != "" })
	release()
	awaitState(t, h, s.ID, machine.Running)
	asked := h.Images.Asked()
	if got := asked[len(asked)-1].Credentials; len(got) != 1 || got[0].Password != secretWord {
		t.Fatal("the secrets did not reach the store")
	}
	if strings.Contains(h.Log.String(), secretWord) {
		t.Error("the log holds the password")
	}
	for _, dir := range []string{h.StateDir, h.RunDir} {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if os.IsNotExist(err) {
				return nil // a temporary file that has been renamed meanwhile
			}
			if err != nil || !d.Type().IsRegular() || d.Name() == "private.ext4" {
				return err
			}
			if b, err := os.ReadFile(path); err == nil && strings.Contains(string(b), secretWord) {
				t.Errorf("%s holds the password", path)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}
