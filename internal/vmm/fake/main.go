package fake

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"k8s.io/utils/clock"

	guestfake "imp.dev/imp/internal/guest/fake"
	"imp.dev/imp/internal/vmm"
)

// Command is the first argument of a re-exec that shall become a fake VMM; a main that offers this driver then calls Main.
const Command = "fake-vmm"

// Descriptors of the fake VMM.
const (
	fdGuest = 3 + iota
	fdControl
	fdConsole
	fdScript
	fdState
)

// word is one line of the state file and of the control socket: the machine runs (no cause), or how it ended.
type word struct {
	Cause  vmm.Cause `json:"cause"`
	Detail string    `json:"detail,omitempty"`
}

// machine is the fake VMM's process.
type machine struct {
	script  Script
	console *os.File
	state   *os.File
	clock   clock.WithTicker

	once  sync.Once
	end   word
	ended chan struct{}
}

// Main is the whole life of a fake VMM. It never returns.
func Main() {
	m := &machine{clock: clock.RealClock{}, ended: make(chan struct{}),
		console: os.NewFile(fdConsole, "console"), state: os.NewFile(fdState, "state")}
	if err := json.NewDecoder(os.NewFile(fdScript, "script")).Decode(&m.script); err != nil {
		m.giveUp("reading script: " + err.Error())
	}
	if m.script.StartError != "" {
		m.giveUp(m.script.StartError)
	}
	if m.script.IgnoreSignals {
		signal.Ignore(syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2)
	} else {
		signals := make(chan os.Signal, 1)
		signal.Notify(signals, syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM)
		go m.obey(signals)
	}
	guestSocket, err := net.FileListener(os.NewFile(fdGuest, "guest"))
	if err != nil {
		m.giveUp(err.Error())
	}
	control, err := net.FileListener(os.NewFile(fdControl, "control"))
	if err != nil {
		m.giveUp(err.Error())
	}
	if !m.script.NoAnswer {
		go m.serveControl(control)
	}
	ctx, cancel := context.WithCancel(context.Background())
	go m.run(ctx, guestSocket)
	<-m.ended
	cancel() // the guest stops with its machine; the process waits to be destroyed, as QEMU does
	select {}
}

// giveUp ends the VMM in the way of one that found something wrong.
func (m *machine) giveUp(words string) {
	fmt.Fprintln(os.Stderr, "fake-vmm: "+words)
	os.Exit(1)
}

func (m *machine) obey(signals <-chan os.Signal) {
	sig := <-signals
	m.finish(word{Cause: vmm.CauseHost, Detail: "terminated by signal: " + sig.String()})
	os.Exit(0)
}

func (m *machine) run(ctx context.Context, l net.Listener) {
	m.print(m.script.Console)
	if m.script.EatSocket {
		_ = os.Remove(guestSocketName)
	}
	g := guestfake.New(m.script.Guest, guestfake.WithConsole(m.console), guestfake.WithClock(m.clock))
	go func() {
		if g.Serve(ctx, l) == nil {
			m.print(stamped("reboot: Power down"))
			m.finish(word{Cause: vmm.CausePowerOff})
		}
	}()
	if m.script.End != nil {
		m.awaitEnd(ctx, g)
		m.carryOut(*m.script.End)
	}
}

const startPoll = 5 * time.Millisecond

// awaitEnd returns when the scripted end is due.
func (m *machine) awaitEnd(ctx context.Context, g *guestfake.Guest) {
	if m.script.End.AfterStart || m.script.End.AfterExit {
		for {
			if h, _ := g.Hello(ctx); h.StartID != "" {
				break
			}
			<-m.clock.After(startPoll)
		}
	}
	if m.script.End.AfterExit {
		_, _ = g.Wait(ctx)
	}
	<-m.clock.After(time.Duration(m.script.End.AfterMillis) * time.Millisecond)
}

func stamped(s string) string { return "[    1.000000] " + s + "\n" }

func (m *machine) carryOut(e End) {
	switch e.How {
	case PowerOff:
		m.print(stamped("reboot: Power down"))
		m.finish(word{Cause: vmm.CausePowerOff, Detail: e.Message})
	case Reboot:
		m.print(stamped("reboot: Restarting system"))
		m.finish(word{Cause: vmm.CauseReboot, Detail: e.Message})
	case Panic:
		text := "Kernel panic - not syncing: " + e.Message
		m.print(stamped(text))
		m.finish(word{Cause: vmm.CausePanic, Detail: text})
	case Killed:
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	case Error:
		m.giveUp(e.Message)
	case OOM:
		m.eatMemory()
	}
}

// eatMemory takes memory until the cgroup's limit ends the process; far above any limit of a fake machine it kills itself instead.
func (m *machine) eatMemory() {
	const chunk, most = 16 << 20, 4 << 30
	var held [][]byte
	for n := 0; n < most; n += chunk {
		b := make([]byte, chunk)
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
		held = append(held, b)
	}
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	m.giveUp(fmt.Sprint(len(held)))
}

func (m *machine) print(s string) {
	if s != "" {
		_, _ = m.console.WriteString(s)
	}
}

// finish writes the end down before anybody is told.
func (m *machine) finish(w word) {
	m.once.Do(func() {
		m.end = w
		_ = json.NewEncoder(m.state).Encode(w)
		close(m.ended)
	})
}

// serveControl tells everybody who connects that the machine runs and, once it has, how it ended.
func (m *machine) serveControl(l net.Listener) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer conn.Close()
			enc := json.NewEncoder(conn)
			if enc.Encode(word{}) != nil {
				return
			}
			gone := make(chan struct{})
			go func() {
				defer close(gone)
				_, _ = conn.Read(make([]byte, 1)) // the driver says nothing: this returns when it leaves
			}()
			select {
			case <-m.ended:
				_ = enc.Encode(m.end)
				<-gone
			case <-gone:
			}
		}()
	}
}
