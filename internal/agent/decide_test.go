package agent

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
)

// placed is an ImpVM bound to node n1 under assignment 2.
func placed(change ...func(*v1alpha1.ImpVM)) *v1alpha1.ImpVM {
	vm := &v1alpha1.ImpVM{ObjectMeta: metav1.ObjectMeta{UID: "u1"}}
	vm.Status.NodeName, vm.Status.Assignment = "n1", 2
	for _, c := range change {
		c(vm)
	}
	return vm
}

func reported(vm *v1alpha1.ImpVM) { vm.Status.ReportedAssignment = vm.Status.Assignment }

func wasStarted(vm *v1alpha1.ImpVM) {
	reported(vm)
	vm.Status.StartedAt = &metav1.MicroTime{Time: time.Unix(1, 0)}
}

func ran(vm *v1alpha1.ImpVM) {
	wasStarted(vm)
	vm.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionStarted, Status: "True", Reason: v1alpha1.ReasonDone}}
}

func releaseOf(assignment int64) func(*v1alpha1.ImpVM) {
	return func(vm *v1alpha1.ImpVM) { vm.Status.Release = &v1alpha1.Release{Assignment: assignment} }
}

func finishedAs(reason string) func(*v1alpha1.ImpVM) {
	return func(vm *v1alpha1.ImpVM) {
		vm.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionFinished, Status: "True", Reason: reason}}
	}
}

func at(assignment int64, state machine.State) *machine.Status {
	return &machine.Status{ID: "u1", Assignment: assignment, State: state}
}

var errNetwork = fault.Of(fault.Errorf(fault.NetworkSetupFailed, "setting up network", "no ConfigMap"))

func TestDecide(t *testing.T) {
	persistent := func(vm *v1alpha1.ImpVM) { vm.Spec.Lifecycle = v1alpha1.LifecyclePersistent }
	cases := map[string]struct {
		f    facts
		want action
	}{
		"a VM the runtime was not told of is told":                      {facts{vm: placed(), synced: true}, ensure},
		"a VM the runtime was told of is reported":                      {facts{vm: placed(), status: at(2, machine.Running), synced: true, ensured: true}, report},
		"while the runtime is away nothing is done":                     {facts{vm: placed(reported)}, hold},
		"a release waits for the runtime":                               {facts{vm: placed(reported, releaseOf(2))}, hold},
		"a VM that waits for a silent runtime says so":                  {facts{vm: placed(), silent: true}, reportSilent},
		"a VM that waited when the runtime fell silent stands":          {facts{vm: placed(wasStarted), silent: true}, hold},
		"a VM that ran when the runtime fell silent is not known":       {facts{vm: placed(ran), silent: true}, reportTimeout},
		"a VM that ran is known while a restart of the runtime takes":   {facts{vm: placed(ran)}, hold},
		"a VM that is to go stands while the runtime is silent":         {facts{vm: placed(ran, releaseOf(2)), silent: true}, hold},
		"a VM that was set back behind the node says so":                {facts{vm: placed(), status: at(3, machine.Running), synced: true, behind: true}, reportBehind},
		"a VM that was set back and of which nothing is left goes on":   {facts{vm: placed(), status: at(3, machine.Removed), synced: true}, reportReleased},
		"an order to release removes":                                   {facts{vm: placed(releaseOf(2)), status: at(2, machine.Running), synced: true, ensured: true}, remove},
		"an order to release a VM that is unknown removes":              {facts{vm: placed(releaseOf(2)), synced: true}, remove},
		"an order to release while it is being removed is repeated":     {facts{vm: placed(releaseOf(2)), status: at(2, machine.Removing), synced: true}, remove},
		"a removal that is done is reported":                            {facts{vm: placed(releaseOf(2)), status: at(2, machine.Removed), synced: true}, reportReleased},
		"the tombstone of an older assignment is no release":            {facts{vm: placed(releaseOf(2)), status: at(1, machine.Removed), synced: true}, remove},
		"an order to release an older assignment is none":               {facts{vm: placed(releaseOf(1)), synced: true}, ensure},
		"what is released is left to the operator":                      {facts{vm: placed(releaseOf(2), func(vm *v1alpha1.ImpVM) { vm.Status.ReleasedAssignment = 2 }), synced: true}, hold},
		"a runtime with a later assignment is waited for":               {facts{vm: placed(), status: at(3, machine.Running), synced: true}, hold},
		"a tombstone of an older assignment is no hindrance":            {facts{vm: placed(), status: at(1, machine.Removed), synced: true}, ensure},
		"an assignment that was removed here is given back":             {facts{vm: placed(persistent), status: at(2, machine.Removed), synced: true}, reportReleased},
		"a one-shot that was started and is unknown is lost":            {facts{vm: placed(wasStarted), synced: true}, reportLost},
		"a one-shot that was started and was removed is lost":           {facts{vm: placed(wasStarted), status: at(2, machine.Removed), synced: true}, reportLost},
		"a persistent VM that was started and is unknown is told again": {facts{vm: placed(persistent, wasStarted), synced: true}, ensure},
		"a one-shot that never started and is unknown is told again":    {facts{vm: placed(reported), synced: true}, ensure},
		"a one-shot started elsewhere before is told here":              {facts{vm: placed(func(vm *v1alpha1.ImpVM) { vm.Status.StartedAt = &metav1.MicroTime{}; vm.Status.ReportedAssignment = 1 }), synced: true}, ensure},
		"a finished VM is never told":                                   {facts{vm: placed(finishedAs("Succeeded")), synced: true}, report},
		"a finished VM is released like any other":                      {facts{vm: placed(finishedAs("Succeeded"), releaseOf(2)), status: at(2, machine.Finished), synced: true}, remove},
		"a VM that was lost with this node is stopped":                  {facts{vm: placed(finishedAs(v1alpha1.ReasonNodeLost)), status: at(2, machine.Running), synced: true}, remove},
		"a VM whose network is being set waits":                         {facts{vm: placed(), synced: true, network: standing{awaited: true}}, hold},
		"a VM whose network cannot be set says why":                     {facts{vm: placed(), synced: true, network: standing{awaited: true, problem: errNetwork}}, reportNetwork},
		"a VM whose network is there is told":                           {facts{vm: placed(), synced: true, network: standing{failed: true, problem: errNetwork}}, ensure},
		"a VM that runs is not told anew without its network":           {facts{vm: placed(), status: at(2, machine.Running), synced: true, network: standing{awaited: true, problem: errNetwork}}, report},
		"what an older assignment left does not stand for a VM":         {facts{vm: placed(), status: at(1, machine.Removed), synced: true, network: standing{awaited: true}}, hold},
		"a release does not wait for a network":                         {facts{vm: placed(releaseOf(2)), synced: true, network: standing{awaited: true}}, remove},
		"a VM that was lost and has ended is left":                      {facts{vm: placed(finishedAs(v1alpha1.ReasonNodeLost)), status: at(2, machine.Finished), synced: true}, hold},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			if got := decide(c.f); got.do != c.want {
				t.Errorf("%s (%s), want %s", got.do, got.why, c.want)
			}
		})
	}
}

