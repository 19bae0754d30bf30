package address

import (
	"context"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/operator/nodes"
	"imp.dev/imp/internal/operator/vmstate"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
)

type queue = workqueue.TypedRateLimitingInterface[ctrl.Request]

// SetupWithManager registers the audit and what wakes it: a claim itself, the end of its VM, and what may be proof of its node.
func (r *Reconciler) SetupWithManager(mgr ctrl.Manager, concurrency int) error {
	return ctrl.NewControllerManagedBy(mgr).Named("address").
		WithOptions(controller.Options{MaxConcurrentReconciles: concurrency}).
		For(&v1alpha1.ImpAddress{}).
		Watches(&v1alpha1.ImpVM{}, r.ofVMs()).
		Watches(&corev1.Node{}, r.ofNodes()).
		Complete(r)
}

// bring the claims that an index finds.
func (r *Reconciler) bring(ctx context.Context, q queue, index, value string, concerned func(*v1alpha1.ImpAddress) bool) {
	claims := &v1alpha1.ImpAddressList{}
	err := r.Client.List(ctx, claims, client.MatchingFields{index: value}, client.UnsafeDisableDeepCopy)
	if err != nil {
		r.Log.Error("claims not found in the cache", "error", err) // cannot happen once the cache is filled
		return
	}
	for i := range claims.Items {
		if concerned(&claims.Items[i]) {
			q.Add(ctrl.Request{NamespacedName: client.ObjectKeyFromObject(&claims.Items[i])})
		}
	}
}

// ofVMs brings the claims of a VM that has, or may have, no use for them any more.
func (r *Reconciler) ofVMs() handler.EventHandler {
	all := func(*v1alpha1.ImpAddress) bool { return true }
	done := func(vm *v1alpha1.ImpVM) bool { return vmstate.Finished(vm) || vmstate.Leaving(vm) }
	return handler.Funcs{
		UpdateFunc: func(ctx context.Context, e event.UpdateEvent, q queue) {
			before, now := e.ObjectOld.(*v1alpha1.ImpVM), e.ObjectNew.(*v1alpha1.ImpVM)
			if now.Spec.NetworkRef != nil && (done(now) && !done(before) || before.Status.IP != now.Status.IP) {
				r.bring(ctx, q, IndexVM, string(now.UID), all)
			}
		},
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, q queue) {
			if vm, ok := e.Object.(*v1alpha1.ImpVM); ok && vm.Spec.NetworkRef != nil {
				r.bring(ctx, q, IndexVM, string(vm.UID), all)
			}
		},
	}
}

// ofNodes brings the claims that wait for a node's word when there may be proof instead.
func (r *Reconciler) ofNodes() handler.EventHandler {
	held := func(claim *v1alpha1.ImpAddress) bool { return claim.Status.State == v1alpha1.AddressHeld }
	return handler.Funcs{
		UpdateFunc: func(ctx context.Context, e event.UpdateEvent, q queue) {
			if nodes.Changed(e.ObjectOld.(*corev1.Node), e.ObjectNew.(*corev1.Node)) {
				r.bring(ctx, q, IndexNode, e.ObjectNew.GetName(), held)
			}
		},
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, q queue) {
			r.bring(ctx, q, IndexNode, e.Object.GetName(), held)
		},
	}
}
