package network

import (
	"context"
	"errors"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/operator/nodes"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
)

// countEvery is how long claims gather before they are counted: a thousand VMs that come at once are a few writes, not a thousand.
const countEvery = time.Second

type queue = workqueue.TypedRateLimitingInterface[ctrl.Request]

// SetupWithManager registers the reconcilers of this folder and what wakes them.
func SetupWithManager(mgr ctrl.Manager, r *Reconciler, vnis *VNIs, ranges *Ranges) error {
	return errors.Join(r.setup(mgr), vnis.setup(mgr), ranges.setup(mgr))
}

func (r *Reconciler) setup(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).Named("network").
		For(&v1alpha1.ImpNetwork{}).
		Watches(&v1alpha1.ImpAddress{}, counted()).
		Watches(&corev1.Node{}, whenMoved(r.all)).
		Watches(&v1alpha1.ImpNode{}, whenImpMoved(r.all)).
		Watches(&networkingv1.ServiceCIDR{}, handler.EnqueueRequestsFromMapFunc(
			func(ctx context.Context, _ client.Object) []ctrl.Request { return r.all(ctx) })).
		Complete(r)
}

// all networks: an address of the cluster that comes or goes may be in any of them.
func (r *Reconciler) all(ctx context.Context) []ctrl.Request {
	networks := &v1alpha1.ImpNetworkList{}
	if err := r.Client.List(ctx, networks, client.UnsafeDisableDeepCopy); err != nil {
		r.Log.Error("networks not found in the cache", "error", err) // cannot happen once the cache is filled
		return nil
	}
	found := make([]ctrl.Request, len(networks.Items))
	for i := range networks.Items {
		found[i].NamespacedName = client.ObjectKeyFromObject(&networks.Items[i])
	}
	return found
}

// counted brings the network of a claim that comes, goes or changes its state, a moment later: the queue keeps one request of each
// network, and the earliest of its times.
func counted() handler.EventHandler {
	later := func(o client.Object, q queue) {
		if claim, ok := o.(*v1alpha1.ImpAddress); ok {
			network := claim.Spec.Network
			q.AddAfter(ctrl.Request{NamespacedName: types.NamespacedName{Namespace: network.Namespace, Name: network.Name}}, countEvery)
		}
	}
	return handler.Funcs{
		CreateFunc: func(_ context.Context, e event.CreateEvent, q queue) { later(e.Object, q) },
		UpdateFunc: func(_ context.Context, e event.UpdateEvent, q queue) {
			if e.ObjectOld.(*v1alpha1.ImpAddress).Status.State != e.ObjectNew.(*v1alpha1.ImpAddress).Status.State {
				later(e.ObjectNew, q)
			}
		},
		DeleteFunc: func(_ context.Context, e event.DeleteEvent, q queue) { later(e.Object, q) },
	}
}

// whenMoved brings whom when a node comes, goes, or has other addresses.
func whenMoved(whom func(context.Context) []ctrl.Request) handler.EventHandler {
	return whenChanged(whom, func(before, now client.Object) bool { return nodes.Moved(before.(*corev1.Node), now.(*corev1.Node)) })
}

// whenImpMoved is whenMoved for what agents tell.
func whenImpMoved(whom func(context.Context) []ctrl.Request) handler.EventHandler {
	return whenChanged(whom, func(before, now client.Object) bool {
		return nodes.ImpMoved(before.(*v1alpha1.ImpNode), now.(*v1alpha1.ImpNode))
	})
}

func whenChanged(whom func(context.Context) []ctrl.Request, changed func(before, now client.Object) bool) handler.EventHandler {
	bring := func(ctx context.Context, q queue) {
		for _, request := range whom(ctx) {
			q.Add(request)
		}
	}
	return handler.Funcs{
		CreateFunc: func(ctx context.Context, _ event.CreateEvent, q queue) { bring(ctx, q) },
		UpdateFunc: func(ctx context.Context, e event.UpdateEvent, q queue) {
			if changed(e.ObjectOld, e.ObjectNew) {
				bring(ctx, q)
			}
		},
		DeleteFunc: func(ctx context.Context, _ event.DeleteEvent, q queue) { bring(ctx, q) },
	}
}

func (v *VNIs) setup(mgr ctrl.Manager) error {
	claims := builder.WithPredicates(predicate.NewPredicateFuncs(func(o client.Object) bool {
		_, ok := numberOf(o.GetName())
		return ok && o.GetNamespace() == v1alpha1.SystemNamespace
	}))
	return ctrl.NewControllerManagedBy(mgr).Named("vni").
		For(&coordinationv1.Lease{}, claims).
		Watches(&v1alpha1.ImpNetwork{}, handler.Funcs{
			UpdateFunc: func(ctx context.Context, e event.UpdateEvent, q queue) {
				if e.ObjectOld.(*v1alpha1.ImpNetwork).Status.VNI != e.ObjectNew.(*v1alpha1.ImpNetwork).Status.VNI {
					v.of(ctx, e.ObjectNew.GetUID(), q)
				}
			},
			DeleteFunc: func(ctx context.Context, e event.DeleteEvent, q queue) { v.of(ctx, e.Object.GetUID(), q) },
		}).
		Complete(v)
}

// of brings the claims that the network holds.
func (v *VNIs) of(ctx context.Context, network types.UID, q queue) {
	held, err := holders(ctx, v.Client)
	if err != nil {
		v.Log.Error("claims of VNIs not found in the cache", "error", err) // cannot happen once the cache is filled
		return
	}
	for number, holder := range held {
		if holder == network {
			q.Add(ctrl.Request{NamespacedName: types.NamespacedName{Namespace: v1alpha1.SystemNamespace, Name: leaseName(number)}})
		}
	}
}

func (r *Ranges) setup(mgr ctrl.Manager) error {
	one := func(context.Context) []ctrl.Request { return []ctrl.Request{{NamespacedName: rangesKey()}} }
	return ctrl.NewControllerManagedBy(mgr).Named("ranges").
		Watches(&corev1.ConfigMap{}, &handler.EnqueueRequestForObject{}, builder.WithPredicates(predicate.NewPredicateFuncs(
			func(o client.Object) bool { return client.ObjectKeyFromObject(o) == rangesKey() }))).
		Watches(&corev1.Node{}, whenMoved(one)).
		Watches(&v1alpha1.ImpNode{}, whenImpMoved(one)).
		Watches(&networkingv1.ServiceCIDR{}, handler.EnqueueRequestsFromMapFunc(
			func(ctx context.Context, _ client.Object) []ctrl.Request { return one(ctx) })).
		Complete(r)
}
