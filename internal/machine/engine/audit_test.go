package engine

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/plan"
	"imp.dev/imp/internal/network"
	networkfake "imp.dev/imp/internal/network/fake"
	"imp.dev/imp/internal/vmm"
)

func TestWhatIsNobodysDependsOnWhatItsVMMayHave(t *testing.T) {
	at := time.Now()
	boot := plan.Record{Boot: &plan.Boot{Run: 3}, Disk: &plan.Disk{}, NetworkUsed: true}
	halted := plan.Record{Disk: &plan.Disk{}}
	finished := plan.Record{Final: &machine.Exit{}}
	removed := plan.Record{RemovedAt: &at}
	run, tap, disk := thing{kind: vmm.FoundProcess}, thing{kind: kindTAP}, thing{kind: kindDisk}
	dir, present, old := thing{kind: kindDirectory}, thing{kind: kindSocket, name: "/run/3"}, thing{kind: kindSocket, name: "/run/2"}
	for sentence, tc := range map[string]struct {
		o    owner
		want []thing // that are nobody's
	}{
		"everything without a record":                          {owner{}, []thing{run, tap, disk, dir, present, old}},
		"nothing of a VM whose record cannot be read":          {owner{unreadable: true}, nil},
		"nothing of a VM that is being worked on":              {owner{known: true, record: removed}, nil},
		"sockets of earlier runs of a VM that runs":            {owner{known: true, resting: true, record: boot, runDir: "/run/3"}, []thing{old}},
		"processes and sockets of a VM that is stopped":        {owner{known: true, resting: true, attached: true, record: halted}, []thing{run, present, old}},
		"everything but the console's directory once finished": {owner{known: true, resting: true, record: finished}, []thing{run, tap, disk, present, old}},
		"everything of a VM that was removed":                  {owner{known: true, resting: true, record: removed}, []thing{run, tap, disk, dir, present, old}},
	} {
		t.Run(sentence, func(t *testing.T) {
			var got []thing
			for _, x := range []thing{run, tap, disk, dir, present, old} {
				if unowned(x, tc.o) {
					got = append(got, x)
				}
			}
			if !slices.Equal(got, tc.want) {
				t.Errorf("got %v, want %v", got, tc.want)
			}
		})
	}
}

// strays is a driver with runs that nobody started. Destroy waits for gate, if there is one, and fails with err.
type strays struct {
	vmm.Driver
	mu    sync.Mutex
	runs  map[string]bool
	err   error
	gate  chan struct{}
	began chan string
}

func (d *strays) Name() string                 { return "fake" }
func (d *strays) OverheadMiB(int, int64) int64 { return 1 }
func (d *strays) set(id string, there bool)    { d.mu.Lock(); defer d.mu.Unlock(); d.runs[id] = there }
func (d *strays) fail(err error)               { d.mu.Lock(); defer d.mu.Unlock(); d.err = err }
func (d *strays) Runs(context.Context) ([]vmm.Found, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []vmm.Found
	for id, there := range d.runs {
		if there {
			out = append(out, vmm.Found{Cgroup: id, Kind: vmm.FoundCgroup, Name: "/imp/x/" + id}, vmm.Found{Cgroup: id, Kind: vmm.FoundProcess, Name: "pid 1 of " + id})
		}
	}
	return out, nil
}

