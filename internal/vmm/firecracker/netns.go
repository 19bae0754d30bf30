package firecracker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"imp.dev/imp/internal/netns"
	"imp.dev/imp/internal/vmm"
)

// namespace is where a run's Firecracker opens its TAPs. In a jail it is one of its own that nothing else is ever in; it has no name and ends with
// the process.
func (d *Driver) namespace() (*os.File, error) {
	if !d.options.Unjailed {
		return netns.New()
	}
	dir := d.options.Namespaces
	if dir == "" {
		dir = "/proc/thread-self/ns"
	}
	f, err := os.Open(filepath.Join(dir, "net"))
	if err != nil {
		return nil, fmt.Errorf("opening network namespace: %w", err)
	}
	return f, nil
}

// borrow brings the TAPs into the namespace. What it gives brings home those that were brought.
func borrow(ctx context.Context, nics []vmm.NIC, namespace *os.File, uid int) (borrowed []specNIC, back func() error, err error) {
	var home []func() error
	back = func() error {
		var errs []error
		for _, one := range home {
			errs = append(errs, one())
		}
		home = nil
		return errors.Join(errs...)
	}
	for _, n := range nics {
		name, one, err := n.Lend(ctx, namespace, uid)
		if err != nil {
			return nil, back, fmt.Errorf("bringing TAP of network interface %s to its VMM: %w", n.MAC, err)
		}
		home = append(home, one)
		borrowed = append(borrowed, specNIC{Device: name, MAC: n.MAC})
	}
	return borrowed, back, nil
}
