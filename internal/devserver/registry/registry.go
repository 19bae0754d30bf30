// Package registry is the OCI registry of a development server: on loopback, its images on disk, so that what was pushed
// is there after a restart.
package registry

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"

	ggcr "github.com/google/go-containerregistry/pkg/registry"
)

// The library keeps blobs on disk but manifests in memory. So each manifest that was accepted is kept as a file too, and
// put again at the next start.
type handler struct {
	inner     http.Handler
	manifests string
}

// keptManifest is one manifest on disk, by the URL path it was put under.
type keptManifest struct {
	Path      string `json:"path"`
	MediaType string `json:"mediaType"`
	Content   []byte `json:"content"`
}

const maxManifest = 4 << 20 // what registries accept

// New serves the images kept below dir. Failed requests are told to logger.
func New(dir string, logger *slog.Logger) (http.Handler, error) {
	h := &handler{manifests: filepath.Join(dir, "manifests")}
	blobs := filepath.Join(dir, "blobs")
	for _, needed := range []string{h.manifests, blobs} {
		if err := os.MkdirAll(needed, 0o755); err != nil {
			return nil, fmt.Errorf("making the registry's folder: %w", err)
		}
	}
	h.inner = ggcr.New(
		ggcr.WithBlobHandler(ggcr.NewDiskBlobHandler(blobs)),
		ggcr.Logger(log.New(io.Discard, "", 0)), // one line a request; failures are told below
	)
	if err := h.restore(); err != nil {
		return nil, err
	}
	return logFailures(h, logger), nil
}

func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPut || !strings.Contains(r.URL.Path, "/manifests/") {
		h.inner.ServeHTTP(w, r)
		return
	}
	content, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxManifest))
	if err != nil {
		http.Error(w, err.Error(), http.StatusRequestEntityTooLarge)
		return
	}
	r.Body = io.NopCloser(bytes.NewReader(content))
	seen := &status{ResponseWriter: w}
	h.inner.ServeHTTP(seen, r)
	if seen.code < http.StatusMultipleChoices {
		// A failure to keep it costs the image at the next start, which the user learns then by a 404; not now.
		_ = h.keep(keptManifest{Path: r.URL.Path, MediaType: r.Header.Get("Content-Type"), Content: content})
	}
}

func (h *handler) keep(m keptManifest) error {
	content, err := json.Marshal(m)
	if err != nil {
		return err
	}
	final := filepath.Join(h.manifests, fmt.Sprintf("%x.json", sha256.Sum256([]byte(m.Path))))
	if err := os.WriteFile(final+".new", content, 0o644); err != nil {
		return err
	}
	return os.Rename(final+".new", final)
}

// restore puts what was kept. An index names other manifests, which must be there first, and the files are in no order:
// so it goes over them until a round accepts nothing new.
func (h *handler) restore() error {
	files, err := filepath.Glob(filepath.Join(h.manifests, "*.json"))
	if err != nil {
		return err
	}
	for waiting := files; len(waiting) > 0; {
		var refused []string
		for _, file := range waiting {
			content, err := os.ReadFile(file)
			if err != nil {
				return fmt.Errorf("reading kept manifests: %w", err)
			}
			var m keptManifest
			if err := json.Unmarshal(content, &m); err != nil {
				return fmt.Errorf("reading kept manifest %s: %w", file, err)
			}
			request := httptest.NewRequest(http.MethodPut, m.Path, bytes.NewReader(m.Content))
			request.Header.Set("Content-Type", m.MediaType)
			answer := httptest.NewRecorder()
			h.inner.ServeHTTP(answer, request)
			if answer.Code >= http.StatusMultipleChoices {
				refused = append(refused, file)
			}
		}
		if len(refused) == len(waiting) {
			return nil // their blobs are gone; a pull says 404
		}
		waiting = refused
	}
	return nil
}

// WithPassword demands basic authentication for everything, the ping included, as private registries do.
func WithPassword(next http.Handler, user, password string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		gotUser, gotPassword, _ := r.BasicAuth()
		right := subtle.ConstantTimeCompare([]byte(gotUser), []byte(user)) & subtle.ConstantTimeCompare([]byte(gotPassword), []byte(password))
		if right != 1 {
			w.Header().Set("WWW-Authenticate", `Basic realm="imp-dev"`)
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusUnauthorized)
			_, _ = io.WriteString(w, `{"errors":[{"code":"UNAUTHORIZED","message":"authentication required"}]}`)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// status remembers the code of an answer.
type status struct {
	http.ResponseWriter
	code int
}

func (s *status) WriteHeader(code int) {
	s.code = code
	s.ResponseWriter.WriteHeader(code)
}

func logFailures(next http.Handler, logger *slog.Logger) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		seen := &status{ResponseWriter: w, code: http.StatusOK}
		next.ServeHTTP(seen, r)
		asked := r.Method == http.MethodHead && seen.code == http.StatusNotFound // a push asks what it may skip
		if seen.code >= http.StatusBadRequest && !asked {
			logger.Info("registry refused a request", "method", r.Method, "path", r.URL.Path, "status", seen.code)
		}
	})
}
