package imagefile

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"log/slog"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"imp.dev/imp/internal/devserver/registry"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// rootfs makes a small root file system: a file with two names, a setuid program, a link, a folder.
func rootfs(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, err := range []error{
		os.Mkdir(filepath.Join(dir, "bin"), 0o755),
		os.WriteFile(filepath.Join(dir, "bin", "tool"), []byte("tool"), 0o755),
		os.Link(filepath.Join(dir, "bin", "tool"), filepath.Join(dir, "bin", "zool")),
		os.WriteFile(filepath.Join(dir, "bin", "su"), []byte("su"), 0o755),
		os.Chmod(filepath.Join(dir, "bin", "su"), 0o755|os.ModeSetuid),
		os.Symlink("tool", filepath.Join(dir, "bin", "alias")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// entries reads the only layer.
func entries(t *testing.T, img v1.Image) map[string]*tar.Header {
	t.Helper()
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	if len(layers) != 1 {
		t.Fatalf("the image has %d layers, want 1", len(layers))
	}
	content, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	defer content.Close()
	found := map[string]*tar.Header{}
	for archive := tar.NewReader(content); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return found
		}
		if err != nil {
			t.Fatal(err)
		}
		found[strings.TrimSuffix(header.Name, "/")] = header
	}
}

func TestADirectoryBecomesOneLayerWithItsLinksAndModes(t *testing.T) {
	img, err := Load(rootfs(t), Config{Entrypoint: []string{"/bin/tool"}, Env: []string{"A=1"}, User: "7"})
	if err != nil {
		t.Fatal(err)
	}
	found := entries(t, img)
	if h := found["bin/zool"]; h == nil || h.Typeflag != tar.TypeLink || h.Linkname != "bin/tool" {
		t.Errorf("the second name is %+v, want a hard link to the first", h)
	}
	if h := found["bin/alias"]; h == nil || h.Typeflag != tar.TypeSymlink || h.Linkname != "tool" {
		t.Errorf("the link is %+v", h)
	}
	if h := found["bin/su"]; h == nil || h.Mode&0o4000 == 0 {
		t.Errorf("the setuid program is %+v, want its bit kept", h)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	want := v1.Config{
		Entrypoint: []string{"/bin/tool"}, User: "7",
		Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "A=1"},
	}
	if diff := cmp.Diff(want, config.Config); diff != "" {
		t.Errorf("the configuration differs (-want +got):\n%s", diff)
	}
	if config.OS != "linux" || config.Architecture != runtime.GOARCH {
		t.Errorf("the platform is %s/%s, want this machine's", config.OS, config.Architecture)
	}
}

func TestOneDirectoryGivesOneDigest(t *testing.T) {
	dir := rootfs(t)
	var digests [2]v1.Hash
	for i := range digests {
		img, err := Load(dir, Config{})
		if err != nil {
			t.Fatal(err)
		}
		if digests[i], err = img.Digest(); err != nil {
			t.Fatal(err)
		}
	}
	if digests[0] != digests[1] {
		t.Errorf("two readings gave %v and %v", digests[0], digests[1])
	}
}

func TestATarballOfARootFileSystemBecomesOneLayer(t *testing.T) {
	for _, c := range []struct {
		name   string
		zipped bool
	}{{"plain", false}, {"gzipped", true}} {
		t.Run(c.name, func(t *testing.T) {
			var content bytes.Buffer
			packed := packDir(rootfs(t))
			defer packed.Close()
			var to io.WriteCloser = nopCloser{&content}
			if c.zipped {
				to = gzip.NewWriter(&content)
			}
			if _, err := io.Copy(to, packed); err != nil {
				t.Fatal(err)
			}
			if err := to.Close(); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(t.TempDir(), "rootfs.tar")
			if err := os.WriteFile(path, content.Bytes(), 0o600); err != nil {
				t.Fatal(err)
			}
			img, err := Load(path, Config{})
			if err != nil {
				t.Fatal(err)
			}
			if found := entries(t, img); found["bin/tool"] == nil {
				t.Errorf("the layer has %v, want bin/tool in it", found)
			}
		})
	}
}

type nopCloser struct{ io.Writer }

func (nopCloser) Close() error { return nil }

func TestASavedImageAndALayoutKeepTheirDigest(t *testing.T) {
	img, err := random.Image(512, 3)
	if err != nil {
		t.Fatal(err)
	}
	want, err := img.ConfigName()
	if err != nil {
		t.Fatal(err)
	}
	saved := filepath.Join(t.TempDir(), "saved.tar")
	tag, err := name.NewTag("example.com/thing:v1")
	if err != nil {
		t.Fatal(err)
	}
	if err := tarball.WriteToFile(saved, tag, img); err != nil {
		t.Fatal(err)
	}
	oci := t.TempDir()
	written, err := layout.Write(oci, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	if err := written.AppendImage(img); err != nil {
		t.Fatal(err)
	}
	for kind, path := range map[string]string{"a docker-save tarball": saved, "an OCI layout": oci} {
		t.Run(kind, func(t *testing.T) {
			loaded, err := Load(path, Config{})
			if err != nil {
				t.Fatal(err)
			}
			if got, err := loaded.ConfigName(); err != nil || got != want {
				t.Errorf("the configuration's digest is %v (%v), want %v", got, err, want)
			}
		})
	}
}

func TestWhatIsNoImageIsRefusedByName(t *testing.T) {
	path := filepath.Join(t.TempDir(), "letter.txt")
	if err := os.WriteFile(path, []byte("Dear registry, please boot this."), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(path, Config{}); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("loading a text file gave %v, want an error that names it", err)
	}
}

func TestPushGivesAReferenceByDigestThatCanBePulled(t *testing.T) {
	handler, err := registry.New(t.TempDir(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(handler)
	defer server.Close()
	img, err := Load(rootfs(t), Config{})
	if err != nil {
		t.Fatal(err)
	}
	pushed, err := Push(t.Context(), img, strings.TrimPrefix(server.URL, "http://")+"/web:1", func(done, total int64) {})
	if err != nil {
		t.Fatal(err)
	}
	ref, err := name.ParseReference(pushed)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := remote.Image(ref); err != nil {
		t.Errorf("pulling %s gave %v", pushed, err)
	}
}

func TestPushToNobodyFailsWithTheRegistrysName(t *testing.T) {
	img, err := random.Image(16, 1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Push(t.Context(), img, "127.0.0.1:1/web:1", func(int64, int64) {}); err == nil || !strings.Contains(err.Error(), "127.0.0.1:1") {
		t.Errorf("pushing to a closed port gave %v, want an error that names the registry", err)
	}
}
