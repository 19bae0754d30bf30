package machinetest

import (
	"errors"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"imp.dev/imp/internal/fault"
	guestfake "imp.dev/imp/internal/guest/fake"
	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/machine"
	vmmfake "imp.dev/imp/internal/vmm/fake"
)

func orderChecks() []Check {
	checks := []Check{
		{Name: "an order with an older assignment is refused", Run: staleAssignment},
		{Name: "a newer assignment takes the place of the older once that is removed", Run: successor},
		{Name: "a VM that is not known is Removed at once and cannot come back under that assignment", Run: removeUnknown},
		{Name: "a VM beyond the node's budget is refused and leaves nothing", Run: noCapacity},
		{Name: "a finished VM makes room for others", Run: capacityFreed},
		{Name: "a VM cannot grow beyond the node's budget, and goes on with its earlier size", Run: growthWithoutRoom},
		{Name: "a Spec that is not valid is refused with the field's name", Run: invalidSpec},
		{Name: "repeating Ensure changes nothing, with what the object has learned from this node in it as well", Run: repeatEnsure},
		{Name: "an ephemeral VM takes no change but of its end", Run: ephemeralEdit, Images: true},
		{Name: "a persistent VM says RestartRequired until it runs with its new Spec", Run: restartRequired, Images: true},
		{Name: "a repeated Remove can only shorten the grace", Run: shorterGrace},
	}
	for name, c := range map[string]struct {
		option SpecOption
		before func(*Harness) func()
		state  func(machine.Status) bool
	}{
		"pulling": {before: func(h *Harness) func() { return h.Images.Block() }, state: func(s machine.Status) bool { return s.Progress != "" }},
		"waiting for another try at the image": {before: func(h *Harness) func() {
			h.Images.Fail(errors.New("registry is down"))
			return func() { h.Images.Fail(nil) }
		}, state: func(s machine.Status) bool {
			return s.Disk.Reason == fault.ImagePullFailed && s.State == machine.Pending
		}},
		"booting":  {option: WithScript(vmmfake.Script{Guest: guestfake.Script{Silent: true}}), state: func(s machine.Status) bool { return s.Run > 0 }},
		"running":  {option: WithScript(vmmfake.Script{}), state: func(s machine.Status) bool { return s.State == machine.Running }},
		"finished": {option: WithScript(exits(0, 0, "")), state: func(s machine.Status) bool { return s.State == machine.Finished }},
		"backing off": {option: func(s *machine.Spec) {
			IsPersistent(s)
			s.Restart.InitialDelay, s.Restart.MaxDelay = time.Hour, time.Hour
			WithScript(exits(1, 0, ""))(s)
		}, state: func(s machine.Status) bool {
			return s.State == machine.Pending && s.Started.Reason == machine.ReasonBackingOff
		}},
	} {
		for _, restarted := range []bool{false, true} {
			checks = append(checks, Check{Images: c.before != nil, Name: fmt.Sprintf("removing a VM that is %s leaves nothing (runtime restarted: %v)", name, restarted), Run: func(t *testing.T, h *Harness) {
				release := func() {}
				if c.before != nil {
					release = c.before(h)
				}
				defer release()
				option := c.option
				if option == nil {
					option = func(*machine.Spec) {}
				}
				s := NewSpec(option)
				ensure(t, h, s)
				await(t, h, s.ID, name, c.state)
				if restarted {
					h.Restart(t)
				}
				remove(t, h, s, 0)
				if restarted {
					h.Restart(t)
				}
				awaitState(t, h, s.ID, machine.Removed)
				noLeftovers(t, h)
			}})
		}
	}
	return checks
}

func wantFault(t *testing.T, err error, reason fault.Reason) {
	t.Helper()
	if !fault.Is(err, reason) {
		t.Fatalf("got %v, want reason %s", err, reason)
	}
}

