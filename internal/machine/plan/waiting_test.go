package plan

import (
	"strings"
	"testing"
	"time"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/restart"
)

func halt(v *View) {
	next := v.Record.Spec
	next.Halt = &machine.Halt{Reason: "Stopped", Message: "desiredState is Stopped"}
	v.Record.Update(next, false, v.Now)
}

func unhalt(v *View) {
	next := v.Record.Spec
	next.Halt = nil
	v.Record.Update(next, false, v.Now)
}

func policy(p restart.Policy) func(*View) { return func(v *View) { v.Record.Spec.Restart = p } }

func newPolicy(p restart.Policy) func(*View) {
	return func(v *View) {
		next := v.Record.Spec
		next.Restart = p
		v.Record.Update(next, false, v.Now)
	}
}

func destroyed(v *View) { v.Record.VMMDestroyed(v.Now) }

func stopping(v *View) { v.Record.Stopping(30*time.Second, machine.Stopped, noon) }

func silentSince(t time.Time) func(*View) { return func(v *View) { v.Observed.HeardAt = t } }

func limited(n int32, on restart.OnExhaustion) restart.Policy {
	return restart.Policy{MaxRetries: &n, InitialDelay: 10 * time.Second, MaxDelay: time.Minute, OnExhaustion: on, CoolDown: time.Hour}
}

func moving() restart.Policy {
	return restart.Policy{Mode: restart.Reschedule, InitialDelay: 10 * time.Second, MaxDelay: time.Minute}
}

func failedOnce(p restart.Policy) View {
	return view(persistent, policy(p), running, concluded(machine.Failed), destroyed)
}

func TestNextForAVMThatIsHaltedWaitsOrHangs(t *testing.T) {
	cases := map[string]struct {
		view  View
		want  Kind
		until time.Time
	}{
		"a halted VM that was never started stays so":           {view: view(persistent, halt), want: Watch},
		"a halt while a disk is prepared goes no further":       {view: view(persistent, prepared, halt), want: Watch},
		"a halt in the middle of a launch undoes it":            {view: view(persistent, launching, halt), want: DestroyVMM},
		"a halt of a booting VM ends it at once":                {view: view(persistent, launched, halt), want: CollectVerdict},
		"a halt of a running VM asks its guest to stop":         {view: view(persistent, running, halt), want: Stop},
		"a halted guest has its grace and a moment":             {view: view(persistent, running, halt, stopping, later(39*time.Second)), want: Watch, until: noon.Add(40 * time.Second)},
		"a halted guest that does not stop is ended":            {view: view(persistent, running, halt, stopping, later(40*time.Second)), want: CollectVerdict},
		"a halt that is withdrawn too late is carried through":  {view: view(persistent, running, halt, stopping, unhalt, later(40*time.Second)), want: CollectVerdict},
		"a halt that is withdrawn in time lets the VM run":      {view: view(persistent, running, halt, unhalt), want: Watch},
		"a VM that was halted keeps its disk":                   {view: view(persistent, running, halt, concluded(machine.Stopped), destroyed), want: Watch},
		"and is launched at once when it may run":               {view: view(persistent, running, halt, concluded(machine.Stopped), destroyed, unhalt), want: StartVMM},
		"a VM that backs off and is halted and let go tries":    {view: view(persistent, running, concluded(machine.Failed), destroyed, halt, unhalt), want: StartVMM},
		"a halted VM can be removed":                            {view: view(persistent, prepared, halt, removed), want: FreeDisk},
		"a deadline ends a halted VM":                           {view: view(persistent, halt, func(v *View) { v.Record.Spec.Deadline = &noon }), want: Finish},
		"a VM without retries that waits for a reset":           {view: failedOnce(limited(0, restart.ManualReset)), want: Watch},
		"a VM that cools down waits that long":                  {view: failedOnce(limited(0, restart.CoolDown)), want: WaitUntil, until: noon.Add(time.Hour)},
		"and is tried again then":                               {view: func() View { v := failedOnce(limited(0, restart.CoolDown)); v.Now = noon.Add(time.Hour); return v }(), want: StartVMM},
		"a VM whose policy is to fail frees its disk":           {view: failedOnce(limited(0, restart.Fail)), want: FreeDisk},
		"a try that is the operator's is not made, ever":        {view: func() View { v := failedOnce(moving()); v.Now = noon.Add(time.Hour); return v }(), want: Watch},
		"a guest that answers is watched until it might hang":   {view: view(running, silentSince(noon)), want: Watch, until: noon.Add(time.Minute)},
		"a guest that was silent too long is ended":             {view: view(running, silentSince(noon), later(time.Minute)), want: CollectVerdict},
		"a start that was never answered is not repeated then":  {view: view(startSent, silentSince(noon), later(time.Minute)), want: CollectVerdict},
		"a start is repeated until then":                        {view: view(startSent, silentSince(noon)), want: StartWorkload, until: noon.Add(time.Minute)},
		"a guest that was not sent its start does not hang":     {view: view(launched, silentSince(noon.Add(-time.Hour))), want: AwaitGuest, until: noon.Add(30 * time.Second)},
		"a guest that is stopping has its grace, silent or not": {view: view(persistent, running, halt, stopping, silentSince(noon.Add(-time.Hour))), want: Watch, until: noon.Add(40 * time.Second)},
		"with no limit no guest hangs": {view: view(running, silentSince(noon), later(100*time.Hour), func(v *View) {
			v.Limits.Silence = 0
		}), want: Watch},
		"a machine that has ended does not hang": {view: view(running, machineOff, silentSince(noon), later(time.Hour)), want: CollectVerdict},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			s := Next(c.view)
			if s.Kind != c.want || (!c.until.IsZero() && !s.Until.Equal(c.until)) {
				t.Fatalf("got %s until %s (%s: %s), want %s until %s", s.Kind, s.Until, s.Check, s.Why, c.want, c.until)
			}
		})
	}
	if s := Next(view(running, machineOff, silentSince(noon), later(time.Hour))); s.Verdict != "" {
		t.Errorf("the end of a machine that ended by itself is called %s", s.Verdict)
	}
	if s := Next(view(running, silentSince(noon), later(time.Hour))); s.Verdict != machine.GuestHung {
		t.Errorf("a silent guest's end is called %q", s.Verdict)
	}
}

