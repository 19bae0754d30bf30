// Package network is the writer imp-network: it gives an ImpNetwork what all its nodes have to agree on, tells whether VMs can be given
// addresses of it, counts them, and lets it go when no VM uses it any more.
//
//	create ──► finalizer ──► VNI claimed ──► MTU known? ──► overlap? ──► Ready
//	                                            │              │
//	                                        SettingUp    SubnetOverlap
//	delete ──► Deleting ──► in use? ──no──► quarantined claims, VNI, finalizer gone
//	                          └─ InUse: waits, and says for whom
//
// Beside it two smaller reconcilers: VNIs frees numbers whose network is gone, Ranges tells agents what guests may not reach.
package network

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/event"
	"imp.dev/imp/internal/ipam"
	"imp.dev/imp/internal/operator/address"
	"imp.dev/imp/internal/operator/statusapply"
	"imp.dev/imp/internal/operator/vmstate"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
)

// afterConflict is when to look again if the cache does not show the newer object before.
const afterConflict = time.Second

// Reconciler looks at one network at a time.
type Reconciler struct {
	// Client reads from the cache and writes; Live reads from the API server.
	Client client.Client
	Live   client.Reader
	Claims *address.Claims
	Survey *Survey
	Clock  clock.PassiveClock
	Events event.Recorder
	Log    *slog.Logger
}

// Reconcile implements reconcile.Reconciler.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	read := &v1alpha1.ImpNetwork{}
	err := r.Client.Get(ctx, req.NamespacedName, read)
	if apierrors.IsNotFound(err) {
		return ctrl.Result{}, nil
	}
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("reading network: %w", err)
	}
	if read.DeletionTimestamp != nil {
		err = r.leave(ctx, read)
	} else {
		err = r.settle(ctx, read)
	}
	switch {
	case errors.Is(err, statusapply.ErrConflict):
		return ctrl.Result{RequeueAfter: afterConflict}, nil
	case apierrors.IsNotFound(err):
		return ctrl.Result{}, nil // it is gone; its deletion will be seen
	}
	return ctrl.Result{}, err
}

// settle gives the network what it needs, and tells how it is.
func (r *Reconciler) settle(ctx context.Context, read *v1alpha1.ImpNetwork) error {
	if !controllerutil.ContainsFinalizer(read, v1alpha1.NetworkFinalizer) {
		// First of all: what is claimed below must not outlive the network.
		finalizers := append(slices.Clone(read.Finalizers), v1alpha1.NetworkFinalizer)
		if err := r.patchFinalizers(ctx, read, finalizers); err != nil {
			return err
		}
	}
	f := facts{now: r.Clock.Now(), vni: read.Status.VNI}
	claims, err := r.claims(ctx, read.UID)
	if err != nil {
		return err
	}
	f.count(claims)
	if f.pool, f.problem = ipam.Parse(read.Spec.Subnet, read.Spec.Gateway); f.problem == nil {
		if f.vni, err = r.claimVNI(ctx, read); err != nil {
			return err
		}
		seen, err := r.Survey.Look(ctx)
		if err != nil {
			return err
		}
		f.mtu, f.overlaps = seen.MTU, f.pool.Overlapping(seen.Ranges)
	}
	return r.write(ctx, read, f)
}

