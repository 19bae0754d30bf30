package engine

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"imp.dev/imp/internal/fault"
)

// trashTime is how long a discarded disk can still be had back by hand.
const trashTime = 72 * time.Hour

// discard moves the private disk at path into the trash, named by VM and occasion; no disk there is success. What lies there already
// stays: one name may come again, with another assignment of the VM for example.
func (e *Engine) discard(path, id, occasion string) error {
	name := filepath.Join(e.paths.trash, id+"."+occasion)
	to := name + ".ext4"
	for n := 2; ; n++ {
		if _, err := os.Lstat(to); errors.Is(err, fs.ErrNotExist) {
			break
		} else if err != nil {
			return fault.New(fault.DiskFailed, "moving disk to trash", err)
		}
		to = fmt.Sprintf("%s.%d.ext4", name, n)
	}
	err := os.Rename(path, to)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		now := e.clock.Now()
		err = os.Chtimes(to, now, now)
	}
	return fault.New(fault.DiskFailed, "moving disk to trash", err)
}

// emptyTrash removes what has lain long enough.
func (e *Engine) emptyTrash() {
	entries, err := os.ReadDir(e.paths.trash)
	if err != nil {
		e.log.Warn("trash not listed", "step", "audit", "error", err)
		return
	}
	for _, entry := range entries {
		info, err := entry.Info()
		if err != nil || e.clock.Since(info.ModTime()) < trashTime {
			continue
		}
		e.log.Info("discarded disk removed for good", "step", "audit", "file", entry.Name())
		if err := os.Remove(filepath.Join(e.paths.trash, entry.Name())); err != nil {
			e.log.Warn("discarded disk not removed", "step", "audit", "error", err)
		}
	}
}
