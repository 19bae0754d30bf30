// Package place is the writer imp-place: it gives VMs an address and a node, takes them back, and lets go of them when they are
// deleted.
//
//	create ──► class? ──► network, address? ──► node? ──► finalizer ──► address claimed ──► bound ──► the node's agent
//	             │                │                │                                         ▲              │
//	        InvalidSpec  NetworkSetupFailed   NoNodeFits                                     └ gave it back ┤
//	                                                                                                        ▼
//	delete ──────────────────────────────────────────────► release ────────────────────────────► releasedAssignment
//	                                                                     finalizer dropped ◄── address let go ◄──┘
//
// A pass reads one VM from the cache, lets a list of steps decide on a copy of it, and writes what they decided at once.
// Every write carries the resourceVersion that was read.
package place

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/condition"
	"imp.dev/imp/internal/event"
	"imp.dev/imp/internal/operator/address"
	"imp.dev/imp/internal/operator/nodes"
	"imp.dev/imp/internal/operator/statusapply"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const (
	// messageEvery bounds how often a VM that waits is told why in other words, when the reason is still the same.
	messageEvery = 30 * time.Second
	// lookAgain is when a VM that waits is tried again even though nothing was seen to change.
	lookAgain = 5 * time.Minute
	// afterConflict is when to look again if the cache does not show the newer object before.
	afterConflict = time.Second
	// silentDelete is how long a deleted VM waits for a silent node.
	silentDelete = 5 * time.Minute
)

// Reconciler places VMs. All fields but the last group are set by its maker.
type Reconciler struct {
	// Client reads from the cache and writes; Live reads from the API server.
	Client client.Client
	Live   client.Reader
	Nodes  *nodes.View
	// Addresses are the claims of what VMs have in their networks.
	Addresses *address.Claims
	Clock     clock.PassiveClock
	Events    event.Recorder
	Log       *slog.Logger
	// Latency observes the time from creation to the first placement.
	Latency func(time.Duration)

	ledger  ledger
	notes   notes
	waiters waiters
}

// pass is one look at one VM.
type pass struct {
	// read is the object as it was read; vm the copy that the steps change.
	read, vm *v1alpha1.ImpVM
	class    *v1alpha1.ImpVMClass
	now      time.Time
	log      *slog.Logger
	// after is the soonest time a step wants to look again; 0: only when something changes.
	after time.Duration
	// events are told, and written run, once the write has succeeded.
	events  []event.Event
	written []func()
	failed  []func(error)
	// over ends the pass without a write of status.
	over bool
	// seat is the address that was set aside for the VM, and claimed says that its claim was made. waits: there was none.
	seat           *address.Reservation
	claimed, waits bool
}

func (p *pass) again(after time.Duration) {
	after = max(after, time.Millisecond)
	if p.after == 0 || after < p.after {
		p.after = after
	}
}

func (p *pass) tell(eventType, reason, action, message string) {
	e := event.VM(p.vm, eventType, reason, message)
	e.Action = action
	p.events = append(p.events, e)
}

// scheduled sets the condition Scheduled.
func (p *pass) scheduled(status metav1.ConditionStatus, reason, message string) {
	want := metav1.Condition{Type: v1alpha1.ConditionScheduled, Status: status, Reason: reason, Message: message}
	condition.Set(&p.vm.Status.Conditions, condition.Next(p.vm.Status.Conditions, want, p.now))
}

// step decides one thing. done keeps later steps from running.
type step func(ctx context.Context, p *pass) (done bool, err error)

func (r *Reconciler) steps() []step {
	return []step{r.leave, r.finished, r.takeBack, r.reschedule, r.evacuate, r.resolveClass, r.followClass, r.bind}
}

// Reconcile implements reconcile.Reconciler.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	read := &v1alpha1.ImpVM{}
	err := r.Client.Get(ctx, req.NamespacedName, read)
	if apierrors.IsNotFound(err) {
		r.notes.forget(req.NamespacedName)
		r.stopWaiting(ctx, req.NamespacedName)
		return ctrl.Result{}, nil
	}
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("reading VM: %w", err)
	}
	if r.notes.get(read).ahead(read, r.Clock.Now()) {
		return ctrl.Result{RequeueAfter: afterConflict}, nil // the newer object will start a pass by itself
	}
	p := &pass{
		read: read, vm: read.DeepCopy(), now: r.Clock.Now(),
		log: r.Log.With("namespace", read.Namespace, "name", read.Name, "vm", read.UID),
	}
	defer r.afterwards(ctx, p)
	for _, step := range r.steps() {
		done, err := step(ctx, p)
		if err != nil {
			return r.ended(p, err)
		}
		if done {
			break
		}
	}
	if !p.over {
		err = r.write(ctx, p)
	}
	return r.ended(p, err)
}

// write applies what the steps changed, if they changed anything. The claim of the VM's address comes first: other nodes must not
// send to where the VM is not, and an address whose VM is gone for good while its claim leads nowhere is free.
func (r *Reconciler) write(ctx context.Context, p *pass) error {
	if err := r.keep(ctx, p); err != nil {
		return err
	}
	speaks := condition.OperatorSpeaks(p.vm)
	if speaks {
		condition.Apply(p.vm, p.now)
	}
	has, err := statusapply.Place(p.read, speaks)
	if err != nil {
		return err
	}
	want, err := statusapply.Place(p.vm, speaks)
	if err != nil || statusapply.Equal(has, want) {
		return err
	}
	if err := statusapply.Apply(ctx, r.Client, p.read, v1alpha1.ManagerPlace, want); err != nil {
		return err
	}
	r.notes.get(p.read).wrote(p.read, p.now)
	return nil
}

// ended does what waits for the outcome of the pass and says when to look again.
func (r *Reconciler) ended(p *pass, err error) (ctrl.Result, error) {
	if err != nil {
		for _, f := range p.failed {
			f(err)
		}
		switch {
		case errors.Is(err, statusapply.ErrConflict):
			return ctrl.Result{RequeueAfter: afterConflict}, nil
		case apierrors.IsNotFound(err):
			return ctrl.Result{}, nil // it is gone; its deletion will be seen
		}
		return ctrl.Result{}, err
	}
	for _, f := range p.written {
		f()
	}
	for _, e := range p.events {
		r.Events.Record(e)
	}
	return ctrl.Result{RequeueAfter: p.after}, nil
}

const normal, warning = corev1.EventTypeNormal, corev1.EventTypeWarning
