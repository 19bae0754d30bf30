package place

import (
	"context"
	"fmt"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/operator/statusapply"
	"imp.dev/imp/internal/operator/vmstate"
	"imp.dev/imp/internal/schedule"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// resolveClass finds the VM's class. Without one a VM waits; one that has a node goes on with what it was placed with, and says so.
func (r *Reconciler) resolveClass(ctx context.Context, p *pass) (bool, error) {
	problem := "spec.classRef is missing: name an ImpVMClass"
	if ref := p.vm.Spec.ClassRef; ref != nil && ref.Name != "" {
		class := &v1alpha1.ImpVMClass{}
		err := r.Client.Get(ctx, client.ObjectKey{Name: ref.Name}, class)
		if err == nil {
			p.class = class
			return false, nil
		}
		if !apierrors.IsNotFound(err) {
			return true, fmt.Errorf("reading class: %w", err)
		}
		problem = fmt.Sprintf("spec.classRef names ImpVMClass %q, which does not exist: create it, or name another", ref.Name)
	}
	switch {
	case p.vm.Status.NodeName == "":
		r.waiting(p, v1alpha1.ReasonInvalidSpec, problem)
	case !vmstate.Ephemeral(p.vm): // a one-shot needs no class any more
		r.keptWithoutClass(p, problem)
	}
	return true, nil
}

// keptWithoutClass tells that a VM keeps what it was placed with: it runs, but not as its spec says. Ready is not touched.
func (r *Reconciler) keptWithoutClass(p *pass, problem string) {
	message := fmt.Sprintf("placed on %s with what its class said before; %s", p.vm.Status.NodeName, problem)
	if has := meta.FindStatusCondition(p.read.Status.Conditions, v1alpha1.ConditionScheduled); has == nil || has.Message != message {
		p.tell(warning, v1alpha1.ReasonInvalidSpec, "Placing", message)
	}
	p.scheduled(metav1.ConditionTrue, v1alpha1.ReasonInvalidSpec, message)
}

// followClass keeps a bound VM's resources as its class says: probes at once; the sizes of another class that a persistent VM
// names now, if its node has room for them, for its next start.
func (r *Reconciler) followClass(ctx context.Context, p *pass) (bool, error) {
	if p.vm.Status.NodeName == "" {
		return false, nil
	}
	has := p.vm.Status.Resources
	if has == nil {
		return true, nil // not ours to guess: it was bound by somebody else
	}
	want := resources(p.vm, p.class, has.OverheadMiB)
	has.ReadinessProbe, has.RestartPolicy = want.ReadinessProbe, want.RestartPolicy
	p.scheduled(metav1.ConditionTrue, v1alpha1.ReasonPlaced, "placed on "+p.vm.Status.NodeName)
	if !vmstate.Ephemeral(p.vm) && !equality.Semantic.DeepEqual(has, want) {
		if err := r.resize(ctx, p, want); err != nil {
			return true, err
		}
	}
	return true, r.addFinalizer(ctx, p) // should somebody have taken it away
}

// resize enters the new sizes if the node has room.
func (r *Reconciler) resize(ctx context.Context, p *pass, want *v1alpha1.Resources) error {
	r.ledger.mu.Lock()
	defer r.ledger.mu.Unlock()
	if err := r.ledger.prime(ctx, r.Live, p.now); err != nil {
		return err
	}
	node := p.vm.Status.NodeName
	candidate := schedule.Candidate{Node: &corev1.Node{}, Imp: &v1alpha1.ImpNode{}}
	err := r.Client.Get(ctx, client.ObjectKey{Name: node}, candidate.Imp)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("reading ImpNode: %w", err)
	}
	bound, err := r.ledger.bound(ctx, r.Client, p.now, p.vm)
	if err != nil {
		return err
	}
	candidate.Bound = bound[node].amount
	if refused := schedule.Room(requirements(p.vm, p.class), &candidate); len(refused) > 0 {
		text := schedule.Refusals{{Node: node, Reasons: refused}}.Message(maxRefusals)
		p.scheduled(metav1.ConditionTrue, v1alpha1.ReasonPlaced, fmt.Sprintf(
			"placed on %s with its earlier size; ImpVMClass %s has no room there (%s)", node, p.class.Name, text))
		p.again(lookAgain)
		return nil
	}
	p.vm.Status.Resources = want
	r.ledger.assume(p.vm, p.now)
	uid, assignment := p.vm.UID, p.vm.Status.Assignment
	p.failed = append(p.failed, func(err error) {
		if statusapply.Definite(err) {
			r.ledger.drop(uid, assignment)
		}
	})
	return nil
}
