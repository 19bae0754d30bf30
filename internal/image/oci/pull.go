package oci

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/image/oci/build"
	"imp.dev/imp/internal/image/oci/flatten"
)

const (
	layersAtOnce = 3
	blobTries    = 3
	firstPause   = 200 * time.Millisecond // before a second try; three times as long before each further one
)

// pull fetches, builds and publishes the base of found. It leaves nothing behind but the base.
func (s *Store) pull(ctx context.Context, a *ask, found resolution, tell func(image.Progress)) (image.Timing, error) {
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	case <-ctx.Done():
		return image.Timing{}, ctx.Err()
	}
	if s.has(found.digest) { // published while this call waited for its turn
		return image.Timing{}, nil
	}
	log := s.log.With("image", a.written, "digest", found.digest, "step", "image")
	began := s.clock.Now()
	manifest, err := readManifest(found.manifest, s.config.Limits)
	if err != nil {
		return image.Timing{}, err
	}
	config, err := s.fetchConfig(ctx, found.session, manifest)
	if err != nil {
		return image.Timing{}, err
	}
	work, done, err := s.workDirectory()
	if err != nil {
		return image.Timing{}, err
	}
	defer done()
	log.Info("pulling image", "layers", len(manifest.Layers))
	blobs, err := s.fetchLayers(ctx, found.session, manifest, work, tell)
	timing := image.Timing{Pull: s.clock.Since(began)}
	if err != nil {
		return timing, found.session.explain(ctx, err)
	}
	began = s.clock.Now()
	built, err := s.build(ctx, found.digest, blobs, config.RootFS.DiffIDs, work, tell)
	if isFull(err) && s.evict(math.MaxInt64) { // what it needed could not be known before
		log.Info("building again after unused images were evicted")
		built, err = s.build(ctx, found.digest, blobs, config.RootFS.DiffIDs, work, tell)
	}
	timing.Build = s.clock.Since(began)
	if err != nil {
		return timing, err
	}
	// Before the base can be seen: nobody without a grant may find it here.
	if err := s.grant(found.digest, a, found.session.candidate); err != nil {
		return timing, err
	}
	if err := s.publish(built, record{
		Format: build.Format, Digest: found.digest, UUID: build.UUID(found.digest).String(), Architecture: a.Architecture, Config: imageConfig(config),
	}); err != nil {
		return timing, err
	}
	log.Info("image is ready", "pull", timing.Pull, "build", timing.Build)
	s.evict(0)
	return timing, nil
}

func readManifest(b []byte, limits flatten.Limits) (*v1.Manifest, error) {
	manifest, err := v1.ParseManifest(bytes.NewReader(b))
	if err != nil {
		return nil, &flatten.Refused{Reason: "its manifest is not one: " + printable(err.Error())}
	}
	switch manifest.Config.MediaType {
	case types.DockerConfigJSON, types.OCIConfigJSON:
	default:
		return nil, &flatten.Refused{Reason: fmt.Sprintf("it is no container image: its configuration has media type %q", printable(string(manifest.Config.MediaType)))}
	}
	if limits.Layers > 0 && len(manifest.Layers) > limits.Layers {
		return nil, &flatten.Refused{Reason: fmt.Sprintf("it has %d layers, the limit is %d", len(manifest.Layers), limits.Layers)}
	}
	var total int64
	for i, l := range manifest.Layers {
		switch l.MediaType {
		case types.OCILayer, types.OCILayerZStd, types.OCIUncompressedLayer, types.DockerLayer, types.DockerUncompressedLayer:
		default:
			return nil, &flatten.Refused{Reason: fmt.Sprintf("layer %d has media type %q, which is not one that can be unpacked", i+1, printable(string(l.MediaType)))}
		}
		if l.Size < 0 || limits.TotalBytes > 0 && l.Size > limits.TotalBytes-total {
			return nil, &flatten.Refused{Reason: fmt.Sprintf("its layers claim more than %d bytes, the limit", limits.TotalBytes)}
		}
		total += l.Size
	}
	return manifest, nil
}

func (s *Store) fetchConfig(ctx context.Context, session *session, manifest *v1.Manifest) (*v1.ConfigFile, error) {
	var b bytes.Buffer
	err := s.retry(ctx, func() error { b.Reset(); return session.blob(ctx, manifest.Config, maxConfigBytes, &b) })
	if err != nil {
		return nil, session.explain(ctx, err)
	}
	config, err := v1.ParseConfigFile(&b)
	if err != nil {
		return nil, &flatten.Refused{Reason: "its configuration is not one: " + printable(err.Error())}
	}
	if config.OS != "" && config.OS != "linux" || config.Architecture != "" && config.Architecture != session.ask.Architecture {
		return nil, &flatten.Refused{Reason: fmt.Sprintf("it is made for %s/%s, this node runs linux/%s", printable(config.OS), printable(config.Architecture), session.ask.Architecture)}
	}
	if len(config.RootFS.DiffIDs) != len(manifest.Layers) {
		return nil, &flatten.Refused{Reason: fmt.Sprintf("its configuration describes %d layers, its manifest %d", len(config.RootFS.DiffIDs), len(manifest.Layers))}
	}
	return config, nil
}

