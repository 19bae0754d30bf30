package console

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	clocktesting "k8s.io/utils/clock/testing"
	"pgregory.net/rapid"
)

func write(t *testing.T, b []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "console.log")
	appendTo(t, path, b)
	return path
}

func appendTo(t *testing.T, path string, b []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(b); err != nil {
		t.Fatal(err)
	}
}

// numbered is n bytes in which every byte tells its place.
func numbered(n int) []byte {
	var b bytes.Buffer
	for b.Len() < n {
		fmt.Fprintf(&b, "%07d\n", b.Len())
	}
	return b.Bytes()[:n]
}

func onDisk(t *testing.T, path string) int64 {
	t.Helper()
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

func TestLongConsoleKeepsHeadAndTailAndTheirOffsets(t *testing.T) {
	const size = 9<<20 + 12345
	all := numbered(size)
	path := write(t, all)
	if err := Trim(path); err != nil {
		t.Fatal(err)
	}
	if got := onDisk(t, path); got > Head+Tail+2*grain {
		t.Errorf("%d bytes stay on the disk", got)
	}
	var kept int64
	gaps := 0
	for offset := int64(0); ; {
		c, err := Read(path, offset, 100_000)
		if err != nil {
			t.Fatal(err)
		}
		if c.Size != size {
			t.Fatalf("size %d", c.Size)
		}
		if c.Offset > offset {
			gaps++
			if offset != Head {
				t.Errorf("the gap begins at %d", offset)
			}
		}
		if len(c.Data) == 0 {
			if c.Offset != size {
				t.Errorf("the end is at %d", c.Offset)
			}
			break
		}
		if !bytes.Equal(c.Data, all[c.Offset:c.Offset+int64(len(c.Data))]) {
			t.Fatalf("other bytes at %d", c.Offset)
		}
		offset = c.Offset + int64(len(c.Data))
		kept += int64(len(c.Data))
	}
	if gaps != 1 || kept < Head+Tail {
		t.Errorf("%d gaps, %d bytes kept", gaps, kept)
	}
	last, err := Last(path, 1000)
	if err != nil || !bytes.Equal(last, all[size-1000:]) {
		t.Errorf("last: %d bytes, %v", len(last), err)
	}
}

func TestShortConsoleIsLeftAlone(t *testing.T) {
	all := numbered(Head + Tail)
	path := write(t, all)
	if err := Trim(path); err != nil {
		t.Fatal(err)
	}
	if b, _ := os.ReadFile(path); !bytes.Equal(b, all) {
		t.Error("bytes changed")
	}
}

func TestConsoleThatIsNotThereIsEmpty(t *testing.T) {
	path := filepath.Join(t.TempDir(), "none")
	if err := Trim(path); err != nil {
		t.Error(err)
	}
	if c, err := Read(path, 0, 10); err != nil || len(c.Data) != 0 || c.Size != 0 {
		t.Errorf("%+v %v", c, err)
	}
}

func TestReadingFromTheEnd(t *testing.T) {
	path := write(t, []byte("hello"))
	for _, c := range []struct {
		offset int64
		limit  int
		want   string
		at     int64
	}{{-2, 10, "lo", 3}, {-100, 10, "hello", 0}, {5, 10, "", 5}, {99, 10, "", 5}, {1, 2, "el", 1}, {0, 0, "", 0}} {
		got, err := Read(path, c.offset, c.limit)
		if err != nil || string(got.Data) != c.want || got.Offset != c.at || got.Size != 5 {
			t.Errorf("Read(%d, %d) = %+v, %v", c.offset, c.limit, got, err)
		}
	}
}

func TestKeepTrimsAtEveryTick(t *testing.T) {
	path := write(t, numbered(4<<20))
	clk := clocktesting.NewFakeClock(time.Unix(0, 0))
	done := make(chan struct{})
	go func() {
		defer close(done)
		Keep(t.Context(), clk, time.Minute, slog.New(slog.NewTextHandler(io.Discard, nil)), path)
	}()
	deadline := time.Now().Add(10 * time.Second)
	for onDisk(t, path) > 3<<20 {
		if time.Now().After(deadline) {
			t.Fatal("the console was not trimmed")
		}
		if clk.HasWaiters() {
			clk.Step(time.Minute)
		}
	}
}

func TestSanitisedTailIsFitForAnObject(t *testing.T) {
	for name, c := range map[string]struct {
		raw   string
		limit int
		want  string
	}{
		"plain lines stay":                      {"one\ntwo\n", 100, "one\ntwo\n"},
		"colours and cursor moves go":           {"\x1b[31mred\x1b[0m\x1b[2J ok", 100, "red ok"},
		"a window title goes":                   {"\x1b]0;title\x07ok", 100, "ok"},
		"an open sequence hides nothing":        {"\x1b]evil text", 100, "evil text"},
		"carriage returns and bells go":         {"a\r\nb\x07\x00", 100, "a\nb"},
		"broken UTF-8 becomes a question mark":  {"a\xff\xfeb", 100, "a??b"},
		"text direction cannot be turned":       {"a\u202eb", 100, "ab"},
		"the first line is whole":               {"first\nsecond\nthird\n", 10, "third\n"},
		"one long line is cut between letters":  {"äöüäöü", 5, "öü"},
		"C1 control characters in UTF-8 go too": {"a\u009b31mb", 100, "a31mb"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := Sanitise([]byte(c.raw), c.limit); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

func TestSanitisedTailIsValidWhateverTheGuestWrote(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		raw := rapid.SliceOf(rapid.Byte()).Draw(t, "raw")
		limit := rapid.IntRange(0, 64).Draw(t, "limit")
		got := Sanitise(raw, limit)
		if len(got) > limit || !utf8.ValidString(got) || strings.ContainsAny(got, "\x1b\x00\x07\r\x7f") {
			t.Fatalf("%q", got)
		}
	})
}
