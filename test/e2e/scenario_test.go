package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/devserver"
	"imp.dev/imp/internal/devserver/chaos"
	"imp.dev/imp/internal/process"
	vmmfake "imp.dev/imp/internal/vmm/fake"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// The scenario of the design, with its numbers.
const (
	fleet    = 200 // VMs on one node
	killed   = 20  // whose VMM is killed while agent and runtime are down
	recycled = 5   // whose VMM is killed as well, and whose recorded pid is somebody else's by then
)

// processes finds the live VMM of each VM of node-1 by the mark in its environment: what is, not what a record says.
func (c *cluster) processes(t *testing.T) map[string]int {
	t.Helper()
	pids, err := chaos.Processes(filepath.Join(c.server.Places.Data, "node-1"))
	must(t, err)
	return pids
}

// editRecord changes the record of a VM's boot while no runtime runs; identity is that of its process.
func editRecord(t *testing.T, stateDir, uid string, change func(boot, identity map[string]any)) {
	t.Helper()
	path := filepath.Join(stateDir, "records", uid+".json")
	content, err := os.ReadFile(path)
	must(t, err)
	var record map[string]any
	decoder := json.NewDecoder(bytes.NewReader(content))
	decoder.UseNumber() // a start time is no float
	must(t, decoder.Decode(&record))
	at, boot := record, map[string]any{}
	for _, name := range []string{"record", "boot", "handle", "data", "identity"} {
		fields, ok := at[name].(map[string]any)
		if !ok {
			t.Fatalf("%s has no %s: %s", path, name, content)
		}
		if at = fields; name == "boot" {
			boot = fields
		}
	}
	change(boot, at)
	content, err = json.Marshal(record)
	must(t, err)
	must(t, os.WriteFile(path, content, 0o600))
}

// recycle makes the record of a VM name another process, as after its pid was given away: with the start time of before, or with one
// that is near the stranger's own.
func recycle(t *testing.T, stateDir, uid string, stranger process.Identity, near bool) {
	t.Helper()
	editRecord(t, stateDir, uid, func(_, identity map[string]any) {
		identity["pid"] = stranger.PID
		if near {
			identity["startTime"] = stranger.StartTime - 1
		}
	})
}

// strangers are processes that have nothing to do with Imp.
func strangers(t *testing.T, n int) []*exec.Cmd {
	t.Helper()
	var all []*exec.Cmd
	for range n {
		cmd := exec.Command("sleep", "3600")
		must(t, cmd.Start())
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		all = append(all, cmd)
	}
	return all
}

// steadyVMs creates n persistent VMs that run until they are stopped and are tried again after a second, and waits until all are Ready.
func (c *cluster) steadyVMs(t *testing.T, ns string, n int) map[string]*v1alpha1.ImpVM {
	t.Helper()
	for i := range n {
		c.create(t, c.vm(ns, fmt.Sprintf("vm-%03d", i), persistent, grace(0), scripted(vmmfake.Script{}), func(vm *v1alpha1.ImpVM) {
			vm.Spec.RestartPolicy = &v1alpha1.RestartPolicy{Backoff: &v1alpha1.RestartBackoff{InitialDelay: &metav1.Duration{Duration: time.Second}}}
		}))
	}
	var vms map[string]*v1alpha1.ImpVM
	if !eventually(t.Context(), 3*time.Minute, func() bool { vms = c.byUID(t, ns); return countReady(vms) == n }) {
		t.Fatalf("%d of %d VMs are Ready", countReady(vms), n)
	}
	return vms
}

func (c *cluster) byUID(t *testing.T, ns string) map[string]*v1alpha1.ImpVM {
	t.Helper()
	list := &v1alpha1.ImpVMList{}
	must(t, c.client.List(t.Context(), list, client.InNamespace(ns)))
	vms := map[string]*v1alpha1.ImpVM{}
	for i := range list.Items {
		vms[string(list.Items[i].UID)] = &list.Items[i]
	}
	return vms
}

func countReady(vms map[string]*v1alpha1.ImpVM) (n int) {
	for _, vm := range vms {
		if ready(vm) {
			n++
		}
	}
	return n
}

