package address

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/ipam"
	"imp.dev/imp/internal/network"
	"imp.dev/imp/internal/operator/statusapply"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// stage of the faults here.
const stage = "claiming an address"

// tries bounds how many addresses one pass finds claimed by another operator before it looks anew.
const tries = 16

// ErrExhausted is in the fault that says that every address of the network is taken.
var ErrExhausted = errors.New("pool exhausted")

// ErrTaken is in the fault that says that the one address the VM can have is somebody else's.
var ErrTaken = errors.New("address in use")

// Reservation is an address that no other VM of this process is given. It becomes a claim by Take; Cancel gives it up.
type Reservation struct {
	claims  *Claims
	vm      *v1alpha1.ImpVM
	network *v1alpha1.ImpNetwork
	pool    ipam.Pool
	// claim as it is, or without a resourceVersion as it will be made.
	claim *v1alpha1.ImpAddress
	// fixed says that no other address will do.
	fixed bool
	// replaces is the quarantined claim of an earlier VM of the same name.
	replaces *v1alpha1.ImpAddress
}

// Reserve finds the address of a VM in its network: the one it has, the one it asks for, or a free one. It writes nothing. What
// keeps it from having one is a fault whose cause is the message for the user.
func (c *Claims) Reserve(ctx context.Context, vm *v1alpha1.ImpVM, net *v1alpha1.ImpNetwork) (*Reservation, error) {
	pool, err := ipam.Parse(net.Spec.Subnet, net.Spec.Gateway)
	if err != nil {
		return nil, fault.New(fault.NetworkSetupFailed, stage, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.prime(ctx); err != nil {
		return nil, err
	}
	taken, err := c.of(ctx, net.UID)
	if err != nil {
		return nil, err
	}
	r := &Reservation{claims: c, vm: vm, network: net, pool: pool}
	if err := r.choose(taken); err != nil {
		return nil, err
	}
	if r.claim.ResourceVersion == "" {
		c.remember(r.claim)
	}
	return r, nil
}

// Free is how many addresses of the network nobody has, and whether address is one of them.
func (c *Claims) Free(ctx context.Context, net *v1alpha1.ImpNetwork) (count int, free func(address string) bool, err error) {
	pool, err := ipam.Parse(net.Spec.Subnet, net.Spec.Gateway)
	if err != nil {
		return 0, nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	taken, err := c.of(ctx, net.UID)
	if err != nil {
		return 0, nil, err
	}
	return int(pool.Capacity()) - len(taken), func(s string) bool {
		address, err := netip.ParseAddr(s)
		return err == nil && taken[address] == nil
	}, nil
}

// choose the claim, knowing what is taken.
func (r *Reservation) choose(taken map[netip.Addr]*v1alpha1.ImpAddress) error {
	if has := Of(r.vm, r.network.UID); has != "" {
		return r.fix(has, taken)
	}
	if mine := r.own(taken); mine != nil {
		r.claim = mine
		return nil
	}
	if want := r.vm.Spec.Address; want != "" {
		return r.fix(want, taken)
	}
	address, ok := r.pool.Pick(string(r.vm.UID), func(a netip.Addr) bool { return taken[a] != nil })
	if ok {
		r.claim = r.made(address)
		return nil
	}
	for _, claim := range taken {
		if r.namesake(claim) {
			r.claim, r.replaces = r.made(netip.MustParseAddr(claim.Spec.Address)), claim
			return nil
		}
	}
	return r.exhausted(taken)
}

// fix the address that the VM must have.
func (r *Reservation) fix(want string, taken map[netip.Addr]*v1alpha1.ImpAddress) error {
	address, err := netip.ParseAddr(want)
	if err == nil {
		err = r.pool.Check(address)
	}
	if err != nil {
		return fault.Errorf(fault.InvalidSpec, stage, "spec.address %s %w: name another, or leave it out for a free one", want, err)
	}
	r.fixed = true
	switch claim := taken[address]; {
	case claim == nil:
		r.claim = r.made(address)
	case claim.Spec.VM.UID == r.vm.UID:
		r.claim = claim
	case r.namesake(claim):
		r.claim, r.replaces = r.made(address), claim
	default:
		return inUse(claim)
	}
	return nil
}

// own is a claim that was made for the VM and has not come to its status: what was claimed first, if there are several.
func (r *Reservation) own(taken map[netip.Addr]*v1alpha1.ImpAddress) *v1alpha1.ImpAddress {
	var found *v1alpha1.ImpAddress
	for _, claim := range taken {
		if claim.Spec.VM.UID != r.vm.UID || r.vm.Spec.Address != "" && r.vm.Spec.Address != claim.Spec.Address {
			continue
		}
		if found == nil || claim.CreationTimestamp.Before(&found.CreationTimestamp) ||
			claim.CreationTimestamp.Equal(&found.CreationTimestamp) && claim.Name < found.Name {
			found = claim
		}
	}
	return found
}

// namesake says that the claim is in quarantine after a VM of the same name: whoever deletes a VM and makes it anew has not to
// wait. The MAC is another, so the new one is announced to those who remember the old.
func (r *Reservation) namesake(claim *v1alpha1.ImpAddress) bool {
	return claim.Status.State == v1alpha1.AddressQuarantined && claim.ResourceVersion != "" &&
		claim.Spec.VM.Namespace == r.vm.Namespace && claim.Spec.VM.Name == r.vm.Name
}

func (r *Reservation) made(address netip.Addr) *v1alpha1.ImpAddress {
	return claimOf(r.vm, v1alpha1.AddressNetwork{Namespace: r.network.Namespace, Name: r.network.Name, UID: r.network.UID}, address.String())
}

func claimOf(vm *v1alpha1.ImpVM, net v1alpha1.AddressNetwork, address string) *v1alpha1.ImpAddress {
	return &v1alpha1.ImpAddress{
		ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.AddressName(net.UID, address)},
		Spec: v1alpha1.ImpAddressSpec{
			Network: net, VM: v1alpha1.AddressVM{Namespace: vm.Namespace, Name: vm.Name, UID: vm.UID},
			Address: address, MAC: network.GuestMAC(string(vm.UID), 0).String(),
		},
		Status: v1alpha1.ImpAddressStatus{State: v1alpha1.AddressBound},
	}
}

// exhausted counts what the addresses are taken by.
func (r *Reservation) exhausted(taken map[netip.Addr]*v1alpha1.ImpAddress) error {
	n := Counts{}
	for _, claim := range taken {
		n.Add(claim)
	}
	capacity := r.pool.Capacity()
	return fault.Errorf(fault.NetworkSetupFailed, stage, "%w: %d of %d addresses of network %s/%s are taken (%d used, %d held, %d quarantined)",
		ErrExhausted, capacity, capacity, r.network.Namespace, r.network.Name, n.Used, n.Held, n.Quarantined)
}

// inUse tells whose the address is.
func inUse(claim *v1alpha1.ImpAddress) error {
	spec, status := claim.Spec, claim.Status
	whose := fmt.Sprintf("VM %s/%s has it", spec.VM.Namespace, spec.VM.Name)
	switch status.State {
	case v1alpha1.AddressHeld:
		whose = fmt.Sprintf("VM %s/%s had it and was deleted, and node %s has not said that nothing of it is left",
			spec.VM.Namespace, spec.VM.Name, status.Node)
	case v1alpha1.AddressQuarantined:
		whose = fmt.Sprintf("VM %s/%s had it until %s, and it is not given out again at once",
			spec.VM.Namespace, spec.VM.Name, status.Since.UTC().Format(time.RFC3339))
	}
	return fault.Errorf(fault.NetworkSetupFailed, stage, "%w: %s of network %s/%s: %s",
		ErrTaken, spec.Address, spec.Network.Namespace, spec.Network.Name, whose)
}

// Address as the VM's status will have it.
func (r *Reservation) Address() v1alpha1.VMAddress {
	return v1alpha1.VMAddress{
		Address: r.claim.Spec.Address, Prefix: int32(r.pool.Subnet().Bits()), MAC: r.claim.Spec.MAC,
		Network: r.network.Name, NetworkUID: r.network.UID,
	}
}

// Cancel gives up what has not become a claim.
func (r *Reservation) Cancel() {
	if r.claim.ResourceVersion == "" {
		r.claims.forget(r.claim)
	}
}

// Take makes the claim, or takes up the one there is, for a VM that is about to be bound at where. Afterwards Address is what the
// VM has; it may be another one than was reserved. An error that is not statusapply.Definite leaves the reservation, so that the next
// pass finds out what came of it.
func (r *Reservation) Take(ctx context.Context, where Location) error {
	for range tries {
		if r.claim.ResourceVersion != "" {
			return r.claims.bind(ctx, r.claim, where)
		}
		again, err := r.create(ctx, where)
		if err != nil && statusapply.Definite(err) {
			r.Cancel()
		}
		if err != nil || !again {
			return err
		}
	}
	r.Cancel()
	return fmt.Errorf("claiming an address: %d in a row were claimed by somebody else: %w", tries, statusapply.ErrConflict)
}

// create the claim. again says that r.claim is another one now.
func (r *Reservation) create(ctx context.Context, where Location) (again bool, err error) {
	if r.replaces != nil {
		if err := r.claims.Remove(ctx, r.replaces); err != nil {
			return false, err
		}
		r.replaces = nil
	}
	claim, err := r.claims.create(ctx, r.claim, where)
	if apierrors.IsAlreadyExists(err) {
		return true, r.elsewhere(ctx)
	}
	if err != nil {
		return false, fmt.Errorf("claiming %s: %w", r.claim.Spec.Address, err)
	}
	r.claim = claim
	return false, r.stillThere(ctx)
}

// elsewhere: the address was claimed since the cache showed it free. If not by this VM, another one is tried.
func (r *Reservation) elsewhere(ctx context.Context) error {
	live, err := r.claims.live(ctx, r.claim.Name)
	switch {
	case err != nil:
		return err
	case live == nil:
		return fmt.Errorf("claiming %s: %w", r.claim.Spec.Address, statusapply.ErrConflict)
	}
	r.claims.wrote(live)
	if live.Spec.VM.UID == r.vm.UID && live.Spec.Network.UID == r.network.UID {
		r.claim = live
		return nil
	}
	if r.fixed {
		return inUse(live)
	}
	next, err := r.claims.Reserve(ctx, r.vm, r.network)
	if err != nil {
		return err
	}
	r.claim, r.replaces = next.claim, next.replaces
	return nil
}

// stillThere: a network that is being deleted may have counted its claims before this one was made, and found none. It is asked for
// after the claim was made: either the claim was counted, or the deletion is seen here.
func (r *Reservation) stillThere(ctx context.Context) error {
	live := &v1alpha1.ImpNetwork{}
	err := r.claims.Live.Get(ctx, client.ObjectKeyFromObject(r.network), live)
	switch {
	case err != nil && !apierrors.IsNotFound(err):
		return fmt.Errorf("reading network: %w", err)
	case err == nil && live.UID == r.network.UID && live.DeletionTimestamp == nil:
		return nil
	}
	if err := r.claims.Remove(ctx, r.claim); err != nil {
		return err
	}
	return fmt.Errorf("claiming %s: its network is being deleted: %w", r.claim.Spec.Address, statusapply.ErrConflict)
}

// Of gives the address that the VM's status names in the network; "" for none.
func Of(vm *v1alpha1.ImpVM, network types.UID) string {
	for _, address := range vm.Status.Addresses {
		if address.NetworkUID == network {
			return address.Address
		}
	}
	return ""
}
