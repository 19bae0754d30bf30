package place

import (
	"context"
	"errors"
	"fmt"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/operator/address"
	"imp.dev/imp/internal/operator/statusapply"
	"imp.dev/imp/internal/operator/vmstate"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// reserve finds the address that the VM will have; nil without an error for a VM without a network. stop: it has to wait for one,
// and was told why.
func (r *Reconciler) reserve(ctx context.Context, p *pass) (seat *address.Reservation, stop bool, err error) {
	ref := p.vm.Spec.NetworkRef
	if ref == nil {
		return nil, false, nil
	}
	network := &v1alpha1.ImpNetwork{}
	err = r.Client.Get(ctx, client.ObjectKey{Namespace: p.vm.Namespace, Name: ref.Name}, network)
	if apierrors.IsNotFound(err) {
		r.waiting(p, v1alpha1.ReasonInvalidSpec, fmt.Sprintf(
			"spec.networkRef names ImpNetwork %q, which does not exist: create ImpNetwork %s/%s", ref.Name, p.vm.Namespace, ref.Name))
		return nil, true, nil
	}
	if err != nil {
		return nil, true, fmt.Errorf("reading network: %w", err)
	}
	if left := settleTime - p.now.Sub(network.CreationTimestamp.Time); neverSettled(network) && left > 0 {
		// Both were made together: no trouble, unless it lasts.
		p.scheduled(metav1.ConditionFalse, v1alpha1.ReasonPending, fmt.Sprintf("waiting for network %s/%s to be set up", network.Namespace, network.Name))
		p.again(left)
		return nil, true, nil
	}
	if problem := unusable(network); problem != "" {
		r.waiting(p, v1alpha1.ReasonNetworkSetupFailed, problem)
		return nil, true, nil
	}
	// From now on an address that becomes free starts another pass, even if this one looks a moment too early.
	r.waiters.add(p.vm)
	seat, err = r.Addresses.Reserve(ctx, p.vm, network)
	if f := (*fault.Error)(nil); errors.As(err, &f) {
		p.waits = errors.Is(err, address.ErrExhausted) || errors.Is(err, address.ErrTaken)
		r.waiting(p, string(f.Reason), f.Err.Error())
		return nil, true, nil
	}
	if err != nil {
		return nil, true, err
	}
	// What it may wait for from now on is a node.
	r.waiters.remove(client.ObjectKeyFromObject(p.vm))
	p.seat = seat
	return seat, false, nil
}

// settleTime is how long a network that was just made may take until it has a status.
const settleTime = 2 * time.Second

func neverSettled(network *v1alpha1.ImpNetwork) bool {
	return network.DeletionTimestamp == nil && meta.FindStatusCondition(network.Status.Conditions, v1alpha1.ConditionReady) == nil
}

// unusable tells why no VM can be given an address of the network now, in the network's own words; "" if one can.
func unusable(network *v1alpha1.ImpNetwork) string {
	name := "network " + network.Namespace + "/" + network.Name
	if network.DeletionTimestamp != nil {
		return name + " is being deleted"
	}
	ready := meta.FindStatusCondition(network.Status.Conditions, v1alpha1.ConditionReady)
	switch {
	case neverSettled(network):
		return name + " is not ready yet"
	case ready.Status != metav1.ConditionTrue:
		return fmt.Sprintf("%s is not ready: %s: %s", name, ready.Reason, ready.Message)
	}
	return ""
}

// take makes the claim for the VM, which is about to be bound, and enters the address into its status.
func (r *Reconciler) take(ctx context.Context, p *pass, seat *address.Reservation) error {
	where, err := r.where(ctx, p.vm)
	if err != nil {
		return err
	}
	if err := seat.Take(ctx, where); err != nil {
		if !statusapply.Definite(err) {
			p.seat = nil // it stays set aside: the claim may have been made
		}
		if f := (*fault.Error)(nil); errors.As(err, &f) {
			// It was taken since; the next pass finds that out at its beginning, and tells it.
			return fmt.Errorf("%w: %w", statusapply.ErrConflict, err)
		}
		return err
	}
	has := seat.Address()
	p.vm.Status.IP, p.vm.Status.Addresses = has.Address, []v1alpha1.VMAddress{has}
	p.claimed = true
	if waitedForNetwork(p.read) {
		p.tell(normal, v1alpha1.ReasonRecovered, "Placing", fmt.Sprintf(
			"has address %s of network %s/%s", has.Address, p.vm.Namespace, has.Network))
	}
	return nil
}

// where the VM is according to p.vm.
func (r *Reconciler) where(ctx context.Context, vm *v1alpha1.ImpVM) (address.Location, error) {
	where := address.Location{Node: vm.Status.NodeName, Assignment: vm.Status.Assignment}
	if where.Node == "" {
		return where, nil
	}
	node := &v1alpha1.ImpNode{}
	err := r.Client.Get(ctx, client.ObjectKey{Name: where.Node}, node)
	if client.IgnoreNotFound(err) != nil {
		return where, fmt.Errorf("reading ImpNode: %w", err)
	}
	where.VTEP = node.Status.Network.Address
	return where, nil
}

// keep sees to it that the claim of a VM that has an address is there and leads to where the VM is, or is about to be.
func (r *Reconciler) keep(ctx context.Context, p *pass) error {
	if len(p.vm.Status.Addresses) == 0 || p.claimed || vmstate.Finished(p.vm) {
		return nil
	}
	where, err := r.where(ctx, p.vm)
	if err != nil {
		return err
	}
	foreign, err := r.Addresses.Keep(ctx, p.vm, where)
	if err != nil {
		return err
	}
	note := r.notes.get(p.vm)
	if foreign == nil {
		note.foreign = ""
		return nil
	}
	if note.foreign == foreign.Spec.VM.UID {
		return nil
	}
	note.foreign = foreign.Spec.VM.UID
	message := fmt.Sprintf("address %s of network %s/%s is claimed by VM %s/%s as well: one of the two has to be deleted",
		foreign.Spec.Address, foreign.Spec.Network.Namespace, foreign.Spec.Network.Name, foreign.Spec.VM.Namespace, foreign.Spec.VM.Name)
	p.tell(warning, v1alpha1.ReasonAddressInUse, "Auditing", message)
	p.log.Error("two VMs have one address", "address", foreign.Spec.Address, "other", foreign.Spec.VM.UID)
	return nil
}

// letGo has the VM's claims say that it has no use for them any more.
func (r *Reconciler) letGo(ctx context.Context, p *pass, state v1alpha1.AddressState) error {
	if p.vm.Spec.NetworkRef == nil {
		return nil
	}
	network := &v1alpha1.ImpNetwork{}
	if len(p.vm.Status.Addresses) == 0 {
		key := client.ObjectKey{Namespace: p.vm.Namespace, Name: p.vm.Spec.NetworkRef.Name}
		if err := r.Client.Get(ctx, key, network); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("reading network: %w", err)
		}
	}
	return r.Addresses.LetGo(ctx, p.vm, network.UID, state)
}