func TestTwoHundredVMsWhoseAgentAndRuntimeDieWithTwentyOfTheirVMMsAndFivePidsRecycled(t *testing.T) {
	c := own(t, devserver.Options{Nodes: 1, VMM: "fake"})
	ns := c.namespace(t)
	before := c.steadyVMs(t, ns, fleet)
	pids := c.processes(t)
	uids := make([]string, 0, fleet)
	for uid := range before {
		if pids[uid] == 0 {
			t.Fatalf("%s is Ready and has no process", before[uid].Name)
		}
		uids = append(uids, uid)
	}
	slices.Sort(uids)
	dead, reused, alive := uids[:killed], uids[killed:killed+recycled], uids[killed+recycled:]

	for _, program := range []devserver.Program{devserver.Agent, devserver.Runtime} {
		must(t, c.server.Kill(program, "node-1"))
	}
	for _, uid := range slices.Concat(dead, reused) {
		must(t, syscall.Kill(pids[uid], syscall.SIGKILL))
	}
	others := strangers(t, recycled)
	for i, uid := range reused {
		identity, err := process.Identify(others[i].Process.Pid)
		must(t, err)
		recycle(t, filepath.Join(c.server.Places.Data, "node-1"), uid, identity, i%2 == 1)
	}
	began := time.Now()
	for _, program := range []devserver.Program{devserver.Runtime, devserver.Agent} {
		must(t, c.server.Start(program, "node-1"))
	}
	t.Logf("all 175 were adopted, and 25 judged, on the API %s after the start", c.awaitVerdicts(t, ns, slices.Concat(dead, reused), began))

	var now map[string]*v1alpha1.ImpVM
	if !eventually(t.Context(), time.Minute, func() bool { now = c.byUID(t, ns); return countReady(now) == fleet }) {
		t.Fatalf("%d of %d VMs are Ready a minute after", countReady(now), fleet)
	}
	after := c.processes(t)
	for _, uid := range slices.Concat(dead, reused) {
		vm := now[uid]
		if vm.Status.RestartCount != 1 || vm.Status.Incarnation != 2 || vm.Status.LastFailure == nil || vm.Status.LastFailure.Reason != "VMMKilled" {
			t.Errorf("want %s restarted once for VMMKilled: %d restarts, last failure %+v", vm.Name, vm.Status.RestartCount, vm.Status.LastFailure)
		}
		if after[uid] == 0 || after[uid] == pids[uid] {
			t.Errorf("%s has process %d, had %d", vm.Name, after[uid], pids[uid])
		}
	}
	for _, uid := range alive {
		vm := now[uid]
		if after[uid] != pids[uid] || vm.Status.RestartCount != 0 || vm.Status.Incarnation != 1 || vm.Status.LastFailure != nil {
			t.Errorf("%s was left alone, but has process %d instead of %d: %s", vm.Name, after[uid], pids[uid], describe(vm))
		}
	}
	for _, cmd := range others {
		if _, err := process.Identify(cmd.Process.Pid); err != nil {
			t.Errorf("stranger %d does not live any more: %v", cmd.Process.Pid, err)
		}
	}
}

// awaitVerdicts waits until the API says VMMKilled of exactly these, and gives how long after began.
func (c *cluster) awaitVerdicts(t *testing.T, ns string, want []string, began time.Time) time.Duration {
	t.Helper()
	var judged []string
	if !eventually(t.Context(), time.Minute, func() bool {
		judged = nil
		for uid, vm := range c.byUID(t, ns) {
			if vm.Status.LastFailure != nil && vm.Status.LastFailure.Reason == "VMMKilled" {
				judged = append(judged, uid)
			}
		}
		return len(judged) >= len(want)
	}) {
		t.Fatalf("%d VMs are judged, want %d", len(judged), len(want))
	}
	took := time.Since(began).Round(time.Millisecond)
	slices.Sort(judged)
	if !slices.Equal(judged, slices.Sorted(slices.Values(want))) {
		t.Errorf("judged are %d VMs, but not those whose VMMs were killed", len(judged))
	}
	return took
}

func TestAfterAHostsRebootEachVMIsStartedOnceAndItsFailuresAreNotCounted(t *testing.T) {
	c := own(t, devserver.Options{Nodes: 1, VMM: "fake"})
	ns := c.namespace(t)
	vms := c.steadyVMs(t, ns, 5)
	pids := c.processes(t)
	for _, program := range []devserver.Program{devserver.Agent, devserver.Runtime} {
		must(t, c.server.Kill(program, "node-1"))
	}
	for uid := range vms {
		must(t, syscall.Kill(pids[uid], syscall.SIGKILL))
		// What a reboot leaves: the records, no process, and another boot id than theirs.
		editRecord(t, filepath.Join(c.server.Places.Data, "node-1"), uid, func(boot, identity map[string]any) {
			boot["hostBootID"], identity["bootID"] = "00000000-0000-4000-8000-000000000000", "00000000-0000-4000-8000-000000000000"
		})
	}
	for _, program := range []devserver.Program{devserver.Runtime, devserver.Agent} {
		must(t, c.server.Start(program, "node-1"))
	}
	for _, vm := range vms {
		now := c.await(t, vm, soon, "Ready in its second boot", func(vm *v1alpha1.ImpVM) bool { return ready(vm) && vm.Status.Incarnation == 2 })
		if now.Status.RestartCount != 1 || (now.Status.Restart != nil && now.Status.Restart.Attempts != 0) {
			t.Errorf("%s: %d restarts, %+v", now.Name, now.Status.RestartCount, now.Status.Restart)
		}
		if f := now.Status.LastFailure; f == nil || f.Reason != "LostWithHost" {
			t.Errorf("%s: its last failure is %+v, want LostWithHost", now.Name, f)
		}
	}
}
