package qemu

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"imp.dev/imp/internal/console"
	"imp.dev/imp/internal/vmm"
	"imp.dev/imp/internal/vmm/runner"
)

// Files in Config.Dir.
const (
	qmpSocketName   = "qmp.sock"
	guestSocketName = "guest.sock"
	// qmpLogName holds every line QEMU's monitor ever wrote, whether or not somebody was connected.
	qmpLogName = "qmp.log"
	// noteName holds the event, or the run state, by which the driver learnt of the machine's end.
	noteName = "end.json"
)

// runStateEvent is our own name for a run state that was asked for.
const runStateEvent = "IMP_RUN_STATE"

type runState struct {
	Status string `json:"status"`
}

// causeOf reads one event of the monitor (qapi/run-state.json): CauseUnknown if it tells of no end.
func causeOf(m qmpMessage) (vmm.Cause, string) {
	switch m.Event {
	case "GUEST_PANICKED":
		return vmm.CausePanic, "the guest's kernel panicked"
	case "SHUTDOWN":
		var d struct {
			Reason string `json:"reason"`
		}
		_ = json.Unmarshal(m.Data, &d)
		return causeOfShutdown(d.Reason)
	}
	return vmm.CauseUnknown, ""
}

func causeOfShutdown(reason string) (vmm.Cause, string) {
	switch reason {
	case "guest-shutdown":
		return vmm.CausePowerOff, "the guest switched the machine off"
	case "guest-reset":
		return vmm.CauseReboot, "the guest asked for a reset"
	case "guest-panic":
		return vmm.CausePanic, "the guest's kernel panicked"
	case "host-error":
		return vmm.CauseVMMError, "QEMU gave up: " + reason
	default: // host-signal, host-qmp-quit, host-qmp-system-reset, host-ui
		return vmm.CauseHost, "QEMU was ended by the host: " + reason
	}
}

// firstEnd finds the first event that tells of an end in a log of the monitor. Later ones are about what the host then did with the
// waiting QEMU.
func firstEnd(log []byte) (vmm.Cause, string) {
	for _, line := range bytes.Split(log, []byte("\n")) {
		var m qmpMessage
		if json.Unmarshal(line, &m) != nil {
			continue
		}
		if cause, detail := causeOf(m); cause != vmm.CauseUnknown {
			return cause, detail
		}
	}
	return vmm.CauseUnknown, ""
}

// event completes facts with what QEMU itself said: its log first, then a run state that was found.
func event(c vmm.Config, f *runner.Facts) error {
	var log []byte
	for offset := int64(0); ; {
		chunk, err := console.Read(filepath.Join(c.Dir, qmpLogName), offset, 1<<20)
		if err != nil {
			return err
		}
		if len(chunk.Data) == 0 {
			break
		}
		log = append(log, chunk.Data...)
		offset = chunk.Offset + int64(len(chunk.Data))
	}
	f.Event, f.EventDetail = firstEnd(log)
	if f.Event != vmm.CauseUnknown {
		return nil
	}
	note, err := os.ReadFile(filepath.Join(c.Dir, noteName))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("reading note of the end: %w", err)
	}
	var m qmpMessage
	_ = json.Unmarshal(note, &m) // none, or cut off by a full disk: no event then
	if m.Event != runStateEvent {
		f.Event, f.EventDetail = causeOf(m)
		return nil
	}
	var state runState
	_ = json.Unmarshal(m.Data, &state)
	switch state.Status {
	case "guest-panicked":
		f.Event, f.EventDetail = vmm.CausePanic, "the guest's kernel panicked"
	case "shutdown":
		// Power-off and reset end in one run state; the kernel's farewell tells them apart.
		reason := "guest-shutdown"
		switch runner.Decide(runner.Facts{Console: f.Console}).Cause {
		case vmm.CauseReboot, vmm.CausePanic:
			reason = "guest-reset"
		}
		f.Event, f.EventDetail = causeOfShutdown(reason)
	}
	return nil
}

// ended says whether a run state is one of a machine that has stopped by itself.
func ended(status string) bool {
	return status == "shutdown" || status == "guest-panicked" || status == "internal-error"
}
