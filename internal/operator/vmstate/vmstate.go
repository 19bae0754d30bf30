// Package vmstate answers what both of the operator's writers ask of an ImpVM's status.
package vmstate

import (
	"time"

	"imp.dev/imp/api/v1alpha1"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Finished says that the VM has ended for good.
func Finished(vm *v1alpha1.ImpVM) bool {
	return meta.IsStatusConditionTrue(vm.Status.Conditions, v1alpha1.ConditionFinished)
}

// FinishedAt is when a finished VM ended: as its node told, or when a lost one was given up.
func FinishedAt(vm *v1alpha1.ImpVM) time.Time {
	c := meta.FindStatusCondition(vm.Status.Conditions, v1alpha1.ConditionFinished)
	switch {
	case c == nil || c.Status != metav1.ConditionTrue:
		return time.Time{}
	case c.Reason != v1alpha1.ReasonNodeLost && vm.Status.FinishedAt != nil:
		return vm.Status.FinishedAt.Time
	default:
		return c.LastTransitionTime.Time
	}
}

// Ephemeral says that the workload runs at most once.
func Ephemeral(vm *v1alpha1.ImpVM) bool { return vm.Spec.Lifecycle != v1alpha1.LifecyclePersistent }

// Movable says that the VM is on a node, wanted, and one that may be stopped and started again.
func Movable(vm *v1alpha1.ImpVM) bool {
	return vm.Status.NodeName != "" && vm.DeletionTimestamp == nil && !Ephemeral(vm) && !Finished(vm) && !Released(vm)
}

// Mode of the restarts of a bound VM: its own policy's, else that of its class as it was resolved.
func Mode(vm *v1alpha1.ImpVM) v1alpha1.RestartMode {
	policy := vm.Spec.RestartPolicy
	if policy == nil && vm.Status.Resources != nil {
		policy = vm.Status.Resources.RestartPolicy
	}
	if policy == nil || policy.Mode == "" {
		return v1alpha1.RestartInPlace
	}
	return policy.Mode
}

// Halted says that the VM is to stand still.
func Halted(vm *v1alpha1.ImpVM) bool {
	return vm.Spec.DesiredState == v1alpha1.DesiredStopped || vm.Status.Hold != nil
}

// AgentSpoke says that what the agent wrote is of the present assignment.
func AgentSpoke(vm *v1alpha1.ImpVM) bool {
	return vm.Status.NodeName != "" && vm.Status.ReportedAssignment == vm.Status.Assignment
}

// Released says that nothing of the present or an older assignment is left on a node.
func Released(vm *v1alpha1.ImpVM) bool { return vm.Status.ReleasedAssignment >= vm.Status.Assignment }

// Waiting says that the VM wants a node and has none.
func Waiting(vm *v1alpha1.ImpVM) bool {
	return vm.Status.NodeName == "" && vm.DeletionTimestamp == nil && !Finished(vm)
}

// Leaving says that the VM is being deleted and that nothing of it is on a node any more, or ever was: it may be forgotten.
func Leaving(vm *v1alpha1.ImpVM) bool {
	return vm.DeletionTimestamp != nil && (vm.Status.NodeName == "" || Released(vm))
}
