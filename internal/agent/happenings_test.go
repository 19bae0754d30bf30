package agent

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	versioninfo "k8s.io/apimachinery/pkg/version"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/network"
)

// said is an ImpVM of which the agent has said these conditions, each "Type", status and reason.
func said(conditions ...[3]string) *v1alpha1.ImpVM {
	vm := placed(reported)
	for _, c := range conditions {
		vm.Status.Conditions = append(vm.Status.Conditions, metav1.Condition{
			Type: c[0], Status: metav1.ConditionStatus(c[1]), Reason: c[2],
		})
	}
	return vm
}

func with(vm *v1alpha1.ImpVM, change func(*v1alpha1.ImpVMStatus)) *v1alpha1.ImpVM {
	change(&vm.Status)
	return vm
}

func stopped(reason string) [][3]string {
	return [][3]string{{v1alpha1.ConditionStarted, "False", reason}, {v1alpha1.ConditionReady, "False", reason}}
}

func failedAt(reason string, second int64) func(*v1alpha1.ImpVMStatus) {
	return func(s *v1alpha1.ImpVMStatus) {
		s.LastFailure = &v1alpha1.LastFailure{Reason: reason, Time: metav1.NewMicroTime(time.Unix(second, 0))}
	}
}

// Whoever greps the events for a verdict finds every one of them.
func TestEachVerdictIsAWarningOfItsOwn(t *testing.T) {
	for _, v := range []machine.Verdict{
		machine.Failed, machine.GuestPanic, machine.GuestReboot, machine.GuestPowerOff, machine.VMMKilled, machine.OOMKilled,
		machine.VMMFailed, machine.GuestHung, machine.LostWithHost,
	} {
		before := said([3]string{v1alpha1.ConditionStarted, "True", "Done"}, [3]string{v1alpha1.ConditionReady, "True", "Running"})
		after := with(said(stopped("CrashLoopBackOff")...), failedAt(string(v), 1))
		var got []string
		for _, e := range happenings(before, after, false) {
			got = append(got, e.Type+" "+e.Reason)
		}
		if d := cmp.Diff([]string{"Warning CrashLoopBackOff", "Warning " + string(v)}, got); d != "" {
			t.Errorf("%s (-want +got):\n%s", v, d)
		}
	}
}

