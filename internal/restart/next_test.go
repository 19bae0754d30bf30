package restart

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

var noon = time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)

func retries(n int32) *int32 { return &n }

func TestNext(t *testing.T) {
	limited := Policy{MaxRetries: retries(2), InitialDelay: 10 * time.Second, MaxDelay: 5 * time.Minute}
	never := Policy{MaxRetries: retries(0), InitialDelay: 10 * time.Second, MaxDelay: 5 * time.Minute}
	cases := map[string]struct {
		policy    Policy
		history   History
		end       End
		delay     time.Duration
		exhausted bool
		counted   bool
		attempts  int32
	}{
		"a guest that reboots is started at once and nothing is counted":                      {policy: limited, history: History{Attempts: 1}, end: End{Kind: Reboot}, attempts: 1},
		"a host that was booted under the VM counts nothing":                                  {policy: limited, end: End{Kind: HostBoot}},
		"a workload that exits 0 is started after the initial delay, uncounted":               {policy: limited, history: History{Attempts: 2}, end: End{Kind: Ended}, delay: 10 * time.Second, attempts: 2},
		"the first failure waits for the initial delay":                                       {policy: Default(), end: End{Kind: Failure}, delay: 10 * time.Second, counted: true, attempts: 1},
		"the third failure in a row waits four times as long":                                 {policy: Default(), history: History{Attempts: 2}, end: End{Kind: Failure}, delay: 40 * time.Second, counted: true, attempts: 3},
		"the backoff stops at the maximum":                                                    {policy: Default(), history: History{Attempts: 900}, end: End{Kind: Failure}, delay: 5 * time.Minute, counted: true, attempts: 901},
		"a failure beyond maxRetries exhausts the policy":                                     {policy: limited, history: History{Attempts: 2}, end: End{Kind: Failure}, exhausted: true, counted: true, attempts: 3},
		"the last allowed retry is still made":                                                {policy: limited, history: History{Attempts: 1}, end: End{Kind: Failure}, delay: 20 * time.Second, counted: true, attempts: 2},
		"maxRetries 0 means that the first failure is the last":                               {policy: never, end: End{Kind: Failure}, exhausted: true, counted: true, attempts: 1},
		"maxRetries 0 does not stop a workload that ends well":                                {policy: never, end: End{Kind: Ended}, delay: 10 * time.Second},
		"a start that failed backs off and uses up nothing":                                   {policy: never, history: History{StartFailures: 1}, end: End{Kind: StartFailure}, delay: 20 * time.Second},
		"ten healthy minutes forgive the failures before":                                     {policy: limited, history: History{Attempts: 2}, end: End{Kind: Failure, Ran: 10 * time.Minute}, delay: 10 * time.Second, counted: true, attempts: 1},
		"a longer maximal delay asks for a longer healthy time":                               {policy: Policy{InitialDelay: time.Second, MaxDelay: time.Hour}, history: History{Attempts: 2}, end: End{Kind: Failure, Ran: 10 * time.Minute}, delay: 4 * time.Second, counted: true, attempts: 3},
		"an exhausted history stays exhausted":                                                {policy: Default(), history: History{ExhaustedAt: &noon, Attempts: 7}, end: End{Kind: Ended}, exhausted: true, attempts: 7},
		"jitter makes a delay longer, by a tenth at most":                                     {policy: Default(), end: End{Kind: Failure, Jitter: 0.5}, delay: 10500 * time.Millisecond, counted: true, attempts: 1},
		"at the maximum jitter makes it shorter":                                              {policy: Default(), history: History{Attempts: 50}, end: End{Kind: Failure, Jitter: 0.5}, delay: 285 * time.Second, counted: true, attempts: 51},
		"a VM without a policy has the default one":                                           {end: End{Kind: Failure}, delay: 10 * time.Second, counted: true, attempts: 1},
		"a workload that ran ends the row of failed starts, whatever its own end counts as":   {policy: Default(), history: History{StartFailures: 8}, end: End{Kind: Failure}, delay: 10 * time.Second, counted: true, attempts: 1},
		"the failed starts' own backoff stops at the maximum and does not touch the failures": {policy: Default(), history: History{StartFailures: 1 << 30, Attempts: 3}, end: End{Kind: StartFailure}, delay: 5 * time.Minute, attempts: 3},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			d := Next(c.policy, c.history, c.end, noon)
			if d.Delay != c.delay || d.Exhausted != c.exhausted || d.Counted != c.counted || d.History.Attempts != c.attempts {
				t.Fatalf("got delay %s exhausted %v counted %v attempts %d, want %s %v %v %d (%s)",
					d.Delay, d.Exhausted, d.Counted, d.History.Attempts, c.delay, c.exhausted, c.counted, c.attempts, d.Why)
			}
			if d.Terminal != c.exhausted {
				t.Fatalf("terminal is %v", d.Terminal)
			}
			if !d.Exhausted && !d.History.NextTryAt.Equal(noon.Add(c.delay)) {
				t.Fatalf("next try at %v, want %s after now", d.History.NextTryAt, c.delay)
			}
			if c.end.Kind != StartFailure && c.history.ExhaustedAt == nil && d.History.StartFailures != 0 {
				t.Fatalf("%d failed starts are left after a workload ran", d.History.StartFailures)
			}
		})
	}
}

