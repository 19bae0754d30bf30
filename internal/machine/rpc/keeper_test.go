package rpc_test

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/rpc"
)

// keeper answers with what it was made with, and keeps what it was asked.
type keeper struct {
	findings []machine.Finding
	disks    []machine.Discarded
	err      error
	asked    []string
}

func (k *keeper) Audit(_ context.Context, repair bool) ([]machine.Finding, error) {
	k.asked = append(k.asked, map[bool]string{false: "audit", true: "repair"}[repair])
	return k.findings, k.err
}

func (k *keeper) Trash(context.Context) ([]machine.Discarded, error) {
	k.asked = append(k.asked, "trash")
	return k.disks, k.err
}

func (k *keeper) Restore(_ context.Context, name, id string) error {
	k.asked = append(k.asked, "restore "+name+" to "+id)
	return k.err
}

// keep offers k on a socket to processes of uid, beside a service for the test's own user.
func keep(t *testing.T, k machine.Keeper, uid int) *rpc.Client {
	t.Helper()
	path := filepath.Join(t.TempDir(), "runtime.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	server := rpc.NewServer(&stub{}, []uint32{uint32(os.Geteuid())})
	rpc.RegisterKeeper(server, k, []uint32{uint32(uid)})
	go func() { _ = server.Serve(l) }()
	client, err := rpc.NewClient(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = client.Close()
		server.Stop()
	})
	return client
}

func TestWhatAKeeperTellsArrivesAsItWasSent(t *testing.T) {
	at := time.Now().UTC().Round(0)
	k := &keeper{
		findings: []machine.Finding{{Kind: "cgroup", ID: "a", Name: "/imp/\xff", Since: at, Repaired: true, Problem: "p\xfe"}, {Kind: "tap"}},
		disks: []machine.Discarded{{Name: "a.1", ID: "a", VMNamespace: "n", VM: "v", BaseDigest: "d", GiB: 2, Bytes: 3, DiscardedAt: at,
			ExpiresAt: at.Add(time.Hour), Why: "w\xff"}},
	}
	client := keep(t, k, os.Geteuid())
	for _, repair := range []bool{false, true} {
		found, err := client.Audit(t.Context(), repair)
		if d := cmp.Diff(k.findings, found); d != "" || err != nil {
			t.Error(d, err)
		}
	}
	disks, err := client.Trash(t.Context())
	if d := cmp.Diff(k.disks, disks); d != "" || err != nil {
		t.Error(d, err)
	}
	if err := client.Restore(t.Context(), "a.1", "b"); err != nil {
		t.Error(err)
	}
	if d := cmp.Diff([]string{"audit", "repair", "trash", "restore a.1 to b"}, k.asked); d != "" {
		t.Error(d)
	}
	k.err = fault.Errorf(fault.NotFound, "restoring disk", "no disk")
	if err := client.Restore(t.Context(), "a.1", "b"); !fault.Is(err, fault.NotFound) || err.Error() != k.err.Error() {
		t.Errorf("an error arrives as %v", err)
	}
}

func TestTheAgentIsNoKeeper(t *testing.T) {
	k := &keeper{}
	client := keep(t, k, os.Geteuid()+1)
	if _, err := client.List(t.Context()); err != nil {
		t.Fatalf("the service itself: %v", err)
	}
	_, audited := client.Audit(t.Context(), true)
	_, listed := client.Trash(t.Context())
	for _, err := range []error{audited, listed, client.Restore(t.Context(), "a.1", "a")} {
		if err == nil || !strings.Contains(err.Error(), "run it as root") {
			t.Errorf("a peer that is not root got %v", err)
		}
	}
	if len(k.asked) != 0 {
		t.Errorf("the keeper was asked %v", k.asked)
	}
}
