package engine

import (
	"fmt"
	"path/filepath"
)

// paths of the files of VMs. IDs were checked by machine.Validate: they hold no slash and no dots.
type paths struct{ state, run, trash string }

// dir of what survives a reboot of the host.
func (p paths) dir(id string) string     { return filepath.Join(p.state, id) }
func (p paths) base(id string) string    { return filepath.Join(p.dir(id), "base.ext4") }
func (p paths) private(id string) string { return filepath.Join(p.dir(id), "private.ext4") }
func (p paths) console(id string) string { return filepath.Join(p.dir(id), "console.log") }

// volatile is the directory of what does not survive a reboot of the host.
func (p paths) volatile(id string) string { return filepath.Join(p.run, id) }

// runDir belongs to one run: sockets and evidence.
func (p paths) runDir(id string, run int64) string {
	return filepath.Join(p.volatile(id), fmt.Sprintf("%d", run))
}
