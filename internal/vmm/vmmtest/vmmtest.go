// Package vmmtest is the suite that every VMM driver passes: what vmm.Driver promises, as named checks on real processes.
package vmmtest

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/vmm"
)

// Behaviour is what a machine does once it is triggered.
type Behaviour string

// Behaviours.
const (
	RunsOn    Behaviour = "runs on"
	PowersOff Behaviour = "powers off"
	Reboots   Behaviour = "reboots"
	Panics    Behaviour = "panics"
)

// Fixture is a driver under test.
type Fixture struct {
	// NewDriver gives the driver as a newly started runtime has it. All of one test share their instance.
	NewDriver func(t *testing.T) vmm.Driver
	// Config of a machine of the behaviour, in new directories.
	Config func(t *testing.T, b Behaviour) vmm.Config
	// Trigger makes a started machine do what it is made for, no sooner than 200 ms later, and lets go of the guest again.
	Trigger func(t *testing.T, i vmm.Instance)
	// Broken are starts that must fail.
	Broken map[string]Broken
	// Mute says that the VMM's process ends with its machine where the guest resets it or panics, and that a signal ends it without a word: what
	// the evidence of these is then.
	Mute bool
	// NoAgent says that the guests have none: nobody dials them.
	NoAgent bool
	// Timeout of any single wait.
	Timeout time.Duration
}

// Broken is a start that must fail as RuntimeStartFailed with Want in its words.
type Broken struct {
	Driver func(t *testing.T) vmm.Driver // nil is NewDriver
	Change func(t *testing.T, c *vmm.Config)
	Want   string
}

type suite struct {
	Fixture
}

// Run runs the suite.
func Run(t *testing.T, f Fixture) {
	s := suite{f}
	t.Run("a run is forgotten, recovered with the same state, and killed", s.forgetAndRecover)
	t.Run("an end is told alike whoever looks and whenever", s.outcomes)
	t.Run("destroying is idempotent and leaves nothing", s.destroy)
	t.Run("a run whose start was never written down is found and destroyed", s.destroyUnrecorded)
	t.Run("a run that was taken out of its cgroup is found by its mark and destroyed", s.destroyMoved)
	t.Run("recovering matches no stranger", s.strangers)
	t.Run("a run that lives is not started again", s.twice)
	t.Run("a start that fails says why and leaves nothing", s.broken)
	t.Run("a start whose context ends leaves nothing", s.cancelled)
	t.Run("the console is appended to across runs", s.console)
}

func (s suite) context(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), s.Timeout)
	t.Cleanup(cancel)
	return ctx
}

// start starts a machine that is destroyed with the test.
func (s suite) start(t *testing.T, d vmm.Driver, c vmm.Config) vmm.Instance {
	t.Helper()
	i, err := d.Start(s.context(t), c)
	if err != nil {
		t.Fatalf("starting: %v", err)
	}
	t.Cleanup(func() {
		_ = i.Close()
		ctx, cancel := context.WithTimeout(context.Background(), s.Timeout)
		defer cancel()
		if err := d.Destroy(ctx, c, i.Handle()); err != nil {
			t.Errorf("destroying after the test: %v", err)
		}
	})
	return i
}

// copied gives h as it comes back from a record.
func copied(t *testing.T, h vmm.Handle) vmm.Handle {
	t.Helper()
	b, err := json.Marshal(h)
	if err != nil {
		t.Fatal(err)
	}
	var again vmm.Handle
	if err := json.Unmarshal(b, &again); err != nil {
		t.Fatal(err)
	}
	return again
}

func (s suite) recover(t *testing.T, c vmm.Config, h vmm.Handle) (vmm.Driver, vmm.Instance) {
	t.Helper()
	d := s.NewDriver(t)
	i, err := d.Recover(s.context(t), c, copied(t, h))
	if err != nil {
		t.Fatalf("recovering: %v", err)
	}
	t.Cleanup(func() { _ = i.Close() })
	return d, i
}

func (s suite) evidence(t *testing.T, d vmm.Driver, c vmm.Config, h vmm.Handle) vmm.Evidence {
	t.Helper()
	e, err := d.Evidence(s.context(t), c, h)
	if err != nil {
		t.Fatalf("asking for evidence: %v", err)
	}
	return e
}

func (s suite) awaitDone(t *testing.T, i vmm.Instance) {
	t.Helper()
	select {
	case <-i.Done():
	case <-time.After(s.Timeout):
		t.Fatal("Done was not closed")
	}
}

func (s suite) await(t *testing.T, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(s.Timeout)
	for !cond() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("waited in vain until %s", what)
		}
	}
}

