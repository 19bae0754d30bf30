package oci_test

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"imp.dev/imp/internal/image/oci"
)

// hub is a registry on this machine that can be told to misbehave.
type hub struct {
	t      testing.TB
	server *httptest.Server // what stores talk to
	inner  *httptest.Server // the same registry without the misbehaviour, to push to

	mu       sync.Mutex
	requests []string
	password map[string]string // of repositories that need one: user is "user"
	answer   func(w http.ResponseWriter, r *http.Request) bool
}

func newHub(t testing.TB) *hub {
	h := &hub{t: t, password: map[string]string{}}
	backend := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	h.inner = httptest.NewServer(backend)
	h.server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.mu.Lock()
		h.requests = append(h.requests, r.Method+" "+r.URL.Path)
		want := ""
		for repository, password := range h.password {
			if strings.HasPrefix(r.URL.Path, "/v2/"+repository+"/") {
				want = password
			}
		}
		private, answer := len(h.password) > 0, h.answer
		h.mu.Unlock()
		if answer != nil && answer(w, r) {
			return
		}
		_, got, ok := r.BasicAuth()
		if private && r.URL.Path == "/v2/" && !ok || want != "" && got != want {
			w.Header().Set("WWW-Authenticate", `Basic realm="hub"`)
			http.Error(w, `{"errors":[{"code":"UNAUTHORIZED","message":"you sent `+got+`"}]}`, http.StatusUnauthorized)
			return
		}
		backend.ServeHTTP(w, r)
	}))
	t.Cleanup(h.server.Close)
	t.Cleanup(h.inner.Close)
	return h
}

func (h *hub) host() string           { return strings.TrimPrefix(h.server.URL, "http://") }
func (h *hub) ref(name string) string { return h.host() + "/" + name }
func (h *hub) protect(repository, password string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.password[repository] = password
}

// misbehave lets f answer requests; it says whether it did.
func (h *hub) misbehave(f func(w http.ResponseWriter, r *http.Request) bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.answer = f
}

// count of requests whose "METHOD path" holds all the words, since the last reset.
func (h *hub) count(words ...string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := 0
	for _, r := range h.requests {
		all := true
		for _, w := range words {
			all = all && strings.Contains(r, w)
		}
		if all {
			n++
		}
	}
	return n
}

func (h *hub) reset() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.requests = nil
}

// push puts an image or index under a name and gives its digest.
func (h *hub) push(name_ string, what remote.Taggable) string {
	h.t.Helper()
	ref, err := name.ParseReference(strings.TrimPrefix(h.inner.URL, "http://") + "/" + name_)
	if err != nil {
		h.t.Fatal(err)
	}
	digest := v1.Hash{}
	switch what := what.(type) {
	case v1.Image:
		err = remote.Write(ref, what)
		digest, _ = what.Digest()
	case v1.ImageIndex:
		err = remote.WriteIndex(ref, what)
		digest, _ = what.Digest()
	}
	if err != nil {
		h.t.Fatal(err)
	}
	return digest.String()
}

func tarOf(t testing.TB, files map[string]string) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for name, content := range files {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(content))}); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// picture is an image under construction.
type picture struct {
	layers       []v1.Layer
	architecture string
	edit         func(*v1.ConfigFile)
}

func (p picture) image(t testing.TB) v1.Image {
	t.Helper()
	img, err := mutate.AppendLayers(empty.Image, p.layers...)
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", "amd64"
	if p.architecture != "" {
		config.Architecture = p.architecture
	}
	if p.edit != nil {
		p.edit(config)
	}
	if img, err = mutate.ConfigFile(img, config); err != nil {
		t.Fatal(err)
	}
	return img
}

// plain is an image of one uncompressed layer with one file.
func plain(t testing.TB, content string) v1.Image {
	t.Helper()
	return picture{layers: []v1.Layer{static.NewLayer(tarOf(t, map[string]string{"file": content}), types.DockerUncompressedLayer)}}.image(t)
}

// recorder keeps everything that is logged.
type recorder struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (r *recorder) Write(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.b.Write(b)
}

func (r *recorder) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.b.String()
}

// open gives a store in a new directory; edit may change its configuration.
func open(t testing.TB, edit func(*oci.Config)) *oci.Store {
	t.Helper()
	config := oci.Config{Dir: filepath.Join(t.TempDir(), "images")}
	if edit != nil {
		edit(&config)
	}
	s, err := oci.New(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func logTo(r *recorder) *slog.Logger {
	return slog.New(slog.NewTextHandler(r, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// layerOf gives the digest of an image's only layer.
func layerOf(t testing.TB, img v1.Image) string {
	t.Helper()
	m, err := img.Manifest()
	if err != nil || len(m.Layers) == 0 {
		t.Fatal(err, fmt.Sprint(m))
	}
	return m.Layers[0].Digest.String()
}
