package agent

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"imp.dev/imp/api/v1alpha1"
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
	node   *v1alpha1.ImpNode
	readAt time.Time
	// known is node for readers of other goroutines.
	known atomic.Pointer[v1alpha1.ImpNode]
	// census as it was taken last; doubted is its doubt's reason as it was told last.
	census  census
	doubted string
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
	h.count(ctx)
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
		h.hear(ctx, false)
	} else {
		if h.deafSince.IsZero() {
			h.deafSince = now
		}
		// A stream that is still open proves nothing: a runtime that hangs keeps it.
		epoch, away := a.view.connection(now)
		if epoch != 0 {
			away = now.Sub(h.deafSince)
		}
		h.hear(ctx, epoch != 0 && away >= silence)
		if away < silence {
			return // it may be about to come back; a restart of the runtime is no news
		}
	}
	status := nodeStatus(h.node.Status, info, err, now)
	h.census.account(&status, now)
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
	h.known.Store(node)
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
	h.known.Store(node)
	return nil
}

// count takes the census, and says so when more VMs are absent than can be believed, or they are another cluster's.
func (h *heartbeat) count(ctx context.Context) {
	a := h.agent
	if epoch, _ := a.view.connection(a.clock.Now()); epoch == 0 {
		return
	}
	now, err := a.census(ctx)
	if err != nil {
		return
	}
	h.census = now
	a.metrics.absent.Set(float64(now.absent))
	reason, message := now.doubt()
	if reason == h.doubted {
		return
	}
	h.doubted = reason
	if reason == "" {
		a.log.Info("the list of VMs is plausible again", "node", a.opts.Node)
		return
	}
	a.log.Error("VMs of this node have no object; none is touched", "node", a.opts.Node, "reason", reason, "vms", now.known, "absent", now.absent)
	if e, ok := h.event(corev1.EventTypeWarning, reason, message); ok { // what a list lacks has no object to tell it on
		a.events.Record(e)
	}
}

// doubt is why nothing happens to absent VMs; "" when the list is plausible.
func (c census) doubt() (reason, message string) {
	switch {
	case c.foreign > 0:
		return v1alpha1.ReasonDifferentCluster, fmt.Sprintf(
			"%d of the %d VMs here were ordered by another cluster; none of them is touched", c.foreign, c.known)
	case suspicious(c.known, c.absent):
		return v1alpha1.ReasonSuspiciousList, fmt.Sprintf(
			"the API server has no object for %d of the %d VMs here; none is touched", c.absent, c.known)
	default:
		return "", ""
	}
}

// account puts the condition VMsAccountedFor into s. A node on which it never was False has nothing to say of it.
func (c census) account(s *v1alpha1.ImpNodeStatus, now time.Time) {
	condition := metav1.Condition{
		Type: v1alpha1.ConditionVMsAccountedFor, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonAccountedFor,
		Message: "the list of VMs is plausible",
	}
	if reason, message := c.doubt(); reason != "" {
		condition.Status, condition.Reason, condition.Message = metav1.ConditionFalse, reason, message
	}
	if condition.Status == metav1.ConditionFalse || meta.FindStatusCondition(s.Conditions, condition.Type) != nil {
		setNodeCondition(s, condition, now)
	}
}

// hear notes whether the runtime answers although its stream may be open, and has every VM looked at when that changes.
func (h *heartbeat) hear(ctx context.Context, deaf bool) {
	if h.agent.deaf.Swap(deaf) != deaf {
		h.agent.kickAll(ctx)
	}
}
