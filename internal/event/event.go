// Package event writes Kubernetes events: what happened to an object, for people and for the runbooks. They are written to
// core/v1 with every time field set, because what is written through events.k8s.io has no lastTimestamp and so sorts first
// in `kubectl get events --sort-by=.lastTimestamp`; they are readable through both.
package event

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"unicode/utf8"

	"imp.dev/imp/api/v1alpha1"

	corev1 "k8s.io/api/core/v1"
)

// Event is one thing that happened. Events that agree in object UID, Assignment, Incarnation, Reason and Step are one
// object with a count, whoever writes them and however often the writer was restarted.
type Event struct {
	// Object it happened to. APIVersion, Kind, Name, UID and, for a namespaced one, Namespace must be set.
	Object corev1.ObjectReference
	// Type is corev1.EventTypeNormal or corev1.EventTypeWarning.
	Type string
	// Reason in CamelCase, as in the condition that tells the same.
	Reason string
	// Action is what the writer was doing, in CamelCase: Placing, Pulling, Starting. "" is the Reason.
	Action string
	// Message of at most MaxMessage bytes; a longer one is cut.
	Message string
	// Assignment and Incarnation the event belongs to; 0 where there is none.
	Assignment, Incarnation int64
	// Step tells apart events of one reason that are no repeats of each other. May be "".
	Step string
}

// MaxMessage in bytes. The API server refuses more.
const MaxMessage = 1024

// Recorder takes events. Record neither blocks nor fails: an event that cannot be written is logged.
type Recorder interface {
	Record(Event)
}

// VM starts an event about vm of its present assignment and incarnation.
func VM(vm *v1alpha1.ImpVM, eventType, reason, message string) Event {
	return Event{
		Object: corev1.ObjectReference{
			APIVersion: v1alpha1.GroupVersion.String(), Kind: "ImpVM",
			Namespace: vm.Namespace, Name: vm.Name, UID: vm.UID, ResourceVersion: vm.ResourceVersion,
		},
		Type: eventType, Reason: reason, Message: message,
		Assignment: vm.Status.Assignment, Incarnation: vm.Status.Incarnation,
	}
}

// Node starts an event about an ImpNode.
func Node(node *v1alpha1.ImpNode, eventType, reason, message string) Event {
	return Event{
		Object: corev1.ObjectReference{
			APIVersion: v1alpha1.GroupVersion.String(), Kind: "ImpNode",
			Name: node.Name, UID: node.UID, ResourceVersion: node.ResourceVersion,
		},
		Type: eventType, Reason: reason, Message: message,
	}
}

// Name of the event's object: the name of the object it is about, cut if need be, and a hash of what makes it one event.
func (e Event) Name() string {
	h := sha256.New()
	fmt.Fprintf(h, "%s\x00%d\x00%d\x00%s\x00%s", e.Object.UID, e.Assignment, e.Incarnation, e.Reason, e.Step)
	const hashed, longest = 16, 253
	name := e.Object.Name
	if len(name) > longest-hashed-1 {
		name = strings.TrimRight(name[:longest-hashed-1], "-.")
	}
	return name + "." + hex.EncodeToString(h.Sum(nil))[:hashed]
}

// namespace of the event's object: events about cluster-scoped objects live in default, where the API server wants them.
func (e Event) namespace() string {
	if e.Object.Namespace == "" {
		return corev1.NamespaceDefault
	}
	return e.Object.Namespace
}

// bounded cuts s to at most MaxMessage bytes of valid UTF-8.
func bounded(s string) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= MaxMessage {
		return s
	}
	const mark = "…"
	cut := MaxMessage - len(mark)
	for !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut] + mark
}