func TestHappenings(t *testing.T) {
	var (
		startedTrue   = [3]string{v1alpha1.ConditionStarted, "True", "Done"}
		startedFailed = [3]string{v1alpha1.ConditionStarted, "False", "RuntimeStartFailed"}
		backingOff    = [3]string{v1alpha1.ConditionStarted, "False", "BackingOff"}
		readyTrue     = [3]string{v1alpha1.ConditionReady, "True", "Running"}
		readyPending  = [3]string{v1alpha1.ConditionReady, "False", "Pending"}
		readyFailing  = [3]string{v1alpha1.ConditionReady, "False", "ProbeFailing"}
		probeFailing  = [3]string{v1alpha1.ConditionGuestReady, "False", "ProbeFailing"}
		diskTrue      = [3]string{v1alpha1.ConditionDiskReady, "True", "Done"}
		succeeded     = [3]string{v1alpha1.ConditionFinished, "True", "Succeeded"}
		panicked      = [3]string{v1alpha1.ConditionFinished, "True", "GuestPanic"}
		startedEnded  = [3]string{v1alpha1.ConditionStarted, "False", "GuestPanic"}
	)
	incarnation := func(n int64) func(*v1alpha1.ImpVMStatus) {
		return func(s *v1alpha1.ImpVMStatus) { s.Incarnation, s.RestartCount = n, n-1 }
	}
	cases := map[string]struct {
		before, after *v1alpha1.ImpVM
		trouble       bool
		significant   bool
		want          []string
	}{
		"a stage that is passed is no event and can wait": {said(readyPending), said(diskTrue, readyPending), false, false, nil},
		"a pull that took time is told when it is done": {
			said(readyPending), with(said(diskTrue, readyPending), func(s *v1alpha1.ImpVMStatus) { s.Timings = &v1alpha1.Timings{PullMillis: 5} }),
			false, false, []string{"Normal Pulled"},
		},
		"a first start":            {said(readyPending), said(startedTrue, readyPending), false, true, []string{"Normal Started"}},
		"a start that is Ready":    {said(readyPending), said(startedTrue, readyTrue), false, true, []string{"Normal Started", "Normal Ready"}},
		"a start in the 2nd boot":  {with(said(startedTrue), incarnation(1)), with(said(startedTrue), incarnation(2)), false, true, []string{"Normal Restarted"}},
		"a failure":                {said(readyPending), said(startedFailed, [3]string{"Ready", "False", "RuntimeStartFailed"}), false, true, []string{"Warning RuntimeStartFailed"}},
		"the same failure again":   {said(startedFailed), said(startedFailed), false, false, nil},
		"a workload that ended":    {said(startedTrue, readyTrue), said(backingOff, [3]string{"Ready", "False", "BackingOff"}), false, true, []string{"Normal BackingOff"}},
		"a probe that fails":       {said(startedTrue, readyTrue), said(startedTrue, probeFailing, readyFailing), false, true, []string{"Warning ProbeFailing"}},
		"health after a failure":   {said(startedTrue, probeFailing, readyFailing), said(startedTrue, readyTrue), false, true, []string{"Normal Recovered"}},
		"health after one unseen":  {said(startedTrue, readyPending), said(startedTrue, readyTrue), true, true, []string{"Normal Recovered"}},
		"an end that is a success": {said(startedTrue, readyTrue), said(succeeded, [3]string{"Ready", "False", "Completed"}), false, true, []string{"Normal Succeeded"}},
		"an end that is a failure is told once": {
			said(startedTrue, readyTrue), said(startedEnded, panicked, [3]string{"Ready", "False", "GuestPanic"}), false, true,
			[]string{"Warning GuestPanic"},
		},
		"a crash of a VM that is started again": {
			said(startedTrue, readyTrue),
			with(said(backingOff, [3]string{"Ready", "False", "BackingOff"}), func(s *v1alpha1.ImpVMStatus) {
				s.LastFailure = &v1alpha1.LastFailure{Reason: "VMMKilled", Incarnation: 1}
			}), false, true, []string{"Normal BackingOff", "Warning VMMKilled"},
		},
		"a release": {
			said(startedTrue), with(said([3]string{v1alpha1.ConditionStarted, "False", "Released"}), func(s *v1alpha1.ImpVMStatus) { s.ReleasedAssignment = 2 }),
			false, true, []string{"Normal Released"},
		},
		"Ready that falls with the order to stop can wait for the end of it": {
			said(readyTrue), with(said([3]string{"Ready", "False", "Stopping"}), func(s *v1alpha1.ImpVMStatus) { s.Release = &v1alpha1.Release{} }),
			false, false, nil,
		},
		"a guest that was stopped to be removed has not failed": {
			said(startedTrue), with(said([3]string{v1alpha1.ConditionStarted, "False", "Stopped"}), func(s *v1alpha1.ImpVMStatus) { s.Release = &v1alpha1.Release{} }),
			false, false, nil,
		},
		"a VM that its user stopped says so": {
			said(startedTrue, readyTrue), said([3]string{v1alpha1.ConditionStarted, "False", "Stopped"}, [3]string{"Ready", "False", "Stopped"}),
			false, true, []string{"Normal Stopped"},
		},
		"a VM that was stopped and starts again has not recovered from anything": {
			said([3]string{v1alpha1.ConditionStarted, "False", "Stopped"}, [3]string{"Ready", "False", "Stopped"}), said(startedTrue, readyTrue),
			false, true, []string{"Normal Started", "Normal Ready"},
		},
		"a VM that an evacuation stopped says so": {
			said(startedTrue, readyTrue), said([3]string{v1alpha1.ConditionStarted, "False", "Evacuated"}, [3]string{"Ready", "False", "Evacuated"}),
			false, true, []string{"Normal Evacuated"},
		},
		"a crash loop is a warning": {
			said(startedTrue, readyTrue), said(stopped("CrashLoopBackOff")...), false, true, []string{"Warning CrashLoopBackOff"},
		},
		"retries that are used up are a warning": {
			said(stopped("CrashLoopBackOff")...), said(stopped("RetriesExhausted")...), false, true, []string{"Warning RetriesExhausted"},
		},
		"a cool-down is a warning": {
			said(stopped("CrashLoopBackOff")...), said(stopped("CoolingDown")...), false, true, []string{"Warning CoolingDown"},
		},
		"a VM that is to be tried elsewhere says so beside what failed": {
			said(startedTrue, readyTrue),
			with(said(stopped("Rescheduled")...), func(s *v1alpha1.ImpVMStatus) {
				s.LastFailure = &v1alpha1.LastFailure{Reason: "GuestHung", Incarnation: 1}
			}), false, true, []string{"Normal Rescheduled", "Warning GuestHung"},
		},
		"a start that fails is told once, not as condition and as failure": {
			said(readyPending), with(said(stopped("RuntimeStartFailed")...), failedAt("RuntimeStartFailed", 1)), false, true,
			[]string{"Warning RuntimeStartFailed"},
		},
		"the next try that fails alike counts the event up and can wait": {
			with(said(stopped("RuntimeStartFailed")...), failedAt("RuntimeStartFailed", 1)),
			with(said(stopped("RuntimeStartFailed")...), failedAt("RuntimeStartFailed", 2)), false, false, []string{"Warning RuntimeStartFailed"},
		},
		"a failure that was told before is no news": {
			with(said(stopped("CrashLoopBackOff")...), failedAt("OOMKilled", 1)), with(said(stopped("CrashLoopBackOff")...), failedAt("OOMKilled", 1)),
			false, false, nil,
		},
		"what an earlier assignment said is no news": {
			with(said(startedFailed), func(s *v1alpha1.ImpVMStatus) { s.ReportedAssignment = 1 }), said(startedFailed),
			false, true, []string{"Warning RuntimeStartFailed"},
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, e := range happenings(c.before, c.after, c.trouble) {
				got = append(got, e.Type+" "+e.Reason)
			}
			if d := cmp.Diff(c.want, got); d != "" {
				t.Errorf("events differ (-want +got):\n%s", d)
			}
			if s := significant(c.before, c.after); s != c.significant {
				t.Errorf("significant is %v", s)
			}
		})
	}
}

