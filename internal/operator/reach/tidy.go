package reach

import (
	"context"
	"fmt"

	"imp.dev/imp/api/v1alpha1"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// left says that the node has left the cluster while its ImpNode is still there.
func (r *Reconciler) left(ctx context.Context, name string) (bool, error) {
	err := r.Client.Get(ctx, client.ObjectKey{Name: name}, &corev1.Node{})
	if err == nil || !apierrors.IsNotFound(err) {
		return false, client.IgnoreNotFound(err)
	}
	err = r.Client.Get(ctx, client.ObjectKey{Name: name}, &v1alpha1.ImpNode{})
	if err == nil || !apierrors.IsNotFound(err) {
		return err == nil, client.IgnoreNotFound(err)
	}
	return false, nil
}

// tidy removes what the agent of a node that has left the cluster wrote about it. An agent that is there after all writes it
// anew.
func (r *Reconciler) tidy(ctx context.Context, name string) error {
	lease := metav1.ObjectMeta{Namespace: v1alpha1.SystemNamespace, Name: v1alpha1.LeasePrefix + name}
	// The ImpNode goes last: while it is there, this is tried again.
	for _, object := range []client.Object{
		&coordinationv1.Lease{ObjectMeta: lease}, &v1alpha1.ImpNode{ObjectMeta: metav1.ObjectMeta{Name: name}},
	} {
		if err := r.Client.Delete(ctx, object); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("removing what is left of node %s: %w", name, err)
		}
	}
	r.Log.Info("node has left the cluster", "node", name)
	return nil
}
