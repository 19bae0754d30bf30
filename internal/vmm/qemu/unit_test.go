package qemu

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"imp.dev/imp/internal/vmm"
	"imp.dev/imp/internal/vmm/runner"
)

var update = flag.Bool("update", false, "write golden files")

func TestCommandLines(t *testing.T) {
	base := invocation{Name: "0a1b", Accel: TCG, TBSizeMiB: 64, VCPU: 1, MemoryMiB: 128, TSCKHz: 2599998,
		KernelFD: 3, InitramfsFD: 4, ConsoleFD: 5, QMPLogFD: 6, QMPFD: 7, GuestFD: 8}
	for name, change := range map[string]func(*invocation){
		"the smallest machine": func(*invocation) {},
		"two vCPUs under KVM with kernel words": func(v *invocation) {
			v.Accel, v.VCPU, v.MemoryMiB, v.KernelArgs = KVM, 2, 2048, []string{"imp.debug=1", "loglevel=7"}
		},
		"two disks and two interfaces": func(v *invocation) {
			v.Disks = []diskFD{{FD: 9, Serial: "base"}, {FD: 10, WriteFD: 11, Serial: "private"}}
			v.NICs = []nicFD{{FD: 12, MAC: "52:54:00:00:00:01"}, {FD: 13, MAC: "52:54:00:00:00:02"}}
		},
		"a host whose TSC rate is unknown": func(v *invocation) { v.TSCKHz = 0 },
	} {
		t.Run(name, func(t *testing.T) {
			v := base
			change(&v)
			got := strings.Join(v.arguments(), "\n") + "\n"
			path := filepath.Join("testdata", "golden", strings.ReplaceAll(name, " ", "-")+".args")
			if *update {
				if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
		})
	}
}

func TestMeasuredTSCRateIsSteady(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("this architecture has no TSC")
	}
	first, err := measureTSC()
	if err != nil {
		t.Fatal(err)
	}
	second, err := measureTSC()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d kHz, %d kHz", first, second)
	if diff := float64(first-second) / float64(first); diff > 0.001 || diff < -0.001 {
		t.Errorf("%d kHz, then %d kHz", first, second)
	}
}

// monitor is the far end of a QMP connection, scripted by a function.
func monitor(t *testing.T, serve func(say func(string), hear func() string)) net.Conn {
	t.Helper()
	ours, theirs := net.Pipe()
	go func() {
		defer theirs.Close()
		lines := bufio.NewScanner(theirs)
		serve(func(s string) { _, _ = theirs.Write([]byte(s + "\r\n")) }, func() string {
			lines.Scan()
			return lines.Text()
		})
	}()
	t.Cleanup(func() { _ = ours.Close() })
	return ours
}

const greeting = `{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}}, "capabilities": ["oob"]}}`

func TestMonitorAnswersBetweenEvents(t *testing.T) {
	events := make(chan string, 8)
	conn := monitor(t, func(say func(string), hear func() string) {
		say(greeting)
		hear()
		say(`{"return": {}}`)
		hear()
		say(`{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "VSERPORT_CHANGE", "data": {"open": true, "id": "guest-port"}}`)
		say(`{"return": {"status": "running", "singlestep": false, "running": true}}`)
		hear()
		say(`{"error": {"class": "CommandNotFound", "desc": "The command nope has not been found"}}`)
		say(`{"event": "SHUTDOWN", "data": {"guest": true, "reason": "guest-shutdown"}}`)
		hear()
	})
	c, err := newQMP(t.Context(), conn, func(m qmpMessage) { events <- m.Event })
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	if status, err := c.status(t.Context()); err != nil || status != "running" {
		t.Errorf("status %q, %v", status, err)
	}
	if err := c.command(t.Context(), "nope", nil, nil); err == nil || !strings.Contains(err.Error(), "The command nope has not been found") {
		t.Errorf("got %v", err)
	}
	for _, want := range []string{"VSERPORT_CHANGE", "SHUTDOWN"} {
		if got := <-events; got != want {
			t.Errorf("event %q, want %q", got, want)
		}
	}
}

func TestMonitorThatMisbehavesIsLeft(t *testing.T) {
	for name, serve := range map[string]func(say func(string), hear func() string){
		"it says nothing":            func(_ func(string), hear func() string) { hear() },
		"it speaks another protocol": func(say func(string), hear func() string) { say(`{"hello": 1}`); hear() },
		"it speaks no protocol":      func(say func(string), hear func() string) { say("login:"); hear() },
		"it refuses": func(say func(string), hear func() string) {
			say(greeting)
			hear()
			say(`{"error": {"desc": "no"}}`)
			hear()
		},
		"it hangs up":                        func(func(string), func() string) {},
		"it talks without end on one line":   func(say func(string), hear func() string) { say(strings.Repeat("x", qmpMaxLine+10)); hear() },
		"it falls silent after its greeting": func(say func(string), hear func() string) { say(greeting); hear(); hear() },
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			if _, err := newQMP(ctx, monitor(t, serve), func(qmpMessage) {}); err == nil {
				t.Error("it was accepted")
			}
		})
	}
	t.Run("a command it never answers ends with its context", func(t *testing.T) {
		c, err := newQMP(t.Context(), monitor(t, func(say func(string), hear func() string) {
			say(greeting)
			hear()
			say(`{"return": {}}`)
			hear()
			hear()
		}), func(qmpMessage) {})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if _, err := c.status(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
		<-c.closed // its late answer can be taken for no other command's
	})
}

