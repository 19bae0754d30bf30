package machinetest

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image"
)

// Images is a store whose bases are one small file, which can be held up and made to fail.
type Images struct {
	dir string

	mu      sync.Mutex
	blocked chan struct{}
	err     error
	asked   []image.Request
}

var _ image.Store = (*Images)(nil)

// digest of a reference, in the form of a real one.
func digest(reference string) string {
	return fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(reference)))
}

// NewImages makes a store in dir.
func NewImages(dir string) (*Images, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making image directory: %w", err)
	}
	return &Images{dir: dir}, nil
}

// Block holds up every Ensure until the returned function is called.
func (s *Images) Block() (release func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := make(chan struct{})
	s.blocked = c
	return sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		close(c)
		s.blocked = nil
	})
}

// Fail makes every Ensure fail with err until Fail(nil).
func (s *Images) Fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
}

// Asked gives every request so far.
func (s *Images) Asked() []image.Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]image.Request(nil), s.asked...)
}

// Ensure implements image.Store.
func (s *Images) Ensure(ctx context.Context, req image.Request, progress func(image.Progress)) (image.Base, image.Timing, error) {
	s.mu.Lock()
	s.asked = append(s.asked, req)
	blocked, err := s.blocked, s.err
	s.mu.Unlock()
	if progress != nil {
		progress(image.Progress{Stage: "pulling", Done: 1 << 20, Total: 8 << 20})
	}
	if blocked != nil {
		select {
		case <-blocked:
		case <-ctx.Done():
			return image.Base{}, image.Timing{}, ctx.Err()
		}
	}
	if err != nil {
		return image.Base{}, image.Timing{}, fault.New(fault.ImagePullFailed, "pulling image", err)
	}
	path := filepath.Join(s.dir, "base")
	if err := os.WriteFile(path, []byte("base"), 0o600); err != nil {
		return image.Base{}, image.Timing{}, fault.New(fault.DiskFailed, "building image", err)
	}
	if err := os.Link(path, req.LinkTo); err != nil && !errors.Is(err, fs.ErrExist) {
		return image.Base{}, image.Timing{}, fault.New(fault.DiskFailed, "linking image", err)
	}
	return image.Base{
		Digest: digest(req.Reference), Path: path, UUID: "u", Config: image.Config{Entrypoint: []string{"/app"}, Env: []string{"PATH=/bin"}, Volumes: []string{"/data"}},
	}, image.Timing{Cached: true}, nil
}

// Sweep implements image.Store.
func (s *Images) Sweep(context.Context) error { return nil }

// Usage implements image.Store.
func (s *Images) Usage(context.Context) (image.Usage, error) { return image.Usage{Bases: 1}, nil }

// Disks makes private disks that are empty files.
type Disks struct{}

// Create implements engine.Disks.
func (Disks) Create(_ context.Context, path string, gib int64) error {
	f, err := os.Create(path)
	if err != nil {
		return fault.New(fault.DiskFailed, "making private disk", err)
	}
	defer f.Close()
	if err := f.Truncate(gib << 30); err != nil {
		return fault.New(fault.DiskFailed, "making private disk", err)
	}
	return nil
}
