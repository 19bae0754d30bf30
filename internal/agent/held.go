package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/agent/translate"
	"imp.dev/imp/internal/machine"
)

// A VM that was deleted while its node was silent has no object any more that could carry the order to remove it. The claim of its
// address carries it: state Held, with node and assignment. Its agent removes the VM and says so in releasedAssignment, and then the
// operator lets the address go.

// heldIndex finds, in the cache, the Held claims of the VMs of one name.
const heldIndex = "held-vm"

// heldFor is the index function: nothing for a claim that is no order.
func heldFor(o client.Object) []string {
	c, ok := o.(*v1alpha1.ImpAddress)
	if !ok || c.Status.State != v1alpha1.AddressHeld {
		return nil
	}
	return []string{c.Spec.VM.Namespace + "/" + c.Spec.VM.Name}
}

// vmOfClaim has the VM of a Held claim looked at.
func vmOfClaim(_ context.Context, o client.Object) []reconcile.Request {
	if len(heldFor(o)) == 0 {
		return nil
	}
	vm := o.(*v1alpha1.ImpAddress).Spec.VM
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: vm.Namespace, Name: vm.Name}}}
}

// heldClaims gives the Held claims on this node of the VMs of that name, by the VM's UID.
func (a *Agent) heldClaims(ctx context.Context, name types.NamespacedName) (map[string][]*v1alpha1.ImpAddress, error) {
	list := &v1alpha1.ImpAddressList{}
	if err := a.cache.List(ctx, list, client.MatchingFields{heldIndex: name.Namespace + "/" + name.Name}); err != nil {
		return nil, fmt.Errorf("reading claims: %w", err)
	}
	out := map[string][]*v1alpha1.ImpAddress{}
	for i := range list.Items {
		if c := &list.Items[i]; c.Status.Node == a.opts.Node {
			id := string(c.Spec.VM.UID)
			out[id] = append(out[id], c)
		}
	}
	return out, nil
}

// heldFate is what is to be done about a Held claim of this node whose VM has no object here.
type heldFate string

const (
	heldWait    heldFate = "wait"    // the runtime has not said what it has, or is removing the VM
	heldRemove  heldFate = "remove"  // tell the runtime to remove the VM
	heldRelease heldFate = "release" // say that nothing of it is left
	heldDone    heldFate = "done"    // it was said
)

// decideHeld looks at the claim and what the runtime has of its VM, nil for nothing. A VM that the runtime does not know is ordered to be
// removed all the same: its tombstone refuses an order of that assignment that comes late.
func decideHeld(c *v1alpha1.ImpAddress, st *machine.Status, synced bool) heldFate {
	switch {
	case c.Status.ReleasedAssignment >= c.Status.Assignment:
		return heldDone
	case !synced:
		return heldWait
	case st == nil || st.Assignment < c.Status.Assignment:
		return heldRemove
	case st.State == machine.Removed:
		return heldRelease
	case st.Assignment > c.Status.Assignment:
		return heldWait // the runtime was given a later assignment than the claim is about
	case st.State == machine.Removing:
		return heldWait
	default:
		return heldRemove
	}
}

// reconcileHeld carries out the order that a Held claim is.
func (a *Agent) reconcileHeld(ctx context.Context, c *v1alpha1.ImpAddress) time.Duration {
	vm := c.Spec.VM
	log, m := a.logOf(string(vm.UID), vm.Namespace, vm.Name).With("address", c.Spec.Address, "assignment", c.Status.Assignment), a.memory.of(vm.UID)
	var known *machine.Status
	if st, ok := a.view.get(vm.UID); ok {
		known = &st
	}
	fate := decideHeld(c, known, a.epoch() != 0)
	if fate == heldRemove {
		log.Info("removing a VM that was deleted while this node was silent")
		ctx, cancel := context.WithTimeout(ctx, orderTimeout)
		defer cancel()
		st, err := a.service.Remove(ctx, machine.Ref{ID: string(vm.UID), Assignment: c.Status.Assignment}, machine.Removal{Grace: translate.DefaultGrace})
		if err != nil {
			log.Warn("VM not removed", "step", "remove", "error", err)
			return m.backoff()
		}
		a.view.put(st)
		fate = decideHeld(c, &st, true)
	}
	if fate != heldRelease {
		return 0 // the runtime's next word, or the next connection, comes back to it
	}
	if err := a.releaseClaim(ctx, c); err != nil {
		log.Warn("address not released", "error", err)
		return m.backoff()
	}
	log.Info("address released, nothing of its VM is left here")
	a.memory.forget(vm.UID)
	return 0
}

// releaseClaim says on the claim that nothing of its assignment is left, on condition that it has not changed since it was read.
func (a *Agent) releaseClaim(ctx context.Context, c *v1alpha1.ImpAddress) error {
	body, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"resourceVersion": c.ResourceVersion},
		"status":   map[string]any{"releasedAssignment": c.Status.Assignment},
	})
	if err != nil {
		return err
	}
	err = a.client.Patch(ctx, c.DeepCopy(), client.RawPatch(types.MergePatchType, body), client.FieldOwner(v1alpha1.ManagerAgent))
	a.metrics.writes.WithLabelValues("impaddress", string(resultOf(err))).Inc()
	return client.IgnoreNotFound(err)
}
