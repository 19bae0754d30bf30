// Package nodes tells how a node stands: whether its agent is heard, for how long it has been silent, and whether there is
// proof that it runs nothing of what was bound to it.
package nodes

import (
	"strings"
	"sync"
	"time"

	"imp.dev/imp/api/v1alpha1"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
)

// StaleAfter is how long an agent may be silent. It renews its Lease four times as often.
const StaleAfter = 40 * time.Second

// Heartbeats follows the agents' Leases. Times are of this machine's clock, at the moment a renewal was seen, so that neither a
// node with a wrong clock nor an outage of the API server, in which no renewal can be seen, makes a node look dead.
type Heartbeats struct {
	clock clock.PassiveClock

	mu        sync.Mutex
	beats     map[string]*beat
	leading   time.Time // since when this process decides
	listeners []func(node string)
}

type beat struct {
	renewTime time.Time // as the Lease has it
	renewed   time.Time // when that was seen; zero: no renewal that could be fresh
	watched   time.Time // since when a renewal could have been seen and was not
}

// NewHeartbeats makes one that has heard of no node yet.
func NewHeartbeats(clk clock.PassiveClock) *Heartbeats {
	return &Heartbeats{clock: clk, beats: map[string]*beat{}}
}

// Lead marks the moment from which silence counts: before it this process may have been cut off from the API server.
func (h *Heartbeats) Lead() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.leading = h.clock.Now()
}

// Listen has f called with the name of each node whose agent comes to be heard, or is heard again.
func (h *Heartbeats) Listen(f func(node string)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.listeners = append(h.listeners, f)
}

// Handler is to be added to an informer of Leases.
func (h *Heartbeats) Handler() cache.ResourceEventHandler {
	observe := func(obj any) {
		if lease, ok := obj.(*coordinationv1.Lease); ok {
			h.Observe(lease)
		}
	}
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    observe,
		UpdateFunc: func(_, obj any) { observe(obj) },
		DeleteFunc: func(obj any) {
			if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = gone.Obj
			}
			if lease, ok := obj.(*coordinationv1.Lease); ok {
				h.forget(lease)
			}
		},
	}
}

func nodeOf(lease *coordinationv1.Lease) (string, bool) {
	if lease.Namespace != v1alpha1.SystemNamespace {
		return "", false
	}
	return strings.CutPrefix(lease.Name, v1alpha1.LeasePrefix)
}

// Observe takes in a Lease as it is now.
func (h *Heartbeats) Observe(lease *coordinationv1.Lease) {
	node, ok := nodeOf(lease)
	if !ok || lease.Spec.RenewTime == nil {
		return
	}
	renewTime := lease.Spec.RenewTime.Time
	h.mu.Lock()
	now := h.clock.Now()
	before := h.alive(node, now)
	switch b := h.beats[node]; {
	case b == nil || b.renewTime.IsZero():
		// Seen for the first time: it may be days old. It counts as heard only if the node's own clock says so, but not as
		// silent before it has had its time.
		b = &beat{renewTime: renewTime, watched: now}
		if age := now.Sub(renewTime); age.Abs() < StaleAfter {
			b.renewed = now
			if age > 0 {
				b.renewed = renewTime
			}
		}
		h.beats[node] = b
	case !b.renewTime.Equal(renewTime):
		*b = beat{renewTime: renewTime, renewed: now, watched: now}
	}
	var call []func(string)
	if !before && h.alive(node, now) {
		call = h.listeners
	}
	h.mu.Unlock()
	for _, f := range call {
		f(node)
	}
}

func (h *Heartbeats) forget(lease *coordinationv1.Lease) {
	node, ok := nodeOf(lease)
	if !ok {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if b := h.beats[node]; b != nil {
		*b = beat{watched: b.watched}
	}
}

// Alive says that the agent was heard less than StaleAfter ago: VMs may be placed there.
func (h *Heartbeats) Alive(node string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.alive(node, h.clock.Now())
}

func (h *Heartbeats) alive(node string, now time.Time) bool {
	b := h.beats[node]
	return b != nil && !b.renewed.IsZero() && now.Sub(b.renewed) < StaleAfter
}

// SilentAt is when the node is, or was, to be called silent unless it is heard before. A node nobody has asked for or heard of
// yet gets its time from now.
func (h *Heartbeats) SilentAt(node string) time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	b := h.beats[node]
	if b == nil {
		b = &beat{watched: h.clock.Now()}
		h.beats[node] = b
	}
	from := b.watched
	if from.Before(h.leading) {
		from = h.leading
	}
	return from.Add(StaleAfter)
}

// RenewTime is the latest of the node's Lease by the node's own clock; zero where there is none.
func (h *Heartbeats) RenewTime(node string) time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	if b := h.beats[node]; b != nil {
		return b.renewTime
	}
	return time.Time{}
}