func TestDecideAbsent(t *testing.T) {
	live := func(change ...func(*v1alpha1.ImpVM)) *v1alpha1.ImpVM { return placed(change...) }
	elsewhere := func(assignment int64) func(*v1alpha1.ImpVM) {
		return func(vm *v1alpha1.ImpVM) { vm.Status.NodeName, vm.Status.Assignment = "n2", assignment }
	}
	cases := map[string]struct {
		st   *machine.Status
		live *v1alpha1.ImpVM
		want fate
	}{
		"an object that is gone is no order":                   {at(2, machine.Running), nil, fateKeep},
		"an object of another UID is no order":                 {at(2, machine.Running), live(func(vm *v1alpha1.ImpVM) { vm.UID = "u2" }), fateKeep},
		"an object that is still ours is no order":             {at(2, machine.Running), live(), fateKeep},
		"an object that was bound elsewhere later is one":      {at(2, machine.Running), live(elsewhere(3)), fateRemove},
		"an object that is elsewhere under our number is not":  {at(2, machine.Running), live(elsewhere(2)), fateKeep},
		"an object that was unbound is one":                    {at(2, machine.Running), live(func(vm *v1alpha1.ImpVM) { vm.Status.NodeName = "" }), fateRemove},
		"an object of before our assignment is not":            {at(2, machine.Running), live(func(vm *v1alpha1.ImpVM) { vm.Status.NodeName, vm.Status.Assignment = "", 1 }), fateKeep},
		"our own word that it was released is one":             {at(2, machine.Running), live(func(vm *v1alpha1.ImpVM) { vm.Status.NodeName = ""; vm.Status.ReleasedAssignment = 2 }), fateRemove},
		"our word about an older assignment is not":            {at(2, machine.Running), live(func(vm *v1alpha1.ImpVM) { vm.Status.ReleasedAssignment = 1 }), fateKeep},
		"what is being removed is left to that":                {at(2, machine.Removing), live(elsewhere(3)), fateKeep},
		"what was removed is done":                             {at(2, machine.Removed), nil, fateDone},
		"a finished VM whose object is gone keeps its console": {at(2, machine.Finished), nil, fateKeep},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			c.st.Cluster = "c1"
			f := absence{node: "n1", st: *c.st, live: c.live, cluster: "c1"}
			if got, why := decideAbsent(f); got != c.want {
				t.Errorf("%s (%s), want %s", got, why, c.want)
			}
		})
	}
}

