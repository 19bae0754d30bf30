package guestinit

import (
	"context"
	"io"
	"sync"
)

// ringSize is how much of the workload's output can be asked for again, in bytes.
const ringSize = 1 << 20

// ring keeps the end of the workload's output, addressed by absolute offset: byte n is the n-th the workload printed, for ever.
type ring struct {
	mu     sync.Mutex
	buf    []byte
	end    int64         // offset after the last byte
	closed bool          // nothing more will come
	more   chan struct{} // closed and replaced when end or closed changes
}

func newRing(size int) *ring { return &ring{buf: make([]byte, size), more: make(chan struct{})} }

// Write never blocks and never fails.
func (r *ring) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	written := len(p)
	if skip := len(p) - len(r.buf); skip > 0 {
		p = p[skip:]
		r.end += int64(skip)
	}
	for len(p) > 0 {
		n := copy(r.buf[int(r.end%int64(len(r.buf))):], p)
		p = p[n:]
		r.end += int64(n)
	}
	r.wake()
	return written, nil
}

// Close says that the workload has ended and its output is complete.
func (r *ring) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	r.wake()
	return nil
}

func (r *ring) wake() {
	close(r.more)
	r.more = make(chan struct{})
}

// first gives the offset at which a reader that asks for offset begins.
func (r *ring) first(offset int64) int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return min(max(offset, r.end-int64(len(r.buf)), 0), r.end)
}

// read copies what is there from offset on into p. n is 0 when there is nothing yet (wait for more) or ever (done).
// gone says that offset has been overwritten.
func (r *ring) read(p []byte, offset int64) (n int, done, gone bool, more <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if offset < r.end-int64(len(r.buf)) {
		return 0, false, true, r.more
	}
	if offset >= r.end {
		return 0, r.closed, false, r.more
	}
	available := min(int64(len(p)), r.end-offset)
	at := int(offset % int64(len(r.buf)))
	n = copy(p[:available], r.buf[at:])
	return n, false, false, r.more
}

// ringReader copies a ring's content from an offset on.
type ringReader struct {
	ctx    context.Context
	ring   *ring
	offset int64
	follow bool
}

// WriteTo implements io.WriterTo. A reader so slow that the ring overtakes it gets the stream's end early, never bytes with a hole
// in them: it asks again from where it is, and is told of the gap.
func (r *ringReader) WriteTo(w io.Writer) (total int64, err error) {
	buf := make([]byte, 32<<10)
	for {
		n, done, gone, more := r.ring.read(buf, r.offset)
		switch {
		case n > 0:
			written, err := w.Write(buf[:n])
			total += int64(written)
			r.offset += int64(written)
			if err != nil {
				return total, err
			}
		case done, gone, !r.follow:
			return total, nil
		default:
			select {
			case <-more:
			case <-r.ctx.Done():
				return total, r.ctx.Err()
			}
		}
	}
}
