package agent

import (
	"context"
	"errors"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/agent/translate"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
)

// networkPatience is how long a VM waits for its network before it says so: a network that is new on a node takes some tenths of
// a second.
const networkPatience = 2 * time.Second

// standing is how a VM stands with its networks. The zero value is that of a VM without one.
type standing struct {
	// facts of the VM's networks, as far as they are known.
	facts map[types.UID]translate.NetworkFacts
	// awaited says that the VM cannot be ordered yet.
	awaited bool
	// problem is what the object is to say of it: a failure at once, a wait after networkPatience. failed says that it is a failure.
	problem *fault.Error
	failed  bool
	// wait is the time until a wait becomes a problem; 0 is never.
	wait time.Duration
}

// standingOf looks up vm's networks.
func (a *Agent) standingOf(vm *v1alpha1.ImpVM, m *memory, now time.Time) standing {
	if vm.Spec.NetworkRef == nil {
		return standing{}
	}
	s := standing{facts: map[types.UID]translate.NetworkFacts{}}
	var waiting error
	if len(vm.Status.Addresses) == 0 {
		waiting = translate.NoAddress(vm)
	}
	for _, address := range vm.Status.Addresses {
		state := a.networks.State(address.NetworkUID)
		s.facts[address.NetworkUID] = state.Facts
		switch {
		case state.Failed != nil:
			s.problem, s.failed = state.Failed, true
		case !state.Ready && waiting == nil:
			waiting = awaiting(state.Waiting)
		}
		s.awaited = s.awaited || !state.Ready
	}
	s.awaited = s.awaited || waiting != nil
	switch {
	case !s.awaited:
		m.networkSince = time.Time{}
	case m.networkSince.IsZero():
		m.networkSince = now
		s.wait = networkPatience
	default:
		s.wait = max(networkPatience-now.Sub(m.networkSince), 0)
	}
	if s.awaited && s.wait == 0 && s.problem == nil {
		s.problem = fault.Of(waiting)
	}
	return s
}

func awaiting(what string) error {
	if what == "" {
		what = "it is being set"
	}
	return fault.New(fault.NetworkSetupFailed, "setting up network", errors.New(what))
}

// shows says what of the standing a VM's conditions show, now that the agent does what it does. A guest that runs has its network: it
// is told of a failure, but not of what would be waited for.
func (s standing) shows(do action, st *machine.Status) *fault.Error {
	if st != nil && st.State == machine.Finished {
		return nil
	}
	if do == reportNetwork || (s.failed && (do == report || do == ensure)) {
		return s.problem
	}
	return nil
}

// epoch of the connection to the runtime, 0 while there is none.
func (a *Agent) epoch() int64 {
	epoch, _ := a.view.connection(a.clock.Now())
	return epoch
}

// wantedNetworks are those of the VMs that are bound to this node and have not finished, nor been released.
func (a *Agent) wantedNetworks(ctx context.Context) (map[types.UID]types.NamespacedName, error) {
	out := map[types.UID]types.NamespacedName{}
	err := a.eachBound(ctx, func(vm *v1alpha1.ImpVM) {
		if isFinished(vm) || vm.Status.ReleasedAssignment >= vm.Status.Assignment {
			return
		}
		for _, address := range vm.Status.Addresses {
			out[address.NetworkUID] = types.NamespacedName{Namespace: vm.Namespace, Name: address.Network}
		}
	})
	return out, err
}

// networkChanged has the VMs of a network looked at.
func (a *Agent) networkChanged(id types.UID) {
	err := a.eachBound(context.Background(), func(vm *v1alpha1.ImpVM) {
		for _, address := range vm.Status.Addresses {
			if address.NetworkUID == id {
				a.kicks.kick(types.NamespacedName{Namespace: vm.Namespace, Name: vm.Name})
				return
			}
		}
	})
	if err != nil {
		a.log.Warn("cache not listed", "node", a.opts.Node, "error", err)
	}
}

// eachBound calls f for every VM that is bound to this node. f must not change it: it is the cache's own.
func (a *Agent) eachBound(ctx context.Context, f func(*v1alpha1.ImpVM)) error {
	list := &v1alpha1.ImpVMList{}
	if err := a.cache.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
		return err
	}
	for i := range list.Items {
		if vm := &list.Items[i]; vm.Status.NodeName == a.opts.Node {
			f(vm)
		}
	}
	return nil
}
