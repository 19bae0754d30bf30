package address

import (
	"context"
	"fmt"

	"imp.dev/imp/api/v1alpha1"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// create makes a claim, bound at where.
func (c *Claims) create(ctx context.Context, claim *v1alpha1.ImpAddress, where Location) (*v1alpha1.ImpAddress, error) {
	made := claim.DeepCopy()
	made.Status = bound(where, claim)
	made.Status.Since = c.now()
	if err := c.Client.Create(ctx, made, client.FieldOwner(manager)); err != nil {
		return nil, err
	}
	c.wrote(made)
	return made, nil
}

// bind has the claim say that its VM is at where.
func (c *Claims) bind(ctx context.Context, claim *v1alpha1.ImpAddress, where Location) error {
	return c.write(ctx, claim, bound(where, claim))
}

// bound is the status of a claim whose VM is at where. An address in the overlay that is not known at the moment stays as it was.
func bound(where Location, claim *v1alpha1.ImpAddress) v1alpha1.ImpAddressStatus {
	if where.Node != "" && where.VTEP == "" && where.Node == claim.Status.Node {
		where.VTEP = claim.Status.VTEP
	}
	return v1alpha1.ImpAddressStatus{
		State: v1alpha1.AddressBound, Node: where.Node, Assignment: where.Assignment, VTEP: where.VTEP,
	}
}

// Keep sees to it that what a VM's status says it has is claimed for it and leads to where it is. A claim that somebody deleted is made
// again. One that is another VM's is given back: two VMs have one address, and nothing here can mend that.
func (c *Claims) Keep(ctx context.Context, vm *v1alpha1.ImpVM, where Location) (foreign *v1alpha1.ImpAddress, err error) {
	for _, has := range vm.Status.Addresses {
		claim, err := c.get(ctx, v1alpha1.AddressName(has.NetworkUID, has.Address))
		if err != nil {
			return nil, err
		}
		if claim == nil {
			net := v1alpha1.AddressNetwork{Namespace: vm.Namespace, Name: has.Network, UID: has.NetworkUID}
			claim, err = c.again(ctx, claimOf(vm, net, has.Address), where)
			if err != nil {
				return nil, err
			}
		}
		if claim.Spec.VM.UID != vm.UID {
			foreign = claim
			continue
		}
		if err := c.bind(ctx, claim, where); err != nil {
			return nil, err
		}
	}
	return foreign, nil
}

// again makes a claim that is missing, or finds whose it is.
func (c *Claims) again(ctx context.Context, claim *v1alpha1.ImpAddress, where Location) (*v1alpha1.ImpAddress, error) {
	made, err := c.create(ctx, claim, where)
	if !apierrors.IsAlreadyExists(err) {
		if err != nil {
			return nil, fmt.Errorf("claiming %s again: %w", claim.Spec.Address, err)
		}
		return made, nil
	}
	live, err := c.live(ctx, claim.Name)
	if err != nil {
		return nil, err
	}
	if live == nil {
		return nil, explain("claiming again", claim.Name, apierrors.NewNotFound(v1alpha1.GroupVersion.WithResource("impaddresses").GroupResource(), claim.Name))
	}
	c.wrote(live)
	return live, nil
}

// LetGo has the VM's claims say that it has no use for them any more: Quarantined, or Held where something of it may still run.
// network is the UID of the network it names, "" if there is none; it is needed for a claim that has not come to the VM's status.
func (c *Claims) LetGo(ctx context.Context, vm *v1alpha1.ImpVM, network types.UID, state v1alpha1.AddressState) error {
	claims, err := c.ofVM(ctx, vm, network)
	if err != nil {
		return err
	}
	for _, claim := range claims {
		if claim.Spec.VM.UID != vm.UID {
			continue
		}
		status := claim.Status
		switch {
		case state == v1alpha1.AddressQuarantined:
			status = quarantined(status)
		case status.State == v1alpha1.AddressBound:
			status.State, status.Node, status.Assignment = state, vm.Status.NodeName, vm.Status.Assignment
		}
		if err := c.write(ctx, claim, status); err != nil {
			return err
		}
	}
	return nil
}

// quarantined leads nowhere: nodes forget whom the address reached.
func quarantined(status v1alpha1.ImpAddressStatus) v1alpha1.ImpAddressStatus {
	status.State, status.Node, status.VTEP = v1alpha1.AddressQuarantined, "", ""
	return status
}

// ofVM gives the claims that the VM's status names, or those that were made for it and have not come there.
func (c *Claims) ofVM(ctx context.Context, vm *v1alpha1.ImpVM, network types.UID) ([]*v1alpha1.ImpAddress, error) {
	var found []*v1alpha1.ImpAddress
	for _, has := range vm.Status.Addresses {
		claim, err := c.get(ctx, v1alpha1.AddressName(has.NetworkUID, has.Address))
		if err != nil {
			return nil, err
		}
		if claim != nil {
			found = append(found, claim)
		}
	}
	if len(vm.Status.Addresses) > 0 || network == "" {
		return found, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	claims, err := c.of(ctx, network)
	if err != nil {
		return nil, err
	}
	for _, claim := range claims {
		if claim.Spec.VM.UID == vm.UID && claim.ResourceVersion != "" {
			found = append(found, claim)
		}
	}
	return found, nil
}

// Counts of a network's claims.
type Counts struct{ Used, Held, Quarantined int64 }

// Add counts one more.
func (n *Counts) Add(claim *v1alpha1.ImpAddress) {
	switch claim.Status.State {
	case v1alpha1.AddressHeld:
		n.Held++
	case v1alpha1.AddressQuarantined:
		n.Quarantined++
	default:
		n.Used++
	}
}
