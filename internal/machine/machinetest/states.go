package machinetest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"imp.dev/imp/internal/fault"
	guestfake "imp.dev/imp/internal/guest/fake"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/process"
	"imp.dev/imp/internal/record"
	vmmfake "imp.dev/imp/internal/vmm/fake"
)

func stateChecks() []Check {
	return []Check{
		{Name: "Watch tells every VM, then Synced once, then every change with a higher revision", Run: watching},
		{Name: "a running VM outlives the runtime and is the same afterwards", Run: adopted},
		{Name: "a runtime that ends while a guest boots goes on with it, and starts its workload once", Run: restartedBooting},
		{Name: "a stop that was ordered goes on after a restart", Run: restartedStopping},
		{Name: "the console is read from any offset, and of a VM that is not known not at all", Run: consoleReading},
		{Name: "a host that was booted is told, and persistent VMs are started again, once", Run: hostReboot, Images: true},
		{Name: "what has no record is reaped at the start", Run: orphans},
		{Name: "a VM whose record is of another version is left alone and refused until it is removed, and then leaves nothing", Run: unreadable("version 99", func([]byte) []byte { return []byte(`{"version":99}`) })},
		{Name: "a VM whose record was half written is left alone and refused until it is removed, and then leaves nothing", Run: unreadable("decoding record", func(whole []byte) []byte { return whole[:len(whole)/2] })},
		{Name: "a VM whose record is empty is left alone and refused until it is removed, and then leaves nothing", Run: unreadable("decoding record", func([]byte) []byte { return nil })},
		{Name: "a write that was interrupted leaves the record before it", Run: interruptedWrite},
		{Name: "a recorded pid that is somebody else's now is never signalled, and the VM's end is told", Run: recycledPID},
		{Name: "disks that vanished while the runtime was away are made anew", Run: vanishedDisk},
	}
}

func churnChecks() []Check {
	return []Check{{Name: "twenty VMs that come and go while the runtime is restarted leave nothing", Run: churn}}
}

func watching(t *testing.T, h *Harness) {
	first, second := NewSpec(WithScript(vmmfake.Script{})), NewSpec(WithScript(exits(0, 0, "")))
	ensure(t, h, first)
	awaitState(t, h, first.ID, machine.Running)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	synced, before, done := 0, 0, errors.New("done")
	revisions := map[string]int64{}
	err := h.Service.Watch(ctx, func(u machine.Update) error {
		if u.Synced {
			synced++
			ensure(t, h, second)
			return nil
		}
		if synced == 0 {
			before++
		}
		if u.Status.Revision <= revisions[u.Status.ID] {
			return fmt.Errorf("revision %d after %d", u.Status.Revision, revisions[u.Status.ID])
		}
		revisions[u.Status.ID] = u.Status.Revision
		if u.Status.ID == second.ID && u.Status.State == machine.Finished {
			return done
		}
		return nil
	})
	if !errors.Is(err, done) || synced != 1 || before != 1 {
		t.Fatalf("got %v, %d times synced, %d VMs before", err, synced, before)
	}
}

func adopted(t *testing.T, h *Harness) {
	s := NewSpec(IsPersistent, WithScript(vmmfake.Script{}), In(setNetwork(t, h)))
	ensure(t, h, s)
	before := awaitState(t, h, s.ID, machine.Running)
	pids := h.PIDs(t, s.ID)
	var st machine.Status
	for n := range int64(3) {
		h.Restart(t)
		st = await(t, h, s.ID, "adopted", func(st machine.Status) bool { return st.Counters.Adopted == n+1 && st.State == machine.Running })
	}
	if now := h.PIDs(t, s.ID); len(now) != 1 || now[0] != pids[0] || st.Incarnation != 1 || !st.StartedAt.Equal(*before.StartedAt) {
		t.Fatalf("VMMs %v, before %v: %s", now, pids, pretty(st))
	}
	remove(t, h, s, time.Second)
	awaitState(t, h, s.ID, machine.Removed)
	noLeftovers(t, h)
}

