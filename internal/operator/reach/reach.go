// Package reach is the writer imp-reachable: it speaks for nodes that do not speak. A VM on a silent node is told to be
// unreachable, and told to be reachable again when the node is back; a VM that runs at most once, on a node that certainly runs it
// no more, is told to be lost.
//
//	heard ──40 s of silence──► NodeReachable=False AgentTimeout ──heard again──► NodeReachable=True, event Recovered
//	                                   └──proof, and at most once──► Finished=True NodeLost
package reach

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/condition"
	"imp.dev/imp/internal/event"
	"imp.dev/imp/internal/operator/nodes"
	"imp.dev/imp/internal/operator/statusapply"
	"imp.dev/imp/internal/operator/vmstate"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// IndexNode is the cache's index of VMs by the node they are bound to; "" finds those without one.
const IndexNode = "status.nodeName"

// afterConflict is when to look again if the cache does not show the newer object before.
const afterConflict = time.Second

// Reconciler looks at one node and the VMs bound to it. The request's name is the node's; the empty name stands for the VMs
// that have none.
type Reconciler struct {
	Client client.Client
	Nodes  *nodes.View
	Clock  clock.PassiveClock
	Events event.Recorder
	Log    *slog.Logger
}

// Reconcile implements reconcile.Reconciler.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	vms := &v1alpha1.ImpVMList{}
	if err := r.Client.List(ctx, vms, client.MatchingFields{IndexNode: req.Name}); err != nil {
		return ctrl.Result{}, fmt.Errorf("reading VMs: %w", err)
	}
	if req.Name == "" {
		return r.speak(ctx, vms.Items, nodes.Standing{}, "")
	}
	left, err := r.left(ctx, req.Name)
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("looking for node %s: %w", req.Name, err)
	}
	if len(vms.Items) == 0 && !left {
		return ctrl.Result{}, nil // the next one that is bound there brings the node back
	}
	standing, err := r.Nodes.Standing(ctx, req.Name)
	if err != nil {
		return ctrl.Result{}, err
	}
	if left && standing.Gone {
		if err := r.tidy(ctx, req.Name); err != nil {
			return ctrl.Result{}, err
		}
	}
	result, err := r.speak(ctx, vms.Items, standing, req.Name)
	if !standing.Silent && result.RequeueAfter == 0 {
		result.RequeueAfter = max(standing.SilentAt.Sub(r.Clock.Now()), time.Millisecond)
	}
	return result, err
}

// speak writes what decide says of each VM. One that cannot be written does not keep the others from it.
func (r *Reconciler) speak(ctx context.Context, vms []v1alpha1.ImpVM, standing nodes.Standing, node string) (ctrl.Result, error) {
	var failed []error
	result := ctrl.Result{}
	for i := range vms {
		read := &vms[i]
		vm := read.DeepCopy()
		now := r.Clock.Now()
		events, changed := decide(vm, standing, now)
		if !changed {
			continue
		}
		condition.Apply(vm, now)
		set, err := statusapply.Reachable(vm)
		if err == nil {
			err = statusapply.Apply(ctx, r.Client, read, v1alpha1.ManagerReachable, set)
		}
		switch {
		case errors.Is(err, statusapply.ErrConflict):
			result.RequeueAfter = afterConflict
			continue
		case apierrors.IsNotFound(err):
			continue
		case err != nil:
			failed = append(failed, fmt.Errorf("VM %s/%s: %w", vm.Namespace, vm.Name, err))
			continue
		}
		for _, e := range events {
			r.Events.Record(e)
			r.Log.Info("VM's node was spoken for", "namespace", vm.Namespace, "name", vm.Name, "vm", vm.UID,
				"node", node, "reason", e.Reason)
		}
	}
	return result, errors.Join(failed...)
}

// decide changes vm's conditions to what the standing of its node makes of them. changed tells whether there is something
// to write.
func decide(vm *v1alpha1.ImpVM, s nodes.Standing, now time.Time) (events []event.Event, changed bool) {
	node := vm.Status.NodeName
	reachable := condition.Reachable(vm.Status.Conditions)
	switch {
	case vmstate.Finished(vm) && (reachable || !s.Alive):
		return nil, false // the end of a VM is the end of what can be said of it
	case node == "":
		// Taken off the node that was silent.
		return nil, meta.RemoveStatusCondition(&vm.Status.Conditions, v1alpha1.ConditionNodeReachable)
	case s.Proof != "" && vmstate.Ephemeral(vm) && vm.DeletionTimestamp == nil:
		message := fmt.Sprintf("lost with %s: %s", node, s.Proof)
		set(vm, v1alpha1.ConditionFinished, metav1.ConditionTrue, v1alpha1.ReasonNodeLost, message, now)
		return []event.Event{tell(vm, corev1.EventTypeWarning, v1alpha1.ReasonNodeLost, message)}, true
	case s.Silent && reachable:
		message := fmt.Sprintf("nothing heard of the agent on %s for %d s; what the VM does is not known",
			node, int(nodes.StaleAfter.Seconds()))
		set(vm, v1alpha1.ConditionNodeReachable, metav1.ConditionFalse, v1alpha1.ReasonAgentTimeout, message, now)
		return []event.Event{tell(vm, corev1.EventTypeWarning, v1alpha1.ReasonAgentTimeout, message)}, true
	case s.Alive && !reachable:
		message := fmt.Sprintf("the agent on %s is heard again", node)
		set(vm, v1alpha1.ConditionNodeReachable, metav1.ConditionTrue, v1alpha1.ReasonReachable, message, now)
		if vmstate.Finished(vm) {
			return nil, true // its end was told while the node was not reachable; Ready and phase are still to say so
		}
		return []event.Event{tell(vm, corev1.EventTypeNormal, v1alpha1.ReasonRecovered, message)}, true
	}
	return nil, false
}

func set(vm *v1alpha1.ImpVM, conditionType string, status metav1.ConditionStatus, reason, message string, now time.Time) {
	want := metav1.Condition{Type: conditionType, Status: status, Reason: reason, Message: message}
	condition.Set(&vm.Status.Conditions, condition.Next(vm.Status.Conditions, want, now))
}

func tell(vm *v1alpha1.ImpVM, eventType, reason, message string) event.Event {
	e := event.VM(vm, eventType, reason, message)
	e.Action, e.Step = "Watching", v1alpha1.ConditionNodeReachable
	return e
}