// leave lets a deleted network go once nobody uses it.
func (r *Reconciler) leave(ctx context.Context, read *v1alpha1.ImpNetwork) error {
	if !controllerutil.ContainsFinalizer(read, v1alpha1.NetworkFinalizer) {
		return nil
	}
	f := facts{now: r.Clock.Now(), vni: read.Status.VNI}
	f.pool, f.problem = ipam.Parse(read.Spec.Subnet, read.Spec.Gateway)
	claims, err := r.claims(ctx, read.UID)
	if err != nil {
		return err
	}
	f.count(claims)
	if f.users, err = r.users(ctx, read, claims); err != nil {
		return err
	}
	if len(f.users) > 0 {
		return r.write(ctx, read, f)
	}
	// Whoever claims from now on sees the deletion afterwards, and takes the claim back; what was claimed before is seen here.
	live := &v1alpha1.ImpAddressList{}
	if err := r.Live.List(ctx, live, client.MatchingFields{address.IndexNetwork: string(read.UID)}); err != nil {
		return fmt.Errorf("reading the network's claims: %w", err)
	}
	for i := range live.Items {
		claim := &live.Items[i]
		if claim.Status.State != v1alpha1.AddressQuarantined {
			return fmt.Errorf("claim %s was made just now: %w", claim.Name, statusapply.ErrConflict)
		}
		if err := r.Claims.Remove(ctx, claim); err != nil {
			return err
		}
	}
	if err := r.freeVNI(ctx, read); err != nil {
		return err
	}
	finalizers := slices.DeleteFunc(slices.Clone(read.Finalizers), func(f string) bool { return f == v1alpha1.NetworkFinalizer })
	if err := r.patchFinalizers(ctx, read, finalizers); err != nil {
		return err
	}
	r.Log.Info("network let go", "namespace", read.Namespace, "name", read.Name, "network", read.UID)
	return nil
}

func (r *Reconciler) claims(ctx context.Context, network types.UID) ([]v1alpha1.ImpAddress, error) {
	list := &v1alpha1.ImpAddressList{}
	err := r.Client.List(ctx, list, client.MatchingFields{address.IndexNetwork: string(network)}, client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil, fmt.Errorf("reading the network's claims: %w", err)
	}
	return list.Items, nil
}

// users of the network, as a person would name them: VMs that have an address of it, and deleted ones that may still run with theirs.
func (r *Reconciler) users(ctx context.Context, network *v1alpha1.ImpNetwork, claims []v1alpha1.ImpAddress) ([]string, error) {
	vms := &v1alpha1.ImpVMList{}
	if err := r.Client.List(ctx, vms, client.InNamespace(network.Namespace), client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("reading VMs: %w", err)
	}
	found := map[types.UID]string{}
	for i := range claims {
		switch spec, status := claims[i].Spec, claims[i].Status; status.State {
		case v1alpha1.AddressBound:
			found[spec.VM.UID] = spec.VM.Name
		case v1alpha1.AddressHeld:
			found[spec.VM.UID] = fmt.Sprintf("%s (deleted; node %s has not said that nothing of it is left)", spec.VM.Name, status.Node)
		}
	}
	for i := range vms.Items { // should its claim be missing
		if vm := &vms.Items[i]; address.Of(vm, network.UID) != "" && !vmstate.Finished(vm) {
			found[vm.UID] = vm.Name
		}
	}
	names := make([]string, 0, len(found))
	for _, name := range found {
		names = append(names, name)
	}
	slices.Sort(names)
	return names, nil
}

// write applies what the facts say of the network, if that is something else than before.
func (r *Reconciler) write(ctx context.Context, read *v1alpha1.ImpNetwork, f facts) error {
	network := read.DeepCopy()
	f.settle(network)
	has, err := statusapply.Network(read)
	if err != nil {
		return err
	}
	want, err := statusapply.Network(network)
	if err != nil || statusapply.Equal(has, want) {
		return err
	}
	if err := statusapply.Apply(ctx, r.Client, network, v1alpha1.ManagerNetwork, want); err != nil {
		return err
	}
	for _, e := range happenings(read, network) {
		r.Events.Record(e)
		r.Log.Info("network changed", "namespace", network.Namespace, "name", network.Name, "network", network.UID,
			"reason", e.Reason, "message", e.Message)
	}
	return nil
}

// patchFinalizers writes at once, and only to the object as it was read; read becomes what it is afterwards.
func (r *Reconciler) patchFinalizers(ctx context.Context, read *v1alpha1.ImpNetwork, finalizers []string) error {
	before := read.DeepCopy()
	read.Finalizers = finalizers
	patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
	err := r.Client.Patch(ctx, read, patch, client.FieldOwner(v1alpha1.ManagerNetwork))
	if apierrors.IsNotFound(err) {
		return err
	}
	return statusapply.Explain(err)
}
