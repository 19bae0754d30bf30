package oci

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"imp.dev/imp/internal/image"
)

// record is what is kept beside a base. Its file's modification time is when the base was last asked for.
type record struct {
	Format       int          `json:"format"` // of the base: build.Format when it was made
	Digest       string       `json:"digest"`
	UUID         string       `json:"uuid"`
	Architecture string       `json:"architecture"`
	Config       image.Config `json:"config"`
}

// base is a published one.
type base struct {
	record
	used time.Time
}

var errNoBase = errors.New("no such base")

// fileName of a digest: a colon is trouble in paths and option strings.
func fileName(digest string) string { return strings.ReplaceAll(digest, ":", "-") }

func (s *Store) basePath(digest string) string { return s.path("bases", fileName(digest)+".ext4") }
func (s *Store) recordPath(digest string) string {
	return s.path("bases", fileName(digest)+".json")
}

func (s *Store) has(digest string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.bases[digest] != nil
}

// hold keeps a base from being evicted until the function it gives is called.
func (s *Store) hold(digest string) (release func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held[digest]++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.held[digest]--; s.held[digest] == 0 {
			delete(s.held, digest)
		}
	}
}

// take gives a base that is here and makes the link, both under the lock that eviction needs.
func (s *Store) take(digest string, a *ask, linkTo string) (image.Base, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.bases[digest]
	if b == nil {
		return image.Base{}, errNoBase
	}
	if b.Architecture != a.Architecture {
		return image.Base{}, fmt.Errorf("the image is made for %s, this node runs %s", b.Architecture, a.Architecture)
	}
	path := s.basePath(digest)
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) { // somebody else removed it
		s.forget(digest)
		return image.Base{}, errNoBase
	}
	if err != nil {
		return image.Base{}, onDisk(err)
	}
	if linkTo != "" {
		if err := linkBase(path, info, linkTo); err != nil {
			return image.Base{}, onDisk(err)
		}
	}
	b.used = s.clock.Now()
	if err := os.Chtimes(s.recordPath(digest), b.used, b.used); err != nil {
		s.log.Warn("cannot note the use of a base", "digest", digest, "error", err)
	}
	return image.Base{
		Digest: digest, Path: path, UUID: b.UUID, SizeBytes: info.Size(), AllocatedBytes: allocated(info), Config: b.Config,
	}, nil
}

// linkBase makes to a hard link of the base, in one step also where something else is in its place.
func linkBase(path string, info fs.FileInfo, to string) error {
	old, err := os.Lstat(to)
	if err == nil && os.SameFile(old, info) {
		return nil
	}
	if errors.Is(err, fs.ErrNotExist) {
		if err = os.Link(path, to); !errors.Is(err, fs.ErrExist) {
			return err
		}
	} else if err != nil {
		return err
	}
	beside := to + ".new"
	if err := os.Remove(beside); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Link(path, beside); err != nil {
		return err
	}
	if err := os.Rename(beside, to); err != nil {
		_ = os.Remove(beside)
		return err
	}
	return nil
}

func allocated(info fs.FileInfo) int64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return st.Blocks * 512
	}
	return info.Size()
}

func links(info fs.FileInfo) uint64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return uint64(st.Nlink) //nolint:unconvert // 32 bits on arm64
	}
	return 1
}

// publish makes a finished base part of the store. If it is one already, that one stays: VMs hold links to it.
func (s *Store) publish(file string, r record) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bases[r.Digest] != nil {
		return nil
	}
	if err := os.Rename(file, s.basePath(r.Digest)); err != nil {
		return onDisk(err)
	}
	err = syncDir(s.path("bases"))
	if err == nil {
		err = writeFile(s.recordPath(r.Digest), b, 0o600)
	}
	if err != nil {
		_ = os.Remove(s.basePath(r.Digest))
		return onDisk(err)
	}
	now := s.clock.Now()
	if err := os.Chtimes(s.recordPath(r.Digest), now, now); err != nil {
		return onDisk(err)
	}
	s.bases[r.Digest] = &base{record: r, used: now}
	return nil
}

// forget drops what is known of a base. The lock is held.
func (s *Store) forget(digest string) {
	delete(s.bases, digest)
	_ = os.Remove(s.recordPath(digest))
	_ = os.Remove(s.accessFile(digest))
	_ = os.Remove(s.basePath(digest))
}

