package guestinit

import (
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/guest"
	"imp.dev/imp/internal/guest/server"
)

// machine is this boot of this guest: what was asked of it and what came of it. It implements server.Handler.
type machine struct {
	version  string
	born     int64 // boot time in milliseconds at which Run began
	reboot   bool  // stop by reboot instead of power-off
	console  *feed
	log      *logger
	reaper   *reaper
	output   *ring
	portTime atomic.Int64

	configuring sync.Mutex // held while a Configure works; guards root
	root        *rootfs

	mu        sync.Mutex
	configure *guestv1.Configure
	configErr error
	workload  *workload
	exit      guestv1.Exit

	ended        chan struct{} // closed with exit set
	acknowledged chan struct{}
	ackOnce      sync.Once
}

var _ server.Handler = (*machine)(nil)

func newMachine(version string, born int64, reboot bool, console *feed, log *logger, r *reaper) *machine {
	return &machine{
		version: version, born: born, reboot: reboot, console: console, log: log, reaper: r, output: newRing(ringSize),
		ended: make(chan struct{}), acknowledged: make(chan struct{}),
	}
}

func (m *machine) portOpened() { m.portTime.CompareAndSwap(0, bootMillis()) }

// Hello implements server.Handler.
func (m *machine) Hello(context.Context) (guestv1.Hello, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	h := guestv1.Hello{
		Version: guestv1.Version, AgentVersion: m.version, InitMillis: m.born, PortMillis: m.portTime.Load(),
		BootID: readTrimmed("/proc/sys/kernel/random/boot_id"), KernelRelease: readTrimmed("/proc/sys/kernel/osrelease"),
	}
	if m.configure != nil {
		h.ConfigureID = m.configure.ID
	}
	if m.workload != nil {
		h.StartID = m.workload.start.ID
	}
	return h, nil
}

// kernelLines of the kernel's log are added to the error of a Configure: mount(2) often says only "invalid argument" and the
// kernel's log why.
const kernelLines = 4

// Configure implements server.Handler. It is carried through even if the connection breaks; the repeat waits for it and gets its answer.
func (m *machine) Configure(_ context.Context, c guestv1.Configure) error {
	m.configuring.Lock()
	defer m.configuring.Unlock()
	m.mu.Lock()
	known, err := m.configure, m.configErr
	m.mu.Unlock()
	switch {
	case known != nil && known.ID == c.ID:
		return err
	case c.ID == "":
		return invalid("configure request has no id")
	case known != nil && m.root == nil:
		// The disks are half mounted and nothing undoes that: this boot is lost.
		return err
	}
	if err := validateConfigure(&c); err != nil {
		return invalid("%v", err)
	}
	kernel := openKernelLog()
	defer kernel.close()
	err = m.apply(&c)
	if err != nil {
		text := err.Error()
		if lines := kernel.last(kernelLines); len(lines) > 0 {
			text += " (kernel: " + strings.Join(lines, "; ") + ")"
		}
		m.log.Printf("%s", text)
		err = &guest.RefusedError{Code: guestv1.CodeFailed, Message: text}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.configure, m.configErr = &c, err
	return err
}

// apply carries out a Configure: all of it the first time, afterwards what can change in a running guest.
func (m *machine) apply(c *guestv1.Configure) error {
	network := make(chan error, 1)
	settings := openIPv6Settings(m.log) // before the root moves
	go func() { network <- configureNetwork(c.Interfaces, settings) }()
	err := m.applyLocal(c)
	if netErr := <-network; err == nil && netErr != nil {
		err = fmt.Errorf("configuring network: %w", netErr)
	}
	return err
}

func (m *machine) applyLocal(c *guestv1.Configure) error {
	if err := setClock(c.UnixNanos); err != nil {
		return fmt.Errorf("setting clock: %w", err)
	}
	if err := addEntropy(c.Entropy); err != nil {
		return fmt.Errorf("adding entropy: %w", err)
	}
	if m.root == nil {
		root, err := makeRoot(c.DataPaths, m.log)
		if err != nil {
			return err
		}
		m.root = root
	}
	if err := unix.Sethostname([]byte(c.Hostname)); err != nil {
		return fmt.Errorf("setting hostname: %w", err)
	}
	writeNames(c, m.log)
	return nil
}

func invalid(format string, args ...any) error {
	return &guest.RefusedError{Code: guestv1.CodeInvalid, Message: fmt.Sprintf(format, args...)}
}

// Start implements server.Handler.
func (m *machine) Start(_ context.Context, s guestv1.Start) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.workload != nil && m.workload.start.ID == s.ID:
		return nil
	case m.workload != nil:
		return guest.ErrConflict
	case m.configure == nil || m.configErr != nil:
		return invalid("guest is not configured")
	}
	if err := validateStart(&s); err != nil {
		return invalid("%v", err)
	}
	m.workload = newWorkload(s, m.reaper, io.MultiWriter(m.output, m.console))
	go m.runWorkload(m.workload)
	return nil
}