func TestAHaltIsNoFailureAndNotTheEnd(t *testing.T) {
	v := view(persistent, running, halt, stopping, concluded(machine.Stopped), destroyed)
	r := v.Record
	if r.Final != nil || r.History != (restart.History{}) || r.LastFailure != nil || r.Counters.Ends[machine.Stopped] != 1 {
		t.Fatalf("final %+v, history %+v, failure %+v, ends %v", r.Final, r.History, r.LastFailure, r.Counters.Ends)
	}
	if c := r.Checks.Started; c.OK == nil || *c.OK || c.Reason != "Stopped" || c.Message != "desiredState is Stopped" || r.Checks.GuestReady.OK != nil {
		t.Errorf("checks are %+v", r.Checks)
	}
	if st := StateOf(r, Next(v)); st != machine.Halted || r.Image == nil || r.Disk == nil {
		t.Errorf("state %s, image %v, disk %v", st, r.Image, r.Disk)
	}
	unhalt(&v)
	if v.Record.Checks.Started.OK != nil || StateOf(v.Record, Next(v)) != machine.Starting {
		t.Errorf("started is %+v", v.Record.Checks.Started)
	}
	v.Record.BeginBoot("n", "boot", 0, noon)
	if v.Record.Incarnation != 2 {
		t.Errorf("incarnation %d", v.Record.Incarnation)
	}
}

