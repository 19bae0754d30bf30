// Package chaos runs a development server of fake machines for some minutes, does everything to it that goes wrong in the field, by a
// schedule that is a function of one number, and gives a verdict on what must never happen.
package chaos

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// Action is one kind of thing that is done.
type Action string

// Actions on programs. Kill is SIGKILL and a start at the end; Freeze is SIGSTOP and SIGCONT at the end; Restart is SIGTERM and a start.
const (
	Kill    Action = "kill"
	Freeze  Action = "freeze"
	Restart Action = "restart"
	// Refuse and Hang partition a program from the API server, in the one way or the other.
	Refuse Action = "refuse"
	Hang   Action = "hang"
	// Blackout is Hang for all programs at once: the API server is away.
	Blackout Action = "blackout"
	// KillAPI is SIGKILL of kube-apiserver and a start at the end.
	KillAPI Action = "kill-api"
)

// Actions on VMs, of which Target is the slot, a place that one VM after another has.
const (
	KillVMM   Action = "kill-vmm"   // SIGKILL of its process
	FreezeVMM Action = "freeze-vmm" // SIGSTOP of its process, SIGCONT at the end: a hung guest
	Delete    Action = "delete"
	Create    Action = "create"  // where there is none
	Replace   Action = "replace" // delete and create under one name
	Stop      Action = "stop"    // desiredState Stopped
	Start     Action = "start"   // desiredState Running
	Policy    Action = "policy"  // another delay in its restart policy
	Reset     Action = "reset"   // a new value of imp.dev/restart-reset
)

// Actions on nodes, undone at the end.
const (
	Cordon   Action = "cordon"
	Evacuate Action = "evacuate" // the taint imp.dev/evacuate:NoExecute
)

// Step is one action at one time, undone For later where it is one that is undone.
type Step struct {
	At, For time.Duration
	Action  Action
	// Program and Node for programs ("operator", "agent", "runtime"), Node for nodes, Slot for VMs; Slot is -1 for the others.
	Program, Node string
	Slot          int
}

// String is one line of a printed schedule.
func (s Step) String() string {
	target := strings.Trim(s.Program+"/"+s.Node, "/")
	if s.Slot >= 0 {
		target = slotName(s.Slot)
	}
	line := fmt.Sprintf("%9.3fs  %-10s %s", s.At.Seconds(), s.Action, target)
	if s.For > 0 {
		line += fmt.Sprintf("  for %.3fs", s.For.Seconds())
	}
	return strings.TrimRight(line, " ")
}

func slotName(slot int) string { return fmt.Sprintf("vm-%03d", slot) }

// Shape is what a schedule is made for.
type Shape struct {
	Seed     uint64
	Duration time.Duration
	Nodes    []string
	VMs      int
	// Gentle leaves out what a real guest, booting for seconds, would not get over within a short run: programs are disturbed and VMMs killed.
	Gentle bool
	// Kinds that VMs may be of; none means all.
	Kinds []Kind
}

// Schedule is everything that is done, in order of time.
type Schedule struct {
	Shape Shape
	// Kinds of the VMs by slot: one slot's VMs are all of one kind.
	Kinds []Kind
	Steps []Step
}

// String prints it, the same for the same Shape.
func (s Schedule) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d, %s, nodes %s, %d VMs\n", s.Shape.Seed, s.Shape.Duration, strings.Join(s.Shape.Nodes, " "), s.Shape.VMs)
	for i, kind := range s.Kinds {
		fmt.Fprintf(&b, "%s is %s\n", slotName(i), kind)
	}
	for _, step := range s.Steps {
		b.WriteString(step.String() + "\n")
	}
	return b.String()
}

// weighted is how often an action is chosen among those of its stream.
type weighted struct {
	action Action
	weight int
}

func pick(r *rand.Rand, from []weighted) Action {
	sum := 0
	for _, w := range from {
		sum += w.weight
	}
	n := r.IntN(sum)
	for _, w := range from {
		if n -= w.weight; n < 0 {
			return w.action
		}
	}
	panic("unreachable: n was below the sum of weights")
}

