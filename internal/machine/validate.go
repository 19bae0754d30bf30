package machine

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"path"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/network"
	"imp.dev/imp/internal/restart"
)

// Limits of a Spec. They are wider than the Kubernetes API's own: the runtime defends its host, the API its users.
const (
	MinMemoryMiB = 128
	MaxMemoryMiB = 16 << 20
	MaxVCPU      = 256
	MaxDiskGiB   = 64 << 10
	// MaxWorkloadBytes bounds command, arguments and environment together: execve(2) allows 2 MiB by default.
	MaxWorkloadBytes = 2 << 20
	// MaxScriptBytes bounds the fake driver's script.
	MaxScriptBytes = 64 << 10
	// MinRestartDelay keeps a hostile policy from a hot loop.
	MinRestartDelay = 100 * time.Millisecond
	// maxHaltMessage and maxReset bound, in bytes, what is only shown or compared.
	maxHaltMessage = 1024
	maxReset       = 253
	maxListEntries = 64
	maxProbePath   = 2048
	maxReference   = 1024
)

var (
	idPattern     = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?$`)
	namePattern   = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$`)
	domainPattern = regexp.MustCompile(`^[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?$`)
	reasonPattern = regexp.MustCompile(`^[A-Z][A-Za-z0-9]{0,63}$`)
	digestPattern = regexp.MustCompile(`^sha256:[a-f0-9]{64}$`)
)

// Validate refuses, with a Permanent InvalidSpec that names the field, a Spec the runtime will not work with. It is the whole
// wall between a hostile agent and the host: the ID becomes part of paths, everything else only sizes and bytes.
func Validate(s Spec) error {
	for _, check := range []func(Spec) error{
		validateIdentity, validateSizes, validateImage, validateWorkload, validateInterfaces, validateProbe, validatePolicy, validateOrders,
	} {
		if err := check(s); err != nil {
			return fault.Permanent(fault.New(fault.InvalidSpec, "checking spec", err))
		}
	}
	return nil
}

// ValidateRef checks the names of an order that carries no Spec.
func ValidateRef(r Ref) error {
	if !idPattern.MatchString(r.ID) {
		return fault.Permanent(fault.Errorf(fault.InvalidSpec, "checking reference", "id must match %s", idPattern))
	}
	return nil
}

func validateIdentity(s Spec) error {
	switch {
	case !idPattern.MatchString(s.ID):
		return fmt.Errorf("id must match %s", idPattern)
	case !namePattern.MatchString(s.Namespace):
		return fmt.Errorf("namespace must match %s", namePattern)
	case !namePattern.MatchString(s.Name):
		return fmt.Errorf("name must match %s", namePattern)
	case s.Assignment < 1:
		return fmt.Errorf("assignment is %d and must be at least 1", s.Assignment)
	case s.Generation < 0:
		return fmt.Errorf("generation is %d and must not be negative", s.Generation)
	case s.Lifecycle != Ephemeral && s.Lifecycle != Persistent:
		return fmt.Errorf("lifecycle is %q and must be %s or %s", s.Lifecycle, Ephemeral, Persistent)
	}
	return nil
}

func validateSizes(s Spec) error {
	switch {
	case s.VCPU < 1 || s.VCPU > MaxVCPU:
		return fmt.Errorf("vcpu is %d and must be 1 to %d", s.VCPU, MaxVCPU)
	case s.MemoryMiB < MinMemoryMiB || s.MemoryMiB > MaxMemoryMiB:
		return fmt.Errorf("memoryMiB is %d and must be %d to %d", s.MemoryMiB, MinMemoryMiB, MaxMemoryMiB)
	case s.DiskGiB < 1 || s.DiskGiB > MaxDiskGiB:
		return fmt.Errorf("diskGiB is %d and must be 1 to %d", s.DiskGiB, MaxDiskGiB)
	case s.Grace < 0:
		return fmt.Errorf("grace is %s and must not be negative", s.Grace)
	}
	return nil
}

func validateImage(s Spec) error {
	i := s.Image
	switch {
	case i.Reference == "" || len(i.Reference) > maxReference || !printable(i.Reference) || strings.Contains(i.Reference, " "):
		return fmt.Errorf("image must be 1 to %d printable characters without spaces", maxReference)
	case i.Policy != image.Always && i.Policy != image.IfNotPresent && i.Policy != image.Never:
		return fmt.Errorf("imagePullPolicy is %q and must be %s, %s or %s", i.Policy, image.Always, image.IfNotPresent, image.Never)
	case i.Digest != "" && !digestPattern.MatchString(i.Digest):
		return fmt.Errorf("image digest must match %s", digestPattern)
	case len(i.Credentials) > maxListEntries:
		return fmt.Errorf("%d credentials were given, at most %d are allowed", len(i.Credentials), maxListEntries)
	}
	return nil
}

