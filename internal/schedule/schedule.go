// Package schedule decides which node a VM goes to, and why not to the others. It is pure.
package schedule

import (
	"imp.dev/imp/api/v1alpha1"

	corev1 "k8s.io/api/core/v1"
)

// Amount of what a node's budget is made of.
type Amount struct {
	VCPU      int64
	MemoryMiB int64 // guests and their overhead
	DiskGiB   int64
}

// Plus gives the sum.
func (a Amount) Plus(b Amount) Amount {
	return Amount{VCPU: a.VCPU + b.VCPU, MemoryMiB: a.MemoryMiB + b.MemoryMiB, DiskGiB: a.DiskGiB + b.DiskGiB}
}

// Taken is what a bound VM takes of its node's budget.
func Taken(r *v1alpha1.Resources) Amount {
	if r == nil {
		return Amount{}
	}
	return Amount{VCPU: int64(r.VCPU), MemoryMiB: r.MemoryMiB + r.OverheadMiB, DiskGiB: r.DiskGiB}
}

// Requirements of a VM.
type Requirements struct {
	// Size of the guest, without the overhead, which depends on the node.
	Size Amount
	// Arch in Go's spelling.
	Arch string
	// NodeName is the one node it may go to; "" for any.
	NodeName     string
	NodeSelector map[string]string
	Tolerations  []corev1.Toleration
	// Network the VM has an interface in; nil for none.
	Network *Network
}

// Network is what placement has to know of one.
type Network struct {
	// Name as users write it: NAMESPACE/NAME.
	Name string
	// MaxGuests that one node takes of it.
	MaxGuests int
}

// Candidate is a node as placement sees it.
type Candidate struct {
	Node *corev1.Node
	// Imp is nil where no agent has reported yet.
	Imp *v1alpha1.ImpNode
	// AgentAlive says that the agent's Lease is fresh.
	AgentAlive bool
	// Bound is what VMs bound to the node take, those included whose binding is on its way to the API server.
	Bound Amount
	// Guests of the VM's network among them.
	Guests int
	// Avoid says that another node is preferred: the VM failed here last.
	Avoid bool
	// Refused, unless "", is why this node must not be asked now, in words that follow its name: a node that just gave the VM back.
	Refused string
}

// overheadMiB that a VM takes on the node beside its guest's memory.
func (c *Candidate) overheadMiB() int64 {
	if c.Imp == nil {
		return 0
	}
	return c.Imp.Status.Capabilities.OverheadMiB
}

// free is what is left of the budget; negative where it was cut below what is bound.
func (c *Candidate) free() Amount {
	b := c.Imp.Status.Budget
	return Amount{
		VCPU: b.VCPU - c.Bound.VCPU, MemoryMiB: b.MemoryMiB - c.Bound.MemoryMiB, DiskGiB: b.DiskGiB - c.Bound.DiskGiB,
	}
}

// Choice is where a VM goes.
type Choice struct {
	Node string
	// OverheadMiB the VM takes there beside its guest's memory.
	OverheadMiB int64
}

// Pick gives the least loaded of the candidates that fit, those whose runtime can start VMs before the others, or, with ok false, what each of them has against the VM. The same
// arguments give the same choice, in whatever order the candidates come.
func Pick(req Requirements, candidates []Candidate) (choice Choice, refusals Refusals, ok bool) {
	var best *Candidate
	var bestLoad float64
	pinnedSeen := false
	for i := range candidates {
		c := &candidates[i]
		if req.NodeName != "" && req.NodeName != c.Node.Name {
			continue // nobody asks why a pinned VM does not go elsewhere
		}
		pinnedSeen = true
		if refused := Refuse(req, c); len(refused) > 0 {
			refusals = append(refusals, Refusal{Node: c.Node.Name, Reasons: refused})
			continue
		}
		l := load(req, c)
		if c.Avoid {
			l++ // after every other usable one, whose load is at most 1
		}
		if unusable(c) {
			l += 2 // after every usable one
		}
		if best == nil || l < bestLoad || l == bestLoad && c.Node.Name < best.Node.Name {
			best, bestLoad = c, l
		}
	}
	if req.NodeName != "" && !pinnedSeen {
		refusals = Refusals{{Node: req.NodeName, Reasons: []Reason{same("no such node, and spec.nodeName wants it")}}}
	}
	if best == nil {
		return Choice{}, refusals, false
	}
	return Choice{Node: best.Node.Name, OverheadMiB: best.overheadMiB()}, nil, true
}

// load of the node with the VM on it: the mean of the used parts of its budget, 0 empty to 1 full.
func load(req Requirements, c *Candidate) float64 {
	b := c.Imp.Status.Budget
	used := c.Bound.Plus(req.Size)
	part := func(used, of int64) float64 {
		if of <= 0 {
			return 1
		}
		return float64(used) / float64(of)
	}
	return (part(used.VCPU, b.VCPU) + part(used.MemoryMiB+c.overheadMiB(), b.MemoryMiB) + part(used.DiskGiB, b.DiskGiB)) / 3
}
