// Package console keeps serial consoles: append-only files, written by VMMs and controlled by guests, of which the head and the
// tail are kept and the middle is given back to the file system by punching holes.
//
// Offsets are those of the endless console: the file's apparent size only grows, and a VMM that appends needs no telling.
//
//	0 ────── Head ┄┄┄┄┄┄ hole ┄┄┄┄┄┄ size−Tail ────── size
package console

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"
	"k8s.io/utils/clock"
)

// What is kept of a console, in bytes.
const (
	Head = 64 << 10
	Tail = 1 << 20
)

// grain aligns holes. It is a multiple of every usual block size, so a hole is a real hole with exact borders, and no kept
// byte turns to zero.
const grain = 64 << 10

// Trim punches the middle out of the console at path. A short one, and a file that does not exist, are left alone.
func Trim(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("trimming console: %w", err)
	}
	defer f.Close()
	return TrimFile(f)
}

// TrimFile is Trim of an open file.
func TrimFile(f *os.File) error {
	info, err := f.Stat()
	if err != nil {
		return fmt.Errorf("trimming console: %w", err)
	}
	end := (info.Size() - Tail) / grain * grain
	if end <= Head {
		return nil
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("trimming console: %w", err)
	}
	var punched error
	err = raw.Control(func(fd uintptr) {
		punched = unix.Fallocate(int(fd), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, Head, end-Head)
	})
	if err = errors.Join(err, punched); err != nil {
		return fmt.Errorf("trimming console %s: %w", f.Name(), err)
	}
	return nil
}

// Keep trims the consoles, or logs of that kind, every interval until ctx ends. A file system that has no holes is told once.
func Keep(ctx context.Context, clk clock.WithTicker, interval time.Duration, log *slog.Logger, paths ...string) {
	ticker := clk.NewTicker(interval)
	defer ticker.Stop()
	told := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C():
		}
		for _, path := range paths {
			if err := Trim(path); err != nil && !told {
				told = true
				log.Warn("Console cannot be kept short", "path", path, "err", err)
			}
		}
	}
}

// Chunk is a piece of a console.
type Chunk struct {
	// Offset of Data; later than asked for where the middle was dropped.
	Offset int64
	Data   []byte
	// Size of the console so far, counting what was dropped.
	Size int64
}

// Read gives at most limit bytes from offset on. A negative offset counts from the end. At the end Data is empty and Offset
// is Size; a console that does not exist yet is empty.
func Read(path string, offset int64, limit int) (Chunk, error) {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return Chunk{}, nil
	}
	if err != nil {
		return Chunk{}, fmt.Errorf("reading console: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return Chunk{}, fmt.Errorf("reading console: %w", err)
	}
	size := info.Size()
	if offset < 0 {
		offset = max(0, size+offset)
	}
	if offset >= size || limit <= 0 {
		return Chunk{Offset: min(offset, size), Size: size}, nil
	}
	offset, end, err := extent(f, offset, size)
	if err != nil {
		return Chunk{}, fmt.Errorf("reading console: %w", err)
	}
	data := make([]byte, min(int64(limit), end-offset))
	n, err := f.ReadAt(data, offset)
	if err != nil && !errors.Is(err, io.EOF) {
		return Chunk{}, fmt.Errorf("reading console: %w", err)
	}
	return Chunk{Offset: offset, Data: data[:n], Size: size}, nil
}

// extent moves offset out of a hole, and gives the end of the data it then stands in.
func extent(f *os.File, offset, size int64) (start, end int64, err error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return 0, 0, err
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		start, failed = unix.Seek(int(fd), offset, unix.SEEK_DATA)
		if errors.Is(failed, syscall.ENXIO) { // punched away meanwhile, up to the end
			start, end, failed = size, size, nil
			return
		}
		if failed == nil {
			end, failed = unix.Seek(int(fd), start, unix.SEEK_HOLE)
		}
	})
	if errors.Is(failed, syscall.EINVAL) { // a file system without SEEK_DATA has no holes
		return offset, size, nil
	}
	return start, min(max(end, start), size), errors.Join(err, failed)
}

// Last gives at most limit bytes of the end of the console, raw.
func Last(path string, limit int) ([]byte, error) {
	c, err := Read(path, -int64(limit), limit)
	return c.Data, err
}

// Sanitise makes at most limit bytes of valid UTF-8 out of the end of raw: no control characters but newline and tab, no escape sequences, the
// first line whole.
func Sanitise(raw []byte, limit int) string {
	var b strings.Builder
	for rest := raw; len(rest) > 0; {
		if n := escapeLen(rest); n > 0 {
			rest = rest[n:]
			continue
		}
		r, n := utf8.DecodeRune(rest)
		rest = rest[n:]
		switch {
		case r == '\n' || r == '\t':
			b.WriteRune(r)
		case r == utf8.RuneError && n == 1:
			b.WriteRune('?')
		case unicode.IsControl(r) || unicode.In(r, unicode.Cf, unicode.Co, unicode.Cs):
		default:
			b.WriteRune(r)
		}
	}
	s := b.String()
	if len(s) <= limit {
		return s
	}
	s = s[len(s)-limit:]
	if i := strings.IndexByte(s, '\n'); i >= 0 && i < len(s)-1 {
		return s[i+1:]
	}
	for len(s) > 0 && !utf8.RuneStart(s[0]) {
		s = s[1:]
	}
	return s
}

// escapeLen is the length of the terminal escape sequence b begins with (ECMA-48): CSI up to its final byte, OSC and other strings up to BEL
// or ESC \, others two bytes. 0 is none.
func escapeLen(b []byte) int {
	if len(b) < 2 || b[0] != 0x1b {
		return 0
	}
	switch b[1] {
	case '[':
		for i := 2; i < len(b) && i < 64; i++ {
			if b[i] >= 0x40 && b[i] <= 0x7e {
				return i + 1
			}
		}
		return 2
	case ']', 'P', 'X', '^', '_':
		for i := 2; i < len(b) && i < 4096; i++ {
			if b[i] == 0x07 {
				return i + 1
			}
			if b[i] == 0x1b && i+1 < len(b) && b[i+1] == '\\' {
				return i + 2
			}
		}
		return 2
	}
	return 2
}
