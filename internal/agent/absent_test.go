package agent

import (
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/machine"
)

func missing(change ...func(*absence)) absence {
	f := absence{node: "n1", st: *at(2, machine.Running), cluster: "c1", lasted: absentLimit}
	f.st.Cluster = "c1"
	for _, c := range change {
		c(&f)
	}
	return f
}

func TestAVMWhoseObjectIsMissingForLongIsStopped(t *testing.T) {
	for name, c := range map[string]struct {
		f    absence
		want fate
	}{
		"after ten minutes":               {missing(), fateAbandon},
		"not before":                      {missing(func(f *absence) { f.lasted-- }), fateKeep},
		"where another has its name":      {missing(func(f *absence) { f.live = placed(func(vm *v1alpha1.ImpVM) { vm.UID = "u2" }) }), fateAbandon},
		"not while its object is there":   {missing(func(f *absence) { f.live = placed() }), fateKeep},
		"not in another cluster":          {missing(func(f *absence) { f.cluster = "c2" }), fateKeep},
		"not in a cluster nobody knows":   {missing(func(f *absence) { f.cluster = "" }), fateKeep},
		"not of a record without cluster": {missing(func(f *absence) { f.st.Cluster = "" }), fateKeep},
		"not while most are missing":      {missing(func(f *absence) { f.suspicious = true }), fateKeep},
		"not once more while it is going": {missing(func(f *absence) { f.st.State = machine.Removing }), fateKeep},
	} {
		t.Run(name, func(t *testing.T) {
			if got, why := decideAbsent(c.f); got != c.want {
				t.Errorf("%s (%s), want %s", got, why, c.want)
			}
		})
	}
}

// After a disaster objects come back one by one, and at some moment most of them are there again: the rest must not be stopped then.
func TestADoubtHasTheAbsenceCountedFromItsEnd(t *testing.T) {
	m, now := &memory{}, time.Unix(1000, 0)
	f := missing()
	m.absentFor(f, now)
	f.suspicious = true
	if got := m.absentFor(f, now.Add(time.Hour)); got != 0 {
		t.Errorf("missing for %s while the list was suspicious", got)
	}
	f.suspicious = false
	if got := m.absentFor(f, now.Add(2*time.Hour)); got != 0 {
		t.Errorf("missing for %s when the doubt has just ended", got)
	}
	if got := m.absentFor(f, now.Add(2*time.Hour+absentLimit)); got != absentLimit {
		t.Errorf("missing for %s, want %s", got, absentLimit)
	}
}

func TestLooksForAnAbsentVMBeginQuicklyOnEachConnection(t *testing.T) {
	m, f := &memory{}, missing(func(f *absence) { f.lasted = 0 })
	m.look(1)
	var first []time.Duration
	for range 8 {
		first = append(first, m.absentWait(f))
	}
	if first[0] != time.Second || first[1] != 2*time.Second || first[7] != absentAgain {
		t.Errorf("waits are %v", first)
	}
	m.look(2)
	if w := m.absentWait(f); w != time.Second {
		t.Errorf("the first wait on a new connection is %s", w)
	}
	f.live = placed()
	for range 8 {
		m.absentWait(f)
	}
	if w := m.absentWait(f); w != unboundAgain {
		t.Errorf("the wait for an object that is about to be placed is %s", w)
	}
}

