package rpc_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/machinetest"
	"imp.dev/imp/internal/machine/rpc"
	"imp.dev/imp/internal/network"
	"imp.dev/imp/internal/process"
	"imp.dev/imp/internal/restart"
	vmmfake "imp.dev/imp/internal/vmm/fake"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case process.ChildCommand:
			process.ChildMain()
		case vmmfake.Command:
			vmmfake.Main()
		}
	}
	os.Exit(m.Run())
}

// serve offers s on a socket and gives a client for it.
func serve(t *testing.T, s machine.Service, uids ...uint32) (*rpc.Client, func()) {
	t.Helper()
	dir, err := os.MkdirTemp("", "rpc")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "runtime.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	server := rpc.NewServer(s, uids)
	go func() { _ = server.Serve(l) }()
	client, err := rpc.NewClient(path)
	if err != nil {
		t.Fatal(err)
	}
	return client, func() {
		_ = client.Close()
		server.Stop()
		_ = os.RemoveAll(dir)
	}
}

func TestServiceOverTheSocket(t *testing.T) {
	machinetest.Run(t, func(t *testing.T) *machinetest.Harness {
		return machinetest.NewEngine(t, func(t *testing.T, s machine.Service) (machine.Service, func()) {
			return serve(t, s, uint32(os.Geteuid()))
		})
	})
}

// stub answers with what it was made with, and keeps what it was asked.
type stub struct {
	machine.Service
	spec   machine.Spec
	status machine.Status
	info   machine.Info
	err    error
}

func (s *stub) Ensure(_ context.Context, spec machine.Spec) (machine.Status, error) {
	s.spec = spec
	return s.status, s.err
}
func (s *stub) List(context.Context) ([]machine.Status, error) {
	return []machine.Status{s.status}, s.err
}
func (s *stub) Info(context.Context) (machine.Info, error) { return s.info, s.err }

func TestOnlyTheAgentsUserIsLetIn(t *testing.T) {
	client, end := serve(t, &stub{}, uint32(os.Geteuid())+1)
	defer end()
	_, err := client.Info(t.Context())
	if !fault.Is(err, fault.Unavailable) {
		t.Fatalf("a stranger got %v, want Unavailable", err)
	}
}

func TestReasonsSurviveTheWire(t *testing.T) {
	for _, reason := range []fault.Reason{
		fault.ImagePullFailed, fault.DiskFailed, fault.NetworkSetupFailed, fault.RuntimeStartFailed, fault.NoCapacity, fault.InvalidSpec,
		fault.WaitingForSecrets, fault.StaleAssignment, fault.NotFound, fault.Unavailable, fault.Internal,
	} {
		t.Run(string(reason), func(t *testing.T) {
			want := &fault.Error{Reason: reason, Stage: "doing something", Permanent: true, Err: errors.New("the cause\xff: in detail")}
			client, end := serve(t, &stub{err: want}, uint32(os.Geteuid()))
			defer end()
			_, err := client.List(t.Context())
			got := fault.Of(err)
			if got.Reason != reason || got.Stage != want.Stage || !got.Permanent || got.Error() != want.Error() {
				t.Fatalf("got %+v (%v), want %+v", got, err, want)
			}
		})
	}
}

