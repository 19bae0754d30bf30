// Package plan decides the next step for one VM. It is pure: what is on record, what was observed and the time go in, one step
// with its reason comes out. Package engine carries steps out and writes down what they did, by the transitions of this
// package, so that the rules below hold for whatever the engine does and wherever it is interrupted.
//
//	         ┌──────────────────────── in place, by restart.Next ───────────────────────┐
//	         ▼                                                                           │
//	EnsureImage → EnsureDisk → AttachNetwork → StartVMM → AwaitGuest → Configure → StartWorkload → Watch
//	                                              │            │            │                        │
//	                                              └──FailStart─┴────────────┘                  CollectVerdict
//	                                                     │                                           │
//	                                                 DestroyVMM  ◄───────────── Acknowledge ◄────────┤
//	                                                     │                                      (Final set)
//	                                                     │              halted, retries used up, to be placed elsewhere: idle, with the disk
//	                              removal: Detach → FreeDisk → WriteTombstone      finished: Detach → FreeDisk → idle
//
// What must never break: a record says that a workload's start is being sent before it is sent, and an ephemeral VM whose record
// says so never has another VMM; no second VMM is launched while Boot is on record; Final is never changed; what was
// ordered to be removed is removed; a step that fails waits before it is tried again.
package plan

import (
	"time"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/restart"
	"imp.dev/imp/internal/vmm"
)

// Version of Record on disk. It changes when a program would misread a record of another one. Within a version fields are only added,
// and one that is absent means what records meant before it was (testdata holds one of each age); a record of another version is set
// aside, and nothing of its VM is touched until a program that can read it is there, or the VM is removed.
const Version = 1

// Record is all that must survive the runtime. It never holds a secret.
type Record struct {
	Spec machine.Spec `json:"spec"`
	// Successor is a Spec of a higher assignment; it takes over once this one is removed.
	Successor *machine.Spec `json:"successor,omitempty"`
	Removal   *Removal      `json:"removal,omitempty"`
	RemovedAt *time.Time    `json:"removedAt,omitempty"`

	Incarnation int64 `json:"incarnation"`
	// Run grows over the life of the record: together with the VM's ID it names resources of the host.
	Run int64 `json:"run"`
	// IncarnationEnded says that the next boot is a new incarnation and not another try at the same.
	IncarnationEnded bool   `json:"incarnationEnded,omitempty"`
	Boot             *Boot  `json:"boot,omitempty"`
	Image            *Image `json:"image,omitempty"`
	Disk             *Disk  `json:"disk,omitempty"`
	// Pin is the image this VM was first started from: what a reference means does not change under a VM. It outlives Image.
	Pin *Pin `json:"pin,omitempty"`
	// NetworkUsed is written before anything is attached.
	NetworkUsed bool `json:"networkUsed,omitempty"`

	History restart.History `json:"history"`
	// QuickRetryUsed: a guest that did not answer was already tried again at once.
	QuickRetryUsed bool   `json:"quickRetryUsed,omitempty"`
	Retry          *Retry `json:"retry,omitempty"`

	Final    *machine.Exit `json:"final,omitempty"`
	LastExit *machine.Exit `json:"lastExit,omitempty"`
	// LastFailure is kept over incarnations that are well.
	LastFailure *machine.Failure `json:"lastFailure,omitempty"`
	StartedAt   *time.Time       `json:"startedAt,omitempty"`
	FinishedAt  *time.Time       `json:"finishedAt,omitempty"`

	Checks         Checks           `json:"checks"`
	DiskGeneration int64            `json:"diskGeneration,omitempty"`
	Timings        machine.Timings  `json:"timings"`
	Counters       machine.Counters `json:"counters"`
	// Revision is at least as high as any that was told to anybody.
	Revision int64 `json:"revision"`
}

// Removal is an order to remove.
type Removal struct {
	At    time.Time     `json:"at"`
	Grace time.Duration `json:"grace"`
	// KeepDisk moves the private disk into the trash instead of removing it.
	KeepDisk bool `json:"keepDisk,omitempty"`
}

// Image is the base this VM holds a link to.
type Image struct {
	Reference string       `json:"reference"`
	Digest    string       `json:"digest"`
	UUID      string       `json:"uuid"`
	Config    image.Config `json:"config"`
}

// Pin ties a reference to the digest it had at the first start.
type Pin struct {
	Reference string `json:"reference"`
	Digest    string `json:"digest"`
}

// Disk is the private disk; it belongs to the base it was first used with.
type Disk struct {
	BaseDigest string `json:"baseDigest"`
	GiB        int64  `json:"gib"`
}

