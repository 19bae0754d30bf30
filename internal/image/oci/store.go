// Package oci is the image.Store that pulls OCI and Docker images from registries.
//
//	Ensure ──► resolve (tag or pin → digest of this platform, access proven) ──► base there? ──► link
//	                                                                        └──► flight: pull, build, publish ──► link
//
// On the disk, below Config.Dir, which is root's alone and on one file system with the VMs' directories:
//
//	bases/sha256-….ext4   the base files, 0444                 bases/sha256-….json   what is known of each: the commit mark
//	tags/….json           which digest a reference meant here  access/sha256-….json  which credentials may have it (keyed hashes)
//	tmp/                  pulls and builds under way           key                   of those hashes, of this store alone
//	lock                  held by the one process that uses the store
//
// The record beside a base is written last and removed first, so a base without one is a leftover. Blobs are deleted once the
// base is built. No credential is ever written, logged or part of an error.
package oci

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/utils/clock"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/image/oci/build"
	"imp.dev/imp/internal/image/oci/flatten"
)

// Config of a Store. Dir is required, everything else has a default.
type Config struct {
	// Dir holds the store. VMs' directories must be on the same file system: they get hard links.
	Dir string
	// BudgetBytes is what the bases may take on the disk before those not in use are evicted; 0 is no limit.
	BudgetBytes int64
	// ReserveBytes of the file system stay free: nothing is pulled or built beyond that.
	ReserveBytes int64
	// NodeCredentialsFile is a docker config file that holds for every VM of the node; empty is none. It is read anew for
	// each image. Credential helpers in it are not run.
	NodeCredentialsFile string
	// Limits on an image's content; the zero value is flatten.DefaultLimits.
	Limits flatten.Limits
	// Builder makes the base; nil builds in this process. build.Child runs it in a child.
	Builder build.Builder
	// MaxPulls is how many images are pulled and built at once; 0 is 3.
	MaxPulls int
	// StallTimeout ends a download of which nothing has come for so long; 0 is one minute.
	StallTimeout time.Duration
	// Transport to registries; nil is one with sensible limits that honours HTTPS_PROXY and the like.
	Transport http.RoundTripper
	UserAgent string
	Clock     clock.Clock
	Log       *slog.Logger
}

// Store implements image.Store.
type Store struct {
	config Config
	log    *slog.Logger
	clock  clock.Clock
	key    []byte
	lock   *os.File
	slots  chan struct{}

	resolving group[resolution]
	pulling   group[image.Timing]

	mu     sync.Mutex
	bases  map[string]*base // by digest
	held   map[string]int   // digests that some call is about to link: not to be evicted
	active map[string]bool  // directories in tmp/ that somebody works in
}

var _ image.Store = (*Store)(nil)

const (
	defaultPulls = 3
	defaultStall = time.Minute
)

// New opens the store in config.Dir, making it where it is not, and removes what a dead process left half done. It fails if
// another process holds the store.
func New(config Config) (*Store, error) {
	if config.Dir == "" {
		return nil, fmt.Errorf("opening image store: no directory given")
	}
	if config.Limits == (flatten.Limits{}) {
		config.Limits = flatten.DefaultLimits()
	}
	if config.Builder == nil {
		config.Builder = build.InProcess
	}
	if config.MaxPulls <= 0 {
		config.MaxPulls = defaultPulls
	}
	if config.StallTimeout <= 0 {
		config.StallTimeout = defaultStall
	}
	if config.Clock == nil {
		config.Clock = clock.RealClock{}
	}
	if config.Log == nil {
		config.Log = slog.New(slog.DiscardHandler)
	}
	if config.Transport == nil {
		config.Transport = defaultTransport()
	}
	if config.UserAgent == "" {
		config.UserAgent = "imp"
	}
	config.Transport = limitManifests{config.Transport}
	s := &Store{
		config: config, log: config.Log, clock: config.Clock,
		slots: make(chan struct{}, config.MaxPulls), bases: map[string]*base{}, held: map[string]int{}, active: map[string]bool{},
	}
	if err := s.open(); err != nil {
		if s.lock != nil {
			_ = s.lock.Close()
		}
		return nil, fmt.Errorf("opening image store %s: %w", config.Dir, err)
	}
	return s, nil
}

