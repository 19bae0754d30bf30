// Package machinetest is the suite that every machine.Service passes: the engine in its own process, and the same engine behind
// the client and server of package rpc. Its VMMs are the fake driver's: small real processes.
package machinetest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"

	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/machine"
	networkfake "imp.dev/imp/internal/network/fake"
	"imp.dev/imp/internal/restart"
	vmmfake "imp.dev/imp/internal/vmm/fake"
)

// patience is how long a condition is awaited before the test fails. It is generous: the machine may be busy.
const patience = 60 * time.Second

// Harness is one node under test.
type Harness struct {
	// Service answers while the runtime is up.
	Service machine.Service
	// Stop ends the runtime as hard as the harness can; VMs go on. Start brings a new one up on the same state.
	Stop, Start func(t *testing.T)
	// Reboot boots the host anew, nil where that cannot be shown: no process and nothing in RunDir is left, the boot id is another.
	Reboot func(t *testing.T)
	// SetSilence sets plan.Limits.Silence for the next Start.
	SetSilence func(d time.Duration)
	// SetFailpoint sets engine.Config.Failpoint from now on, nil is none; nil where that cannot be done.
	SetFailpoint func(f func(point string) error)
	// Instance of the runtime, which marks its processes.
	Instance func() string
	// Images of the node; nil where they cannot be steered, and the checks that need that are left out.
	Images *Images
	// Digest of the suite's image.
	Digest string
	// Network of the node. Where the runtime is another process it only shows what is there and cannot be made to fail.
	Network *networkfake.Network
	// StateDir and RunDir of the runtime.
	StateDir, RunDir string
	// Log of the runtime.
	Log fmt.Stringer
}

// Restart ends the runtime and starts it again.
func (h *Harness) Restart(t *testing.T) {
	t.Helper()
	h.Stop(t)
	h.Start(t)
}

