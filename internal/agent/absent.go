package agent

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/agent/translate"
	"imp.dev/imp/internal/event"
	"imp.dev/imp/internal/machine"
)

// fate is what becomes of a VM that the runtime has and this node's list of objects has not.
type fate string

const (
	fateKeep    fate = "keep"    // no order was seen: it goes on
	fateRemove  fate = "remove"  // the object itself says that this copy must not be
	fateAbandon fate = "abandon" // its object has been missing for absentLimit: it is stopped and removed, and its disk kept
	fateDone    fate = "done"    // nothing of it is left
)

const (
	// absentLimit is how long a VM's object must have been missing, plausibly all the time, until the VM is stopped.
	absentLimit = 10 * time.Minute
	// absentAgain is how often the object of an absent VM is looked for at last; unboundAgain where the object is there and about to
	// be placed: the list, filtered by node, does not tell where to.
	absentAgain  = time.Minute
	unboundAgain = 10 * time.Second
)

// absence is everything decideAbsent looks at.
type absence struct {
	node string
	st   machine.Status
	// live is the object of the VM's name, read from the API server at this moment; nil when there is none.
	live *v1alpha1.ImpVM
	// cluster is this agent's own; "" while not known.
	cluster string
	// suspicious says that too many VMs are absent at this moment for the list to be believed.
	suspicious bool
	// lasted is how long the object has been missing without a doubt.
	lasted time.Duration
}

// gone says that there is no object of the VM's UID.
func (f absence) gone() bool { return f.live == nil || string(f.live.UID) != f.st.ID }

// doubt is why a missing object says nothing about the VM; "" when it does, in time.
func (f absence) doubt() string {
	switch {
	case f.cluster == "":
		return "which cluster this is could not be read"
	case f.st.Cluster == "":
		return "its record names no cluster"
	case f.st.Cluster != f.cluster:
		return "it was ordered by another cluster"
	case f.suspicious:
		return "more than half of the node's VMs are missing at once"
	default:
		return ""
	}
}

// decideAbsent judges a VM that is absent from the filtered list and that no Held claim orders away.
//
//	DELETED of the filtered watch:  deleted │ moved │ unbound   all look the same, so the object itself is asked
//
// Absence is no order. The object of the very same UID can say that this copy is not wanted: its releasedAssignment covers the copy (we
// said so ourselves), it was bound anew, or it was unbound, which the operator does on proof or on our word only. An object that is missing without a doubt for
// absentLimit ends the VM, but not its disk.
func decideAbsent(f absence) (fate, string) {
	st, live := f.st, f.live
	switch {
	case st.State == machine.Removed:
		return fateDone, "removed"
	case st.State == machine.Removing:
		return fateKeep, "the removal is under way"
	case f.gone() && f.doubt() != "":
		return fateKeep, "its object is gone without an order to remove it, and " + f.doubt()
	case f.gone() && f.lasted < absentLimit:
		return fateKeep, "its object is gone without an order to remove it"
	case f.gone():
		return fateAbandon, "its object has been missing for " + absentLimit.String()
	case live.Status.ReleasedAssignment >= st.Assignment:
		return fateRemove, "its assignment was released"
	case live.Status.Assignment > st.Assignment && live.Status.NodeName != f.node:
		return fateRemove, "it was given to another node"
	case live.Status.Assignment == st.Assignment && live.Status.NodeName == "":
		return fateRemove, "it was taken off this node"
	default:
		return fateKeep, "its object gives no order"
	}
}

// suspicious says that so many VMs are absent at once that the list, not the VMs, is the likelier cause.
func suspicious(known, absent int) bool { return absent > 1 && absent*2 > known }

