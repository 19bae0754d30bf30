package e2e

import (
	"strings"
	"testing"
	"time"

	"imp.dev/imp/internal/devserver"
	"imp.dev/imp/internal/devserver/chaos"
)

// disturb runs one schedule, with the verdict as the test's log.
func disturb(t *testing.T, o chaos.Options) chaos.Verdict {
	t.Helper()
	o.Server.BinDir, o.Server.CacheDir = need(t)
	o.Server.Accel = "tcg"
	out := &strings.Builder{}
	o.Out = out
	verdict, err := chaos.Run(t.Context(), o)
	t.Log(out.String())
	if err != nil {
		t.Fatalf("seed %d: %v", o.Seed, err)
	}
	return verdict
}

// inPlace are all kinds but the one whose VMs are moved by the operator, which does not move them yet.
func inPlace() []chaos.Kind {
	return []chaos.Kind{chaos.Steady, chaos.Crashing, chaos.Fails, chaos.ManualReset, chaos.CoolDown, chaos.OneShot, chaos.LongShot}
}

func TestSixtyVMsComeThroughFortySecondsOfEverythingThatGoesWrong(t *testing.T) {
	for name, seed := range map[string]uint64{"seed 1": 1, "seed 2": 2} {
		t.Run(name, func(t *testing.T) {
			v := disturb(t, chaos.Options{Seed: seed, Duration: 40 * time.Second, VMs: 60, Kinds: inPlace(), Server: devserver.Options{Nodes: 3, VMM: "fake"}})
			if v.Once == 0 || v.Checks[chaos.OneCopy] == 0 || v.Checks[chaos.NeverLies] == 0 {
				t.Errorf("the run proves nothing: %+v", v)
			}
		})
	}
}
