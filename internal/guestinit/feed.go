package guestinit

import (
	"fmt"
	"io"
	"sync"
	"time"
)

const (
	// feedSize bounds what waits for the console, in bytes.
	feedSize = 256 << 10
	// feedChunk is written at a time; at 0.4 MB/s one takes 10 ms.
	feedChunk = 4 << 10
	// finalTail of the waiting bytes is still written at the end; the rest would only delay it.
	finalTail = 64 << 10
)

// feed brings bytes to a console that may be slow (0.4 MB/s) or stuck for ever, without ever making the one who prints wait: what
// does not fit is dropped from the front and counted on the console.
type feed struct {
	console io.Writer

	mu       sync.Mutex
	changed  *sync.Cond
	pending  []byte
	dropped  int64
	writing  bool
	lastByte byte // of what was accepted
}

func newFeed(console io.Writer) *feed {
	f := &feed{console: console, lastByte: '\n'}
	f.changed = sync.NewCond(&f.mu)
	go f.run()
	return f
}

// Write never blocks and never fails.
func (f *feed) Write(p []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.accept(p)
	return len(p), nil
}

func (f *feed) accept(p []byte) {
	if len(p) == 0 {
		return
	}
	f.lastByte = p[len(p)-1]
	if n := len(p) - feedSize; n > 0 {
		f.dropped += int64(n)
		p = p[n:]
	}
	f.trim(feedSize - len(p))
	f.pending = append(f.pending, p...)
	f.changed.Broadcast()
}

// trim drops from the front until at most n bytes wait.
func (f *feed) trim(n int) {
	if over := len(f.pending) - n; over > 0 {
		f.dropped += int64(over)
		f.pending = f.pending[:copy(f.pending, f.pending[over:])]
	}
}

// Line prints text on a line of its own.
func (f *feed) Line(text string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.lastByte != '\n' {
		text = "\n" + text
	}
	f.accept([]byte(text + "\n"))
}

// Finish prints text as the last line and waits until everything is on the console, or limit has passed. It says which.
func (f *feed) Finish(text string, limit time.Duration) bool {
	f.mu.Lock()
	f.trim(finalTail)
	f.mu.Unlock()
	f.Line(text)
	idle := make(chan struct{})
	go func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		for len(f.pending) > 0 || f.writing {
			f.changed.Wait()
		}
		close(idle)
	}()
	select {
	case <-idle:
		return true
	case <-time.After(limit):
		return false
	}
}

func (f *feed) run() {
	chunk := make([]byte, 0, feedChunk+64)
	for {
		f.mu.Lock()
		f.writing = false
		f.changed.Broadcast()
		for len(f.pending) == 0 {
			f.changed.Wait()
		}
		f.writing = true
		chunk = chunk[:0]
		if f.dropped > 0 {
			chunk = fmt.Appendf(chunk, "\n[imp-guest: %d bytes of output not shown]\n", f.dropped)
			f.dropped = 0
		}
		n := min(len(f.pending), feedChunk)
		chunk = append(chunk, f.pending[:n]...)
		f.pending = f.pending[:copy(f.pending, f.pending[n:])]
		f.mu.Unlock()
		_, _ = f.console.Write(chunk)
	}
}
