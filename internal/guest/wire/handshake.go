package wire

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"k8s.io/utils/clock"
)

// The handshake. A virtio-serial port keeps bytes of an earlier connection on both sides, also half a frame, and neither end
// learns reliably that the other has gone. So each session begins with three lines, every one preceded by a newline (to
// end whatever junk came before) and a NUL (which no console text holds):
//
//	host  → guest   SYNC:nonce    repeated until answered
//	guest → host    ACK:nonce     once per nonce; the host skips everything before it
//	host  → guest   GO:nonce      the guest skips everything before it
//
// after which the host is the client of a yamux session and the guest its server.
const (
	wordSync = "\x00SYNC:"
	wordAck  = "\x00ACK:"
	wordGo   = "\x00GO:"
)

const (
	bufferSize = 64 << 10
	// maxNonce bounds what a guest remembers and echoes.
	maxNonce = 64
)

func line(word, nonce string) []byte { return []byte("\n" + word + nonce + "\n") }

// Conn is a pipe after its handshake: bytes that arrived behind the last handshake line are read first.
type Conn struct {
	io.ReadWriteCloser
	buffered *bufio.Reader
}

func (c *Conn) Read(p []byte) (int, error) { return c.buffered.Read(p) }

// Host performs the host's part on conn, sending SYNC every interval. It ends with an error when ctx ends or conn breaks; conn is
// the caller's to close in that case.
func Host(ctx context.Context, conn net.Conn, nonce string, interval time.Duration, clk clock.WithTicker) (*Conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// A read that nobody answers ends with the context, and a write into a full pipe as well.
	release := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	sent := make(chan error, 1)
	acked := make(chan struct{})
	go func() { sent <- repeatSync(ctx, conn, nonce, interval, clk, acked) }()

	r := bufio.NewReaderSize(conn, bufferSize)
	err := skipTo(r, wordAck+nonce)
	close(acked)
	if err != nil {
		cancel()
	}
	if sendErr := <-sent; err == nil {
		err = sendErr
	}
	if err == nil {
		_, err = conn.Write(line(wordGo, nonce))
	}
	if !release() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return nil, fmt.Errorf("synchronising with the guest: %w", err)
	}
	return &Conn{ReadWriteCloser: conn, buffered: r}, nil
}

func repeatSync(ctx context.Context, w io.Writer, nonce string, interval time.Duration, clk clock.WithTicker, acked <-chan struct{}) error {
	tick := clk.NewTicker(interval)
	defer tick.Stop()
	for {
		if _, err := w.Write(line(wordSync, nonce)); err != nil {
			return err
		}
		select {
		case <-tick.C():
		case <-acked:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// skipTo reads up to and including the line that equals want.
func skipTo(r *bufio.Reader, want string) error {
	for {
		got, err := readLine(r)
		if err != nil {
			return err
		}
		if string(got) == want {
			return nil
		}
	}
}

// readLine gives the next line without its newline; of one longer than the buffer, only the last piece. The result is valid until
// the next read.
func readLine(r *bufio.Reader) ([]byte, error) {
	for {
		got, err := r.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			continue
		}
		if err != nil {
			return nil, err
		}
		return got[:len(got)-1], nil
	}
}

// Guest performs the guest's part on pipe and returns when a host has said GO. It waits for as long as pipe's Read does.
func Guest(pipe io.ReadWriteCloser) (*Conn, error) {
	r := bufio.NewReaderSize(pipe, bufferSize)
	var answer Responder
	for {
		got, err := readLine(r)
		if err != nil {
			return nil, fmt.Errorf("waiting for a host: %w", err)
		}
		reply, done := answer.Line(got)
		if done {
			return &Conn{ReadWriteCloser: pipe, buffered: r}, nil
		}
		if reply == nil {
			continue
		}
		if _, err := pipe.Write(reply); err != nil {
			return nil, fmt.Errorf("answering a host: %w", err)
		}
	}
}

// Responder is the guest's part as a state machine over lines.
type Responder struct{ nonce string }

// Line takes one line and gives what to send back, or done when the session begins right behind this line.
func (s *Responder) Line(got []byte) (reply []byte, done bool) {
	if nonce, ok := bytes.CutPrefix(got, []byte(wordSync)); ok && len(nonce) > 0 && len(nonce) <= maxNonce {
		if string(nonce) == s.nonce {
			return nil, false
		}
		s.nonce = string(nonce)
		return line(wordAck, s.nonce), false
	}
	nonce, ok := bytes.CutPrefix(got, []byte(wordGo))
	return nil, ok && s.nonce != "" && string(nonce) == s.nonce
}
