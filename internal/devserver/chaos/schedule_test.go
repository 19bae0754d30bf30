package chaos

import (
	"testing"
	"time"
)

func shape(seed uint64) Shape {
	return Shape{Seed: seed, Duration: 5 * time.Minute, Nodes: []string{"node-1", "node-2", "node-3"}, VMs: 200}
}

func TestTheSameSeedGivesTheSameScheduleByteForByte(t *testing.T) {
	for seed := range uint64(50) {
		if first, second := Make(shape(seed)).String(), Make(shape(seed)).String(); first != second {
			t.Fatalf("seed %d gives two schedules", seed)
		}
	}
	if Make(shape(1)).String() == Make(shape(2)).String() {
		t.Error("two seeds give one schedule")
	}
}

func TestAScheduleDoesEverythingThatItCanDoAndEndsInTime(t *testing.T) {
	seen := map[Action]int{}
	kinds := map[Kind]bool{}
	for seed := range uint64(3) {
		s := Make(shape(seed))
		for i, step := range s.Steps {
			seen[step.Action]++
			if step.At+step.For > s.Shape.Duration {
				t.Errorf("seed %d: %s ends after the schedule", seed, step)
			}
			if i > 0 && step.At < s.Steps[i-1].At {
				t.Errorf("seed %d: %s comes too late in the list", seed, step)
			}
		}
		for _, k := range s.Kinds {
			kinds[k] = true
		}
	}
	for _, a := range []Action{Kill, Freeze, Restart, Refuse, Hang, Blackout, KillAPI, KillVMM, FreezeVMM, Delete, Create, Replace, Stop, Start, Policy, Reset, Cordon, Evacuate} {
		if seen[a] == 0 {
			t.Errorf("%s never happens", a)
		}
	}
	if len(kinds) != 8 {
		t.Errorf("%d kinds of VMs, want 8: %v", len(kinds), kinds)
	}
}

func TestNoProgramIsUnderTwoFaultsThatUndoEachOther(t *testing.T) {
	for seed := range uint64(20) {
		until := map[string]time.Duration{}
		for _, step := range Make(shape(seed)).Steps {
			if step.Action != Kill && step.Action != Freeze && step.Action != Restart {
				continue
			}
			target := step.Program + step.Node
			if until[target] > step.At {
				t.Errorf("seed %d: %s while the fault before it lasts", seed, step)
			}
			until[target] = step.At + step.For
		}
	}
}

func TestAGentleScheduleLeavesTheAPIServerAndTheNodesAlone(t *testing.T) {
	gentle := shape(1)
	gentle.Gentle, gentle.VMs = true, 6
	for _, step := range Make(gentle).Steps {
		switch step.Action {
		case KillAPI, Blackout, Cordon, Evacuate, FreezeVMM:
			t.Errorf("%s", step)
		}
	}
}
