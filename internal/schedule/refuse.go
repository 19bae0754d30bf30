package schedule

import (
	"fmt"
	"slices"
	"strings"

	"imp.dev/imp/api/v1alpha1"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	schedulinghelpers "k8s.io/component-helpers/scheduling/corev1"
)

// Reason is one thing a node has against a VM.
type Reason struct {
	// Text after the node's name: "512 MiB short of memory".
	Text string
	// Group after a number of nodes: "short of memory". Nodes are counted by it when they are too many to name.
	Group string
}

func same(text string) Reason { return Reason{Text: text, Group: text} }

// check looks at one thing; no answer means no objection.
type check func(Requirements, *Candidate) []Reason

// checks in the order in which a person would ask. The first with an objection ends the list, since what comes later is no
// news of a node that is not meant at all; the budget's shortages come together.
func checks() []check {
	return []check{
		enabled, selected, arch, ready, schedulable, tolerated, agentAlive, runtimeReady, connected, guests, notJustRefused, budget,
	}
}

// Refuse gives what the node has against the VM; nothing if the VM fits.
func Refuse(req Requirements, c *Candidate) []Reason {
	for _, objects := range checks() {
		if reasons := objects(req, c); len(reasons) > 0 {
			return reasons
		}
	}
	return nil
}

// Room gives what the node lacks for the VM: arch and budget alone, for a VM that is on the node already.
func Room(req Requirements, c *Candidate) []Reason {
	return append(arch(req, c), budget(req, c)...)
}

func enabled(_ Requirements, c *Candidate) []Reason {
	if c.Node.Labels[v1alpha1.LabelEnabled] == "true" {
		return nil
	}
	return []Reason{same("without label " + v1alpha1.LabelEnabled + "=true")}
}

func selected(req Requirements, c *Candidate) []Reason {
	var missing []string
	for key, value := range req.NodeSelector {
		if c.Node.Labels[key] != value {
			missing = append(missing, key+"="+value)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	slices.Sort(missing)
	return []Reason{{Text: "label " + strings.Join(missing, ",") + " of spec.nodeSelector missing", Group: "not matching spec.nodeSelector"}}
}

// arch of the runtime, which knows best; before it has reported, of the kubelet.
func arch(req Requirements, c *Candidate) []Reason {
	has := c.Node.Status.NodeInfo.Architecture
	if c.Imp != nil && c.Imp.Status.Capabilities.Arch != "" {
		has = c.Imp.Status.Capabilities.Arch
	}
	if req.Arch == "" || has == "" || has == req.Arch {
		return nil
	}
	return []Reason{same("architecture " + has + ", not " + req.Arch)}
}

func ready(_ Requirements, c *Candidate) []Reason {
	for _, condition := range c.Node.Status.Conditions {
		if condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionTrue {
			return nil
		}
	}
	return []Reason{same("Node not ready")}
}

func schedulable(req Requirements, c *Candidate) []Reason {
	// As for pods: who tolerates the taint of a cordoned node goes there.
	cordoned := corev1.Taint{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule}
	if !c.Node.Spec.Unschedulable || tolerates(req.Tolerations, &cordoned) {
		return nil
	}
	return []Reason{same("cordoned")}
}

func tolerates(tolerations []corev1.Toleration, taint *corev1.Taint) bool {
	return schedulinghelpers.TolerationsTolerateTaint(logr.Discard(), tolerations, taint, false)
}

func tolerated(req Requirements, c *Candidate) []Reason {
	var reasons []Reason
	for i := range c.Node.Spec.Taints {
		taint := &c.Node.Spec.Taints[i]
		if taint.Effect == corev1.TaintEffectPreferNoSchedule || tolerates(req.Tolerations, taint) {
			continue
		}
		reasons = append(reasons, same("taint "+taint.ToString()+" not tolerated"))
	}
	return reasons
}

func agentAlive(_ Requirements, c *Candidate) []Reason {
	if c.AgentAlive {
		return nil
	}
	return []Reason{same("agent not heard of")}
}

func runtimeReady(_ Requirements, c *Candidate) []Reason {
	if c.Imp == nil {
		return []Reason{same("ImpNode missing")}
	}
	condition := meta.FindStatusCondition(c.Imp.Status.Conditions, v1alpha1.ConditionRuntimeReady)
	switch {
	case condition == nil:
		return []Reason{same("runtime has not reported")}
	case condition.Status == "True", unusable(c):
		return nil
	}
	text := "runtime not ready"
	if condition.Message != "" {
		text += " (" + condition.Message + ")"
	}
	return []Reason{{Text: text, Group: "runtime not ready"}}
}

// unusable says that the node's runtime answers and cannot start VMs. Such a node takes a VM that fits nowhere else: what is
// missing is told on the VM as RuntimeStartFailed, with retries, and mended on the node without touching the VM.
func unusable(c *Candidate) bool {
	condition := meta.FindStatusCondition(c.Imp.Status.Conditions, v1alpha1.ConditionRuntimeReady)
	return condition != nil && condition.Status != "True" && condition.Reason == v1alpha1.ReasonRuntimeUnusable
}

// connected: without an address in the overlay no other node reaches the guest.
func connected(req Requirements, c *Candidate) []Reason {
	if req.Network == nil || c.Imp.Status.Network.Address != "" {
		return nil
	}
	return []Reason{same("without an address in the overlay, which spec.networkRef needs")}
}

func guests(req Requirements, c *Candidate) []Reason {
	if req.Network == nil || c.Guests < req.Network.MaxGuests {
		return nil
	}
	return []Reason{{
		Text:  fmt.Sprintf("has %d guests of network %s, and takes no more than %d", c.Guests, req.Network.Name, req.Network.MaxGuests),
		Group: fmt.Sprintf("full with %d guests of network %s", req.Network.MaxGuests, req.Network.Name),
	}}
}

func notJustRefused(_ Requirements, c *Candidate) []Reason {
	if c.Refused == "" {
		return nil
	}
	return []Reason{{Text: c.Refused, Group: "gave the VM back"}}
}

func budget(req Requirements, c *Candidate) []Reason {
	has, free := c.Imp.Status.Budget, c.free()
	var reasons []Reason
	short := func(need, free, has int64, unit, what string) {
		switch {
		case need > has:
			reasons = append(reasons, Reason{Text: fmt.Sprintf("%d%s of %s needed, budget is %d", need, unit, what, has), Group: "too small in " + what})
		case need > free:
			reasons = append(reasons, Reason{Text: fmt.Sprintf("%d%s short of %s", need-free, unit, what), Group: "short of " + what})
		}
	}
	short(req.Size.VCPU, free.VCPU, has.VCPU, "", "vcpu")
	short(req.Size.MemoryMiB+c.overheadMiB(), free.MemoryMiB, has.MemoryMiB, " MiB", "memory")
	short(req.Size.DiskGiB, free.DiskGiB, has.DiskGiB, " GiB", "disk")
	return reasons
}
