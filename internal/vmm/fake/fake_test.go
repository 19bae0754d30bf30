package fake_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"k8s.io/utils/clock"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/cgroup"
	"imp.dev/imp/internal/guest/channel"
	guestfake "imp.dev/imp/internal/guest/fake"
	"imp.dev/imp/internal/process"
	"imp.dev/imp/internal/vmm"
	"imp.dev/imp/internal/vmm/fake"
	"imp.dev/imp/internal/vmm/vmmtest"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case process.ChildCommand:
			process.ChildMain()
		case fake.Command:
			fake.Main()
		}
	}
	os.Exit(m.Run())
}

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

// drivers gives a maker of drivers of one instance, each as a restarted runtime has it.
func drivers(t *testing.T, withCgroups bool) func(*testing.T) vmm.Driver {
	instance := "test-" + uuid.NewString()[:8]
	var tree *cgroup.Tree
	if withCgroups {
		var err error
		if tree, err = cgroup.Open(cgroup.Options{Instance: instance}); err != nil || os.Geteuid() != 0 {
			if os.Getenv("IMP_REQUIRE_ALL") == "1" {
				t.Fatalf("needs root and cgroups: %v", err)
			}
			t.Skipf("needs root and cgroups: %v", err)
		}
		t.Cleanup(func() {
			if err := tree.Close(); err != nil {
				t.Errorf("cgroups of the instance: %v", err)
			}
		})
	}
	return func(*testing.T) vmm.Driver {
		return fake.New(fake.Options{Launcher: process.New(process.Options{}), Instance: instance, Cgroups: tree, Log: quiet(), AnswerTimeout: 5 * time.Second})
	}
}

func config(t *testing.T, s fake.Script) vmm.Config {
	t.Helper()
	raw, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	id := uuid.NewString()
	dir := filepath.Join(t.TempDir(), strings.Repeat("deep/", 20), "run")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return vmm.Config{VMID: id, Run: 1, Dir: dir, ConsoleLog: filepath.Join(t.TempDir(), "console.log"), VCPU: 1, MemoryMiB: 128, Cgroup: id, Script: raw}
}

func client(t *testing.T, i vmm.Instance) *channel.Client {
	t.Helper()
	c := channel.New(i.DialGuest, clock.RealClock{}, quiet())
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func startWorkload(t *testing.T, i vmm.Instance) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	c := client(t, i)
	err := errors.Join(c.Configure(ctx, guestv1.Configure{ID: "c", Hostname: "h"}), c.Start(ctx, guestv1.Start{ID: "s", Nonce: "n", Argv: [][]byte{[]byte("x")}}))
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
}

func fixture(t *testing.T, withCgroups bool) vmmtest.Fixture {
	newDriver := drivers(t, withCgroups)
	end := map[vmmtest.Behaviour]string{vmmtest.PowersOff: fake.PowerOff, vmmtest.Reboots: fake.Reboot, vmmtest.Panics: fake.Panic}
	return vmmtest.Fixture{
		NewDriver: newDriver,
		Config: func(t *testing.T, b vmmtest.Behaviour) vmm.Config {
			s := fake.Script{Console: "booting\n"}
			if how := end[b]; how != "" {
				s.End = &fake.End{How: how, AfterStart: true, AfterMillis: 300}
			}
			return config(t, s)
		},
		Trigger: startWorkload,
		Timeout: 20 * time.Second,
		Broken: map[string]vmmtest.Broken{
			"a VMM that gives up": {Change: script(fake.Script{StartError: "no accelerator"}), Want: "fake-vmm: no accelerator"},
			"a VMM that never answers": {Driver: func(t *testing.T) vmm.Driver {
				return fake.New(fake.Options{Launcher: process.New(process.Options{}), Instance: "x", Log: quiet(), AnswerTimeout: 500 * time.Millisecond})
			}, Change: script(fake.Script{NoAnswer: true}), Want: "did not answer"},
			"a binary that is not there": {Driver: func(t *testing.T) vmm.Driver {
				return fake.New(fake.Options{Exe: "/no/such/vmm", Launcher: process.New(process.Options{}), Instance: "x", Log: quiet()})
			}, Want: "/no/such/vmm"},
			"a console that cannot be opened": {Change: func(_ *testing.T, c *vmm.Config) { c.ConsoleLog = "/no/console" }, Want: "/no/console"},
			"a directory that is not there":   {Change: func(_ *testing.T, c *vmm.Config) { c.Dir += "/none" }, Want: "/none"},
		},
	}
}

func script(s fake.Script) func(*testing.T, *vmm.Config) {
	return func(_ *testing.T, c *vmm.Config) { c.Script, _ = json.Marshal(s) }
}

func TestDriverWithCgroups(t *testing.T)    { vmmtest.Run(t, fixture(t, true)) }
func TestDriverWithoutCgroups(t *testing.T) { vmmtest.Run(t, fixture(t, false)) }

