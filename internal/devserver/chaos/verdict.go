package chaos

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"imp.dev/imp/internal/devserver/apicount"

	"k8s.io/client-go/rest"
)

// Verdict of a run.
type Verdict struct {
	Shape Shape
	VMM   string
	// Actions that were done, with how often; what had nothing to act on is counted apart.
	Actions map[string]int
	// Checks is how often each invariant was looked at.
	Checks     map[Invariant]int
	Violations []Violation
	// VMs is how many there ever were; Once how many workloads of one-shots were started, each once if all is well.
	VMs, Once int
	// Slowest VM to become what was wanted after the last fault; Removed is how long the removal of all took. WorstLie is how long a VM
	// was said to be Ready without its process, while nothing kept its node from knowing.
	Slowest   time.Duration
	SlowestVM string
	Removed   time.Duration
	WorstLie  time.Duration
	// Writes to the API server, leases left out, by kind: during the faults, and at rest.
	Writes, Rest         map[string]float64
	WritesOver, RestOver time.Duration
	// Logs is where the programs' logs are, if they were kept.
	Logs string
}

// Print writes it for a person. It ends with one line that says whether the run has passed.
func (v Verdict) Print(out io.Writer) {
	fmt.Fprintf(out, "\nchaos: seed %d, %s of faults, %d nodes, %d VMs at a time (%d in all), driver %s\n\n", v.Shape.Seed, v.Shape.Duration,
		len(v.Shape.Nodes), v.Shape.VMs, v.VMs, v.VMM)
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "done\ttimes")
	for _, action := range slices.Sorted(maps.Keys(v.Actions)) {
		fmt.Fprintf(table, "%s\t%d\n", action, v.Actions[action])
	}
	fmt.Fprintln(table, "\ninvariant\tchecked\tviolated")
	for _, i := range invariants() {
		n := 0
		for _, violation := range v.Violations {
			if violation.Invariant == i {
				n++
			}
		}
		fmt.Fprintf(table, "%s\t%d\t%d\n", i, v.Checks[i], n)
	}
	_ = table.Flush()
	fmt.Fprintf(out, "\nslowest to become what was wanted: %s (%s)\nall removed within %s; %d one-shots were started\n",
		v.Slowest.Round(time.Millisecond), v.SlowestVM, v.Removed.Round(time.Millisecond), v.Once)
	fmt.Fprintf(out, "longest Ready without a process, of nodes that were let alone for %s: %s (bound %s)\n", settled, v.WorstLie.Round(time.Millisecond), LieBound)
	printWrites(out, "during the faults", v.Writes, v.WritesOver)
	printWrites(out, "at rest", v.Rest, v.RestOver)
	for _, violation := range v.Violations {
		fmt.Fprintf(out, "\nVIOLATED after %.1f s: %s\n  %s\n", violation.After.Seconds(), violation.Invariant, violation.What)
	}
	if v.Logs != "" {
		fmt.Fprintf(out, "\nlogs: %s\n", v.Logs)
	}
	if len(v.Violations) == 0 {
		fmt.Fprintf(out, "\nPASSED\n")
		return
	}
	fmt.Fprintf(out, "\nFAILED: %d violations. The same schedule again: imp-dev chaos --seed %d --duration %s --vms %d --nodes %d --vmm %s%s\n", len(v.Violations),
		v.Shape.Seed, v.Shape.Duration, v.Shape.VMs, len(v.Shape.Nodes), v.VMM, v.kinds())
}

// kinds is the flag that picked them.
func (v Verdict) kinds() string {
	if len(v.Shape.Kinds) == 0 {
		return ""
	}
	var names []string
	for _, k := range v.Shape.Kinds {
		names = append(names, string(k))
	}
	return " --kinds " + strings.Join(names, ",")
}

func printWrites(out io.Writer, when string, counts map[string]float64, over time.Duration) {
	if over == 0 {
		return
	}
	var parts []string
	sum := 0.0
	for _, kind := range slices.Sorted(maps.Keys(counts)) {
		sum += counts[kind]
		parts = append(parts, fmt.Sprintf("%s %.0f", kind, counts[kind]/over.Minutes()))
	}
	fmt.Fprintf(out, "API writes a minute %s, beside leases: %.0f (%s)\n", when, sum/over.Minutes(), strings.Join(parts, ", "))
}

// conclude gathers the verdict.
func (r *runner) conclude(dir string) {
	o := r.observer
	o.mu.Lock()
	defer o.mu.Unlock()
	v := &r.verdict
	v.Shape, v.VMM, v.Actions, v.Checks, v.Violations = r.schedule.Shape, r.options.Server.VMM, r.tally.all(), o.checks, o.violations
	v.VMs, v.WorstLie = len(o.vms), o.worstLie
	for _, h := range o.vms {
		v.Once += h.starts
	}
	if len(v.Violations) > 0 || r.options.KeepLogs {
		v.Logs = dir + "/log"
	}
}

// tally counts by name.
type tally struct {
	mu sync.Mutex
	by map[string]int
}

func newTally() *tally { return &tally{by: map[string]int{}} }

func (t *tally) add(name string) {
	t.mu.Lock()
	t.by[name]++
	t.mu.Unlock()
}

func (t *tally) all() map[string]int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return maps.Clone(t.by)
}

// writes adds up the API server's count over its restarts, each of which begins it anew.
type writes struct {
	cfg *rest.Config

	mu   sync.Mutex
	last map[string]float64
	sum  map[string]float64
}

func newWrites(cfg *rest.Config) *writes { return &writes{cfg: cfg, sum: map[string]float64{}} }

// sample reads the count; while the API server is away it stays as it is.
func (w *writes) sample(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	w.mu.Lock()
	defer w.mu.Unlock()
	now, err := apicount.Writes(ctx, w.cfg)
	if err != nil {
		return
	}
	for kind, n := range now {
		if w.last != nil {
			grown := n - w.last[kind]
			if grown < 0 {
				grown = n
			}
			w.sum[kind] += grown
		}
	}
	w.last = now
}

// since gives what was added to an earlier answer (nil: all), without leases and without nothing.
func (w *writes) since(before map[string]float64) map[string]float64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	added := map[string]float64{}
	for kind, n := range w.sum {
		if n -= before[kind]; n > 0 && !strings.Contains(kind, " leases") {
			added[kind] = n
		}
	}
	return added
}
