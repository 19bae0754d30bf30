// Package guesttest is the suite of checks that every guest passes, seen through a guest.Client: the fake and the real one.
package guesttest

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/guest"
)

// Workload is what the guest under test shall run.
type Workload struct {
	// Prints is written to standard output at the start.
	Prints string
	// Forever: it runs until it is stopped; otherwise it ends with Code at once.
	Forever bool
	Code    int
	// Deaf: the stop signal has no effect on it, from the moment at which it prints.
	Deaf bool
}

// Machine is a guest that has just been started.
type Machine struct {
	Client guest.Client
	// Start runs the workload; the suite sets ID and Nonce.
	Start guestv1.Start
	// Drop breaks the connection without a word to either side.
	Drop func()
	// Off is closed when the machine has stopped.
	Off <-chan struct{}
}

// Boot starts a machine for a workload; the test's end ends it.
type Boot func(t *testing.T, w Workload) Machine

// limit of one check: real guests are emulated, on machines that have other things to do.
const limit = 90 * time.Second

type check struct {
	Machine
	*testing.T
	ctx context.Context
}

// Run runs the suite.
func Run(t *testing.T, boot Boot) {
	deaf := Workload{Forever: true, Deaf: true, Prints: "deaf"}
	for name, c := range map[string]struct {
		workload Workload
		body     func(c *check)
	}{
		"calls before Start are refused by name":                                {Workload{}, beforeStart},
		"a workload that succeeds is told, acknowledged, and the machine stops": {Workload{Prints: "hello\n"}, succeeds},
		"an exit code arrives":                                                  {Workload{Code: 3}, exitCode},
		"Configure and Start repeated with one ID do nothing twice":             {Workload{Prints: "once\n", Code: 7}, idempotent},
		"another Start is a conflict":                                           {Workload{Forever: true}, conflict},
		"a stop reaches the workload":                                           {Workload{Forever: true}, stops},
		"a deaf workload is killed when its grace is over":                      {deaf, killed},
		"a second stop shortens the grace":                                      {deaf, shortened},
		"Wait survives lost connections":                                        {Workload{Forever: true}, reconnects},
		"a call whose context ends returns at once, and the next works":         {Workload{Forever: true}, cancelled},
		"output is read from an offset":                                         {Workload{Prints: "0123456789"}, output},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			c.body(&check{Machine: boot(t, c.workload), T: t, ctx: ctx})
		})
	}
}

func (c *check) ok(what string, err error) {
	c.Helper()
	if err != nil {
		c.Fatalf("%s: %v", what, err)
	}
}

func (c *check) configure() {
	c.Helper()
	c.ok("Configure", c.Client.Configure(c.ctx, guestv1.Configure{ID: "c1", Hostname: "suite"}))
}

func (c *check) start() {
	c.Helper()
	c.configure()
	c.Start.ID, c.Start.Nonce = "s1", "nonce"
	c.ok("Start", c.Client.Start(c.ctx, c.Start))
}

func (c *check) wait(code int) {
	c.Helper()
	e, err := c.Client.Wait(c.ctx)
	c.ok("Wait", err)
	if e.Code != code {
		c.Fatalf("exit %+v, want code %d", e, code)
	}
}

func (c *check) off() {
	c.Helper()
	if err := c.Client.Acknowledge(c.ctx); err != nil && !errors.Is(err, guest.ErrGone) {
		c.Fatalf("Acknowledge: %v", err)
	}
	select {
	case <-c.Off:
	case <-c.ctx.Done():
		c.Fatal("the machine did not stop after Acknowledge")
	}
}

func beforeStart(c *check) {
	hello, err := c.Client.Hello(c.ctx)
	c.ok("Hello", err)
	if hello.Version != guestv1.Version || hello.BootID == "" || hello.ConfigureID != "" {
		c.Errorf("hello of a new guest: %+v", hello)
	}
	if _, err := c.Client.Wait(c.ctx); !errors.Is(err, guest.ErrNotStarted) {
		c.Errorf("Wait: %v", err)
	}
	if err := c.Client.Stop(c.ctx, guestv1.Stop{}); !errors.Is(err, guest.ErrNotStarted) {
		c.Errorf("Stop: %v", err)
	}
	if _, _, err := c.Client.Output(c.ctx, guestv1.Output{}, &bytes.Buffer{}); !errors.Is(err, guest.ErrNotStarted) {
		c.Errorf("Output: %v", err)
	}
	refused := (*guest.RefusedError)(nil)
	c.Start.ID = "s1"
	if err := c.Client.Start(c.ctx, c.Start); !errors.As(err, &refused) || refused.Code != guestv1.CodeInvalid {
		c.Errorf("Start before Configure: %v", err)
	}
}

