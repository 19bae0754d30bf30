package agent

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/agent/translate"
	"imp.dev/imp/internal/condition"
	"imp.dev/imp/internal/event"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/network"
	"imp.dev/imp/internal/version"
)

// nodeStatus is what the ImpNode should say. While the runtime is away what it said last stands: its VMs go on all the same.
func nodeStatus(before v1alpha1.ImpNodeStatus, info machine.Info, err error, now time.Time) v1alpha1.ImpNodeStatus {
	out := *before.DeepCopy()
	out.AgentVersion = version.String()
	ready := metav1.Condition{Type: v1alpha1.ConditionRuntimeReady, Status: metav1.ConditionFalse}
	switch {
	case err != nil:
		ready.Reason, ready.Message = v1alpha1.ReasonRuntimeUnreachable, "imp-runtime does not answer: "+fault.Of(err).Error()
	case !info.Usable:
		ready.Reason, ready.Message = v1alpha1.ReasonRuntimeUnusable, info.Problem
	default:
		ready.Status, ready.Reason, ready.Message = metav1.ConditionTrue, v1alpha1.ReasonRuntimeUsable, "VMs can be started with "+info.Driver
	}
	setNodeCondition(&out, ready, now)
	if err != nil {
		return out
	}
	out.Budget = v1alpha1.Budget{VCPU: info.BudgetVCPU, MemoryMiB: info.BudgetMemoryMiB, DiskGiB: info.BudgetDiskGiB}
	out.Capabilities = v1alpha1.NodeCapabilities{
		Arch: info.Architecture, Driver: info.Driver, Accelerator: info.Accelerator, VMMVersion: info.VMMVersion,
		KernelDigest: info.KernelDigest, CgroupVersion: info.CgroupVersion, OverheadMiB: info.OverheadMiB,
	}
	out.BootID, out.RuntimeVersion = info.BootID, info.Version
	out.Network = nodeNetwork(info.Network)
	blocked := metav1.Condition{Type: v1alpha1.ConditionForwardBlocked, Status: metav1.ConditionFalse, Reason: reasonForwardFree, Message: "no foreign firewall chain drops what guests send through the node"}
	if info.Network.ForwardBlocked != "" {
		blocked.Status, blocked.Reason, blocked.Message = metav1.ConditionTrue, v1alpha1.ReasonForwardBlocked, translate.Message(info.Network.ForwardBlocked)
	}
	// A node on which it never was has nothing to say of it.
	if blocked.Status == metav1.ConditionTrue || meta.FindStatusCondition(before.Conditions, blocked.Type) != nil {
		setNodeCondition(&out, blocked, now)
	}
	return out
}

// reasonForwardFree of ForwardBlocked=False, after it was True.
const reasonForwardFree = "Free"

// maxNodeAddresses is the API's bound. A node with more (kube-proxy's IPVS mode gives it every Service's address) keeps guests from the
// rest by its own rules.
const maxNodeAddresses = 64

// nodeNetwork orders the addresses, so that the same ones are no change, with the overlay's first.
func nodeNetwork(h network.Host) v1alpha1.NodeNetwork {
	addresses := slices.Clone(h.Addresses)
	slices.Sort(addresses)
	addresses = slices.DeleteFunc(slices.Compact(addresses), func(a string) bool { return a == h.VTEP })
	if h.VTEP != "" {
		addresses = append([]string{h.VTEP}, addresses...)
	}
	if len(addresses) == 0 {
		addresses = nil
	}
	return v1alpha1.NodeNetwork{
		Address: h.VTEP, Addresses: addresses[:min(len(addresses), maxNodeAddresses)], MTU: int32(h.MTU), Port: int32(h.Port),
	}
}

// setNodeCondition leaves a condition that says the same already as it is.
func setNodeCondition(s *v1alpha1.ImpNodeStatus, c metav1.Condition, now time.Time) {
	old := meta.FindStatusCondition(s.Conditions, c.Type)
	if old != nil && old.Status == c.Status && old.Reason == c.Reason && old.Message == c.Message {
		return
	}
	condition.Set(&s.Conditions, condition.Next(s.Conditions, c, now))
}

// tellBlocked makes an event of a ForwardBlocked that has become True.
func (h *heartbeat) tellBlocked(before v1alpha1.ImpNodeStatus) {
	c := meta.FindStatusCondition(h.node.Status.Conditions, v1alpha1.ConditionForwardBlocked)
	if c == nil || c.Status != metav1.ConditionTrue || meta.IsStatusConditionTrue(before.Conditions, c.Type) {
		return
	}
	h.agent.log.Warn("what guests send through this node is dropped", "node", h.agent.opts.Node, "reason", c.Reason, "message", c.Message)
	h.agent.events.Record(event.Node(h.node, corev1.EventTypeWarning, c.Reason, c.Message))
}
