package firecracker

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// linkCache puts files that many VMs share into jails by hard links: root's, read-only, one copy in memory for all. One that lies on another
// file system, or that not only root may write to, is copied into dir once and linked from there.
type linkCache struct {
	dir string

	mu     sync.Mutex
	copies map[string]copied // by path of the original
}

type copied struct {
	size    int64
	changed time.Time
	path    string
}

func (l *linkCache) link(path, to string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if shareable(info) {
		err := os.Link(path, to)
		if err == nil {
			return nil
		}
		if !errors.Is(err, syscall.EXDEV) {
			return fmt.Errorf("putting %s into the jail: %w", path, err)
		}
	}
	mine, err := l.copied(path, info)
	if err == nil {
		err = os.Link(mine, to)
	}
	if err != nil {
		return fmt.Errorf("putting %s into the jail: %w", path, err)
	}
	return nil
}

// shareable is a file that nobody but root can change and everybody can read.
func shareable(info fs.FileInfo) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && info.Mode().IsRegular() && st.Uid == 0 && info.Mode().Perm()&0o022 == 0 && info.Mode().Perm()&0o004 != 0
}

// copied gives the copy of a file, which is made when there is none of what the file holds now.
func (l *linkCache) copied(path string, info fs.FileInfo) (string, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c, ok := l.copies[path]; ok && c.size == info.Size() && c.changed.Equal(info.ModTime()) {
		if _, err := os.Stat(c.path); err == nil {
			return c.path, nil
		}
	}
	in, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer in.Close()
	out, err := os.CreateTemp(l.dir, "new-")
	if err != nil {
		return "", err
	}
	defer os.Remove(out.Name())
	defer out.Close()
	sum := sha256.New()
	if _, err := io.Copy(io.MultiWriter(out, sum), in); err != nil {
		return "", err
	}
	if err := errors.Join(out.Chmod(0o444), out.Sync()); err != nil {
		return "", err
	}
	to := filepath.Join(l.dir, hex.EncodeToString(sum.Sum(nil)))
	if err := os.Rename(out.Name(), to); err != nil {
		return "", err
	}
	if l.copies == nil {
		l.copies = map[string]copied{}
	}
	l.copies[path] = copied{info.Size(), info.ModTime(), to}
	return to, l.evict()
}

// evict removes copies that no jail has and that are of no file as it is now.
func (l *linkCache) evict() error {
	entries, err := os.ReadDir(l.dir)
	if err != nil {
		return err
	}
	wanted := map[string]bool{}
	for _, c := range l.copies {
		wanted[filepath.Base(c.path)] = true
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || wanted[e.Name()] {
			continue
		}
		if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Nlink == 1 {
			if err := os.Remove(filepath.Join(l.dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}
