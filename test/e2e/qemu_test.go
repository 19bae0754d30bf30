package e2e

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/devserver"
	"imp.dev/imp/internal/devserver/imagefile"

	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

func TestARealGuestsExitCodeIsOnItsObject(t *testing.T) {
	c := shared(t, "qemu")
	ns := c.namespace(t)
	for name, end := range map[string]struct {
		script string
		code   int32
		phase  v1alpha1.Phase
		reason string
	}{
		"a command that exits 0 is Succeeded":                               {"echo all is well", 0, v1alpha1.PhaseSucceeded, v1alpha1.ReasonSucceeded},
		"one that exits 3 is Failed, whatever marker it has printed itself": {"echo IMP_SUCCESS; echo 'IMP_SUCCESS id=00000000'; exit 3", 3, v1alpha1.PhaseFailed, v1alpha1.ReasonFailed},
		"one that a signal ends has 128 and the signal's number":            {"kill -SEGV $$", 139, v1alpha1.PhaseFailed, v1alpha1.ReasonFailed},
	} {
		t.Run(name, func(t *testing.T) {
			vm := c.create(t, c.vm(ns, "vm", shell(end.script), func(vm *v1alpha1.ImpVM) { vm.Name = ""; vm.GenerateName = "vm-" }))
			now := c.await(t, vm, booting, "finished", finished)
			if now.Status.ExitCode == nil || *now.Status.ExitCode != end.code || now.Status.Phase != end.phase {
				t.Errorf("want exit code %d and phase %s: %s", end.code, end.phase, describe(now))
			}
			if got := condition(now, v1alpha1.ConditionFinished).Reason; got != end.reason {
				t.Errorf("Finished for the reason %s, want %s", got, end.reason)
			}
			if end.phase == v1alpha1.PhaseFailed && now.Status.ConsoleTail == "" {
				t.Error("a failure without the console's last words")
			}
			if now.Status.Timings == nil || now.Status.Timings.KernelMillis == 0 {
				t.Error("no word of where the time went")
			}
		})
	}
}

func TestARealGuestsOtherEndsHaveTheirOwnReasons(t *testing.T) {
	c := shared(t, "qemu")
	ns := c.namespace(t)
	for reason, script := range map[string]string{
		"GuestPanic":    "sleep 1; echo 1 >/proc/sys/kernel/sysrq; echo c >/proc/sysrq-trigger; sleep 60",
		"GuestPowerOff": "sleep 1; poweroff -f; sleep 60",
		"GuestReboot":   "sleep 1; reboot -f; sleep 60",
		"VMMKilled":     "sleep 600",
	} {
		t.Run(reason, func(t *testing.T) {
			vm := c.create(t, c.vm(ns, strings.ToLower(reason), shell(script)))
			if reason == "VMMKilled" {
				c.await(t, vm, booting, "started", running)
				must(t, syscall.Kill(c.vmm(t, vm), syscall.SIGKILL))
				began := time.Now()
				c.await(t, vm, 10*time.Second, "finished", finished)
				t.Logf("told %s after the kill", time.Since(began).Round(time.Millisecond))
			}
			now := c.await(t, vm, booting, "finished", finished)
			if got := condition(now, v1alpha1.ConditionFinished); got.Reason != reason || now.Status.Phase != v1alpha1.PhaseFailed {
				t.Errorf("Finished for the reason %s (%s), want %s", got.Reason, got.Message, reason)
			}
		})
	}
}

// vmm gives the pid of the QEMU process of a VM.
func (c *cluster) vmm(t *testing.T, vm *v1alpha1.ImpVM) int {
	t.Helper()
	procs, err := filepath.Glob("/proc/[0-9]*/cgroup")
	must(t, err)
	for _, path := range procs {
		content, err := os.ReadFile(path)
		if err == nil && strings.Contains(string(content), string(vm.UID)) {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			must(t, err)
			return pid
		}
	}
	t.Fatalf("no process in a cgroup of %s", vm.Name)
	return 0
}

