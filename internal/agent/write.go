package agent

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/agent/translate"
	"imp.dev/imp/internal/event"
	"imp.dev/imp/internal/machine"
)

// writeResult is what became of a report.
type writeResult string

const (
	unchanged writeResult = "unchanged" // nothing to write now
	written   writeResult = "written"
	conflict  writeResult = "conflict" // the object has changed: read again, decide again
	gone      writeResult = "gone"     // there is no such object
	denied    writeResult = "denied"   // the object is another node's, by the policies
	failed    writeResult = "failed"
)

// report writes what o says, if it differs from what the object says and its time has come. The wait is until it comes.
func (a *Agent) report(ctx context.Context, vm *v1alpha1.ImpVM, m *memory, o translate.Observation) (time.Duration, writeResult) {
	after := translate.Report(vm, o)
	m.trouble = m.trouble || troubled(after)
	if translate.Same(vm, after) {
		m.pace.clean()
		return 0, unchanged
	}
	if wait := m.pace.due(o.Now, significant(vm, after)); wait > 0 {
		return wait, unchanged
	}
	result := a.write(ctx, after, m)
	if result != written {
		return 0, result
	}
	m.pace.written(o.Now)
	m.failures = 0
	a.tell(vm, after, m, o.Status)
	return 0, written
}

// write applies the agent's part of vm's status, on condition that the object has not changed since vm was read.
func (a *Agent) write(ctx context.Context, vm *v1alpha1.ImpVM, m *memory) writeResult {
	body, err := translate.Body(vm)
	if err == nil {
		err = a.client.Status().Apply(ctx, client.ApplyConfigurationFromUnstructured(body),
			client.FieldOwner(v1alpha1.ManagerAgent), client.ForceOwnership)
	}
	result := resultOf(err)
	a.metrics.writes.WithLabelValues("impvm", string(result)).Inc()
	switch result {
	case written:
		m.latest = fromBody(body)
	case conflict:
		if apierrors.HasStatusCause(err, metav1.CauseTypeFieldManagerConflict) {
			a.logVM(vm).Error("status write met a field owner although it was forced", "error", err)
		}
	case denied, failed:
		a.logVM(vm).Warn("status not written", "error", err)
	}
	return result
}

func resultOf(err error) writeResult {
	switch {
	case err == nil:
		return written
	case apierrors.IsConflict(err):
		return conflict
	case apierrors.IsNotFound(err):
		return gone
	case apierrors.IsInvalid(err), apierrors.IsForbidden(err):
		return denied
	default:
		return failed
	}
}

// fromBody reads the API server's answer, which Apply has put into the body; nil when it cannot be read, which costs a conflict.
func fromBody(body *unstructured.Unstructured) *v1alpha1.ImpVM {
	out := &v1alpha1.ImpVM{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(body.Object, out); err != nil || out.UID == "" {
		return nil
	}
	return out
}

// tell makes events and log lines of a change that is now on the object.
func (a *Agent) tell(before, after *v1alpha1.ImpVM, m *memory, st *machine.Status) {
	for _, e := range happenings(before, after, m.trouble) {
		a.events.Record(e)
	}
	if find(after, v1alpha1.ConditionReady).Status == metav1.ConditionTrue {
		m.trouble = false
	}
	log := a.logVM(after)
	ready := find(after, v1alpha1.ConditionReady)
	log.Info("status written", "phase", after.Status.Phase, "ready", ready.Status, "reason", ready.Reason,
		"incarnation", after.Status.Incarnation)
	if message, ok := couldNotStart(before, after); ok {
		log.Error("VMM could not be started", "step", "vmm", "error", message,
			"FC_BIN", a.opts.FCBin, "KERNEL_PATH", a.opts.KernelPath)
	}
	if st != nil && st.LastExit != nil && !exitKnown(before, m, st.LastExit) {
		m.loggedExit = st.LastExit.Incarnation
		a.logExit(after, st.LastExit)
	}
}

// exitKnown says that the object, or this process, has told of the exit before.
func exitKnown(before *v1alpha1.ImpVM, m *memory, e *machine.Exit) bool {
	if m.loggedExit >= e.Incarnation {
		return true
	}
	s := before.Status
	if s.ReportedAssignment != s.Assignment {
		return false
	}
	return isFinished(before) || s.Incarnation > e.Incarnation || (s.LastFailure != nil && s.LastFailure.Incarnation >= e.Incarnation)
}

// The guest's last words on the serial console, which the runtime found there with this boot's nonce.
const (
	markerSuccess = "IMP_SUCCESS"
	markerFailed  = "IMP_FAILED"
)

// logExit is the line that runbooks look for.
func (a *Agent) logExit(vm *v1alpha1.ImpVM, e *machine.Exit) {
	keys := []any{"incarnation", e.Incarnation, "verdict", e.Verdict, "message", translate.Message(e.Message)}
	if e.Code != nil {
		keys = append(keys, "exitCode", *e.Code)
	}
	if e.Marker {
		marker := markerFailed
		if e.Verdict == machine.Succeeded || (e.Code != nil && *e.Code == 0) {
			marker = markerSuccess
		}
		keys = append(keys, "marker", marker)
	}
	// What the guest printed is its tenant's: it is on the object, not in a log that whoever runs the node reads.
	a.logVM(vm).Info("workload ended", keys...)
}

// Intervals of the event about a pull that lasts.
const (
	pullFirst = 2 * time.Second
	pullAgain = 10 * time.Second
)

// tellPull makes an event of a pull that takes its time; the status holds no progress, which would be a write a second.
func (a *Agent) tellPull(vm *v1alpha1.ImpVM, st *machine.Status, m *memory, now time.Time) {
	if st == nil || st.Progress == "" {
		m.pullingSince, m.pullingTold = time.Time{}, time.Time{}
		return
	}
	if m.pullingSince.IsZero() {
		m.pullingSince = now
	}
	if now.Sub(m.pullingSince) < pullFirst || now.Sub(m.pullingTold) < pullAgain {
		return
	}
	m.pullingTold = now
	a.events.Record(event.VM(vm, corev1.EventTypeNormal, reasonPulling, "image "+vm.Spec.Image+": "+translate.Message(st.Progress)))
	a.logVM(vm).Info("image is being pulled", "step", "disk", "progress", st.Progress)
}

// tellReset makes an event, once for each value, of a reset that cannot be acted on.
func (a *Agent) tellReset(vm *v1alpha1.ImpVM, m *memory) {
	value := vm.Annotations[v1alpha1.AnnotationRestartReset]
	_, problem := translate.Reset(vm)
	if problem == "" || m.resetTold == value {
		return
	}
	m.resetTold = value
	e := event.VM(vm, corev1.EventTypeWarning, v1alpha1.ReasonInvalidSpec, problem)
	e.Step = v1alpha1.AnnotationRestartReset
	a.events.Record(e)
	a.logVM(vm).Warn("reset is not acted on", "reason", v1alpha1.ReasonInvalidSpec, "message", problem)
}