// load reads the records of an earlier process.
func (s *Store) load() error {
	files, err := os.ReadDir(s.path("bases"))
	if err != nil {
		return err
	}
	for _, f := range files {
		if filepath.Ext(f.Name()) != ".json" {
			continue
		}
		content, err := os.ReadFile(s.path("bases", f.Name()))
		if err != nil {
			return err
		}
		var r record
		info, infoErr := f.Info()
		if json.Unmarshal(content, &r) != nil || infoErr != nil || fileName(r.Digest)+".json" != f.Name() {
			s.log.Warn("a record of a base cannot be read and is dropped", "file", f.Name())
			_ = os.Remove(s.path("bases", f.Name()))
			continue
		}
		s.bases[r.Digest] = &base{record: r, used: info.ModTime()}
	}
	return nil
}

// evict removes bases that nothing uses, the longest unused first, until the budget is met and need bytes more than the
// reserve are free. It says whether any went.
func (s *Store) evict(need int64) (gone bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	order := make([]*base, 0, len(s.bases))
	var total int64
	for _, b := range s.bases {
		order = append(order, b)
		if info, err := os.Stat(s.basePath(b.Digest)); err == nil {
			total += allocated(info)
		}
	}
	slices.SortFunc(order, func(a, b *base) int {
		if n := a.used.Compare(b.used); n != 0 {
			return n
		}
		return strings.Compare(a.Digest, b.Digest)
	})
	for _, b := range order {
		free, err := s.free()
		over := s.config.BudgetBytes > 0 && total > s.config.BudgetBytes
		if tight := err == nil && need > 0 && free-s.config.ReserveBytes < need; !over && !tight {
			return gone
		}
		info, err := os.Stat(s.basePath(b.Digest))
		if err != nil || links(info) > 1 || s.held[b.Digest] > 0 {
			continue
		}
		total -= allocated(info)
		s.forget(b.Digest)
		gone = true
		s.log.Info("evicted an unused image", "digest", b.Digest, "bytes", allocated(info))
	}
	return gone
}

// Sweep implements image.Store.
func (s *Store) Sweep(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := s.clean(); err != nil {
		return onDisk(err)
	}
	s.evict(0)
	return nil
}

// clean removes what no live process works on and no base belongs to.
func (s *Store) clean() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for digest := range s.bases {
		if _, err := os.Stat(s.basePath(digest)); errors.Is(err, fs.ErrNotExist) {
			s.forget(digest)
		}
	}
	var failed error
	each := func(dir string, dead func(name, path string) bool) {
		files, err := os.ReadDir(s.path(dir))
		failed = errors.Join(failed, err)
		for _, f := range files {
			if path := s.path(dir, f.Name()); dead(f.Name(), path) {
				failed = errors.Join(failed, os.RemoveAll(path))
			}
		}
	}
	known := map[string]bool{}
	for digest := range s.bases {
		known[fileName(digest)] = true
	}
	ofBase := func(name string) bool { return known[strings.TrimSuffix(name, filepath.Ext(name))] }
	each("tmp", func(_, path string) bool { return !s.active[path] })
	each("bases", func(name, _ string) bool { return !ofBase(name) })
	if len(s.active) > 0 { // what a pull has written already belongs to a base that is still to come
		return failed
	}
	each("access", func(name, _ string) bool { return !ofBase(name) })
	each("tags", func(_, path string) bool {
		var t tag
		content, err := os.ReadFile(path)
		return err != nil || json.Unmarshal(content, &t) != nil || s.bases[t.Digest] == nil
	})
	return failed
}

// Usage implements image.Store.
func (s *Store) Usage(ctx context.Context) (image.Usage, error) {
	if err := ctx.Err(); err != nil {
		return image.Usage{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	u := image.Usage{Budget: s.config.BudgetBytes, Bases: len(s.bases)}
	for digest := range s.bases {
		if info, err := os.Stat(s.basePath(digest)); err == nil && links(info) > 1 {
			u.InUse++
		}
	}
	err := filepath.WalkDir(s.config.Dir, func(_ string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			var info fs.FileInfo
			if info, err = d.Info(); err == nil {
				u.Bytes += allocated(info)
			}
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil // pulls come and go
		}
		return err
	})
	return u, onDisk(err)
}
