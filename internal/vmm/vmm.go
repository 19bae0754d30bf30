// Package vmm is the contract for what a VM monitor driver must do.
//
// One run is one VMM process: it boots a guest once and lives until that guest's machine has ended. The driver launches it
// detached, hands back a Handle that the caller writes down, and can take the run up again from the Handle alone after
// any restart, with the same answers.
//
//	Start ──► Instance ──(Done)──► Evidence ──► Destroy
//	            ▲
//	Recover ────┘   (Handle from the record; ErrGone when no such process lives: Evidence and Destroy still work)
//
// A driver must: kill what it launched if it cannot return its Handle; never match a process by its number alone; keep all
// evidence in files below Config.Dir, so that the verdict is the same whoever looks and whenever; leave nothing after Destroy
// (process, cgroup, sockets). It must not: decide about restarts, talk to the guest's agent, touch disks or networks.
package vmm

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"net"
	"os"
)

// ErrGone says that the run's VMM process does not exist any more.
var ErrGone = errors.New("VMM process is gone")

// Disk is one block device, found by the guest by its Serial. A read-only disk may be shared by several runs; the driver
// does not lock disks, their owner does.
type Disk struct {
	Serial   string `json:"serial"`
	Path     string `json:"path"`
	ReadOnly bool   `json:"readOnly,omitempty"`
}

// NIC is one network interface; TAP is inherited by the VMM and may be closed by the caller after Start.
type NIC struct {
	MAC string
	TAP *os.File
	// Lend is for a VMM that can only open a TAP by its name: the device leaves its network for the network namespace that is given, where the user owner
	// finds it as name, and TAP is closed. Back brings it home, open in the VMM. nil: the network cannot.
	Lend func(ctx context.Context, namespace *os.File, owner int) (name string, back func() error, err error) `json:"-"`
}

// Config of one run. Dir belongs to this run alone, exists, is empty, and outlives the VMM; ConsoleLog is appended to across
// runs and kept short by the driver while it has the run (internal/console). The caller owns both and removes them.
type Config struct {
	// VMID is the VM's UID, Run the number of this run in it; together they name the host's resources.
	VMID string
	Run  int64
	// Dir is for sockets and evidence. It may be deep: a driver must not depend on the length of its path (UNIX
	// sockets allow 107 bytes: it uses relative names and /proc/self/fd).
	Dir        string
	ConsoleLog string
	VCPU       int
	MemoryMiB  int64
	// Kernel is an uncompressed ELF, Initramfs a cpio archive; both are immutable files of the host.
	Kernel    string
	Initramfs string
	// KernelArgs are appended to what the driver needs itself.
	KernelArgs []string
	Disks      []Disk
	NICs       []NIC
	// Cgroup is the name of the group this run shall live in, within the runtime's instance (cgroup.Tree), made and removed by the
	// driver: one path element of letters, digits, - and _, the same for all runs of a VM as long as only one of them lives.
	Cgroup string
	// Script is for the fake driver only: how the machine and its guest shall misbehave (JSON of fake.Script).
	Script json.RawMessage
}

// Handle finds a run again. Driver and Version say who can read Data; a runtime refuses a Handle it cannot read instead of
// guessing.
type Handle struct {
	Driver  string          `json:"driver"`
	Version int             `json:"version"`
	Data    json.RawMessage `json:"data"`
}

// State of the machine as the driver sees it at one moment.
type State string

// Machine states. Ended means that the guest's machine stopped by itself and the process, where it still exists, waits to be
// destroyed; Gone that there is no process.
const (
	Running  State = "Running"
	Ended    State = "Ended"
	Panicked State = "Panicked"
	Gone     State = "Gone"
)

// Cause is what a driver knows of a machine's end, in the order of section 3 of the architecture: its own event or state first,
// then the kernel's last words on the console, then the cgroup. CauseUnknown with State Gone means killed without evidence.
type Cause string

// Causes of a machine's end.
const (
	CauseUnknown  Cause = ""
	CausePowerOff Cause = "PowerOff"  // the guest switched the machine off (or halted)
	CauseReboot   Cause = "Reboot"    // the guest asked for a reset
	CausePanic    Cause = "Panic"     // the guest's kernel panicked
	CauseOOM      Cause = "OOMKilled" // the host's kernel killed the VMM for want of memory in its cgroup
	CauseHost     Cause = "Host"      // somebody on the host ended it in an orderly way (signal, QMP quit)
	CauseVMMError Cause = "VMMError"  // the VMM gave up by itself; Detail has its words
	CauseHostBoot Cause = "HostBoot"  // the host was booted since
)

// Evidence of how a run stands or ended. It is gathered from files and the live process, never from memory alone.
type Evidence struct {
	State State
	Cause Cause
	// Detail is one line for a human: the VMM's last log line, the panic's first line.
	Detail string
}

// Kinds of what is Found.
const (
	FoundProcess = "process"
	FoundCgroup  = "cgroup"
	FoundJail    = "jail"
)