func TestFirstEndInTheMonitorsLogCounts(t *testing.T) {
	shutdown := func(reason string) string {
		return fmt.Sprintf(`{"event": "SHUTDOWN", "data": {"reason": %q}}`, reason)
	}
	const panicked = `{"event": "GUEST_PANICKED", "data": {"action": "pause"}}`
	for name, c := range map[string]struct {
		log  []string
		want vmm.Cause
	}{
		"nothing":                             {nil, vmm.CauseUnknown},
		"answers and other events":            {[]string{greeting, `{"return": {}}`, `{"event": "STOP"}`}, vmm.CauseUnknown},
		"a power-off":                         {[]string{shutdown("guest-shutdown"), `{"event": "STOP"}`}, vmm.CausePowerOff},
		"a reset":                             {[]string{shutdown("guest-reset")}, vmm.CauseReboot},
		"a panic":                             {[]string{panicked, `{"event": "STOP"}`}, vmm.CausePanic},
		"a panic, told twice":                 {[]string{panicked, shutdown("guest-panic")}, vmm.CausePanic},
		"a power-off, then ended by the host": {[]string{shutdown("guest-shutdown"), shutdown("host-signal")}, vmm.CausePowerOff},
		"a signal":                            {[]string{shutdown("host-signal")}, vmm.CauseHost},
		"quit by the monitor":                 {[]string{shutdown("host-qmp-quit")}, vmm.CauseHost},
		"an error of the host":                {[]string{shutdown("host-error")}, vmm.CauseVMMError},
		"a line cut by a full disk in the middle": {[]string{`{"event": "SHUTD`, shutdown("guest-reset")}, vmm.CauseReboot},
	} {
		t.Run(name, func(t *testing.T) {
			if got, _ := firstEnd([]byte(strings.Join(c.log, "\r\n") + "\r\n")); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

func TestRunStateStandsInForAnEventThatReachedNobody(t *testing.T) {
	state := func(s string) qmpMessage {
		b, _ := json.Marshal(runState{Status: s})
		return qmpMessage{Event: runStateEvent, Data: b}
	}
	for name, c := range map[string]struct {
		note    qmpMessage
		console string
		want    vmm.Cause
	}{
		"a panicked machine":                      {state("guest-panicked"), "", vmm.CausePanic},
		"a stopped machine with no farewell":      {state("shutdown"), "", vmm.CausePowerOff},
		"a stopped machine that said it reboots":  {state("shutdown"), "[    2.000000] reboot: Restarting system\n", vmm.CauseReboot},
		"a stopped machine that said it goes off": {state("shutdown"), "[    2.000000] reboot: Power down\n", vmm.CausePowerOff},
		"an event written down before the log":    {qmpMessage{Event: "SHUTDOWN", Data: json.RawMessage(`{"reason":"guest-reset"}`)}, "", vmm.CauseReboot},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			b, _ := json.Marshal(c.note)
			if err := os.WriteFile(filepath.Join(dir, noteName), b, 0o600); err != nil {
				t.Fatal(err)
			}
			f := runner.Facts{Alive: true, Console: []byte(c.console)}
			if err := event(vmm.Config{Dir: dir}, &f); err != nil || f.Event != c.want {
				t.Errorf("got %q, %v; want %q", f.Event, err, c.want)
			}
		})
	}
}

func TestEachVMGetsAUserOfItsOwnUntilThereAreNoMore(t *testing.T) {
	p := newUIDPool(64300, 3, &runner.Runner{Driver: driverName, Instance: "none"})
	seen := map[int]bool{}
	var release []func()
	for i := range 3 {
		uid, free, err := p.take(fmt.Sprint(i))
		if err != nil || seen[uid] || uid < 64300 || uid > 64302 {
			t.Fatalf("%d %v, seen %v", uid, err, seen)
		}
		seen[uid] = true
		release = append(release, free)
	}
	if _, _, err := p.take("4"); err == nil {
		t.Error("a fourth VM got one of three users")
	}
	release[1]()
	if _, _, err := p.take("4"); err != nil {
		t.Error(err)
	}
	if os.Geteuid() == 0 {
		if _, _, err := newUIDPool(0, 1, nil).take("x"); err == nil {
			t.Error("root was given to a VMM")
		}
	}
}
