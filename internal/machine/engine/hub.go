package engine

import "sync"

// hub tells watchers which VMs have changed. It holds names, not states: a slow watcher finds the latest state of each, once.
type hub struct {
	mu       sync.Mutex
	watchers map[*watcher]struct{}
}

type watcher struct {
	mu    sync.Mutex
	dirty map[string]struct{}
	news  chan struct{} // capacity 1
}

func newHub() *hub { return &hub{watchers: map[*watcher]struct{}{}} }

func (h *hub) publish(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for w := range h.watchers {
		w.mark(id)
	}
}

func (h *hub) subscribe() *watcher {
	w := &watcher{dirty: map[string]struct{}{}, news: make(chan struct{}, 1)}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.watchers[w] = struct{}{}
	return w
}

func (h *hub) unsubscribe(w *watcher) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.watchers, w)
}

func (w *watcher) mark(id string) {
	w.mu.Lock()
	w.dirty[id] = struct{}{}
	w.mu.Unlock()
	select {
	case w.news <- struct{}{}:
	default:
	}
}

// take gives the VMs that changed since the last take.
func (w *watcher) take() map[string]struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	d := w.dirty
	w.dirty = map[string]struct{}{}
	return d
}
