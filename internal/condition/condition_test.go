package condition

import (
	"reflect"
	"slices"
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"
)

func at(minute int) time.Time { return time.Date(2030, 1, 1, 12, minute, 0, 0, time.UTC) }

// facts builds a VM; each function states one thing about it.
type fact func(*v1alpha1.ImpVM)

func vmWith(facts ...fact) *v1alpha1.ImpVM {
	vm := &v1alpha1.ImpVM{ObjectMeta: metav1.ObjectMeta{Generation: 7}}
	for _, f := range facts {
		f(vm)
	}
	return vm
}

func is(conditionType string, status metav1.ConditionStatus, reason, message string) fact {
	return func(vm *v1alpha1.ImpVM) {
		Set(&vm.Status.Conditions, metav1.Condition{
			Type: conditionType, Status: status, Reason: reason, Message: message, LastTransitionTime: metav1.NewTime(at(0)),
		})
	}
}

func yes(types ...string) fact {
	return func(vm *v1alpha1.ImpVM) {
		for _, kind := range types {
			is(kind, metav1.ConditionTrue, v1alpha1.ReasonDone, "")(vm)
		}
	}
}

func no(conditionType, reason, message string) fact {
	return is(conditionType, metav1.ConditionFalse, reason, message)
}

func bound(vm *v1alpha1.ImpVM) {
	vm.Status.NodeName, vm.Status.Assignment, vm.Status.ReportedAssignment = "n", 1, 1
	yes(v1alpha1.ConditionScheduled)(vm)
}

func started(vm *v1alpha1.ImpVM) {
	bound(vm)
	yes(v1alpha1.ConditionDiskReady, v1alpha1.ConditionNetworkReady, v1alpha1.ConditionStarted)(vm)
}

func running(vm *v1alpha1.ImpVM) {
	started(vm)
	yes(v1alpha1.ConditionGuestReady)(vm)
}

func placedAnew(vm *v1alpha1.ImpVM) { vm.Status.Assignment = 2 }
func unbound(vm *v1alpha1.ImpVM)    { vm.Status.NodeName = "" }
func deleted(vm *v1alpha1.ImpVM)    { vm.DeletionTimestamp = &metav1.Time{Time: at(1)} }
func released(vm *v1alpha1.ImpVM) {
	vm.Status.Release = &v1alpha1.Release{Assignment: 1, Reason: "Moved"}
}

