package oci

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"imp.dev/imp/internal/image/oci/flatten"
)

const (
	maxManifestBytes = 4 << 20 // what the distribution specification asks registries to accept
	maxConfigBytes   = 8 << 20
)

// session is a conversation with one registry about one repository under one credential.
type session struct {
	ask       *ask
	candidate candidate
	puller    *remote.Puller
	stall     time.Duration
	store     *Store
}

func (s *Store) connect(a *ask, c candidate) (*session, error) {
	puller, err := remote.NewPuller(
		remote.WithAuth(c.authenticator()), remote.WithTransport(s.config.Transport), remote.WithUserAgent(s.config.UserAgent),
		remote.WithRetryBackoff(remote.Backoff{Duration: 100 * time.Millisecond, Factor: 3, Jitter: 0.1, Steps: 3}),
		remote.WithRetryStatusCodes(http.StatusRequestTimeout, http.StatusInternalServerError, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout),
	)
	if err != nil {
		return nil, fmt.Errorf("connecting to registry %s: %w", a.host(), err)
	}
	return &session{ask: a, candidate: c, puller: puller, stall: s.config.StallTimeout, store: s}, nil
}

// resolve fetches a manifest and, of an index, the one for the asked platform.
func (s *session) resolve(ctx context.Context, ref name.Reference) (resolution, error) {
	const deepest = 3 // indexes of indexes exist
	for range deepest {
		got, err := s.puller.Get(ctx, ref)
		if err != nil {
			return resolution{}, err
		}
		switch kind := mediaType(got); kind {
		case types.OCIManifestSchema1, types.DockerManifestSchema2:
			return resolution{digest: got.Digest.String(), session: s, manifest: got.Manifest}, nil
		case types.OCIImageIndex, types.DockerManifestList:
			digest, err := choose(got.Manifest, s.ask.Architecture)
			if err != nil {
				return resolution{}, err
			}
			ref = s.ask.byDigest(digest)
		default:
			return resolution{}, &flatten.Refused{Reason: fmt.Sprintf("its manifest has media type %q, which is not one of a container image", printable(string(kind)))}
		}
	}
	return resolution{}, &flatten.Refused{Reason: "its index refers to indexes only"}
}

// mediaType prefers what the manifest says of itself to the header that came with it.
func mediaType(got *remote.Descriptor) types.MediaType {
	var self struct {
		MediaType types.MediaType `json:"mediaType"`
	}
	if json.Unmarshal(got.Manifest, &self) == nil && self.MediaType != "" {
		return self.MediaType
	}
	return got.MediaType
}

// choose picks the manifest for linux and an architecture, the plainest variant of it.
func choose(index []byte, architecture string) (string, error) {
	list, err := v1.ParseIndexManifest(bytes.NewReader(index))
	if err != nil {
		return "", &flatten.Refused{Reason: "its index is not one: " + printable(err.Error())}
	}
	preferred := map[string][]string{"arm64": {"", "v8"}, "arm": {"v7", "v6", "", "v5"}, "amd64": {"", "v1"}}
	best, bestRank := "", -1
	var offered []string
	for _, m := range list.Manifests {
		if m.Platform == nil || m.Platform.OS == "unknown" {
			continue
		}
		if text := m.Platform.String(); !slices.Contains(offered, text) && len(offered) < 12 {
			offered = append(offered, printable(text))
		}
		if m.Platform.OS != "linux" || m.Platform.Architecture != architecture {
			continue
		}
		rank := slices.Index(preferred[architecture], m.Platform.Variant)
		if rank < 0 && m.Platform.Variant != "" {
			rank = 10 // better than nothing
		}
		rank = max(rank, 0)
		if bestRank < 0 || rank < bestRank {
			best, bestRank = m.Digest.String(), rank
		}
	}
	if bestRank < 0 {
		return "", &flatten.Refused{Reason: fmt.Sprintf("there is none for linux/%s (there is: %s)", architecture, strings.Join(offered, ", "))}
	}
	return best, nil
}

