package place

import (
	"context"
	"fmt"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/operator/vmstate"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
)

// releaseDeleted is the reason of the order that a deletion gives.
const releaseDeleted = "Deleted"

// leave lets go of a VM that is being deleted once nothing of it is left on its node.
func (r *Reconciler) leave(ctx context.Context, p *pass) (bool, error) {
	if p.read.DeletionTimestamp == nil {
		return false, nil
	}
	if !controllerutil.ContainsFinalizer(p.read, v1alpha1.Finalizer) {
		p.over = true
		return true, nil
	}
	if vmstate.Leaving(p.vm) {
		return true, r.forget(ctx, p, v1alpha1.AddressQuarantined)
	}
	standing, err := r.Nodes.Standing(ctx, p.vm.Status.NodeName)
	if err != nil {
		return true, err
	}
	// A host that was restarted comes back with the VM's record and disk: it needs the order, or it starts what nobody wants any more.
	if standing.Gone {
		p.log.Info("VM let go without its node's word", "node", p.vm.Status.NodeName, "proof", standing.Proof)
		return true, r.forget(ctx, p, v1alpha1.AddressQuarantined)
	}
	deadline := p.read.DeletionTimestamp.Time
	if standing.SilentAt.After(deadline) {
		deadline = standing.SilentAt
	}
	deadline = deadline.Add(silentDelete)
	switch {
	case !standing.Silent:
		p.again(max(standing.SilentAt.Sub(p.now), time.Second))
	case p.now.Before(deadline):
		p.again(deadline.Sub(p.now))
	default:
		p.log.Warn("VM let go though its node is silent", "node", p.vm.Status.NodeName)
		p.tell(warning, v1alpha1.ReasonAgentTimeout, "Deleting", fmt.Sprintf(
			"deleted though %s has not said that nothing of it is left: silent since %s",
			p.vm.Status.NodeName, standing.SilentAt.UTC().Format(time.RFC3339)))
		return true, r.forget(ctx, p, v1alpha1.AddressHeld)
	}
	p.vm.Status.Release = &v1alpha1.Release{Assignment: p.vm.Status.Assignment, Reason: releaseDeleted}
	return true, nil
}

// forget lets the VM go for good. What becomes of its address is settled first: once the object is gone nobody knows.
func (r *Reconciler) forget(ctx context.Context, p *pass, address v1alpha1.AddressState) error {
	p.over = true
	if err := r.letGo(ctx, p, address); err != nil {
		return err
	}
	return r.dropFinalizer(ctx, p)
}

// finished frees the address of a VM that has ended, deletes it when its time after that is over, and sees to it that nothing
// else is done with it.
func (r *Reconciler) finished(ctx context.Context, p *pass) (bool, error) {
	if !vmstate.Finished(p.vm) {
		return false, nil
	}
	if len(p.vm.Status.Addresses) > 0 {
		err := r.letGo(ctx, p, v1alpha1.AddressQuarantined)
		p.vm.Status.IP, p.vm.Status.Addresses = "", nil
		return true, err // the rest is for the pass that this write starts
	}
	p.over = true
	if p.vm.Spec.TTLSecondsAfterFinished == nil {
		return true, nil
	}
	due := vmstate.FinishedAt(p.vm).Add(time.Duration(*p.vm.Spec.TTLSecondsAfterFinished) * time.Second)
	if p.now.Before(due) {
		p.again(due.Sub(p.now))
		return true, nil
	}
	err := r.Client.Delete(ctx, p.read, client.Preconditions{UID: &p.read.UID})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return true, nil // somebody was quicker, or another VM has its name now
	}
	if err != nil {
		return true, fmt.Errorf("deleting finished VM: %w", err)
	}
	p.log.Info("finished VM deleted after its time", "ttlSeconds", *p.vm.Spec.TTLSecondsAfterFinished)
	return true, nil
}

// takeBack takes a VM off a node that gave it up, or that certainly runs it no more and is not expected back.
func (r *Reconciler) takeBack(ctx context.Context, p *pass) (bool, error) {
	node := p.vm.Status.NodeName
	if node == "" {
		return false, nil
	}
	if vmstate.Released(p.vm) {
		return r.takeReleased(p)
	}
	if vmstate.Ephemeral(p.vm) {
		return false, nil // it has been tried once; imp-reachable says that it is lost
	}
	standing, err := r.Nodes.Standing(ctx, node)
	if err != nil {
		return true, err
	}
	if standing.Proof == "" || !standing.Gone {
		if !standing.Alive && !standing.Silent {
			p.again(standing.SilentAt.Sub(p.now))
		}
		return false, nil
	}
	unbind(p)
	p.tell(warning, v1alpha1.ReasonNodeLost, "Moving", fmt.Sprintf("taken off %s: %s", node, standing.Proof))
	discarded(p, node)
	return false, nil
}

// takeReleased: the node has said that nothing of this assignment is left there, without having been told to because of a
// deletion. It had no room for the VM, or gave it up before its workload was started.
func (r *Reconciler) takeReleased(p *pass) (bool, error) {
	if vmstate.Ephemeral(p.vm) && vmstate.AgentSpoke(p.vm) && p.vm.Status.StartedAt != nil {
		// Once is the promise. The agent owes a verdict of what it started; without one there is nothing safe to do.
		p.over = true
		p.log.Error("VM given up by its node after its workload was started, without a verdict", "node", p.vm.Status.NodeName)
		return true, nil
	}
	started := meta.FindStatusCondition(p.vm.Status.Conditions, v1alpha1.ConditionStarted)
	if started != nil && started.Reason == string(fault.NoCapacity) {
		r.notes.get(p.vm).refuse(p.vm.Status.NodeName, p.now)
	}
	p.log.Info("VM given back by its node", "node", p.vm.Status.NodeName, "assignment", p.vm.Status.Assignment)
	if release := p.vm.Status.Release; release != nil && release.Reason == v1alpha1.ReasonRescheduled {
		r.notes.get(p.vm).failedOn = p.vm.Status.NodeName
	}
	discarded(p, p.vm.Status.NodeName)
	unbind(p)
	return false, nil
}