func TestReadySaysTheFirstThingThatIsNotTrue(t *testing.T) {
	for sentence, tc := range map[string]struct {
		vm      *v1alpha1.ImpVM
		status  metav1.ConditionStatus
		reason  string
		message string
		phase   v1alpha1.Phase
	}{
		"a new VM waits for a node": {
			vmWith(), "False", "Pending", "waiting for a node", "Starting"},
		"a VM that fits nowhere says why": {
			vmWith(no("Scheduled", "NoNodeFits", "0 of 2 nodes: 2 are full")), "False", "NoNodeFits", "0 of 2 nodes: 2 are full", "Starting"},
		"a VM without its class is an invalid spec": {
			vmWith(no("Scheduled", "InvalidSpec", "class big does not exist")), "False", "InvalidSpec", "class big does not exist", "Starting"},
		"a placed VM waits for its node's first word": {
			vmWith(bound), "False", "Pending", "waiting for the node to prepare the disk", "Starting"},
		"an image that cannot be pulled keeps it starting": {
			vmWith(bound, no("DiskReady", "ImagePullFailed", "401 from the registry")), "False", "ImagePullFailed", "401 from the registry", "Starting"},
		"the first failure hides later ones": {
			vmWith(bound, no("DiskReady", "ImagePullFailed", "x"), no("Started", "RuntimeStartFailed", "y")), "False", "ImagePullFailed", "x", "Starting"},
		"a network that failed is told after the disk": {
			vmWith(bound, yes("DiskReady"), no("NetworkReady", "NetworkSetupFailed", "no TAP")), "False", "NetworkSetupFailed", "no TAP", "Starting"},
		"a guest in a crash loop is starting": {
			vmWith(started, no("Started", "CrashLoopBackOff", "exit code 1, again in 20s")), "False", "CrashLoopBackOff", "exit code 1, again in 20s", "Starting"},
		"a VM that stands still by order is stopped": {
			vmWith(started, no("Started", "Stopped", "spec.desiredState is Stopped")), "False", "Stopped", "spec.desiredState is Stopped", "Stopped"},
		"a VM that was stopped before its disk was made is stopped": {
			vmWith(bound, is("DiskReady", "Unknown", "Pending", "preparing"), no("Started", "Stopped", "spec.desiredState is Stopped")), "False", "Stopped", "spec.desiredState is Stopped", "Stopped"},
		"a VM that is stopped on a silent node is not known": {
			vmWith(bound, no("NodeReachable", "AgentTimeout", "silent"), no("Started", "Stopped", "spec.desiredState is Stopped")), "False", "AgentTimeout", "silent", "Unknown"},
		"a VM that was stopped for a taint of its node is stopped": {
			vmWith(started, no("Started", "Evacuated", "node-1 is to be emptied")), "False", "Evacuated", "node-1 is to be emptied", "Stopped"},
		"a stage that is unknown is not true": {
			vmWith(bound, is("DiskReady", "Unknown", "Pending", "pulling 3 of 9 MiB")), "False", "Pending", "pulling 3 of 9 MiB", "Starting"},
		"a started guest that does not answer its probe is running": {
			vmWith(started, no("GuestReady", "ProbeFailing", "503")), "False", "ProbeFailing", "503", "Running"},
		"a started guest that has not been probed is running": {
			vmWith(started), "False", "Pending", "waiting for the guest to be ready", "Running"},
		"all true is Ready": {
			vmWith(running), "True", "Running", "the guest is running and ready", "Running"},
		"a node that was heard of again is as good as one never doubted": {
			vmWith(running, yes("NodeReachable")), "True", "Running", "the guest is running and ready", "Running"},
		"a silent node makes it unknown": {
			vmWith(running, no("NodeReachable", "AgentTimeout", "silent for 41s")), "False", "AgentTimeout", "silent for 41s", "Unknown"},
		"a silent node is told before an old failure": {
			vmWith(bound, no("DiskReady", "DiskFailed", "x"), no("NodeReachable", "AgentTimeout", "silent")), "False", "AgentTimeout", "silent", "Unknown"},
		"a VM placed anew does not believe its former node": {
			vmWith(running, placedAnew), "False", "Pending", "waiting for the node to prepare the disk", "Starting"},
		"a VM without a node is not running, whatever its former node said": {
			vmWith(running, unbound, no("Scheduled", "NoNodeFits", "none")), "False", "NoNodeFits", "none", "Starting"},
		"a required restart does not make it unready": {
			vmWith(running, yes("RestartRequired")), "True", "Running", "the guest is running and ready", "Running"},
		"a deleted VM is stopping": {
			vmWith(running, deleted), "False", "Stopping", "being stopped and removed from its node", "Stopping"},
		"a released VM is stopping": {
			vmWith(running, released), "False", "Stopping", "being stopped and removed from its node", "Stopping"},
		"a deleted VM that was never placed is stopping": {
			vmWith(deleted), "False", "Stopping", "being stopped and removed from its node", "Stopping"},
		"a deleted VM on a silent node says what it waits for": {
			vmWith(running, deleted, no("NodeReachable", "AgentTimeout", "silent")), "False", "AgentTimeout", "silent", "Stopping"},
		"a workload that ended well is completed": {
			vmWith(started, yes("GuestReady"), is("Finished", "True", "Succeeded", "exit code 0")), "False", "Completed", "exit code 0", "Succeeded"},
		"a workload that ended badly is failed": {
			vmWith(started, is("Finished", "True", "Failed", "exit code 3")), "False", "Failed", "exit code 3", "Failed"},
		"a deadline is told by its name": {
			vmWith(bound, is("Finished", "True", "DeadlineExceeded", "60s are over")), "False", "DeadlineExceeded", "60s are over", "Failed"},
		"a finished VM stays what it was on a lost node": {
			vmWith(bound, is("Finished", "True", "Succeeded", ""), no("NodeReachable", "AgentTimeout", "")), "False", "Completed", "", "Succeeded"},
		"a finished VM stays what it was while it is deleted": {
			vmWith(bound, is("Finished", "True", "NodeLost", "gone"), deleted), "False", "NodeLost", "gone", "Failed"},
		"Finished=False is not finished": {
			vmWith(running, no("Finished", "Running", "")), "True", "Running", "the guest is running and ready", "Running"},
	} {
		t.Run(sentence, func(t *testing.T) {
			got, phase := Ready(Of(tc.vm, at(5)))
			want := metav1.Condition{
				Type: "Ready", Status: tc.status, Reason: tc.reason, Message: tc.message,
				ObservedGeneration: 7, LastTransitionTime: metav1.NewTime(at(5)),
			}
			if got != want {
				t.Errorf("Ready is\n  %+v, want\n  %+v", got, want)
			}
			if phase != tc.phase {
				t.Errorf("the phase is %s, want %s", phase, tc.phase)
			}
		})
	}
}