// PIDs of the VMMs of VM id, or of all VMs if id is "". They are found by the mark the driver leaves in their environment, as a
// stranger would.
func (h *Harness) PIDs(t *testing.T, id string) []int {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	mark := []byte("IMP_RUN=" + h.Instance() + "/fake/" + id)
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		env, err := os.ReadFile(filepath.Join("/proc", e.Name(), "environ"))
		if err != nil {
			continue
		}
		for _, v := range bytes.Split(env, []byte{0}) {
			if bytes.HasPrefix(v, mark) {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// Kill ends the VMM of id with SIGKILL.
func (h *Harness) Kill(t *testing.T, id string) {
	t.Helper()
	pids := h.PIDs(t, id)
	if len(pids) != 1 {
		t.Fatalf("VM %s has %d VMMs, want 1", id, len(pids))
	}
	if err := syscall.Kill(pids[0], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

// Leftovers lists what is on the host of VMs that are not to have anything there.
func (h *Harness) Leftovers(t *testing.T) []string {
	t.Helper()
	var out []string
	for _, pid := range h.PIDs(t, "") {
		out = append(out, fmt.Sprintf("process %d", pid))
	}
	for _, dir := range []string{filepath.Join(h.StateDir, "vm"), filepath.Join(h.RunDir, "vm")} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			out = append(out, filepath.Join(dir, e.Name()))
		}
	}
	attached, err := h.Network.Attached(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range attached {
		out = append(out, "network attachment of "+id)
	}
	return out
}

// Reference of the suite's image.
const Reference = "registry.test/app:1"

// SpecOption changes a Spec.
type SpecOption func(*machine.Spec)

// NewSpec is a small valid one-shot whose workload runs until it is stopped.
func NewSpec(options ...SpecOption) machine.Spec {
	s := machine.Spec{
		ID: uuid.NewString(), Namespace: "default", Name: "vm", Assignment: 1, Generation: 1, Lifecycle: machine.Ephemeral,
		Image: machine.Image{Reference: Reference, Policy: image.IfNotPresent},
		VCPU:  1, MemoryMiB: 128, DiskGiB: 1, Grace: 10 * time.Second,
	}
	for _, o := range options {
		o(&s)
	}
	return s
}

// IsPersistent makes a persistent VM that is tried again fast.
func IsPersistent(s *machine.Spec) {
	s.Lifecycle = machine.Persistent
	s.Restart = restart.Policy{InitialDelay: 200 * time.Millisecond, MaxDelay: time.Second}
}

// WithScript says how machine and guest behave.
func WithScript(script vmmfake.Script) SpecOption {
	return func(s *machine.Spec) {
		raw, err := json.Marshal(script)
		if err != nil {
			panic(err)
		}
		s.Script = raw
	}
}

// WithGrace between stop and kill.
func WithGrace(d time.Duration) SpecOption { return func(s *machine.Spec) { s.Grace = d } }

func ensure(t *testing.T, h *Harness, s machine.Spec) machine.Status {
	t.Helper()
	st, err := h.Service.Ensure(t.Context(), s)
	if err != nil {
		t.Fatalf("ensuring %s: %v", s.ID, err)
	}
	return st
}

func remove(t *testing.T, h *Harness, s machine.Spec, grace time.Duration) machine.Status {
	t.Helper()
	st, err := h.Service.Remove(t.Context(), machine.Ref{ID: s.ID, Assignment: s.Assignment}, machine.Removal{Grace: grace})
	if err != nil {
		t.Fatalf("removing %s: %v", s.ID, err)
	}
	return st
}

// status of one VM, and whether it is known.
func status(t *testing.T, h *Harness, id string) (machine.Status, bool) {
	t.Helper()
	list, err := h.Service.List(t.Context())
	if err != nil {
		t.Fatalf("listing: %v", err)
	}
	for _, st := range list {
		if st.ID == id {
			return st, true
		}
	}
	return machine.Status{}, false
}

// await gives the first status of VM id that is as wanted. It is told by Watch, so that nothing is slept for.
func await(t *testing.T, h *Harness, id, what string, wanted func(machine.Status) bool) machine.Status {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var last machine.Status
	found := fmt.Errorf("found")
	err := h.Service.Watch(ctx, func(u machine.Update) error {
		if u.Status != nil && u.Status.ID == id {
			last = *u.Status
			if wanted(last) {
				return found
			}
		}
		return nil
	})
	if err == nil || err.Error() != found.Error() {
		t.Fatalf("VM %s never was %s: %v\nlast: %s\nlog:\n%s", id, what, err, pretty(last), logTail(h, id))
	}
	return last
}

func awaitState(t *testing.T, h *Harness, id string, state machine.State) machine.Status {
	t.Helper()
	return await(t, h, id, string(state), func(s machine.Status) bool { return s.State == state })
}

// eventually polls for what no Watch tells: processes and files.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(patience); !holds(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("never came: %s", what)
		}
	}
}

func noLeftovers(t *testing.T, h *Harness) {
	t.Helper()
	var left []string
	defer func() {
		if t.Failed() {
			t.Logf("left over: %s", strings.Join(left, ", "))
		}
	}()
	eventually(t, "a host without leftovers", func() bool {
		left = h.Leftovers(t)
		return len(left) == 0
	})
}

func pretty(v any) string {
	b, _ := json.MarshalIndent(v, "", "  ")
	return string(b)
}

func logTail(h *Harness, id string) string {
	if h.Log == nil {
		return ""
	}
	var out []string
	for _, line := range strings.Split(h.Log.String(), "\n") {
		if strings.Contains(line, id) {
			out = append(out, line)
		}
	}
	return strings.Join(out[max(0, len(out)-40):], "\n")
}

// loseRecord removes the record of a VM as no orderly program would.
func (h *Harness) loseRecord(t *testing.T, id string) {
	t.Helper()
	if err := os.Remove(h.recordFile(id)); err != nil {
		t.Fatal(err)
	}
}

func (h *Harness) recordFile(id string) string {
	return filepath.Join(h.StateDir, "records", id+".json")
}
