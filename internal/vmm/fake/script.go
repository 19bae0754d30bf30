// Package fake is a driver whose VMM is a small real process that does what a script tells it: it lives, answers as a guest over the
// real protocol, ends in every way a machine can end, ignores signals, eats its socket, never answers.
//
// It runs no guest. Everything else is real: a detached process in its cgroup, a Handle, a console file, evidence in files.
package fake

import (
	"encoding/json"
	"fmt"

	guestfake "imp.dev/imp/internal/guest/fake"
)

// Script is how the machine and its guest behave (vmm.Config.Script, JSON). The zero value is a machine that boots at once and runs
// until it is stopped. Times are milliseconds.
type Script struct {
	// Guest is the guest's behaviour: boot delay, exit code, silence, and so on.
	Guest guestfake.Script `json:"guest"`
	// Console is printed when the machine boots.
	Console string `json:"console,omitempty"`
	// StartError makes Start fail: the VMM writes these words to its log and gives up.
	StartError string `json:"startError,omitempty"`
	// NoAnswer: the VMM never answers the driver, so that Start fails by its deadline.
	NoAnswer bool `json:"noAnswer,omitempty"`
	// End is how the machine ends, apart from the guest's own power-off after its acknowledged exit; nil: it does not.
	End *End `json:"end,omitempty"`
	// IgnoreSignals: the VMM ignores every signal that can be ignored.
	IgnoreSignals bool `json:"ignoreSignals,omitempty"`
	// EatSocket removes the guest's socket as soon as the machine boots: nobody can reach the guest.
	EatSocket bool `json:"eatSocket,omitempty"`
	// Runs, when set, are the scripts of the runs of one VM: run N follows Runs[N-1], later ones the last. The fields above are then not used.
	Runs []Script `json:"runs,omitempty"`
}

// Ways to end.
const (
	PowerOff = "PowerOff" // the guest switches off; the VMM waits to be destroyed
	Reboot   = "Reboot"   // the guest asks for a reset; the VMM waits
	Panic    = "Panic"    // the guest's kernel panics; the VMM waits
	Killed   = "Killed"   // the VMM kills itself with SIGKILL and leaves no word
	Error    = "Error"    // the VMM writes Message to its log and exits 1
	OOM      = "OOM"      // the VMM takes memory until its cgroup's limit ends it
)

// End of a machine.
type End struct {
	How string `json:"how"`
	// AfterMillis after the boot or, with AfterStart, after the workload was started.
	AfterMillis int64 `json:"afterMillis,omitempty"`
	AfterStart  bool  `json:"afterStart,omitempty"`
	// AfterExit: after the workload ended (its marker is on the console), whether or not the host has acknowledged it.
	AfterExit bool   `json:"afterExit,omitempty"`
	Message   string `json:"message,omitempty"`
}

// Parse reads a script and picks the one of the given run (1…). Nothing is the zero Script.
func Parse(raw json.RawMessage, run int64) (Script, error) {
	var s Script
	if len(raw) > 0 {
		if err := json.Unmarshal(raw, &s); err != nil {
			return s, fmt.Errorf("reading fake script: %w", err)
		}
	}
	if n := int64(len(s.Runs)); n > 0 {
		s = s.Runs[max(0, min(run, n)-1)]
	}
	if s.End != nil {
		switch s.End.How {
		case PowerOff, Reboot, Panic, Killed, Error, OOM:
		default:
			return s, fmt.Errorf("reading fake script: unknown end %q", s.End.How)
		}
	}
	return s, nil
}
