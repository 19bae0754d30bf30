package engine

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/plan"
)

func TestOnlySoManyRemovedVMsAreRemembered(t *testing.T) {
	r := newAuditRig(t)
	for n := range 6 {
		r.clock.Step(time.Second)
		if _, err := r.engine.Remove(t.Context(), machine.Ref{ID: fmt.Sprintf("vm-%d", n), Assignment: 1}, machine.Removal{}); err != nil {
			t.Fatal(err)
		}
	}
	ids := func() []string {
		list, err := r.engine.List(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, st := range list {
			out = append(out, st.ID)
		}
		return out
	}
	r.engine.forgetOldest(6)
	if got := ids(); len(got) != 6 {
		t.Fatalf("within the bound %v are remembered", got)
	}
	r.engine.forgetOldest(2)
	want := []string{"vm-4", "vm-5"}
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(30 * time.Second); !slices.Equal(ids(), want); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("remembered are %v, want %v", ids(), want)
		}
	}
	loaded, err := r.engine.records.Load()
	if err != nil || len(loaded.Records) != 2 {
		t.Errorf("on disk there are %d records (%v), want 2", len(loaded.Records), err)
	}
}

func TestASuccessorThatWasTakenBackSinceTheStepWasDecidedEndsNoRuntime(t *testing.T) {
	r := newTrashRig(t, func(r *plan.Record) {
		at := time.Unix(0, 0)
		r.RemovedAt, r.Removal = &at, &plan.Removal{}
	})
	if err := r.worker.doSucceed(t.Context(), plan.Step{Kind: plan.Succeed}); err != nil {
		t.Fatal(err)
	}
	if got := r.worker.recordNow(); got.RemovedAt == nil || got.Spec.Assignment != 1 {
		t.Errorf("the record is %+v", got)
	}
}
