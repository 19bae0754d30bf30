package firecracker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"imp.dev/imp/internal/console"
	"imp.dev/imp/internal/vmm"
	"imp.dev/imp/internal/vmm/runner"
)

// What Firecracker's log tells of its end (its src/firecracker/src/main.rs). The line's head is time, ID and thread.
var (
	logLine    = regexp.MustCompile(`^\S+ \[[^\]]*\] (.*)$`)
	exitLine   = regexp.MustCompile(`^Firecracker exiting (?:successfully|with error)\. exit_code=(\d+)$`)
	panicLine  = regexp.MustCompile(`^Firecracker panicked at `)
	signalLine = regexp.MustCompile(`^Shutting down VM after intercepting `)
)

// exitWords are what an exit code means, where the log's last line does not say more (src/vmm/src/lib.rs, FcExitCode).
func exitWords(code string) string {
	switch code {
	case "148":
		return "it made a system call that its seccomp filter forbids"
	case "149", "150", "151", "154", "156", "157":
		return "it was ended by a signal"
	}
	return "exit code " + code
}

// readTail gives the end of a log.
func readTail(path string) string {
	const most = 64 << 10
	chunk, err := console.Read(path, -most, most)
	if err != nil {
		return ""
	}
	return string(chunk.Data)
}

// messages gives the messages of a log without their heads, and without what tells of each request.
func messages(log string) []string {
	var out []string
	for _, line := range strings.Split(log, "\n") {
		m := logLine.FindStringSubmatch(strings.TrimRight(line, "\r"))
		if m == nil {
			continue
		}
		text := m[1]
		if strings.HasPrefix(text, "The API server received a ") || strings.HasPrefix(text, "The request was executed successfully") || text == "Vmm is stopping." {
			continue
		}
		out = append(out, text)
	}
	return out
}

// causeOf reads Firecracker's last word: CauseUnknown if it left none. A guest's reset, its panic and its power-off all end in exit code 0 and are told apart
// by the console.
func causeOf(log string) (vmm.Cause, string) {
	said := messages(log)
	for at := len(said) - 1; at >= 0; at-- {
		if panicLine.MatchString(said[at]) || signalLine.MatchString(said[at]) {
			return vmm.CauseVMMError, said[at]
		}
		m := exitLine.FindStringSubmatch(said[at])
		if m == nil {
			continue
		}
		if m[1] == "0" {
			return vmm.CauseReboot, "the guest reset the machine"
		}
		detail := "Firecracker gave up: " + exitWords(m[1])
		if at > 0 {
			detail = said[at-1] + " (exit code " + m[1] + ")"
		}
		return vmm.CauseVMMError, detail
	}
	return vmm.CauseUnknown, ""
}

// lastWords are those of a Firecracker that did not start.
func lastWords(stderr, log string) string {
	if said := messages(log); len(said) > 0 {
		if cause, detail := causeOf(log); cause == vmm.CauseVMMError {
			return detail
		}
	}
	lines := strings.Split(strings.TrimSpace(stderr), "\n")
	return strings.TrimSpace(lines[len(lines)-1])
}

// A guest on x86 that switches itself off halts for ever: nothing ends the VMM. Its kernel's farewell is the last that is on the console, and none of its
// CPUs ever moves again.
var (
	offLine = regexp.MustCompile(`^\[ *\d+\.\d+\] (reboot: (?:Power down|System halted))\s*$`)
	// powerOffLine is what imp-guest says before it resets a machine that it wants switched off (imp.stop=reboot).
	powerOffLine = regexp.MustCompile(`^\[ *\d+\.\d+\] imp-guest: power off\s*$`)
)

// farewell gives the kernel's last word if that is the last on the console.
func farewell(console []byte) (string, bool) {
	lines := strings.Split(strings.TrimRight(string(console), "\r\n \t"), "\n")
	m := offLine.FindStringSubmatch(lines[len(lines)-1])
	if m == nil {
		return "", false
	}
	return m[1], true
}

// note is what a driver has found out about a machine that ended and whose process goes on.
type note struct {
	Cause  vmm.Cause `json:"cause"`
	Detail string    `json:"detail"`
}

func readNote(dir string) (note, error) {
	var n note
	content, err := os.ReadFile(filepath.Join(dir, noteName))
	if errors.Is(err, fs.ErrNotExist) {
		return n, nil
	}
	if err != nil {
		return n, fmt.Errorf("reading note of the end: %w", err)
	}
	_ = json.Unmarshal(content, &n) // cut off by a full disk: found out again
	return n, nil
}

