package translate

import (
	"fmt"
	"time"
	"unicode"
	"unicode/utf8"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/restart"
)

// Policy is the restart policy that holds for vm: its own as a whole, else its class's, else the default. An ephemeral VM has none.
func Policy(vm *v1alpha1.ImpVM) restart.Policy {
	if lifecycle(vm.Spec.Lifecycle) != machine.Persistent {
		return restart.Policy{}
	}
	from := vm.Spec.RestartPolicy
	if from == nil && vm.Status.Resources != nil {
		from = vm.Status.Resources.RestartPolicy
	}
	if from == nil {
		return restart.Default()
	}
	p := restart.Policy{
		Mode: restart.Mode(from.Mode), OnExhaustion: restart.OnExhaustion(from.OnExhaustion), CoolDown: length(from.CoolDownPeriod),
	}
	if b := from.Backoff; b != nil {
		p.InitialDelay, p.MaxDelay = length(b.InitialDelay), length(b.MaxDelay)
		if b.MaxRetries != nil {
			n := *b.MaxRetries
			p.MaxRetries = &n
		}
	}
	return p.OrDefault()
}

func length(d *metav1.Duration) time.Duration {
	if d == nil {
		return 0
	}
	return d.Duration
}

// maxReset in bytes: what the history on the object can hold.
const maxReset = 253

// Reset is the value of the annotation that forgets a VM's failures. One that the history could not hold is no order, and the problem
// says why: refusing the whole VM for it would keep its other orders from the node.
func Reset(vm *v1alpha1.ImpVM) (value, problem string) {
	value = vm.Annotations[v1alpha1.AnnotationRestartReset]
	if len(value) > maxReset || !utf8.ValidString(value) {
		return "", fmt.Sprintf("annotation %s must be at most %d printable characters; it is not acted on", v1alpha1.AnnotationRestartReset, maxReset)
	}
	for _, r := range value {
		if !unicode.IsPrint(r) {
			return "", fmt.Sprintf("annotation %s must hold printable characters only; it is not acted on", v1alpha1.AnnotationRestartReset)
		}
	}
	return value, ""
}

// halt is the order to stand still, of the user or else of the operator. The lifecycle decides: a one-shot is never halted.
func halt(vm *v1alpha1.ImpVM) *machine.Halt {
	switch hold := vm.Status.Hold; {
	case lifecycle(vm.Spec.Lifecycle) != machine.Persistent:
		return nil
	case vm.Spec.DesiredState == v1alpha1.DesiredStopped:
		return &machine.Halt{Reason: v1alpha1.ReasonStopped, Message: "spec.desiredState is Stopped"}
	case hold != nil:
		return &machine.Halt{Reason: fault.Reason(hold.Reason), Message: Message(hold.Message)}
	default:
		return nil
	}
}
