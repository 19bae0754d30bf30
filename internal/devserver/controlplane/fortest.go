package controlplane

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"

	"imp.dev/imp/config"

	"k8s.io/client-go/rest"
)

// TB is the part of testing.TB that is used here; production code must not pull in package testing.
type TB interface {
	Helper()
	Fatalf(format string, args ...any)
	Skipf(format string, args ...any)
	Cleanup(func())
	TempDir() string
	Context() context.Context
}

// ForTesting is a ControlPlane whose methods fail the test instead of returning errors.
type ForTesting struct {
	*ControlPlane
	tb TB
}

// shared is the one control plane of a test binary. It is the package's only variable: tests of one binary have no
// other place in common, and a start for each test would cost seconds.
var shared struct { //nolint:gochecknoglobals // see above
	once sync.Once
	cp   *ControlPlane
	err  error
	// holder's end tells the janitor that this test binary is gone.
	holder io.WriteCloser
}

// ForTest gives the test binary's one control plane, started by the first caller with Imp's CRDs, roles and policies
// installed. Tests keep apart by namespaces and by the names of cluster-wide objects. It ends, and its folder is removed,
// when the test binary ends, in whatever way. Where the programs are not built the test is skipped, or fails under IMP_REQUIRE_ALL=1.
func ForTest(tb TB) *ForTesting {
	tb.Helper()
	binaries := requireBinaries(tb)
	shared.once.Do(func() { shared.cp, shared.err = startShared(binaries) })
	if shared.err != nil {
		tb.Fatalf("starting the control plane for tests: %v", shared.err)
	}
	return &ForTesting{ControlPlane: shared.cp, tb: tb}
}

// StartForTest gives a control plane of the test's own, for a test that stops it or needs an empty one. Imp's manifests are installed.
func StartForTest(tb TB) *ForTesting {
	tb.Helper()
	cp, err := startInstalled(tb.Context(), Options{Dir: tb.TempDir(), Binaries: requireBinaries(tb)})
	if err != nil {
		tb.Fatalf("starting a control plane: %v", err)
	}
	tb.Cleanup(cp.Stop)
	return &ForTesting{ControlPlane: cp, tb: tb}
}

func requireBinaries(tb TB) Binaries {
	tb.Helper()
	cache, err := CacheDir()
	if err != nil {
		tb.Fatalf("%v", err)
	}
	binaries, err := Find(cache)
	switch {
	case errors.Is(err, ErrNotBuilt) && os.Getenv("IMP_REQUIRE_ALL") == "":
		tb.Skipf("needs a Kubernetes API server: %v", err)
	case err != nil:
		tb.Fatalf("needs a Kubernetes API server: %v", err)
	}
	return binaries
}

func startInstalled(ctx context.Context, opts Options) (*ControlPlane, error) {
	cp, err := Start(ctx, opts)
	if err != nil {
		return nil, err
	}
	if err := cp.Install(ctx, config.Files); err != nil {
		cp.Stop()
		return nil, err
	}
	return cp, nil
}

func startShared(binaries Binaries) (*ControlPlane, error) {
	dir, err := os.MkdirTemp("", "imp-test-controlplane-")
	if err != nil {
		return nil, err
	}
	// The processes die with this one by themselves; the folder needs somebody who lives a moment longer. The janitor
	// reads until the pipe closes, which happens at the latest when the kernel cleans up after us.
	janitor := exec.Command("/bin/sh", "-c", `cat >/dev/null; for try in 1 2 3 4 5; do rm -rf "$1" && exit; sleep 1; done`, "sh", dir)
	janitor.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // a Ctrl-C for the tests is not for it
	if shared.holder, err = janitor.StdinPipe(); err != nil {
		return nil, err
	}
	if err := janitor.Start(); err != nil {
		return nil, errors.Join(fmt.Errorf("starting the janitor of %s: %w", filepath.Base(dir), err), os.RemoveAll(dir))
	}
	return startInstalled(context.Background(), Options{Dir: dir, Binaries: binaries})
}

// AgentConfig is ControlPlane.AgentConfig; an error ends the test.
func (f *ForTesting) AgentConfig(node string) *rest.Config {
	f.tb.Helper()
	return f.must(f.ControlPlane.AgentConfig(f.tb.Context(), node))
}

// OperatorConfig is ControlPlane.OperatorConfig; an error ends the test.
func (f *ForTesting) OperatorConfig() *rest.Config {
	f.tb.Helper()
	return f.must(f.ControlPlane.OperatorConfig(f.tb.Context()))
}

func (f *ForTesting) must(cfg *rest.Config, err error) *rest.Config {
	f.tb.Helper()
	if err != nil {
		f.tb.Fatalf("%v", err)
	}
	return cfg
}