func TestNodeStatus(t *testing.T) {
	now := time.Unix(1000, 0)
	info := newFakeRuntime().info
	ready := func(s v1alpha1.ImpNodeStatus) metav1.Condition { return s.Conditions[0] }
	first := nodeStatus(v1alpha1.ImpNodeStatus{}, info, nil, now)
	if c := ready(first); c.Status != "True" || c.Reason != v1alpha1.ReasonRuntimeUsable || first.Budget.MemoryMiB != 8192 {
		t.Fatalf("status is %+v", first)
	}
	t.Run("the same again is the same, whenever", func(t *testing.T) {
		if d := cmp.Diff(first, nodeStatus(first, info, nil, now.Add(time.Hour))); d != "" {
			t.Error(d)
		}
	})
	t.Run("a runtime that is away keeps its figures", func(t *testing.T) {
		got := nodeStatus(first, machine.Info{}, errAway, now)
		if c := ready(got); c.Status != "False" || c.Reason != v1alpha1.ReasonRuntimeUnreachable || got.Budget != first.Budget || got.BootID != first.BootID {
			t.Errorf("status is %+v", got)
		}
	})
	t.Run("the node's place in the overlay is told, its own address first, each once", func(t *testing.T) {
		placed := info
		placed.Network = network.Host{VTEP: "192.0.2.7", MTU: 1500, Port: 14789, Addresses: []string{"192.0.2.9", "10.0.0.7", "192.0.2.7", "192.0.2.9"}}
		want := v1alpha1.NodeNetwork{Address: "192.0.2.7", Addresses: []string{"192.0.2.7", "10.0.0.7", "192.0.2.9"}, MTU: 1500, Port: 14789}
		got := nodeStatus(first, placed, nil, now)
		if d := cmp.Diff(want, got.Network); d != "" {
			t.Errorf("network differs (-want +got):\n%s", d)
		}
		for i := range 100 {
			placed.Network.Addresses = append(placed.Network.Addresses, fmt.Sprintf("10.0.1.%d", i))
		}
		if n := len(nodeStatus(first, placed, nil, now).Network.Addresses); n != 64 {
			t.Errorf("%d addresses, the API takes 64", n)
		}
	})
	t.Run("a foreign chain that drops is named while it does, and a node without one says nothing", func(t *testing.T) {
		of := func(s v1alpha1.ImpNodeStatus) *metav1.Condition {
			return meta.FindStatusCondition(s.Conditions, v1alpha1.ConditionForwardBlocked)
		}
		if c := of(first); c != nil {
			t.Errorf("a node without one says %+v", c)
		}
		drops := info
		drops.Network.ForwardBlocked = "ip filter FORWARD: policy drop"
		blocked := nodeStatus(first, drops, nil, now)
		if c := of(blocked); c == nil || c.Status != "True" || c.Reason != v1alpha1.ReasonForwardBlocked || c.Message != drops.Network.ForwardBlocked {
			t.Errorf("condition is %+v", c)
		}
		if c := of(nodeStatus(blocked, machine.Info{}, errAway, now)); c == nil || c.Status != "True" {
			t.Errorf("with the runtime away the condition is %+v", c)
		}
		if c := of(nodeStatus(blocked, info, nil, now.Add(time.Hour))); c == nil || c.Status != "False" || !c.LastTransitionTime.Time.Equal(now.Add(time.Hour)) {
			t.Errorf("afterwards the condition is %+v", c)
		}
	})
	t.Run("a runtime that cannot start VMs says why", func(t *testing.T) {
		bad := info
		bad.Usable, bad.Problem = false, "no QEMU"
		if c := ready(nodeStatus(first, bad, nil, now)); c.Status != "False" || c.Reason != v1alpha1.ReasonRuntimeUnusable || c.Message != "no QEMU" {
			t.Errorf("condition is %+v", c)
		}
	})
}