func restartedBooting(t *testing.T, h *Harness) {
	s := NewSpec(WithScript(vmmfake.Script{Guest: guestfake.Script{ConfigureMillis: 500, BootMillis: 300}}))
	ensure(t, h, s)
	await(t, h, s.ID, "booting", func(st machine.Status) bool { return st.Run == 1 })
	for range 3 {
		h.Restart(t)
	}
	st := awaitState(t, h, s.ID, machine.Running)
	if st.Incarnation != 1 || len(h.PIDs(t, s.ID)) != 1 {
		t.Fatalf("after restarts in the middle of a boot: %s", pretty(st))
	}
}

func restartedStopping(t *testing.T, h *Harness) {
	s := NewSpec(WithScript(vmmfake.Script{Guest: guestfake.Script{IgnoreStop: true}}))
	ensure(t, h, s)
	awaitState(t, h, s.ID, machine.Running)
	remove(t, h, s, time.Second)
	h.Restart(t)
	st := awaitState(t, h, s.ID, machine.Removed)
	if st.LastExit == nil || st.LastExit.Verdict != machine.Stopped {
		t.Fatalf("ended as %s", pretty(st.LastExit))
	}
	noLeftovers(t, h)
}

func consoleReading(t *testing.T, h *Harness) {
	s := NewSpec(WithScript(exits(0, 0, "0123456789\n")))
	ensure(t, h, s)
	awaitState(t, h, s.ID, machine.Finished)
	eventually(t, "an end of the VMM, which writes its last words", func() bool { return len(h.PIDs(t, s.ID)) == 0 })
	all, err := h.Service.Console(t.Context(), s.ID, 0, 1<<20)
	if err != nil || all.Size != int64(len(all.Data)) || !strings.Contains(string(all.Data), "0123456789") {
		t.Fatalf("got %+v, %v", all, err)
	}
	part, err := h.Service.Console(t.Context(), s.ID, 3, 4)
	if err != nil || part.Offset != 3 || string(part.Data) != string(all.Data[3:7]) {
		t.Fatalf("got %+v, %v", part, err)
	}
	last, err := h.Service.Console(t.Context(), s.ID, -5, 100)
	if err != nil || string(last.Data) != string(all.Data[len(all.Data)-5:]) {
		t.Fatalf("got %+v, %v", last, err)
	}
	end, err := h.Service.Console(t.Context(), s.ID, all.Size, 100)
	if err != nil || len(end.Data) != 0 || end.Size != all.Size {
		t.Fatalf("got %+v, %v", end, err)
	}
	_, err = h.Service.Console(t.Context(), "nobody", 0, 100)
	wantFault(t, err, fault.NotFound)
}

func orphans(t *testing.T, h *Harness) {
	s := NewSpec(WithScript(vmmfake.Script{}))
	ensure(t, h, s)
	awaitState(t, h, s.ID, machine.Running)
	h.Stop(t)
	h.loseRecord(t, s.ID)
	h.Start(t)
	noLeftovers(t, h)
	if _, known := status(t, h, s.ID); known {
		t.Fatal("a VM without record is known")
	}
}

func hostReboot(t *testing.T, h *Harness) {
	once, always := NewSpec(WithScript(vmmfake.Script{})), NewSpec(IsPersistent, WithScript(vmmfake.Script{}))
	for _, s := range []machine.Spec{once, always} {
		ensure(t, h, s)
		awaitState(t, h, s.ID, machine.Running)
	}
	h.Reboot(t)
	st := awaitState(t, h, once.ID, machine.Finished)
	if st.Final.Verdict != machine.LostWithHost || st.Counters.Starts != 1 {
		t.Fatalf("one-shot: %s", pretty(st))
	}
	st = await(t, h, always.ID, "running again", func(st machine.Status) bool { return st.State == machine.Running && st.Incarnation == 2 })
	if st.LastExit.Verdict != machine.LostWithHost || st.History.Attempts != 0 || st.DiskGeneration != 1 || len(h.PIDs(t, always.ID)) != 1 {
		t.Fatalf("persistent: %s", pretty(st))
	}
	if asked := h.Images.Asked(); len(asked) != 2 {
		t.Fatalf("the image was asked for %d times: a boot of the host needs no registry", len(asked))
	}
}

