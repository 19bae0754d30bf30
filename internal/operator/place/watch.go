package place

import (
	"context"
	"log/slog"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/operator/nodes"
	"imp.dev/imp/internal/operator/vmstate"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// Indexes of the cache: VMs by the class and by the network they name.
const (
	IndexClass   = "spec.classRef.name"
	IndexNetwork = "spec.networkRef.name"
)

type queue = workqueue.TypedRateLimitingInterface[ctrl.Request]

// SetupWithManager registers the reconciler and what wakes it. Leases wake nobody when they are renewed, only when a node comes
// to be heard.
func (r *Reconciler) SetupWithManager(mgr ctrl.Manager, concurrency int) error {
	w := &waker{cached: mgr.GetClient(), waiters: &r.waiters, log: r.Log}
	return ctrl.NewControllerManagedBy(mgr).Named("place").
		WithOptions(controller.Options{MaxConcurrentReconciles: concurrency}).
		For(&v1alpha1.ImpVM{}).
		Watches(&v1alpha1.ImpVM{}, w.room()).
		Watches(&v1alpha1.ImpVMClass{}, handler.EnqueueRequestsFromMapFunc(w.ofClass)).
		Watches(&v1alpha1.ImpNetwork{}, w.networks()).
		Watches(&v1alpha1.ImpAddress{}, r.claims()).
		Watches(&corev1.Node{}, w.nodes()).
		Watches(&v1alpha1.ImpNode{}, w.impNodes()).
		WatchesRawSource(source.Func(func(ctx context.Context, q queue) error {
			r.waiters.start(func(vm types.NamespacedName) { q.Add(ctrl.Request{NamespacedName: vm}) })
			r.Nodes.Heartbeats.Lead() // this controller may come to decide before imp-reachable's, which says so too
			r.Nodes.Heartbeats.Listen(func(string) { w.waiting(ctx, q) })
			return nil
		})).
		Complete(r)
}

// waker finds whom a change concerns.
type waker struct {
	cached  client.Reader
	waiters *waiters
	log     *slog.Logger
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

// waiting wakes the VMs that have no node, but for those that first of all need an address.
func (w *waker) waiting(ctx context.Context, q queue) {
	concerned := func(vm *v1alpha1.ImpVM) bool { return vmstate.Waiting(vm) && !w.waiters.has(vm) }
	for _, request := range w.list(ctx, concerned) {
		q.Add(request)
	}
}

// networks wakes the VMs that wait when their network comes, goes, or says something else of itself. How many of its addresses are
// taken is no news.
func (w *waker) networks() handler.EventHandler {
	wake := func(ctx context.Context, network client.Object, q queue) {
		for _, request := range w.list(ctx, vmstate.Waiting, client.InNamespace(network.GetNamespace()),
			client.MatchingFields{IndexNetwork: network.GetName()}) {
			q.Add(request)
		}
	}
	return handler.Funcs{
		CreateFunc: func(ctx context.Context, e event.CreateEvent, q queue) { wake(ctx, e.Object, q) },
		UpdateFunc: func(ctx context.Context, e event.UpdateEvent, q queue) {
			if unusable(e.ObjectOld.(*v1alpha1.ImpNetwork)) != unusable(e.ObjectNew.(*v1alpha1.ImpNetwork)) {
				wake(ctx, e.ObjectNew, q)
			}
		},
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, q queue) { wake(ctx, e.Object, q) },
	}
}

// claims brings the VM whose claim was changed or deleted, and those that an address is free for now.
func (r *Reconciler) claims() handler.EventHandler {
	bring := func(claim *v1alpha1.ImpAddress, q queue) {
		q.Add(ctrl.Request{NamespacedName: types.NamespacedName{Namespace: claim.Spec.VM.Namespace, Name: claim.Spec.VM.Name}})
	}
	return handler.Funcs{
		UpdateFunc: func(_ context.Context, e event.UpdateEvent, q queue) {
			before, now := e.ObjectOld.(*v1alpha1.ImpAddress), e.ObjectNew.(*v1alpha1.ImpAddress)
			if before.Status != now.Status {
				bring(now, q)
			}
		},
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, q queue) {
			claim, ok := e.Object.(*v1alpha1.ImpAddress)
			if !ok {
				return
			}
			r.Addresses.Gone(claim)
			bring(claim, q)
			r.freed(ctx, types.NamespacedName{Namespace: claim.Spec.Network.Namespace, Name: claim.Spec.Network.Name})
		},
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
			before, now := e.ObjectOld.(*v1alpha1.ImpNode), e.ObjectNew.(*v1alpha1.ImpNode)
			if nodes.ImpChanged(before, now) {
				wake(ctx, q)
			}
			if before.Status.Network.Address != now.Status.Network.Address {
				w.on(ctx, now.Name, q) // their claims have to lead there
			}
		},
		DeleteFunc: func(ctx context.Context, _ event.DeleteEvent, q queue) { wake(ctx, q) },
	}
}
