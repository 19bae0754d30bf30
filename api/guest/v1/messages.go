// Package guestv1 is the protocol between a host and the imp-guest in one VM: version 1.
//
// Transport: a byte pipe (virtio-serial on QEMU, vsock on Firecracker), synchronised by the handshake of package
// internal/guest/channel, carrying one yamux session in which the HOST opens streams. One stream is one call: the host
// writes one Request frame and half-closes nothing; the guest writes one Response frame and closes the stream, except for
// calls that end in bytes (MethodOutput), where raw bytes follow the Response until the stream closes.
//
// A frame is a big-endian uint32 length (at most MaxFrame) and that many bytes of JSON. Unknown fields are ignored and absent
// ones have their zero value, so either side may be newer. Byte strings that need not be UTF-8 are []byte (base64 in
// JSON): arguments and environment arrive byte for byte.
//
// Order of calls: Hello any time; Configure, repeatable with the same or a new ID; Start once per boot; Wait, Output, Stop,
// Probe from any later connection; Acknowledge lets the guest power off after the workload's end.
package guestv1

// Version of this protocol. A guest of version 1 serves every host that speaks 1.
const Version = 1

// MaxFrame is the largest frame either side accepts, in bytes: room for the kernel's own limit on arguments and
// environment together (2 MiB by default, execve(2)) in base64.
const MaxFrame = 8 << 20

// PortName is the name of the virtio-serial port the guest looks for in /sys/class/virtio-ports/*/name.
const PortName = "imp.0"

// VsockPort is the port that a guest without a virtio-serial port listens on, by AF_VSOCK.
const VsockPort uint32 = 1024

// Disk serials, by which the guest finds its disks in /sys/block/*/serial.
const (
	SerialBase    = "base"
	SerialPrivate = "private"
)

// Methods.
const (
	MethodHello       = "Hello"
	MethodConfigure   = "Configure"
	MethodStart       = "Start"
	MethodWait        = "Wait"
	MethodAcknowledge = "Acknowledge"
	MethodStop        = "Stop"
	MethodProbe       = "Probe"
	MethodOutput      = "Output"
)

// Request is the first frame on a stream. Exactly the member named by Method is set; Hello, Wait and Acknowledge need none.
type Request struct {
	Method    string     `json:"method"`
	Configure *Configure `json:"configure,omitempty"`
	Start     *Start     `json:"start,omitempty"`
	Stop      *Stop      `json:"stop,omitempty"`
	Probe     *Probe     `json:"probe,omitempty"`
	Output    *Output    `json:"output,omitempty"`
}

// Response answers a Request. Error is set or the member that belongs to the method is.
type Response struct {
	Error  *Error       `json:"error,omitempty"`
	Hello  *Hello       `json:"hello,omitempty"`
	Exit   *Exit        `json:"exit,omitempty"`
	Probe  *ProbeResult `json:"probe,omitempty"`
	Output *OutputStart `json:"output,omitempty"`
}

// Error codes.
const (
	CodeInvalid     = "Invalid"     // the request cannot be carried out as it is; repeating it is no use
	CodeFailed      = "Failed"      // carrying it out failed; Message says at which step and why, with the last kernel lines where they tell more
	CodeConflict    = "Conflict"    // Start with another ID after one was accepted
	CodeUnsupported = "Unsupported" // a method this guest does not know
	CodeNotStarted  = "NotStarted"  // Wait, Stop or Output before Start
)

// Error of a call.
type Error struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// Hello is what a guest says of itself.
type Hello struct {
	Version  int      `json:"version"`
	Features []string `json:"features,omitempty"`
	// AgentVersion is the version imp-guest was built as; BootID is the kernel's boot_id: a new one is a new boot.
	AgentVersion  string `json:"agentVersion"`
	BootID        string `json:"bootID"`
	KernelRelease string `json:"kernelRelease"`
	// State tells what was accepted so far: the IDs of Configure and Start, empty before.
	ConfigureID string `json:"configureID,omitempty"`
	StartID     string `json:"startID,omitempty"`
	// UptimeMillis is CLOCK_BOOTTIME when init's main began and when the port was open: the boot's stages.
	InitMillis int64 `json:"initMillis"`
	PortMillis int64 `json:"portMillis"`
}