func start(t *testing.T, d vmm.Driver, c vmm.Config) vmm.Instance {
	t.Helper()
	i, err := d.Start(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = i.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := d.Destroy(ctx, c, i.Handle()); err != nil {
			t.Error(err)
		}
	})
	return i
}

func awaitDone(t *testing.T, i vmm.Instance) {
	t.Helper()
	select {
	case <-i.Done():
	case <-time.After(20 * time.Second):
		t.Fatal("the machine did not end")
	}
}

func TestScriptedWorkloadRunsToItsExitAndTheMachineGoesOffWhenAcknowledged(t *testing.T) {
	d := drivers(t, false)(t)
	c := config(t, fake.Script{Guest: guestfake.Script{Output: "hello\n", Exit: &guestfake.Exit{AfterMillis: 50, Code: 3}}})
	i := start(t, d, c)
	startWorkload(t, i)
	g := client(t, i)
	exit, err := g.Wait(t.Context())
	if err != nil || exit.Code != 3 {
		t.Fatalf("%+v %v", exit, err)
	}
	if err := g.Acknowledge(t.Context()); err != nil {
		t.Fatal(err)
	}
	awaitDone(t, i)
	b, _ := os.ReadFile(c.ConsoleLog)
	if !strings.Contains(string(b), "hello\nIMP_FAILED code=3 id=n\n") {
		t.Errorf("console %q", b)
	}
	e, err := d.Evidence(t.Context(), c, i.Handle())
	if err != nil || e.State != vmm.Ended || e.Cause != vmm.CausePowerOff {
		t.Errorf("%+v %v", e, err)
	}
}

func TestMisbehaviourOnRequest(t *testing.T) {
	newDriver := drivers(t, true)
	for name, c := range map[string]struct {
		script fake.Script
		want   vmm.Evidence
	}{
		"the VMM kills itself":                   {fake.Script{End: &fake.End{How: fake.Killed, AfterMillis: 10}}, vmm.Evidence{State: vmm.Gone}},
		"the VMM gives up with words":            {fake.Script{End: &fake.End{How: fake.Error, AfterMillis: 100, Message: "disk full"}}, vmm.Evidence{State: vmm.Gone, Cause: vmm.CauseVMMError, Detail: "fake-vmm: disk full"}},
		"the VMM needs more than its cgroup":     {fake.Script{End: &fake.End{How: fake.OOM, AfterMillis: 10}}, vmm.Evidence{State: vmm.Gone, Cause: vmm.CauseOOM}},
		"the first run panics, others power off": {fake.Script{Runs: []fake.Script{{End: &fake.End{How: fake.Panic, Message: "x"}}, {End: &fake.End{How: fake.PowerOff}}}}, vmm.Evidence{State: vmm.Panicked, Cause: vmm.CausePanic, Detail: "Kernel panic - not syncing: x"}},
	} {
		t.Run(name, func(t *testing.T) {
			d, cfg := newDriver(t), config(t, c.script)
			i := start(t, d, cfg)
			awaitDone(t, i)
			e, err := d.Evidence(t.Context(), cfg, i.Handle())
			if err != nil || e.State != c.want.State || e.Cause != c.want.Cause || !strings.Contains(e.Detail, c.want.Detail) {
				t.Errorf("evidence %+v, %v; want %+v", e, err, c.want)
			}
		})
	}
	t.Run("the second run follows the second script", func(t *testing.T) {
		d, cfg := newDriver(t), config(t, fake.Script{Runs: []fake.Script{{End: &fake.End{How: fake.Panic}}, {End: &fake.End{How: fake.PowerOff}}}})
		cfg.Run = 7
		i := start(t, d, cfg)
		awaitDone(t, i)
		if e, err := d.Evidence(t.Context(), cfg, i.Handle()); err != nil || e.Cause != vmm.CausePowerOff {
			t.Errorf("%+v %v", e, err)
		}
	})
	t.Run("a VMM that eats its socket cannot be dialled but can be killed", func(t *testing.T) {
		d, cfg := newDriver(t), config(t, fake.Script{EatSocket: true, IgnoreSignals: true})
		i := start(t, d, cfg)
		deadline := time.Now().Add(10 * time.Second)
		for {
			conn, err := i.DialGuest(t.Context())
			if errors.Is(err, os.ErrNotExist) {
				break
			}
			if err == nil {
				_ = conn.Close()
			}
			if time.Now().After(deadline) {
				t.Fatal("the socket stays")
			}
		}
		if err := i.Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
}

func TestScriptsWithUnknownEndsAreRefused(t *testing.T) {
	if _, err := fake.Parse(json.RawMessage(`{"end":{"how":"Explode"}}`), 1); err == nil {
		t.Error("accepted")
	}
	if _, err := fake.Parse(json.RawMessage(`{`), 1); err == nil {
		t.Error("accepted")
	}
}
