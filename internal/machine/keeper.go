package machine

import (
	"context"
	"time"
)

// Finding is something of this instance that the node has and no record speaks of, or the other way round.
type Finding struct {
	// Kind: process, cgroup, namespace, tap, device, rules, directory, socket, disk, network, record, trash.
	Kind string
	// ID is the VM's or the network's; Name what an administrator finds on the host (a path, a cgroup, a link).
	ID, Name string
	// Since is when the audit saw it first; it is repaired once it has been there for a grace age.
	Since time.Time
	// Repaired says that it is gone, or right, now. Problem says why not.
	Repaired bool
	Problem  string
}

// Discarded is a private disk in the trash.
type Discarded struct {
	// Name is that of Keeper.Restore.
	Name                   string
	ID, VMNamespace, VM    string
	BaseDigest             string
	GiB, Bytes             int64
	DiscardedAt, ExpiresAt time.Time
	// Why it was discarded, in one line.
	Why string
}

// Keeper is what the runtime offers to an administrator of the node, and to nobody else.
type Keeper interface {
	// Audit compares the node with the records at once. With repair it removes what is nobody's without waiting for the grace age;
	// what a running VM has lost is put back where that is possible.
	Audit(ctx context.Context, repair bool) ([]Finding, error)
	// Trash lists the disks that can be given back, the latest first.
	Trash(ctx context.Context) ([]Discarded, error)
	// Restore gives the disk name to the VM id, which must be known to the runtime and halted (desiredState Stopped) or not yet
	// started, and of the same base image: a disk carries the changes to one base. The disk it had goes to the trash.
	Restore(ctx context.Context, name, id string) error
}
