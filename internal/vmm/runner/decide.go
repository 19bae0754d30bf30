package runner

import (
	"bytes"
	"regexp"
	"strings"

	"imp.dev/imp/internal/vmm"
)

// Facts are what can be found out about a run, all of it from files and the process table.
type Facts struct {
	// Alive says that the VMM's process exists.
	Alive bool
	// OtherBoot says that the host was booted since the run was started.
	OtherBoot bool
	// Event is the machine's end as the VMM itself told it, EventDetail its own words.
	Event       vmm.Cause
	EventDetail string
	// Console is the end of what this run wrote to its console.
	Console []byte
	// OOMKills of the run's cgroup.
	OOMKills int64
	// Log is what the VMM wrote to its log after it had started, without warnings.
	Log string
}

const (
	// lastWords is how many lines from the end the kernel's farewell may stand; a panic is followed by a call trace of some length.
	lastWords      = 4
	lastPanicWords = 80
)

// The kernel's own lines carry its time stamp (printk.time), which a workload's output has only by intent.
var (
	panicLine  = regexp.MustCompile(`^\[ *\d+\.\d+\] (Kernel panic - not syncing.*)$`)
	rebootLine = regexp.MustCompile(`^\[ *\d+\.\d+\] (reboot: (Restarting system|Rebooting|machine restart).*)$`)
	offLine    = regexp.MustCompile(`^\[ *\d+\.\d+\] (reboot: (Power down|System halted).*)$`)
	signalLine = regexp.MustCompile(`terminating on signal \d+`)
)

// Decide gives the evidence that facts amount to. The first of these counts: the VMM's own event; the kernel's last words on the
// console; the cgroup's OOM kills; the VMM's log. A process that lives without an event is running, whatever the guest printed.
// A process that is gone without any of them was killed: CauseUnknown.
func Decide(f Facts) vmm.Evidence {
	e := vmm.Evidence{State: vmm.Gone, Cause: f.Event, Detail: f.EventDetail}
	said, words := consoleSays(f.Console)
	// A reset may be how a panic ended that the panic device did not tell: before its driver was loaded, for example.
	if e.Cause == vmm.CauseReboot && said == vmm.CausePanic {
		e.Cause, e.Detail = said, words
	}
	// Which signal and from whom is in the log alone, and there also when the event reached nobody.
	if words := lastLine(f.Log); e.Cause == vmm.CauseHost && signalLine.MatchString(words) {
		e.Detail = words
	}
	if e.Cause == vmm.CausePanic && said == vmm.CausePanic {
		e.Detail = words
	}
	if f.Alive {
		switch e.Cause {
		case vmm.CauseUnknown:
			e.State = vmm.Running
		case vmm.CausePanic:
			e.State = vmm.Panicked
		default:
			e.State = vmm.Ended
		}
		return e
	}
	switch {
	case e.Cause != vmm.CauseUnknown:
	case said != vmm.CauseUnknown:
		e.Cause, e.Detail = said, words
	case f.OtherBoot:
		e.Cause, e.Detail = vmm.CauseHostBoot, "the host was booted while the machine ran"
	case f.OOMKills > 0:
		e.Cause, e.Detail = vmm.CauseOOM, "the host's kernel killed the VMM: it needed more memory than its cgroup allows"
	case signalLine.MatchString(f.Log):
		e.Cause, e.Detail = vmm.CauseHost, lastLine(f.Log)
	case strings.TrimSpace(f.Log) != "":
		e.Cause, e.Detail = vmm.CauseVMMError, lastLine(f.Log)
	}
	return e
}

// consoleSays reads the kernel's last words.
func consoleSays(console []byte) (vmm.Cause, string) {
	var lines []string
	for _, line := range bytes.Split(console, []byte("\n")) {
		if s := strings.TrimRight(string(line), "\r \t"); s != "" {
			lines = append(lines, s)
		}
	}
	for i := len(lines) - 1; i >= 0 && i >= len(lines)-lastPanicWords; i-- {
		if m := panicLine.FindStringSubmatch(lines[i]); m != nil {
			return vmm.CausePanic, m[1]
		}
		if i < len(lines)-lastWords {
			continue
		}
		if m := rebootLine.FindStringSubmatch(lines[i]); m != nil {
			return vmm.CauseReboot, m[1]
		}
		if m := offLine.FindStringSubmatch(lines[i]); m != nil {
			return vmm.CausePowerOff, m[1]
		}
	}
	return vmm.CauseUnknown, ""
}

const maxDetail = 512

func lastLine(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	last := strings.TrimSpace(lines[len(lines)-1])
	if len(last) > maxDetail {
		last = last[:maxDetail]
	}
	return strings.ToValidUTF8(last, "?")
}