// Configure gives the guest its identity and its file systems. A repeat with the same ID returns the first answer; with a new ID
// it applies what can change in a running guest (hostname, files, interfaces, clock, entropy), for use after a restore.
type Configure struct {
	ID string `json:"id"`
	// Hostname, at most 63 bytes. Also written to /etc/hostname and /etc/hosts.
	Hostname string `json:"hostname"`
	// DataPaths are absolute paths that live on the private disk's own ext4 instead of the overlay, filled from the image's
	// directory when first made: the image's OCI Volumes and the user's dataPaths together.
	DataPaths  []string    `json:"dataPaths,omitempty"`
	Interfaces []Interface `json:"interfaces,omitempty"`
	// Nameservers and SearchDomains for /etc/resolv.conf; without nameservers the image's file is left alone.
	Nameservers   []string `json:"nameservers,omitempty"`
	SearchDomains []string `json:"searchDomains,omitempty"`
	// UnixNanos is the host's wall clock when the request was written; 0 leaves the clock alone.
	UnixNanos int64 `json:"unixNanos,omitempty"`
	// Entropy is mixed into the kernel's pool and credited; 0 or at least 32 bytes.
	Entropy []byte `json:"entropy,omitempty"`
}

// Interface is one NIC, found by its MAC.
type Interface struct {
	MAC       string   `json:"mac"`
	Addresses []string `json:"addresses,omitempty"` // CIDR
	Gateway   string   `json:"gateway,omitempty"`
	MTU       int      `json:"mtu,omitempty"`
}

// Start runs the workload. The first Start of a boot is accepted before anything is executed; a repeat with the same ID
// gives the same answer and runs nothing.
type Start struct {
	ID string `json:"id"`
	// Nonce is printed in the marker at the end, so that a workload's own IMP_SUCCESS is not taken for it.
	Nonce string `json:"nonce"`
	// Argv is the whole command; Argv[0] is looked up in PATH of Env inside the guest's root.
	Argv [][]byte `json:"argv"`
	// Env is NAME=value, complete; PATH and HOME are added where missing.
	Env [][]byte `json:"env,omitempty"`
	// User as in the OCI config: "", name, uid, name:group, uid:gid.
	User       string `json:"user,omitempty"`
	WorkingDir string `json:"workingDir,omitempty"`
	// StopSignal is a name or a number ("SIGTERM", "TERM", "15"); empty means SIGTERM.
	StopSignal string `json:"stopSignal,omitempty"`
}

// Exit is how the workload ended. Code is the exit status, 128+n for signal n, 127 for a missing binary, 126 for one that
// cannot be executed or a user that does not exist; Message says which in words.
type Exit struct {
	Code    int    `json:"code"`
	Signal  int    `json:"signal,omitempty"`
	Message string `json:"message,omitempty"`
	// UnixNanos is the guest's clock at the end.
	UnixNanos int64 `json:"unixNanos,omitempty"`
	// OOMKilled says that the guest's kernel killed the workload for want of memory.
	OOMKilled bool `json:"oomKilled,omitempty"`
}

// Stop ends the workload: StopSignal to the main process, after GraceMillis SIGKILL to all. The answer comes at
// once; the end is seen by Wait. A second Stop can only shorten the grace.
type Stop struct {
	GraceMillis int64 `json:"graceMillis"`
}

// Probe is one HTTP GET from inside the guest to its own loopback address.
type Probe struct {
	Port          int    `json:"port"`
	Path          string `json:"path"`
	TimeoutMillis int64  `json:"timeoutMillis"`
}

// ProbeResult of one Probe. Healthy is Status in 200–399; Message says why not, in one line.
type ProbeResult struct {
	Healthy bool   `json:"healthy"`
	Status  int    `json:"status,omitempty"`
	Message string `json:"message,omitempty"`
}

// Output asks for the workload's output (stdout and stderr together) from an absolute byte offset on; Follow goes on until
// the workload has ended.
type Output struct {
	Offset int64 `json:"offset"`
	Follow bool  `json:"follow,omitempty"`
}

// OutputStart precedes the bytes: Offset is where they begin, later than asked where the ring has wrapped.
type OutputStart struct {
	Offset int64 `json:"offset"`
}

// The markers on the serial console at the workload's end: "IMP_SUCCESS id=NONCE" or "IMP_FAILED code=N id=NONCE", alone on a
// line. Their first words may not change (docs/contract.md).
const (
	MarkerSuccess = "IMP_SUCCESS"
	MarkerFailed  = "IMP_FAILED"
)
