package address

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/operator/nodes"
	"imp.dev/imp/internal/operator/statusapply"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// afterConflict is when to look again if the cache does not show the newer object before.
const afterConflict = time.Second

// Reconciler looks at one claim at a time, at the start of a leader at all of them. It frees what has been left behind, whoever left it
// and however. That a VM is gone, or has no use for the claim, it believes only from the API server.
type Reconciler struct {
	Client client.Client
	Live   client.Reader
	Nodes  *nodes.View
	Claims *Claims
	Clock  clock.PassiveClock
	Log    *slog.Logger
	// Quarantine is how long an address is given to nobody after its VM.
	Quarantine time.Duration
}

// Reconcile implements reconcile.Reconciler.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	claim := &v1alpha1.ImpAddress{}
	err := r.Client.Get(ctx, req.NamespacedName, claim)
	if apierrors.IsNotFound(err) {
		return ctrl.Result{}, nil
	}
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("reading claim: %w", err)
	}
	result, err := r.look(ctx, claim)
	if errors.Is(err, statusapply.ErrConflict) {
		return ctrl.Result{RequeueAfter: afterConflict}, nil
	}
	return result, err
}

func (r *Reconciler) look(ctx context.Context, claim *v1alpha1.ImpAddress) (ctrl.Result, error) {
	f, result, err := r.gather(ctx, claim)
	if err != nil {
		return result, err
	}
	found := judge(f)
	switch found {
	case quarantine:
		err = r.Claims.write(ctx, claim, quarantined(claim.Status))
	case hold:
		held := claim.Status
		held.State = v1alpha1.AddressHeld
		err = r.Claims.write(ctx, claim, held)
	case remove:
		err = r.Claims.Remove(ctx, claim)
	default:
		return result, nil
	}
	if err == nil {
		r.Log.Info("claim looked after", "claim", claim.Name, "was", claim.Status.State, "verdict", found,
			"namespace", claim.Spec.VM.Namespace, "name", claim.Spec.VM.Name, "vm", claim.Spec.VM.UID)
	}
	return ctrl.Result{}, err // the change itself starts another pass
}

// gather what judge needs, and when to look again if nothing happens before.
func (r *Reconciler) gather(ctx context.Context, claim *v1alpha1.ImpAddress) (facts, ctrl.Result, error) {
	f, result, now := facts{claim: claim}, ctrl.Result{}, r.Clock.Now()
	if claim.Status.State == v1alpha1.AddressQuarantined {
		due := over(claim, r.Quarantine)
		f.over = !now.Before(due)
		if !f.over {
			// Until then nothing is decided, and nobody has to be asked.
			return f, ctrl.Result{RequeueAfter: due.Sub(now)}, nil
		}
	}
	cached, err := r.owner(ctx, r.Client, claim)
	f.vm = cached
	if err == nil && (cached == nil || judge(f) != stay) {
		f.vm, err = r.owner(ctx, r.Live, claim)
	}
	if cached == nil && f.vm != nil {
		result.RequeueAfter = afterConflict // what the cache never shows, it will not tell the end of
	}
	if err != nil || f.vm != nil || claim.Status.State == v1alpha1.AddressQuarantined || claim.Status.Node == "" {
		return f, result, err
	}
	standing, err := r.Nodes.Standing(ctx, claim.Status.Node)
	if err != nil {
		return f, result, err
	}
	// As for the deletion of a VM: a host that was restarted comes back with the VM's record, and starts it unless it is told not to.
	f.gone = standing.Gone
	if !standing.Silent {
		result.RequeueAfter = max(standing.SilentAt.Sub(now), time.Second)
	}
	return f, result, nil
}

// owner reads the VM that the claim is for; nil if it is gone.
func (r *Reconciler) owner(ctx context.Context, from client.Reader, claim *v1alpha1.ImpAddress) (*v1alpha1.ImpVM, error) {
	vm := &v1alpha1.ImpVM{}
	err := from.Get(ctx, client.ObjectKey{Namespace: claim.Spec.VM.Namespace, Name: claim.Spec.VM.Name}, vm)
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("reading VM: %w", err)
	case vm.UID != claim.Spec.VM.UID:
		return nil, nil
	}
	return vm, nil
}
