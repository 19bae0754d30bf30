package wire

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"time"

	"k8s.io/utils/clock"

	guestv1 "imp.dev/imp/api/guest/v1"
)

func TestFramesCarryBytesThatAreNotUTF8(t *testing.T) {
	var b bytes.Buffer
	want := []byte{0xff, 0, '\n', '"', 0xc3}
	if err := WriteFrame(&b, guestv1.Start{Argv: [][]byte{want}}); err != nil {
		t.Fatal(err)
	}
	b.WriteString("what follows")
	var got guestv1.Start
	if err := ReadFrame(&b, &got); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got.Argv[0], want) {
		t.Errorf("got %q, want %q", got.Argv[0], want)
	}
	if b.String() != "what follows" {
		t.Errorf("the reader took bytes behind the frame: %q is left", b.String())
	}
}

func TestFramesThatCannotBeRead(t *testing.T) {
	for name, c := range map[string]struct {
		input string
		want  error
	}{
		"a length beyond the limit is refused before anything is allocated": {"\xff\xff\xff\xff", ErrTooLarge},
		"a frame that is no JSON is malformed":                              {"\x00\x00\x00\x01{", ErrMalformed},
		"a frame that is cut off is an unexpected end":                      {"\x00\x00\x00\x09{", io.ErrUnexpectedEOF},
	} {
		t.Run(name, func(t *testing.T) {
			if err := ReadFrame(strings.NewReader(c.input), &guestv1.Request{}); !errors.Is(err, c.want) {
				t.Errorf("got %v, want %v", err, c.want)
			}
		})
	}
	t.Run("a message beyond the limit is not sent", func(t *testing.T) {
		var b bytes.Buffer
		if err := WriteFrame(&b, guestv1.Start{Argv: [][]byte{make([]byte, guestv1.MaxFrame)}}); !errors.Is(err, ErrTooLarge) || b.Len() != 0 {
			t.Errorf("got %v, %d bytes sent", err, b.Len())
		}
	})
}

func TestResponder(t *testing.T) {
	type step struct {
		line, reply string
		done        bool
	}
	for name, steps := range map[string][]step{
		"answers a nonce once":                    {{"\x00SYNC:a", "\n\x00ACK:a\n", false}, {"\x00SYNC:a", "", false}, {"\x00GO:a", "", true}},
		"a new nonce replaces the old":            {{"\x00SYNC:a", "\n\x00ACK:a\n", false}, {"\x00SYNC:b", "\n\x00ACK:b\n", false}, {"\x00GO:a", "", false}, {"\x00GO:b", "", true}},
		"GO without SYNC is nothing":              {{"\x00GO:", "", false}, {"\x00GO:a", "", false}},
		"text that only looks alike is nothing":   {{"SYNC:a", "", false}, {"x\x00SYNC:a", "", false}, {"\x00SYNC:", "", false}},
		"a nonce of any length is not remembered": {{"\x00SYNC:" + strings.Repeat("a", maxNonce+1), "", false}},
	} {
		t.Run(name, func(t *testing.T) {
			var r Responder
			for i, s := range steps {
				reply, done := r.Line([]byte(s.line))
				if string(reply) != s.reply || done != s.done {
					t.Fatalf("line %d %q: got %q, %v", i, s.line, reply, done)
				}
			}
		})
	}
}

// pipe gives two ends that buffer, unlike net.Pipe: junk lies in the pipe before anybody reads.
func pipe(t *testing.T) (net.Conn, net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	a, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	b, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Close(); _ = b.Close() })
	return a, b
}

func TestHandshakeSkipsWhateverLiesInThePipe(t *testing.T) {
	junk := make([]byte, 300<<10)
	for i := range junk {
		junk[i] = byte(rand.Uint32())
	}
	for name, j := range map[string][2][]byte{
		"nothing":                       {},
		"half a frame without newlines": {bytes.Repeat([]byte{'x'}, 200<<10), bytes.Repeat([]byte{'y'}, 200<<10)},
		"random bytes":                  {junk, junk},
		"an older handshake":            {[]byte("\n\x00SYNC:old\n\n\x00GO:older\n"), []byte("\n\x00ACK:old\n")},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			hostEnd, guestEnd := pipe(t)
			go func() { _, _ = guestEnd.Write(j[1]) }()
			go func() {
				_, _ = hostEnd.Write(j[0])
				c, err := Host(ctx, hostEnd, "nonce", time.Millisecond, clock.RealClock{})
				if err != nil {
					t.Errorf("host: %v", err)
					return
				}
				_, _ = c.Write([]byte("from the host"))
				_, _ = io.Copy(c, io.LimitReader(c, int64(len("from the guest"))))
				_ = c.Close()
			}()
			g, err := Guest(guestEnd)
			if err != nil {
				t.Fatal(err)
			}
			got := make([]byte, len("from the host"))
			if _, err := io.ReadFull(g, got); err != nil || string(got) != "from the host" {
				t.Fatalf("the guest's first bytes: %q, %v", got, err)
			}
			_, _ = g.Write([]byte("from the guest"))
			back, err := io.ReadAll(g)
			if err != nil || string(back) != "from the guest" {
				t.Fatalf("what came back: %q, %v", back, err)
			}
		})
	}
}

func TestAHostThatNobodyAnswersEndsWithItsContext(t *testing.T) {
	hostEnd, _ := pipe(t)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := Host(ctx, hostEnd, "nonce", time.Millisecond, clock.RealClock{}); err == nil {
		t.Error("no error")
	}
}