// halted says of a live machine whether it has ended all the same, and writes that down.
func halted(ctx context.Context, dir string, pid int, console []byte) (note, error) {
	n, err := readNote(dir)
	if err != nil || n.Cause != vmm.CauseUnknown {
		return n, err
	}
	words, said := farewell(console)
	if !said || !stands(ctx, pid) {
		return note{}, nil
	}
	n = note{Cause: vmm.CausePowerOff, Detail: words}
	content, err := json.Marshal(n)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, noteName), content, 0o600)
	}
	if err != nil {
		return n, fmt.Errorf("writing down the end: %w", err)
	}
	return n, nil
}

// standing is how long no vCPU may have moved. A kernel that is idle, and no more than that, wakes up several times in it.
const standing = 700 * time.Millisecond

// stands says that none of the machine's vCPUs moves.
func stands(ctx context.Context, pid int) bool {
	before := switches(pid)
	t := time.NewTimer(standing)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
	}
	return before == switches(pid)
}

// switches gives what the kernel has counted of each vCPU's thread ("fc_vcpu N"): every wake-up is one.
func switches(pid int) string {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil {
		return ""
	}
	var out strings.Builder
	for _, path := range tasks {
		content, err := os.ReadFile(path)
		if err != nil || !strings.HasPrefix(string(content), "Name:\tfc_vcpu") {
			continue
		}
		for _, line := range strings.Split(string(content), "\n") {
			if strings.Contains(line, "ctxt_switches:") {
				out.WriteString(path + line)
			}
		}
	}
	return out.String()
}

// Evidence implements vmm.Driver. It asks files and the process table only.
func (d *Driver) Evidence(ctx context.Context, c vmm.Config, h vmm.Handle) (vmm.Evidence, error) {
	facts, err := d.runner.Gather(c, h)
	if err == nil {
		err = d.event(ctx, c, h, &facts)
	}
	if err != nil {
		return vmm.Evidence{}, fmt.Errorf("gathering evidence: %w", err)
	}
	return runner.Decide(facts), nil
}

// event completes facts with what Firecracker itself said, and with what stands for it.
func (d *Driver) event(ctx context.Context, c vmm.Config, h vmm.Handle, f *runner.Facts) error {
	at, err := d.at(c, h)
	if err != nil {
		return err
	}
	log := readTail(at.logPath())
	if log == "" {
		log = readTail(filepath.Join(c.Dir, logName)) // the jail is gone, its log was kept
	}
	if f.Event, f.EventDetail = causeOf(log); f.Event != vmm.CauseUnknown {
		d.asked(f)
		return nil
	}
	var n note
	if pid := d.runner.PIDOf(h); f.Alive && pid != 0 {
		n, err = halted(ctx, c.Dir, pid, f.Console)
	} else {
		n, err = readNote(c.Dir)
	}
	f.Event, f.EventDetail = n.Cause, n.Detail
	return err
}

// asked tells a reset that the guest's init meant as switching off, and on arm64, where Firecracker says the same of both, what the kernel calls it.
func (d *Driver) asked(f *runner.Facts) {
	if f.Event != vmm.CauseReboot {
		return
	}
	lines := strings.Split(strings.TrimRight(string(f.Console), "\r\n \t"), "\n")
	const near = 5
	for _, line := range lines[max(0, len(lines)-near):] {
		if powerOffLine.MatchString(line) || d.options.Arch == arm64 && offLine.MatchString(line) {
			f.Event, f.EventDetail = vmm.CausePowerOff, "the guest switched the machine off"
		}
	}
}

// keepLog copies the end of the log of a jail that is removed to where evidence stays, if that is there.
func keepLog(from, dir string) error {
	content := readTail(from)
	if content == "" || !exists(dir) {
		return nil
	}
	to := filepath.Join(dir, logName)
	if err := errors.Join(os.WriteFile(to+".new", []byte(content), 0o600), os.Rename(to+".new", to)); err != nil {
		return fmt.Errorf("keeping Firecracker's log: %w", err)
	}
	return nil
}

// watch looks for a machine that has ended though its process goes on.
func (i *instance) watch(ctx context.Context) {
	ticker := i.driver.options.Clock.NewTicker(i.driver.options.Period)
	defer ticker.Stop()
	var seen int64 = -1
	for {
		select {
		case <-ctx.Done():
			return
		case <-i.Done():
			return
		case <-ticker.C():
		}
		if size := sizeOf(i.config.ConsoleLog); size != seen {
			seen = size
		} else {
			continue
		}
		const words = 512
		tail, err := console.Last(i.config.ConsoleLog, words)
		if err != nil {
			continue
		}
		if _, said := farewell(tail); !said {
			continue
		}
		n, err := halted(ctx, i.config.Dir, i.PID(), tail)
		if err != nil {
			i.log.Warn("End of the machine cannot be written down", "err", err)
		}
		if n.Cause != vmm.CauseUnknown {
			i.MarkEnded()
			return
		}
		seen = -1 // it moves still: looked at again
	}
}

func sizeOf(path string) int64 {
	info, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return info.Size()
}
