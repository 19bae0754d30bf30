package oci

import (
	"context"
	"sync"

	"imp.dev/imp/internal/image"
)

// group runs one piece of work for all who want it at the same time, and ends it when nobody waits any more. Nothing is
// remembered afterwards: the next caller starts anew, so a failure poisons nobody.
type group[T any] struct {
	mu      sync.Mutex
	flights map[string]*flight[T]
	running sync.WaitGroup // cancelled ones, which nobody waits for, too
}

type flight[T any] struct {
	owner   string
	cancel  context.CancelFunc
	waiters int
	done    chan struct{} // closed when value and err are set

	mu      sync.Mutex
	last    image.Progress
	changed chan struct{} // closed and replaced at each progress

	value T
	err   error
}

// do joins the flight of key or starts one with work. owner is who would start it; the answer tells whose flight it was.
// watch is called from this goroutine.
func (g *group[T]) do(ctx context.Context, key, owner string, work func(context.Context, func(image.Progress)) (T, error),
	watch func(p image.Progress, leader bool),
) (value T, flown string, err error) {
	g.mu.Lock()
	f, leader := g.flights[key], false
	if f == nil {
		leader = true
		run, cancel := context.WithCancel(context.WithoutCancel(ctx))
		f = &flight[T]{owner: owner, cancel: cancel, done: make(chan struct{}), changed: make(chan struct{})}
		if g.flights == nil {
			g.flights = map[string]*flight[T]{}
		}
		g.flights[key] = f
		g.running.Go(func() {
			f.value, f.err = work(run, f.tell)
			g.forget(key, f)
			close(f.done)
			cancel()
		})
	}
	f.waiters++
	g.mu.Unlock()
	defer g.leave(key, f)
	for {
		p, changed := f.progress()
		if p.Stage != "" && watch != nil {
			watch(p, leader)
		}
		select {
		case <-f.done:
			return f.value, f.owner, f.err
		case <-ctx.Done():
			return value, f.owner, ctx.Err()
		case <-changed:
		}
	}
}

func (f *flight[T]) tell(p image.Progress) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.last = p
	close(f.changed)
	f.changed = make(chan struct{})
}

func (f *flight[T]) progress() (image.Progress, <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.last, f.changed
}

func (g *group[T]) leave(key string, f *flight[T]) {
	g.mu.Lock()
	f.waiters--
	last := f.waiters == 0
	if last && g.flights[key] == f {
		delete(g.flights, key) // nobody may join what is being cancelled
	}
	g.mu.Unlock()
	if last {
		f.cancel()
	}
}

func (g *group[T]) forget(key string, f *flight[T]) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.flights[key] == f {
		delete(g.flights, key)
	}
}
