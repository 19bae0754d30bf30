// Package imagetest is the suite that every image.Store passes: what its contract promises to those who use it.
package imagetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image"
)

// World is a store and what lies around it.
type World struct {
	Store image.Store
	// Dir is where links may be made.
	Dir string
	// Architecture the images are for.
	Architecture string
	// Image and Other are references of two different images.
	Image, Other string
	// Missing is the reference of none.
	Missing string
	// Private is an image that Credential opens and nothing else.
	Private    string
	Credential image.Credential
	// Slow is an image whose pull does not end before Release is called.
	Slow    string
	Release func()
	// Disconnect makes every registry unreachable.
	Disconnect func()
	// Pulls says how many pulls of a reference have begun.
	Pulls func(reference string) int
}

// Run runs the suite. newWorld gives a fresh store whose budget is so many bytes (0: no limit).
func Run(t *testing.T, newWorld func(t *testing.T, budget int64) World) {
	t.Helper()
	for name, check := range map[string]func(*testing.T, World){
		"an image becomes a read-only file and a link to it":                     makesBaseAndLink,
		"a cached image is given without a pull":                                 cachedIsNotPulled,
		"two images have two digests and UUIDs":                                  imagesDiffer,
		"a link that is there already is kept, and one to another file replaced": linksAreRepeatable,
		"many who want one image share one pull":                                 callersShareAPull,
		"a missing image fails with ImagePullFailed, without a link":             missingFails,
		"who gives up waiting returns at once":                                   cancelledWaitReturns,
		"a pull that one gives up goes on for another":                           pullOutlivesItsFirstCaller,
		"a private image needs its credential, also when it is cached":           privateStaysPrivate,
		"what is here is started without the registry":                           offlineWorksFromCache,
		"policy Never pulls nothing":                                             neverDoesNotPull,
		"policy Always asks the registry, and does not pull again":               alwaysAsks,
		"usage tells bases and those in use":                                     usageCounts,
	} {
		t.Run(name, func(t *testing.T) { check(t, newWorld(t, 0)) })
	}
	t.Run("a sweep evicts what nothing uses and keeps what is linked", func(t *testing.T) { sweepEvictsUnused(t, newWorld(t, 1)) })
}

func (w World) request(reference, link string) image.Request {
	r := image.Request{Reference: reference, Policy: image.IfNotPresent, Architecture: w.Architecture}
	if link != "" {
		r.LinkTo = filepath.Join(w.Dir, link)
	}
	return r
}

func (w World) ensure(t *testing.T, req image.Request) image.Base {
	t.Helper()
	base, _, err := w.Store.Ensure(context.Background(), req, nil)
	if err != nil {
		t.Fatalf("ensuring %s: %v", req.Reference, err)
	}
	return base
}

func same(t *testing.T, a, b string) bool {
	t.Helper()
	x, err := os.Stat(a)
	if err != nil {
		t.Fatal(err)
	}
	y, err := os.Stat(b)
	if err != nil {
		t.Fatal(err)
	}
	return os.SameFile(x, y)
}

func makesBaseAndLink(t *testing.T, w World) {
	var stages []string
	req := w.request(w.Image, "vm.ext4")
	base, timing, err := w.Store.Ensure(context.Background(), req, func(p image.Progress) { stages = append(stages, p.Stage) })
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(base.Path)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode() != 0o444 || info.Size() != base.SizeBytes || !same(t, base.Path, req.LinkTo) {
		t.Errorf("the base is %v with %d bytes (told %d), link the same: %v", info.Mode(), info.Size(), base.SizeBytes, same(t, base.Path, req.LinkTo))
	}
	if !strings.HasPrefix(base.Digest, "sha256:") || len(base.UUID) != 36 {
		t.Errorf("digest %q, UUID %q", base.Digest, base.UUID)
	}
	if timing.Cached || !strings.Contains(strings.Join(stages, " "), "resolving") || !strings.Contains(strings.Join(stages, " "), "pulling") {
		t.Errorf("timing %+v, stages %v of a first pull", timing, stages)
	}
}

