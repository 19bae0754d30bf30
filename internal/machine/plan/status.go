package plan

import (
	"reflect"
	"slices"

	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/network"
)

// Status makes the whole truth of a record and what is being done. progress is shown as it is.
func Status(r Record, now Step, progress string) machine.Status {
	s := machine.Status{
		ID: r.Spec.ID, Namespace: r.Spec.Namespace, Name: r.Spec.Name, Assignment: r.Spec.Assignment, Revision: r.Revision,
		Generation: r.Spec.Generation, State: StateOf(r, now), Incarnation: r.Incarnation, Run: r.Run,
		Disk: r.Checks.Disk, Network: r.Checks.Network, Started: r.Checks.Started, GuestReady: r.Checks.GuestReady,
		RestartRequired: RestartRequired(r), Final: r.Final, LastExit: r.LastExit, History: r.History,
		StartedAt: r.StartedAt, FinishedAt: r.FinishedAt, DiskGeneration: r.DiskGeneration,
		Timings: r.Timings, Progress: progress, Counters: r.Counters,
		LastFailure: r.LastFailure, Cluster: r.Spec.Cluster,
	}
	if r.Pin != nil {
		s.ImageDigest = r.Pin.Digest
	}
	return s
}

// StateOf says where the VM stands.
func StateOf(r Record, now Step) machine.State {
	switch b := r.Boot; {
	case r.RemovedAt != nil:
		return machine.Removed
	case r.Removal != nil:
		return machine.Removing
	case r.Final != nil:
		return machine.Finished
	case b != nil && (b.Exit != nil || b.Failure != nil || b.Stop != nil):
		return machine.Stopping
	case b != nil && r.Spec.Halt != nil:
		return machine.Stopping
	case b != nil && b.StartedAt != nil:
		return machine.Running
	case b != nil:
		return machine.Starting
	case r.Spec.Halt != nil && (now.Kind == "" || now.Rests()):
		return machine.Halted
	case r.Spec.Halt != nil:
		return machine.Stopping // the step under way goes on to its end
	case now.Kind == "" || now.Rests():
		return machine.Pending
	default:
		return machine.Starting
	}
}

// RestartRequired says that the running incarnation was booted from a Spec that differs in what only a boot can change.
func RestartRequired(r Record) bool {
	b := r.Boot
	if b == nil || b.Exit != nil || b.Failure != nil || r.Removal != nil {
		return false
	}
	was, is := b.Spec, r.Spec
	return was.Image.Reference != is.Image.Reference || was.VCPU != is.VCPU || was.MemoryMiB != is.MemoryMiB || was.DiskGiB != is.DiskGiB ||
		!reflect.DeepEqual(was.Workload, is.Workload) || !SameInterfaces(was.Interfaces, is.Interfaces)
}

// SameInterfaces says that a guest would see no difference. A list that is empty and one that is not there are one.
func SameInterfaces(a, b []network.Interface) bool {
	return slices.EqualFunc(a, b, func(x, y network.Interface) bool {
		return x.Name == y.Name && x.Network == y.Network && x.MAC == y.MAC && x.Gateway == y.Gateway && x.MTU == y.MTU &&
			slices.Equal(x.Addresses, y.Addresses) && slices.Equal(x.Nameservers, y.Nameservers) && slices.Equal(x.SearchDomains, y.SearchDomains)
	})
}

// Need is what a VM takes of the node's budget.
type Need struct{ VCPU, MemoryMiB, DiskGiB int64 }

// NeedOf gives what the record's VM takes now, with the VMM's overhead: nothing once it has ended and is cleared away, else the greatest
// of what runs, what is wished, and what was accepted in its place.
func NeedOf(r Record, overhead func(vcpu int, memoryMiB int64) int64) Need {
	n := Need{}
	take := func(s machine.Spec) {
		of := needOfSpec(s, overhead)
		n = Need{max(n.VCPU, of.VCPU), max(n.MemoryMiB, of.MemoryMiB), max(n.DiskGiB, of.DiskGiB)}
	}
	if r.Successor != nil {
		take(*r.Successor)
	}
	if r.RemovedAt != nil || (r.Final != nil && r.Boot == nil && r.Disk == nil && r.Image == nil) {
		return n
	}
	take(r.Spec)
	if r.Boot != nil {
		take(r.Boot.Spec)
	}
	return n
}

// NeedOfSpec gives what a VM of this Spec will take.
func NeedOfSpec(s machine.Spec, overhead func(vcpu int, memoryMiB int64) int64) Need {
	return needOfSpec(s, overhead)
}

func needOfSpec(s machine.Spec, overhead func(vcpu int, memoryMiB int64) int64) Need {
	return Need{VCPU: int64(s.VCPU), MemoryMiB: s.MemoryMiB + overhead(s.VCPU, s.MemoryMiB), DiskGiB: s.DiskGiB}
}