// Found is one thing of a run on the host.
type Found struct {
	// Cgroup is that of Config; Destroy with a zero Handle and this Cgroup removes the thing.
	Cgroup string
	// Kind, and Name as an administrator finds it: a pid, a cgroup's path.
	Kind, Name string
	// Outside says of a process that somebody took it out of its cgroup.
	Outside bool
}

// Usage of the host by one run.
type Usage struct {
	// MemoryBytes and CPUNanos are the cgroup's figures.
	MemoryBytes int64
	CPUNanos    int64
}

// Instance is one run that lives or has lived. Methods may be called from many goroutines.
type Instance interface {
	Handle() Handle
	// PID of the VMM on the host, for logs and tests.
	PID() int
	// Done is closed when the machine has ended: the process is gone, or the guest stopped and the process only waits for
	// Destroy. It closes within a second of the fact, without polling faster than that where events exist.
	Done() <-chan struct{}
	// DialGuest opens the byte pipe to the guest's agent. One connection at a time. After Done it gives ErrGone.
	DialGuest(ctx context.Context) (net.Conn, error)
	// Kill ends the VMM at once. It returns when the process is gone or ctx ends; a gone process is success.
	Kill(ctx context.Context) error
	Usage(ctx context.Context) (Usage, error)
	// Close lets go of descriptors and goroutines; the VMM goes on.
	Close() error
}

// Capabilities is what a driver found it can do on this host.
type Capabilities struct {
	// Usable says that Start can work; Problem, else, says what is missing and the remedy ("no QEMU at /usr/bin/…: …").
	Usable  bool
	Problem string
	// VMMVersion as the program prints it; Accelerator is "tcg", "kvm" or "".
	VMMVersion  string
	Accelerator string
	// Containment is what keeps a VMM that a guest has taken over from the host: "jailer", "user" (a user of its own without any rights), "none".
	Containment string
	// Flaws are what is known to be wrong with this version of the VMM and does not hinder its use, each with its remedy.
	Flaws []string
}

// Figures are what a VMM counted of one VM since this process took its run up.
type Figures struct {
	VMID string
	// Exits of the guest's vCPUs to the VMM, by kind.
	Exits map[string]uint64
	// Bytes that the guest's disks and network interfaces moved, as the guest sees it.
	BlockRead, BlockWritten uint64
	NetReceived, NetSent    uint64
	// Throttles are the times that a limit held the guest back, by what it limits.
	Throttles map[string]uint64
}

// Clone gives a copy that shares nothing.
func (f Figures) Clone() Figures {
	f.Exits, f.Throttles = maps.Clone(f.Exits), maps.Clone(f.Throttles)
	return f
}

// Metered is a Driver whose VMMs count for themselves.
type Metered interface {
	// Figures of every run that this process has, ordered by VMID.
	Figures() []Figures
}

// Pausable is an Instance whose machine can be made to stand still.
type Pausable interface {
	// Pause stops vCPUs, devices and clocks; what the guest is asked meanwhile it answers later. It refuses where the VMM would lose the guest by it.
	Pause(ctx context.Context) error
	Resume(ctx context.Context) error
	Paused(ctx context.Context) (bool, error)
}

// Interruptible is an Instance that can ask its guest's init to stop where the guest's agent does not answer.
type Interruptible interface {
	// CtrlAltDel presses the keys. That it returns says nothing of what the guest makes of them.
	CtrlAltDel(ctx context.Context) error
}

// Driver of one kind of VMM.
type Driver interface {
	// Name is "qemu", "firecracker" or "fake".
	Name() string
	// Probe looks at the host. It is cheap enough for start-up and a slow period.
	Probe(ctx context.Context) Capabilities
	// OverheadMiB is what a VMM of this size takes beside the guest's memory: the cgroup's limit. Placement and admission count the
	// smallest VM's for every VM.
	OverheadMiB(vcpu int, memoryMiB int64) int64
	// Start launches a run. An error (fault RuntimeStartFailed, naming binary, kernel, or the VMM's own words) means that
	// nothing of it is left on the host. While an earlier run in the same Cgroup lives, Start fails and that run goes on.
	Start(ctx context.Context, c Config) (Instance, error)
	// Recover takes up a run that was started by an earlier process of the runtime. ErrGone: no such process; c then serves
	// Evidence and Destroy.
	Recover(ctx context.Context, c Config, h Handle) (Instance, error)
	// Evidence may be asked at any time of any run, also one whose process is gone or was never recovered.
	Evidence(ctx context.Context, c Config, h Handle) (Evidence, error)
	// Destroy kills what lives of the run and removes cgroup and sockets; files of evidence and console stay. With a zero Handle
	// (the runtime died between Start and the record) it finds the run by its cgroup. Idempotent; nothing there is success.
	Destroy(ctx context.Context, c Config, h Handle) error
	// Runs lists everything of this driver that is on the host within the runtime's instance, for the audit: also a process that
	// was taken out of its cgroup. What is listed is known by a mark that a driver left, never by a program's name.
	Runs(ctx context.Context) ([]Found, error)
}
