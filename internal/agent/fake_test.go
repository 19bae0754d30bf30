package agent

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/network"
)

// fakeRuntime is a machine.Service that holds what it is told and does nothing by itself: the test plays the node by set.
type fakeRuntime struct {
	mu       sync.Mutex
	vms      map[string]machine.Status
	specs    map[string]machine.Spec
	calls    []string // "ensure UID", "remove UID"
	graces   []time.Duration
	keeps    []bool // Removal.KeepDisk of each
	revision int64
	watchers map[chan machine.Update]bool
	// away makes every call fail and ends every Watch.
	away bool
	// refuse is Ensure's answer where it is not nil.
	refuse error
	// networks that were set; refuseNetwork is SetNetwork's answer where it is not nil, networkProblem what is wrong with each.
	networks       map[string]network.Spec
	refuseNetwork  error
	networkProblem string
	// removeAtOnce lets Remove answer with Removed; else the VM stays Removing until the test says more.
	removeAtOnce bool
	info         machine.Info
}

func newFakeRuntime() *fakeRuntime {
	return &fakeRuntime{
		vms: map[string]machine.Status{}, specs: map[string]machine.Spec{}, watchers: map[chan machine.Update]bool{},
		networks:     map[string]network.Spec{},
		removeAtOnce: true,
		info: machine.Info{
			Version: "v0", Instance: "i1", BootID: "boot-1", Driver: "fake", Usable: true, Architecture: "amd64",
			BudgetVCPU: 8, BudgetMemoryMiB: 8192, BudgetDiskGiB: 100, OverheadMiB: 16,
			Network: network.Host{VTEP: "192.0.2.1", MTU: 1500, Port: network.DefaultPort, Addresses: []string{"192.0.2.1"}},
		},
	}
}

var errAway = fault.Errorf(fault.Unavailable, "asking runtime", "connection refused")

func (r *fakeRuntime) Info(context.Context) (machine.Info, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.away {
		return machine.Info{}, errAway
	}
	return r.info, nil
}

func (r *fakeRuntime) Ensure(_ context.Context, spec machine.Spec) (machine.Status, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.away {
		return machine.Status{}, errAway
	}
	r.calls = append(r.calls, "ensure "+spec.ID)
	if err := machine.Validate(spec); err != nil {
		return machine.Status{}, err
	}
	if r.refuse != nil {
		return machine.Status{}, r.refuse
	}
	known, ok := r.vms[spec.ID]
	if ok && (known.Assignment > spec.Assignment || (known.Assignment == spec.Assignment && known.State == machine.Removed)) {
		return known, fault.Errorf(fault.StaleAssignment, "ordering VM", "assignment %d is over", spec.Assignment)
	}
	r.specs[spec.ID] = spec
	if !ok || known.Assignment < spec.Assignment {
		known = machine.Status{
			ID: spec.ID, Namespace: spec.Namespace, Name: spec.Name, Assignment: spec.Assignment, State: machine.Pending,
		}
	}
	known.Generation, known.Cluster = spec.Generation, spec.Cluster
	return r.store(known), nil
}

func (r *fakeRuntime) Remove(_ context.Context, ref machine.Ref, how machine.Removal) (machine.Status, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.away {
		return machine.Status{}, errAway
	}
	r.calls = append(r.calls, "remove "+ref.ID)
	r.graces = append(r.graces, how.Grace)
	r.keeps = append(r.keeps, how.KeepDisk)
	st, ok := r.vms[ref.ID]
	if !ok {
		return machine.Status{ID: ref.ID, Assignment: ref.Assignment, State: machine.Removed}, nil
	}
	if st.State == machine.Removed {
		return st, nil
	}
	st.State = machine.Removing
	if r.removeAtOnce {
		st.State = machine.Removed
	}
	return r.store(st), nil
}

func (r *fakeRuntime) List(context.Context) ([]machine.Status, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []machine.Status
	for _, st := range r.vms {
		out = append(out, st)
	}
	return out, nil
}

func (r *fakeRuntime) Watch(ctx context.Context, each func(machine.Update) error) error {
	updates := make(chan machine.Update, 1024)
	r.mu.Lock()
	if r.away {
		r.mu.Unlock()
		return errAway
	}
	for _, st := range r.vms {
		updates <- machine.Update{Status: &st}
	}
	updates <- machine.Update{Synced: true}
	r.watchers[updates] = true
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.watchers, updates)
	}()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case u, ok := <-updates:
			if !ok {
				return errAway
			}
			if err := each(u); err != nil {
				return err
			}
		}
	}
}

func (r *fakeRuntime) SetNetwork(_ context.Context, spec network.Spec) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.away {
		return errAway
	}
	r.calls = append(r.calls, "set "+spec.ID)
	if err := machine.ValidateNetwork(spec); err != nil {
		return err
	}
	if r.refuseNetwork != nil {
		return r.refuseNetwork
	}
	r.networks[spec.ID] = spec
	return nil
}