// freed wakes those that wait for an address of the network, should there be one.
func (r *Reconciler) freed(ctx context.Context, network types.NamespacedName) {
	if r.waiters.none(network) {
		return
	}
	object := &v1alpha1.ImpNetwork{}
	if err := r.Client.Get(ctx, network, object); err != nil {
		return // its deletion, or the next look, starts their passes
	}
	count, free, err := r.Addresses.Free(ctx, object)
	if err != nil {
		r.Log.Error("free addresses not counted", "namespace", network.Namespace, "network", network.Name, "error", err)
		return
	}
	r.waiters.wake(network, count, free)
}

// afterwards, at the end of a pass: a VM that does not wait for an address any more, or could not use the one it might have had,
// lets the next have its turn.
func (r *Reconciler) afterwards(ctx context.Context, p *pass) {
	if p.seat != nil && !p.claimed {
		p.seat.Cancel()
		r.freed(ctx, networkOf(p.vm))
	}
	if !p.waits && p.vm.Spec.NetworkRef != nil {
		r.stopWaiting(ctx, client.ObjectKeyFromObject(p.vm))
	}
}

func (r *Reconciler) stopWaiting(ctx context.Context, vm types.NamespacedName) {
	if network, was := r.waiters.remove(vm); was {
		r.freed(ctx, network)
	}
}
