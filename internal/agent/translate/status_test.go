package translate

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/restart"
)

// status is what the runtime says of bound's VM; changes are one small function each.
func status(change ...func(*machine.Status)) *machine.Status {
	st := &machine.Status{
		ID: "11111111-2222-3333-4444-555555555555", Namespace: "team", Name: "web", Assignment: 2, Generation: 4,
		State: machine.Pending,
	}
	for _, c := range change {
		c(st)
	}
	return st
}

func is(ok bool, reason fault.Reason, message string) machine.Check {
	return machine.Check{OK: &ok, Reason: reason, Message: message, Since: noon}
}

func running(st *machine.Status) {
	st.State, st.Incarnation, st.Run, st.StartedAt = machine.Running, 1, 1, &noon
	st.Disk, st.Network, st.Started = is(true, "", ""), is(true, "", ""), is(true, "", "")
	st.ImageDigest, st.DiskGeneration = digest, 1
	st.Timings = machine.Timings{Pull: time.Second, Kernel: 300 * time.Millisecond}
}

func healthy(st *machine.Status) { running(st); st.GuestReady = is(true, "", "") }

func ends(v machine.Verdict, code *int32, message string) func(*machine.Status) {
	return func(st *machine.Status) {
		running(st)
		st.State, st.FinishedAt = machine.Finished, &noon
		st.Final = &machine.Exit{Incarnation: 1, Run: 1, Verdict: v, At: noon, Code: code, Message: message, ConsoleTail: []byte("bye\n")}
		st.LastExit = st.Final
	}
}

// said gives "Type=Status Reason" of the agent's conditions.
func said(vm *v1alpha1.ImpVM) []string {
	var out []string
	for _, c := range Owned(vm).Conditions {
		out = append(out, c.Type+"="+string(c.Status)+" "+c.Reason)
	}
	return out
}

