package machinetest

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"imp.dev/imp/internal/cgroup"
	guestfake "imp.dev/imp/internal/guest/fake"
	"imp.dev/imp/internal/machine"
	vmmfake "imp.dev/imp/internal/vmm/fake"
)

// outcomeDelay lets a test take the runtime down between the workload's start and its end.
const outcomeDelay = 1500 * time.Millisecond

// shortSilence makes a guest that hangs count as one within a test, and is long for a machine that is busy.
const shortSilence = 3 * time.Second

type outcome struct {
	name    string
	script  vmmfake.Script
	kill    bool
	verdict machine.Verdict
	code    int32
	// silence, when set, is what the runtime grants a guest that answers nothing.
	silence time.Duration
}

func outcomes() []outcome {
	return []outcome{
		{name: "exit 0", script: exits(0, outcomeDelay, ""), verdict: machine.Succeeded},
		{name: "exit 3", script: exits(3, outcomeDelay, ""), verdict: machine.Failed, code: 3},
		{name: "panic", script: ends(vmmfake.Panic, outcomeDelay), verdict: machine.GuestPanic},
		{name: "power-off", script: ends(vmmfake.PowerOff, outcomeDelay), verdict: machine.GuestPowerOff},
		{name: "reboot", script: ends(vmmfake.Reboot, outcomeDelay), verdict: machine.GuestReboot},
		{name: "kill -9 of the VMM", kill: true, verdict: machine.VMMKilled},
		{name: "a guest that hangs", script: vmmfake.Script{Guest: guestfake.Script{HangAfterMillis: outcomeDelay.Milliseconds()}}, verdict: machine.GuestHung, silence: shortSilence},
		{name: "a VMM that needs more memory than it may have", script: ends(vmmfake.OOM, outcomeDelay), verdict: machine.OOMKilled},
		{name: "a VMM that gives up", script: ends(vmmfake.Error, outcomeDelay), verdict: machine.VMMFailed},
	}
}

// outcomeChecks: the verdict is the same whoever looks and whenever.
func outcomeChecks() []Check {
	var checks []Check
	for _, o := range outcomes() {
		for _, when := range []string{"up", "down", "restarted"} {
			checks = append(checks, Check{
				Name: fmt.Sprintf("%s is told the same with the runtime %s", o.name, when),
				Run:  func(t *testing.T, h *Harness) { o.run(t, h, when) },
			})
		}
	}
	return checks
}

func (o outcome) run(t *testing.T, h *Harness, when string) {
	if o.verdict == machine.OOMKilled && !limitsMemory(t) {
		t.Skip("this host has no cgroups to limit memory with, or this is not root")
	}
	if o.silence > 0 {
		h.SetSilence(o.silence)
		h.Restart(t)
	}
	s := NewSpec(WithScript(o.script))
	ensure(t, h, s)
	st := awaitState(t, h, s.ID, machine.Running)
	switch when {
	case "down":
		h.Stop(t)
		if o.kill {
			h.Kill(t, s.ID)
		}
		eventually(t, "the machine's end while the runtime is down", func() bool { return o.happened(h, s.ID, len(h.PIDs(t, s.ID))) })
		h.Start(t)
	case "restarted":
		h.Restart(t)
		if o.kill {
			h.Kill(t, s.ID)
		}
	case "up":
		if o.kill {
			h.Kill(t, s.ID)
		}
	}
	end := awaitState(t, h, s.ID, machine.Finished)
	if end.Final.Verdict != o.verdict {
		t.Fatalf("final is %s, want %s\nlog:\n%s", pretty(end.Final), o.verdict, logTail(h, s.ID))
	}
	if n := end.Counters.Ends[o.verdict]; n != 1 {
		t.Fatalf("%d ends are counted as %s: %s", n, o.verdict, pretty(end.Counters))
	}
	if failed := o.verdict != machine.Succeeded; failed != (end.LastFailure != nil) || (failed && string(end.LastFailure.Reason) != string(o.verdict)) {
		t.Fatalf("last failure is %s", pretty(end.LastFailure))
	}
	told := o.verdict == machine.Succeeded || o.verdict == machine.Failed
	if told != (end.Final.Code != nil) || (told && *end.Final.Code != o.code) {
		t.Fatalf("final is %s, want code %d", pretty(end.Final), o.code)
	}
	if end.Final.Incarnation != 1 || end.Counters.Starts != 1 || end.Revision <= st.Revision {
		t.Fatalf("status is not of one incarnation with a newer revision than %d: %s", st.Revision, pretty(end))
	}
	if when == "restarted" && !o.kill && end.Counters.Adopted != 1 {
		t.Fatalf("the VM was adopted %d times, want once", end.Counters.Adopted)
	}
	remove(t, h, s, 0)
	awaitState(t, h, s.ID, machine.Removed)
	noLeftovers(t, h)
}

func limitsMemory(t *testing.T) bool {
	t.Helper()
	if os.Geteuid() != 0 {
		return false
	}
	tree, err := cgroup.Open(cgroup.Options{Instance: "probe-" + uuid.NewString()})
	if err != nil {
		return false
	}
	defer func() {
		if err := tree.Close(); err != nil {
			t.Error(err)
		}
	}()
	return !slices.Contains(tree.Missing(), "memory")
}

// hangs says that the fake guest of VM id has said its last word.
func hangs(h *Harness, id string) bool {
	b, _ := os.ReadFile(filepath.Join(h.StateDir, "vm", id, "console.log"))
	return strings.Contains(string(b), guestfake.HangWords)
}

// happened looks at what the fake VMM leaves in files, for the runtime cannot be asked.
func (o outcome) happened(h *Harness, id string, processes int) bool {
	if o.kill || o.verdict == machine.VMMFailed || o.verdict == machine.OOMKilled {
		return processes == 0
	}
	if o.verdict == machine.GuestHung {
		return hangs(h, id)
	}
	if o.verdict == machine.Succeeded || o.verdict == machine.Failed {
		b, _ := os.ReadFile(filepath.Join(h.StateDir, "vm", id, "console.log"))
		return strings.Contains(string(b), "IMP_")
	}
	b, _ := os.ReadFile(filepath.Join(h.RunDir, "vm", id, "1", "state.log"))
	return strings.Contains(string(b), "cause\":\"") && !strings.HasSuffix(strings.TrimSpace(string(b)), "cause\":\"\"}")
}
