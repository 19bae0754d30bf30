package engine

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/plan"
)

func TestABootThatCannotBeginKeepsNobodyFromBooting(t *testing.T) {
	dir := t.TempDir()
	e := &Engine{log: slog.New(slog.DiscardHandler), boots: make(chan struct{}, 1), hub: newHub(), paths: paths{state: filepath.Join(dir, "vm")}}
	w := newWorker(e, "a", plan.Record{Spec: machine.Spec{ID: "a"}, Image: &plan.Image{}, Disk: &plan.Disk{}})
	if err := os.MkdirAll(e.paths.dir("a"), 0o700); err != nil {
		t.Fatal(err)
	}
	// A link to itself is a console that cannot be read.
	if err := os.Symlink("console.log", e.paths.console("a")); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{e.paths.base("a"), e.paths.private("a")} {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.doStartVMM(context.Background(), plan.Step{Kind: plan.StartVMM}); err == nil {
		t.Fatal("the boot began")
	}
	if w.record.Boot != nil || w.booting || len(e.boots) != 0 {
		t.Errorf("the place of a guest that does not boot is kept: booting %v, taken %d", w.booting, len(e.boots))
	}
}
