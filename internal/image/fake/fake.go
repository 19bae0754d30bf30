// Package fake is an image.Store without a registry: each reference is an image, its base a tiny plain file, and its links are
// real hard links. What goes wrong is written in the reference, so that a test of the whole system can ask for it in a spec:
//
//	fake/missing…    no such image                       fake/private…   only with the password "open sesame"
//	fake/broken…     content that is refused             fake/slow…      waits for Release, or for the caller to give up
//	fake/full…       the node's disk is full             fake/flaky-N…   fails N times, then works
//
// A base is published and evicted by the rules of the contract. Nothing is kept between two stores but the files.
package fake

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/google/uuid"
	"k8s.io/utils/clock"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image"
)

// Password opens references that start with "fake/private".
const Password = "open sesame"

// Config of a fake store.
type Config struct {
	// Dir holds the bases, on one file system with the links to them.
	Dir         string
	BudgetBytes int64
	// Clock is the real one if nil.
	Clock clock.PassiveClock
}

// Store implements image.Store.
type Store struct {
	config Config

	mu       sync.Mutex
	pulls    map[string]int // by reference
	failed   map[string]int
	configs  map[string]image.Config
	offline  bool
	gates    map[string]chan struct{} // of slow references; closed is open
	flights  map[string]*flight
	admitted map[string]bool // digest and credential
	used     map[string]time.Time
}

type flight struct {
	done    chan struct{}
	err     error
	waiters int
	cancel  context.CancelFunc
}

var _ image.Store = (*Store)(nil)

// New gives a store in config.Dir, which is made if it is not there.
func New(config Config) (*Store, error) {
	if config.Clock == nil {
		config.Clock = clock.RealClock{}
	}
	if err := os.MkdirAll(config.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("opening fake image store: %w", err)
	}
	return &Store{
		config: config, pulls: map[string]int{}, failed: map[string]int{}, configs: map[string]image.Config{},
		gates: map[string]chan struct{}{}, flights: map[string]*flight{}, admitted: map[string]bool{}, used: map[string]time.Time{},
	}, nil
}

// Pulls says how often a reference has been pulled, and all together if it is "".
func (s *Store) Pulls(reference string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if reference != "" {
		return s.pulls[reference]
	}
	total := 0
	for _, n := range s.pulls {
		total += n
	}
	return total
}

// Release lets the pulls of a slow reference go on, those to come too.
func (s *Store) Release(reference string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if gate := s.gate(reference); gate != nil {
		select {
		case <-gate:
		default:
			close(gate)
		}
	}
}

func (s *Store) gate(reference string) chan struct{} {
	if s.gates[reference] == nil {
		s.gates[reference] = make(chan struct{})
	}
	return s.gates[reference]
}

// Disconnect makes the registry unreachable, or reachable again.
func (s *Store) Disconnect(offline bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.offline = offline
}

// SetConfig says what a reference's configuration is. Without, its entrypoint is /fake.
func (s *Store) SetConfig(reference string, config image.Config) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.configs[reference] = config
}

// Digest of the image that a reference means.
func Digest(reference string) string {
	return fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(reference)))
}

func (s *Store) path(digest string) string {
	return filepath.Join(s.config.Dir, strings.ReplaceAll(digest, ":", "-")+".ext4")
}

// Ensure implements image.Store.
func (s *Store) Ensure(ctx context.Context, req image.Request, progress func(image.Progress)) (image.Base, image.Timing, error) {
	if progress == nil {
		progress = func(image.Progress) {}
	}
	timing := image.Timing{Cached: true}
	fail := func(err error) (image.Base, image.Timing, error) {
		return image.Base{}, timing, fault.New(fault.ImagePullFailed, fmt.Sprintf("pulling image %q", req.Reference), err)
	}
	if req.Reference == "" {
		return fail(errors.New("the reference is empty"))
	}
	digest := req.Digest
	if digest == "" {
		digest = Digest(req.Reference)
	}
	progress(image.Progress{Stage: "resolving"})
	if err := s.access(req, digest); err != nil {
		return fail(err)
	}
	for {
		got, err := s.take(req, digest)
		if !errors.Is(err, fs.ErrNotExist) {
			if err != nil {
				return image.Base{}, timing, fault.New(fault.DiskFailed, "storing image", err)
			}
			return got, timing, nil
		}
		if req.Policy == image.Never {
			return fail(errors.New("the pull policy is Never, and the image is not on this node"))
		}
		began := s.config.Clock.Now()
		err = s.join(ctx, req.Reference, digest, progress)
		timing.Cached = false
		if timing.Pull = s.config.Clock.Since(began); err != nil {
			return fail(err)
		}
	}
}

// access says whether the asker may have the image, and whether the registry had to be asked and could be.
func (s *Store) access(req image.Request, digest string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	who := digest
	for _, c := range req.Credentials {
		who += "\n" + c.Username + ":" + c.Password
	}
	_, err := os.Stat(s.path(digest))
	if here := err == nil; here && s.admitted[who] && req.Policy != image.Always {
		return nil
	}
	if req.Policy == image.Never {
		return errors.New("the pull policy is Never, and the image is not on this node or not for these credentials")
	}
	if s.offline {
		return errors.New("registry fake cannot be reached: it is disconnected")
	}
	if strings.HasPrefix(req.Reference, "fake/missing") {
		return fmt.Errorf("registry fake has no such image: %s", req.Reference)
	}
	if strings.HasPrefix(req.Reference, "fake/private") &&
		!slices.ContainsFunc(req.Credentials, func(c image.Credential) bool { return c.Password == Password }) {
		return fmt.Errorf("registry fake refused access: 401 Unauthorized for repository %s", req.Reference)
	}
	s.admitted[who] = true
	return nil
}