func alive(pid int) bool {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return false
	}
	rest := string(b[strings.LastIndexByte(string(b), ')')+1:])
	return !strings.HasPrefix(rest, " Z")
}

func isDone(i vmm.Instance) bool {
	select {
	case <-i.Done():
		return true
	default:
		return false
	}
}

// nothingLeft checks that of the run only evidence is there.
func (s suite) nothingLeft(t *testing.T, d vmm.Driver, c vmm.Config, pid int) {
	t.Helper()
	if pid != 0 && alive(pid) {
		t.Errorf("the process %d lives", pid)
	}
	if found := s.found(t, d, c); len(found) != 0 {
		t.Errorf("on the host there are still %v", found)
	}
	entries, _ := os.ReadDir(c.Dir)
	for _, e := range entries {
		if e.Type()&os.ModeSocket != 0 {
			t.Errorf("the socket %s is left", e.Name())
		}
	}
	groups, _ := filepath.Glob("/sys/fs/cgroup/*/imp/*/" + c.Cgroup)
	more, _ := filepath.Glob("/sys/fs/cgroup/imp/*/" + c.Cgroup)
	if all := append(groups, more...); len(all) != 0 {
		t.Errorf("cgroups are left: %v", all)
	}
}

func (s suite) forgetAndRecover(t *testing.T) {
	d, c := s.NewDriver(t), s.Config(t, RunsOn)
	first := s.start(t, d, c)
	h := first.Handle()
	if h.Driver != d.Name() {
		t.Errorf("the handle is of driver %q", h.Driver)
	}
	before := s.evidence(t, d, c, h)
	if before.State != vmm.Running || before.Cause != vmm.CauseUnknown {
		t.Fatalf("evidence after the start: %+v", before)
	}
	process := vmm.Found{Cgroup: c.Cgroup, Kind: vmm.FoundProcess, Name: "pid " + strconv.Itoa(first.PID())}
	if found := s.found(t, d, c); !slices.Contains(found, process) {
		t.Errorf("of the run there are %v, want %v among them", found, process)
	}
	if err := first.Close(); err != nil {
		t.Errorf("closing: %v", err)
	}
	again, second := s.recover(t, c, h)
	if second.PID() != first.PID() || string(second.Handle().Data) != string(h.Data) {
		t.Errorf("another run was recovered: %+v", second.Handle())
	}
	if got := s.evidence(t, again, c, h); got != before {
		t.Errorf("evidence %+v, before %+v", got, before)
	}
	if isDone(second) {
		t.Error("a running machine is done")
	}
	if !s.NoAgent {
		conn, err := second.DialGuest(s.context(t))
		if err != nil {
			t.Fatalf("dialling the guest of a recovered run: %v", err)
		}
		_ = conn.Close()
	}
	if _, err := second.Usage(s.context(t)); err != nil {
		t.Errorf("usage: %v", err)
	}
	if err := second.Kill(s.context(t)); err != nil {
		t.Fatalf("killing: %v", err)
	}
	s.awaitDone(t, second)
	if err := second.Kill(s.context(t)); err != nil {
		t.Errorf("killing what is gone: %v", err)
	}
	if _, err := second.DialGuest(s.context(t)); !errors.Is(err, vmm.ErrGone) {
		t.Errorf("dialling a gone guest: %v", err)
	}
	if got := s.evidence(t, again, c, h); got.State != vmm.Gone || got.Cause != vmm.CauseUnknown {
		t.Errorf("evidence after the kill: %+v", got)
	}
	if _, err := again.Recover(s.context(t), c, h); !errors.Is(err, vmm.ErrGone) {
		t.Errorf("recovering what is gone: %v", err)
	}
	if err := again.Destroy(s.context(t), c, h); err != nil {
		t.Fatal(err)
	}
	s.nothingLeft(t, again, c, first.PID())
}

func (s suite) destroy(t *testing.T) {
	d, c := s.NewDriver(t), s.Config(t, RunsOn)
	i := s.start(t, d, c)
	for range 2 {
		if err := d.Destroy(s.context(t), c, i.Handle()); err != nil {
			t.Fatal(err)
		}
		s.nothingLeft(t, d, c, i.PID())
	}
	s.awaitDone(t, i)
	if err := d.Destroy(s.context(t), s.Config(t, RunsOn), vmm.Handle{}); err != nil {
		t.Errorf("destroying what never was: %v", err)
	}
}

