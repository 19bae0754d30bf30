package runtimed_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	imagefake "imp.dev/imp/internal/image/fake"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/machinetest"
)

// doctor runs imp-runtime doctor as an administrator would, and gives what it printed and its exit code.
func (p *process) doctor(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", append([]string{asRuntime, "doctor", "--socket", p.socket()}, args...)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if bad := (*exec.ExitError)(nil); err != nil && !errors.As(err, &bad) {
		t.Fatal(err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

func wants(t *testing.T, what, text string, words ...string) {
	t.Helper()
	for _, w := range words {
		if !strings.Contains(text, w) {
			t.Errorf("%s does not say %q:\n%s", what, w, text)
		}
	}
}

// halted gives a persistent VM that is kept stopped.
func (p *process) halted(t *testing.T) machine.Spec {
	t.Helper()
	spec := machinetest.NewSpec(machinetest.IsPersistent)
	if _, err := p.client.Ensure(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	watchFor(t, p.client, func(st machine.Status) bool { return st.ID == spec.ID && st.State == machine.Running })
	spec.Generation, spec.Halt = 2, &machine.Halt{Reason: "Stopped", Message: "desiredState is Stopped"}
	if _, err := p.client.Ensure(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	watchFor(t, p.client, func(st machine.Status) bool { return st.ID == spec.ID && st.State == machine.Halted })
	return spec
}

func (p *process) remove(t *testing.T, spec machine.Spec, keep bool) {
	t.Helper()
	if _, err := p.client.Remove(t.Context(), machine.Ref{ID: spec.ID, Assignment: spec.Assignment}, machine.Removal{KeepDisk: keep}); err != nil {
		t.Fatal(err)
	}
	watchFor(t, p.client, func(st machine.Status) bool { return st.ID == spec.ID && st.State == machine.Removed })
}

func TestDoctorFindsAndRepairsWhatIsNobodys(t *testing.T) {
	p := newProcess(t)
	p.start(t)
	defer p.kill()
	out, errs, code := p.doctor(t)
	if code != 0 || !strings.Contains(out, "Node and records agree.") {
		t.Fatalf("on a node in order: exit code %d, %s%s", code, out, errs)
	}
	const stranger = "5a3c2b1e-7f60-4d5e-9a1b-0c2d3e4f5a6b"
	dir := filepath.Join(p.dir, "state", "vm", stranger)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "private.ext4"), []byte("what a user wrote"), 0o600); err != nil {
		t.Fatal(err)
	}
	out, errs, code = p.doctor(t)
	if code != 1 {
		t.Errorf("with a directory of nobody: exit code %d, %s%s", code, out, errs)
	}
	wants(t, "the table", out, "KIND", "directory", "disk", stranger, "--repair", "2 findings, 0 repaired, 2 left")
	out, errs, code = p.doctor(t, "--repair", "-o", "json")
	var told struct {
		Findings []struct {
			Kind, ID, Name string
			Since          time.Time
			Repaired       bool
		}
	}
	if err := json.Unmarshal([]byte(out), &told); err != nil || code != 0 || len(told.Findings) != 2 {
		t.Fatalf("repaired: %v, exit code %d, %s%s", err, code, out, errs)
	}
	for _, f := range told.Findings {
		if !f.Repaired || f.ID != stranger || f.Since.IsZero() {
			t.Errorf("%+v", f)
		}
	}
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("the directory is still there: %v", err)
	}
	out, _, code = p.doctor(t, "trash")
	if code != 0 {
		t.Errorf("listing the trash: exit code %d", code)
	}
	wants(t, "the trash", out, stranger+".1", "no record speaks of")
}

func TestDoctorGivesADiskBackToAVMThatIsStopped(t *testing.T) {
	p := newProcess(t)
	p.start(t)
	defer p.kill()
	lost := p.halted(t)
	disk := filepath.Join(p.dir, "state", "vm", lost.ID, "private.ext4")
	if err := os.WriteFile(disk, []byte("what a user wrote"), 0o600); err != nil {
		t.Fatal(err)
	}
	p.remove(t, lost, true)
	next := p.halted(t)
	out, _, _ := p.doctor(t, "trash", "-o", "json")
	wants(t, "the trash", out, lost.ID+".1", lost.Namespace+"/"+lost.Name, imagefake.Digest(machinetest.Reference))
	if out, errs, code := p.doctor(t, "restore", lost.ID+".1"); code != 2 || !strings.Contains(errs, "--vm is missing") {
		t.Errorf("without a VM: exit code %d, %s%s", code, out, errs)
	}
	if out, errs, code := p.doctor(t, "restore", lost.ID+".1", "--vm", next.ID); code != 0 {
		t.Fatalf("exit code %d, %s%s", code, out, errs)
	}
	if content, err := os.ReadFile(filepath.Join(p.dir, "state", "vm", next.ID, "private.ext4")); err != nil || string(content) != "what a user wrote" {
		t.Errorf("the VM's disk holds %q, %v", content, err)
	}
	out, _, _ = p.doctor(t, "trash")
	wants(t, "the trash", out, next.ID+".1", "replaced by disk "+lost.ID+".1")
	if strings.Contains(out, lost.ID+".1  ") {
		t.Errorf("the disk is still in the trash:\n%s", out)
	}
	next.Generation, next.Halt = 3, nil
	if _, err := p.client.Ensure(t.Context(), next); err != nil {
		t.Fatal(err)
	}
	watchFor(t, p.client, func(st machine.Status) bool { return st.ID == next.ID && st.State == machine.Running })
	if _, errs, code := p.doctor(t, "restore", next.ID+".1", "--vm", next.ID); code != 2 || !strings.Contains(errs, "desiredState: Stopped") {
		t.Errorf("to a VM that runs: exit code %d, %s", code, errs)
	}
	p.remove(t, next, false)
}

func TestDoctorSaysWhatToDoWhereItCannotWork(t *testing.T) {
	p := newProcess(t)
	_, errs, code := p.doctor(t)
	if code != 2 {
		t.Errorf("without a runtime: exit code %d", code)
	}
	wants(t, "without a runtime it", errs, "no runtime serves at "+p.socket(), "start imp-runtime", "--socket")
	if _, errs, code = p.doctor(t, "-o", "yaml"); code != 2 {
		t.Errorf("with another output: exit code %d", code)
	}
	wants(t, "with another output it", errs, "must be json")
	if os.Geteuid() != 0 {
		t.Skip("a user who is not the runtime's: needs root")
	}
	p.args = append(p.args, "--agent-uid=65534") // the last one counts
	p.start(t)
	defer p.kill()
	if err := os.Chmod(p.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	copied := filepath.Join(p.dir, "doctor")
	binary, err := os.ReadFile(exe)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(copied, binary, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, who := range map[string]struct {
		uid  uint32
		want string
	}{
		"the agent":    {65534, "only root may do this, and uid 65534 asks"},
		"anybody else": {65533, "run it as root"},
	} {
		cmd := exec.Command(copied, asRuntime, "doctor", "--socket", p.socket())
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: who.uid, Gid: who.uid}}
		out, err := cmd.CombinedOutput()
		if err == nil || cmd.ProcessState.ExitCode() != 2 {
			t.Errorf("%s: %v, %s", name, err, out)
		}
		wants(t, name, string(out), who.want)
	}
}
