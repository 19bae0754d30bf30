package fcfake

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	guestfake "imp.dev/imp/internal/guest/fake"
)

// guest is a machine's guest: what its kernel prints, and its agent behind vsock.
type guest struct {
	machine   *machine
	behaviour Guest
	agent     *guestfake.Guest
	silent    bool // no console

	mu       sync.Mutex
	running  *sync.Cond // while not paused
	isPaused bool
	driver   bool // the vsock driver is there
	listens  bool
	dead     bool // the kernel has halted: nothing is answered any more
	pressed  chan struct{}
}

func newGuest(m *machine, b Guest) *guest {
	g := &guest{machine: m, behaviour: b, pressed: make(chan struct{}, 1), agent: guestfake.New(b.Script, guestfake.WithConsole(os.Stdout))}
	g.running = sync.NewCond(&g.mu)
	return g
}

func millis(n int64) <-chan time.Time { return time.After(time.Duration(n) * time.Millisecond) }

func stamped(words string) string { return "[    1.000000] " + words + "\r\n" }

func (g *guest) print(words string) {
	if !g.silent {
		_, _ = os.Stdout.WriteString(words)
	}
}

func (g *guest) pause(on bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.isPaused = on
	g.running.Broadcast()
}

// awaitRunning blocks while the machine is paused.
func (g *guest) awaitRunning() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.isPaused {
		g.running.Wait()
	}
}

func (g *guest) keys() {
	select {
	case g.pressed <- struct{}{}:
	default:
	}
}

func (g *guest) run(ctx context.Context) {
	g.print(g.behaviour.Console)
	if g.machine.vsock != nil {
		go g.accept(ctx)
	}
	go func() {
		<-millis(g.behaviour.DriverMillis)
		g.set(&g.driver)
		<-millis(g.behaviour.ListenMillis)
		g.set(&g.listens)
	}()
	go func() {
		<-g.agent.Off()
		g.end(Stop)
	}()
	if g.behaviour.End == "" {
		return
	}
	if g.behaviour.AtKeys {
		<-g.pressed
	}
	for g.behaviour.AfterStart {
		if h, _ := g.agent.Hello(ctx); h.StartID != "" {
			break
		}
		<-millis(5)
	}
	<-millis(g.behaviour.EndMillis)
	g.awaitRunning()
	g.end(g.behaviour.End)
}

func (g *guest) set(what *bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	*what = true
}

func (g *guest) end(how string) {
	switch how {
	case PowerOff:
		g.set(&g.dead)
		g.print(stamped("reboot: Power down"))
	case Reboot:
		g.print(stamped("reboot: Restarting system"))
		g.machine.exit(0, "")
	case Stop:
		g.print(stamped("imp-guest: power off") + stamped("reboot: Restarting system"))
		g.machine.exit(0, "")
	case Panic:
		g.print(stamped("Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000200") + stamped("Rebooting in 1 seconds.."))
		g.machine.exit(0, "")
	case TripleFault:
		g.machine.exit(1, "Received KVM_EXIT_SHUTDOWN signal")
	case BadSyscall:
		g.machine.log("Shutting down VM after intercepting a bad syscall (41).")
		os.Exit(148)
	case Killed:
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}
}

// accept is the host's side of vsock: "CONNECT port" is answered once the guest has accepted.
func (g *guest) accept(ctx context.Context) {
	for port := 1 << 30; ; port++ {
		conn, err := g.machine.vsock.Accept()
		if err != nil {
			return
		}
		go g.connect(ctx, conn, port)
	}
}

func (g *guest) connect(ctx context.Context, conn net.Conn, hostPort int) {
	r := bufio.NewReader(conn)
	line, err := r.ReadString('\n')
	var port uint32
	if _, scanErr := fmt.Sscanf(strings.TrimSpace(line), "CONNECT %d", &port); err != nil || scanErr != nil {
		_ = conn.Close()
		return
	}
	g.awaitRunning()
	g.mu.Lock()
	driver, listens, dead := g.driver, g.listens, g.dead
	g.mu.Unlock()
	if !driver || dead {
		// Nothing answers, and after two seconds Firecracker gives the connection up.
		<-millis(2000)
		_ = conn.Close()
		return
	}
	if !listens || port != g.behaviour.Port {
		_ = conn.Close()
		return
	}
	_, _ = fmt.Fprintf(conn, "OK %d\n%s", hostPort, g.behaviour.Coalesce)
	g.agent.ServeConn(ctx, &buffered{Conn: conn, r: r})
}

// buffered reads first what came with the line.
type buffered struct {
	net.Conn
	r *bufio.Reader
}

func (b *buffered) Read(p []byte) (int, error) { return b.r.Read(p) }