func TestTwoVMsOfOneImageNeverSeeEachOthersWrites(t *testing.T) {
	c := shared(t, "qemu")
	ns := c.namespace(t)
	script := `sleep 1; test ! -e /mark || { echo foreign mark; exit 9; }; echo $NAME >/mark; rm -rf /www; echo $NAME >/etc/passwd; mv /root /moved || exit 8
sync; sleep 3; test "$(cat /mark)" = "$NAME" && test ! -e /www && test -d /moved && cat /etc/passwd`
	var vms []*v1alpha1.ImpVM
	for _, name := range []string{"one", "two"} {
		vms = append(vms, c.create(t, c.vm(ns, name, shell(script), func(vm *v1alpha1.ImpVM) {
			vm.Spec.NodeName = "node-1" // where they share a base
			vm.Spec.Env = []v1alpha1.EnvVar{{Name: "NAME", Value: name}}
		})))
	}
	c.await(t, vms[0], booting, "started", running)
	before := c.bases(t)
	if len(before) == 0 {
		t.Fatal("no base file in the cache while VMs of it run")
	}
	for _, vm := range vms {
		now := c.await(t, vm, booting, "finished", finished)
		if now.Status.Phase != v1alpha1.PhaseSucceeded {
			t.Errorf("%s\n%s", describe(now), c.console(t, now))
		}
	}
	for path, hash := range c.bases(t) {
		if was, ok := before[path]; ok && was != hash {
			t.Errorf("the base file %s has changed", path)
		}
	}
}

// bases are the hashes of the base files in the cache.
func (c *cluster) bases(t *testing.T) map[string]string {
	t.Helper()
	hashes := map[string]string{}
	must(t, filepath.WalkDir(c.server.Places.Data, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() || !strings.HasSuffix(path, ".ext4") || !strings.Contains(path, "image") {
			return nil //nolint:nilerr // a VM's folder may vanish meanwhile
		}
		f, err := os.Open(path)
		if err != nil {
			return nil //nolint:nilerr // likewise
		}
		defer f.Close()
		sum := sha256.New()
		if _, err := io.Copy(sum, f); err != nil {
			return err
		}
		hashes[path] = hex.EncodeToString(sum.Sum(nil))
		return nil
	}))
	return hashes
}

const dumpProgram = `package main

import (
	"encoding/hex"
	"fmt"
	"os"
	"strings"
)

func main() {
	for _, arg := range os.Args[1:] {
		fmt.Println("arg", hex.EncodeToString([]byte(arg)))
	}
	for _, variable := range os.Environ() {
		if strings.HasPrefix(variable, "T_") {
			fmt.Println("env", hex.EncodeToString([]byte(variable)))
		}
	}
	dir, _ := os.Getwd()
	fmt.Println("dir", hex.EncodeToString([]byte(dir)), "uid", os.Getuid(), "gid", os.Getgid())
}
`

// dumpImage is an image with one static program and nothing else: no shell, no /etc.
func (c *cluster) dumpImage(t *testing.T, name string) string {
	t.Helper()
	source, root := t.TempDir(), t.TempDir()
	must(t, os.WriteFile(filepath.Join(source, "main.go"), []byte(dumpProgram), 0o644))
	build := exec.Command("go", "build", "-o", filepath.Join(root, "dump"), filepath.Join(source, "main.go"))
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	loaded, err := imagefile.Load(root, imagefile.Config{Entrypoint: []string{"/dump"}, Cmd: []string{"from-the-image"}, User: "1234:5678"})
	must(t, err)
	c.push(t, loaded, name)
	return c.server.Registry + "/" + name
}

