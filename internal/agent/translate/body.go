package translate

import (
	"reflect"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"imp.dev/imp/api/v1alpha1"
)

// ownedConditions are the types the agent writes, in the order in which they stand in an apply.
func ownedConditions() []string {
	return append(stageTypes(), v1alpha1.ConditionRestartRequired, v1alpha1.ConditionFinished, v1alpha1.ConditionReady)
}

// Owned is the part of vm's status that imp-agent owns, and nothing else.
func Owned(vm *v1alpha1.ImpVM) v1alpha1.ImpVMStatus {
	var out v1alpha1.ImpVMStatus
	replaceOwned(&out, vm.Status)
	out.Phase = vm.Status.Phase
	for _, t := range ownedConditions() {
		c := meta.FindStatusCondition(vm.Status.Conditions, t)
		// The end of a VM on a lost node is told by the operator, and stays the operator's.
		if c == nil || (t == v1alpha1.ConditionFinished && c.Reason == v1alpha1.ReasonNodeLost) {
			continue
		}
		out.Conditions = append(out.Conditions, *c)
	}
	return out
}

// replaceOwned sets the fields of imp-agent other than phase and conditions. A field added to the agent's part of
// ImpVMStatus belongs here; a test compares this list with the type.
func replaceOwned(to *v1alpha1.ImpVMStatus, from v1alpha1.ImpVMStatus) {
	to.ReportedAssignment = from.ReportedAssignment
	to.ReleasedAssignment = from.ReleasedAssignment
	to.ObservedGeneration = from.ObservedGeneration
	to.Incarnation = from.Incarnation
	to.Run = from.Run
	to.RestartCount = from.RestartCount
	to.Restart = from.Restart
	to.ExitCode = from.ExitCode
	to.LastFailure = from.LastFailure
	to.ConsoleTail = from.ConsoleTail
	to.StartedAt = from.StartedAt
	to.FinishedAt = from.FinishedAt
	to.ImageDigest = from.ImageDigest
	to.DiskGeneration = from.DiskGeneration
	to.Timings = from.Timings
}

// Body is the server-side apply of vm's status by imp-agent: the complete set the manager owns, on condition that the object still
// has vm's resourceVersion.
func Body(vm *v1alpha1.ImpVM) (*unstructured.Unstructured, error) {
	status, err := statusMap(vm)
	if err != nil {
		return nil, err
	}
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": v1alpha1.GroupVersion.String(),
		"kind":       "ImpVM",
		"metadata": map[string]any{
			"namespace": vm.Namespace, "name": vm.Name, "resourceVersion": vm.ResourceVersion,
		},
		"status": status,
	}}, nil
}

func statusMap(vm *v1alpha1.ImpVM) (map[string]any, error) {
	owned := Owned(vm)
	m, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&owned)
	if err != nil {
		return nil, err
	}
	m["restartCount"] = owned.RestartCount // a column that says 0, not nothing
	return m, nil
}

// Same says that imp-agent's part is the same in both, as the API server would store it.
func Same(a, b *v1alpha1.ImpVM) bool {
	x, err := statusMap(a)
	if err != nil {
		return false
	}
	y, err := statusMap(b)
	return err == nil && reflect.DeepEqual(x, y)
}