func (s suite) destroyUnrecorded(t *testing.T) {
	d, c := s.NewDriver(t), s.Config(t, RunsOn)
	i := s.start(t, d, c)
	_ = i.Close()
	again := s.NewDriver(t)
	if e := s.evidence(t, again, c, vmm.Handle{}); e.Cause != vmm.CauseUnknown {
		t.Errorf("evidence without a handle: %+v", e)
	}
	if err := again.Destroy(s.context(t), c, vmm.Handle{}); err != nil {
		t.Fatal(err)
	}
	s.nothingLeft(t, again, c, i.PID())
}

func (s suite) strangers(t *testing.T) {
	d, c := s.NewDriver(t), s.Config(t, RunsOn)
	i := s.start(t, d, c)
	for name, change := range map[string]func(identity map[string]any){
		"the pid was given to another process": func(id map[string]any) { id["startTime"] = id["startTime"].(float64) + 1 },
		"the host was booted since":            func(id map[string]any) { id["bootID"] = "another" },
	} {
		t.Run(name, func(t *testing.T) {
			h := copied(t, i.Handle())
			var data map[string]any
			if err := json.Unmarshal(h.Data, &data); err != nil {
				t.Fatal(err)
			}
			change(data["identity"].(map[string]any))
			h.Data, _ = json.Marshal(data)
			if _, err := d.Recover(s.context(t), c, h); !errors.Is(err, vmm.ErrGone) {
				t.Errorf("got %v, want ErrGone", err)
			}
			if e := s.evidence(t, d, c, h); e.State != vmm.Gone {
				t.Errorf("evidence %+v", e)
			}
		})
	}
	for name, change := range map[string]func(*vmm.Handle){
		"of another driver":         func(h *vmm.Handle) { h.Driver = "another" },
		"of a version never made":   func(h *vmm.Handle) { h.Version = 1 << 20 },
		"with data of another kind": func(h *vmm.Handle) { h.Data = json.RawMessage(`[1]`) },
	} {
		t.Run("a handle "+name+" is refused", func(t *testing.T) {
			h := i.Handle()
			change(&h)
			if _, err := d.Recover(s.context(t), c, h); err == nil || errors.Is(err, vmm.ErrGone) {
				t.Errorf("recovering: %v", err)
			}
			if err := d.Destroy(s.context(t), c, h); err == nil {
				t.Error("destroying by it was accepted")
			}
		})
	}
	if !alive(i.PID()) {
		t.Error("the run did not survive")
	}
}

func (s suite) broken(t *testing.T) {
	for name, b := range s.Broken {
		t.Run(name, func(t *testing.T) {
			d, c := s.NewDriver(t), s.Config(t, RunsOn)
			if b.Driver != nil {
				d = b.Driver(t)
			}
			if b.Change != nil {
				b.Change(t, &c)
			}
			i, err := d.Start(s.context(t), c)
			if err == nil {
				_ = i.Kill(s.context(t))
				t.Fatal("it started")
			}
			if !fault.Is(err, fault.RuntimeStartFailed) || !strings.Contains(err.Error(), b.Want) {
				t.Errorf("error %q, want RuntimeStartFailed with %q", err, b.Want)
			}
			s.nothingLeft(t, d, c, 0)
		})
	}
}

func (s suite) twice(t *testing.T) {
	d, c := s.NewDriver(t), s.Config(t, RunsOn)
	i := s.start(t, d, c)
	second := c
	second.Dir = filepath.Join(t.TempDir(), "second")
	if err := os.Mkdir(second.Dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := s.NewDriver(t).Start(s.context(t), second); !fault.Is(err, fault.RuntimeStartFailed) || !strings.Contains(err.Error(), "still lives") {
		t.Errorf("got %v", err)
	}
	if isDone(i) || !alive(i.PID()) {
		t.Error("the living run was ended")
	}
}

func (s suite) cancelled(t *testing.T) {
	d, c := s.NewDriver(t), s.Config(t, RunsOn)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := d.Start(ctx, c); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	s.nothingLeft(t, d, c, 0)
}

func (s suite) console(t *testing.T) {
	d, c := s.NewDriver(t), s.Config(t, PowersOff)
	const earlier = "of an earlier run\n[    9.000000] reboot: Restarting system\n"
	if err := os.WriteFile(c.ConsoleLog, []byte(earlier), 0o600); err != nil {
		t.Fatal(err)
	}
	i := s.start(t, d, c)
	s.Trigger(t, i)
	s.awaitDone(t, i)
	b, err := os.ReadFile(c.ConsoleLog)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(string(b), earlier) || !strings.Contains(string(b[len(earlier):]), "reboot: Power down") {
		t.Errorf("the console holds %q", b)
	}
	if e := s.evidence(t, d, c, i.Handle()); e.Cause != vmm.CausePowerOff {
		t.Errorf("evidence %+v", e)
	}
}
