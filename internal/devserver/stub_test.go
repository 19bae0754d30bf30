package devserver

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/devserver/fabric"

	"github.com/google/uuid"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// TestMain makes a copy of this test binary under the name of one of Imp's programs a stand-in for it, so that the server's
// own work can be tested without theirs: folders, identities, processes, and what is cleaned up after whom.
func TestMain(m *testing.M) {
	switch filepath.Base(os.Args[0]) {
	case operatorProgram:
		stub(nil)
	case agentProgram:
		stub(stubAgent)
	case runtimeProgram:
		stub(stubRuntime)
	case upProgram:
		stub(stubUp)
	default:
		os.Exit(m.Run())
	}
}

// upProgram is a program that runs Up, to be killed.
const upProgram = "imp-dev"

// stubFlags are those of all programs; each stand-in takes what it needs.
type stubFlags struct{ node, kubeconfig, runDir, stateDir, cgroup, dir, cache, hostNetns string }

func stub(work func(context.Context, stubFlags) error) {
	var f stubFlags
	set := flag.NewFlagSet(os.Args[0], flag.ExitOnError)
	for name, to := range map[string]*string{
		"node": &f.node, "kubeconfig": &f.kubeconfig, "run-dir": &f.runDir, "state-dir": &f.stateDir, "cgroup-parent": &f.cgroup,
		"dir": &f.dir, "cache": &f.cache, "host-netns": &f.hostNetns,
	} {
		set.StringVar(to, name, "", "")
	}
	var rest string
	for _, name := range []string{"network", "node-address", "node-routes", "metrics-addr", "health-addr", "runtime-socket", "agent-uid", "vmm", "budget-vcpu", "vmm-uid-base", "vmm-uid-count", "budget-memory-mib", "budget-disk-gib"} {
		set.StringVar(&rest, name, "", "")
	}
	_ = set.Parse(os.Args[1:]) // ExitOnError
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if work != nil {
		if err := work(ctx, f); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	<-ctx.Done()
	os.Exit(0)
}

// stubAgent says with its own credentials that its node is ready.
func stubAgent(ctx context.Context, f stubFlags) error {
	cfg, err := clientcmd.BuildConfigFromFlags("", f.kubeconfig)
	if err != nil {
		return err
	}
	c, err := NewClient(cfg)
	if err != nil {
		return err
	}
	node := &v1alpha1.ImpNode{ObjectMeta: metav1.ObjectMeta{Name: f.node}}
	if err := client.IgnoreAlreadyExists(c.Create(ctx, node)); err != nil {
		return err
	}
	now := metav1.NewTime(time.Now().UTC())
	patch := fmt.Sprintf(`{"status":{"budget":{"vcpu":1,"memoryMiB":1,"diskGiB":1},"capabilities":{"arch":"amd64","driver":"fake","overheadMiB":1},
		"conditions":[{"type":"RuntimeReady","status":"True","reason":"Done","message":"","lastTransitionTime":%q}]}}`, now.Format(time.RFC3339))
	return c.Status().Patch(ctx, node, client.RawPatch("application/merge-patch+json", []byte(patch)))
}

// stubRuntime leaves behind what a killed runtime would: a VMM in its own session and cgroup, and a record.
func stubRuntime(_ context.Context, f stubFlags) error {
	if err := os.MkdirAll(f.stateDir, 0o700); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(f.stateDir, "args"), []byte(strings.Join(os.Args[1:], "\n")), 0o600); err != nil {
		return err
	}
	if f.hostNetns != "" {
		if err := stubNetwork(f.stateDir); err != nil {
			return err
		}
	}
	vmm := exec.Command("/bin/sleep", "600")
	vmm.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if os.Getenv("TMPDIR") == "" { // the server gives the program its environment, and nothing else
		return fmt.Errorf("TMPDIR is not set")
	}
	if err := vmm.Start(); err != nil {
		return err
	}
	joined := false
	for _, hierarchy := range cgroupRoots() {
		group := filepath.Join(hierarchy, f.cgroup, "vm")
		if os.MkdirAll(group, 0o755) == nil &&
			os.WriteFile(filepath.Join(group, "cgroup.procs"), []byte(fmt.Sprint(vmm.Process.Pid)), 0o644) == nil {
			joined = true
		}
	}
	if !joined {
		_ = vmm.Process.Kill()
		return fmt.Errorf("no cgroup took the VMM")
	}
	return os.WriteFile(filepath.Join(f.stateDir, "vmm.pid"), []byte(fmt.Sprint(vmm.Process.Pid)), 0o600)
}

// stubNetwork leaves a network's namespace, by an instance id as a runtime has one.
func stubNetwork(stateDir string) error {
	id := uuid.NewString()[:8]
	if err := os.WriteFile(filepath.Join(stateDir, "instance"), []byte(id+"\n"), 0o600); err != nil {
		return err
	}
	_, err := fabric.Create("imp-" + id + "-stub")
	return err
}

func cgroupRoots() []string {
	content, _ := os.ReadFile("/proc/self/mountinfo")
	var roots []string
	for line := range strings.Lines(string(content)) {
		if strings.Contains(line, " - cgroup") {
			roots = append(roots, strings.Fields(line)[4])
		}
	}
	return roots
}

func stubUp(ctx context.Context, f stubFlags) error {
	_, err := Up(ctx, Options{Dir: f.dir, CacheDir: f.cache, Nodes: 1, VMM: "fake", Network: "linux", Accel: "tcg"})
	if err == nil {
		err = os.WriteFile(filepath.Join(f.dir, "is-up"), nil, 0o600)
	}
	return err
}
