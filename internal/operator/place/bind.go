package place

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/network"
	"imp.dev/imp/internal/operator/statusapply"
	"imp.dev/imp/internal/operator/vmstate"
	"imp.dev/imp/internal/schedule"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
)

// maxRefusals is how much of what the nodes have against a VM fits its condition and an event.
const maxRefusals = 900

// bind gives a VM without a node one, or tells why there is none.
func (r *Reconciler) bind(ctx context.Context, p *pass) (bool, error) {
	if p.vm.Status.NodeName != "" {
		return true, nil
	}
	if stop, err := r.catchUp(ctx, p); stop || err != nil {
		return true, err
	}
	if r.notYet(p) {
		return true, nil
	}
	seat, stop, err := r.reserve(ctx, p)
	if stop || err != nil {
		return true, err
	}
	refusals, ok, err := r.pick(ctx, p)
	if err != nil {
		return true, err
	}
	if !ok {
		r.waiting(p, v1alpha1.ReasonNoNodeFits, refusals.Message(maxRefusals))
		r.lookAgainAfterRefusal(p)
		return true, nil
	}
	first := p.vm.Status.Assignment == 1
	p.scheduled(metav1.ConditionTrue, v1alpha1.ReasonPlaced, "placed on "+p.vm.Status.NodeName)
	// Of the node it was on before; imp-reachable takes it away as soon as it sees the VM here.
	meta.RemoveStatusCondition(&p.vm.Status.Conditions, v1alpha1.ConditionNodeReachable)
	p.tell(normal, v1alpha1.ReasonPlaced, "Placing", "placed on "+p.vm.Status.NodeName)
	p.written = append(p.written, func() {
		p.log.Info("VM placed", "node", p.vm.Status.NodeName, "assignment", p.vm.Status.Assignment)
		if first && r.Latency != nil {
			r.Latency(p.now.Sub(p.vm.CreationTimestamp.Time))
		}
	})
	// The finalizer comes first: an agent must never see a VM that can vanish without a release, nor an address one that can vanish
	// without letting go of it.
	err = r.addFinalizer(ctx, p)
	if err == nil && seat != nil {
		err = r.take(ctx, p, seat)
	}
	if err != nil {
		r.ledger.drop(p.vm.UID, p.vm.Status.Assignment) // nothing was written that binds it
	}
	return true, err
}

// catchUp sees to it that a VM whose binding is on its way is not bound a second time: the cache may be behind our own write,
// or an earlier write may have been made although its answer was lost.
func (r *Reconciler) catchUp(ctx context.Context, p *pass) (stop bool, err error) {
	if !r.ledger.ahead(p.read, p.now) {
		return false, nil
	}
	p.over = true
	live := &v1alpha1.ImpVM{}
	err = r.Live.Get(ctx, client.ObjectKeyFromObject(p.read), live)
	switch {
	case apierrors.IsNotFound(err):
		return true, nil
	case err != nil:
		return true, fmt.Errorf("reading VM: %w", err)
	case live.ResourceVersion != p.read.ResourceVersion:
		p.again(time.Second) // the cache will show it, and start another pass
		return true, nil
	}
	p.over = false // the write was lost after all
	return false, nil
}

// pick finds a node and enters the binding into p.vm and into the ledger.
func (r *Reconciler) pick(ctx context.Context, p *pass) (schedule.Refusals, bool, error) {
	r.ledger.mu.Lock()
	defer r.ledger.mu.Unlock()
	if err := r.ledger.prime(ctx, r.Live, p.now); err != nil {
		return nil, false, err
	}
	candidates, err := r.candidates(ctx, p)
	if err != nil {
		return nil, false, err
	}
	choice, refusals, ok := schedule.Pick(requirements(p.vm, p.class), candidates)
	if !ok {
		return refusals, false, nil
	}
	status := &p.vm.Status
	status.NodeName, status.Assignment, status.Release = choice.Node, status.Assignment+1, nil
	status.PlacedAt = &metav1.Time{Time: p.now.Truncate(time.Second)}
	status.Resources = resources(p.vm, p.class, choice.OverheadMiB)
	r.ledger.assume(p.vm, p.now)
	uid, assignment := p.vm.UID, status.Assignment
	p.failed = append(p.failed, func(err error) {
		if statusapply.Definite(err) {
			r.ledger.drop(uid, assignment)
		}
	})
	return nil, true, nil
}

// candidates are all nodes as they are now. The caller holds the ledger's lock.
func (r *Reconciler) candidates(ctx context.Context, p *pass) ([]schedule.Candidate, error) {
	found, imps := &corev1.NodeList{}, &v1alpha1.ImpNodeList{}
	err := errors.Join(
		r.Client.List(ctx, found, client.UnsafeDisableDeepCopy), r.Client.List(ctx, imps, client.UnsafeDisableDeepCopy))
	if err != nil {
		return nil, fmt.Errorf("reading nodes: %w", err)
	}
	bound, err := r.ledger.bound(ctx, r.Client, p.now, p.vm)
	if err != nil {
		return nil, err
	}
	byName := make(map[string]*v1alpha1.ImpNode, len(imps.Items))
	for i := range imps.Items {
		byName[imps.Items[i].Name] = &imps.Items[i]
	}
	note := r.notes.get(p.vm)
	candidates := make([]schedule.Candidate, len(found.Items))
	for i := range found.Items {
		node := &found.Items[i]
		candidates[i] = schedule.Candidate{
			Node: node, Imp: byName[node.Name], AgentAlive: r.Nodes.Heartbeats.Alive(node.Name),
			Bound: bound[node.Name].amount, Guests: bound[node.Name].guests,
		}
		if refused := note.refused[node.Name]; refused != nil && p.now.Before(refused.until) {
			candidates[i].Refused = "gave the VM back for want of capacity"
		}
		candidates[i].Avoid = note.failedOn == node.Name
	}
	return candidates, nil
}