// reconcileAbsent looks after a VM that the runtime has and the cache has not.
func (a *Agent) reconcileAbsent(ctx context.Context, st machine.Status) time.Duration {
	now := a.clock.Now()
	epoch, _ := a.view.connection(now)
	if epoch == 0 {
		return 0 // the next connection's end of list comes back to it
	}
	log := a.logOf(st.ID, st.Namespace, st.Name)
	m := a.memory.of(types.UID(st.ID))
	if st.State == machine.Removed {
		a.memory.forget(types.UID(st.ID))
		return 0
	}
	m.look(epoch)
	live, err := a.live(ctx, nameOf(st))
	if err != nil {
		log.Warn("object of an absent VM not read", "error", err)
		return m.again(absentAgain)
	}
	count, err := a.census(ctx)
	if err != nil {
		log.Warn("cache not listed", "error", err)
		return m.again(absentAgain)
	}
	f := absence{
		node: a.opts.Node, st: st, live: live, cluster: a.cluster.get(), suspicious: suspicious(count.known, count.absent),
	}
	f.lasted = m.absentFor(f, now)
	what, why := decideAbsent(f)
	switch what {
	case fateRemove:
		log.Info("removing a stale VM", "why", why, "assignment", st.Assignment)
		a.removeAbsent(ctx, st, machine.Removal{Grace: translate.Grace(live), KeepDisk: live.DeletionTimestamp == nil})
		return m.again(absentAgain)
	case fateAbandon:
		log.Warn("stopping a VM without an object; its disk is kept", "why", why, "assignment", st.Assignment)
		if a.removeAbsent(ctx, st, machine.Removal{Grace: translate.DefaultGrace, KeepDisk: true}) {
			a.beat.tellAbandoned(st)
		}
		return m.again(absentAgain)
	case fateKeep:
		if st.State != machine.Removing && m.absentTold != why {
			m.absentTold = why
			log.Warn("VM goes on without an object", "why", why, "assignment", st.Assignment)
			a.beat.poke()
		}
		return m.absentWait(f)
	default:
		a.memory.forget(types.UID(st.ID))
		return 0
	}
}

// removeAbsent says whether the runtime took the order.
func (a *Agent) removeAbsent(ctx context.Context, st machine.Status, how machine.Removal) bool {
	ctx, cancel := context.WithTimeout(ctx, orderTimeout)
	defer cancel()
	after, err := a.service.Remove(ctx, machine.Ref{ID: st.ID, Assignment: st.Assignment}, how)
	if err != nil {
		a.logOf(st.ID, st.Namespace, st.Name).Warn("absent VM not removed", "step", "remove", "error", err)
		return false
	}
	a.view.put(after)
	return true
}

// look begins the looks of connection epoch anew: who has been away may have missed much, and looks often at first.
func (m *memory) look(epoch int64) {
	if m.looksEpoch != epoch {
		m.looksEpoch, m.looks = epoch, 0
	}
}

// again is the wait until the next look: 1 s, doubling to at most longest.
func (m *memory) again(longest time.Duration) time.Duration {
	wait := min(time.Second<<min(m.looks, 10), longest)
	m.looks++
	return wait
}

// absentFor is how long the object has been missing without a doubt. Each doubt has it counted from the beginning: while objects come
// back one by one after a disaster, the last ones have their whole time.
func (m *memory) absentFor(f absence, now time.Time) time.Duration {
	switch {
	case !f.gone() || f.doubt() != "":
		m.absentSince = time.Time{}
		return 0
	case m.absentSince.IsZero():
		m.absentSince = now
	}
	return now.Sub(m.absentSince)
}

func (m *memory) absentWait(f absence) time.Duration {
	switch {
	case !f.gone():
		return m.again(unboundAgain)
	case f.doubt() == "":
		return min(m.again(absentAgain), max(absentLimit-f.lasted, time.Second))
	default:
		return m.again(absentAgain)
	}
}

// census counts the VMs of the runtime, and those of them that are absent from the list of objects.
type census struct {
	known, absent int
	// foreign are those that another cluster ordered.
	foreign int
}

func (a *Agent) census(ctx context.Context) (census, error) {
	listed := map[string]bool{}
	if err := a.eachBound(ctx, func(vm *v1alpha1.ImpVM) { listed[string(vm.UID)] = true }); err != nil {
		return census{}, err
	}
	var out census
	own := a.cluster.get()
	for _, st := range a.view.all() {
		if st.State == machine.Removed || st.State == machine.Removing {
			continue
		}
		out.known++
		if listed[st.ID] {
			continue
		}
		out.absent++
		if own != "" && st.Cluster != "" && st.Cluster != own {
			out.foreign++
		}
	}
	return out, nil
}

// tellAbandoned makes an event where an administrator looks: the VM has no object to tell it on.
func (h *heartbeat) tellAbandoned(st machine.Status) {
	e, ok := h.event(corev1.EventTypeWarning, v1alpha1.ReasonVMAbsent, fmt.Sprintf(
		"VM %s/%s (%s) has had no object for %s: it is stopped, and its disk is in the node's trash for 72 h (imp-runtime doctor restore)",
		st.Namespace, st.Name, st.ID, absentLimit))
	if !ok {
		return // the log has it
	}
	e.Step = st.ID
	h.agent.events.Record(e)
}

// event starts one about the ImpNode, which may not be known yet. It may be called from anywhere.
func (h *heartbeat) event(eventType, reason, message string) (event.Event, bool) {
	node := h.known.Load()
	if node == nil || node.UID == "" {
		return event.Event{}, false
	}
	return event.Node(node, eventType, reason, message), true
}
