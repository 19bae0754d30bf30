package qemu

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"imp.dev/imp/internal/cgroup"
	"imp.dev/imp/internal/process"
	"imp.dev/imp/internal/vmm"
)

// runtimeCommand makes the test binary a runtime that starts one VM, tells its Handle, and goes on watching until it is killed.
const runtimeCommand = "runtime-to-be-killed"

type runtimeOrder struct {
	Instance string
	Config   vmm.Config
}

func runtimeMain() {
	var o runtimeOrder
	if err := json.NewDecoder(os.Stdin).Decode(&o); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	tree, err := cgroup.Open(cgroup.Options{Instance: o.Instance})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	d := New(Options{Launcher: process.New(process.Options{}), Instance: o.Instance, Cgroups: tree, UIDBase: testUID, UIDCount: testUIDs, Log: quiet()})
	i, err := d.Start(context.Background(), o.Config)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	_ = json.NewEncoder(os.Stdout).Encode(i.Handle())
	select {}
}

func TestGuestOutlivesARuntimeKilledByNine(t *testing.T) {
	b := newBench(t)
	c := b.config(t, "reboot")
	order, err := json.Marshal(runtimeOrder{Instance: b.instance, Config: c})
	if err != nil {
		t.Fatal(err)
	}
	first := exec.Command("/proc/self/exe", runtimeCommand)
	first.Stdin = bytes.NewReader(order)
	var complaint bytes.Buffer
	first.Stderr = &complaint
	out, err := first.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Start(); err != nil {
		t.Fatal(err)
	}
	d := b.driver(t)
	t.Cleanup(func() {
		if err := d.Destroy(context.Background(), c, vmm.Handle{}); err != nil {
			t.Error(err)
		}
	})
	var h vmm.Handle
	err = json.NewDecoder(out).Decode(&h)
	_ = first.Process.Kill()
	_ = first.Wait()
	if err != nil {
		t.Fatalf("%v: %s", err, &complaint)
	}
	i, err := d.Recover(t.Context(), c, h)
	if err != nil {
		t.Fatalf("recovering after the kill: %v", err)
	}
	t.Cleanup(func() { _ = i.Close() })
	trigger(t, i)
	select {
	case <-i.Done():
	case <-time.After(bootTime):
		t.Fatal("the end was not seen")
	}
	if e, err := d.Evidence(t.Context(), c, h); err != nil || e.State != vmm.Ended || e.Cause != vmm.CauseReboot {
		t.Errorf("%+v %v", e, err)
	}
}