func TestWhatFollowsUsedUpRetries(t *testing.T) {
	with := func(on OnExhaustion) Policy {
		return Policy{MaxRetries: retries(1), InitialDelay: time.Second, MaxDelay: time.Minute, OnExhaustion: on, CoolDown: time.Hour}
	}
	used := History{Attempts: 1}
	fail := Next(with(Fail), used, End{Kind: Failure}, noon)
	if !fail.Terminal || fail.History.NextTryAt != nil {
		t.Errorf("fail: got %+v", fail)
	}
	manual := Next(with(ManualReset), used, End{Kind: Failure}, noon)
	if manual.Terminal || !manual.Exhausted || manual.History.NextTryAt != nil {
		t.Errorf("manual-reset: got %+v", manual)
	}
	fresh, ok := manual.History.WithReset("once")
	if !ok || fresh.Attempts != 0 || fresh.ExhaustedAt != nil {
		t.Errorf("reset: got %+v", fresh)
	}
	if _, again := fresh.WithReset("once"); again {
		t.Error("one value resets twice")
	}
	cool := Next(with(CoolDown), used, End{Kind: Failure}, noon)
	if cool.Terminal || !cool.History.NextTryAt.Equal(noon.Add(time.Hour)) || cool.Delay != time.Hour {
		t.Errorf("cool-down: got %+v", cool)
	}
	after := Next(with(CoolDown), cool.History, End{Kind: Failure}, noon.Add(time.Hour))
	if after.Exhausted || after.History.Attempts != 1 || after.Delay != time.Second {
		t.Errorf("the first failure after a cool-down: got %+v", after)
	}
	if tried := cool.History.Tried(); tried.ExhaustedAt != nil || tried.Attempts != 0 || tried.NextTryAt != nil {
		t.Errorf("a try after a cool-down begins with %+v", tried)
	}
}

func TestWhereTheNextTryIs(t *testing.T) {
	moving := Policy{Mode: Reschedule, InitialDelay: time.Second, MaxDelay: time.Minute, MaxRetries: retries(1), OnExhaustion: CoolDown}
	for kind, elsewhere := range map[Kind]bool{Reboot: false, HostBoot: false, Ended: false, Failure: true, StartFailure: true} {
		if got := Next(moving, History{}, End{Kind: kind}, noon).History.Elsewhere; got != elsewhere {
			t.Errorf("%s with mode reschedule: elsewhere is %v", kind, got)
		}
		if Next(Default(), History{}, End{Kind: kind}, noon).History.Elsewhere {
			t.Errorf("%s with mode in-place is to start elsewhere", kind)
		}
	}
	if Next(moving, History{Attempts: 1}, End{Kind: Failure}, noon).History.Elsewhere {
		t.Error("a VM without retries is to start elsewhere")
	}
}

func TestAChangedPolicyActsOnTheWaitingVM(t *testing.T) {
	long := Policy{InitialDelay: time.Hour, MaxDelay: 2 * time.Hour}
	waits := Next(long, History{}, End{Kind: Failure}, noon).History
	later := noon.Add(time.Minute)
	short := Policy{InitialDelay: time.Second, MaxDelay: time.Minute}
	limited := func(on OnExhaustion) Policy {
		return Policy{InitialDelay: time.Second, MaxDelay: time.Minute, MaxRetries: retries(0), OnExhaustion: on, CoolDown: time.Hour}
	}
	if d := Revise(short, waits, later); d.Delay != 0 || d.Exhausted {
		t.Errorf("a shorter delay that has passed: got %+v", d)
	}
	if d := Revise(limited(Fail), waits, later); !d.Terminal {
		t.Errorf("no more retries: got %+v", d)
	}
	exhausted := Revise(limited(ManualReset), waits, later).History
	if exhausted.ExhaustedAt == nil {
		t.Fatal("not exhausted")
	}
	if d := Revise(limited(CoolDown), exhausted, later); d.Terminal || d.Delay != time.Hour {
		t.Errorf("a cool-down in place of a manual reset: got %+v", d)
	}
	if d := Revise(long, exhausted, later); d.Exhausted || d.Delay != 59*time.Minute {
		t.Errorf("retries without limit for an exhausted VM: got %+v", d)
	}
	if d := Revise(Policy{Mode: Reschedule}, waits, later); !d.History.Elsewhere {
		t.Errorf("another mode for a waiting VM: got %+v", d)
	}
	if d := Revise(short, History{}, later); d.History != (History{}) || d.Delay != 0 {
		t.Errorf("a VM that does not wait: got %+v", d)
	}
}