func TestReportConditions(t *testing.T) {
	later := noon.Add(time.Minute)
	cases := map[string]struct {
		vm    *v1alpha1.ImpVM
		o     Observation
		phase v1alpha1.Phase
		want  []string
	}{
		"a VM the runtime has just accepted waits": {
			bound(), Observation{Status: status()}, v1alpha1.PhaseStarting,
			[]string{"DiskReady=Unknown Pending", "NetworkReady=Unknown Pending", "Started=Unknown Pending", "GuestReady=Unknown Pending", "RestartRequired=False UpToDate", "Ready=False Pending"},
		},
		"a pull that fails is the reason of Ready": {
			bound(), Observation{Status: status(func(st *machine.Status) { st.Disk = is(false, fault.ImagePullFailed, "401") })}, v1alpha1.PhaseStarting,
			[]string{"DiskReady=False ImagePullFailed", "NetworkReady=Unknown Pending", "Started=Unknown Pending", "GuestReady=Unknown Pending", "RestartRequired=False UpToDate", "Ready=False ImagePullFailed"},
		},
		"a guest that answers is Ready": {
			bound(), Observation{Status: status(healthy)}, v1alpha1.PhaseRunning,
			[]string{"DiskReady=True Done", "NetworkReady=True Done", "Started=True Done", "GuestReady=True Done", "RestartRequired=False UpToDate", "Ready=True Running"},
		},
		"a running guest whose probe fails runs and is not Ready": {
			bound(), Observation{Status: status(running, func(st *machine.Status) { st.GuestReady = is(false, machine.ReasonProbeFailing, "503") })}, v1alpha1.PhaseRunning,
			[]string{"DiskReady=True Done", "NetworkReady=True Done", "Started=True Done", "GuestReady=False ProbeFailing", "RestartRequired=False UpToDate", "Ready=False ProbeFailing"},
		},
		"a changed spec asks for a restart": {
			bound(persistent), Observation{Status: status(healthy, func(st *machine.Status) { st.RestartRequired = true })}, v1alpha1.PhaseRunning,
			[]string{"DiskReady=True Done", "NetworkReady=True Done", "Started=True Done", "GuestReady=True Done", "RestartRequired=True SpecChanged", "Ready=True Running"},
		},
		"an end that was no failure backs off": {
			bound(persistent), Observation{Status: status(running, func(st *machine.Status) {
				st.State, st.Started, st.GuestReady = machine.Pending, is(false, machine.ReasonBackingOff, "in 10s"), machine.Check{}
				st.History = restart.History{NextTryAt: &later}
			})}, v1alpha1.PhaseStarting,
			[]string{"DiskReady=True Done", "NetworkReady=True Done", "Started=False BackingOff", "GuestReady=Unknown Pending", "RestartRequired=False UpToDate", "Ready=False BackingOff"},
		},
		"a failure is a crash loop from the first on": {
			bound(persistent), Observation{Status: status(running, func(st *machine.Status) {
				st.State, st.Started, st.GuestReady = machine.Pending, is(false, machine.ReasonBackingOff, "in 20s"), machine.Check{}
				st.History = restart.History{Attempts: 1, NextTryAt: &later}
			})}, v1alpha1.PhaseStarting,
			[]string{"DiskReady=True Done", "NetworkReady=True Done", "Started=False CrashLoopBackOff", "GuestReady=Unknown Pending", "RestartRequired=False UpToDate", "Ready=False CrashLoopBackOff"},
		},
		"no room on the node gives the assignment back and says so": {
			bound(), Observation{Released: true, Problem: fault.Of(fault.Errorf(fault.NoCapacity, "accepting VM", "full"))}, v1alpha1.PhaseStarting,
			[]string{"DiskReady=Unknown NoCapacity", "NetworkReady=Unknown NoCapacity", "Started=False NoCapacity", "GuestReady=Unknown Pending", "RestartRequired=False UpToDate", "Ready=False NoCapacity"},
		},
		"a runtime that does not answer is the reason while nothing else is known": {
			bound(), Observation{Problem: fault.Of(fault.Errorf(fault.RuntimeStartFailed, "asking the node's runtime", "silence"))}, v1alpha1.PhaseStarting,
			[]string{"DiskReady=Unknown RuntimeStartFailed", "NetworkReady=Unknown RuntimeStartFailed", "Started=False RuntimeStartFailed", "GuestReady=Unknown Pending", "RestartRequired=False UpToDate", "Ready=False RuntimeStartFailed"},
		},
		"a pull secret that cannot be read is the reason before anything was ordered": {
			bound(), Observation{Problem: fault.Of(SecretProblem("team", "s", errors.New("forbidden")))}, v1alpha1.PhaseStarting,
			[]string{"DiskReady=False ImagePullFailed", "NetworkReady=Unknown Pending", "Started=Unknown Pending", "GuestReady=Unknown Pending", "RestartRequired=False UpToDate", "Ready=False ImagePullFailed"},
		},
		"a release that is done leaves nothing": {
			bound(func(vm *v1alpha1.ImpVM) { vm.Status.Release = &v1alpha1.Release{Assignment: 2, Reason: "Deleted"} }),
			Observation{Released: true}, v1alpha1.PhaseStopping,
			[]string{"DiskReady=False Released", "NetworkReady=False Released", "Started=False Released", "GuestReady=False Released", "RestartRequired=False UpToDate", "Ready=False Stopping"},
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			c.o.Now = noon
			got := Report(c.vm, c.o)
			if d := cmp.Diff(c.want, said(got)); d != "" {
				t.Errorf("conditions differ (-want +got):\n%s", d)
			}
			if got.Status.Phase != c.phase {
				t.Errorf("phase is %s, want %s", got.Status.Phase, c.phase)
			}
			if got.Status.ReportedAssignment != 2 {
				t.Errorf("reported assignment is %d", got.Status.ReportedAssignment)
			}
		})
	}
}

