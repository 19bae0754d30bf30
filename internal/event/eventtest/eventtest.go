// Package eventtest is a Recorder for tests: it keeps what it is given.
package eventtest

import (
	"sync"

	"imp.dev/imp/internal/event"
)

// Log keeps events in their order. The zero value is ready.
type Log struct {
	mu     sync.Mutex
	events []event.Event
}

// Record implements event.Recorder.
func (l *Log) Record(e event.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events = append(l.events, e)
}

// Of gives the events about the object of this namespace and name as "Type Reason", in order.
func (l *Log) Of(namespace, name string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []string
	for _, e := range l.events {
		if e.Object.Namespace == namespace && e.Object.Name == name {
			out = append(out, e.Type+" "+e.Reason)
		}
	}
	return out
}

// All gives a copy of all events.
func (l *Log) All() []event.Event {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]event.Event(nil), l.events...)
}
