package address

import (
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/operator/vmstate"
)

// verdict is what is to be done about a claim.
type verdict string

const (
	stay       verdict = "stay"       // as it is
	hold       verdict = "hold"       // its VM is gone and may still run on its node
	quarantine verdict = "quarantine" // nobody has it any more
	remove     verdict = "remove"     // its quarantine is over
)

// facts are everything judge looks at.
type facts struct {
	claim *v1alpha1.ImpAddress
	// vm the claim is for; nil when it is gone.
	vm *v1alpha1.ImpVM
	// over says that its quarantine has lasted long enough.
	over bool
	// gone says that its node certainly runs nothing any more and is not expected back.
	gone bool
}

// judge a claim by itself. What it says about a claim whose VM is there and in use is stay: that one is place's.
func judge(f facts) verdict {
	state := f.claim.Status.State
	switch {
	case f.vm != nil && inUseBy(f.vm, f.claim):
		return stay
	case state == v1alpha1.AddressQuarantined && f.over:
		return remove
	case state == v1alpha1.AddressQuarantined:
		return stay
	case f.vm != nil, f.gone, f.claim.Status.Node == "":
		// Finished, released, never bound, or it has another address: its object says that nothing runs with this one.
		return quarantine
	case f.claim.Status.ReleasedAssignment >= f.claim.Status.Assignment && state == v1alpha1.AddressHeld:
		return quarantine
	case state == v1alpha1.AddressHeld:
		return stay
	default:
		return hold
	}
}

// inUseBy says that something of the VM may run with the address, or is about to, as far as its object tells.
func inUseBy(vm *v1alpha1.ImpVM, claim *v1alpha1.ImpAddress) bool {
	has := Of(vm, claim.Spec.Network.UID)
	return !vmstate.Finished(vm) && !vmstate.Leaving(vm) && (has == "" || has == claim.Spec.Address)
}

// over says when the quarantine of a claim ends.
func over(claim *v1alpha1.ImpAddress, lasts time.Duration) time.Time {
	return claim.Status.Since.Add(lasts)
}
