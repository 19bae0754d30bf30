// Package fake is a network of plain files: an attached VM has one in a directory, which survives the runtime as a real attachment
// does, and its TAP is /dev/null. For tests of everything above a network.
package fake

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/network"
)

// Network keeps its attachments below a directory.
type Network struct {
	dir string
	mu  sync.Mutex
	err error
}

var _ network.Network = (*Network)(nil)

// New makes a network in dir, which is made if missing.
func New(dir string) (*Network, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making directory of fake network: %w", err)
	}
	return &Network{dir: dir}, nil
}

// Fail makes every Attach fail with err until Fail(nil).
func (n *Network) Fail(err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.err = err
}

// Attach implements network.Network.
func (n *Network) Attach(_ context.Context, vmID string, interfaces []network.Interface) ([]network.Attachment, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.err != nil {
		return nil, fault.New(fault.NetworkSetupFailed, "attaching network", n.err)
	}
	if err := os.WriteFile(filepath.Join(n.dir, vmID), nil, 0o600); err != nil {
		return nil, fault.New(fault.NetworkSetupFailed, "attaching network", err)
	}
	var out []network.Attachment
	for _, i := range interfaces {
		f, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
		if err != nil {
			return nil, fault.New(fault.NetworkSetupFailed, "opening TAP", err)
		}
		out = append(out, network.Attachment{Interface: i, TAP: f})
	}
	return out, nil
}

// Detach implements network.Network.
func (n *Network) Detach(_ context.Context, vmID string) error {
	if err := os.Remove(filepath.Join(n.dir, vmID)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fault.New(fault.NetworkSetupFailed, "detaching network", err)
	}
	return nil
}

// Attached implements network.Network.
func (n *Network) Attached(context.Context) ([]string, error) {
	entries, err := os.ReadDir(n.dir)
	if err != nil {
		return nil, fault.New(fault.NetworkSetupFailed, "listing attachments", err)
	}
	var ids []string
	for _, e := range entries {
		ids = append(ids, e.Name())
	}
	return ids, nil
}