func TestWordsArriveInTheGuestByteForByte(t *testing.T) {
	c := shared(t, "qemu")
	ns := c.namespace(t)
	reference := c.dumpImage(t, "dump:1")
	words := []string{`plain`, `with "double" and 'single' quotes`, `$HOME ${PATH} $(id) $$`, "two\nlines\tand a tab", "Grüße, 世界 🚀", `back\slash \n`, ``, ` `, `-flag=x`, `* ? [a-z]`}
	var env []v1alpha1.EnvVar
	for i, w := range words {
		env = append(env, v1alpha1.EnvVar{Name: fmt.Sprintf("T_%d", i), Value: w})
	}
	vm := c.create(t, c.vm(ns, "words", image(reference), func(vm *v1alpha1.ImpVM) {
		vm.Spec.Command, vm.Spec.Args, vm.Spec.Env, vm.Spec.WorkingDir = nil, words, env, "/made/by imp"
	}))
	now := c.await(t, vm, booting, "finished", finished)
	if now.Status.Phase != v1alpha1.PhaseSucceeded {
		t.Fatal(describe(now))
	}
	console := c.console(t, now)
	for i, w := range words {
		for _, line := range []string{"arg " + hex.EncodeToString([]byte(w)), "env " + hex.EncodeToString(fmt.Appendf(nil, "T_%d=%s", i, w))} {
			if !hasLine(console, line) {
				t.Errorf("%q did not arrive as it is (no line %q)", w, line)
			}
		}
	}
	if line := "dir " + hex.EncodeToString([]byte("/made/by imp")) + " uid 1234 gid 5678"; !hasLine(console, line) {
		t.Errorf("no line %q in:\n%s", line, console)
	}

	command := c.create(t, c.vm(ns, "command", image(reference), func(vm *v1alpha1.ImpVM) { vm.Spec.Command = []string{"/dump", "mine"} }))
	now = c.await(t, command, booting, "finished", finished)
	console = c.console(t, now)
	if !hasLine(console, "arg "+hex.EncodeToString([]byte("mine"))) || strings.Contains(console, hex.EncodeToString([]byte("from-the-image"))) {
		t.Errorf("command did not replace Entrypoint and drop Cmd:\n%s", console)
	}
}

func hasLine(text, line string) bool {
	for l := range strings.Lines(text) {
		if strings.TrimRight(l, "\r\n") == line {
			return true
		}
	}
	return false
}

func TestAServerBecomesReadyAndOutlivesTheDaemons(t *testing.T) {
	c := shared(t, "qemu")
	ns := c.namespace(t)
	vm := c.create(t, c.vm(ns, "web", persistent, class("probed"), grace(5), func(vm *v1alpha1.ImpVM) {
		vm.Spec.Command, vm.Spec.NodeName = []string{"/bin/sh", "-c", "sleep 2; exec httpd -f -p 8080 -h /www"}, "node-1"
	}))
	now := c.await(t, vm, booting, "running, not yet Ready", running)
	if ready(now) {
		t.Error("Ready before its port answered")
	}
	c.await(t, vm, booting, "Ready", ready)
	pid := c.vmm(t, vm)
	for _, program := range []devserver.Program{devserver.Runtime, devserver.Agent} {
		must(t, c.server.Kill(program, "node-1"))
		must(t, c.server.Start(program, "node-1"))
	}
	// A change that needs both, and a restart of the guest: the image's command is taken at the next start.
	before := &v1alpha1.ImpVM{}
	must(t, c.client.Get(t.Context(), client.ObjectKeyFromObject(vm), before))
	after := before.DeepCopy()
	after.Spec.Env = []v1alpha1.EnvVar{{Name: "CHANGED", Value: "yes"}}
	must(t, c.client.Patch(t.Context(), after, client.MergeFrom(before)))
	now = c.await(t, vm, soon, "in need of a restart", func(vm *v1alpha1.ImpVM) bool {
		return condition(vm, v1alpha1.ConditionRestartRequired).Status == "True"
	})
	if !ready(now) || now.Status.RestartCount != 0 || c.vmm(t, vm) != pid {
		t.Errorf("the guest did not live through the daemons' restart: pid %d, was %d: %s", c.vmm(t, vm), pid, describe(now))
	}
	must(t, syscall.Kill(pid, syscall.SIGKILL))
	now = c.await(t, vm, booting, "Ready in its second boot", func(vm *v1alpha1.ImpVM) bool { return ready(vm) && vm.Status.RestartCount == 1 })
	if condition(now, v1alpha1.ConditionRestartRequired).Status == "True" {
		t.Error("it was restarted, and is said to need a restart")
	}
	must(t, c.client.Delete(t.Context(), vm))
	c.awaitGone(t, vm, soon)
	c.nothingLeft(t, vm)
}

