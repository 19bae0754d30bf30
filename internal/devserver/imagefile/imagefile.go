// Package imagefile makes an image of what lies on a developer's disk (a docker-save tarball, an OCI layout, a root file
// system as a directory or tarball) and pushes it to a registry.
package imagefile

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Config is the image configuration for a root file system. For an image that has one already, what is set replaces its part.
type Config struct {
	Entrypoint, Cmd, Env []string
	User, WorkingDir     string
	StopSignal           string
	Volumes              []string
}

// Load gives the image at path, with cfg in its configuration, for this machine's architecture. What path is decides how
// it is read: a directory with an oci-layout file, another directory, a tarball with manifest.json, another tarball (gzip or not).
func Load(path string, cfg Config) (v1.Image, error) {
	img, err := load(path)
	if err != nil {
		return nil, fmt.Errorf("reading image %s: %w", path, err)
	}
	if img, err = configure(img, cfg); err != nil {
		return nil, fmt.Errorf("configuring image %s: %w", path, err)
	}
	return img, nil
}

func load(path string) (v1.Image, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if info.IsDir() {
		if _, err := os.Stat(filepath.Join(path, "oci-layout")); err == nil {
			return fromLayout(path)
		}
		layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return packDir(path), nil })
		if err != nil {
			return nil, err
		}
		return oneLayer(layer)
	}
	saved, err := isDockerSave(path)
	if err != nil {
		return nil, err
	}
	if saved {
		return tarball.ImageFromPath(path, nil)
	}
	layer, err := tarball.LayerFromFile(path)
	if err != nil {
		return nil, err
	}
	return oneLayer(layer)
}

func oneLayer(layer v1.Layer) (v1.Image, error) {
	base := mutate.MediaType(empty.Image, types.OCIManifestSchema1)
	base = mutate.ConfigMediaType(base, types.OCIConfigJSON)
	img, err := mutate.AppendLayers(base, layer)
	if err != nil {
		return nil, err
	}
	file, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	file = file.DeepCopy()
	file.OS, file.Architecture = "linux", runtime.GOARCH
	file.Config.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	return mutate.ConfigFile(img, file)
}

// fromLayout takes the only image, or the one for this machine.
func fromLayout(path string) (v1.Image, error) {
	index, err := layout.ImageIndexFromPath(path)
	if err != nil {
		return nil, err
	}
	return pick(index)
}

func pick(index v1.ImageIndex) (v1.Image, error) {
	manifest, err := index.IndexManifest()
	if err != nil {
		return nil, err
	}
	for _, entry := range manifest.Manifests {
		if p := entry.Platform; p != nil && (p.OS != "linux" || p.Architecture != runtime.GOARCH) {
			continue
		}
		if entry.MediaType.IsIndex() {
			inner, err := index.ImageIndex(entry.Digest)
			if err != nil {
				return nil, err
			}
			return pick(inner)
		}
		return index.Image(entry.Digest)
	}
	return nil, fmt.Errorf("the layout has no image for linux/%s", runtime.GOARCH)
}

// isDockerSave looks for manifest.json among the tarball's entries.
func isDockerSave(path string) (bool, error) {
	f, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer f.Close()
	magic := make([]byte, 2)
	if _, err := io.ReadFull(f, magic); err != nil {
		return false, fmt.Errorf("not a tarball: %w", err)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return false, err
	}
	var stream io.Reader = f
	if bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		unzipped, err := gzip.NewReader(f)
		if err != nil {
			return false, err
		}
		defer func() { _ = unzipped.Close() }()
		stream = unzipped
	}
	for archive, first := tar.NewReader(stream), true; ; first = false {
		entry, err := archive.Next()
		if errors.Is(err, io.EOF) && !first {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("not a tarball: %w", err)
		}
		if entry.Name == "manifest.json" {
			return true, nil
		}
	}
}

func configure(img v1.Image, cfg Config) (v1.Image, error) {
	file, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	config := *file.Config.DeepCopy()
	if cfg.Entrypoint != nil {
		config.Entrypoint, config.Cmd = cfg.Entrypoint, nil
	}
	if cfg.Cmd != nil {
		config.Cmd = cfg.Cmd
	}
	for _, variable := range cfg.Env {
		name, _, _ := strings.Cut(variable, "=")
		config.Env = append(without(config.Env, name), variable)
	}
	for _, field := range []struct {
		to   *string
		from string
	}{{&config.User, cfg.User}, {&config.WorkingDir, cfg.WorkingDir}, {&config.StopSignal, cfg.StopSignal}} {
		if field.from != "" {
			*field.to = field.from
		}
	}
	for _, volume := range cfg.Volumes {
		if config.Volumes == nil {
			config.Volumes = map[string]struct{}{}
		}
		config.Volumes[volume] = struct{}{}
	}
	return mutate.Config(img, config)
}

func without(env []string, name string) []string {
	kept := env[:0:0]
	for _, variable := range env {
		if !strings.HasPrefix(variable, name+"=") {
			kept = append(kept, variable)
		}
	}
	return kept
}

// Push sends the image to reference, with the credentials of the user's docker config if the registry wants some. It gives
// the reference by digest.
func Push(ctx context.Context, img v1.Image, reference string, progress func(done, total int64)) (string, error) {
	ref, err := name.ParseReference(reference)
	if err != nil {
		return "", fmt.Errorf("reading image name: %w", err)
	}
	opts := []remote.Option{remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain)}
	drained := make(chan struct{})
	if progress != nil {
		updates := make(chan v1.Update, 64)
		go func() {
			defer close(drained)
			for update := range updates {
				if update.Error == nil {
					progress(update.Complete, update.Total)
				}
			}
		}()
		opts = append(opts, remote.WithProgress(updates))
	} else {
		close(drained)
	}
	err = remote.Write(ref, img, opts...)
	<-drained // remote.Write closes the channel, in failure too
	if err != nil {
		return "", fmt.Errorf("pushing %s: %w", ref, err)
	}
	digest, err := img.Digest()
	if err != nil {
		return "", err
	}
	return ref.Context().Digest(digest.String()).String(), nil
}