func (d *strays) Destroy(ctx context.Context, c vmm.Config, _ vmm.Handle) error {
	if d.gate != nil {
		d.began <- c.Cgroup
		select {
		case <-d.gate:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err == nil {
		d.runs[c.Cgroup] = false
	}
	return d.err
}

// asked is an image store that says for whom it was asked, and has nothing.
type asked struct {
	image.Store
	of chan string
}

func (a asked) Ensure(_ context.Context, r image.Request, _ func(image.Progress)) (image.Base, image.Timing, error) {
	a.of <- filepath.Base(filepath.Dir(r.LinkTo))
	return image.Base{}, image.Timing{}, fault.Permanent(fault.Errorf(fault.ImagePullFailed, "pulling image", "not in this test"))
}

func (asked) Sweep(context.Context) error { return nil }

func auditSpec(id string) machine.Spec {
	return machine.Spec{
		ID: id, Namespace: "ns", Name: id, Assignment: 1, Generation: 1, Lifecycle: machine.Ephemeral,
		Image: machine.Image{Reference: "registry.test/app:1", Policy: image.IfNotPresent}, VCPU: 1, MemoryMiB: 128, DiskGiB: 1,
	}
}

type auditRig struct {
	*testing.T
	engine  *Engine
	clock   *clocktesting.FakeClock
	driver  *strays
	network *networkfake.Network
	images  asked
}

// newAuditRig is an engine that audits when it is told to.
func newAuditRig(t *testing.T) *auditRig {
	t.Helper()
	r := newTrashRig(t, nil)
	e := r.engine
	net, err := networkfake.New(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	rig := &auditRig{T: t, engine: e, clock: r.clock, driver: &strays{runs: map[string]bool{}}, network: net, images: asked{of: make(chan string, 10)}}
	e.workers, e.reaping, e.unreadable = map[string]*worker{}, map[string]chan struct{}{}, map[string]string{}
	e.config = Config{Driver: rig.driver, Network: net, Images: rig.images, Budget: plan.Need{VCPU: 100, MemoryMiB: 1 << 20, DiskGiB: 1 << 10}, Limits: plan.DefaultLimits()}
	e.life, e.end = context.WithCancel(context.Background())
	if err := errors.Join(os.RemoveAll(e.paths.dir("a")), os.MkdirAll(e.paths.run, 0o700)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		e.end()
		e.group.Wait()
	})
	return rig
}

// audit gives kind and state of what one audit finds.
func (r *auditRig) audit(now bool) []string {
	r.Helper()
	found, err := r.engine.Audit(r.Context(), now)
	if err != nil {
		r.Fatal(err)
	}
	var out []string
	for _, f := range found {
		state := "seen"
		if f.Repaired {
			state = "repaired"
		} else if f.Problem != "" {
			state = f.Problem
		}
		out = append(out, f.Kind+" "+f.ID+": "+state)
	}
	return out
}

func (r *auditRig) wants(got []string, want ...string) {
	r.Helper()
	if !slices.Equal(got, want) {
		r.Errorf("found %q, want %q", got, want)
	}
}

func TestAnOrphanIsRemovedAfterItsGraceAndCounted(t *testing.T) {
	r := newAuditRig(t)
	r.driver.set("x", true)
	r.network.Find(network.Finding{Kind: "namespace", Name: "imp-1", Orphan: true})
	r.wants(r.audit(false), "process x: seen", "cgroup x: seen", "namespace : seen")
	if wait := r.engine.untilAudit(); wait != auditGrace {
		t.Errorf("the next audit is due in %s, want %s", wait, auditGrace)
	}
	left, removed := r.engine.Audited()
	if left["process"] != 1 || left["cgroup"] != 1 || left["namespace"] != 1 || len(removed) != 0 {
		t.Errorf("left %v, removed %v", left, removed)
	}
	r.clock.Step(auditGrace - time.Second)
	r.wants(r.audit(false), "process x: seen", "cgroup x: seen", "namespace : seen")
	r.clock.Step(time.Second)
	r.wants(r.audit(false), "process x: repaired", "cgroup x: repaired", "namespace : seen")
	r.wants(r.audit(true), "namespace : repaired")
	left, removed = r.engine.Audited()
	if len(left) != 0 || removed["process"] != 1 || removed["cgroup"] != 1 || removed["namespace"] != 1 {
		t.Errorf("left %v, removed %v", left, removed)
	}
	if wait := r.engine.untilAudit(); wait != auditPeriod {
		t.Errorf("with nothing left the next audit is due in %s", wait)
	}
}

func TestWhatGoesByItselfWithinItsGraceStartsAnewWhenItComesBack(t *testing.T) {
	r := newAuditRig(t)
	r.driver.set("x", true)
	r.audit(false)
	r.driver.set("x", false)
	r.clock.Step(auditGrace)
	r.wants(r.audit(false))
	r.driver.set("x", true)
	r.wants(r.audit(false), "process x: seen", "cgroup x: seen")
}

func TestAnOrphanThatCannotBeRemovedIsToldAndTriedAgain(t *testing.T) {
	r := newAuditRig(t)
	r.driver.set("x", true)
	r.driver.fail(errors.New("device or resource busy"))
	r.wants(r.audit(true), "process x: device or resource busy", "cgroup x: device or resource busy")
	if left, _ := r.engine.Audited(); left["cgroup"] != 1 {
		t.Errorf("left %v", left)
	}
	r.driver.fail(nil)
	r.clock.Step(auditPeriod)
	r.wants(r.audit(false), "process x: repaired", "cgroup x: repaired")
}

func TestWhileAnOrphanIsRemovedAllOtherVMsGoOn(t *testing.T) {
	r := newAuditRig(t)
	r.driver.gate, r.driver.began = make(chan struct{}), make(chan string, 1)
	same, other := auditSpec("same"), auditSpec("other")
	r.driver.set(same.ID, true)
	done := make(chan []string)
	go func() { done <- r.audit(true) }()
	<-r.driver.began
	for _, s := range []machine.Spec{other, same} {
		if _, err := r.engine.Ensure(t.Context(), s); err != nil {
			t.Fatalf("a VM is refused while an orphan is removed: %v", err)
		}
	}
	if id := <-r.images.of; id != other.ID {
		t.Errorf("VM %s was worked on, and its orphan is still being removed", id)
	}
	close(r.driver.gate)
	r.wants(<-done, "process "+same.ID+": repaired", "cgroup "+same.ID+": repaired")
	if id := <-r.images.of; id != same.ID {
		t.Errorf("then VM %s was worked on", id)
	}
}

func TestNothingIsTakenFromAVMThatWasAcceptedSinceTheLook(t *testing.T) {
	r := newAuditRig(t)
	s := auditSpec("x")
	r.driver.set(s.ID, true)
	seen := thing{vmm.FoundProcess, s.ID, "pid 1 of " + s.ID}
	w := newWorker(r.engine, s.ID, plan.New(s, r.clock.Now()))
	w.step = plan.Step{Kind: plan.StartVMM}
	r.engine.workers[s.ID] = w
	if err := r.engine.reap(t.Context(), seen); !fault.Is(err, fault.NotFound) || !r.driver.runs[s.ID] {
		t.Errorf("the reaper says %v", err)
	}
}

func TestOfAVMWithAnUnreadableRecordNothingIsTouchedAndThatIsTold(t *testing.T) {
	r := newAuditRig(t)
	r.engine.unreadable["x"] = "its record was set aside as x.aside"
	r.driver.set("x", true)
	found := r.audit(true)
	if len(found) != 1 || !strings.HasPrefix(found[0], "record x: its record was set aside") || !strings.Contains(found[0], "remove the VM") || !r.driver.runs["x"] {
		t.Errorf("found %q", found)
	}
}

func TestWhatARunningVMMissesIsToldAndNotInvented(t *testing.T) {
	r := newAuditRig(t)
	s := auditSpec("x")
	s.Interfaces = []network.Interface{{Name: "eth0", Network: "n"}}
	record := plan.New(s, r.clock.Now())
	record.NetworkUsed, record.Disk = true, &plan.Disk{}
	record.Boot = &plan.Boot{Run: 4, Spec: s, Handle: &vmm.Handle{}}
	w := newWorker(r.engine, s.ID, record)
	w.step, w.observed = plan.Step{Kind: plan.Watch}, plan.Alive
	r.engine.workers[s.ID] = w
	found, err := r.engine.Audit(t.Context(), true)
	if err != nil || len(found) != 3 {
		t.Fatalf("%+v, %v", found, err)
	}
	text := ""
	for _, f := range found {
		if f.Kind != "record" || f.ID != s.ID || f.Name != "run 4" || f.Repaired {
			t.Errorf("%+v", f)
		}
		text += f.Problem + "\n"
	}
	for _, word := range []string{"limits are not in force", "attached to no network", "private disk"} {
		if !strings.Contains(text, word) {
			t.Errorf("%q is not told: %s", word, text)
		}
	}
	if len(r.driver.runs) != 0 {
		t.Errorf("something was made: %v", r.driver.runs)
	}
}