func TestAGuestIsStoppedBySignalThenByForce(t *testing.T) {
	c := shared(t, "qemu")
	ns := c.namespace(t)
	polite := c.create(t, c.vm(ns, "polite", shell(`trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.2; done`), grace(20)))
	deaf := c.create(t, c.vm(ns, "deaf", shell(`trap '' TERM; while :; do sleep 1; done`), grace(2)))
	for _, vm := range []*v1alpha1.ImpVM{polite, deaf} {
		c.await(t, vm, booting, "started", running)
	}
	for _, vm := range []*v1alpha1.ImpVM{polite, deaf} {
		began := time.Now()
		must(t, c.client.Delete(t.Context(), vm))
		c.awaitGone(t, vm, soon)
		t.Logf("%s was gone after %s", vm.Name, time.Since(began).Round(10*time.Millisecond))
		c.nothingLeft(t, vm)
	}
}

func TestADeadlineEndsARealGuest(t *testing.T) {
	c := shared(t, "qemu")
	ns := c.namespace(t)
	vm := c.create(t, c.vm(ns, "slow", shell("sleep 600"), grace(1), func(vm *v1alpha1.ImpVM) {
		vm.Spec.ActiveDeadlineSeconds, vm.Spec.TTLSecondsAfterFinished = ptr.To(int64(8)), ptr.To(int32(1))
	}))
	now := c.await(t, vm, soon, "finished", finished)
	if got := condition(now, v1alpha1.ConditionFinished).Reason; got != v1alpha1.ReasonDeadlineExceeded || now.Status.Phase != v1alpha1.PhaseFailed {
		t.Errorf("Finished for the reason %s: %s", got, describe(now))
	}
	c.awaitGone(t, vm, soon)
	c.nothingLeft(t, vm)
}

func TestAMissingVMMOrKernelIsToldAndMended(t *testing.T) {
	qemu, err := exec.LookPath("qemu-system-x86_64")
	if err != nil {
		if os.Getenv("IMP_REQUIRE_ALL") == "1" {
			t.Fatalf("needs QEMU: %v", err)
		}
		t.Skipf("needs QEMU: %v", err)
	}
	link := filepath.Join(t.TempDir(), "qemu-system-x86_64")
	must(t, os.Symlink(qemu, link))
	c := own(t, devserver.Options{Nodes: 1, VMM: "qemu", RuntimeArgs: []string{"--qemu-bin=" + link}})
	ns := c.namespace(t)
	must(t, os.Remove(link))
	vm := c.create(t, c.vm(ns, "vm"))
	now := c.await(t, vm, soon, "told what is missing", reason(v1alpha1.ReasonRuntimeStartFailed))
	if message := condition(now, v1alpha1.ConditionReady).Message; !strings.Contains(message, link) {
		t.Errorf("the message does not name the binary %s: %s", link, message)
	}
	c.awaitEvent(t, vm, v1alpha1.ReasonRuntimeStartFailed)
	must(t, os.Symlink(qemu, link))
	now = c.await(t, vm, booting+time.Minute, "finished", finished)
	if now.Status.Phase != v1alpha1.PhaseSucceeded || now.UID != vm.UID {
		t.Errorf("it did not run once the binary was there: %s", describe(now))
	}
}

func TestAGuestThatHaltsIsNotSaidToBeReady(t *testing.T) {
	c := shared(t, "qemu")
	ns := c.namespace(t)
	vm := c.create(t, c.vm(ns, "halted", shell("sleep 1; halt -f; sleep 600"), grace(1)))
	c.await(t, vm, booting, "started", running)
	c.await(t, vm, booting, "silent", reason(v1alpha1.ReasonGuestSilent))
	must(t, c.client.Delete(t.Context(), vm))
	c.awaitGone(t, vm, soon)
	c.nothingLeft(t, vm)
}