// Boot is one run: from the intent to launch a VMM until nothing of it is left.
type Boot struct {
	Incarnation int64 `json:"incarnation"`
	Run         int64 `json:"run"`
	// Spec and Image as they were when the boot began; later ones wait for the next.
	Spec  machine.Spec `json:"spec"`
	Image Image        `json:"image"`
	// Nonce of the guest's marker; ConsoleStart is the console's length before this boot.
	Nonce        string `json:"nonce"`
	ConsoleStart int64  `json:"consoleStart"`
	HostBootID   string `json:"hostBootID"`
	// LaunchAt is when the launch was written down; Handle is nil until the launch is known to have happened.
	LaunchAt    time.Time   `json:"launchAt"`
	Handle      *vmm.Handle `json:"handle,omitempty"`
	LaunchedAt  *time.Time  `json:"launchedAt,omitempty"`
	AnsweredAt  *time.Time  `json:"answeredAt,omitempty"`
	Configured  *time.Time  `json:"configured,omitempty"`
	StartSentAt *time.Time  `json:"startSentAt,omitempty"`
	StartedAt   *time.Time  `json:"startedAt,omitempty"`
	Stop        *StopOrder  `json:"stop,omitempty"`
	// Failure is why the boot came to nothing before the workload's start was sent.
	Failure *Failure `json:"failure,omitempty"`
	// Exit is the verdict; Reported says that the guest told it and may be acknowledged.
	Exit     *machine.Exit `json:"exit,omitempty"`
	Reported bool          `json:"reported,omitempty"`
	AckedAt  *time.Time    `json:"ackedAt,omitempty"`
}

// StopOrder was given to the guest.
type StopOrder struct {
	At    time.Time     `json:"at"`
	Grace time.Duration `json:"grace"`
	// Why is machine.Stopped or machine.DeadlineExceeded.
	Why machine.Verdict `json:"why"`
}

// Failure of a start.
type Failure struct {
	Reason  fault.Reason `json:"reason"`
	Message string       `json:"message"`
}

// Retry of a step that failed.
type Retry struct {
	Step      Kind      `json:"step"`
	Failures  int       `json:"failures"`
	NotBefore time.Time `json:"notBefore"`
	// Permanent waits for another Spec.
	Permanent bool `json:"permanent,omitempty"`
}

// Checks of machine.Status.
type Checks struct {
	Disk       machine.Check `json:"disk"`
	Network    machine.Check `json:"network"`
	Started    machine.Check `json:"started"`
	GuestReady machine.Check `json:"guestReady"`
}

// VMM is what was observed of the process of Record.Boot.
type VMM string

// Observations of a VMM. Unknown is the state after a restart of the runtime, until Recover.
const (
	Unknown VMM = "Unknown"
	Alive   VMM = "Alive"
	Over    VMM = "Over" // the machine ended, whether or not a process is left
)

// Observation of one VM at one moment. It lives in memory.
type Observation struct {
	VMM VMM
	// GuestExit is what the guest reported in this boot.
	GuestExit *guestv1.Exit
	// Attached says that the interfaces' descriptors are open for the next launch.
	Attached bool
	// HasCredentials says that pull secrets are in memory.
	HasCredentials bool
	// HeardAt is when the guest answered anything last, and before it has, when this process of the runtime took its VMM up.
	HeardAt time.Time
}

// View is everything a decision may depend on.
type View struct {
	Record   Record
	Observed Observation
	Limits   Limits
	Now      time.Time
}

// Limits are the runtime's settings that decisions depend on.
type Limits struct {
	// Boot is how long a guest may take from launch until its workload's start can be sent.
	Boot time.Duration
	// Kill is added to a grace before the VMM is killed: the guest needs a moment to sync and to say goodbye.
	Kill time.Duration
	// Off is how long an acknowledged guest may take to stop its machine.
	Off time.Duration
	// Tombstone is how long a removed VM's record answers late orders.
	Tombstone time.Duration
	// Silence is how long a guest that was sent its workload's start may answer nothing while its VMM lives, before it is ended as
	// one that hangs; 0 is for ever.
	Silence time.Duration
}

// DefaultLimits are those of the product.
func DefaultLimits() Limits {
	return Limits{Boot: 30 * time.Second, Kill: 10 * time.Second, Off: 10 * time.Second, Tombstone: 24 * time.Hour, Silence: time.Minute}
}

// Clone gives a record whose parts can be changed without changing r. Exits, times and handles are never changed in place and
// are shared.
func (r Record) Clone() Record {
	r.Successor, r.Removal, r.Boot = clone(r.Successor), clone(r.Removal), clone(r.Boot)
	r.Image, r.Disk, r.Pin, r.Retry = clone(r.Image), clone(r.Disk), clone(r.Pin), clone(r.Retry)
	return r
}

func clone[T any](p *T) *T {
	if p == nil {
		return nil
	}
	c := *p
	return &c
}