// No VM is removed without an order on its own object, or the whole of the rule of absence; and no look follows the last one at once.
func TestNoRemovalWithoutAnOrderOrTheWholeRule(t *testing.T) {
	states := []machine.State{machine.Pending, machine.Starting, machine.Running, machine.Stopping, machine.Halted, machine.Finished, machine.Removing, machine.Removed}
	clusters := []string{"", "c1", "c2"}
	rapid.Check(t, func(t *rapid.T) {
		m, now := &memory{}, time.Unix(1000, 0)
		var sure time.Duration // how long the object has been missing without any doubt, as the test counts it
		var last time.Time
		for range rapid.IntRange(1, 40).Draw(t, "looks") {
			step := time.Duration(rapid.IntRange(1, 400).Draw(t, "seconds")) * time.Second
			now = now.Add(step)
			f := absence{
				node: "n1", st: *at(rapid.Int64Range(1, 3).Draw(t, "assignment"), rapid.SampledFrom(states).Draw(t, "state")),
				cluster: rapid.SampledFrom(clusters).Draw(t, "own"), suspicious: rapid.IntRange(0, 5).Draw(t, "list") == 0,
			}
			f.st.Cluster = rapid.SampledFrom(clusters).Draw(t, "its")
			if rapid.IntRange(0, 3).Draw(t, "object") == 0 {
				f.live = placed(func(vm *v1alpha1.ImpVM) {
					vm.UID = rapid.SampledFrom([]types.UID{"u1", "u2"}).Draw(t, "uid")
					vm.Status.NodeName = rapid.SampledFrom([]string{"", "n1", "n2"}).Draw(t, "node")
					vm.Status.Assignment = rapid.Int64Range(1, 3).Draw(t, "bound")
					vm.Status.ReleasedAssignment = rapid.Int64Range(0, vm.Status.Assignment).Draw(t, "released")
				})
			}
			same := f.live != nil && f.live.UID == "u1"
			certain := !same && f.cluster != "" && f.cluster == f.st.Cluster && !f.suspicious
			switch {
			case !certain:
				sure, last = 0, time.Time{}
			case last.IsZero():
				last = now
			default:
				sure = now.Sub(last)
			}
			f.lasted = m.absentFor(f, now)
			got, why := decideAbsent(f)
			ordered := same && (f.live.Status.ReleasedAssignment >= f.st.Assignment ||
				(f.live.Status.Assignment > f.st.Assignment && f.live.Status.NodeName != "n1") ||
				(f.live.Status.Assignment == f.st.Assignment && f.live.Status.NodeName == ""))
			if got == fateRemove && !ordered {
				t.Fatalf("removed without an order: %s", why)
			}
			if got == fateAbandon && (!certain || sure < absentLimit) {
				t.Fatalf("stopped after %s, certain %v: %s", sure, certain, why)
			}
			if (got == fateRemove || got == fateAbandon) && (f.st.State == machine.Removing || f.st.State == machine.Removed) {
				t.Fatalf("%s of a VM that is %s", got, f.st.State)
			}
			if w := m.absentWait(f); w < time.Second || w > absentAgain {
				t.Fatalf("the next look is after %s", w)
			}
		}
	})
}

// Terminal stays terminal: a VM that has finished is never ordered. Nothing is removed but by an order on the object.
func TestDecisionsAboutABoundVM(t *testing.T) {
	states := []machine.State{machine.Pending, machine.Starting, machine.Running, machine.Stopping, machine.Halted, machine.Finished, machine.Removing, machine.Removed}
	rapid.Check(t, func(t *rapid.T) {
		flag := func(name string) bool { return rapid.Bool().Draw(t, name) }
		vm := placed()
		if flag("persistent") {
			vm.Spec.Lifecycle = v1alpha1.LifecyclePersistent
		}
		vm.Status.ReportedAssignment = rapid.Int64Range(0, 2).Draw(t, "reported")
		vm.Status.ReleasedAssignment = rapid.Int64Range(0, 2).Draw(t, "released")
		if flag("release") {
			releaseOf(rapid.Int64Range(1, 2).Draw(t, "of"))(vm)
		}
		if flag("finished") {
			finishedAs(rapid.SampledFrom([]string{"Succeeded", v1alpha1.ReasonNodeLost}).Draw(t, "as"))(vm)
		}
		if flag("ran") {
			vm.Status.StartedAt = placed(wasStarted).Status.StartedAt
		}
		f := facts{vm: vm, synced: flag("synced"), silent: flag("silent"), ensured: flag("ensured"), behind: flag("behind")}
		if flag("known") {
			f.status = at(rapid.Int64Range(1, 3).Draw(t, "assignment"), rapid.SampledFrom(states).Draw(t, "state"))
		}
		d := decide(f)
		lost := isFinished(vm) && vm.Status.Conditions[0].Reason == v1alpha1.ReasonNodeLost
		released := vm.Status.Release != nil && vm.Status.Release.Assignment == vm.Status.Assignment
		switch {
		case d.do == ensure && (isFinished(vm) || released || !f.synced):
			t.Fatalf("ordered: %s", d.why)
		case d.do == remove && !released && !lost:
			t.Fatalf("removed without an order: %s", d.why)
		case d.do == reportReleased && !removedAt(f):
			t.Fatalf("given up although something may be left: %s", d.why)
		case d.do == ensure && vm.Spec.Lifecycle != v1alpha1.LifecyclePersistent && vm.Status.StartedAt != nil &&
			vm.Status.ReportedAssignment == vm.Status.Assignment && (f.status == nil || f.status.State == machine.Removed):
			t.Fatalf("a one-shot that was started is started again: %s", d.why)
		}
	})
}
