package operator_test

import (
	"context"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/condition"
	"imp.dev/imp/internal/operator/statusapply"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// applyAsAgent applies the complete set of imp-agent to vm as it was read. It stands in for the agent, which is tested in its own folder;
// change adds to the set of the present assignment.
func applyAsAgent(ctx context.Context, c client.Client, vm *v1alpha1.ImpVM, now time.Time, change func(*v1alpha1.ImpVMStatus)) error {
	own := v1alpha1.ImpVMStatus{ReportedAssignment: vm.Status.Assignment, ObservedGeneration: vm.Generation, Incarnation: 1, Run: 1}
	for _, stage := range agentStages() {
		said(&own, stage, metav1.ConditionFalse, v1alpha1.ReasonPending, "not reached", now)
	}
	change(&own)
	after := vm.DeepCopy()
	after.Status.ReportedAssignment = own.ReportedAssignment
	for _, c := range own.Conditions {
		meta.SetStatusCondition(&after.Status.Conditions, c)
	}
	if !condition.OperatorSpeaks(after) {
		condition.Apply(after, now)
		own.Phase = after.Status.Phase
		own.Conditions = append(own.Conditions, *meta.FindStatusCondition(after.Status.Conditions, v1alpha1.ConditionReady))
	}
	set, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&own)
	if err != nil {
		return err
	}
	return statusapply.Apply(ctx, c, vm, v1alpha1.ManagerAgent, set)
}

func agentStages() []string {
	return []string{
		v1alpha1.ConditionDiskReady, v1alpha1.ConditionNetworkReady, v1alpha1.ConditionStarted, v1alpha1.ConditionGuestReady,
	}
}

func said(s *v1alpha1.ImpVMStatus, conditionType string, status metav1.ConditionStatus, reason, message string, now time.Time) {
	meta.SetStatusCondition(&s.Conditions, metav1.Condition{
		Type: conditionType, Status: status, Reason: reason, Message: message, LastTransitionTime: metav1.NewTime(now),
	})
}

// running is what an agent says of a guest that is ready.
func running(s *v1alpha1.ImpVMStatus) {
	now := time.Now()
	for _, stage := range agentStages() {
		said(s, stage, metav1.ConditionTrue, v1alpha1.ReasonDone, "done", now)
	}
	s.StartedAt = &metav1.MicroTime{Time: now}
	s.ImageDigest = "sha256:0123"
	s.DiskGeneration = 1
}

// succeeded is what an agent says of a workload that ended with 0.
func succeeded(s *v1alpha1.ImpVMStatus) {
	running(s)
	s.FinishedAt = &metav1.MicroTime{Time: time.Now()}
	s.ExitCode = new(int32)
	said(s, v1alpha1.ConditionFinished, metav1.ConditionTrue, v1alpha1.ReasonSucceeded, "the workload ended with 0", time.Now())
}
