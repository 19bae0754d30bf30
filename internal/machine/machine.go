// Package machine is what one VM on one node is, and the Service that looks after such VMs.
//
// The Service is offered by the runtime (package engine) and used by the agent over gRPC (package rpc); both pass the same
// suite (package machinetest). It is told what shall be (Ensure, Remove) and tells what is (List, Watch); it never blocks
// on a VM's work. It takes no path, device, argv or mode of the host: only names, sizes, references and bytes for the guest.
//
//	agent ── Ensure(Spec) ──►  Service  ── one worker a VM: observe → plan.Next → one step → record → again
//	      ◄── Watch(Status) ──
//
// Three numbers order everything: Assignment (the operator's fencing token), Incarnation (one boot of a guest, 1.. in each
// assignment), Run (one VMM process of it). An order with a lower Assignment than one already seen is refused.
package machine

import (
	"context"
	"time"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/network"
	"imp.dev/imp/internal/restart"
)

// Lifecycle says what an end of the workload means.
type Lifecycle string

// Lifecycles. An ephemeral VM's workload runs at most once; a persistent one is started again by its policy.
const (
	Ephemeral  Lifecycle = "ephemeral"
	Persistent Lifecycle = "persistent"
)

// Spec is everything the runtime needs to look after one VM. It must be valid by Validate; the runtime trusts nothing else of it.
type Spec struct {
	// ID is the ImpVM's UID; Namespace and Name are for logs, the guest's hostname, and events.
	ID        string `json:"id"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Assignment is the fencing token; Generation the ImpVM's metadata.generation this Spec was made of.
	Assignment int64     `json:"assignment"`
	Generation int64     `json:"generation"`
	Lifecycle  Lifecycle `json:"lifecycle"`
	Image      Image     `json:"image"`
	VCPU       int       `json:"vcpu"`
	MemoryMiB  int64     `json:"memoryMiB"`
	DiskGiB    int64     `json:"diskGiB"`
	Workload   Workload  `json:"workload"`
	// Interfaces of the guest; none means a loopback only.
	Interfaces []network.Interface `json:"interfaces,omitempty"`
	Probe      *Probe              `json:"probe,omitempty"`
	// Grace is the time between the stop signal and the kill; 0 kills at once.
	Grace time.Duration `json:"grace"`
	// Deadline, when set, ends the VM for good with DeadlineExceeded, whatever it is doing.
	Deadline *time.Time `json:"deadline,omitempty"`
	// Restart policy and the history known to the object (from an earlier node); the node's own newer history wins.
	Restart restart.Policy  `json:"restart"`
	History restart.History `json:"history"`
	// Reset with a value that was not acted on yet forgets the VM's failures, once (restart.History.WithReset).
	Reset string `json:"reset,omitempty"`
	// Halt, when set, stops the VM within Grace at any moment and keeps it stopped, whatever its policy says; disk, network and
	// history stay. nil starts it again at once. Only for Persistent VMs.
	Halt *Halt `json:"halt,omitempty"`
	// Cluster is the UID of the namespace kube-system of the cluster whose object this Spec was made of: absence from another
	// cluster's list says nothing.
	Cluster string `json:"cluster,omitempty"`
	// Script drives the fake driver (annotation imp.dev/fake-script); other drivers refuse a Spec that has one.
	Script []byte `json:"script,omitempty"`
}

// Halt is why a VM is to be stopped; it is shown on the check Started.
type Halt struct {
	Reason  fault.Reason `json:"reason"`
	Message string       `json:"message"`
}

// Image names the image and how to get it. Credentials are kept in memory only.
type Image struct {
	Reference string           `json:"reference"`
	Policy    image.PullPolicy `json:"policy"`
	// Digest pinned at the first start ("" before).
	Digest      string             `json:"digest,omitempty"`
	Credentials []image.Credential `json:"-"`
	// NeedsCredentials says that the VM names pull secrets: without Credentials in memory (a restart) the pull waits for them.
	NeedsCredentials bool `json:"needsCredentials,omitempty"`
}

// Workload is the user's part of the command; what is absent comes from the image (Kubernetes' rules: Command replaces
// Entrypoint and drops Cmd, Args replace Cmd).
type Workload struct {
	Command    []string `json:"command,omitempty"`
	Args       []string `json:"args,omitempty"`
	Env        []EnvVar `json:"env,omitempty"`
	WorkingDir string   `json:"workingDir,omitempty"`
	DataPaths  []string `json:"dataPaths,omitempty"`
}

// EnvVar is one variable, byte for byte.
type EnvVar struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// Probe is the readiness probe: an HTTP GET made by the guest's agent to the guest's loopback.
type Probe struct {
	Path             string        `json:"path"`
	Port             int           `json:"port"`
	Period           time.Duration `json:"period"`
	Timeout          time.Duration `json:"timeout"`
	FailureThreshold int           `json:"failureThreshold"`
}

// State is where a VM stands on this node.
type State string

// States. Finished and Removed are final: Finished keeps record and console until Remove; Removed is a tombstone that
// answers late orders and is forgotten after a day.
const (
	Pending  State = "Pending"  // accepted; waits for a try (first, or backing off: Status.History.NextTryAt)
	Starting State = "Starting" // disk, network, VMM, guest
	Running  State = "Running"  // the workload was started and has not ended
	Stopping State = "Stopping"
	Halted   State = "Halted" // kept stopped by Spec.Halt; disk and network stay
	Finished State = "Finished"
	Removing State = "Removing"
	Removed  State = "Removed"
)

// Verdict is how a boot ended. It is the reason users read.
type Verdict string

// Verdicts, by the first evidence of: the guest's report, the VMM's event or state, the kernel's last words, the cgroup,
// the VMM's log; else Killed.
const (
	Succeeded        Verdict = "Succeeded"        // the workload exited 0
	Failed           Verdict = "Failed"           // the workload exited otherwise
	GuestPanic       Verdict = "GuestPanic"       // the guest's kernel panicked
	GuestReboot      Verdict = "GuestReboot"      // the guest rebooted without a report
	GuestPowerOff    Verdict = "GuestPowerOff"    // the guest switched itself off without a report
	VMMKilled        Verdict = "VMMKilled"        // the VMM vanished without a word
	OOMKilled        Verdict = "OOMKilled"        // the host's kernel killed the VMM
	VMMFailed        Verdict = "VMMFailed"        // the VMM gave up
	GuestHung        Verdict = "GuestHung"        // the guest was silent for Limits.Silence while its VMM lived; it was ended for that
	DeadlineExceeded Verdict = "DeadlineExceeded" // Spec.Deadline passed
	LostWithHost     Verdict = "LostWithHost"     // the host was booted under it
	Lost             Verdict = "Lost"             // a one-shot that was sent its start, and nobody can say how it ended
	Stopped          Verdict = "Stopped"          // ended by order
)

// Exit is the end of one incarnation.
type Exit struct {
	Incarnation int64     `json:"incarnation"`
	Run         int64     `json:"run"`
	Verdict     Verdict   `json:"verdict"`
	At          time.Time `json:"at"`
	// Code is the workload's exit code where the guest (or its marker) told one.
	Code *int32 `json:"code,omitempty"`
	// Message is one line for a human.
	Message string `json:"message"`
	// ConsoleTail is the raw end of the serial console, at most 4 KiB.
	ConsoleTail []byte `json:"consoleTail,omitempty"`
	// Marker says that the guest's marker with this incarnation's nonce was seen on the serial console.
	Marker bool `json:"marker,omitempty"`
}

// Reasons of Started and GuestReady that are no failure of a step.
const (
	ReasonBackingOff   fault.Reason = "BackingOff"       // the workload ended and is started again later
	ReasonProbeFailing fault.Reason = "ProbeFailing"     // the readiness probe got no healthy answer
	ReasonGuestSilent  fault.Reason = "GuestSilent"      // the guest's agent could not be asked
	ReasonExhausted    fault.Reason = "RetriesExhausted" // retries are used up; waits for Spec.Reset
	ReasonCoolingDown  fault.Reason = "CoolingDown"      // retries are used up; tried again at History.NextTryAt
	ReasonElsewhere    fault.Reason = "Rescheduled"      // the next try is not this node's (History.Elsewhere)
)

// Check is one thing that is true, false, or not known yet, with the reason a user reads.
type Check struct {
	// OK is nil while unknown.
	OK      *bool        `json:"ok,omitempty"`
	Reason  fault.Reason `json:"reason,omitempty"`
	Message string       `json:"message,omitempty"`
	Since   time.Time    `json:"since"`
}

// Timings of the latest incarnation's start, each a duration; zero where a stage has not been passed. Together they are the time
// from Ensure to the workload's start, less waiting and retries.
type Timings struct {
	Pull     time.Duration `json:"pull"`     // resolving, fetching and building the image (0 if cached)
	Disk     time.Duration `json:"disk"`     // link and private disk
	Network  time.Duration `json:"network"`  // TAP and its surroundings
	VMM      time.Duration `json:"vmm"`      // launching until the VMM answers
	Kernel   time.Duration `json:"kernel"`   // VMM answered → guest's agent answered
	Guest    time.Duration `json:"guest"`    // Configure
	Workload time.Duration `json:"workload"` // Start sent → accepted and running
}

// Counters grow for the life of a record; a consumer that was away misses nothing.
type Counters struct {
	Starts   int64 `json:"starts"`   // VMM processes launched
	Exits    int64 `json:"exits"`    // incarnations ended
	Restarts int64 `json:"restarts"` // incarnations after the first, in this assignment
	Adopted  int64 `json:"adopted"`  // found again after a restart of the runtime
	Retries  int64 `json:"retries"`  // steps that failed and were tried again
	Silent   int64 `json:"silent"`   // times the guest fell silent
	// Ends of incarnations by verdict: stopped, rebooted, out of memory, lost with the host and so on.
	Ends map[Verdict]int64 `json:"ends,omitempty"`
}

// Failure is the latest end of an incarnation, or of a try to start one, that was not as it should be.
type Failure struct {
	// Reason is a Verdict, or the fault.Reason of a start that came to nothing.
	Reason      fault.Reason `json:"reason"`
	Message     string       `json:"message"`
	At          time.Time    `json:"at"`
	Incarnation int64        `json:"incarnation"`
	Code        *int32       `json:"code,omitempty"`
	// ConsoleTail is the raw end of the serial console, at most 4 KiB.
	ConsoleTail []byte `json:"consoleTail,omitempty"`
}

// Status is the full truth about one VM on this node at one moment.
type Status struct {
	ID         string `json:"id"`
	Namespace  string `json:"namespace"`
	Name       string `json:"name"`
	Assignment int64  `json:"assignment"`
	// Revision grows with every change of this VM's Status, also over restarts of the runtime: a consumer drops what is not newer.
	Revision   int64 `json:"revision"`
	Generation int64 `json:"generation"` // of the Spec last accepted
	State      State `json:"state"`
	// Incarnation is 0 before the first boot.
	Incarnation int64 `json:"incarnation"`
	Run         int64 `json:"run"`
	// The four checks, in the order in which they become true.
	Disk       Check `json:"disk"`
	Network    Check `json:"network"`
	Started    Check `json:"started"`
	GuestReady Check `json:"guestReady"`
	// RestartRequired says that the Spec has changed in a way the running incarnation does not have.
	RestartRequired bool `json:"restartRequired,omitempty"`
	// Final is the end of a Finished VM; LastExit the latest end of any incarnation.
	Final    *Exit `json:"final,omitempty"`
	LastExit *Exit `json:"lastExit,omitempty"`
	// LastFailure is kept over incarnations that are well.
	LastFailure *Failure        `json:"lastFailure,omitempty"`
	History     restart.History `json:"history"`
	// Cluster of the Spec last accepted.
	Cluster string `json:"cluster,omitempty"`
	// StartedAt is when the current or last incarnation's workload started, FinishedAt when the VM became Finished.
	StartedAt  *time.Time `json:"startedAt,omitempty"`
	FinishedAt *time.Time `json:"finishedAt,omitempty"`
	// ImageDigest pinned by the first start; DiskGeneration counts private disks made for this VM on this node.
	ImageDigest    string  `json:"imageDigest,omitempty"`
	DiskGeneration int64   `json:"diskGeneration,omitempty"`
	Timings        Timings `json:"timings"`
	// Progress is one line about the stage under way ("pulling 12 of 80 MiB"), empty at rest.
	Progress string   `json:"progress,omitempty"`
	Counters Counters `json:"counters"`
}

// Ref names a VM and the assignment an order was given under.
type Ref struct {
	ID         string
	Assignment int64
}

// Removal says how a VM is removed.
type Removal struct {
	Grace time.Duration
	// KeepDisk moves the private disk into the trash, from where Keeper.Restore gives it back for 72 h: nobody said that it is not
	// wanted any more.
	KeepDisk bool
}

// Update is one message of Watch.
type Update struct {
	// Status of one VM; nil in the message that ends the initial list.
	Status *Status
	// Synced is true in exactly one message: everything before it was the state at the beginning.
	Synced bool
}

// ConsoleChunk is a piece of a VM's serial console. Of a long one only the head and the tail are kept: a gap shows as an
// Offset greater than asked for.
type ConsoleChunk struct {
	Offset int64
	Data   []byte
	// Size is the console's length so far, in bytes, counting what was dropped.
	Size int64
}

// Info of the runtime and its node.
type Info struct {
	// Version of the runtime, Instance its id, BootID the host's boot.
	Version, Instance, BootID string
	Features                  []string
	Driver                    string
	// Usable says that VMs can be started; Problem why not.
	Usable        bool
	Problem       string
	VMMVersion    string
	Accelerator   string
	KernelDigest  string
	CgroupVersion string
	Architecture  string
	// Budget is what VMs may take in all; overhead is counted by OverheadMiB per VM.
	BudgetVCPU      int64
	BudgetMemoryMiB int64
	BudgetDiskGiB   int64
	// OverheadMiB a VM's VMM takes beside its guest's memory.
	OverheadMiB int64
	ImageCache  image.Usage
	// Network is the node's place in networks.
	Network network.Host
}

// Service looks after the VMs of one node.
type Service interface {
	Info(ctx context.Context) (Info, error)
	// Ensure makes spec the wish for the VM spec.ID and returns its state at this moment; the work goes on behind. Repeating it is
	// free. It fails with StaleAssignment for a lower assignment than known, or one already removed; InvalidSpec when Validate
	// does; NoCapacity when the node's budget cannot hold a new VM. A spec of a higher assignment replaces an older one of
	// the same VM once that is removed from the node.
	Ensure(ctx context.Context, spec Spec) (Status, error)
	// Remove stops the VM within grace (0: kill) and removes everything of it from the node, in every state. It returns the
	// state at this moment; the end is State Removed in Watch. A VM that is not known is Removed at once. A repeat can only
	// shorten the grace, and no repeat gives up a disk that is to be kept.
	Remove(ctx context.Context, ref Ref, how Removal) (Status, error)
	// List gives all VMs, tombstones too, ordered by ID.
	List(ctx context.Context) ([]Status, error)
	// Watch calls each with the present state of every VM, then one Synced, then with the full state at each change (several
	// changes in a row may come as one), until ctx ends or each fails. It returns why.
	Watch(ctx context.Context, each func(Update) error) error
	// SetNetwork makes a network known that VMs' interfaces name, or changes it; it is durable, and guests feel it at once. It fails
	// with InvalidSpec when ValidateNetwork does, else with NetworkSetupFailed.
	SetNetwork(ctx context.Context, spec network.Spec) error
	// ForgetNetwork undoes it. It fails while a VM is attached; a network that is not known is success.
	ForgetNetwork(ctx context.Context, id string) error
	// Networks lists the networks that are known, ordered by ID.
	Networks(ctx context.Context) ([]network.Status, error)
	// Console reads at most max bytes of the serial console from offset on; an empty Data with Size equal to offset is the end so far.
	// A negative offset counts from the end.
	Console(ctx context.Context, id string, offset int64, max int) (ConsoleChunk, error)
}