func TestWhatIsToldOfAVMThatWaits(t *testing.T) {
	for name, c := range map[string]struct {
		view   View
		reason fault.Reason
		text   string
	}{
		"backing off":           {failedOnce(restart.Default()), machine.ReasonBackingOff, "in 10s, at 2026-05-01T12:00:10Z"},
		"used up, to be reset":  {failedOnce(limited(0, restart.ManualReset)), machine.ReasonExhausted, "imp.dev/restart-reset"},
		"used up, cooling down": {failedOnce(limited(0, restart.CoolDown)), machine.ReasonCoolingDown, "2026-05-01T13:00:00Z"},
		"used up, failed":       {failedOnce(limited(0, restart.Fail)), "Failed", "no retry"},
		"elsewhere":             {failedOnce(moving()), machine.ReasonElsewhere, "placed anew in 10s"},
		"a failed start, elsewhere": {view(persistent, policy(moving()), launched, func(v *View) {
			v.Record.StartFailed(FailedStart{Failure: Failure{Reason: fault.RuntimeStartFailed, Message: "no init found"}}, noon)
		}, destroyed), machine.ReasonElsewhere, "RuntimeStartFailed: no init found"},
	} {
		t.Run(name, func(t *testing.T) {
			got := c.view.Record.Checks.Started
			if got.OK == nil || *got.OK || got.Reason != c.reason || !strings.Contains(got.Message, c.text) {
				t.Fatalf("started is %+v, want %s with %q", got, c.reason, c.text)
			}
		})
	}
}

func TestAPolicyThatChangesActsOnTheVMThatWaits(t *testing.T) {
	v := failedOnce(restart.Policy{InitialDelay: time.Hour, MaxDelay: time.Hour})
	newPolicy(restart.Policy{InitialDelay: time.Minute, MaxDelay: time.Hour})(&v)
	if s := Next(v); s.Kind != WaitUntil || !s.Until.Equal(noon.Add(time.Minute)) {
		t.Fatalf("a shorter delay: %s until %s", s.Kind, s.Until)
	}
	newPolicy(limited(0, restart.ManualReset))(&v)
	if s := Next(v); s.Kind != Watch || v.Record.Checks.Started.Reason != machine.ReasonExhausted {
		t.Fatalf("no retries any more: %s, started %+v", s.Kind, v.Record.Checks.Started)
	}
	newPolicy(limited(5, restart.ManualReset))(&v)
	if s := Next(v); s.Kind != WaitUntil {
		t.Fatalf("retries again: %s", s.Kind)
	}
	newPolicy(limited(0, restart.Fail))(&v)
	if f := v.Record.Final; f == nil || f.Verdict != machine.Failed || !strings.Contains(f.Message, "no retry") {
		t.Fatalf("no retries, to fail: final %+v", f)
	}
	final := *v.Record.Final
	newPolicy(limited(5, restart.Fail))(&v)
	if v.Record.Final.Message != final.Message || v.Record.Final.Verdict != final.Verdict {
		t.Fatalf("final changed to %+v", v.Record.Final)
	}
}

func TestAResetActsOnce(t *testing.T) {
	v := failedOnce(limited(0, restart.ManualReset))
	reset := func(value string) {
		next := v.Record.Spec
		next.Reset = value
		v.Record.Update(next, false, v.Now)
	}
	reset("1")
	if s := Next(v); s.Kind != StartVMM || v.Record.History.ExhaustedAt != nil {
		t.Fatalf("after a reset: %s, %+v", s.Kind, v.Record.History)
	}
	running(&v)
	concluded(machine.Failed)(&v)
	destroyed(&v)
	reset("1")
	if s := Next(v); s.Kind != Watch || v.Record.History.ExhaustedAt == nil {
		t.Fatalf("one value resets twice: %s, %+v", s.Kind, v.Record.History)
	}
	spec := v.Record.Spec
	spec.History = v.Record.History
	if s := Next(View{Record: New(spec, noon), Limits: DefaultLimits(), Now: noon}); s.Kind != Watch {
		t.Fatalf("one value resets again on another node: %s", s.Kind)
	}
	spec.Reset = "2"
	if r := New(spec, noon); r.History.ExhaustedAt != nil || r.History.Reset != "2" {
		t.Fatalf("a reset on the way to a node: %+v", r.History)
	}
	v = view(persistent, running)
	v.Record.History.Attempts = 3
	reset("3")
	if v.Record.History.Attempts != 0 || v.Record.Boot == nil || *v.Record.Checks.Started.OK != true {
		t.Fatalf("a reset of a running VM: %+v", v.Record.History)
	}
}

