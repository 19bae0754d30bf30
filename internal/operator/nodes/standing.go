package nodes

import (
	"context"
	"fmt"
	"time"

	"imp.dev/imp/api/v1alpha1"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Standing is how a node stands with the VMs bound to it.
type Standing struct {
	// Alive: its agent was heard of lately.
	Alive bool
	// Silent: its agent has not been heard of for StaleAfter. Neither is true while a newly started operator still listens.
	Silent bool
	// SilentAt is when it became, or would become, silent.
	SilentAt time.Time
	// Proof, unless "", says why nothing that was bound to it before runs there any more.
	Proof string
	// Gone, with a Proof, says that it is not expected back: what can move moves.
	Gone bool
}

// View answers questions about nodes.
type View struct {
	// Cached reads from informers, Live from the API server.
	Cached, Live client.Reader
	Heartbeats   *Heartbeats
	Clock        clock.PassiveClock
}

// Standing of the named node.
//
// All proofs need silence besides: a Node object that somebody deleted, or a taint set by mistake, is no proof against an agent
// that still reports its VMs as running. The agent's token is bound to the Node object, so it falls silent in any case.
func (v *View) Standing(ctx context.Context, name string) (Standing, error) {
	now := v.Clock.Now()
	s := Standing{Alive: v.Heartbeats.Alive(name), SilentAt: v.Heartbeats.SilentAt(name)}
	s.Silent = !s.Alive && !now.Before(s.SilentAt)
	if !s.Silent {
		return s, nil
	}
	node, err := v.node(ctx, name)
	switch {
	case apierrors.IsNotFound(err):
		s.Proof, s.Gone = "its Node object is gone", true
		return s, nil
	case err != nil:
		return s, err
	}
	for _, taint := range node.Spec.Taints {
		if taint.Key == corev1.TaintNodeOutOfService {
			s.Proof, s.Gone = "it carries the out-of-service taint", true
			return s, nil
		}
	}
	rebooted, err := v.rebooted(ctx, node)
	if rebooted {
		s.Proof = "its host was restarted"
	}
	return s, err
}

// node from the cache; that it is gone is believed only when the API server says so.
func (v *View) node(ctx context.Context, name string) (*corev1.Node, error) {
	node := &corev1.Node{}
	err := v.Cached.Get(ctx, client.ObjectKey{Name: name}, node)
	if apierrors.IsNotFound(err) {
		err = v.Live.Get(ctx, client.ObjectKey{Name: name}, node)
	}
	if err != nil {
		return nil, fmt.Errorf("reading node: %w", err)
	}
	return node, nil
}

// rebooted compares the boot the agent reported with the one the kubelet reports. Only a kubelet's word that is younger than
// the agent's counts: a kubelet that is behind would otherwise seem to tell of a boot that is still to come.
func (v *View) rebooted(ctx context.Context, node *corev1.Node) (bool, error) {
	imp := &v1alpha1.ImpNode{}
	err := v.Cached.Get(ctx, client.ObjectKey{Name: node.Name}, imp)
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("reading ImpNode: %w", err)
	}
	before, now := imp.Status.BootID, node.Status.NodeInfo.BootID
	if before == "" || now == "" || before == now {
		return false, nil
	}
	for _, condition := range node.Status.Conditions {
		if condition.Type == corev1.NodeReady {
			return condition.Status == corev1.ConditionTrue &&
				condition.LastHeartbeatTime.After(v.Heartbeats.RenewTime(node.Name)), nil
		}
	}
	return false, nil
}