func policies() *rapid.Generator[Policy] {
	return rapid.Custom(func(t *rapid.T) Policy {
		p := Policy{InitialDelay: time.Duration(rapid.Int64Range(1, int64(time.Hour)).Draw(t, "initial"))}
		p.MaxDelay = p.InitialDelay + time.Duration(rapid.Int64Range(0, int64(24*time.Hour)).Draw(t, "more"))
		p.Mode = rapid.SampledFrom([]Mode{"", InPlace, Reschedule}).Draw(t, "mode")
		p.OnExhaustion = rapid.SampledFrom([]OnExhaustion{"", Fail, ManualReset, CoolDown}).Draw(t, "on exhaustion")
		p.CoolDown = time.Duration(rapid.Int64Range(0, int64(24*time.Hour)).Draw(t, "cool down"))
		if rapid.Bool().Draw(t, "limited") {
			p.MaxRetries = retries(rapid.Int32Range(0, 20).Draw(t, "retries"))
		}
		return p
	})
}

func ends() *rapid.Generator[End] {
	return rapid.Custom(func(t *rapid.T) End {
		e := End{Kind: rapid.SampledFrom([]Kind{Reboot, HostBoot, Ended, Failure, StartFailure}).Draw(t, "kind")}
		e.Jitter = rapid.Float64Range(0, 0.999).Draw(t, "jitter")
		if e.Kind != StartFailure {
			e.Ran = time.Duration(rapid.Int64Range(0, int64(20*time.Minute)).Draw(t, "ran"))
		}
		return e
	})
}

// TestAnyHistory follows a VM through any row of ends and checks what must hold after each.
func TestAnyHistory(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, now, h := policies().Draw(t, "policy"), noon, History{}
		for _, e := range rapid.SliceOfN(ends(), 1, 40).Draw(t, "ends") {
			before := h
			d := Next(p, h, e, now)
			if p.MaxRetries != nil && !d.Exhausted && d.Counted && d.History.Attempts > *p.MaxRetries {
				t.Fatalf("%d counted failures are allowed to go on with maxRetries %d", d.History.Attempts, *p.MaxRetries)
			}
			if d.Exhausted && before.ExhaustedAt == nil && (e.Kind != Failure || p.MaxRetries == nil) {
				t.Fatalf("%s exhausted the policy", e.Kind)
			}
			if d.Delay < 0 || (!d.Exhausted && d.Delay > p.MaxDelay) {
				t.Fatalf("delay %s is outside 0 to %s", d.Delay, p.MaxDelay)
			}
			if d.Terminal != (d.Exhausted && p.OrDefault().OnExhaustion == Fail) {
				t.Fatalf("terminal is %v with %q", d.Terminal, p.OnExhaustion)
			}
			if revised := Revise(p, d.History, now); !d.Exhausted && (revised.Exhausted || revised.Delay > max(d.Delay, p.MaxDelay)) {
				t.Fatalf("the same policy, looked at again, gives %+v instead of %+v", revised, d)
			}
			if d.Delay < p.InitialDelay && !d.Exhausted && e.Kind != Reboot && e.Kind != HostBoot {
				t.Fatalf("%s is tried again after %s, sooner than the initial delay %s", e.Kind, d.Delay, p.InitialDelay)
			}
			if d.Exhausted != (d.History.ExhaustedAt != nil) || (d.Exhausted && (d.History.NextTryAt != nil) != (p.OrDefault().OnExhaustion == CoolDown)) {
				t.Fatalf("decision and history disagree: %+v", d)
			}
			h, now = d.History, now.Add(d.Delay+e.Ran)
		}
	})
}
