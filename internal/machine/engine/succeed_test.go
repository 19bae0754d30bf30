package engine

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/plan"
)

func TestASuccessorThatHasTakenOverMeanwhileIsLeftAlone(t *testing.T) {
	e := &Engine{log: slog.New(slog.DiscardHandler), hub: newHub()}
	at := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	for name, r := range map[string]plan.Record{
		"an order made it the VM": {Spec: machine.Spec{ID: "a", Assignment: 2}},
		"an order withdrew it":    {Spec: machine.Spec{ID: "a", Assignment: 2}, RemovedAt: &at},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorker(e, "a", r)
			if err := w.doSucceed(context.Background(), plan.Step{Kind: plan.Succeed}); err != nil {
				t.Fatal(err)
			}
			if got := w.recordNow(); got.Spec.Assignment != 2 || got.RemovedAt != r.RemovedAt {
				t.Errorf("record is %+v", got)
			}
		})
	}
}