func TestReportOfEnds(t *testing.T) {
	three := ptr.To(int32(3))
	cases := map[string]struct {
		verdict machine.Verdict
		code    *int32
		phase   v1alpha1.Phase
		ready   string
		failure bool
	}{
		"exit 0 is Succeeded":                 {machine.Succeeded, ptr.To(int32(0)), v1alpha1.PhaseSucceeded, "Completed", false},
		"another exit is Failed":              {machine.Failed, three, v1alpha1.PhaseFailed, "Failed", true},
		"a panic says so":                     {machine.GuestPanic, nil, v1alpha1.PhaseFailed, "GuestPanic", true},
		"a VMM that was killed says so":       {machine.VMMKilled, nil, v1alpha1.PhaseFailed, "VMMKilled", true},
		"a power-off without a report":        {machine.GuestPowerOff, nil, v1alpha1.PhaseFailed, "GuestPowerOff", true},
		"a reboot without a report":           {machine.GuestReboot, nil, v1alpha1.PhaseFailed, "GuestReboot", true},
		"out of memory on the host":           {machine.OOMKilled, nil, v1alpha1.PhaseFailed, "OOMKilled", true},
		"a deadline that passed":              {machine.DeadlineExceeded, nil, v1alpha1.PhaseFailed, "DeadlineExceeded", true},
		"a host that was booted underneath":   {machine.LostWithHost, nil, v1alpha1.PhaseFailed, "LostWithHost", true},
		"an end that nobody can know is Lost": {machine.Lost, nil, v1alpha1.PhaseFailed, "Lost", true},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			got := Report(bound(), Observation{Status: status(ends(c.verdict, c.code, "because")), Now: noon})
			s := got.Status
			f := meta.FindStatusCondition(s.Conditions, v1alpha1.ConditionFinished)
			if f == nil || f.Status != "True" || f.Reason != string(c.verdict) || f.Message != "because" {
				t.Fatalf("Finished is %+v", f)
			}
			r := meta.FindStatusCondition(s.Conditions, v1alpha1.ConditionReady)
			if r.Reason != c.ready || s.Phase != c.phase {
				t.Errorf("Ready is %s, phase %s", r.Reason, s.Phase)
			}
			if !reflect.DeepEqual(s.ExitCode, c.code) || s.ConsoleTail != "bye" || s.FinishedAt == nil {
				t.Errorf("exit code %v, console %q, finished at %v", s.ExitCode, s.ConsoleTail, s.FinishedAt)
			}
			if (s.LastFailure != nil) != c.failure {
				t.Errorf("last failure is %+v", s.LastFailure)
			}
			if meta.IsStatusConditionTrue(s.Conditions, v1alpha1.ConditionStarted) {
				t.Error("a finished VM counts as started")
			}
		})
	}
	t.Run("terminal is terminal: nothing the node says later changes an end", func(t *testing.T) {
		done := Report(bound(), Observation{Status: status(ends(machine.Failed, three, "3")), Now: noon})
		for name, o := range map[string]Observation{
			"running": {Status: status(healthy)}, "another end": {Status: status(ends(machine.Succeeded, nil, "0"))},
			"nothing": {}, "a problem": {Problem: fault.Of(fault.Errorf(fault.Internal, "x", "y"))},
		} {
			o.Now = noon.Add(time.Hour)
			if again := Report(done, o); !Same(done, again) {
				t.Errorf("%s changed it:\n%s", name, cmp.Diff(done.Status, again.Status))
			}
		}
	})
	t.Run("a finished VM that is released keeps how it ended", func(t *testing.T) {
		done := Report(bound(), Observation{Status: status(ends(machine.Failed, three, "3")), Now: noon})
		gone := Report(done, Observation{Released: true, Now: noon})
		if gone.Status.ReleasedAssignment != 2 || *gone.Status.ExitCode != 3 || gone.Status.ConsoleTail != "bye" {
			t.Errorf("status is %+v", gone.Status)
		}
	})
	t.Run("the operator's word about a lost node is not repeated as the agent's", func(t *testing.T) {
		vm := bound(func(vm *v1alpha1.ImpVM) {
			vm.Status.Conditions = append(vm.Status.Conditions, metav1.Condition{
				Type: v1alpha1.ConditionFinished, Status: "True", Reason: v1alpha1.ReasonNodeLost, LastTransitionTime: metav1.NewTime(noon),
			})
		})
		if s := said(Report(vm, Observation{Status: status(healthy), Now: noon})); slices.ContainsFunc(s, func(c string) bool { return strings.HasPrefix(c, "Finished") }) {
			t.Errorf("conditions are %v", s)
		}
	})
	t.Run("a persistent VM that reboots or switches itself off has not failed", func(t *testing.T) {
		for _, v := range []machine.Verdict{machine.GuestReboot, machine.GuestPowerOff, machine.Succeeded, machine.Stopped} {
			st := status(running, func(st *machine.Status) { st.LastExit = &machine.Exit{Incarnation: 1, Verdict: v, At: noon} })
			if got := Report(bound(persistent), Observation{Status: st, Now: noon}); got.Status.LastFailure != nil || got.Status.ExitCode != nil {
				t.Errorf("%s: %+v", v, got.Status.LastFailure)
			}
		}
	})
}

