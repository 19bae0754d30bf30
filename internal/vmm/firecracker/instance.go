package firecracker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"time"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/vmm"
	"imp.dev/imp/internal/vmm/runner"
)

// instance is one Firecracker.
type instance struct {
	*runner.Run
	driver *Driver
	config vmm.Config
	home   home
	api    *client
	log    *slog.Logger
}

func newInstance(d *Driver, run *runner.Run, c vmm.Config, h home) *instance {
	i := &instance{Run: run, driver: d, config: c, home: h, log: d.options.Log.With("vm", c.VMID, "run", c.Run)}
	i.api = newClient(i.dialAPI)
	return i
}

// dialAPI connects to the API; a connection that nobody accepts ends with the process.
func (i *instance) dialAPI(ctx context.Context) (net.Conn, error) {
	return i.DialSocketIn(ctx, i.home.Root, apiName)
}

// Close implements vmm.Instance.
func (i *instance) Close() error {
	i.api.close()
	return i.Run.Close()
}

// pollPause is between two looks for something that the kernel tells nobody about; it is doubled up to pollMost.
const (
	pollPause = time.Millisecond
	pollMost  = 50 * time.Millisecond
)

// pause waits, for as long as the process lives.
func (i *instance) pause(ctx context.Context, d time.Duration) error {
	t := i.driver.options.Clock.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C():
		return nil
	case <-i.ProcessDone():
		return errors.New("Firecracker has ended")
	case <-ctx.Done():
		return ctx.Err()
	}
}

// boot takes a process that was launched to a machine that runs.
func (i *instance) boot(ctx context.Context, s spec, namespace *os.File, patience time.Duration) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() { // what is asked of a process that ends is not waited for
		select {
		case <-i.ProcessDone():
			cancel()
		case <-ctx.Done():
		}
	}()
	if err := i.awaitAPI(ctx, patience); err != nil {
		return err
	}
	r, err := i.api.version(ctx)
	if err == nil {
		err = r.supported()
	}
	if err != nil {
		return err
	}
	i.home.Release = r.String()
	i.Keep(i.home)
	var back func() error
	s.NICs, back, err = borrow(ctx, i.config.NICs, namespace, i.home.UID)
	defer func() {
		if back != nil {
			err = errors.Join(err, back())
		}
	}()
	if err != nil {
		return err
	}
	calls, err := s.calls()
	if err != nil {
		return err
	}
	for _, one := range calls {
		if err := i.api.call(ctx, one); err != nil {
			return err
		}
	}
	// The TAPs are open now. Home they go before the guest can send its first frame.
	if err := back(); err != nil {
		return fmt.Errorf("bringing TAPs home: %w", err)
	}
	back = nil
	return i.api.act(ctx, actionStart)
}

// awaitAPI returns once the API answers.
func (i *instance) awaitAPI(ctx context.Context, patience time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for wait := pollPause; ; wait = min(2*wait, pollMost) {
		conn, err := i.dialAPI(ctx)
		if err == nil {
			return conn.Close()
		}
		if waiting := i.pause(ctx, wait); waiting != nil {
			if errors.Is(waiting, context.DeadlineExceeded) {
				return fmt.Errorf("Firecracker did not answer within %v: %w", patience, err)
			}
			return errors.Join(waiting, err)
		}
	}
}

// explain prefers Firecracker's own words to those about a connection that it closed.
func (i *instance) explain(err error) error {
	if refused := (*Error)(nil); errors.As(err, &refused) {
		return err
	}
	if words := lastWords(i.Log(), readTail(i.home.logPath())); words != "" {
		return fmt.Errorf("%s (%w)", words, err)
	}
	return err
}

// A CONNECT that comes before the guest's driver is there gets no answer at all, and one before its init listens is refused at once.
const (
	connectPatience = 150 * time.Millisecond
	connectPause    = 10 * time.Millisecond
)

// DialGuest implements vmm.Instance. It returns when the guest has accepted the connection.
func (i *instance) DialGuest(ctx context.Context) (net.Conn, error) {
	for {
		conn, err := i.connectGuest(ctx)
		if err == nil || errors.Is(err, vmm.ErrGone) {
			return conn, err
		}
		t := i.driver.options.Clock.NewTimer(connectPause)
		select {
		case <-t.C():
		case <-i.Done():
		case <-ctx.Done():
			t.Stop()
			return nil, fmt.Errorf("connecting to the guest: %w; the last try: %w", ctx.Err(), err)
		}
		t.Stop()
	}
}

// connectGuest tries once.
func (i *instance) connectGuest(ctx context.Context) (net.Conn, error) {
	conn, err := i.DialSocketIn(ctx, i.home.Root, vsockName)
	if err != nil {
		return nil, err
	}
	if err := connectVsock(ctx, conn, guestv1.VsockPort, connectPatience); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return conn, nil
}

// connectVsock speaks the handshake of Firecracker's vsock socket (its docs/vsock.md): "CONNECT port", answered by "OK port". What follows the
// answer's newline is the guest's and stays in the connection.
func connectVsock(ctx context.Context, conn net.Conn, port uint32, patience time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	if _, err := fmt.Fprintf(conn, "CONNECT %d\n", port); err != nil {
		return fmt.Errorf("asking for the guest's port: %w", err)
	}
	const most = 32
	var line []byte
	for one := make([]byte, 1); len(line) < most; {
		if _, err := conn.Read(one); err != nil {
			return fmt.Errorf("waiting for the guest's port: %w", err)
		}
		if one[0] == '\n' {
			if !strings.HasPrefix(string(line), "OK ") {
				break
			}
			if ctx.Err() != nil { // the deadline may have been set by now
				return ctx.Err()
			}
			return nil
		}
		line = append(line, one[0])
	}
	return fmt.Errorf("waiting for the guest's port: the answer is %.32q", line)
}

// CtrlAltDel asks the guest's init to stop, by keys: where the guest's agent does not answer. arm64 has no keyboard.
func (i *instance) CtrlAltDel(ctx context.Context) error {
	if i.driver.options.Arch != amd64 {
		return fmt.Errorf("asking the guest to stop: %s machines have no keyboard", i.driver.options.Arch)
	}
	return i.api.act(ctx, actionCtrlAltDel)
}

// Pause stops the machine's clock and devices; Resume lets it go on. A release that would lose the guest by it refuses.
func (i *instance) Pause(ctx context.Context) error {
	r, err := parseRelease(i.home.Release)
	if err != nil {
		return fmt.Errorf("pausing: %w", err)
	}
	if r.losesGuestAfterPause() {
		return fmt.Errorf("pausing: %s", r.flaws()[len(r.flaws())-1])
	}
	return i.api.setState(ctx, statePaused)
}

// Resume undoes Pause; a machine that runs goes on.
func (i *instance) Resume(ctx context.Context) error { return i.api.setState(ctx, stateResumed) }

// Paused says whether the machine is.
func (i *instance) Paused(ctx context.Context) (bool, error) {
	info, err := i.api.describe(ctx)
	return info.State == statePaused, err
}
