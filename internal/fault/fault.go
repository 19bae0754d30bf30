// Package fault is the error that carries the reason a user will read: condition, event and log line of
// one failure agree because all three are made of the same value, born where the failure happened.
package fault

import (
	"errors"
	"fmt"
)

// Reason is the CamelCase word that appears as the reason of a condition and of an event. The values here are
// the product's vocabulary; names in docs/contract.md are fixed, further ones are added beside them.
type Reason string

// Reasons of failure. A comment says which stage gives birth to it.
const (
	ImagePullFailed    Reason = "ImagePullFailed"    // disk: the registry, its answer, or the image's content
	DiskFailed         Reason = "DiskFailed"         // disk: building or making a disk on this node (full, I/O error)
	NetworkSetupFailed Reason = "NetworkSetupFailed" // network
	RuntimeStartFailed Reason = "RuntimeStartFailed" // vmm: the VMM, its kernel, or a guest that never answered
	NoCapacity         Reason = "NoCapacity"         // the node's budget is spent; the VM is to be placed elsewhere
	InvalidSpec        Reason = "InvalidSpec"        // the object cannot work as it is written
	WaitingForSecrets  Reason = "WaitingForSecrets"  // credentials live in memory only and were lost with a restart
	StaleAssignment    Reason = "StaleAssignment"    // an order older than one already carried out
	NotFound           Reason = "NotFound"           // no such VM here
	Unavailable        Reason = "Unavailable"        // the other side is not there; try again
	Internal           Reason = "Internal"           // a defect of ours
)

// Error is a failure with its reason and the stage it happened in.
type Error struct {
	Reason Reason
	// Stage is what was being done, as a gerund phrase in lower case: "pulling image", "starting VMM".
	Stage string
	// Permanent says that trying again without a change of the spec cannot help. Everything else is retried with backoff.
	Permanent bool
	Err       error
}

func (e *Error) Error() string { return fmt.Sprintf("%s: %v", e.Stage, e.Err) }

// Unwrap gives errors.Is and errors.As access to the cause.
func (e *Error) Unwrap() error { return e.Err }

// New wraps err with the reason a user will read. A nil err gives nil. An err that already carries a reason keeps
// the innermost one: who is nearest to the failure knows best. Of one that names the same stage already nothing is said twice.
func New(reason Reason, stage string, err error) error {
	if err == nil {
		return nil
	}
	if said, ok := err.(*Error); ok && said.Stage == stage { //nolint:errorlint // only the outermost stage would be said twice in a row
		return said
	}
	if inner := (*Error)(nil); errors.As(err, &inner) {
		return &Error{Reason: inner.Reason, Stage: stage, Permanent: inner.Permanent, Err: err}
	}
	return &Error{Reason: reason, Stage: stage, Err: err}
}

// Errorf makes an Error out of a format; %w works.
func Errorf(reason Reason, stage, format string, args ...any) error {
	return New(reason, stage, fmt.Errorf(format, args...))
}

// Permanent marks err, which must carry a reason or gets Internal, as one that no retry cures.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	e := *Of(err)
	e.Permanent = true
	return &e
}

// Of gives the outermost Error in err's chain, or err as an Internal one. Of(nil) is nil.
func Of(err error) *Error {
	if err == nil {
		return nil
	}
	if e := (*Error)(nil); errors.As(err, &e) {
		return e
	}
	return &Error{Reason: Internal, Stage: "working", Err: err}
}

// Is says whether err carries the reason.
func Is(err error, reason Reason) bool {
	e := (*Error)(nil)
	return errors.As(err, &e) && e.Reason == reason
}