func cachedIsNotPulled(t *testing.T, w World) {
	first := w.ensure(t, w.request(w.Image, "one"))
	second, timing, err := w.Store.Ensure(context.Background(), w.request(w.Image, "two"), nil)
	if err != nil || second.Digest != first.Digest || second.UUID != first.UUID || second.Path != first.Path {
		t.Errorf("got %+v (%v), at first %+v", second, err, first)
	}
	if !timing.Cached || timing.Pull != 0 || timing.Build != 0 || w.Pulls(w.Image) != 1 {
		t.Errorf("timing %+v after %d pulls", timing, w.Pulls(w.Image))
	}
}

func imagesDiffer(t *testing.T, w World) {
	a, b := w.ensure(t, w.request(w.Image, "")), w.ensure(t, w.request(w.Other, ""))
	if a.Digest == b.Digest || a.UUID == b.UUID || a.Path == b.Path {
		t.Errorf("%+v and %+v have something in common", a, b)
	}
}

func linksAreRepeatable(t *testing.T, w World) {
	req := w.request(w.Image, "vm")
	base := w.ensure(t, req)
	w.ensure(t, req)
	if !same(t, base.Path, req.LinkTo) {
		t.Error("the link is no longer one")
	}
	other := w.ensure(t, w.request(w.Other, "vm"))
	if !same(t, other.Path, req.LinkTo) {
		t.Error("the link was not replaced by one to the other image")
	}
	if list, err := os.ReadDir(w.Dir); err != nil || len(list) != 1 {
		t.Errorf("beside the link there is something: %v %v", list, err)
	}
}

func callersShareAPull(t *testing.T, w World) {
	const callers = 20
	var wait sync.WaitGroup
	errs := make([]error, callers)
	for i := range callers {
		wait.Go(func() {
			_, _, errs[i] = w.Store.Ensure(context.Background(), w.request(w.Image, fmt.Sprint(i)), func(image.Progress) {})
		})
	}
	wait.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	if n := w.Pulls(w.Image); n != 1 {
		t.Errorf("%d callers made %d pulls", callers, n)
	}
}

func missingFails(t *testing.T, w World) {
	req := w.request(w.Missing, "vm")
	_, _, err := w.Store.Ensure(context.Background(), req, nil)
	if !fault.Is(err, fault.ImagePullFailed) {
		t.Errorf("got %v, want ImagePullFailed", err)
	}
	if _, err := os.Lstat(req.LinkTo); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the link was made: %v", err)
	}
	w.ensure(t, w.request(w.Image, "vm"))
}

// begin starts a pull of the slow image and returns once it is under way.
func (w World) begin(ctx context.Context, t *testing.T, link string) (ended chan error) {
	t.Helper()
	ended, begun := make(chan error, 1), make(chan struct{})
	var once sync.Once
	go func() {
		_, _, err := w.Store.Ensure(ctx, w.request(w.Slow, link), func(p image.Progress) {
			if p.Stage == "pulling" || p.Stage == "waiting" {
				once.Do(func() { close(begun) })
			}
		})
		ended <- err
	}()
	select {
	case <-begun:
	case err := <-ended:
		t.Fatalf("the slow image ended with %v before it was released", err)
	}
	return ended
}

func cancelledWaitReturns(t *testing.T, w World) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := w.begin(ctx, t, "vm")
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
	w.Release()
	w.ensure(t, w.request(w.Slow, "vm")) // nothing is poisoned
}

func pullOutlivesItsFirstCaller(t *testing.T, w World) {
	ctx, cancel := context.WithCancel(context.Background())
	first := w.begin(ctx, t, "one")
	second := w.begin(context.Background(), t, "two")
	cancel()
	if err := <-first; !errors.Is(err, context.Canceled) {
		t.Errorf("the first caller got %v, want context.Canceled", err)
	}
	w.Release()
	if err := <-second; err != nil {
		t.Errorf("the second caller got %v", err)
	}
	if n := w.Pulls(w.Slow); n != 1 {
		t.Errorf("%d pulls were made", n)
	}
}

