package chaos

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"imp.dev/imp/api/v1alpha1"
	guestfake "imp.dev/imp/internal/guest/fake"
	vmmfake "imp.dev/imp/internal/vmm/fake"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// Kind of VM: what it is, what it does by itself, and so what becomes of it once nothing disturbs it.
type Kind string

// Kinds.
const (
	Steady      Kind = "steady"       // persistent, in-place, runs until it is stopped
	Crashing    Kind = "crashing"     // as Steady, but its first runs end by themselves
	Moving      Kind = "moving"       // persistent, reschedule
	Fails       Kind = "fails"        // persistent, each run fails, two retries, then it has failed for good
	ManualReset Kind = "manual-reset" // as Fails, but waits for a reset
	CoolDown    Kind = "cool-down"    // its first runs fail; one retry, then a pause, then again
	OneShot     Kind = "one-shot"     // ephemeral; its workload counts its own starts and ends
	LongShot    Kind = "long-shot"    // ephemeral, and does not end by itself
)

func (k Kind) persistent() bool { return k != OneShot && k != LongShot }

// steadyAttempts says that nothing but a restart ever changes the number of failures in a row, so that it may not fall.
func (k Kind) steadyAttempts() bool {
	return k == Steady || k == Crashing || k == Moving || k == Fails
}

// allKinds with how many of twenty-seven VMs are of each.
func allKinds() []weighted {
	return []weighted{{Action(Steady), 6}, {Action(Crashing), 3}, {Action(Moving), 4}, {Action(Fails), 2}, {Action(ManualReset), 2},
		{Action(CoolDown), 2}, {Action(OneShot), 6}, {Action(LongShot), 2}}
}

func pickKind(r *rand.Rand, shape Shape) Kind {
	all := allKinds()
	if shape.Gentle {
		all = []weighted{{Action(Steady), 3}, {Action(OneShot), 2}}
	}
	if len(shape.Kinds) > 0 {
		all = slices.DeleteFunc(all, func(w weighted) bool { return !slices.Contains(shape.Kinds, Kind(w.action)) })
	}
	return Kind(pick(r, all))
}

// ParseKinds reads names of kinds.
func ParseKinds(names []string) (kinds []Kind, err error) {
	for _, name := range names {
		if !slices.ContainsFunc(allKinds(), func(w weighted) bool { return string(w.action) == name }) {
			return nil, fmt.Errorf("reading kinds of VMs: there is no kind %q", name)
		}
		kinds = append(kinds, Kind(name))
	}
	return kinds, nil
}

// StartedWord is what a one-shot's workload prints each time that it is started.
const StartedWord = "the workload was started here\n"

// crashes is how many runs of a VM that crashes at first end by themselves.
const crashes = 3

func crashing(then ...vmmfake.Script) vmmfake.Script {
	ends := []vmmfake.Script{
		{End: &vmmfake.End{How: vmmfake.Killed, AfterStart: true, AfterMillis: 400}},
		{Guest: guestfake.Script{Exit: &guestfake.Exit{AfterMillis: 300, Code: 7}}},
		{End: &vmmfake.End{How: vmmfake.Panic, AfterStart: true, AfterMillis: 200}},
	}
	return vmmfake.Script{Runs: append(ends[:crashes:crashes], then...)}
}

func (k Kind) script(slot int) vmmfake.Script {
	switch k {
	case Crashing, CoolDown:
		return crashing(vmmfake.Script{})
	case Fails, ManualReset:
		return crashing(crashing().Runs[1]) // every later run ends so, too
	case OneShot:
		return vmmfake.Script{Guest: guestfake.Script{Output: StartedWord, Exit: &guestfake.Exit{AfterMillis: 1000 + int64(slot%10)*700, Code: slot % 2 * 3}}}
	case LongShot:
		return vmmfake.Script{Guest: guestfake.Script{Output: StartedWord}}
	default:
		return vmmfake.Script{}
	}
}

func (k Kind) policy(initial time.Duration) *v1alpha1.RestartPolicy {
	if !k.persistent() {
		return nil
	}
	p := &v1alpha1.RestartPolicy{Mode: v1alpha1.RestartInPlace, Backoff: &v1alpha1.RestartBackoff{
		InitialDelay: &metav1.Duration{Duration: initial}, MaxDelay: &metav1.Duration{Duration: longestDelay},
	}}
	switch k {
	case Moving:
		p.Mode = v1alpha1.RestartReschedule
	case Fails:
		p.Backoff.MaxRetries, p.OnExhaustion = ptr.To(int32(2)), v1alpha1.OnExhaustionFail
	case ManualReset:
		p.Backoff.MaxRetries, p.OnExhaustion = ptr.To(int32(2)), v1alpha1.OnExhaustionManualReset
	case CoolDown:
		p.Backoff.MaxRetries, p.OnExhaustion = ptr.To(int32(1)), v1alpha1.OnExhaustionCoolDown
		p.CoolDownPeriod = &metav1.Duration{Duration: coolDown}
	}
	return p
}

// Delays of the VMs' policies: short, so that a run of a minute sees many restarts.
const (
	shortDelay   = time.Second
	longDelay    = 2 * time.Second
	longestDelay = 4 * time.Second
	coolDown     = 5 * time.Second
)

// Names of the objects that the VMs share.
const (
	namespace   = "chaos"
	className   = "chaos"
	networkName = "chaos"
	// kindAnnotation tells the observer what a VM is.
	kindAnnotation = "imp.dev/chaos-kind"
)

// vm builds the VM of a slot. Every fourth is in a network, so that addresses are claimed and freed.
func (r *runner) vm(slot int) *v1alpha1.ImpVM {
	kind := r.schedule.Kinds[slot]
	vm := &v1alpha1.ImpVM{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: slotName(slot)},
		Spec: v1alpha1.ImpVMSpec{
			ClassRef: &v1alpha1.ClassReference{Name: className}, Image: r.image, Lifecycle: v1alpha1.LifecycleEphemeral,
			Command: []string{"/bin/sh", "-c", "exit 0"}, TerminationGracePeriodSeconds: ptr.To(int64(1)), RestartPolicy: kind.policy(shortDelay),
		},
	}
	metav1.SetMetaDataAnnotation(&vm.ObjectMeta, kindAnnotation, string(kind))
	if kind.persistent() {
		vm.Spec.Lifecycle = v1alpha1.LifecyclePersistent
	}
	if r.options.Server.VMM != "fake" {
		vm.Spec.Command[2] = kind.shell()
		return vm
	}
	if slot%4 == 0 {
		vm.Spec.NetworkRef = &v1alpha1.NetworkReference{Name: networkName}
	}
	words, err := json.Marshal(kind.script(slot))
	if err != nil {
		panic(err) // a struct of our own
	}
	metav1.SetMetaDataAnnotation(&vm.ObjectMeta, v1alpha1.AnnotationFakeScript, string(words))
	return vm
}

// shell is what a real guest does; only the kinds of a gentle schedule have one.
func (k Kind) shell() string {
	if k == OneShot {
		return fmt.Sprintf("printf '%%s' '%s'; sleep 5; exit 3", StartedWord)
	}
	return "while :; do sleep 1; done"
}
