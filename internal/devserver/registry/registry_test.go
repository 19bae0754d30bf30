package registry

import (
	"log/slog"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func reference(t *testing.T, server *httptest.Server, image string) name.Reference {
	t.Helper()
	ref, err := name.ParseReference(strings.TrimPrefix(server.URL, "http://") + "/" + image)
	if err != nil {
		t.Fatal(err)
	}
	return ref
}

func TestImagesAndIndexesAreThereAfterARestart(t *testing.T) {
	dir := t.TempDir()
	handler, err := New(dir, quiet())
	if err != nil {
		t.Fatal(err)
	}
	first := httptest.NewServer(handler)
	index, err := random.Index(1024, 2, 3)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.WriteIndex(reference(t, first, "some/thing:v1"), index); err != nil {
		t.Fatal(err)
	}
	first.Close()

	if handler, err = New(dir, quiet()); err != nil {
		t.Fatal(err)
	}
	second := httptest.NewServer(handler)
	defer second.Close()
	got, err := remote.Index(reference(t, second, "some/thing:v1"))
	if err != nil {
		t.Fatalf("the index is gone after a restart: %v", err)
	}
	want, err := index.Digest()
	if err != nil {
		t.Fatal(err)
	}
	if digest, err := got.Digest(); err != nil || digest != want {
		t.Errorf("the index is %v (%v) after a restart, want %v", digest, err, want)
	}
	manifest, err := got.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	img, err := got.Image(manifest.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	if content, err := layers[0].Compressed(); err != nil {
		t.Errorf("a layer is gone after a restart: %v", err)
	} else {
		content.Close()
	}
}

func TestAPasswordIsDemandedForEverything(t *testing.T) {
	handler, err := New(t.TempDir(), quiet())
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(WithPassword(handler, "alice", "secret"))
	defer server.Close()
	img, err := random.Image(256, 1)
	if err != nil {
		t.Fatal(err)
	}
	ref := reference(t, server, "private:v1")
	for _, c := range []struct {
		name    string
		auth    authn.Authenticator
		allowed bool
	}{
		{"nobody is refused", authn.Anonymous, false},
		{"a wrong password is refused", &authn.Basic{Username: "alice", Password: "guess"}, false},
		{"a wrong user is refused", &authn.Basic{Username: "bob", Password: "secret"}, false},
		{"the right one is let in", &authn.Basic{Username: "alice", Password: "secret"}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := remote.Write(ref, img, remote.WithAuth(c.auth)); (err == nil) != c.allowed {
				t.Errorf("pushing gave %v", err)
			}
			if _, err := remote.Head(ref, remote.WithAuth(c.auth)); (err == nil) != c.allowed {
				t.Errorf("asking gave %v", err)
			}
		})
	}
}