// anyVM draws every combination of conditions, bindings and orders.
func anyVM(t *rapid.T) *v1alpha1.ImpVM {
	vm := vmWith()
	for _, kind := range []string{"Scheduled", "NodeReachable", "DiskReady", "NetworkReady", "Started", "GuestReady", "Finished", "RestartRequired", "Ready"} {
		status := rapid.SampledFrom([]metav1.ConditionStatus{"", "True", "True", "True", "False", "Unknown"}).Draw(t, kind)
		if status != "" {
			is(kind, status, rapid.SampledFrom([]string{"", "Succeeded", "Failed", "X"}).Draw(t, kind+" reason"), "m")(vm)
		}
	}
	vm.Status.NodeName = rapid.SampledFrom([]string{"", "n"}).Draw(t, "node")
	vm.Status.Assignment = rapid.Int64Range(0, 2).Draw(t, "assignment")
	vm.Status.ReportedAssignment = rapid.Int64Range(0, 2).Draw(t, "reported")
	if rapid.IntRange(0, 3).Draw(t, "deleted") == 0 {
		deleted(vm)
	}
	if rapid.IntRange(0, 3).Draw(t, "released") == 0 {
		released(vm)
	}
	return vm
}

func TestReadyIsTrueExactlyIfEverythingIs(t *testing.T) {
	phases := []v1alpha1.Phase{
		v1alpha1.PhaseStarting, v1alpha1.PhaseRunning, v1alpha1.PhaseStopping, v1alpha1.PhaseSucceeded, v1alpha1.PhaseFailed, v1alpha1.PhaseUnknown,
	}
	rapid.Check(t, func(t *rapid.T) {
		vm := anyVM(t)
		before := vm.DeepCopy()
		ready, phase := Ready(Of(vm, at(5)))
		isTrue := func(kind string) bool { return meta.IsStatusConditionTrue(vm.Status.Conditions, kind) }
		all := isTrue("Scheduled") && Reachable(vm.Status.Conditions) && isTrue("DiskReady") && isTrue("NetworkReady") &&
			isTrue("Started") && isTrue("GuestReady") && !isTrue("Finished") &&
			vm.Status.Assignment == vm.Status.ReportedAssignment && vm.DeletionTimestamp == nil && vm.Status.Release == nil
		if (ready.Status == metav1.ConditionTrue) != all {
			t.Errorf("Ready is %s while everything is true: %v", ready.Status, all)
		}
		if ready.Status == metav1.ConditionTrue && phase != v1alpha1.PhaseRunning {
			t.Errorf("Ready in phase %s", phase)
		}
		if ready.Status != metav1.ConditionTrue && ready.Status != metav1.ConditionFalse {
			t.Errorf("Ready is %s", ready.Status)
		}
		if ready.Reason == "" {
			t.Error("no reason, which the API server refuses")
		}
		if !slices.Contains(phases, phase) {
			t.Errorf("the phase is %q", phase)
		}
		if isTrue("Finished") != (phase == v1alpha1.PhaseSucceeded || phase == v1alpha1.PhaseFailed) {
			t.Errorf("finished %v in phase %s", isTrue("Finished"), phase)
		}
		if !reflect.DeepEqual(vm, before) {
			t.Error("the inputs were changed")
		}
	})
}

func TestApplyingAgainChangesNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		vm := anyVM(t)
		Apply(vm, at(5))
		again := vm.DeepCopy()
		Apply(again, at(9))
		if !reflect.DeepEqual(vm, again) {
			t.Errorf("a second Apply made\n  %+v of\n  %+v", again.Status, vm.Status)
		}
	})
}

func TestLastTransitionTimeIsThatOfTheStatus(t *testing.T) {
	previous := []metav1.Condition{{Type: "Started", Status: "False", Reason: "Old", LastTransitionTime: metav1.NewTime(at(1))}}
	for sentence, tc := range map[string]struct {
		want metav1.Condition
		at   int
	}{
		"a new reason keeps it":         {metav1.Condition{Type: "Started", Status: "False", Reason: "New"}, 1},
		"a new status moves it":         {metav1.Condition{Type: "Started", Status: "True"}, 5},
		"a new condition begins now":    {metav1.Condition{Type: "DiskReady", Status: "False"}, 5},
		"a time that was given is lost": {metav1.Condition{Type: "Started", Status: "True", LastTransitionTime: metav1.NewTime(at(3))}, 5},
	} {
		t.Run(sentence, func(t *testing.T) {
			if got := Next(previous, tc.want, at(5)).LastTransitionTime; !got.Equal(&metav1.Time{Time: at(tc.at)}) {
				t.Errorf("it is %s, want %s", got, at(tc.at))
			}
		})
	}
}

func TestSetReplacesOrAppends(t *testing.T) {
	var list []metav1.Condition
	Set(&list, metav1.Condition{Type: "A", Reason: "1"})
	Set(&list, metav1.Condition{Type: "B", Reason: "2"})
	Set(&list, metav1.Condition{Type: "A", Reason: "3"})
	want := []metav1.Condition{{Type: "A", Reason: "3"}, {Type: "B", Reason: "2"}}
	if !slices.Equal(list, want) {
		t.Errorf("the list is %v, want %v", list, want)
	}
}

func TestWhoSpeaks(t *testing.T) {
	for sentence, tc := range map[string]struct {
		vm       *v1alpha1.ImpVM
		operator bool
	}{
		"the operator for a new VM":                            {vmWith(), true},
		"the agent once it has reported":                       {vmWith(bound), false},
		"the agent when its node is back":                      {vmWith(bound, yes("NodeReachable")), false},
		"the operator until the agent has reported":            {vmWith(bound, placedAnew), true},
		"the operator for a silent node":                       {vmWith(bound, no("NodeReachable", "AgentTimeout", "")), true},
		"the operator for a node it knows nothing of":          {vmWith(bound, is("NodeReachable", "Unknown", "X", "")), true},
		"the operator for a VM that was taken back":            {vmWith(running, unbound), true},
		"the agent while it gives a VM up":                     {vmWith(running, deleted, released), false},
		"the agent for a VM that finished on a reachable node": {vmWith(bound, yes("Finished")), false},
	} {
		t.Run(sentence, func(t *testing.T) {
			if got := OperatorSpeaks(tc.vm); got != tc.operator {
				t.Errorf("OperatorSpeaks is %v", got)
			}
		})
	}
}
