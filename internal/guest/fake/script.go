// Package fake is a guest that runs nothing and does what a script tells it, over the real protocol: for tests of everything
// above a guest, and for the fake VMM, whose small process serves it on a socket.
package fake

import (
	guestv1 "imp.dev/imp/api/guest/v1"
)

// Script is a guest's behaviour. The zero value is a well-behaved guest whose workload runs until it is stopped and then ends
// by SIGTERM (143). Times are milliseconds.
type Script struct {
	// Silent: connections are accepted and never answered.
	Silent bool `json:"silent,omitempty"`
	// BootMillis pass before the guest answers at all.
	BootMillis int64 `json:"bootMillis,omitempty"`
	// ConfigureMillis is how long Configure takes; ConfigureError, if set, is how it fails.
	ConfigureMillis int64  `json:"configureMillis,omitempty"`
	ConfigureError  string `json:"configureError,omitempty"`
	// StartError refuses Start.
	StartError string `json:"startError,omitempty"`
	// Output is what the workload prints at once after its start.
	Output string `json:"output,omitempty"`
	// Exit is how the workload ends by itself; nil: it does not.
	Exit *Exit `json:"exit,omitempty"`
	// StopCode is the exit code after Stop; 0 means 143, a negative value means 0.
	StopCode int `json:"stopCode,omitempty"`
	// IgnoreStop: the stop signal has no effect, so that the workload is killed after the grace (137).
	IgnoreStop bool `json:"ignoreStop,omitempty"`
	// IgnoreKill: not even the end of the grace ends the workload: a guest that hangs.
	IgnoreKill bool `json:"ignoreKill,omitempty"`
	// IgnoreAcknowledge: the machine does not go off after Acknowledge.
	IgnoreAcknowledge bool `json:"ignoreAcknowledge,omitempty"`
	// HangAtStart: the guest hangs at Start, before its workload is run. HangAfterMillis after the workload's start it hangs; 0 never. A
	// guest that hangs takes connections and answers nothing, and its workload does not end.
	HangAtStart     bool  `json:"hangAtStart,omitempty"`
	HangAfterMillis int64 `json:"hangAfterMillis,omitempty"`
	// NoMarker: nothing is printed at the end.
	NoMarker bool `json:"noMarker,omitempty"`
	// Probes are the answers to Probe, in order, the last one repeated; empty: healthy, status 200.
	Probes []guestv1.ProbeResult `json:"probes,omitempty"`
	// DropEveryMillis breaks the connection so often; 0 never.
	DropEveryMillis int64 `json:"dropEveryMillis,omitempty"`
}

// HangWords are on the console of a guest that hangs.
const HangWords = "rcu: INFO: rcu_sched self-detected stall on CPU"

// Exit of the scripted workload.
type Exit struct {
	AfterMillis int64  `json:"afterMillis,omitempty"`
	Code        int    `json:"code,omitempty"`
	Message     string `json:"message,omitempty"`
	OOMKilled   bool   `json:"oomKilled,omitempty"`
}