func requirements(vm *v1alpha1.ImpVM, class *v1alpha1.ImpVMClass) schedule.Requirements {
	req := schedule.Requirements{
		Size: schedule.Amount{
			VCPU: int64(class.Spec.VCPU), MemoryMiB: class.Spec.MemoryMiB, DiskGiB: class.Spec.DiskGiB,
		},
		Arch: class.Spec.Arch, NodeName: vm.Spec.NodeName, NodeSelector: vm.Spec.NodeSelector, Tolerations: vm.Spec.Tolerations,
	}
	if vm.Spec.NetworkRef != nil {
		req.Network = &schedule.Network{Name: networkOf(vm).String(), MaxGuests: network.MaxGuests}
	}
	return req
}

func resources(vm *v1alpha1.ImpVM, class *v1alpha1.ImpVMClass, overheadMiB int64) *v1alpha1.Resources {
	r := &v1alpha1.Resources{
		VCPU: class.Spec.VCPU, MemoryMiB: class.Spec.MemoryMiB, DiskGiB: class.Spec.DiskGiB, Arch: class.Spec.Arch,
		OverheadMiB: overheadMiB, ReadinessProbe: probe(class),
	}
	if !vmstate.Ephemeral(vm) {
		r.RestartPolicy = class.Spec.RestartPolicy.DeepCopy()
	}
	return r
}

func probe(class *v1alpha1.ImpVMClass) *v1alpha1.ReadinessProbe {
	if class.Spec.Probes == nil {
		return nil
	}
	return class.Spec.Probes.ReadinessProbe.DeepCopy()
}

// waiting tells why the VM is not placed: at once when the reason is new, and in other words every messageEvery at most, since
// each node that changes may change the words for every VM that waits.
func (r *Reconciler) waiting(p *pass, reason, message string) {
	note := r.notes.get(p.vm)
	has := meta.FindStatusCondition(p.read.Status.Conditions, v1alpha1.ConditionScheduled)
	p.again(lookAgain)
	if has != nil && has.Status == metav1.ConditionFalse && has.Reason == reason {
		if has.Message == message {
			return
		}
		if next := note.messageAt.Add(messageEvery); p.now.Before(next) {
			p.again(next.Sub(p.now))
			return
		}
	}
	p.scheduled(metav1.ConditionFalse, reason, message)
	p.tell(warning, reason, "Placing", message)
	p.written = append(p.written, func() {
		note.messageAt = p.now
		p.log.Info("VM waits", "reason", reason, "message", message)
	})
}

// lookAgainAfterRefusal: a node that gave the VM back is asked again after its time.
func (r *Reconciler) lookAgainAfterRefusal(p *pass) {
	for _, refused := range r.notes.get(p.vm).refused {
		if p.now.Before(refused.until) {
			p.again(refused.until.Sub(p.now))
		}
	}
}

// addFinalizer, where it is missing, writes at once, as dropFinalizer does, and only to the object as it was read.
func (r *Reconciler) addFinalizer(ctx context.Context, p *pass) error {
	if controllerutil.ContainsFinalizer(p.read, v1alpha1.Finalizer) {
		return nil
	}
	return r.patchFinalizers(ctx, p, append(slices.Clone(p.read.Finalizers), v1alpha1.Finalizer))
}

func (r *Reconciler) dropFinalizer(ctx context.Context, p *pass) error {
	p.over = true
	if !controllerutil.ContainsFinalizer(p.read, v1alpha1.Finalizer) {
		return nil
	}
	kept := slices.DeleteFunc(slices.Clone(p.read.Finalizers), func(f string) bool { return f == v1alpha1.Finalizer })
	return r.patchFinalizers(ctx, p, kept)
}

func (r *Reconciler) patchFinalizers(ctx context.Context, p *pass, finalizers []string) error {
	changed := p.read.DeepCopy()
	changed.Finalizers = finalizers
	patch := client.MergeFromWithOptions(p.read, client.MergeFromWithOptimisticLock{})
	err := r.Client.Patch(ctx, changed, patch, client.FieldOwner(v1alpha1.ManagerPlace))
	if apierrors.IsNotFound(err) {
		return err
	}
	if err != nil {
		return statusapply.Explain(err)
	}
	p.read, p.vm.ResourceVersion, p.vm.Finalizers = changed, changed.ResourceVersion, changed.Finalizers
	r.notes.get(p.read).wrote(p.read, p.now)
	return nil
}

// unbind takes the VM off its node; a later step of the same pass may bind it anew.
func unbind(p *pass) {
	p.vm.Status.NodeName, p.vm.Status.Release, p.vm.Status.PlacedAt, p.vm.Status.Resources, p.vm.Status.Hold = "", nil, nil, nil, nil
}
