package runtimed

import (
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"testing"

	"imp.dev/imp/internal/cgroup"
)

func TestWhatBuildsOfAKilledRuntimeLeftIsClearedAway(t *testing.T) {
	required := func(ok bool, what string) {
		t.Helper()
		if !ok && os.Getenv("IMP_REQUIRE_ALL") == "1" {
			t.Fatal("needs " + what)
		}
		if !ok {
			t.Skip("needs " + what)
		}
	}
	required(os.Geteuid() == 0, "root")
	const instance = "builder-test"
	tree, err := cgroup.Open(cgroup.Options{Instance: instance + "-build"})
	required(err == nil, "cgroups")
	group, err := tree.Create("image-9", cgroup.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = group.Kill(t.Context())
		_ = group.Remove(t.Context())
	})
	left := exec.Command("sleep", "600")
	if err := left.Start(); err != nil {
		t.Fatal(err)
	}
	for _, file := range group.ProcsFiles() {
		if err := os.WriteFile(file, fmt.Append(nil, left.Process.Pid), 0); err != nil {
			t.Fatal(err)
		}
	}
	ended := make(chan error, 1)
	go func() { ended <- left.Wait() }()
	newBuilder(Options{BuilderUID: 47111}, instance, slog.New(slog.DiscardHandler))
	if err := <-ended; err == nil {
		t.Error("the process of an earlier build ended by itself")
	}
	if names, err := tree.List(); err != nil || len(names) != 0 {
		t.Errorf("cgroups %v (%v) are left", names, err)
	}
}