func TestAHistoryTravels(t *testing.T) {
	s := spec()
	s.Lifecycle, s.Restart = machine.Persistent, moving()
	next := noon.Add(30 * time.Second)
	s.History = restart.History{Attempts: 2, LastFailureAt: &noon, NextTryAt: &next}
	if step := Next(View{Record: New(s, noon), Limits: DefaultLimits(), Now: noon}); step.Kind != WaitUntil || !step.Until.Equal(next) {
		t.Errorf("a wait that began elsewhere: %s until %s", step.Kind, step.Until)
	}
	s.History.Elsewhere = true
	if r := New(s, noon); r.History.Elsewhere || r.History.NextTryAt != nil || r.History.Attempts != 2 {
		t.Errorf("a VM that was placed anew: %+v", r.History)
	}
	far := noon.Add(24 * time.Hour)
	s.History = restart.History{Attempts: 2, LastFailureAt: &far, NextTryAt: &far}
	if r := New(s, noon); r.History.NextTryAt.Sub(noon) > 5*time.Minute || r.History.LastFailureAt.After(noon) {
		t.Errorf("a wait by a clock that is ahead: %+v", r.History)
	}
	v := failedOnce(moving())
	again := v.Record.Spec
	again.Assignment = 2
	v.Record.Successor = &again // the object has not learned of the failure yet
	if r := v.Record.Succeeded(noon); r.History.Attempts != 1 || r.History.Elsewhere || r.Disk != nil || r.Incarnation != 0 {
		t.Errorf("back on the same node: %+v", r)
	}
}

func TestWhatIsRememberedOfEnds(t *testing.T) {
	v := view(persistent, launched)
	v.Record.StartFailed(FailedStart{Failure: Failure{Reason: fault.RuntimeStartFailed, Message: "m"}, ConsoleTail: []byte("no init found")}, noon)
	if f := v.Record.LastFailure; f == nil || f.Reason != fault.RuntimeStartFailed || string(f.ConsoleTail) != "no init found" {
		t.Fatalf("a failed start: %+v", f)
	}
	before := v.Record.Clone()
	v = view(persistent, running, concluded(machine.OOMKilled), destroyed)
	v.Record.Counters.Ends[machine.GuestReboot] = before.Counters.Ends[machine.GuestReboot]
	kept := v.Record.Clone()
	running(&v)
	concluded(machine.GuestReboot)(&v)
	if f := v.Record.LastFailure; f.Reason != "OOMKilled" || v.Record.LastExit.Verdict != machine.GuestReboot {
		t.Errorf("a reboot hides the failure before: %+v", f)
	}
	if v.Record.Counters.Ends[machine.OOMKilled] != 1 || v.Record.Counters.Ends[machine.GuestReboot] != 1 || kept.Counters.Ends[machine.GuestReboot] != 0 {
		t.Errorf("ends %v, those of an earlier record %v", v.Record.Counters.Ends, kept.Counters.Ends)
	}
	for range 3 {
		v.Record.Probed(false, machine.ReasonGuestSilent, "silent", noon)
	}
	v.Record.Probed(true, "", "", noon)
	v.Record.Probed(false, machine.ReasonGuestSilent, "silent", noon)
	if v.Record.Counters.Silent != 2 {
		t.Errorf("silent %d times, want 2", v.Record.Counters.Silent)
	}
	once := view(running, concluded(machine.GuestHung))
	if f := once.Record.Final; f == nil || f.Verdict != machine.GuestHung || once.Record.LastFailure.Reason != "GuestHung" {
		t.Errorf("a one-shot that hangs: %+v", f)
	}
}

func TestAClockThatIsSetBackMakesNoWaitLonger(t *testing.T) {
	v := failedOnce(limited(0, restart.CoolDown))
	back := noon.Add(-48 * time.Hour)
	r := Reloaded(v.Record, back)
	if s := Next(View{Record: r, Limits: DefaultLimits(), Now: back}); s.Kind != WaitUntil || s.Until.Sub(back) > time.Hour {
		t.Errorf("a cool-down: %s until %s", s.Kind, s.Until)
	}
	v = view(persistent, running, halt, stopping)
	if s := Next(View{Record: Reloaded(v.Record, back), Observed: v.Observed, Limits: DefaultLimits(), Now: back}); s.Kind != Watch || s.Until.Sub(back) > 40*time.Second {
		t.Errorf("a grace: %s until %s", s.Kind, s.Until)
	}
}