func validateWorkload(s Spec) error {
	w := s.Workload
	total := len(w.WorkingDir)
	for field, words := range map[string][]string{"command": w.Command, "args": w.Args} {
		for i, word := range words {
			if err := text(word); err != nil {
				return fmt.Errorf("%s[%d] %w", field, i, err)
			}
			total += len(word) + 1
		}
	}
	for i, v := range w.Env {
		if v.Name == "" || strings.ContainsAny(v.Name, "=\x00") {
			return fmt.Errorf("env[%d].name must not be empty nor contain = or a zero byte", i)
		}
		if err := text(v.Name + v.Value); err != nil {
			return fmt.Errorf("env[%d] %w", i, err)
		}
		total += len(v.Name) + len(v.Value) + 2
	}
	if total > MaxWorkloadBytes {
		return fmt.Errorf("command, args and env take %d bytes, at most %d are allowed", total, MaxWorkloadBytes)
	}
	if w.WorkingDir != "" && (!path.IsAbs(w.WorkingDir) || text(w.WorkingDir) != nil) {
		return fmt.Errorf("workingDir must be an absolute path of UTF-8 text")
	}
	if len(w.DataPaths) > maxListEntries {
		return fmt.Errorf("%d dataPaths were given, at most %d are allowed", len(w.DataPaths), maxListEntries)
	}
	for i, p := range w.DataPaths {
		if !path.IsAbs(p) || path.Clean(p) != p || p == "/" || text(p) != nil {
			return fmt.Errorf("dataPaths[%d] must be an absolute path without . or .. and not /", i)
		}
	}
	if len(s.Script) > MaxScriptBytes || (len(s.Script) > 0 && !json.Valid(bytes.TrimSpace(s.Script))) {
		return fmt.Errorf("script must be JSON of at most %d bytes", MaxScriptBytes)
	}
	return nil
}

func validateInterfaces(s Spec) error {
	if len(s.Interfaces) > maxListEntries {
		return fmt.Errorf("%d interfaces were given, at most %d are allowed", len(s.Interfaces), maxListEntries)
	}
	names, macs := map[string]bool{}, map[string]bool{}
	for i, n := range s.Interfaces {
		if names[n.Name] {
			return fmt.Errorf("interfaces[%d].name %q is used twice", i, n.Name)
		}
		if macs[n.MAC] {
			return fmt.Errorf("interfaces[%d].mac %q is used twice", i, n.MAC)
		}
		names[n.Name], macs[n.MAC] = true, true
		if err := validateInterface(n); err != nil {
			return fmt.Errorf("interfaces[%d].%w", i, err)
		}
	}
	return nil
}

func validateInterface(n network.Interface) error {
	switch {
	case !idPattern.MatchString(n.Name):
		return fmt.Errorf("name must match %s", idPattern)
	case !idPattern.MatchString(n.Network):
		return fmt.Errorf("network must match %s", idPattern)
	case !unicastMAC(n.MAC):
		return fmt.Errorf("mac must be six bytes in hexadecimal, of one station")
	case n.MTU != 0 && (n.MTU < minMTU || n.MTU > maxMTU):
		return fmt.Errorf("mtu is %d and must be %d to %d", n.MTU, minMTU, maxMTU)
	}
	for field, list := range map[string][]string{"addresses": n.Addresses, "nameservers": n.Nameservers, "searchDomains": n.SearchDomains} {
		if len(list) > maxListEntries {
			return fmt.Errorf("%s has %d entries, at most %d are allowed", field, len(list), maxListEntries)
		}
	}
	for j, a := range n.Addresses {
		if p, err := netip.ParsePrefix(a); err != nil || !p.Addr().Is4() || !unicast(p.Addr()) {
			return fmt.Errorf("addresses[%d] must be a host's IPv4 address with its prefix length", j)
		}
	}
	for j, a := range n.Nameservers {
		if ip, err := netip.ParseAddr(a); err != nil || ip.Zone() != "" || ip.IsLoopback() || ip.IsUnspecified() || ip.IsMulticast() {
			return fmt.Errorf("nameservers[%d] must be the address of another machine", j)
		}
	}
	for j, d := range n.SearchDomains {
		if !domainPattern.MatchString(d) {
			return fmt.Errorf("searchDomains[%d] must match %s", j, domainPattern)
		}
	}
	if n.Gateway != "" {
		if a, err := ipv4(n.Gateway); err != nil || !unicast(a) {
			return fmt.Errorf("gateway must be a host's IPv4 address")
		}
	}
	return nil
}

