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
			if !d.Exhausted && !d.History.NextTryAt.Equal(noon.Add(c.delay)) {
				t.Fatalf("next try at %v, want %s after now", d.History.NextTryAt, c.delay)
			}
			if c.end.Kind != StartFailure && c.history.ExhaustedAt == nil && d.History.StartFailures != 0 {
				t.Fatalf("%d failed starts are left after a workload ran", d.History.StartFailures)
			}
		})
	}
}

func policies() *rapid.Generator[Policy] {
	return rapid.Custom(func(t *rapid.T) Policy {
		p := Policy{InitialDelay: time.Duration(rapid.Int64Range(1, int64(time.Hour)).Draw(t, "initial"))}
		p.MaxDelay = p.InitialDelay + time.Duration(rapid.Int64Range(0, int64(24*time.Hour)).Draw(t, "more"))
		if rapid.Bool().Draw(t, "limited") {
			p.MaxRetries = retries(rapid.Int32Range(0, 20).Draw(t, "retries"))
		}
		return p
	})
}

func ends() *rapid.Generator[End] {
	return rapid.Custom(func(t *rapid.T) End {
		e := End{Kind: rapid.SampledFrom([]Kind{Reboot, HostBoot, Ended, Failure, StartFailure}).Draw(t, "kind")}
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
			if p.MaxRetries != nil && !d.Exhausted && d.History.Attempts > *p.MaxRetries {
				t.Fatalf("%d counted failures are allowed to go on with maxRetries %d", d.History.Attempts, *p.MaxRetries)
			}
			if d.Exhausted && before.ExhaustedAt == nil && (e.Kind != Failure || p.MaxRetries == nil) {
				t.Fatalf("%s exhausted the policy", e.Kind)
			}
			if d.Delay < 0 || d.Delay > p.MaxDelay {
				t.Fatalf("delay %s is outside 0 to %s", d.Delay, p.MaxDelay)
			}
			if d.Delay < p.InitialDelay && !d.Exhausted && e.Kind != Reboot && e.Kind != HostBoot {
				t.Fatalf("%s is tried again after %s, sooner than the initial delay %s", e.Kind, d.Delay, p.InitialDelay)
			}
			if d.Exhausted != (d.History.ExhaustedAt != nil) || (d.Exhausted && d.History.NextTryAt != nil && before.ExhaustedAt == nil) {
				t.Fatalf("decision and history disagree: %+v", d)
			}
			h, now = d.History, now.Add(d.Delay+e.Ran)
		}
	})
}
