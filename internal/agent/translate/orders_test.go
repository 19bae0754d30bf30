package translate

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/restart"
)

func TestPolicy(t *testing.T) {
	seconds := func(n int) *metav1.Duration { return &metav1.Duration{Duration: time.Duration(n) * time.Second} }
	class := func(p *v1alpha1.RestartPolicy) func(*v1alpha1.ImpVM) {
		return func(vm *v1alpha1.ImpVM) { vm.Status.Resources.RestartPolicy = p }
	}
	own := func(p *v1alpha1.RestartPolicy) func(*v1alpha1.ImpVM) {
		return func(vm *v1alpha1.ImpVM) { vm.Spec.RestartPolicy = p }
	}
	of := func(change func(*restart.Policy)) restart.Policy {
		p := restart.Default()
		change(&p)
		return p
	}
	full := &v1alpha1.RestartPolicy{
		Mode: v1alpha1.RestartReschedule, OnExhaustion: v1alpha1.OnExhaustionCoolDown, CoolDownPeriod: seconds(90),
		Backoff: &v1alpha1.RestartBackoff{MaxRetries: ptr.To(int32(0)), InitialDelay: seconds(2), MaxDelay: seconds(7)},
	}
	for name, c := range map[string]struct {
		vm   *v1alpha1.ImpVM
		want restart.Policy
	}{
		"a VM without one has the default":      {bound(persistent), restart.Default()},
		"a one-shot has none, whatever it says": {bound(own(full), class(full)), restart.Policy{}},
		"a VM has its class's": {
			bound(persistent, class(&v1alpha1.RestartPolicy{Mode: v1alpha1.RestartReschedule})),
			of(func(p *restart.Policy) { p.Mode = restart.Reschedule }),
		},
		"its own replaces the class's as a whole": {
			bound(persistent, class(full), own(&v1alpha1.RestartPolicy{Backoff: &v1alpha1.RestartBackoff{InitialDelay: seconds(3)}})),
			of(func(p *restart.Policy) { p.InitialDelay = 3 * time.Second }),
		},
		"every field arrives": {bound(persistent, own(full)), restart.Policy{
			Mode: restart.Reschedule, MaxRetries: ptr.To(int32(0)), InitialDelay: 2 * time.Second, MaxDelay: 7 * time.Second,
			OnExhaustion: restart.CoolDown, CoolDown: 90 * time.Second,
		}},
		"the longest delay is never less than the first": {
			bound(persistent, own(&v1alpha1.RestartPolicy{Backoff: &v1alpha1.RestartBackoff{InitialDelay: seconds(3600)}})),
			of(func(p *restart.Policy) { p.InitialDelay, p.MaxDelay = time.Hour, time.Hour }),
		},
	} {
		t.Run(name, func(t *testing.T) {
			if d := cmp.Diff(c.want, Policy(c.vm)); d != "" {
				t.Errorf("policy differs (-want +got):\n%s", d)
			}
			spec, err := Spec(c.vm, nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			if err := machine.Validate(spec); err != nil {
				t.Errorf("the runtime would refuse it: %v", err)
			}
		})
	}
}

func TestOrdersToStandStill(t *testing.T) {
	stopped := func(vm *v1alpha1.ImpVM) { vm.Spec.DesiredState = v1alpha1.DesiredStopped }
	held := func(vm *v1alpha1.ImpVM) {
		vm.Status.Hold = &v1alpha1.Hold{Reason: v1alpha1.ReasonEvacuated, Message: "taint a=b:NoExecute"}
	}
	byUser := &machine.Halt{Reason: "Stopped", Message: "spec.desiredState is Stopped"}
	for name, c := range map[string]struct {
		vm   *v1alpha1.ImpVM
		want *machine.Halt
	}{
		"nobody ordered it":                   {bound(persistent), nil},
		"Running is no order":                 {bound(persistent, func(vm *v1alpha1.ImpVM) { vm.Spec.DesiredState = v1alpha1.DesiredRunning }), nil},
		"the user's":                          {bound(persistent, stopped), byUser},
		"the operator's":                      {bound(persistent, held), &machine.Halt{Reason: "Evacuated", Message: "taint a=b:NoExecute"}},
		"the user's is the one that is shown": {bound(persistent, held, stopped), byUser},
		"a one-shot is not halted":            {bound(held, stopped), nil},
	} {
		t.Run(name, func(t *testing.T) {
			spec, err := Spec(c.vm, nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(c.want, spec.Halt); d != "" {
				t.Errorf("halt differs (-want +got):\n%s", d)
			}
			if err := machine.Validate(spec); err != nil {
				t.Errorf("the runtime would refuse it: %v", err)
			}
		})
	}
}

func TestReset(t *testing.T) {
	for name, c := range map[string]struct {
		value string
		taken bool
	}{
		"a time":                       {"2030-01-01T12:00:00Z", true},
		"the longest":                  {strings.Repeat("x", 253), true},
		"one that is too long":         {strings.Repeat("x", 254), false},
		"one with a control character": {"a\x1b[2J", false},
		"one that is no UTF-8":         {"a\xff", false},
	} {
		t.Run(name, func(t *testing.T) {
			vm := bound(persistent, func(vm *v1alpha1.ImpVM) {
				vm.Annotations = map[string]string{v1alpha1.AnnotationRestartReset: c.value}
			})
			value, problem := Reset(vm)
			if (value == c.value) != c.taken || (problem == "") != c.taken {
				t.Errorf("value %q, problem %q", value, problem)
			}
			spec, err := Spec(vm, nil, nil)
			if err != nil || spec.Reset != value {
				t.Fatalf("the spec's reset is %q, error %v", spec.Reset, err)
			}
			if err := machine.Validate(spec); err != nil {
				t.Errorf("the runtime would refuse the VM: %v", err)
			}
		})
	}
}

func TestHistoryTravelsWhole(t *testing.T) {
	h := restart.History{
		Attempts: 3, StartFailures: 2, LastFailureAt: ptr.To(noon), NextTryAt: ptr.To(noon.Add(time.Minute)),
		ExhaustedAt: ptr.To(noon.Add(time.Second)), Elsewhere: true, Reset: "once",
	}
	if d := cmp.Diff(h, history(restartStatus(h))); d != "" {
		t.Errorf("history differs (-want +got):\n%s", d)
	}
}

func TestReportOfAFailure(t *testing.T) {
	failure := func(tail string) func(*machine.Status) {
		return func(st *machine.Status) {
			st.LastFailure = &machine.Failure{Reason: "GuestHung", Message: "silent for 60 s", At: noon, Incarnation: 1, ConsoleTail: []byte(tail)}
		}
	}
	t.Run("a failure is kept while the next incarnation is well", func(t *testing.T) {
		got := Report(bound(persistent), Observation{Status: status(healthy, failure("stuck")), Now: noon}).Status
		if f := got.LastFailure; f == nil || f.Reason != "GuestHung" || f.Message != "silent for 60 s" || !f.Time.Time.Equal(noon) || got.ConsoleTail != "stuck" {
			t.Errorf("last failure %+v, console %q", f, got.ConsoleTail)
		}
	})
	t.Run("an end that came later has the last word on the console", func(t *testing.T) {
		got := Report(bound(persistent), Observation{Status: status(healthy, failure("stuck"), func(st *machine.Status) {
			st.LastExit = &machine.Exit{Incarnation: 2, Verdict: machine.GuestReboot, At: noon.Add(time.Hour), ConsoleTail: []byte("rebooting")}
		}), Now: noon}).Status
		if got.LastFailure == nil || got.LastFailure.Incarnation != 1 || got.ConsoleTail != "rebooting" {
			t.Errorf("last failure %+v, console %q", got.LastFailure, got.ConsoleTail)
		}
	})
}

func TestReportOfAHalt(t *testing.T) {
	st := status(running, func(st *machine.Status) {
		st.State, st.Started, st.GuestReady = machine.Halted, is(false, "Stopped", "spec.desiredState is Stopped"), machine.Check{}
	})
	got := Report(bound(persistent), Observation{Status: st, Now: noon})
	for _, c := range got.Status.Conditions {
		if (c.Type == v1alpha1.ConditionStarted || c.Type == v1alpha1.ConditionReady) && (c.Status != "False" || c.Reason != v1alpha1.ReasonStopped) {
			t.Errorf("%s is %s, %s", c.Type, c.Status, c.Reason)
		}
	}
}