func privateStaysPrivate(t *testing.T, w World) {
	open, closed := w.request(w.Private, "mine"), w.request(w.Private, "theirs")
	open.Credentials = []image.Credential{w.Credential}
	refused := func(when string, credentials ...image.Credential) {
		closed.Credentials = credentials
		_, _, err := w.Store.Ensure(context.Background(), closed, nil)
		if !fault.Is(err, fault.ImagePullFailed) || !strings.Contains(err.Error(), "401") {
			t.Errorf("%s: got %v, want ImagePullFailed with 401", when, err)
		}
		for _, c := range append(credentials, w.Credential) {
			if err != nil && c.Password != "" && strings.Contains(err.Error(), c.Password) {
				t.Errorf("%s: the password stands in %v", when, err)
			}
		}
		if _, err := os.Lstat(closed.LinkTo); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: the link was made", when)
		}
	}
	refused("uncached, without credential")
	base := w.ensure(t, open)
	refused("cached, without credential")
	wrong := w.Credential
	wrong.Password = "wrong-password"
	refused("cached, with a wrong password", wrong)
	closed.Digest = base.Digest
	refused("cached, with the digest known")
	w.ensure(t, open)
}

func offlineWorksFromCache(t *testing.T, w World) {
	base := w.ensure(t, w.request(w.Image, ""))
	w.Disconnect()
	pinned := w.request(w.Image, "pinned")
	pinned.Digest = base.Digest
	if got := w.ensure(t, pinned); got.Digest != base.Digest {
		t.Errorf("got %s, want the pinned %s", got.Digest, base.Digest)
	}
	w.ensure(t, w.request(w.Image, "by tag"))
	for _, req := range []image.Request{w.request(w.Other, "vm"), {Reference: w.Image, Policy: image.Always, Architecture: w.Architecture}} {
		if _, _, err := w.Store.Ensure(context.Background(), req, nil); !fault.Is(err, fault.ImagePullFailed) {
			t.Errorf("%s with %s: got %v, want ImagePullFailed", req.Reference, req.Policy, err)
		}
	}
}

func neverDoesNotPull(t *testing.T, w World) {
	req := w.request(w.Image, "vm")
	req.Policy = image.Never
	if _, _, err := w.Store.Ensure(context.Background(), req, nil); !fault.Is(err, fault.ImagePullFailed) || !strings.Contains(err.Error(), "Never") {
		t.Errorf("got %v, want ImagePullFailed that names the policy", err)
	}
	if n := w.Pulls(w.Image); n != 0 {
		t.Errorf("%d pulls were made", n)
	}
	w.ensure(t, w.request(w.Image, ""))
	w.ensure(t, req)
}

func alwaysAsks(t *testing.T, w World) {
	req := w.request(w.Image, "vm")
	req.Policy = image.Always
	w.ensure(t, req)
	w.ensure(t, req)
	if n := w.Pulls(w.Image); n != 1 {
		t.Errorf("%d pulls were made", n)
	}
}

func usageCounts(t *testing.T, w World) {
	w.ensure(t, w.request(w.Image, "vm"))
	w.ensure(t, w.request(w.Other, ""))
	got, err := w.Store.Usage(context.Background())
	if err != nil || got.Bases != 2 || got.InUse != 1 || got.Bytes <= 0 {
		t.Errorf("got %+v, %v", got, err)
	}
}

func sweepEvictsUnused(t *testing.T, w World) {
	used := w.ensure(t, w.request(w.Image, "vm"))
	before, err := os.ReadFile(used.Path)
	if err != nil {
		t.Fatal(err)
	}
	w.ensure(t, w.request(w.Other, ""))
	if err := w.Store.Sweep(context.Background()); err != nil {
		t.Fatal(err)
	}
	got, err := w.Store.Usage(context.Background())
	if err != nil || got.Bases != 1 || got.InUse != 1 {
		t.Errorf("after the sweep: %+v, %v", got, err)
	}
	if after, err := os.ReadFile(used.Path); err != nil || !bytes.Equal(before, after) {
		t.Errorf("the base in use changed: %v", err)
	}
	if err := os.Remove(filepath.Join(w.Dir, "vm")); err != nil {
		t.Fatal(err)
	}
	if err := w.Store.Sweep(context.Background()); err != nil {
		t.Fatal(err)
	}
	if got, err := w.Store.Usage(context.Background()); err != nil || got.Bases != 0 {
		t.Errorf("after the last link went: %+v, %v", got, err)
	}
	w.ensure(t, w.request(w.Image, "vm")) // and it can be had again
}
