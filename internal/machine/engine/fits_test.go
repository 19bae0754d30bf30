package engine

import (
	"testing"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/vmm"
)

// growingDriver takes more for a larger VM, as QEMU does.
type growingDriver struct{ vmm.Driver }

func (growingDriver) OverheadMiB(vcpu int, memoryMiB int64) int64 {
	return 100 + 4*int64(vcpu) + memoryMiB/64
}

func TestALargeVMThatPlacementFitsInIsNotRefusedForItsOverhead(t *testing.T) {
	e := &Engine{config: Config{Driver: growingDriver{}}, workers: map[string]*worker{}}
	spec := machine.Spec{ID: "a", VCPU: 8, MemoryMiB: 16384, DiskGiB: 10}
	e.config.Budget.VCPU, e.config.Budget.DiskGiB = 8, 10
	e.config.Budget.MemoryMiB = spec.MemoryMiB + e.overheadMiB() // what Info tells and the operator counts
	if err := e.fits(spec); err != nil {
		t.Errorf("refused: %v", err)
	}
	e.config.Budget.MemoryMiB--
	if err := e.fits(spec); !fault.Is(err, fault.NoCapacity) {
		t.Errorf("one MiB short of memory: %v, want NoCapacity", err)
	}
}