func (r *fakeRuntime) ForgetNetwork(_ context.Context, id string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.away {
		return errAway
	}
	r.calls = append(r.calls, "forget "+id)
	if n := r.guestsIn(id); n > 0 {
		return fault.Errorf(fault.NetworkSetupFailed, "forgetting network", "%d VMs are in it", n)
	}
	delete(r.networks, id)
	return nil
}

func (r *fakeRuntime) Networks(context.Context) ([]network.Status, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.away {
		return nil, errAway
	}
	var out []network.Status
	for _, id := range slices.Sorted(maps.Keys(r.networks)) {
		out = append(out, network.Status{ID: id, Guests: r.guestsIn(id), Problem: r.networkProblem})
	}
	return out, nil
}

// network gives what was set last, and whether it is known.
func (r *fakeRuntime) network(id types.UID) (network.Spec, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s, ok := r.networks[string(id)]
	return s, ok
}

// refuseNetworks makes every SetNetwork fail with err until refuseNetworks(nil).
func (r *fakeRuntime) refuseNetworks(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.refuseNetwork = err
}

func (r *fakeRuntime) guestsIn(id string) int {
	n := 0
	for vm, s := range r.specs {
		if r.vms[vm].State != machine.Removed && slices.ContainsFunc(s.Interfaces, func(i network.Interface) bool { return i.Network == id }) {
			n++
		}
	}
	return n
}

func (r *fakeRuntime) Console(context.Context, string, int64, int) (machine.ConsoleChunk, error) {
	return machine.ConsoleChunk{}, fault.Errorf(fault.NotFound, "reading console", "the fake has none")
}

// store keeps st with a new revision and tells the watchers.
func (r *fakeRuntime) store(st machine.Status) machine.Status {
	r.revision++
	st.Revision = r.revision
	r.vms[st.ID] = st
	for w := range r.watchers {
		w <- machine.Update{Status: &st}
	}
	return st
}

// set changes the status of one VM, as the node's own work would.
func (r *fakeRuntime) set(id string, change ...func(*machine.Status)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	st := r.vms[id]
	for _, c := range change {
		c(&st)
	}
	r.store(st)
}

// leave takes the runtime away; comeBack returns it with the same VMs and none of the credentials.
func (r *fakeRuntime) leave() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.away = true
	for w := range r.watchers {
		close(w)
		delete(r.watchers, w)
	}
}

func (r *fakeRuntime) comeBack() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.away = false
	for id, s := range r.specs {
		s.Image.Credentials = nil
		r.specs[id] = s
	}
}

// told counts the calls of one kind for a VM.
func (r *fakeRuntime) told(call string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for _, c := range r.calls {
		if c == call {
			n++
		}
	}
	return n
}

func (r *fakeRuntime) spec(id string) (machine.Spec, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s, ok := r.specs[id]
	return s, ok
}

func (r *fakeRuntime) state(id string) machine.State {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.vms[id].State
}

func (r *fakeRuntime) kept() []bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.keeps)
}

func (r *fakeRuntime) removals() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(r.calls), func(c string) bool { return c[:6] != "remove" })
}

// What the node's work does to a status, one small step each.

func yes() *bool { v := true; return &v }
func no() *bool  { v := false; return &v }

func diskReady(s *machine.Status) {
	s.State = machine.Starting
	s.Disk = machine.Check{OK: yes(), Since: time.Now()}
	s.Network = machine.Check{OK: yes(), Since: time.Now()}
}

func started(s *machine.Status) {
	now := time.Now()
	diskReady(s)
	s.State, s.StartedAt = machine.Running, &now
	s.Incarnation, s.Run = max(s.Incarnation, 1), max(s.Run, 1)
	s.Started = machine.Check{OK: yes(), Since: now}
	s.Timings = machine.Timings{Disk: 5 * time.Millisecond, VMM: 80 * time.Millisecond, Kernel: 300 * time.Millisecond}
	s.ImageDigest = "sha256:" + "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
}

func guestReady(s *machine.Status) { s.GuestReady = machine.Check{OK: yes(), Since: time.Now()} }

func finished(v machine.Verdict, code *int32, message, console string) func(*machine.Status) {
	return func(s *machine.Status) {
		now := time.Now()
		s.State, s.FinishedAt = machine.Finished, &now
		s.Final = &machine.Exit{
			Incarnation: s.Incarnation, Run: s.Run, Verdict: v, At: now, Code: code, Message: message,
			ConsoleTail: []byte(console), Marker: code != nil,
		}
		s.LastExit = s.Final
		s.Counters.Exits++
	}
}

func failing(check func(*machine.Status) *machine.Check, reason fault.Reason, message string) func(*machine.Status) {
	return func(s *machine.Status) {
		next := time.Now().Add(10 * time.Second)
		s.State = machine.Pending
		*check(s) = machine.Check{OK: no(), Reason: reason, Message: message, Since: time.Now()}
		s.History.StartFailures++
		s.History.NextTryAt = &next
	}
}

func disk(s *machine.Status) *machine.Check         { return &s.Disk }
func startedCheck(s *machine.Status) *machine.Check { return &s.Started }
