// Package fake is a network of plain files: what was set and what is attached are files in a directory, which survive the runtime as
// real networks do, and a TAP is /dev/null. For tests of everything above a network.
package fake

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/network"
)

// Network keeps what it knows below a directory.
type Network struct {
	dir string

	mu       sync.Mutex
	err      error
	host     network.Host
	problems map[string]string
	counters map[[2]string]network.Counters
	findings []network.Finding
}

var _ network.Network = (*Network)(nil)

const (
	networksDir = "networks"
	vmsDir      = "vms"
	suffix      = ".json"
)

// New makes a network in dir, which is made if missing. A second one over the same directory finds what the first one had.
func New(dir string) (*Network, error) {
	for _, folder := range []string{networksDir, vmsDir} {
		if err := os.MkdirAll(filepath.Join(dir, folder), 0o700); err != nil {
			return nil, fmt.Errorf("making directory of fake network: %w", err)
		}
	}
	host := network.Host{VTEP: "192.0.2.1", MTU: 1500, Port: network.DefaultPort, Addresses: []string{"192.0.2.1"}}
	return &Network{dir: dir, host: host, problems: map[string]string{}, counters: map[[2]string]network.Counters{}}, nil
}

// Fail makes every Attach fail with err until Fail(nil).
func (n *Network) Fail(err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.err = err
}

// SetHost makes Host answer with host.
func (n *Network) SetHost(host network.Host) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.host = host
}

// SetProblem makes the status of the network of that ID tell problem, "" for none.
func (n *Network) SetProblem(id, problem string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.problems[id] = problem
}

// SetCounters makes Counters tell c, if the VM of c has the interface of c.
func (n *Network) SetCounters(c network.Counters) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.counters[[2]string{c.VM, c.Interface}] = c
}

// Spec gives what was set for the network of that ID; false: it is not known.
func (n *Network) Spec(id string) (network.Spec, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	spec := network.Spec{}
	err := n.read(networksDir, id, &spec)
	return spec, err == nil
}

// Host implements network.Network.
func (n *Network) Host(context.Context) (network.Host, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.host, nil
}

// Set implements network.Network.
func (n *Network) Set(_ context.Context, spec network.Spec) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return fault.New(fault.NetworkSetupFailed, "setting network", n.write(networksDir, spec.ID, spec))
}

// Forget implements network.Network.
func (n *Network) Forget(_ context.Context, id string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	const stage = "forgetting network"
	attached, err := n.attached()
	if err != nil {
		return fault.New(fault.NetworkSetupFailed, stage, err)
	}
	for _, vm := range slices.Sorted(maps.Keys(attached)) {
		if on(attached[vm], id) {
			return fault.Errorf(fault.NetworkSetupFailed, stage, "network %s has VM %s attached", id, vm)
		}
	}
	return fault.New(fault.NetworkSetupFailed, stage, n.remove(networksDir, id))
}

// Networks implements network.Network.
func (n *Network) Networks(context.Context) ([]network.Status, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	const stage = "listing networks"
	ids, err := n.list(networksDir)
	if err != nil {
		return nil, fault.New(fault.NetworkSetupFailed, stage, err)
	}
	attached, err := n.attached()
	if err != nil {
		return nil, fault.New(fault.NetworkSetupFailed, stage, err)
	}
	var out []network.Status
	for _, id := range ids {
		out = append(out, network.Status{ID: id, Guests: guests(attached, id), Problem: n.problems[id]})
	}
	return out, nil
}

// Attach implements network.Network. An interface that names no network is of none that must be known.
func (n *Network) Attach(_ context.Context, vmID string, interfaces []network.Interface) ([]network.Attachment, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	const stage = "attaching network"
	if n.err != nil {
		return nil, fault.New(fault.NetworkSetupFailed, stage, n.err)
	}
	for _, i := range interfaces {
		if i.Network == "" {
			continue
		}
		if err := n.read(networksDir, i.Network, &network.Spec{}); err != nil {
			return nil, fault.Errorf(fault.NetworkSetupFailed, stage, "network %s of interface %s is not known here", i.Network, i.Name)
		}
	}
	if err := n.fits(vmID, interfaces); err != nil {
		return nil, fault.New(fault.NetworkSetupFailed, stage, err)
	}
	if len(interfaces) == 0 {
		return nil, fault.New(fault.NetworkSetupFailed, stage, n.remove(vmsDir, vmID))
	}
	var out []network.Attachment
	for _, i := range interfaces {
		f, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
		if err != nil {
			closeAll(out)
			return nil, fault.New(fault.NetworkSetupFailed, "opening TAP", err)
		}
		out = append(out, network.Attachment{Interface: i, TAP: f})
	}
	if err := n.write(vmsDir, vmID, interfaces); err != nil {
		closeAll(out)
		return nil, fault.New(fault.NetworkSetupFailed, stage, err)
	}
	return out, nil
}