func staleAssignment(t *testing.T, h *Harness) {
	s := NewSpec(func(s *machine.Spec) { s.Assignment = 5 })
	ensure(t, h, s)
	old := s
	old.Assignment = 4
	_, err := h.Service.Ensure(t.Context(), old)
	wantFault(t, err, fault.StaleAssignment)
	_, err = h.Service.Remove(t.Context(), machine.Ref{ID: s.ID, Assignment: 4}, machine.Removal{})
	wantFault(t, err, fault.StaleAssignment)
	remove(t, h, s, 0)
	_, err = h.Service.Ensure(t.Context(), s)
	wantFault(t, err, fault.StaleAssignment)
	awaitState(t, h, s.ID, machine.Removed)
	h.Restart(t)
	_, err = h.Service.Ensure(t.Context(), s)
	wantFault(t, err, fault.StaleAssignment)
}

func successor(t *testing.T, h *Harness) {
	s := NewSpec(WithScript(vmmfake.Script{}))
	ensure(t, h, s)
	first := awaitState(t, h, s.ID, machine.Running)
	old := h.PIDs(t, s.ID)
	s.Assignment, s.Grace = 2, 0
	ensure(t, h, s)
	h.Restart(t)
	st := await(t, h, s.ID, "running under assignment 2", func(st machine.Status) bool { return st.Assignment == 2 && st.State == machine.Running })
	if st.Incarnation != 1 || st.Revision <= first.Revision {
		t.Fatalf("successor: %s", pretty(st))
	}
	if now := h.PIDs(t, s.ID); len(now) != 1 || now[0] == old[0] {
		t.Fatalf("VMMs of the VM are %v, before %v", now, old)
	}
	remove(t, h, s, 0)
	awaitState(t, h, s.ID, machine.Removed)
	s.Assignment = 3
	ensure(t, h, s)
	await(t, h, s.ID, "running under assignment 3", func(st machine.Status) bool { return st.Assignment == 3 && st.State == machine.Running })
}

func removeUnknown(t *testing.T, h *Harness) {
	s := NewSpec()
	if st := remove(t, h, s, time.Minute); st.State != machine.Removed || st.Assignment != 1 {
		t.Fatalf("got %s", pretty(st))
	}
	_, err := h.Service.Ensure(t.Context(), s)
	wantFault(t, err, fault.StaleAssignment)
	noLeftovers(t, h)
}

func noCapacity(t *testing.T, h *Harness) {
	s := NewSpec(func(s *machine.Spec) { s.MemoryMiB = 32<<10 - 16 })
	_, err := h.Service.Ensure(t.Context(), s)
	wantFault(t, err, fault.NoCapacity)
	if _, known := status(t, h, s.ID); known {
		t.Fatal("a refused VM is known")
	}
	noLeftovers(t, h)
}

func capacityFreed(t *testing.T, h *Harness) {
	big := func(s *machine.Spec) { s.VCPU = 20 }
	first, second := NewSpec(big, WithScript(exits(0, 300*time.Millisecond, ""))), NewSpec(big)
	ensure(t, h, first)
	_, err := h.Service.Ensure(t.Context(), second)
	wantFault(t, err, fault.NoCapacity)
	awaitState(t, h, first.ID, machine.Finished)
	eventually(t, "room for the second VM", func() bool {
		_, err := h.Service.Ensure(t.Context(), second)
		return err == nil
	})
}

func growthWithoutRoom(t *testing.T, h *Harness) {
	s := NewSpec(func(s *machine.Spec) { s.Lifecycle = machine.Persistent })
	ensure(t, h, s)
	awaitState(t, h, s.ID, machine.Running)
	s.Generation, s.VCPU = 2, 200
	if st := ensure(t, h, s); st.RestartRequired || st.Generation != 2 {
		t.Fatalf("a size that the node cannot give waits for the next start: %s", pretty(st))
	}
	ensure(t, h, NewSpec()) // what was refused is not counted
}

func invalidSpec(t *testing.T, h *Harness) {
	for name, option := range map[string]SpecOption{
		"id":        func(s *machine.Spec) { s.ID = "../../etc" },
		"memoryMiB": func(s *machine.Spec) { s.MemoryMiB = 1 },
		"image":     func(s *machine.Spec) { s.Image.Reference = "" },
	} {
		_, err := h.Service.Ensure(t.Context(), NewSpec(option))
		wantFault(t, err, fault.InvalidSpec)
		if !errorsContain(err, name) {
			t.Errorf("%v does not name %s", err, name)
		}
	}
}

