package devserver

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"imp.dev/imp/internal/devserver/fabric"

	"golang.org/x/sys/unix"
)

// Options of a development server.
type Options struct {
	// Dir receives logs, the kubeconfig and the registry's images.
	Dir string
	// Nodes is how many; they are named node-1, node-2, …
	Nodes int
	// VMM is the driver: qemu or fake. Accel is qemu's: tcg or kvm.
	VMM, Accel string
	// Network is what guests' networks are made of: linux, for which each node has a network namespace as its host; fake, which
	// only pretends; or none. "" is linux with qemu and fake with fake.
	Network string
	// Kernel is a bzImage or ELF; "" takes Debian's from the cache, fetching it if need be. Modules is the
	// lib/modules/RELEASE that belongs to Kernel; "" with a Kernel means that it has everything built in.
	Kernel, Modules string
	// BinDir has Imp's programs; "" is where this program lies.
	BinDir string
	// CacheDir as controlplane.CacheDir gives it.
	CacheDir string
	// RegistryPort on loopback; 0 takes a free one.
	RegistryPort int
	// RegistryPassword, "user:password", adds a second address of the same registry that demands it.
	RegistryPassword string
	// VCPU, MemoryMiB and DiskGiB are each node's budget; 0 takes what suits this machine.
	VCPU, MemoryMiB, DiskGiB int64
	// RuntimeArgs and AgentArgs are added to each node's programs, OperatorArgs to the operator, for what only a test wants.
	RuntimeArgs, AgentArgs, OperatorArgs []string
	// Relays puts a relay between each program and the API server, for Partition.
	Relays bool
	// Progress is told in one line what goes on; Log what is worth keeping.
	Progress func(line string)
	Log      *slog.Logger
}

// Users that the programs run as. The agent's is fixed by the chart, too, since the runtime checks it.
const (
	agentUID    = 47110
	operatorUID = 65532
	// Each node's VMMs have a range of their own, because a user may signal its own processes.
	vmmUIDBase, vmmUIDCount = 100_000, 1000
)

// What guests' networks are made of.
const (
	networkLinux = "linux"
	networkFake  = "fake"
	networkNone  = "none"
)

// complete checks the options and fills in what was left open.
func (o Options) complete() (Options, error) {
	if os.Geteuid() != 0 {
		return o, fmt.Errorf("running nodes needs root: the runtime makes cgroups, and each program runs as another user")
	}
	if o.Nodes < 1 || o.Nodes > fabric.MaxNodes {
		return o, fmt.Errorf("reading --nodes: %d is not between 1 and %d", o.Nodes, fabric.MaxNodes)
	}
	if o.VMM != "qemu" && o.VMM != "fake" {
		return o, fmt.Errorf("reading --vmm: %q is neither qemu nor fake", o.VMM)
	}
	if o.Accel != "tcg" && o.Accel != "kvm" {
		return o, fmt.Errorf("reading --accel: %q is neither tcg nor kvm", o.Accel)
	}
	if o.Network == "" {
		o.Network = map[string]string{"qemu": networkLinux, "fake": networkFake}[o.VMM]
	}
	if o.Network != networkLinux && o.Network != networkFake && o.Network != networkNone {
		return o, fmt.Errorf("reading --network: %q is none of linux, fake and none", o.Network)
	}
	if o.Kernel == "" && o.Modules != "" {
		return o, fmt.Errorf("reading --modules: modules without --kernel belong to no kernel")
	}
	if o.RegistryPassword != "" && !strings.Contains(o.RegistryPassword, ":") {
		return o, fmt.Errorf("reading --registry-password: it has the form user:password")
	}
	if o.BinDir == "" {
		self, err := os.Executable()
		if err != nil {
			return o, fmt.Errorf("finding Imp's programs: %w", err)
		}
		o.BinDir = filepath.Dir(self)
	}
	var missing []string
	for _, program := range o.programs() {
		if _, err := os.Stat(filepath.Join(o.BinDir, program)); err != nil {
			missing = append(missing, program)
		}
	}
	if len(missing) > 0 {
		return o, fmt.Errorf("looking for Imp's programs in %s: %s missing (run: make build)", o.BinDir, strings.Join(missing, ", "))
	}
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o.withBudget()
}

func (o Options) programs() []string {
	programs := []string{operatorProgram, agentProgram, runtimeProgram}
	if o.VMM == "qemu" {
		programs = append(programs, "imp-guest")
	}
	return programs
}

// withBudget shares three quarters of the machine's memory among the nodes. Processors are shared by time, so each node
// offers several times what there is; fake VMs take next to nothing.
func (o Options) withBudget() (Options, error) {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return o, fmt.Errorf("asking for the machine's memory: %w", err)
	}
	if o.VCPU == 0 {
		o.VCPU = int64(max(4, 4*runtime.NumCPU()))
	}
	if o.MemoryMiB == 0 {
		o.MemoryMiB = int64(info.Totalram*uint64(info.Unit)>>20) * 3 / 4 / int64(o.Nodes)
	}
	if o.DiskGiB == 0 {
		o.DiskGiB = 100 // sparse
	}
	if o.VMM == "fake" {
		o.VCPU, o.MemoryMiB, o.DiskGiB = 100*o.VCPU, 100*o.MemoryMiB, 100*o.DiskGiB
	}
	return o, nil
}