func validateProbe(s Spec) error {
	p := s.Probe
	switch {
	case p == nil:
		return nil
	case !strings.HasPrefix(p.Path, "/") || len(p.Path) > maxProbePath || !printable(p.Path) || strings.Contains(p.Path, " "):
		return fmt.Errorf("probe path must begin with / and be at most %d printable characters", maxProbePath)
	case p.Port < 1 || p.Port > 65535:
		return fmt.Errorf("probe port is %d and must be 1 to 65535", p.Port)
	case p.Period < MinRestartDelay:
		return fmt.Errorf("probe period is %s and must be at least %s", p.Period, MinRestartDelay)
	case p.Timeout <= 0:
		return fmt.Errorf("probe timeout is %s and must be more than 0", p.Timeout)
	case p.FailureThreshold < 1:
		return fmt.Errorf("probe failureThreshold is %d and must be at least 1", p.FailureThreshold)
	}
	return nil
}

// validatePolicy lets the zero policy through: it means restart.Default.
func validatePolicy(s Spec) error {
	p := s.Restart
	if s.Lifecycle != Persistent || p == (restart.Policy{}) {
		return nil
	}
	switch {
	case p.InitialDelay < MinRestartDelay:
		return fmt.Errorf("restartPolicy initialDelay is %s and must be at least %s", p.InitialDelay, MinRestartDelay)
	case p.MaxDelay < p.InitialDelay:
		return fmt.Errorf("restartPolicy maxDelay is %s and must not be less than initialDelay %s", p.MaxDelay, p.InitialDelay)
	case p.MaxRetries != nil && *p.MaxRetries < 0:
		return fmt.Errorf("restartPolicy maxRetries is %d and must not be negative", *p.MaxRetries)
	case p.Mode != "" && p.Mode != restart.InPlace && p.Mode != restart.Reschedule:
		return fmt.Errorf("restartPolicy mode is %q and must be %s or %s", p.Mode, restart.InPlace, restart.Reschedule)
	case p.OnExhaustion != "" && p.OnExhaustion != restart.Fail && p.OnExhaustion != restart.ManualReset && p.OnExhaustion != restart.CoolDown:
		return fmt.Errorf("restartPolicy onExhaustion is %q and must be %s, %s or %s", p.OnExhaustion, restart.Fail, restart.ManualReset, restart.CoolDown)
	case p.CoolDown != 0 && p.CoolDown < MinRestartDelay:
		return fmt.Errorf("restartPolicy coolDown is %s and must be at least %s", p.CoolDown, MinRestartDelay)
	}
	return nil
}

// validateOrders checks what is asked of the VM beside what it is.
func validateOrders(s Spec) error {
	switch h := s.Halt; {
	case len(s.Reset) > maxReset || !printable(s.Reset):
		return fmt.Errorf("reset must be at most %d printable characters", maxReset)
	case s.Cluster != "" && !idPattern.MatchString(s.Cluster):
		return fmt.Errorf("cluster must match %s", idPattern)
	case h == nil:
		return nil
	case s.Lifecycle != Persistent:
		return fmt.Errorf("halt is for %s VMs, this one is %s", Persistent, s.Lifecycle)
	case !reasonPattern.MatchString(string(h.Reason)):
		return fmt.Errorf("halt reason must match %s", reasonPattern)
	case len(h.Message) > maxHaltMessage || !printable(h.Message):
		return fmt.Errorf("halt message must be at most %d printable characters", maxHaltMessage)
	}
	return nil
}

// text is what a program can be given and a record can hold. Everything in the Kubernetes API is UTF-8.
func text(s string) error {
	switch {
	case strings.ContainsRune(s, 0):
		return fmt.Errorf("contains a zero byte, which no program can be given")
	case !utf8.ValidString(s):
		return fmt.Errorf("is not UTF-8")
	}
	return nil
}

func printable(s string) bool {
	if !utf8.ValidString(s) {
		return false
	}
	for _, r := range s {
		if r < 0x20 || r == 0x7f {
			return false
		}
	}
	return true
}
