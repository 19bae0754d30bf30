package agent

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/event"
	"imp.dev/imp/internal/machine"
)

// The Lease says that the agent lives; what the runtime can do is on the ImpNode.
const (
	leaseEvery    = 10 * time.Second
	leaseDuration = 40 * time.Second
	infoTimeout   = 3 * time.Second
	// nodeAgain is how often the ImpNode is read and, where somebody changed or deleted it, written again.
	nodeAgain = 5 * time.Minute
)

// heartbeat renews the node's Lease and keeps its ImpNode true.
type heartbeat struct {
	agent *Agent
	wake  chan struct{}
	// node is the ImpNode as it was last written or read, at readAt; nil while not known.
	node       *v1alpha1.ImpNode
	readAt     time.Time
	suspicious bool
	// deafSince is when the runtime left a question unanswered first; zero while it answers.
	deafSince time.Time
}

func newHeartbeat(a *Agent) *heartbeat { return &heartbeat{agent: a, wake: make(chan struct{}, 1)} }

// poke asks for a look at the runtime at once.
func (h *heartbeat) poke() {
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// run beats until ctx ends. A poke brings the ImpNode up to date and leaves the Lease's rhythm alone.
func (h *heartbeat) run(ctx context.Context) error {
	ticker := h.agent.clock.NewTicker(leaseEvery)
	defer ticker.Stop()
	h.renew(ctx)
	h.update(ctx)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
			h.renew(ctx)
			h.update(ctx)
		case <-h.wake:
			h.update(ctx)
		}
	}
}

// renew is one PATCH, whether the Lease is there or not.
func (h *heartbeat) renew(ctx context.Context) {
	a := h.agent
	lease := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
		"metadata": map[string]any{
			"namespace": v1alpha1.SystemNamespace, "name": v1alpha1.LeasePrefix + a.opts.Node,
			"labels": map[string]any{"app.kubernetes.io/name": "imp"},
		},
		"spec": map[string]any{
			"holderIdentity":       a.opts.Node,
			"leaseDurationSeconds": int64(leaseDuration / time.Second),
			"renewTime":            a.clock.Now().UTC().Format(metav1.RFC3339Micro),
		},
	}}
	ctx, cancel := context.WithTimeout(ctx, leaseEvery)
	defer cancel()
	h.note("lease", a.client.Apply(ctx, client.ApplyConfigurationFromUnstructured(lease),
		client.FieldOwner(v1alpha1.ManagerAgent), client.ForceOwnership))
}

func (h *heartbeat) note(kind string, err error) {
	h.agent.metrics.writes.WithLabelValues(kind, string(resultOf(err))).Inc()
	if err != nil && !errors.Is(err, context.Canceled) {
		h.agent.log.Warn(kind+" not written", "node", h.agent.opts.Node, "error", err)
	}
}

// update writes the ImpNode if what the runtime says of itself has changed.
func (h *heartbeat) update(ctx context.Context) {
	a := h.agent
	ctx, cancelAll := context.WithTimeout(ctx, leaseEvery) // a request that hangs must not keep the Lease from being renewed
	defer cancelAll()
	var err error
	if h.node == nil || a.clock.Since(h.readAt) >= nodeAgain {
		err = h.read(ctx)
	}
	h.census(ctx)
	if err != nil {
		a.log.Warn("impnode not read", "node", a.opts.Node, "error", err)
		return
	}
	infoCtx, cancel := context.WithTimeout(ctx, infoTimeout)
	info, err := a.service.Info(infoCtx)
	cancel()
	if ctx.Err() != nil {
		return
	}
	now := a.clock.Now()
	if err == nil {
		h.deafSince = time.Time{}
	} else {
		if h.deafSince.IsZero() {
			h.deafSince = now
		}
		// A stream that is still open proves nothing: a runtime that hangs keeps it.
		epoch, away := a.view.connection(now)
		if epoch != 0 {
			away = now.Sub(h.deafSince)
		}
		if away < silence {
			return // it may be about to come back; a restart of the runtime is no news
		}
	}
	status := nodeStatus(h.node.Status, info, err, now)
	if reflect.DeepEqual(status, h.node.Status) {
		return
	}
	before := h.node.Status
	if err := h.write(ctx, status); err != nil {
		h.note("impnode", err)
		h.node = nil
		return
	}
	h.note("impnode", nil)
	h.tellBlocked(before)
}

// read gets the ImpNode, or makes it.
func (h *heartbeat) read(ctx context.Context) error {
	a := h.agent
	node := &v1alpha1.ImpNode{}
	err := a.client.Get(ctx, types.NamespacedName{Name: a.opts.Node}, node)
	if client.IgnoreNotFound(err) != nil {
		return err
	}
	if err != nil {
		u := h.object()
		if err := a.client.Apply(ctx, client.ApplyConfigurationFromUnstructured(u), client.FieldOwner(v1alpha1.ManagerAgent), client.ForceOwnership); err != nil {
			return fmt.Errorf("making it: %w", err)
		}
		h.note("impnode", nil)
		node = &v1alpha1.ImpNode{}
	}
	h.node, h.readAt = node, a.clock.Now()
	return nil
}

func (h *heartbeat) object() *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": v1alpha1.GroupVersion.String(), "kind": "ImpNode",
		"metadata": map[string]any{"name": h.agent.opts.Node},
	}}
}

func (h *heartbeat) write(ctx context.Context, status v1alpha1.ImpNodeStatus) error {
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&status)
	if err != nil {
		return err
	}
	u := h.object()
	u.Object["status"] = fields
	err = h.agent.client.Status().Apply(ctx, client.ApplyConfigurationFromUnstructured(u),
		client.FieldOwner(v1alpha1.ManagerAgent), client.ForceOwnership)
	if err != nil {
		return err
	}
	node := &v1alpha1.ImpNode{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, node); err != nil {
		return err
	}
	h.node = node
	return nil
}

// census counts the VMs that go on without an object, and says so when they are too many to be believed.
func (h *heartbeat) census(ctx context.Context) {
	a := h.agent
	if epoch, _ := a.view.connection(a.clock.Now()); epoch == 0 {
		return
	}
	list := &v1alpha1.ImpVMList{}
	if err := a.cache.List(ctx, list); err != nil {
		return
	}
	listed := map[string]bool{}
	for i := range list.Items {
		listed[string(list.Items[i].UID)] = true
	}
	known, absent := 0, 0
	for _, st := range a.view.all() {
		if st.State == machine.Removed || st.State == machine.Removing {
			continue
		}
		known++
		if !listed[st.ID] {
			absent++
		}
	}
	a.metrics.absent.Set(float64(absent))
	if now := suspicious(known, absent); now != h.suspicious {
		h.suspicious = now
		if now {
			a.log.Error("most VMs of this node are absent from the API server at once; none is touched",
				"node", a.opts.Node, "reason", reasonSuspicious, "vms", known, "absent", absent)
			h.tellSuspicious(known, absent)
		} else {
			a.log.Info("the list of VMs is plausible again", "node", a.opts.Node)
		}
	}
}

// reasonSuspicious is of the event and of the log line.
const reasonSuspicious = "SuspiciousList"

// tellSuspicious makes an event of it where an administrator looks: what a list lacks has no object to tell it on.
func (h *heartbeat) tellSuspicious(known, absent int) {
	if h.node == nil || h.node.UID == "" {
		return // the log and the metric have it
	}
	h.agent.events.Record(event.Node(h.node, corev1.EventTypeWarning, reasonSuspicious,
		fmt.Sprintf("the API server has no object for %d of the %d VMs here; none is touched", absent, known)))
}
