package plan

import (
	"bytes"
	"fmt"
	"regexp"
	"strconv"
	"time"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/vmm"
)

// Testimony is all there is to say how a boot ended. Everything but Report lies in files, so that the verdict is the same whoever
// looks and whenever; Report is repeated by the guest until it is acknowledged.
type Testimony struct {
	Boot Boot
	// Ordered is what an ordered end is called, "" if nothing was ordered.
	Ordered machine.Verdict
	// Hung says that the guest fell silent while its VMM lived. It is what is left if nothing else says how it ended.
	Hung bool
	// Why is what the plan said about an ordered or hung end.
	Why    string
	Report *guestv1.Exit
	// Console is the end of the serial console since Boot.ConsoleStart.
	Console []byte
	// Evidence of the driver; EvidenceErr if it has none to give.
	Evidence    vmm.Evidence
	EvidenceErr error
	HostBootID  string
	Lifecycle   machine.Lifecycle
	Now         time.Time
}

// tailBytes is the most an Exit keeps of the console.
const tailBytes = 4 << 10

// Judge gives the end of a boot by the first evidence of: an order, the guest's report, its marker, the machine's own event or last
// words, the host's boot; else killed, or Lost if it is not even known whether a one-shot began. reported says that the guest
// waits for an acknowledgement.
func Judge(t Testimony) (e machine.Exit, reported bool) {
	e = machine.Exit{Incarnation: t.Boot.Incarnation, Run: t.Boot.Run, At: t.Now, ConsoleTail: tail(t.Console, tailBytes)}
	code, marked := Marker(t.Console, t.Boot.Nonce)
	e.Marker = marked
	switch {
	case t.Report != nil:
		e.Verdict, e.Code, e.Message = byCode(t.Report.Code, t.Report.Message)
		if t.Report.OOMKilled {
			e.Message = "the guest's kernel killed the workload for want of memory: " + e.Message
		}
	case marked:
		e.Verdict, e.Code, e.Message = byCode(code, "")
	default:
		e.Verdict, e.Message = byEvidence(t)
	}
	if t.Ordered != "" {
		if e.Code == nil {
			e.Message = t.Why
		} else {
			e.Message = fmt.Sprintf("ordered to end; exit code %d", *e.Code)
		}
		e.Verdict = t.Ordered
		if e.Verdict == machine.DeadlineExceeded {
			e.Message = "the deadline passed; " + e.Message
		}
	}
	return e, t.Report != nil
}

func byCode(code int, words string) (machine.Verdict, *int32, string) {
	c := int32(code)
	message := "exit code " + strconv.Itoa(code)
	if words != "" {
		message += ": " + words
	}
	if code == 0 {
		return machine.Succeeded, &c, message
	}
	return machine.Failed, &c, message
}

func byEvidence(t Testimony) (machine.Verdict, string) {
	detail := func(s string) string {
		if t.Evidence.Detail == "" {
			return s
		}
		return s + ": " + t.Evidence.Detail
	}
	if words := panicWords(t.Console); t.Hung && t.Evidence.Cause == vmm.CauseUnknown && words != "" {
		return machine.GuestPanic, "the guest's kernel panicked: " + words
	}
	switch t.Evidence.Cause {
	case vmm.CausePanic:
		return machine.GuestPanic, detail("the guest's kernel panicked")
	case vmm.CauseReboot:
		return machine.GuestReboot, detail("the guest rebooted")
	case vmm.CausePowerOff:
		return machine.GuestPowerOff, detail("the guest switched itself off")
	case vmm.CauseOOM:
		return machine.OOMKilled, detail("the host's kernel killed the VMM for want of memory in its cgroup")
	case vmm.CauseVMMError:
		return machine.VMMFailed, detail("the VMM gave up")
	}
	switch {
	case t.Hung:
		return machine.GuestHung, t.Why
	case t.Evidence.Cause == vmm.CauseHostBoot, t.Boot.HostBootID != t.HostBootID:
		return machine.LostWithHost, "the host was booted under the VM"
	case t.EvidenceErr != nil:
		return lost(t, fmt.Sprintf("no evidence of how the VM ended: %v", t.EvidenceErr))
	case t.Evidence.Cause == vmm.CauseHost:
		return machine.VMMKilled, detail("the VMM was ended by somebody on the host")
	case t.Boot.StartedAt == nil:
		return lost(t, "the VMM vanished while the workload's start was under way")
	default:
		return machine.VMMKilled, detail("the VMM was killed and left no word")
	}
}

// panicLine is the kernel's own, with its time: a machine that neither resets nor tells its VMM stays like this.
var panicLine = regexp.MustCompile(`(?m)^\[ *\d+\.\d+\] (Kernel panic - not syncing[^\r\n]*)`)

func panicWords(console []byte) string {
	if m := panicLine.FindSubmatch(console); m != nil {
		return string(m[1])
	}
	return ""
}

// lost: of a one-shot nobody can say what it did; a persistent VM is simply started again.
func lost(t Testimony, message string) (machine.Verdict, string) {
	if t.Lifecycle == machine.Ephemeral {
		return machine.Lost, message
	}
	return machine.VMMKilled, message
}

// Marker looks for the guest's last line with this boot's nonce. A workload that prints IMP_SUCCESS itself does not know the nonce.
func Marker(console []byte, nonce string) (code int, found bool) {
	if nonce == "" {
		return 0, false
	}
	id := []byte(" id=" + nonce)
	for rest := console; ; {
		at := bytes.Index(rest, id)
		if at < 0 {
			return 0, false
		}
		line := rest[bytes.LastIndexByte(rest[:at], '\n')+1 : at]
		if bytes.HasSuffix(line, []byte(guestv1.MarkerSuccess)) {
			return 0, true
		}
		if i := bytes.LastIndex(line, []byte(guestv1.MarkerFailed+" code=")); i >= 0 {
			if n, err := strconv.Atoi(string(line[i+len(guestv1.MarkerFailed+" code="):])); err == nil {
				return n, true
			}
		}
		rest = rest[at+len(id):]
	}
}

func tail(b []byte, n int) []byte {
	if len(b) > n {
		b = b[len(b)-n:]
	}
	return bytes.Clone(b)
}
