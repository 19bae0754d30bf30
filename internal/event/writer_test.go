package event_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/event"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	clocktesting "k8s.io/utils/clock/testing"
)

// rig is a Writer on a fake API server and a fake clock. A written event is told on writes.
type rig struct {
	t      *testing.T
	client *fake.Clientset
	clock  *clocktesting.FakeClock
	writer *event.Writer
	writes chan string
	stop   func()
}

func newRig(t *testing.T, objects ...runtime.Object) *rig {
	r := &rig{
		t: t, client: fake.NewClientset(objects...), writes: make(chan string, 100),
		clock: clocktesting.NewFakeClock(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)),
	}
	r.client.PrependReactor("*", "events", func(a clienttesting.Action) (bool, runtime.Object, error) {
		r.writes <- a.GetVerb()
		return false, nil, nil
	})
	r.start()
	return r
}

func (r *rig) start() {
	r.writer = event.NewWriter(r.client.CoreV1(), "imp-test", "node-a", r.clock, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(r.t.Context())
	ended := make(chan struct{})
	go func() { r.writer.Run(ctx); close(ended) }()
	r.stop = func() { cancel(); <-ended }
	r.t.Cleanup(r.stop)
	ticker := time.NewTicker(time.Millisecond)
	defer ticker.Stop()
	for !r.clock.HasWaiters() { // until Run has its ticker
		<-ticker.C
	}
}

func (r *rig) expect(verbs ...string) {
	r.t.Helper()
	for _, verb := range verbs {
		select {
		case got := <-r.writes:
			if got != verb {
				r.t.Fatalf("got a %s, want a %s", got, verb)
			}
		case <-time.After(10 * time.Second):
			r.t.Fatalf("no %s came", verb)
		}
	}
}

func (r *rig) stored(name string) *corev1.Event {
	r.t.Helper()
	got, err := r.client.CoreV1().Events("ns").Get(r.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	<-r.writes // the get
	return got
}

func vm(name string) *v1alpha1.ImpVM {
	return &v1alpha1.ImpVM{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: "uid-of-" + "vm"},
		Status:     v1alpha1.ImpVMStatus{Assignment: 1, Incarnation: 2},
	}
}

func warning(message string) event.Event {
	return event.VM(vm("web"), corev1.EventTypeWarning, "ImagePullFailed", message)
}

func TestAnEventHasEveryFieldTheRunbooksSortAndReadBy(t *testing.T) {
	r := newRig(t)
	r.writer.Record(warning("no such image"))
	r.expect("create")
	got, now := r.stored(warning("").Name()), r.clock.Now()
	switch {
	case !got.EventTime.Equal(&metav1.MicroTime{Time: now}), !got.FirstTimestamp.Time.Equal(now), !got.LastTimestamp.Time.Equal(now):
		t.Errorf("times are %v, %v, %v", got.EventTime, got.FirstTimestamp, got.LastTimestamp)
	case got.Count != 1, got.Action == "", got.ReportingController != "imp-test", got.ReportingInstance != "node-a":
		t.Errorf("got %+v", got)
	case got.InvolvedObject.UID != "uid-of-vm" || got.InvolvedObject.Kind != "ImpVM":
		t.Errorf("it is about %+v", got.InvolvedObject)
	}
}

func TestRepeatsAreCountedAndWrittenAtMostEveryTenSeconds(t *testing.T) {
	r := newRig(t)
	r.writer.Record(warning("first"))
	r.expect("create")
	r.writer.Record(warning("second"))
	r.writer.Record(warning("third"))
	r.clock.Step(9 * time.Second)
	// Another event, written after the repeats were looked at, shows that they were not written.
	other := warning("another step")
	other.Step = "other"
	r.writer.Record(other)
	r.expect("create")
	r.clock.Step(2 * time.Second)
	r.expect("patch")
	if got := r.stored(warning("").Name()); got.Count != 3 || got.Message != "third" {
		t.Errorf("count %d, message %q", got.Count, got.Message)
	}
}

func TestARestartedWriterGoesOnCounting(t *testing.T) {
	r := newRig(t)
	r.writer.Record(warning("before"))
	r.expect("create")
	r.stop()
	r.start()
	r.writer.Record(warning("after"))
	r.expect("create", "patch", "patch")
	if got := r.stored(warning("").Name()); got.Count != 2 || got.Message != "after" {
		t.Errorf("count %d, message %q", got.Count, got.Message)
	}
}

func TestAnEventThatTheServerCouldNotTakeIsWrittenLater(t *testing.T) {
	r := newRig(t)
	failing := true
	r.client.PrependReactor("create", "events", func(clienttesting.Action) (bool, runtime.Object, error) {
		if failing {
			failing = false
			r.writes <- "refused"
			return true, nil, errors.New("connection refused")
		}
		return false, nil, nil
	})
	r.writer.Record(warning("told in the end"))
	r.expect("refused")
	r.stepUntil("create")
	if got := r.stored(warning("").Name()); got.Count != 1 {
		t.Errorf("count %d", got.Count)
	}
}

// stepUntil moves the clock on until a write of this verb was made.
func (r *rig) stepUntil(verb string) {
	r.t.Helper()
	for range 1000 {
		r.clock.Step(time.Second)
		select {
		case got := <-r.writes:
			if got != verb {
				r.t.Fatalf("got a %s, want a %s", got, verb)
			}
			return
		case <-time.After(10 * time.Millisecond):
		}
	}
	r.t.Fatalf("no %s came", verb)
}

func TestEventsStillWaitingAreWrittenAtTheEnd(t *testing.T) {
	r := newRig(t)
	r.writer.Record(warning("first"))
	r.expect("create")
	r.writer.Record(warning("repeat within ten seconds"))
	r.stop()
	r.expect("patch")
}

func TestANewIncarnationAssignmentReasonOrStepIsANewEvent(t *testing.T) {
	names := map[string]string{}
	for what, change := range map[string]func(*event.Event){
		"the same":            func(*event.Event) {},
		"another incarnation": func(e *event.Event) { e.Incarnation++ },
		"another assignment":  func(e *event.Event) { e.Assignment++ },
		"another reason":      func(e *event.Event) { e.Reason = "Recovered" },
		"another step":        func(e *event.Event) { e.Step = "disk" },
		"another object":      func(e *event.Event) { e.Object.UID = "other" },
	} {
		e := warning("")
		change(&e)
		if before, taken := names[e.Name()]; taken {
			t.Errorf("%s and %s are one event", what, before)
		}
		names[e.Name()] = what
	}
	a, b := warning("a"), warning("b")
	if a.Name() != b.Name() {
		t.Error("the message makes it another event")
	}
}

func TestLongMessagesAndNamesAreCutToWhatTheServerTakes(t *testing.T) {
	r := newRig(t)
	e := warning(strings.Repeat("ü", 700) + "\xff")
	r.writer.Record(e)
	r.expect("create")
	got := r.stored(e.Name())
	if len(got.Message) > event.MaxMessage || !utf8.ValidString(got.Message) || !strings.HasSuffix(got.Message, "…") {
		t.Errorf("message of %d bytes: …%q", len(got.Message), got.Message[len(got.Message)-8:])
	}
	long := event.VM(vm(strings.Repeat("a.", 126)), corev1.EventTypeNormal, "Placed", "")
	if n := long.Name(); len(n) > 253 || strings.Contains(n, "..") {
		t.Errorf("name of %d bytes: %s", len(n), n)
	}
}