func repeatEnsure(t *testing.T, h *Harness) {
	at := time.Now().Add(time.Hour)
	for _, s := range []machine.Spec{NewSpec(WithScript(vmmfake.Script{})), NewSpec(IsPersistent, WithScript(vmmfake.Script{}))} {
		s.Deadline = &at
		ensure(t, h, s)
		before := await(t, h, s.ID, "ready", func(st machine.Status) bool {
			return st.GuestReady.OK != nil && *st.GuestReady.OK && st.State == machine.Running
		})
		h.Restart(t)
		before = await(t, h, s.ID, "adopted", func(st machine.Status) bool {
			return st.Counters.Adopted == 1 && st.State == machine.Running && st.Revision > before.Revision
		})
		s.Image.Digest, s.History.Attempts = before.ImageDigest, 7
		for range 5 {
			ensure(t, h, s)
		}
		if after, _ := status(t, h, s.ID); after.Revision != before.Revision {
			t.Fatalf("revision of a VM that is %s went from %d to %d", s.Lifecycle, before.Revision, after.Revision)
		}
	}
}

func ephemeralEdit(t *testing.T, h *Harness) {
	s := NewSpec(WithScript(vmmfake.Script{}))
	ensure(t, h, s)
	awaitState(t, h, s.ID, machine.Running)
	s.Generation, s.Workload.Args, s.Image.Reference = 2, []string{"other"}, "registry.test/other:1"
	ensure(t, h, s)
	st, _ := status(t, h, s.ID)
	if st.Generation != 2 || st.RestartRequired || st.State != machine.Running || len(h.Images.Asked()) != 1 {
		t.Fatalf("after an edit: %s", pretty(st))
	}
}

func restartRequired(t *testing.T, h *Harness) {
	s := NewSpec(IsPersistent, WithScript(vmmfake.Script{}))
	ensure(t, h, s)
	awaitState(t, h, s.ID, machine.Running)
	s.Generation, s.Workload.Args = 2, []string{"new"}
	if st := ensure(t, h, s); !st.RestartRequired || st.Generation != 2 {
		t.Fatalf("after an edit: %s", pretty(st))
	}
	h.Kill(t, s.ID)
	await(t, h, s.ID, "running with the new Spec", func(st machine.Status) bool {
		return st.Incarnation == 2 && st.State == machine.Running && !st.RestartRequired
	})
	if asked := h.Images.Asked(); len(asked) != 1 {
		t.Fatalf("the image was asked for %d times for one reference", len(asked))
	}
	s.Generation, s.Image.Reference = 3, "registry.test/other:2"
	if st := ensure(t, h, s); !st.RestartRequired {
		t.Fatalf("after an edit of the image: %s", pretty(st))
	}
	h.Kill(t, s.ID)
	st := await(t, h, s.ID, "running the new image", func(st machine.Status) bool { return st.Incarnation == 3 && st.State == machine.Running })
	if st.DiskGeneration != 2 || st.ImageDigest == h.Digest {
		t.Fatalf("with another image: %s", pretty(st))
	}
	if kept, err := filepath.Glob(filepath.Join(h.StateDir, "trash", "*.ext4")); err != nil || len(kept) != 1 {
		t.Fatalf("the trash holds %v (%v), want the discarded disk", kept, err)
	}
	asked := h.Images.Asked()
	if last := asked[len(asked)-1]; last.Reference != "registry.test/other:2" || last.Digest != "" {
		t.Fatalf("asked for %+v", last)
	}
}

func shorterGrace(t *testing.T, h *Harness) {
	s := NewSpec(WithScript(vmmfake.Script{Guest: guestfake.Script{IgnoreStop: true}}))
	ensure(t, h, s)
	awaitState(t, h, s.ID, machine.Running)
	remove(t, h, s, time.Hour)
	await(t, h, s.ID, "asked to stop", func(st machine.Status) bool { return st.State == machine.Removing })
	remove(t, h, s, 2*time.Hour)
	remove(t, h, s, 0)
	awaitState(t, h, s.ID, machine.Removed)
	noLeftovers(t, h)
}

// withCredentials makes a Spec that names pull secrets.
func withCredentials(s *machine.Spec) {
	s.Image.NeedsCredentials = true
	s.Image.Credentials = []image.Credential{{Registry: "registry.test", Username: "u", Password: secretWord}}
}