func succeeds(c *check) {
	c.start()
	c.wait(0)
	c.wait(0)
	hello, err := c.Client.Hello(c.ctx)
	c.ok("Hello", err)
	if hello.ConfigureID != "c1" || hello.StartID != "s1" {
		c.Errorf("hello after the start: %+v", hello)
	}
	c.off()
	if _, err := c.Client.Hello(c.ctx); !errors.Is(err, guest.ErrGone) {
		c.Errorf("Hello to a machine that is off: %v", err)
	}
}

func exitCode(c *check) {
	c.start()
	c.wait(3)
	c.off()
}

func idempotent(c *check) {
	c.start()
	c.configure()
	c.wait(7)
	c.ok("second Start", c.Client.Start(c.ctx, c.Start))
	c.wait(7)
	var b bytes.Buffer
	_, _, err := c.Client.Output(c.ctx, guestv1.Output{}, &b)
	c.ok("Output", err)
	if b.String() != "once\n" {
		c.Errorf("output %q", b.String())
	}
}

func conflict(c *check) {
	c.start()
	other := c.Start
	other.ID = "s2"
	if err := c.Client.Start(c.ctx, other); !errors.Is(err, guest.ErrConflict) {
		c.Errorf("another Start: %v", err)
	}
	refused := (*guest.RefusedError)(nil)
	if err := c.Client.Acknowledge(c.ctx); !errors.As(err, &refused) {
		c.Errorf("Acknowledge of a workload that runs: %v", err)
	}
}

func stops(c *check) {
	c.start()
	c.ok("Stop", c.Client.Stop(c.ctx, guestv1.Stop{GraceMillis: limit.Milliseconds()}))
	c.wait(143)
	c.ok("Stop after the end", c.Client.Stop(c.ctx, guestv1.Stop{GraceMillis: 1}))
	c.off()
}

// printed waits until the workload has printed text.
func (c *check) printed(text string) {
	c.Helper()
	ctx, cancel := context.WithCancel(c.ctx)
	defer cancel()
	seen := &finder{want: text, found: cancel}
	_, _, err := c.Client.Output(ctx, guestv1.Output{Follow: true}, seen)
	if !strings.Contains(seen.got.String(), text) {
		c.Fatalf("workload printed %q (%v), want %q", seen.got.String(), err, text)
	}
}

type finder struct {
	want  string
	got   strings.Builder
	found func()
}

func (f *finder) Write(p []byte) (int, error) {
	f.got.Write(p)
	if strings.Contains(f.got.String(), f.want) {
		f.found()
	}
	return len(p), nil
}

func killed(c *check) {
	c.start()
	c.printed("deaf")
	c.ok("Stop", c.Client.Stop(c.ctx, guestv1.Stop{GraceMillis: 100}))
	c.wait(137)
}

func shortened(c *check) {
	c.start()
	c.printed("deaf")
	c.ok("Stop", c.Client.Stop(c.ctx, guestv1.Stop{GraceMillis: 10 * limit.Milliseconds()}))
	c.ok("second Stop", c.Client.Stop(c.ctx, guestv1.Stop{GraceMillis: 0}))
	c.wait(137)
}

func reconnects(c *check) {
	c.start()
	ended := make(chan error, 1)
	go func() {
		e, err := c.Client.Wait(c.ctx)
		if err == nil && e.Code != 143 {
			err = errors.New("wrong code")
		}
		ended <- err
	}()
	for range 3 {
		_, err := c.Client.Hello(c.ctx)
		c.ok("Hello", err)
		c.Drop()
	}
	c.ok("Stop", c.Client.Stop(c.ctx, guestv1.Stop{GraceMillis: limit.Milliseconds()}))
	c.ok("Wait over lost connections", <-ended)
}

func cancelled(c *check) {
	c.start()
	_, err := c.Client.Hello(c.ctx)
	c.ok("Hello", err)
	short, cancel := context.WithTimeout(c.ctx, 50*time.Millisecond)
	defer cancel()
	if _, err := c.Client.Wait(short); !errors.Is(err, context.DeadlineExceeded) {
		c.Errorf("Wait with a short context: %v", err)
	}
	_, err = c.Client.Hello(c.ctx)
	c.ok("Hello after it", err)
}

func output(c *check) {
	c.start()
	c.wait(0)
	var b strings.Builder
	first, next, err := c.Client.Output(c.ctx, guestv1.Output{Offset: 4, Follow: true}, &b)
	c.ok("Output", err)
	if b.String() != "456789" || first != 4 || next != 10 {
		c.Errorf("output from 4: %q, first %d, next %d", b.String(), first, next)
	}
}