// unreadable harms the record of a running VM while the runtime is away.
func unreadable(says string, harm func(whole []byte) []byte) func(t *testing.T, h *Harness) {
	return func(t *testing.T, h *Harness) {
		s := NewSpec(WithScript(vmmfake.Script{}))
		ensure(t, h, s)
		awaitState(t, h, s.ID, machine.Running)
		h.Stop(t)
		whole, err := os.ReadFile(h.recordFile(s.ID))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(h.recordFile(s.ID), harm(whole), 0o600); err != nil {
			t.Fatal(err)
		}
		h.Start(t)
		_, err = h.Service.Ensure(t.Context(), s)
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Fatalf("got %v, want an error that says why", err)
		}
		leftAlone(t, h, s)
	}
}

// interruptedWrite: a crash of the host in the middle of a write leaves a file that is no record yet.
func interruptedWrite(t *testing.T, h *Harness) {
	s := NewSpec(WithScript(vmmfake.Script{}))
	ensure(t, h, s)
	awaitState(t, h, s.ID, machine.Running)
	pids := h.PIDs(t, s.ID)
	h.Stop(t)
	torn := filepath.Join(h.StateDir, "records", record.TempPrefix+"1234")
	if err := os.WriteFile(torn, []byte(`{"version":1,"id":"`), 0o600); err != nil {
		t.Fatal(err)
	}
	h.Start(t)
	await(t, h, s.ID, "adopted", func(st machine.Status) bool { return st.State == machine.Running && st.Counters.Adopted == 1 })
	if again := h.PIDs(t, s.ID); len(again) != 1 || again[0] != pids[0] {
		t.Errorf("its VMMs are %v, want %v", again, pids)
	}
	if _, err := os.Stat(torn); !os.IsNotExist(err) {
		t.Errorf("the torn file is still there: %v", err)
	}
	remove(t, h, s, 0)
	awaitState(t, h, s.ID, machine.Removed)
	noLeftovers(t, h)
}

// recycledPID: the VMM ended while the runtime was away, and its number was given to a process that has nothing to do with it.
func recycledPID(t *testing.T, h *Harness) {
	s := NewSpec(IsPersistent, WithScript(vmmfake.Script{}))
	ensure(t, h, s)
	awaitState(t, h, s.ID, machine.Running)
	pid := h.PIDs(t, s.ID)[0]
	h.Stop(t)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "an end of the VMM", func() bool { return len(h.PIDs(t, s.ID)) == 0 })
	stranger, err := process.New(process.Options{}).Start(t.Context(), process.Order{Path: "/bin/sleep", Args: []string{"600"}, UID: os.Geteuid(), GID: os.Getegid()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = stranger.Signal(syscall.SIGKILL) })
	whole, err := os.ReadFile(h.recordFile(s.ID))
	if err != nil {
		t.Fatal(err)
	}
	recycled := strings.Replace(string(whole), fmt.Sprintf(`"pid":%d,`, pid), fmt.Sprintf(`"pid":%d,`, stranger.Identity().PID), 1)
	if recycled == string(whole) {
		t.Fatalf("the record does not hold the pid %d: %s", pid, whole)
	}
	if err := os.WriteFile(h.recordFile(s.ID), []byte(recycled), 0o600); err != nil {
		t.Fatal(err)
	}
	h.Start(t)
	st := await(t, h, s.ID, "running again", func(st machine.Status) bool { return st.State == machine.Running && st.Incarnation == 2 })
	if st.LastExit.Verdict != machine.VMMKilled || st.Counters.Adopted != 0 {
		t.Errorf("the end is told as %s", pretty(st))
	}
	remove(t, h, s, 0)
	awaitState(t, h, s.ID, machine.Removed)
	noLeftovers(t, h)
	select {
	case <-stranger.Done():
		t.Error("the stranger was ended")
	default:
	}
}