// fetchLayers gives a file for each layer. A blob that is two layers is one file.
func (s *Store) fetchLayers(ctx context.Context, session *session, manifest *v1.Manifest, work string, tell func(image.Progress)) ([]string, error) {
	var total int64
	blobs := map[v1.Hash]v1.Descriptor{}
	var order []v1.Hash
	for _, l := range manifest.Layers {
		if _, known := blobs[l.Digest]; !known {
			order = append(order, l.Digest)
			total += l.Size
		}
		blobs[l.Digest] = l
	}
	if err := s.makeRoom(total); err != nil {
		return nil, err
	}
	var done atomic.Int64
	tell(image.Progress{Stage: "pulling", Total: total})
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(layersAtOnce)
	for _, digest := range order {
		group.Go(func() error {
			return s.fetchBlob(ctx, session, blobs[digest], blobFile(work, digest), func(n int64) {
				tell(image.Progress{Stage: "pulling", Done: done.Add(n), Total: total})
			})
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	files := make([]string, len(manifest.Layers))
	for i, l := range manifest.Layers {
		files[i] = blobFile(work, l.Digest)
	}
	return files, nil
}

func blobFile(work string, digest v1.Hash) string {
	return filepath.Join(work, fileName(digest.String()))
}

func (s *Store) fetchBlob(ctx context.Context, session *session, want v1.Descriptor, file string, got func(int64)) error {
	out, err := os.OpenFile(file, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return &diskError{err}
	}
	defer out.Close()
	return s.retry(ctx, func() error {
		if err := errors.Join(out.Truncate(0), seekStart(out)); err != nil {
			return &diskError{err}
		}
		count := &counter{out: out, tell: got}
		err := session.blob(ctx, want, want.Size, count)
		if err == nil {
			got(want.Size - count.told)
		} else {
			got(-count.told)
		}
		return err
	})
}

func seekStart(f *os.File) error {
	_, err := f.Seek(0, 0)
	return err
}

// counter tells progress at most once a MiB.
type counter struct {
	out        *os.File
	tell       func(int64)
	told, seen int64
}

func (c *counter) Write(b []byte) (int, error) {
	n, err := c.out.Write(b)
	c.seen += int64(n)
	if c.seen-c.told >= 1<<20 {
		c.tell(c.seen - c.told)
		c.told = c.seen
	}
	return n, err
}

// retry tries again what the network, and nothing that stays, has spoilt.
func (s *Store) retry(ctx context.Context, try func() error) error {
	pause := firstPause
	for attempt := 1; ; attempt++ {
		err := try()
		disk, wrong := (*diskError)(nil), (*wrongBlob)(nil)
		if err == nil || attempt == blobTries || ctx.Err() != nil || isRefusal(err) || flatten.IsRefused(err) || errors.As(err, &disk) || errors.As(err, &wrong) {
			return err
		}
		select {
		case <-s.clock.After(pause):
			pause *= 3
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// build makes the base in the work directory and gives the file, synced, with its final mode.
func (s *Store) build(ctx context.Context, digest string, blobs []string, diffIDs []v1.Hash, work string, tell func(image.Progress)) (string, error) {
	order := build.Order{UUID: build.UUID(digest).String(), Limits: s.config.Limits, ReserveBytes: s.config.ReserveBytes}
	var layers []*os.File
	for i, path := range blobs {
		f, err := os.Open(path)
		if err != nil {
			return "", buildError(err)
		}
		defer f.Close()
		layers = append(layers, f)
		order.Layers = append(order.Layers, build.Layer{DiffID: diffIDs[i].String()})
	}
	path := filepath.Join(work, "base.ext4")
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) { // of a try before
		return "", buildError(err)
	}
	out, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return "", buildError(err)
	}
	defer out.Close()
	tell(image.Progress{Stage: "building"})
	_, err = s.config.Builder(ctx, order, layers, out, func(p build.Progress) {
		tell(image.Progress{Stage: "building", Done: p.Done, Total: p.Total})
	})
	if err != nil {
		if ctx.Err() != nil {
			return "", ctx.Err()
		}
		if flatten.IsRefused(err) {
			return "", err
		}
		return "", buildError(err)
	}
	if err := errors.Join(out.Chmod(0o444), out.Sync()); err != nil {
		return "", buildError(err)
	}
	return path, nil
}

// makeRoom evicts until need bytes can be written without touching the reserve.
func (s *Store) makeRoom(need int64) error {
	s.evict(need)
	free, err := s.free()
	if err != nil {
		return onDisk(err)
	}
	if free < need+s.config.ReserveBytes {
		return fault.Errorf(fault.DiskFailed, "making room for image",
			"the node's disk is full: the image needs %d bytes, %d are free of which %d stay reserved", need, free, s.config.ReserveBytes)
	}
	return nil
}

func (s *Store) free() (int64, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(s.config.Dir, &fs); err != nil {
		return 0, err
	}
	return int64(fs.Bavail) * fs.Bsize, nil
}

// imageConfig keeps what running the image needs.
func imageConfig(c *v1.ConfigFile) image.Config {
	out := image.Config{
		Entrypoint: c.Config.Entrypoint, Cmd: c.Config.Cmd, Env: c.Config.Env, User: c.Config.User,
		WorkingDir: c.Config.WorkingDir, StopSignal: c.Config.StopSignal, Labels: c.Config.Labels,
	}
	for v := range c.Config.Volumes {
		out.Volumes = append(out.Volumes, v)
	}
	slices.Sort(out.Volumes)
	return out
}
