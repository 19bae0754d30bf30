package engine

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"imp.dev/imp/internal/fault"
)

// trashTime is how long a discarded disk can still be had back by hand.
const trashTime = 72 * time.Hour

// discard moves the file at path into the trash under name; no file there is success.
func (e *Engine) discard(path, name string) error {
	to := filepath.Join(e.paths.trash, name)
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
