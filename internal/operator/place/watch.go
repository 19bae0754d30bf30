package place

import (
	"context"
	"log/slog"

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
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// IndexClass is the cache's index of VMs by the class they name.
const IndexClass = "spec.classRef.name"

type queue = workqueue.TypedRateLimitingInterface[ctrl.Request]

// SetupWithManager registers the reconciler and what wakes it. Leases wake nobody when they are renewed, only when a node comes
// to be heard.
func (r *Reconciler) SetupWithManager(mgr ctrl.Manager, concurrency int) error {
	w := &waker{cached: mgr.GetClient(), log: r.Log}
	return ctrl.NewControllerManagedBy(mgr).Named("place").
		WithOptions(controller.Options{MaxConcurrentReconciles: concurrency}).
		For(&v1alpha1.ImpVM{}).
		Watches(&v1alpha1.ImpVM{}, w.room()).
		Watches(&v1alpha1.ImpVMClass{}, handler.EnqueueRequestsFromMapFunc(w.ofClass)).
		Watches(&corev1.Node{}, w.nodes()).
		Watches(&v1alpha1.ImpNode{}, w.impNodes()).
		WatchesRawSource(source.Func(func(ctx context.Context, q queue) error {
			r.Nodes.Heartbeats.Lead() // this controller may come to decide before imp-reachable's, which says so too
			r.Nodes.Heartbeats.Listen(func(string) { w.waiting(ctx, q) })
			return nil
		})).
		Complete(r)
}

// waker finds whom a change concerns.
type waker struct {
	cached client.Reader
	log    *slog.Logger
}

// list gives the VMs that opts select and that concerned picks. They are not to be changed.
func (w *waker) list(ctx context.Context, concerned func(*v1alpha1.ImpVM) bool, opts ...client.ListOption) []ctrl.Request {
	vms := &v1alpha1.ImpVMList{}
	if err := w.cached.List(ctx, vms, append(opts, client.UnsafeDisableDeepCopy)...); err != nil {
		w.log.Error("VMs not found in the cache", "error", err) // cannot happen once the cache is filled; lookAgain is the net
		return nil
	}
	var found []ctrl.Request
	for i := range vms.Items {
		if concerned(&vms.Items[i]) {
			found = append(found, ctrl.Request{NamespacedName: client.ObjectKeyFromObject(&vms.Items[i])})
		}
	}
	return found
}

func (w *waker) ofClass(ctx context.Context, class client.Object) []ctrl.Request {
	return w.list(ctx, func(vm *v1alpha1.ImpVM) bool { return !vmstate.Finished(vm) }, client.MatchingFields{IndexClass: class.GetName()})
}

// waiting wakes the VMs that have no node.
func (w *waker) waiting(ctx context.Context, q queue) {
	for _, request := range w.list(ctx, vmstate.Waiting) {
		q.Add(request)
	}
}

// on wakes the VMs on a node.
func (w *waker) on(ctx context.Context, node string, q queue) {
	for _, request := range w.list(ctx, func(vm *v1alpha1.ImpVM) bool { return vm.Status.NodeName == node }) {
		q.Add(request)
	}
}

// room wakes those that wait when a VM stops taking a part of a node's budget.
func (w *waker) room() handler.EventHandler {
	return handler.Funcs{
		UpdateFunc: func(ctx context.Context, e event.UpdateEvent, q queue) {
			before, now := e.ObjectOld.(*v1alpha1.ImpVM), e.ObjectNew.(*v1alpha1.ImpVM)
			if holds(before) && (!holds(now) || now.Status.NodeName != before.Status.NodeName) {
				w.waiting(ctx, q)
			}
		},
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, q queue) {
			if vm, ok := e.Object.(*v1alpha1.ImpVM); ok && holds(vm) {
				w.waiting(ctx, q)
			}
		},
	}
}

func (w *waker) nodes() handler.EventHandler {
	return handler.Funcs{
		CreateFunc: func(ctx context.Context, _ event.CreateEvent, q queue) { w.waiting(ctx, q) },
		UpdateFunc: func(ctx context.Context, e event.UpdateEvent, q queue) {
			before, now := e.ObjectOld.(*corev1.Node), e.ObjectNew.(*corev1.Node)
			if nodes.Changed(before, now) {
				w.waiting(ctx, q)
				w.on(ctx, now.Name, q) // a taint, or another boot, may be the proof that they are waiting for
			}
		},
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, q queue) {
			w.waiting(ctx, q)
			w.on(ctx, e.Object.GetName(), q)
		},
	}
}

func (w *waker) impNodes() handler.EventHandler {
	wake := func(ctx context.Context, q queue) { w.waiting(ctx, q) }
	return handler.Funcs{
		CreateFunc: func(ctx context.Context, _ event.CreateEvent, q queue) { wake(ctx, q) },
		UpdateFunc: func(ctx context.Context, e event.UpdateEvent, q queue) {
			if nodes.ImpChanged(e.ObjectOld.(*v1alpha1.ImpNode), e.ObjectNew.(*v1alpha1.ImpNode)) {
				wake(ctx, q)
			}
		},
		DeleteFunc: func(ctx context.Context, _ event.DeleteEvent, q queue) { wake(ctx, q) },
	}
}
