package channel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode"

	guestv1 "imp.dev/imp/api/guest/v1"
)

// errIncomplete is an answer without the member that belongs to it: no guest of this version gives one.
var errIncomplete = &stopError{errors.New("guest's answer is incomplete")}

// Hello implements guest.Client.
func (c *Client) Hello(ctx context.Context) (guestv1.Hello, error) {
	p, err := c.call(ctx, guestv1.Request{Method: guestv1.MethodHello}, func(p *guestv1.Response, _ io.Reader) error {
		if p.Hello == nil {
			return errIncomplete
		}
		return nil
	})
	if err != nil {
		return guestv1.Hello{}, err
	}
	h := *p.Hello
	h.AgentVersion, h.BootID, h.KernelRelease = plain(h.AgentVersion), plain(h.BootID), plain(h.KernelRelease)
	return h, nil
}

// Configure implements guest.Client.
func (c *Client) Configure(ctx context.Context, o guestv1.Configure) error {
	_, err := c.call(ctx, guestv1.Request{Method: guestv1.MethodConfigure, Configure: &o}, nil)
	return err
}

// Start implements guest.Client.
func (c *Client) Start(ctx context.Context, s guestv1.Start) error {
	_, err := c.call(ctx, guestv1.Request{Method: guestv1.MethodStart, Start: &s}, nil)
	return err
}

// Wait implements guest.Client.
func (c *Client) Wait(ctx context.Context) (guestv1.Exit, error) {
	p, err := c.call(ctx, guestv1.Request{Method: guestv1.MethodWait}, func(p *guestv1.Response, _ io.Reader) error {
		if p.Exit == nil {
			return errIncomplete
		}
		return nil
	})
	if err != nil {
		return guestv1.Exit{}, err
	}
	e := *p.Exit
	e.Message = plain(e.Message)
	if e.Code < 0 || e.Code > maxCode {
		e.Code = maxCode
	}
	return e, nil
}

// Acknowledge implements guest.Client. The guest answers before it stops the machine; still the machine may be gone before the
// answer is read: ErrGone after a Wait that succeeded means the same as nil.
func (c *Client) Acknowledge(ctx context.Context) error {
	_, err := c.call(ctx, guestv1.Request{Method: guestv1.MethodAcknowledge}, nil)
	return err
}

// Stop implements guest.Client.
func (c *Client) Stop(ctx context.Context, s guestv1.Stop) error {
	_, err := c.call(ctx, guestv1.Request{Method: guestv1.MethodStop, Stop: &s}, nil)
	return err
}

// Probe implements guest.Client.
func (c *Client) Probe(ctx context.Context, o guestv1.Probe) (guestv1.ProbeResult, error) {
	p, err := c.call(ctx, guestv1.Request{Method: guestv1.MethodProbe, Probe: &o}, func(p *guestv1.Response, _ io.Reader) error {
		if p.Probe == nil {
			return errIncomplete
		}
		return nil
	})
	if err != nil {
		return guestv1.ProbeResult{}, err
	}
	r := *p.Probe
	r.Message = plain(r.Message)
	return r, nil
}

const (
	// maxText bounds what a guest can put into conditions and logs of its host, in bytes.
	maxText = 1024
	// maxCode is the largest exit code there is.
	maxCode = 255
)

// plain makes a guest's words harmless: the guest is not trusted.
func plain(s string) string {
	if len(s) > maxText {
		s = s[:maxText]
	}
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || r == unicode.ReplacementChar {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, " "))
}

// Output implements guest.Client. An interruption is made good from the byte after the last one written. If the ring has wrapped
// meanwhile, the missing bytes are counted in next but cannot be written; only a gap before the first byte shows in first.
// With Follow it ends before the workload does when w is so slow that the ring overtakes it: the caller asks again from next.
func (c *Client) Output(ctx context.Context, o guestv1.Output, w io.Writer) (first, next int64, err error) {
	first, next = -1, o.Offset
	_, err = c.call(ctx, guestv1.Request{Method: guestv1.MethodOutput, Output: &o}, func(p *guestv1.Response, r io.Reader) error {
		if p.Output == nil {
			return errIncomplete
		}
		if first < 0 {
			first = p.Output.Offset
		}
		next = p.Output.Offset
		defer func() { o.Offset = next }()
		return copyOut(r, w, &next)
	})
	if first < 0 {
		first = o.Offset
	}
	return first, next, err
}

func copyOut(r io.Reader, w io.Writer, next *int64) error {
	buf := make([]byte, 32<<10)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			written, werr := w.Write(buf[:n])
			*next += int64(written)
			if werr != nil {
				return &stopError{fmt.Errorf("writing guest's output: %w", werr)}
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("reading guest's output: %w", err)
		}
	}
}
