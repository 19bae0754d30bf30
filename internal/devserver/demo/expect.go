package demo

import (
	"fmt"
	"strings"

	"imp.dev/imp/api/v1alpha1"

	"k8s.io/apimachinery/pkg/api/meta"
)

// expectation is what an example has to come to.
type expectation struct {
	name string
	// reached says whether the VM is where it should be; wrong, if it is not "", that it never will be.
	reached func(vm *v1alpha1.ImpVM) (reached bool, wrong string)
	// console has to be on the serial console in the end.
	console []string
}

// expectations of all examples. The console's words are asked for as well as the status, because a status alone could be made up.
func expectations() []expectation {
	return []expectation{
		{
			name: "hello", reached: finished(v1alpha1.PhaseSucceeded, 0),
			console: []string{"kernel:      Linux ", "GREETING=hello from a microVM", "Mem:", "IMP_SUCCESS"},
		},
		{
			name: "exit-3", reached: finished(v1alpha1.PhaseFailed, 3),
			console: []string{"this did not go well", "IMP_FAILED code=3"},
		},
		{name: "web", reached: ready},
	}
}

func finished(phase v1alpha1.Phase, code int32) func(*v1alpha1.ImpVM) (bool, string) {
	return func(vm *v1alpha1.ImpVM) (bool, string) {
		if !meta.IsStatusConditionTrue(vm.Status.Conditions, v1alpha1.ConditionFinished) {
			return false, ""
		}
		if vm.Status.Phase != phase || vm.Status.ExitCode == nil || *vm.Status.ExitCode != code {
			return false, fmt.Sprintf("%s ended as %s, want %s with exit code %d", vm.Name, describe(vm), phase, code)
		}
		return true, ""
	}
}

func ready(vm *v1alpha1.ImpVM) (bool, string) {
	if meta.IsStatusConditionTrue(vm.Status.Conditions, v1alpha1.ConditionFinished) {
		return false, fmt.Sprintf("%s ended as %s, want it Ready", vm.Name, describe(vm))
	}
	return meta.IsStatusConditionTrue(vm.Status.Conditions, v1alpha1.ConditionReady), ""
}

func describe(vm *v1alpha1.ImpVM) string { return strings.Join(cells(vm)[1:], " ") }

// missing gives the words that are not on the console.
func (e expectation) missing(console string) []string {
	var missing []string
	for _, words := range e.console {
		if !strings.Contains(console, words) {
			missing = append(missing, words)
		}
	}
	return missing
}