// Detach implements network.Network.
func (n *Network) Detach(_ context.Context, vmID string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return fault.New(fault.NetworkSetupFailed, "detaching network", n.remove(vmsDir, vmID))
}

// Attached implements network.Network.
func (n *Network) Attached(context.Context) ([]string, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	ids, err := n.list(vmsDir)
	return ids, fault.New(fault.NetworkSetupFailed, "listing attachments", err)
}

// Find makes the next Audit tell f: one that is not repaired and has no problem is repaired by an Audit that is to repair.
func (n *Network) Find(f network.Finding) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.findings = append(n.findings, f)
}

// Audit implements network.Network: what Find gave, and problems of networks.
func (n *Network) Audit(ctx context.Context, repair bool) ([]network.Finding, error) {
	statuses, err := n.Networks(ctx)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	var out, left []network.Finding
	for _, f := range n.findings {
		f.Repaired = f.Repaired || repair && f.Problem == ""
		out = append(out, f)
		if !f.Repaired {
			left = append(left, f)
		}
	}
	n.findings = left
	for _, s := range statuses {
		if s.Problem != "" {
			out = append(out, network.Finding{Kind: "network", Network: s.ID, Name: "network " + s.ID, Problem: s.Problem})
		}
	}
	return out, nil
}

// Counters implements network.Network: zeros, or what SetCounters gave.
func (n *Network) Counters(context.Context) ([]network.Counters, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	attached, err := n.attached()
	if err != nil {
		return nil, fault.New(fault.NetworkSetupFailed, "counting traffic", err)
	}
	var out []network.Counters
	for vm, interfaces := range attached {
		for _, i := range interfaces {
			c := n.counters[[2]string{vm, i.Name}]
			c.VM, c.Interface, c.Network = vm, i.Name, i.Network
			out = append(out, c)
		}
	}
	slices.SortFunc(out, func(a, b network.Counters) int {
		return cmp.Or(cmp.Compare(a.VM, b.VM), cmp.Compare(a.Interface, b.Interface))
	})
	return out, nil
}

// fits says whether each network takes one more guest.
func (n *Network) fits(vmID string, interfaces []network.Interface) error {
	if vms, err := n.list(vmsDir); err != nil || len(vms) < network.MaxGuests {
		return err
	}
	attached, err := n.attached()
	if err != nil {
		return err
	}
	for _, i := range interfaces {
		if !on(attached[vmID], i.Network) && guests(attached, i.Network) >= network.MaxGuests {
			return fmt.Errorf("network %s is full on this node: it has %d guests, the most a bridge can hold", i.Network, network.MaxGuests)
		}
	}
	return nil
}

func (n *Network) attached() (map[string][]network.Interface, error) {
	ids, err := n.list(vmsDir)
	if err != nil {
		return nil, err
	}
	out := map[string][]network.Interface{}
	for _, id := range ids {
		var interfaces []network.Interface
		if err := n.read(vmsDir, id, &interfaces); err != nil {
			return nil, err
		}
		out[id] = interfaces
	}
	return out, nil
}

func (n *Network) list(folder string) ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(n.dir, folder))
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, e := range entries {
		ids = append(ids, strings.TrimSuffix(e.Name(), suffix))
	}
	return ids, nil
}

func (n *Network) read(folder, id string, into any) error {
	data, err := os.ReadFile(n.path(folder, id))
	if err != nil {
		return err
	}
	return json.Unmarshal(data, into)
}

func (n *Network) write(folder, id string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return os.WriteFile(n.path(folder, id), data, 0o600)
}

func (n *Network) remove(folder, id string) error {
	if err := os.Remove(n.path(folder, id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func (n *Network) path(folder, id string) string { return filepath.Join(n.dir, folder, id+suffix) }

func on(interfaces []network.Interface, id string) bool {
	return slices.ContainsFunc(interfaces, func(i network.Interface) bool { return i.Network == id })
}

func guests(attached map[string][]network.Interface, id string) int {
	count := 0
	for _, interfaces := range attached {
		for _, i := range interfaces {
			if i.Network == id {
				count++
			}
		}
	}
	return count
}

func closeAll(attachments []network.Attachment) {
	for _, a := range attachments {
		a.TAP.Close()
	}
}
