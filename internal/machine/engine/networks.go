package engine

import (
	"context"
	"reflect"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/plan"
	"imp.dev/imp/internal/network"
)

// SetNetwork implements machine.Service. VMs whose network could not be attached before try again at once.
func (e *Engine) SetNetwork(ctx context.Context, spec network.Spec) error {
	if err := machine.ValidateNetwork(spec); err != nil {
		return err
	}
	if err := e.config.Network.Set(ctx, spec); err != nil {
		e.log.Warn("network not set", "step", "network", "network", spec.ID, "namespace", spec.Namespace, "name", spec.Name, "error", err)
		return fault.New(fault.NetworkSetupFailed, "setting network", err)
	}
	if e.changed(spec) {
		for _, w := range e.allWorkers() {
			w.networkSet(spec.ID)
		}
	}
	return nil
}

// changed says that the network is known anew, or differs from before in more than its peers: those come and go all the time, and a
// step that fails for another reason is not to be tried at each of their changes.
func (e *Engine) changed(spec network.Spec) bool {
	spec.Peers = nil
	e.networkMu.Lock()
	defer e.networkMu.Unlock()
	was, known := e.networks[spec.ID]
	e.networks[spec.ID] = spec
	return !known || !reflect.DeepEqual(was, spec)
}

// ForgetNetwork implements machine.Service. A VM that was accepted and is still to be attached counts as one that is.
func (e *Engine) ForgetNetwork(ctx context.Context, id string) error {
	if err := machine.ValidateNetworkID(id); err != nil {
		return err
	}
	for _, w := range e.allWorkers() {
		if uses(w.recordNow(), id) {
			return fault.Errorf(fault.NetworkSetupFailed, "forgetting network", "VM %s here is in network %s", w.id, id)
		}
	}
	if err := e.config.Network.Forget(ctx, id); err != nil {
		return fault.New(fault.NetworkSetupFailed, "forgetting network", err)
	}
	e.networkMu.Lock()
	defer e.networkMu.Unlock()
	delete(e.networks, id)
	return nil
}

// Networks implements machine.Service.
func (e *Engine) Networks(ctx context.Context) ([]network.Status, error) {
	all, err := e.config.Network.Networks(ctx)
	return all, fault.New(fault.NetworkSetupFailed, "listing networks", err)
}

// networkHost is the host's place in networks. While it cannot be looked at what was seen last stands: a node that loses and finds
// its address would have all its peers rewritten.
func (e *Engine) networkHost(ctx context.Context) network.Host {
	host, err := e.config.Network.Host(ctx)
	e.networkMu.Lock()
	defer e.networkMu.Unlock()
	if err != nil {
		if !interrupted(err) {
			e.log.Warn("host's network not looked at", "step", "network", "error", err)
		}
		return e.host
	}
	e.host = host
	return host
}

func (e *Engine) allWorkers() []*worker {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := make([]*worker, 0, len(e.workers))
	for _, w := range e.workers {
		out = append(out, w)
	}
	return out
}

// uses says that the record's VM has, or will have, an interface in the network.
func uses(r plan.Record, id string) bool {
	if r.Successor != nil && inNetwork(*r.Successor, id) {
		return true
	}
	if r.RemovedAt != nil || (r.Final != nil && !r.NetworkUsed) {
		return false
	}
	return inNetwork(r.Spec, id) || (r.Boot != nil && inNetwork(r.Boot.Spec, id))
}

func inNetwork(s machine.Spec, id string) bool {
	for _, n := range s.Interfaces {
		if n.Network == id {
			return true
		}
	}
	return false
}

// networkSet ends the wait of a VM that could not be attached to the network: what it failed for may be no more.
func (w *worker) networkSet(id string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.record.Retry
	if r == nil || r.Step != plan.AttachNetwork || !inNetwork(w.record.Spec, id) {
		return
	}
	next := w.record.Clone()
	next.TryNow()
	w.keepLocked(next)
	w.wake()
}