func TestDecideHeld(t *testing.T) {
	held := func(released int64) *v1alpha1.ImpAddress {
		return &v1alpha1.ImpAddress{Status: v1alpha1.ImpAddressStatus{State: v1alpha1.AddressHeld, Assignment: 2, ReleasedAssignment: released}}
	}
	cases := map[string]struct {
		claim  *v1alpha1.ImpAddress
		st     *machine.Status
		synced bool
		want   heldFate
	}{
		"a VM that runs is removed":                                {held(0), at(2, machine.Running), true, heldRemove},
		"a VM of an older assignment is removed under the claim's": {held(0), at(1, machine.Running), true, heldRemove},
		"a VM the runtime does not know is ordered away too":       {held(0), nil, true, heldRemove},
		"the tombstone of an older assignment is not enough":       {held(0), at(1, machine.Removed), true, heldRemove},
		"a VM that was removed is released":                        {held(0), at(2, machine.Removed), true, heldRelease},
		"a VM that was removed later is released":                  {held(0), at(3, machine.Removed), true, heldRelease},
		"a VM that is being removed is waited for":                 {held(0), at(2, machine.Removing), true, heldWait},
		"a VM of a later assignment is not the claim's":            {held(0), at(3, machine.Running), true, heldWait},
		"nothing is concluded from a runtime that is away":         {held(0), nil, false, heldWait},
		"what was released is done":                                {held(2), nil, true, heldDone},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			if got := decideHeld(c.claim, c.st, c.synced); got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}
}

func TestWhatAVMShowsOfItsNetwork(t *testing.T) {
	waits, fails := standing{awaited: true, problem: errNetwork}, standing{awaited: true, problem: errNetwork, failed: true}
	for name, c := range map[string]struct {
		s    standing
		do   action
		st   *machine.Status
		want bool
	}{
		"a VM that waits says so":                              {waits, reportNetwork, nil, true},
		"a VM that runs does not say what would be waited for": {waits, report, at(2, machine.Running), false},
		"a VM that runs says what fails":                       {fails, report, at(2, machine.Running), true},
		"a VM that is told says what fails":                    {fails, ensure, nil, true},
		"a VM that has finished says nothing of it":            {fails, report, at(2, machine.Finished), false},
		"a VM that is removed says nothing of it":              {fails, remove, at(2, machine.Removing), false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := c.s.shows(c.do, c.st); (got != nil) != c.want {
				t.Errorf("shows %v", got)
			}
		})
	}
}

func TestSuspicious(t *testing.T) {
	for _, c := range []struct {
		known, absent int
		want          bool
	}{{0, 0, false}, {1, 1, false}, {2, 1, false}, {2, 2, true}, {10, 5, false}, {10, 6, true}} {
		if got := suspicious(c.known, c.absent); got != c.want {
			t.Errorf("%d of %d absent: suspicious %v", c.absent, c.known, got)
		}
	}
}

func TestPace(t *testing.T) {
	start := time.Unix(1000, 0)
	second := func(n float64) time.Time { return start.Add(time.Duration(n * float64(time.Second))) }
	t.Run("a change that somebody waits for is written at once", func(t *testing.T) {
		var p pace
		if w := p.due(second(0), true); w != 0 {
			t.Errorf("waits %s", w)
		}
	})
	t.Run("any other settles for two seconds from its beginning, however it goes on", func(t *testing.T) {
		var p pace
		for _, c := range []struct {
			at   float64
			want time.Duration
		}{{0, 2 * time.Second}, {1.5, 500 * time.Millisecond}, {2, 0}} {
			if w := p.due(second(c.at), false); w != c.want {
				t.Errorf("after %v s it waits %s, want %s", c.at, w, c.want)
			}
		}
	})
	t.Run("a change that undoes itself is never written", func(t *testing.T) {
		var p pace
		p.due(second(0), false)
		p.clean()
		if w := p.due(second(5), false); w != 2*time.Second {
			t.Errorf("waits %s", w)
		}
	})
	t.Run("a write takes what was pending with it", func(t *testing.T) {
		var p pace
		p.due(second(0), false)
		p.due(second(1), true)
		p.written(second(1))
		if w := p.due(second(1.5), false); w != 2*time.Second {
			t.Errorf("waits %s", w)
		}
	})
	t.Run("a loop of significant changes is slowed down to one write in two seconds", func(t *testing.T) {
		var p pace
		writes := 0
		for i := range 300 { // half a minute of a change each tenth of a second
			now := second(float64(i) / 10)
			if p.due(now, true) == 0 {
				p.written(now)
				writes++
			}
		}
		if writes < 10 || writes > 26 {
			t.Errorf("%d writes in 30 s", writes)
		}
	})
}