// Limits at the workload's end. Nothing there may keep the machine from going off.
const (
	killLimit   = 5 * time.Second // for processes that do not die of SIGKILL: they hang in the kernel
	drainLimit  = time.Second
	markerLimit = 2 * time.Second // a console that nobody drains would block for ever
)

func (m *machine) runWorkload(w *workload) {
	exit := w.run()
	// Kill before draining: a background process that holds the pipe would delay the end.
	killRest(m.reaper, killLimit)
	w.drain(drainLimit)
	_ = m.output.Close()
	exit.UnixNanos = time.Now().UnixNano()
	if exit.Message != "" {
		m.log.Printf("workload ended: %s", exit.Message)
	}
	m.console.Finish(marker(exit, w.start.Nonce), markerLimit)
	m.mu.Lock()
	m.exit = exit
	m.mu.Unlock()
	close(m.ended)
}

// marker is the line on the console that tells the end to whoever has only the console.
func marker(e guestv1.Exit, nonce string) string {
	word := guestv1.MarkerSuccess
	if e.Code != 0 {
		word = fmt.Sprintf("%s code=%d", guestv1.MarkerFailed, e.Code)
	}
	return word + " id=" + nonce
}

// Wait implements server.Handler.
func (m *machine) Wait(ctx context.Context) (guestv1.Exit, error) {
	if _, err := m.started(); err != nil {
		return guestv1.Exit{}, err
	}
	select {
	case <-m.ended:
		m.mu.Lock()
		defer m.mu.Unlock()
		return m.exit, nil
	case <-ctx.Done():
		return guestv1.Exit{}, ctx.Err()
	}
}

func (m *machine) started() (*workload, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.workload == nil {
		return nil, guest.ErrNotStarted
	}
	return m.workload, nil
}

// Acknowledge implements server.Handler.
func (m *machine) Acknowledge(context.Context) error {
	select {
	case <-m.ended:
		return nil
	default:
		return invalid("the workload has not ended")
	}
}

// Acknowledged implements server.Handler.
func (m *machine) Acknowledged() { m.ackOnce.Do(func() { close(m.acknowledged) }) }

// Stop implements server.Handler.
func (m *machine) Stop(_ context.Context, s guestv1.Stop) error {
	w, err := m.started()
	if err != nil {
		return err
	}
	w.stop(time.Duration(s.GraceMillis) * time.Millisecond)
	return nil
}

// Probe implements server.Handler.
func (m *machine) Probe(ctx context.Context, p guestv1.Probe) (guestv1.ProbeResult, error) {
	return probe(ctx, p), nil
}

// Output implements server.Handler.
func (m *machine) Output(ctx context.Context, o guestv1.Output) (int64, io.WriterTo, error) {
	if _, err := m.started(); err != nil {
		return 0, nil, err
	}
	first := m.output.first(o.Offset)
	return first, &ringReader{ctx: ctx, ring: m.output, offset: first, follow: o.Follow}, nil
}

// untilStopped returns when the host has the result, or has not come for it for too long.
func (m *machine) untilStopped() {
	<-m.ended
	select {
	case <-m.acknowledged:
	case <-time.After(acknowledgeLimit):
		m.log.Printf("nobody came for the result; stopping")
	}
}

// stop ends the machine and does not return.
func (m *machine) stop() {
	m.configuring.Lock()
	if m.root != nil {
		m.root.release(m.log)
	}
	drainConsole(drainLimit)
	word := unix.LINUX_REBOOT_CMD_POWER_OFF
	if m.reboot {
		word = unix.LINUX_REBOOT_CMD_RESTART
	}
	if err := unix.Reboot(word); err != nil {
		m.log.Printf("stopping machine: %v", err)
	}
	select {}
}
