package reach

import (
	"context"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/condition"
	"imp.dev/imp/internal/operator/nodes"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

type queue = workqueue.TypedRateLimitingInterface[ctrl.Request]

func add(q queue, node string) { q.Add(ctrl.Request{NamespacedName: types.NamespacedName{Name: node}}) }

// SetupWithManager registers the reconciler and what wakes it. Silence is found by the reconciler's own timer, one a node.
func (r *Reconciler) SetupWithManager(mgr ctrl.Manager, concurrency int) error {
	return ctrl.NewControllerManagedBy(mgr).Named("reach").
		WithOptions(controller.Options{MaxConcurrentReconciles: concurrency}).
		Watches(&v1alpha1.ImpVM{}, bindings()).
		Watches(&corev1.Node{}, changes()).
		Watches(&v1alpha1.ImpNode{}, handler.Funcs{ // its Node may be gone since before this operator started
			CreateFunc: func(_ context.Context, e event.CreateEvent, q queue) { add(q, e.Object.GetName()) },
		}).
		WatchesRawSource(source.Func(func(_ context.Context, q queue) error {
			r.Nodes.Heartbeats.Lead()
			r.Nodes.Heartbeats.Listen(func(node string) { add(q, node) })
			return nil
		})).
		Complete(r)
}

// bindings brings the nodes that VMs come to, and the VMs that were taken off a silent one.
func bindings() handler.EventHandler {
	look := func(vm *v1alpha1.ImpVM, q queue) {
		if vm.Status.NodeName != "" || !condition.Reachable(vm.Status.Conditions) {
			add(q, vm.Status.NodeName)
		}
	}
	return handler.Funcs{
		CreateFunc: func(_ context.Context, e event.CreateEvent, q queue) { look(e.Object.(*v1alpha1.ImpVM), q) },
		UpdateFunc: func(_ context.Context, e event.UpdateEvent, q queue) {
			before, now := e.ObjectOld.(*v1alpha1.ImpVM), e.ObjectNew.(*v1alpha1.ImpVM)
			if before.Status.NodeName != now.Status.NodeName || before.Status.Assignment != now.Status.Assignment ||
				condition.Reachable(before.Status.Conditions) != condition.Reachable(now.Status.Conditions) {
				look(now, q)
			}
		},
	}
}

func changes() handler.EventHandler {
	return handler.Funcs{
		UpdateFunc: func(_ context.Context, e event.UpdateEvent, q queue) {
			if nodes.Changed(e.ObjectOld.(*corev1.Node), e.ObjectNew.(*corev1.Node)) {
				add(q, e.ObjectNew.GetName())
			}
		},
		DeleteFunc: func(_ context.Context, e event.DeleteEvent, q queue) { add(q, e.Object.GetName()) },
	}
}
