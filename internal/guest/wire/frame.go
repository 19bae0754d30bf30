// Package wire is what both ends of the pipe into a guest share: frames, the handshake that finds the start of a session in a
// pipe full of leftovers, and the settings of the session.
package wire

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/hashicorp/yamux"

	guestv1 "imp.dev/imp/api/guest/v1"
)

// ErrTooLarge says that a frame is larger than guestv1.MaxFrame. Sending it again is no use.
var ErrTooLarge = fmt.Errorf("message is larger than %d bytes", guestv1.MaxFrame)

// ErrMalformed says that a frame arrived whole but is no JSON of the expected shape.
var ErrMalformed = errors.New("malformed message")

// WriteFrame writes v as one frame: length, then JSON.
func WriteFrame(w io.Writer, v any) error {
	body, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encoding message: %w", err)
	}
	if len(body) > guestv1.MaxFrame {
		return ErrTooLarge
	}
	frame := make([]byte, 4, 4+len(body))
	binary.BigEndian.PutUint32(frame, uint32(len(body)))
	if _, err := w.Write(append(frame, body...)); err != nil {
		return fmt.Errorf("sending message: %w", err)
	}
	return nil
}

// ReadFrame reads one frame into v. It never reads past the frame's end, so that raw bytes may follow it.
func ReadFrame(r io.Reader, v any) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return fmt.Errorf("receiving message: %w", err)
	}
	size := binary.BigEndian.Uint32(head[:])
	if size > guestv1.MaxFrame {
		return ErrTooLarge
	}
	body := make([]byte, size)
	if _, err := io.ReadFull(r, body); err != nil {
		return fmt.Errorf("receiving message: %w", err)
	}
	if err := json.Unmarshal(body, v); err != nil {
		return fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return nil
}

// SessionConfig is the yamux configuration of both ends. A guest may be paused for as long as somebody likes, and the pipe
// stands still meanwhile: no keepalive and no timeout may take that for a lost connection (measured: with a keepalive of 10 s a
// pause of 14 s killed the session). yamux's own log is discarded: in the guest it would go to the console and could block there.
func SessionConfig() *yamux.Config {
	c := yamux.DefaultConfig()
	c.EnableKeepAlive = false
	c.StreamOpenTimeout = 0
	c.ConnectionWriteTimeout = time.Hour
	c.StreamCloseTimeout = time.Minute
	c.LogOutput = io.Discard
	return c
}
