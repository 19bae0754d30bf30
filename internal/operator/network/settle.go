package network

import (
	"fmt"
	"strings"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/condition"
	"imp.dev/imp/internal/event"
	"imp.dev/imp/internal/ipam"
	"imp.dev/imp/internal/network"
	"imp.dev/imp/internal/operator/address"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// named is how many names a message holds at most.
const named = 5

// facts are everything that an ImpNetwork's status is made of.
type facts struct {
	now time.Time
	// pool of its addresses, or the problem with its spec.
	pool    ipam.Pool
	problem error
	vni     int32
	// mtu of the overlay on the node where it is smallest; 0 as long as no node has told one.
	mtu      int32
	overlaps []ipam.Range
	counts   address.Counts
	// users it waits for, by name, while it is being deleted.
	users []string
}

func (f *facts) count(claims []v1alpha1.ImpAddress) {
	for i := range claims {
		f.counts.Add(&claims[i])
	}
}

// settle enters the facts into the network's status.
func (f *facts) settle(n *v1alpha1.ImpNetwork) {
	s := &n.Status
	s.ObservedGeneration, s.VNI = n.Generation, f.vni
	s.Used, s.Held, s.Quarantined = f.counts.Used, f.counts.Held, f.counts.Quarantined
	if f.problem == nil {
		s.Gateway, s.Capacity = f.pool.Gateway().String(), f.pool.Capacity()
	}
	s.Usage = fmt.Sprintf("%d/%d", s.Used, s.Capacity)
	if s.MTU == 0 { // once: running guests have it
		switch {
		case n.Spec.MTU != 0:
			s.MTU = n.Spec.MTU
		case f.mtu > network.OverlayOverhead:
			s.MTU = f.mtu - network.OverlayOverhead
		}
	}
	set := func(c metav1.Condition) {
		c.ObservedGeneration = n.Generation
		condition.Set(&s.Conditions, condition.Next(s.Conditions, c, f.now))
	}
	if n.DeletionTimestamp == nil && f.problem == nil {
		set(f.overlap())
	}
	if n.DeletionTimestamp != nil {
		set(f.inUse())
	}
	set(f.ready(n))
}

func (f *facts) ready(n *v1alpha1.ImpNetwork) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse}
	switch {
	case n.DeletionTimestamp != nil:
		c.Reason, c.Message = v1alpha1.ReasonDeleting, "being deleted: no VM is given an address any more"
	case f.problem != nil:
		c.Reason, c.Message = v1alpha1.ReasonInvalidSpec, f.problem.Error()
	case len(f.overlaps) > 0:
		c.Reason, c.Message = v1alpha1.ReasonSubnetOverlap, f.overlap().Message
	case n.Status.MTU == 0:
		c.Reason = v1alpha1.ReasonSettingUp
		c.Message = "no node has told its address in the overlay and the MTU there yet; spec.mtu would settle it now"
	default:
		c.Status, c.Reason, c.Message = metav1.ConditionTrue, v1alpha1.ReasonNetworkUsable, "VMs can be given addresses"
	}
	return c
}

func (f *facts) overlap() metav1.Condition {
	c := metav1.Condition{
		Type: v1alpha1.ConditionSubnetOverlap, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonNoOverlap,
		Message: "no address of a node, of pods or of Services is in subnet " + f.pool.Subnet().String(),
	}
	if len(f.overlaps) == 0 {
		return c
	}
	whose := make([]string, len(f.overlaps))
	for i, r := range f.overlaps {
		whose[i] = r.Of
	}
	c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonSubnetOverlap
	c.Message = fmt.Sprintf("subnet %s overlaps %s: no VM is given an address; create an ImpNetwork with another subnet",
		f.pool.Subnet(), few(whose))
	return c
}

func (f *facts) inUse() metav1.Condition {
	c := metav1.Condition{
		Type: v1alpha1.ConditionInUse, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonDeleting, Message: "no VM uses it any more",
	}
	if n := len(f.users); n > 0 {
		vms := "VMs"
		if n == 1 {
			vms = "VM"
		}
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonNetworkInUse
		c.Message = fmt.Sprintf("its deletion waits for %d %s: %s", n, vms, few(f.users))
	}
	return c
}

// few names the first ones and counts the others.
func few(names []string) string {
	if more := len(names) - named; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:named], ", "), more)
	}
	return strings.Join(names, ", ")
}

// happenings are the events of the change from before to after: what keeps VMs from having an address, and that it is over.
func happenings(before, after *v1alpha1.ImpNetwork) []event.Event {
	var out []event.Event
	tell := func(eventType, reason, message string) {
		out = append(out, event.Event{
			Object: corev1.ObjectReference{
				APIVersion: v1alpha1.GroupVersion.String(), Kind: "ImpNetwork",
				Namespace: after.Namespace, Name: after.Name, UID: after.UID, ResourceVersion: after.ResourceVersion,
			},
			Type: eventType, Reason: reason, Action: "Settling", Message: message,
		})
	}
	find := func(n *v1alpha1.ImpNetwork, conditionType string) metav1.Condition {
		if c := meta.FindStatusCondition(n.Status.Conditions, conditionType); c != nil {
			return *c
		}
		return metav1.Condition{}
	}
	trouble := func(c metav1.Condition) bool {
		return c.Reason == v1alpha1.ReasonSubnetOverlap || c.Reason == v1alpha1.ReasonInvalidSpec
	}
	was, is := find(before, v1alpha1.ConditionReady), find(after, v1alpha1.ConditionReady)
	switch {
	case trouble(is) && was.Reason != is.Reason:
		tell(corev1.EventTypeWarning, is.Reason, is.Message)
	case trouble(was) && is.Status == metav1.ConditionTrue:
		tell(corev1.EventTypeNormal, v1alpha1.ReasonRecovered, is.Message)
	}
	used := find(after, v1alpha1.ConditionInUse)
	if used.Status == metav1.ConditionTrue && find(before, v1alpha1.ConditionInUse).Status != metav1.ConditionTrue {
		tell(corev1.EventTypeNormal, used.Reason, used.Message)
	}
	return out
}