// head asks whether the manifest may be had.
func (s *session) head(ctx context.Context, ref name.Digest) error {
	_, err := s.puller.Head(ctx, ref)
	if err == nil || isRefusal(err) || ctx.Err() != nil {
		return err
	}
	_, err = s.puller.Get(ctx, ref) // some registries answer HEAD without the headers it should have
	return err
}

// blob copies a blob to out and checks size and digest.
func (s *session) blob(ctx context.Context, want v1.Descriptor, most int64, out io.Writer) error {
	if want.Size < 0 || want.Size > most {
		return &flatten.Refused{Reason: fmt.Sprintf("blob %s claims %d bytes, the limit is %d", want.Digest, want.Size, most)}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	layer, err := s.puller.Layer(ctx, s.ask.byDigest(want.Digest.String()))
	if err != nil {
		return err
	}
	watch := s.watch(cancel)
	defer watch.stop()
	body, err := layer.Compressed()
	if err != nil {
		return errors.Join(err, context.Cause(ctx))
	}
	defer body.Close()
	hasher, err := v1.Hasher(want.Digest.Algorithm)
	if err != nil {
		return &flatten.Refused{Reason: "a digest of unknown kind: " + printable(want.Digest.String())}
	}
	n, err := io.Copy(&sink{out}, io.TeeReader(io.LimitReader(body, want.Size+1), io.MultiWriter(hasher, watch)))
	got := v1.Hash{Algorithm: want.Digest.Algorithm, Hex: fmt.Sprintf("%x", hasher.Sum(nil))}
	var disk *diskError
	switch {
	case errors.As(err, &disk):
		return err
	case n > want.Size:
		return &wrongBlob{fmt.Sprintf("blob %s is longer than the %d bytes the manifest promises", want.Digest, want.Size)}
	case err != nil && context.Cause(ctx) != nil:
		return context.Cause(ctx)
	case n < want.Size && (err == nil || strings.Contains(err.Error(), "error verifying")): // the client checks too, at a clean end only
		return &wrongBlob{fmt.Sprintf("blob %s has %d bytes, the manifest promises %d", want.Digest, n, want.Size)}
	case n == want.Size && got != want.Digest:
		return &wrongBlob{fmt.Sprintf("digest mismatch: blob %s has digest %s", want.Digest, got)}
	case n == want.Size:
		return nil
	}
	return err
}

// sink marks errors of writing, to tell them from those of the network.
type sink struct{ io.Writer }

func (s *sink) Write(b []byte) (int, error) {
	n, err := s.Writer.Write(b)
	if err != nil {
		err = &diskError{err}
	}
	return n, err
}

// watchdog cancels a download of which nothing comes.
type watchdog struct {
	beat chan struct{}
	done chan struct{}
}

var errStalled = errors.New("nothing has come for too long")

func (s *session) watch(cancel context.CancelCauseFunc) *watchdog {
	w := &watchdog{beat: make(chan struct{}, 1), done: make(chan struct{})}
	timer := s.store.clock.NewTimer(s.stall)
	go func() {
		defer timer.Stop()
		for {
			select {
			case <-w.done:
				return
			case <-timer.C():
				select {
				case <-w.beat:
					timer.Reset(s.stall)
				default:
					cancel(errStalled)
					return
				}
			}
		}
	}()
	return w
}

func (w *watchdog) Write(b []byte) (int, error) {
	select {
	case w.beat <- struct{}{}:
	default:
	}
	return len(b), nil
}

func (w *watchdog) stop() { close(w.done) }

// limitManifests cuts answers that should be small: a registry must not be able to fill this process' memory.
type limitManifests struct{ next http.RoundTripper }

func (l limitManifests) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := l.next.RoundTrip(req)
	if err == nil && resp.Body != nil && strings.Contains(req.URL.Path, "/manifests/") {
		resp.Body = struct {
			io.Reader
			io.Closer
		}{io.LimitReader(resp.Body, maxManifestBytes+1), resp.Body}
	}
	return resp, err
}

// isRefusal says that the registry answered, and not to this credential.
func isRefusal(err error) bool {
	answer := (*transport.Error)(nil)
	return errors.As(err, &answer) && slices.Contains([]int{http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound}, answer.StatusCode)
}
