// Package statusapply builds what the operator's writers apply to the status of ImpVMs and ImpNetworks. Server-side apply removes
// what a manager owned and no longer sends; so each apply holds the complete set of its manager, and this is the one place where
// the sets are written down.
//
//	imp-place      nodeName assignment placedAt release hold resources ip addresses, Scheduled;  Ready and phase while the operator speaks
//	imp-reachable  NodeReachable, Finished of a lost node;                                  Ready and phase in each of its writes
//	imp-network    all of an ImpNetwork's status
//
// imp-reachable always says Ready: each of its writes changes who speaks, and a Ready it left out would vanish until the
// agent says something.
package statusapply

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"

	"imp.dev/imp/api/v1alpha1"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Place gives imp-place's set of vm's status. speaks says that the operator speaks of Ready: condition.OperatorSpeaks of the
// object as it will be.
func Place(vm *v1alpha1.ImpVM, speaks bool) (map[string]any, error) {
	owned := v1alpha1.ImpVMStatus{
		NodeName: vm.Status.NodeName, Assignment: vm.Status.Assignment, PlacedAt: vm.Status.PlacedAt,
		Release: vm.Status.Release, Hold: vm.Status.Hold, Resources: vm.Status.Resources,
		IP: vm.Status.IP, Addresses: vm.Status.Addresses,
	}
	conditions := []string{v1alpha1.ConditionScheduled}
	if speaks {
		owned.Phase = vm.Status.Phase
		conditions = append(conditions, v1alpha1.ConditionReady)
	}
	owned.Conditions = pick(vm.Status.Conditions, conditions...)
	return encode(&owned)
}

// Reachable gives imp-reachable's set of vm's status.
func Reachable(vm *v1alpha1.ImpVM) (map[string]any, error) {
	conditions := []string{v1alpha1.ConditionNodeReachable, v1alpha1.ConditionReady}
	finished := meta.FindStatusCondition(vm.Status.Conditions, v1alpha1.ConditionFinished)
	if finished != nil && finished.Reason == v1alpha1.ReasonNodeLost {
		conditions = append(conditions, v1alpha1.ConditionFinished)
	}
	return encode(&v1alpha1.ImpVMStatus{
		Phase: vm.Status.Phase, Conditions: pick(vm.Status.Conditions, conditions...),
	})
}

// Network gives imp-network's set: it is the only writer of an ImpNetwork's status.
func Network(network *v1alpha1.ImpNetwork) (map[string]any, error) { return encode(&network.Status) }

func pick(from []metav1.Condition, types ...string) []metav1.Condition {
	var picked []metav1.Condition
	for _, conditionType := range types {
		if c := meta.FindStatusCondition(from, conditionType); c != nil {
			picked = append(picked, *c)
		}
	}
	return picked
}

func encode(owned any) (map[string]any, error) {
	set, err := runtime.DefaultUnstructuredConverter.ToUnstructured(owned)
	if err != nil {
		return nil, fmt.Errorf("encoding status: %w", err)
	}
	return set, nil
}

// Equal says that an apply of b after a would change nothing.
func Equal(a, b map[string]any) bool { return reflect.DeepEqual(a, b) }

// ErrConflict says that the object is not the one that was read: read again, decide again.
var ErrConflict = errors.New("the object was changed or replaced since it was read")

// Apply writes the set of a manager to the status of the object that read is, as it was read: not to one that was changed
// since, and not to another of its name. On success read gets the new resourceVersion.
func Apply(ctx context.Context, c client.Client, read client.Object, manager string, set map[string]any) error {
	kind, err := c.GroupVersionKindFor(read)
	if err != nil {
		return fmt.Errorf("applying status: %w", err)
	}
	object := &unstructured.Unstructured{Object: map[string]any{"status": maps.Clone(set)}}
	object.SetGroupVersionKind(kind)
	object.SetNamespace(read.GetNamespace())
	object.SetName(read.GetName())
	object.SetResourceVersion(read.GetResourceVersion())
	err = c.Status().Apply(ctx, client.ApplyConfigurationFromUnstructured(object), client.FieldOwner(manager), client.ForceOwnership)
	if err != nil {
		return Explain(err)
	}
	read.SetResourceVersion(object.GetResourceVersion())
	return nil
}

// Explain turns a 409 of a write that carried a resourceVersion into ErrConflict, but for one that only a defect can cause.
func Explain(err error) error {
	switch {
	case err == nil:
		return nil
	case apierrors.HasStatusCause(err, metav1.CauseTypeFieldManagerConflict):
		return fmt.Errorf("applying status (a defect: a forced apply met a conflict of field managers): %w", err)
	case apierrors.IsConflict(err):
		return fmt.Errorf("%w: %w", ErrConflict, err)
	default:
		return fmt.Errorf("applying status: %w", err)
	}
}

// Definite errors say that a write was not made; after others it may have been.
func Definite(err error) bool {
	return errors.Is(err, ErrConflict) || apierrors.IsConflict(err) || apierrors.IsNotFound(err) || apierrors.IsAlreadyExists(err) ||
		apierrors.IsInvalid(err) || apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) || apierrors.IsTooManyRequests(err)
}