// join waits for the pull of a digest, starting it if nobody has.
func (s *Store) join(ctx context.Context, reference, digest string, progress func(image.Progress)) error {
	s.mu.Lock()
	f := s.flights[digest]
	stage := "waiting"
	if f == nil {
		stage = "pulling"
		run, cancel := context.WithCancel(context.WithoutCancel(ctx))
		f = &flight{done: make(chan struct{}), cancel: cancel}
		s.flights[digest] = f
		s.pulls[reference]++
		gate := s.gate(reference)
		go func() {
			f.err = s.pull(run, reference, digest, gate)
			s.mu.Lock()
			if s.flights[digest] == f {
				delete(s.flights, digest)
			}
			s.mu.Unlock()
			close(f.done)
		}()
	}
	f.waiters++
	s.mu.Unlock()
	progress(image.Progress{Stage: stage})
	var err error
	select {
	case <-f.done:
		err = f.err
	case <-ctx.Done():
		err = ctx.Err()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if f.waiters--; f.waiters == 0 {
		f.cancel()
		if s.flights[digest] == f {
			delete(s.flights, digest)
		}
	}
	return err
}

func (s *Store) pull(ctx context.Context, reference, digest string, gate <-chan struct{}) error {
	kind, ok := strings.CutPrefix(reference, "fake/")
	switch {
	case !ok:
	case strings.HasPrefix(kind, "broken"):
		return errors.New("the image cannot be used: layer 1 of 1: the compressed data is damaged")
	case strings.HasPrefix(kind, "full"):
		return fault.New(fault.DiskFailed, "building base", fmt.Errorf("the node's disk is full: %w", syscall.ENOSPC))
	case strings.HasPrefix(kind, "flaky-"):
		times, _ := strconv.Atoi(strings.FieldsFunc(kind[len("flaky-"):], func(r rune) bool { return r < '0' || r > '9' })[0])
		s.mu.Lock()
		s.failed[reference]++
		n := s.failed[reference]
		s.mu.Unlock()
		if n <= times {
			return fmt.Errorf("registry fake answered 503 Service Unavailable (failure %d of %d)", n, times)
		}
	case strings.HasPrefix(kind, "slow"):
		select {
		case <-gate:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	f, err := os.CreateTemp(s.config.Dir, "pull-")
	if err != nil {
		return fault.New(fault.DiskFailed, "building base", err)
	}
	_, err = fmt.Fprintf(f, "fake base of %s\n", reference)
	err = errors.Join(err, f.Chmod(0o444), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), s.path(digest))
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return fault.New(fault.DiskFailed, "building base", err)
	}
	return nil
}

// take gives a base that is here, with the link made.
func (s *Store) take(req image.Request, digest string) (image.Base, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	path := s.path(digest)
	info, err := os.Stat(path)
	if err != nil {
		return image.Base{}, err
	}
	if req.LinkTo != "" {
		old, err := os.Lstat(req.LinkTo)
		if err != nil || !os.SameFile(old, info) {
			if err := os.Remove(req.LinkTo); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return image.Base{}, err
			}
			if err := os.Link(path, req.LinkTo); err != nil {
				return image.Base{}, fmt.Errorf("linking base: %v", err) //nolint:errorlint // ErrNotExist would mean "no base"
			}
		}
	}
	s.used[digest] = s.config.Clock.Now()
	config, ok := s.configs[req.Reference]
	if !ok {
		config = image.Config{Entrypoint: []string{"/fake"}}
	}
	return image.Base{
		Digest: digest, Path: path, UUID: uuid.NewSHA1(uuid.NameSpaceOID, []byte(digest)).String(), Config: config,
		SizeBytes: info.Size(), AllocatedBytes: info.Sys().(*syscall.Stat_t).Blocks * 512,
	}, nil
}

// Sweep implements image.Store.
func (s *Store) Sweep(context.Context) error {
	_, err := s.survey(true)
	return err
}

// Usage implements image.Store.
func (s *Store) Usage(context.Context) (image.Usage, error) { return s.survey(false) }

func (s *Store) survey(evict bool) (image.Usage, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	files, err := filepath.Glob(filepath.Join(s.config.Dir, "*.ext4"))
	if err != nil {
		return image.Usage{}, err
	}
	digest := func(path string) string {
		return strings.Replace(strings.TrimSuffix(filepath.Base(path), ".ext4"), "-", ":", 1)
	}
	slices.SortFunc(files, func(a, b string) int { return s.used[digest(a)].Compare(s.used[digest(b)]) })
	u := image.Usage{Budget: s.config.BudgetBytes}
	type found struct {
		path  string
		bytes int64
	}
	var idle []found
	for _, path := range files {
		info, err := os.Stat(path)
		if err != nil {
			return image.Usage{}, err
		}
		st := info.Sys().(*syscall.Stat_t)
		u.Bases++
		u.Bytes += st.Blocks * 512
		if st.Nlink > 1 {
			u.InUse++
		} else {
			idle = append(idle, found{path, st.Blocks * 512})
		}
	}
	for _, f := range idle {
		if !evict || u.Budget == 0 || u.Bytes <= u.Budget {
			break
		}
		if err := os.Remove(f.path); err != nil {
			return u, err
		}
		u.Bytes -= f.bytes
		u.Bases--
	}
	return u, nil
}
