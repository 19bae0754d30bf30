package event

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/utils/clock"
)

const (
	// interval between two writes of one event: a repeat within it is counted and written at its end.
	interval = 10 * time.Second
	// remembered is how long an event that did not repeat is kept in memory, no longer than the API server keeps it.
	remembered = time.Hour
	// queued events wait at most; one more is dropped, and the log says so.
	queued = 4096
	// writeTimeout bounds one request, tries the requests for one event.
	writeTimeout = 10 * time.Second
	tries        = 5
	retryDelay   = 2 * time.Second
)

// Writer is the Recorder that writes to the API server. It needs the verbs create and patch on events, no more.
type Writer struct {
	client    corev1client.EventsGetter
	component string
	instance  string
	clock     clock.WithTicker
	log       *slog.Logger
	incoming  chan Event
	known     map[string]*entry // by namespace/name; only Run touches it
}

// entry is one event object and what is still to be told to the API server about it.
type entry struct {
	event     Event
	first     time.Time
	last      time.Time // of the latest occurrence
	count     int32     // as the API server has it; 0: not known
	pending   int32     // occurrences not written yet
	notBefore time.Time // of the next write
	failures  int
}

// NewWriter makes a Writer; nothing is written until Run is called. component is the program (imp-operator, imp-agent),
// instance where it runs: a pod's or node's name.
func NewWriter(
	client corev1client.EventsGetter, component, instance string, clk clock.WithTicker, log *slog.Logger,
) *Writer {
	return &Writer{
		client: client, component: component, instance: instance, clock: clk, log: log,
		incoming: make(chan Event, queued), known: map[string]*entry{},
	}
}

// Record implements Recorder.
func (w *Writer) Record(e Event) {
	select {
	case w.incoming <- e:
	default:
		w.log.Warn("event dropped because too many are waiting",
			"namespace", e.Object.Namespace, "name", e.Object.Name, "reason", e.Reason)
	}
}

// Run writes events until ctx ends, then what is still waiting, in two seconds at most.
func (w *Writer) Run(ctx context.Context) {
	ticker := w.clock.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
			defer cancel()
			w.flush(last)
			return
		case e := <-w.incoming:
			w.take(e)
			w.writeDue(ctx)
		case <-ticker.C():
			w.writeDue(ctx)
			w.forget()
		}
	}
}

// Start is Run for controller-runtime's manager.
func (w *Writer) Start(ctx context.Context) error {
	w.Run(ctx)
	return nil
}

// NeedLeaderElection tells controller-runtime's manager to run the Writer in a standby as well.
func (w *Writer) NeedLeaderElection() bool { return false }

func (w *Writer) flush(ctx context.Context) {
	for {
		select {
		case e := <-w.incoming:
			w.take(e)
			continue
		default:
		}
		break
	}
	for _, n := range w.known {
		if n.pending > 0 && ctx.Err() == nil {
			w.write(ctx, n)
		}
	}
}

func (w *Writer) take(e Event) {
	e.Message = bounded(e.Message)
	if e.Action == "" {
		e.Action = e.Reason
	}
	now, key := w.clock.Now(), e.namespace()+"/"+e.Name()
	n, ok := w.known[key]
	if !ok {
		n = &entry{first: now}
		w.known[key] = n
	}
	n.event, n.last = e, now
	n.pending++
}

func (w *Writer) writeDue(ctx context.Context) {
	now := w.clock.Now()
	for _, n := range w.known {
		if n.pending > 0 && !now.Before(n.notBefore) {
			w.write(ctx, n)
		}
	}
}

func (w *Writer) forget() {
	for key, n := range w.known {
		if n.pending == 0 && w.clock.Since(n.last) > remembered {
			delete(w.known, key)
		}
	}
}

// write tells the API server of n's pending occurrences and sets when the next write may be.
func (w *Writer) write(ctx context.Context, n *entry) {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	now := w.clock.Now()
	count, err := w.send(ctx, n)
	switch {
	case err == nil:
		n.count, n.pending, n.failures = count, 0, 0
		n.notBefore = now.Add(interval)
	case permanent(err) || n.failures+1 >= tries:
		w.log.Warn("event not written", "namespace", n.event.Object.Namespace, "name", n.event.Object.Name,
			"reason", n.event.Reason, "error", err)
		n.pending, n.failures = 0, 0
		n.notBefore = now.Add(interval)
	default:
		n.failures++
		n.notBefore = now.Add(retryDelay << n.failures)
	}
}

// permanent errors are answers about the event itself; the namespace of a deleted object may be on its way out as well.
func permanent(err error) bool {
	return apierrors.IsInvalid(err) || apierrors.IsForbidden(err) || apierrors.IsNotFound(err) || apierrors.IsBadRequest(err)
}

// send makes the requests and gives the count that the API server then has.
func (w *Writer) send(ctx context.Context, n *entry) (int32, error) {
	if n.count > 0 {
		written, err := w.patch(ctx, n, n.count+n.pending)
		if !apierrors.IsNotFound(err) {
			return written, err
		}
		n.first = n.last // the API server has forgotten it: it begins anew
	}
	written, err := w.client.Events(n.event.namespace()).Create(ctx, w.object(n), metav1.CreateOptions{})
	if err == nil {
		return written.Count, nil
	}
	if !apierrors.IsAlreadyExists(err) {
		return 0, fmt.Errorf("creating event: %w", err)
	}
	// An earlier process wrote it. The answer to a patch without a count tells the count.
	before, err := w.patch(ctx, n, 0)
	if err != nil {
		return 0, err
	}
	return w.patch(ctx, n, before+n.pending)
}

func (w *Writer) patch(ctx context.Context, n *entry, count int32) (int32, error) {
	body := map[string]any{
		"lastTimestamp": metav1.NewTime(n.last), "message": n.event.Message, "action": n.event.Action, "type": n.event.Type,
	}
	if count > 0 {
		body["count"] = count
	}
	content, err := json.Marshal(body)
	if err != nil {
		return 0, errors.New("encoding event: " + err.Error())
	}
	written, err := w.client.Events(n.event.namespace()).
		Patch(ctx, n.event.Name(), types.MergePatchType, content, metav1.PatchOptions{})
	if err != nil {
		return 0, fmt.Errorf("patching event: %w", err)
	}
	return written.Count, nil
}

func (w *Writer) object(n *entry) *corev1.Event {
	return &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Name: n.event.Name(), Namespace: n.event.namespace()},
		InvolvedObject: n.event.Object,
		Type:           n.event.Type, Reason: n.event.Reason, Action: n.event.Action, Message: n.event.Message,
		EventTime:      metav1.NewMicroTime(n.first),
		FirstTimestamp: metav1.NewTime(n.first), LastTimestamp: metav1.NewTime(n.last), Count: n.pending,
		Source:              corev1.EventSource{Component: w.component, Host: w.instance},
		ReportingController: w.component, ReportingInstance: w.instance,
	}
}