func TestReportOverAssignments(t *testing.T) {
	first := Report(bound(func(vm *v1alpha1.ImpVM) { vm.Status.Assignment = 1 }), Observation{Status: status(healthy, func(st *machine.Status) {
		st.Assignment, st.Counters.Restarts, st.History.Attempts = 1, 5, 2
	}), Now: noon})
	first.Status.ReleasedAssignment = 1
	second := first.DeepCopy()
	second.Status.Assignment, second.Status.NodeName = 2, "n2"
	got := Report(second, Observation{Status: status(), Now: noon.Add(time.Minute)})
	s := got.Status
	if s.RestartCount != 0 || s.Incarnation != 0 || s.StartedAt != nil || s.Timings != nil || s.DiskGeneration != 0 {
		t.Errorf("what an earlier node said is still there: %+v", s)
	}
	if s.ReleasedAssignment != 1 {
		t.Errorf("releasedAssignment went back to %d", s.ReleasedAssignment)
	}
	if s.ImageDigest != digest {
		t.Errorf("the pinned digest is %q", s.ImageDigest)
	}
	c := meta.FindStatusCondition(s.Conditions, v1alpha1.ConditionStarted)
	if c.Status != "Unknown" || !c.LastTransitionTime.Time.Equal(noon.Add(time.Minute)) {
		t.Errorf("Started is %+v", c)
	}
}

func TestReportIsStable(t *testing.T) {
	for name, st := range map[string]*machine.Status{
		"new": status(), "running": status(healthy), "ended": status(ends(machine.Failed, ptr.To(int32(3)), "3")),
	} {
		t.Run(name, func(t *testing.T) {
			once := Report(bound(), Observation{Status: st, Now: noon})
			twice := Report(once, Observation{Status: st, Now: noon.Add(time.Hour)})
			if !Same(once, twice) {
				t.Errorf("a second report of the same differs:\n%s", cmp.Diff(once.Status, twice.Status))
			}
		})
	}
	t.Run("time of transition is the runtime's and stays while the status does", func(t *testing.T) {
		a := Report(bound(), Observation{Status: status(healthy), Now: noon.Add(time.Hour)})
		if c := meta.FindStatusCondition(a.Status.Conditions, v1alpha1.ConditionStarted); !c.LastTransitionTime.Time.Equal(noon) {
			t.Errorf("Started since %s", c.LastTransitionTime)
		}
	})
}

func TestBody(t *testing.T) {
	vm := Report(bound(), Observation{Status: status(healthy), Now: noon})
	body, err := Body(vm)
	if err != nil {
		t.Fatal(err)
	}
	if body.GetResourceVersion() != "7" || body.GetName() != "web" || body.GetNamespace() != "team" {
		t.Errorf("metadata is %v", body.Object["metadata"])
	}
	fields, _ := body.Object["status"].(map[string]any)
	for _, operators := range []string{"nodeName", "assignment", "placedAt", "release", "resources", "ip", "addresses"} {
		if _, ok := fields[operators]; ok {
			t.Errorf("the agent's apply holds the operator's %s", operators)
		}
	}
	if fields["restartCount"] != int64(0) {
		t.Errorf("restartCount is %v; the column would be empty", fields["restartCount"])
	}
	conditions, _ := fields["conditions"].([]any)
	for _, c := range conditions {
		if condition, _ := c.(map[string]any); condition["type"] == v1alpha1.ConditionScheduled {
			t.Error("the agent's apply holds the operator's condition Scheduled")
		}
	}
}

// A field that is added to ImpVMStatus must be somebody's: the operator's, listed here, or the agent's, listed in replaceOwned.
func TestEveryStatusFieldHasAWriter(t *testing.T) {
	operators := []string{"Phase", "Conditions", "NodeName", "Assignment", "PlacedAt", "Release", "Hold", "Resources", "IP", "Addresses"}
	full := reflect.New(reflect.TypeFor[v1alpha1.ImpVMStatus]()).Elem()
	for i := range full.NumField() {
		fill(full.Field(i))
	}
	var owned v1alpha1.ImpVMStatus
	replaceOwned(&owned, full.Interface().(v1alpha1.ImpVMStatus))
	for i := range full.NumField() {
		name := full.Type().Field(i).Name
		if got := !reflect.ValueOf(owned).Field(i).IsZero(); got == slices.Contains(operators, name) {
			t.Errorf("%s: taken over by the agent: %v", name, got)
		}
	}
}

func fill(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
	case reflect.Int64, reflect.Int32:
		v.SetInt(1)
	case reflect.String:
		v.SetString("x")
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
	}
}