func TestView(t *testing.T) {
	at := time.Unix(1000, 0)
	st := func(id string, revision int64) machine.Status {
		return machine.Status{ID: id, Name: id, Revision: revision}
	}
	v := newView(at)
	if _, away := v.connection(at.Add(time.Minute)); away != time.Minute {
		t.Errorf("away for %s", away)
	}
	v.begin()
	v.put(st("a", 5))
	v.put(st("b", 1))
	v.sync()
	if v.put(st("a", 4)) || v.put(st("a", 5)) || !v.put(st("a", 6)) {
		t.Error("what is not newer was taken, or what is newer was not")
	}
	first, _ := v.connection(at)
	v.lost(at)
	v.begin()
	v.put(st("a", 2)) // a runtime whose state was made anew counts from the beginning
	v.sync()
	second, _ := v.connection(at)
	if first == second || second == 0 {
		t.Errorf("connections %d and %d", first, second)
	}
	if got, ok := v.get("a"); !ok || got.Revision != 2 {
		t.Errorf("a is %+v", got)
	}
	if _, ok := v.get("b"); ok {
		t.Error("what the new list does not hold is still there")
	}
}

func TestCheckServer(t *testing.T) {
	for _, c := range []struct {
		major, minor string
		ok           bool
	}{{"1", "33", true}, {"1", "37+", true}, {"1", "32", false}, {"1", "x", false}, {"2", "40", false}} {
		if err := checkServer(&versioninfo.Info{Major: c.major, Minor: c.minor}, nil); (err == nil) != c.ok {
			t.Errorf("%s.%s: %v", c.major, c.minor, err)
		}
	}
	if err := checkServer(nil, errAway); !fault.Is(err, fault.Unavailable) {
		t.Errorf("error is %v", err)
	}
}
