package firecracker

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"imp.dev/imp/internal/vmm"
)

// Files of a run. The sockets are named as the VMM sees them, relative to its working directory: no length of a path matters.
const (
	apiName     = "api.sock"
	vsockName   = "vsock.sock"
	logName     = "firecracker.log"
	metricsName = "firecracker.metrics"
	noteName    = "end.json"
)

// home is where the files of a run are, with or without a jail.
type home struct {
	// Containment is Jailed or Unjailed.
	Containment string `json:"containment"`
	// Root is what the VMM has as its working directory: the jail's root, else Config.Dir. What lies in a jail's root is the VMM's to change.
	Root string `json:"root"`
	// Keep is where log and metrics are, out of the VMM's reach.
	Keep string `json:"keep"`
	// UID the VMM runs as.
	UID int `json:"uid"`
	// Release is Firecracker's version, as it said it.
	Release string `json:"release"`
}

// Containments.
const (
	Jailed   = "jailer"
	Unjailed = "none"
)

func unjailedHome(c vmm.Config) home {
	return home{Containment: Unjailed, Root: c.Dir, Keep: c.Dir, UID: os.Geteuid()}
}

func (h home) logPath() string     { return filepath.Join(h.Keep, logName) }
func (h home) metricsPath() string { return filepath.Join(h.Keep, metricsName) }

// makeLogs makes the files that Firecracker writes by path, owned by who it runs as. Firecracker does not append, so that each run needs new ones.
func (h home) makeLogs() error {
	for _, path := range []string{h.logPath(), h.metricsPath()} {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("making log: %w", err)
		}
		f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			return fmt.Errorf("making log: %w", err)
		}
		if h.UID != os.Geteuid() {
			err = f.Chown(h.UID, h.UID)
		}
		if err := errors.Join(err, f.Close()); err != nil {
			return fmt.Errorf("making log: %w", err)
		}
		if h.Root == h.Keep {
			continue
		}
		if err := os.Link(path, filepath.Join(h.Root, filepath.Base(path))); err != nil {
			return fmt.Errorf("putting log into the jail: %w", err)
		}
	}
	return nil
}
