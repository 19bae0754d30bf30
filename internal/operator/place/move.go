package place

import (
	"context"
	"fmt"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/operator/vmstate"
	"imp.dev/imp/internal/schedule"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// reschedule takes a VM back whose node says that the next try is to be made elsewhere. It waits for that try without a node, and so
// without holding room:
//
//	failed, mode reschedule ──► status.restart.elsewhere ──► release ──► released ──► unbound until nextTryAt ──► placed
func (r *Reconciler) reschedule(_ context.Context, p *pass) (bool, error) {
	h := p.vm.Status.Restart
	if !vmstate.Movable(p.vm) || !vmstate.AgentSpoke(p.vm) || h == nil || !h.Elsewhere || vmstate.Halted(p.vm) {
		return false, nil
	}
	r.release(p, v1alpha1.ReasonRescheduled, fmt.Sprintf("taken off %s after %d failures in a row, to be placed anew", p.vm.Status.NodeName, h.Attempts+h.StartFailures))
	return true, nil
}

// evacuate acts on the taints of effect NoExecute of a VM's node: one that may be moved is moved; one whose restarts are in-place is
// held stopped until its node is free of them; a one-shot is left to end.
func (r *Reconciler) evacuate(ctx context.Context, p *pass) (bool, error) {
	if !vmstate.Movable(p.vm) {
		return false, nil
	}
	node := &corev1.Node{}
	err := r.Client.Get(ctx, client.ObjectKey{Name: p.vm.Status.NodeName}, node)
	if apierrors.IsNotFound(err) {
		return false, nil // what it was tainted with does not matter any more
	}
	if err != nil {
		return true, fmt.Errorf("reading node: %w", err)
	}
	eviction, ok := schedule.Evict(node.Spec.Taints, p.vm.Spec.Tolerations, func(corev1.Taint) time.Time { return p.now })
	switch {
	case !ok:
		p.vm.Status.Hold = nil
	case p.now.Before(eviction.At):
		p.vm.Status.Hold = nil
		p.again(eviction.At.Sub(p.now))
	case vmstate.Mode(p.vm) == v1alpha1.RestartReschedule:
		r.release(p, v1alpha1.ReasonEvacuated, fmt.Sprintf("taken off %s for its taint %s", node.Name, eviction.Taint.ToString()))
		return true, nil
	case p.vm.Status.Hold == nil:
		message := fmt.Sprintf("%s has the taint %s: stopped until it is gone or tolerated", node.Name, eviction.Taint.ToString())
		p.vm.Status.Hold = &v1alpha1.Hold{Reason: v1alpha1.ReasonEvacuated, Message: message}
		p.tell(warning, v1alpha1.ReasonEvacuated, "Evacuating", message)
	}
	return false, nil
}

// release orders the node to give the VM up.
func (r *Reconciler) release(p *pass, reason, message string) {
	p.vm.Status.Hold = nil
	if p.vm.Status.Release != nil {
		return // ordered already
	}
	p.vm.Status.Release = &v1alpha1.Release{Assignment: p.vm.Status.Assignment, Reason: reason}
	p.tell(normal, reason, "Moving", message)
	p.log.Info("VM to be moved", "node", p.vm.Status.NodeName, "reason", reason)
}

// discarded tells that the VM has moved and its disk has not.
func discarded(p *pass, node string) {
	if !vmstate.Ephemeral(p.vm) && p.vm.Status.DiskGeneration > 0 {
		p.tell(warning, v1alpha1.ReasonDiskDiscarded, "Moving", "the disk stays on "+node+", in its trash for 72 h; the VM starts with a fresh one")
	}
}

// notYet keeps a VM without a node that is not to be started now from being placed: one that is wanted stopped, and one whose next
// try is still to come. It takes no part of any node's budget.
func (r *Reconciler) notYet(p *pass) bool {
	if vmstate.Ephemeral(p.vm) {
		return false
	}
	if p.vm.Spec.DesiredState == v1alpha1.DesiredStopped {
		p.scheduled(metav1.ConditionFalse, v1alpha1.ReasonStopped, "spec.desiredState is Stopped")
		return true
	}
	h := p.vm.Status.Restart
	if h == nil || h.NextTryAt == nil || !p.now.Before(h.NextTryAt.Time) || reset(p.vm) {
		return false
	}
	reason := v1alpha1.ReasonCrashLoopBackOff
	if h.Attempts == 0 {
		reason = v1alpha1.ReasonBackingOff
	}
	message := "placed anew at " + h.NextTryAt.UTC().Format(time.RFC3339)
	if f := p.vm.Status.LastFailure; f != nil {
		message = f.Reason + ": " + f.Message + "; " + message
	}
	p.scheduled(metav1.ConditionFalse, reason, message)
	p.again(h.NextTryAt.Sub(p.now))
	return true
}

// reset says that the user wants the failures forgotten, and no node has done so yet.
func reset(vm *v1alpha1.ImpVM) bool {
	value := vm.Annotations[v1alpha1.AnnotationRestartReset]
	return value != "" && vm.Status.Restart != nil && vm.Status.Restart.Reset != value
}

// waitedForNetwork says that the VM was told that it waits for an address.
func waitedForNetwork(vm *v1alpha1.ImpVM) bool {
	c := meta.FindStatusCondition(vm.Status.Conditions, v1alpha1.ConditionScheduled)
	return c != nil && c.Status == metav1.ConditionFalse && c.Reason == v1alpha1.ReasonNetworkSetupFailed
}