// Make computes the schedule. It is a pure function: no state of the run, and no clock, has a part in it.
//
// Three streams run side by side, each with its own source of random numbers, so that one does not shift another: faults of
// programs and nodes, faults of VMMs, and what users do.
func Make(shape Shape) Schedule {
	s := Schedule{Shape: shape}
	kinds := rand.New(rand.NewPCG(shape.Seed, 1)) //nolint:gosec // repeatable, not secret
	for range shape.VMs {
		s.Kinds = append(s.Kinds, pickKind(kinds, shape))
	}
	s.Steps = append(s.Steps, programFaults(shape, rand.New(rand.NewPCG(shape.Seed, 2)))...)  //nolint:gosec // as above
	s.Steps = append(s.Steps, vmFaults(shape, rand.New(rand.NewPCG(shape.Seed, 3)))...)       //nolint:gosec // as above
	s.Steps = append(s.Steps, users(shape, rand.New(rand.NewPCG(shape.Seed, 4)), s.Kinds)...) //nolint:gosec // as above
	slices.SortStableFunc(s.Steps, func(a, b Step) int { return int(a.At - b.At) })
	return s
}

func between(r *rand.Rand, least, most time.Duration) time.Duration {
	return least + time.Duration(r.Int64N(int64(most-least)/int64(time.Millisecond)))*time.Millisecond
}

// programFaults come one after another or two at a time, so that a program is met in the middle of coping with the last one. A fault of
// a program that is still under another is skipped here, not in the run: what is printed is what is done.
func programFaults(shape Shape, r *rand.Rand) (steps []Step) {
	choices := []weighted{{Kill, 8}, {Freeze, 4}, {Restart, 4}, {Refuse, 3}, {Hang, 3}, {Blackout, 1}, {KillAPI, 1}, {Cordon, 1}, {Evacuate, 1}}
	if shape.Gentle {
		choices = []weighted{{Kill, 6}, {Freeze, 2}, {Restart, 3}, {Refuse, 2}, {Hang, 2}}
	}
	busy := map[string]time.Duration{} // until when a target is under a fault
	for at := between(r, time.Second, 3*time.Second); at < shape.Duration; at += between(r, 500*time.Millisecond, 4*time.Second) {
		step := Step{At: at, Action: pick(r, choices), Slot: -1, For: between(r, 200*time.Millisecond, 6*time.Second)}
		switch step.Action {
		case KillAPI, Blackout:
		case Cordon, Evacuate:
			step.Node = shape.Nodes[r.IntN(len(shape.Nodes))]
			step.For += 5 * time.Second
		case Refuse, Hang:
			step.Program, step.Node = program(r, shape.Nodes, "operator", "agent")
		default:
			step.Program, step.Node = program(r, shape.Nodes, "operator", "agent", "runtime")
		}
		target := step.Program + "/" + step.Node
		switch step.Action {
		case Cordon, Evacuate, Refuse, Hang:
			target += "/" + string(step.Action)
		case Blackout, KillAPI:
			target = "api"
		}
		if busy[target] > at {
			continue
		}
		step.For = min(step.For, shape.Duration-at)
		busy[target] = at + step.For + 500*time.Millisecond
		steps = append(steps, step)
	}
	return steps
}

func program(r *rand.Rand, nodes []string, names ...string) (name, node string) {
	name = names[r.IntN(len(names))]
	if name != "operator" {
		node = nodes[r.IntN(len(nodes))]
	}
	return name, node
}

// vmFaults meet each VM once in half a minute or so, whatever their number, but never more than a few a second.
func vmFaults(shape Shape, r *rand.Rand) (steps []Step) {
	pace := max(200*time.Millisecond, 30*time.Second/time.Duration(shape.VMs))
	choices := []weighted{{KillVMM, 9}, {FreezeVMM, 2}}
	if shape.Gentle {
		choices = []weighted{{KillVMM, 1}}
	}
	for at := 3 * time.Second; at < shape.Duration; at += between(r, pace/2, pace*3/2) {
		step := Step{At: at, Action: pick(r, choices), Slot: r.IntN(shape.VMs)}
		if step.Action == FreezeVMM {
			step.For = min(between(r, time.Second, 15*time.Second), shape.Duration-at)
		}
		steps = append(steps, step)
	}
	return steps
}

// users create, delete and edit. What a VM's kind does not allow is not chosen for it.
func users(shape Shape, r *rand.Rand, kinds []Kind) (steps []Step) {
	pace := max(250*time.Millisecond, 20*time.Second/time.Duration(shape.VMs))
	for at := 4 * time.Second; at < shape.Duration; at += between(r, pace/2, pace*3/2) {
		slot := r.IntN(shape.VMs)
		choices := []weighted{{Delete, 2}, {Create, 3}, {Replace, 2}}
		if kinds[slot].persistent() {
			choices = append(choices, weighted{Stop, 3}, weighted{Start, 3}, weighted{Policy, 2})
		}
		if kinds[slot] == ManualReset {
			choices = append(choices, weighted{Reset, 6})
		}
		steps = append(steps, Step{At: at, Action: pick(r, choices), Slot: slot})
	}
	return steps
}