// leftAlone checks that of a VM with an unreadable record nothing is touched until it is removed.
func leftAlone(t *testing.T, h *Harness, s machine.Spec) {
	t.Helper()
	h.Restart(t)
	if _, err := h.Service.Ensure(t.Context(), s); err == nil {
		t.Fatal("after another restart the VM is accepted beside its older self")
	}
	if n := len(h.PIDs(t, s.ID)); n != 1 {
		t.Fatalf("%d VMMs, want the one that was there", n)
	}
	remove(t, h, s, 0)
	awaitState(t, h, s.ID, machine.Removed)
	noLeftovers(t, h)
	s.Assignment = 2
	ensure(t, h, s)
	await(t, h, s.ID, "running anew", func(st machine.Status) bool { return st.Assignment == 2 && st.State == machine.Running })
}

func vanishedDisk(t *testing.T, h *Harness) {
	s := NewSpec(IsPersistent, WithScript(vmmfake.Script{}))
	ensure(t, h, s)
	awaitState(t, h, s.ID, machine.Running)
	h.Stop(t)
	h.Kill(t, s.ID)
	for _, name := range []string{"base.ext4", "private.ext4"} {
		if err := os.Remove(filepath.Join(h.StateDir, "vm", s.ID, name)); err != nil {
			t.Fatal(err)
		}
	}
	h.Start(t)
	st := await(t, h, s.ID, "running again", func(st machine.Status) bool { return st.Incarnation == 2 && st.State == machine.Running })
	if st.DiskGeneration != 2 || st.ImageDigest != h.Digest {
		t.Fatalf("with new disks: %s", pretty(st))
	}
}

func churn(t *testing.T, h *Harness) {
	scripts := []vmmfake.Script{
		{}, exits(0, 50*time.Millisecond, "x"), exits(1, 0, ""), ends(vmmfake.Panic, 20*time.Millisecond), ends(vmmfake.Killed, 0),
		{StartError: "broken"}, {Guest: guestfake.Script{Silent: true}}, {Guest: guestfake.Script{DropEveryMillis: 50}},
	}
	network := setNetwork(t, h)
	var service sync.RWMutex // held for writing while the runtime is down
	var group sync.WaitGroup
	for n := range 20 {
		group.Add(1)
		go func() {
			defer group.Done()
			random := rand.New(rand.NewPCG(uint64(n), 7))
			s := NewSpec(WithScript(scripts[n%len(scripts)]), func(s *machine.Spec) {
				if n%2 == 0 {
					IsPersistent(s)
				}
				if n%3 == 0 {
					In(network)(s)
				}
			})
			order := func(f func() error) {
				service.RLock()
				defer service.RUnlock()
				if err := f(); err != nil {
					t.Errorf("VM %d: %v", n, err)
				}
			}
			order(func() error { _, err := h.Service.Ensure(t.Context(), s); return err })
			pause := time.NewTimer(time.Duration(random.IntN(1500)) * time.Millisecond)
			<-pause.C
			order(func() error {
				_, err := h.Service.Remove(t.Context(), machine.Ref{ID: s.ID, Assignment: 1}, machine.Removal{Grace: time.Duration(random.IntN(300)) * time.Millisecond})
				return err
			})
		}()
	}
	stop := make(chan struct{})
	var restarts sync.WaitGroup
	restarts.Add(1)
	go func() {
		defer restarts.Done()
		tick := time.NewTicker(300 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			service.Lock()
			h.Restart(t)
			service.Unlock()
		}
	}()
	group.Wait()
	close(stop)
	restarts.Wait()
	eventually(t, "every VM Removed", func() bool {
		list, err := h.Service.List(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, st := range list {
			if st.State != machine.Removed {
				return false
			}
		}
		return len(list) == 20
	})
	noLeftovers(t, h)
}
