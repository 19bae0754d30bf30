package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	"imp.dev/imp/internal/console"
	"imp.dev/imp/internal/vmm"
	"imp.dev/imp/internal/vmm/runner"
)

// instance is one QEMU. Its monitor is watched by one goroutine, which connects again whenever the connection is lost.
type instance struct {
	*runner.Run
	config vmm.Config
	log    *slog.Logger
}

// DialGuest implements vmm.Instance. A second connection waits in the backlog until the first is closed.
func (i *instance) DialGuest(ctx context.Context) (net.Conn, error) {
	return i.DialSocket(ctx, guestSocketName)
}

// dialQMP connects to the monitor. The dial itself always succeeds while the socket's owner lives; it is the greeting that says
// QEMU is up.
func (i *instance) dialQMP(ctx context.Context) (*qmpClient, error) {
	conn, err := i.DialSocket(ctx, qmpSocketName)
	if err != nil {
		return nil, err
	}
	stop := make(chan struct{})
	defer close(stop)
	go func() { // a connection in the backlog of a process that dies gets no answer by itself
		select {
		case <-i.ProcessDone():
			_ = conn.Close()
		case <-stop:
		}
	}()
	return newQMP(ctx, conn, i.onEvent)
}

func (i *instance) onEvent(m qmpMessage) {
	if cause, _ := causeOf(m); cause == vmm.CauseUnknown {
		return
	}
	// QEMU writes its log after it has sent the event: whoever is woken by Done must not find less than there is.
	i.note(m)
	i.MarkEnded()
}

// awaitRunning returns when QEMU answers and its machine runs.
func (i *instance) awaitRunning(ctx context.Context, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	c, err := i.dialQMP(ctx)
	if err != nil {
		if ctx.Err() != nil && !errors.Is(context.Cause(ctx), context.Canceled) {
			err = fmt.Errorf("QEMU did not answer within %v: %w", timeout, err)
		}
		return i.explain(err)
	}
	defer c.close()
	status, err := c.status(ctx)
	if err != nil {
		return i.explain(err)
	}
	if status != "running" && !ended(status) { // a machine that has ended this early did run
		return fmt.Errorf("QEMU is in state %q instead of running", status)
	}
	return nil
}

// explain prefers QEMU's own words: "-device nope: 'nope' is not a valid device model name".
func (i *instance) explain(err error) error {
	if words := i.Log(); words != "" {
		return errors.New(words)
	}
	return err
}

const reconnectPause = 200 * time.Millisecond

// watch follows the monitor until the machine has ended or Close.
func (i *instance) watch(ctx context.Context) {
	for {
		if err := i.follow(ctx); err != nil {
			i.log.Debug("Monitor connection ended", "err", err)
		}
		pause := time.NewTimer(reconnectPause)
		select {
		case <-ctx.Done():
		case <-i.Done():
		case <-i.ProcessDone():
		case <-pause.C:
			continue
		}
		pause.Stop()
		return
	}
}

// follow is one connection. What happened before it is in the log, or in the run state; what happens on it comes as an event.
func (i *instance) follow(ctx context.Context) error {
	c, err := i.dialQMP(ctx)
	if err != nil {
		return err
	}
	defer c.close()
	if cause, _ := firstEnd(i.qmpLog()); cause != vmm.CauseUnknown {
		i.MarkEnded()
		return nil
	}
	status, err := c.status(ctx)
	if err != nil {
		return err
	}
	if ended(status) {
		// An event in the very moment between connection and capabilities reaches nobody: its state is written down instead.
		data, _ := json.Marshal(runState{Status: status})
		i.note(qmpMessage{Event: runStateEvent, Data: data})
		i.MarkEnded()
		return nil
	}
	select {
	case <-ctx.Done():
	case <-c.closed:
	case <-i.Done():
	}
	return nil
}

// note writes down what was learnt of the machine's end.
func (i *instance) note(m qmpMessage) {
	line, err := json.Marshal(m)
	if err == nil {
		err = os.WriteFile(filepath.Join(i.config.Dir, noteName), line, 0o600)
	}
	if err != nil {
		i.log.Warn("End of the machine cannot be written down", "err", err)
	}
}

func (i *instance) qmpLog() []byte {
	chunk, err := console.Read(filepath.Join(i.config.Dir, qmpLogName), -(1 << 20), 1<<20)
	if err != nil {
		return nil
	}
	return chunk.Data
}
