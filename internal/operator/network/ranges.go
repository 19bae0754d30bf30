package network

import (
	"context"
	"fmt"
	"log/slog"
	"maps"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/operator/statusapply"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Ranges keeps the ConfigMap imp-cluster-ranges as the cluster is.
type Ranges struct {
	Client client.Client
	Survey *Survey
	Log    *slog.Logger
}

// rangesKey is the one thing there is to look at.
func rangesKey() client.ObjectKey {
	return client.ObjectKey{Namespace: v1alpha1.SystemNamespace, Name: v1alpha1.ClusterRangesName}
}

// Reconcile implements reconcile.Reconciler.
func (r *Ranges) Reconcile(ctx context.Context, _ ctrl.Request) (ctrl.Result, error) {
	seen, err := r.Survey.Look(ctx)
	if err != nil {
		return ctrl.Result{}, err
	}
	want := seen.Denied.Encode()
	has := &corev1.ConfigMap{}
	err = r.Client.Get(ctx, rangesKey(), has)
	switch {
	case apierrors.IsNotFound(err):
		has.ObjectMeta = metav1.ObjectMeta{
			Namespace: v1alpha1.SystemNamespace, Name: v1alpha1.ClusterRangesName, Labels: map[string]string{"app.kubernetes.io/name": "imp"},
		}
		has.Data = want
		err = r.Client.Create(ctx, has, client.FieldOwner(v1alpha1.ManagerNetwork))
	case err != nil:
		return ctrl.Result{}, fmt.Errorf("reading what guests may not reach: %w", err)
	case maps.Equal(has.Data, want):
		return ctrl.Result{}, nil
	default:
		changed := has.DeepCopy()
		changed.Data = want
		err = r.Client.Update(ctx, changed, client.FieldOwner(v1alpha1.ManagerNetwork))
	}
	if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
		return ctrl.Result{RequeueAfter: afterConflict}, nil
	}
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("telling agents what guests may not reach: %w", statusapply.Explain(err))
	}
	r.Log.Info("what guests may not reach was written", "nodes", len(seen.Denied.Nodes), "pods", len(seen.Denied.Pods),
		"services", len(seen.Denied.Services))
	return ctrl.Result{}, nil
}