func TestASpecOfTheLargestWorkloadArrivesByteForByte(t *testing.T) {
	service := &stub{}
	client, end := serve(t, service, uint32(os.Geteuid()))
	defer end()
	never, deadline := int32(0), time.Now().UTC().Round(0)
	s := machinetest.NewSpec(func(s *machine.Spec) {
		s.Workload = machine.Workload{
			Command: []string{"sh", "-c", "echo \"$A\" 'b'\n\tü"}, Args: []string{""}, WorkingDir: "/w", DataPaths: []string{"/d"},
			Env: []machine.EnvVar{{Name: "BIG", Value: strings.Repeat("x", machine.MaxWorkloadBytes-200)}, {Name: "Q", Value: "\"'$\n"}},
		}
		s.Image.Credentials = []image.Credential{{Registry: "r", Username: "u", Password: "p\xff", IdentityToken: "i", RegistryToken: "t"}}
		s.Probe = &machine.Probe{Path: "/", Port: 80, Period: time.Second, Timeout: time.Second, FailureThreshold: 3}
		s.Deadline, s.Script = &deadline, []byte("{}")
		s.Restart = restart.Policy{Mode: restart.Reschedule, MaxRetries: &never, InitialDelay: time.Second, MaxDelay: time.Minute, OnExhaustion: restart.CoolDown, CoolDown: time.Minute}
		s.History = restart.History{
			Attempts: 1, StartFailures: 2, LastFailureAt: &deadline, NextTryAt: &deadline, ExhaustedAt: &deadline, Elsewhere: true, Reset: "r",
		}
		s.Lifecycle, s.Halt, s.Reset, s.Cluster = machine.Persistent, &machine.Halt{Reason: "Evacuated", Message: "node ü is drained"}, "r2", "0b1c"
	})
	if _, err := client.Ensure(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(s, service.spec); d != "" {
		t.Fatal(d)
	}
}

func TestEveryStatusArrivesAsItWasSent(t *testing.T) {
	service := &stub{}
	client, end := serve(t, service, uint32(os.Geteuid()))
	defer end()
	ok, code, now := true, int32(3), time.Now().UTC().Round(0)
	exit := &machine.Exit{Incarnation: 1, Run: 2, Verdict: machine.Failed, At: now, Code: &code, Message: "m\xff", ConsoleTail: []byte{0, 255}, Marker: true}
	check := machine.Check{OK: &ok, Reason: "R", Message: "m\xfe", Since: now}
	service.status = machine.Status{
		ID: "a", Namespace: "n", Name: "m", Assignment: 1, Revision: 2, Generation: 3, State: machine.Running, Incarnation: 4, Run: 5, Disk: check,
		Network: check, Started: check, GuestReady: machine.Check{}, RestartRequired: true, Final: exit, LastExit: exit, StartedAt: &now, FinishedAt: &now,
		ImageDigest: "d", DiskGeneration: 6, Progress: "p", Counters: machine.Counters{Starts: 1, Exits: 2, Restarts: 3, Adopted: 4, Retries: 5, Silent: 6, Ends: map[machine.Verdict]int64{machine.Stopped: 7, machine.GuestHung: 8}},
		LastFailure: &machine.Failure{Reason: "GuestHung", Message: "m\xff", At: now, Incarnation: 9, Code: &code, ConsoleTail: []byte{1, 255}}, Cluster: "0b1c",
		Timings: machine.Timings{Pull: 1, Disk: 2, Network: 3, VMM: 4, Kernel: 5, Guest: 6, Workload: 7},
	}
	service.status.History.Attempts, service.status.History.LastFailureAt = 3, &now
	service.info = machine.Info{
		Version: "v", Instance: "i", BootID: "b", Features: []string{"f"}, Driver: "d", Usable: true, Problem: "p", VMMVersion: "w", Accelerator: "a",
		KernelDigest: "k", CgroupVersion: "v2", Architecture: "amd64", BudgetVCPU: 1, BudgetMemoryMiB: 2, BudgetDiskGiB: 3, OverheadMiB: 4,
		ImageCache: image.Usage{Bytes: 1, Budget: 2, Bases: 3, InUse: 4},
		Network:    network.Host{VTEP: "192.0.2.1", MTU: 1500, Port: 14789, Addresses: []string{"192.0.2.1", "10.0.0.1"}, ForwardBlocked: "chain FORWARD of table filter drops"},
	}
	list, err := client.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(service.status, list[0]); d != "" {
		t.Error(d)
	}
	info, err := client.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(service.info, info); d != "" {
		t.Error(d)
	}
}

func TestAClientFindsTheRuntimeAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "runtime.sock")
	client, err := rpc.NewClient(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	if _, err := client.List(t.Context()); !fault.Is(err, fault.Unavailable) {
		t.Fatalf("without a runtime: %v, want Unavailable", err)
	}
	for range 2 {
		l, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		server := rpc.NewServer(&stub{}, []uint32{uint32(os.Geteuid())})
		go func() { _ = server.Serve(l) }()
		tick := time.NewTicker(20 * time.Millisecond)
		for end := time.Now().Add(20 * time.Second); ; <-tick.C {
			if _, err = client.List(t.Context()); err == nil {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("the client does not find the runtime again: %v", err)
			}
		}
		tick.Stop()
		server.Stop()
	}
}