func (s *Store) open() error {
	for _, dir := range []string{"", "bases", "tags", "access", "tmp"} {
		if err := os.MkdirAll(s.path(dir), 0o700); err != nil {
			return err
		}
	}
	lock, err := os.OpenFile(s.path("lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	s.lock = lock
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fmt.Errorf("another process uses it: %w", err)
	}
	if s.key, err = loadKey(s.path("key")); err != nil {
		return err
	}
	if err := s.load(); err != nil {
		return err
	}
	return s.clean()
}

// Close waits until pulls that everybody gave up have been cleared away, and lets another process have the store. Calls of
// Ensure are to have ended.
func (s *Store) Close() error {
	s.resolving.running.Wait()
	s.pulling.running.Wait()
	return s.lock.Close()
}

func (s *Store) path(parts ...string) string {
	return filepath.Join(append([]string{s.config.Dir}, parts...)...)
}

// Ensure implements image.Store.
func (s *Store) Ensure(ctx context.Context, req image.Request, progress func(image.Progress)) (image.Base, image.Timing, error) {
	if progress == nil {
		progress = func(image.Progress) {}
	}
	began := s.clock.Now()
	ask, err := s.newAsk(req)
	if err != nil {
		return image.Base{}, image.Timing{}, ask.blame(err)
	}
	progress(image.Progress{Stage: "resolving"})
	found, err := s.resolve(ctx, ask)
	timing := image.Timing{Resolve: s.clock.Since(began), Cached: true}
	if err != nil {
		return image.Base{}, timing, ask.blame(err)
	}
	defer s.hold(found.digest)()
	for {
		got, err := s.take(found.digest, ask, req.LinkTo)
		if err == nil {
			return got, timing, nil
		}
		if err != errNoBase { //nolint:errorlint // our own
			return image.Base{}, timing, ask.blame(err)
		}
		if found.session == nil { // its base was evicted between the answer and the hold
			if ask.Policy == image.Never {
				return image.Base{}, timing, ask.blame(fmt.Errorf("%w, and the image is not on this node", errNever))
			}
			pinned := *ask
			pinned.Digest = found.digest
			if found, err = s.ask(ctx, &pinned); err != nil {
				return image.Base{}, timing, ask.blame(err)
			}
		}
		pulled, mine, err := s.pulling.do(ctx, found.digest, ask.identity, func(ctx context.Context, tell func(image.Progress)) (image.Timing, error) {
			return s.pull(ctx, ask, found, tell)
		}, func(p image.Progress, leader bool) {
			if !leader {
				p.Stage = "waiting"
			}
			progress(p)
		})
		timing.Pull, timing.Build, timing.Cached = pulled.Pull, pulled.Build, false
		if err != nil && (mine == ask.identity || ctx.Err() != nil) {
			return image.Base{}, timing, ask.blame(err)
		}
		if err != nil {
			continue // what failed with another's credentials may work with ours
		}
		if err := s.admit(ctx, ask, found); err != nil {
			return image.Base{}, timing, ask.blame(err)
		}
	}
}

// blame gives an error the reason a user reads. What is wrong with the content of a pinned image stays wrong.
func (a *ask) blame(err error) error {
	stage := "pulling image"
	if a != nil {
		stage = fmt.Sprintf("pulling image %q", a.written)
	}
	if flatten.IsRefused(err) {
		err = fault.New(fault.ImagePullFailed, stage, fmt.Errorf("the image cannot be used: %w", err))
		if a != nil && a.fixed() {
			err = fault.Permanent(err)
		}
		return err
	}
	return fault.New(fault.ImagePullFailed, stage, err)
}

func defaultTransport() http.RoundTripper {
	return &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           (&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second}).DialContext,
		ForceAttemptHTTP2:     true,
		MaxIdleConns:          32,
		MaxIdleConnsPerHost:   8,
		IdleConnTimeout:       30 * time.Second,
		TLSHandshakeTimeout:   10 * time.Second,
		ResponseHeaderTimeout: time.Minute,
	}
}
