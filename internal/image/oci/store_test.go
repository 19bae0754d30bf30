package oci_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/google/uuid"
	"golang.org/x/sys/unix"
	clocktesting "k8s.io/utils/clock/testing"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/image/imagetest"
	"imp.dev/imp/internal/image/oci"
	"imp.dev/imp/internal/image/oci/ext4/ext4test"
)

const amd64 = "amd64"

func TestSuite(t *testing.T) {
	imagetest.Run(t, func(t *testing.T, budget int64) imagetest.World {
		h := newHub(t)
		for _, name := range []string{"one", "two", "private", "slow"} {
			h.push(name+":latest", plain(t, name))
		}
		h.protect("private", "s3cret-password")
		gate := make(chan struct{})
		slow := "/v2/slow/blobs/" + layerOf(t, plain(t, "slow"))
		h.misbehave(func(_ http.ResponseWriter, r *http.Request) bool {
			if r.URL.Path == slow {
				select {
				case <-gate:
				case <-r.Context().Done():
				}
			}
			return false
		})
		root := t.TempDir()
		links := filepath.Join(root, "links")
		if err := os.Mkdir(links, 0o700); err != nil {
			t.Fatal(err)
		}
		s := open(t, func(c *oci.Config) { c.Dir, c.BudgetBytes = filepath.Join(root, "images"), budget })
		return imagetest.World{
			Store: s, Dir: links, Architecture: amd64, Image: h.ref("one"), Other: h.ref("two:latest"), Missing: h.ref("missing"), Private: h.ref("private"),
			Credential: image.Credential{Registry: h.host(), Username: "user", Password: "s3cret-password"}, Slow: h.ref("slow"),
			Release: func() { close(gate) }, Disconnect: h.server.Close,
			Pulls: func(ref string) int {
				repository := strings.TrimSuffix(strings.TrimPrefix(ref, h.host()+"/"), ":latest")
				return h.count("GET /v2/" + repository + "/blobs/" + layerOf(t, plain(t, repository)))
			},
		}
	})
}

func ensure(t testing.TB, s *oci.Store, req image.Request) image.Base {
	t.Helper()
	base, _, err := s.Ensure(context.Background(), req, nil)
	if err != nil {
		t.Fatalf("ensuring %s: %v", req.Reference, err)
	}
	return base
}

// leftovers are what the store below dir holds besides its own few files and what it remembers of tags.
func leftovers(t testing.TB, dir string) []string {
	t.Helper()
	own := map[string]bool{".": true, "key": true, "lock": true, "bases": true, "tags": true, "access": true, "tmp": true}
	root := filepath.Join(dir, "images")
	var out []string
	err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if at, _ := filepath.Rel(root, path); !own[at] && filepath.Dir(at) != "tags" {
			out = append(out, at)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestEachFailureNamesItsCauseAndLeavesNothing(t *testing.T) {
	h := newHub(t)
	good := plain(t, strings.Repeat("content ", 1000))
	layer := layerOf(t, good)
	h.push("good", good)
	h.protect("secret", "pw-of-secret")
	h.push("secret", good)
	h.push("arm", picture{architecture: "arm64", layers: []v1.Layer{static.NewLayer(tarOf(t, nil), types.OCIUncompressedLayer)}}.image(t))
	h.push("multi", mutate.AppendManifests(empty.Index,
		mutate.IndexAddendum{Add: good, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "s390x"}}},
		mutate.IndexAddendum{Add: good, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "windows", Architecture: amd64}}}))
	h.push("helm", mutate.ConfigMediaType(good, "application/vnd.cncf.helm.config.v1+json"))
	h.push("odd-layer", picture{layers: []v1.Layer{static.NewLayer([]byte("x"), "application/x-squashfs")}}.image(t))
	h.push("foreign", picture{layers: []v1.Layer{static.NewLayer([]byte("x"), types.DockerForeignLayer)}}.image(t))
	h.push("climbing", picture{layers: []v1.Layer{static.NewLayer(tarOf(t, map[string]string{"../../x": ""}), types.OCIUncompressedLayer)}}.image(t))
	h.push("bomb", picture{layers: []v1.Layer{static.NewLayer(make([]byte, 9<<20), types.OCIUncompressedLayer)}}.image(t))
	h.push("diffid", picture{layers: []v1.Layer{static.NewLayer(tarOf(t, nil), types.OCIUncompressedLayer)}, edit: func(c *v1.ConfigFile) {
		c.RootFS.DiffIDs = []v1.Hash{{Algorithm: "sha256", Hex: strings.Repeat("a", 64)}}
	}}.image(t))
	h.push("fewer", picture{layers: []v1.Layer{static.NewLayer(tarOf(t, nil), types.OCIUncompressedLayer)}, edit: func(c *v1.ConfigFile) { c.RootFS.DiffIDs = nil }}.image(t))
	blob := func(answer func(w http.ResponseWriter)) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, r *http.Request) bool {
			if r.Method != http.MethodGet || !strings.HasSuffix(r.URL.Path, "/blobs/"+layer) {
				return false
			}
			answer(w)
			return true
		}
	}
	content := tarOf(t, map[string]string{"file": strings.Repeat("content ", 1000)})
	closed := newHub(t)
	closed.server.Close()
	for name, c := range map[string]struct {
		reference string
		misbehave func(http.ResponseWriter, *http.Request) bool
		config    func(*oci.Config)
		reason    fault.Reason
		want      []string
	}{
		"a wrong name":                  {reference: h.ref("nothing:v1"), want: []string{h.host(), "no image v1 of repository nothing"}},
		"a reference that is none":      {reference: "UPPER/case:::", want: []string{"the reference is not one"}},
		"no credentials":                {reference: h.ref("secret"), want: []string{h.host(), "401 Unauthorized", "without credentials", "secret"}},
		"a registry that is down":       {reference: closed.ref("x"), want: []string{closed.host(), "cannot be reached", "connection refused"}},
		"another architecture":          {reference: h.ref("arm"), want: []string{"made for linux/arm64", "linux/amd64"}},
		"an index without the platform": {reference: h.ref("multi"), want: []string{"none for linux/amd64", "linux/s390x"}},
		"a chart instead of an image":   {reference: h.ref("helm"), want: []string{"no container image", "helm"}},
		"an unknown kind of layer":      {reference: h.ref("odd-layer"), want: []string{"layer 1", "application/x-squashfs"}},
		"a layer that lies elsewhere":   {reference: h.ref("foreign"), want: []string{"layer 1", "foreign"}},
		"a name that climbs":            {reference: h.ref("climbing"), want: []string{"the image cannot be used", "climbs"}},
		"a bomb":                        {reference: h.ref("bomb"), want: []string{"more than 8388608 bytes"}, config: func(c *oci.Config) { c.Limits.TotalBytes = 8 << 20; c.Limits.Layers = 10 }},
		"a wrong diff id":               {reference: h.ref("diffid"), want: []string{"configuration promises"}},
		"too few diff ids":              {reference: h.ref("fewer"), want: []string{"describes 0 layers, its manifest 1"}},
		"a blob with another digest": {reference: h.ref("good"), want: []string{h.host(), "digest mismatch", layer},
			misbehave: blob(func(w http.ResponseWriter) { _, _ = w.Write(bytes.Repeat([]byte("y"), len(content))) })},
		"a blob that is longer than was said": {reference: h.ref("good"), want: []string{h.host(), "longer than the"},
			misbehave: blob(func(w http.ResponseWriter) { _, _ = w.Write(append(content, content...)) })},
		"a blob that is shorter": {reference: h.ref("good"), want: []string{h.host(), fmt.Sprintf("has 100 bytes, the manifest promises %d", len(content))},
			misbehave: blob(func(w http.ResponseWriter) { _, _ = w.Write(content[:100]) })},
		"a manifest with another digest": {reference: h.ref("good@sha256:" + strings.Repeat("b", 64)), want: []string{h.host(), "digest mismatch"},
			misbehave: func(w http.ResponseWriter, r *http.Request) bool {
				if strings.Contains(r.URL.Path, "/manifests/") {
					w.Header().Set("Content-Type", string(types.OCIManifestSchema1))
					_, _ = io.WriteString(w, "{}")
					return true
				}
				return false
			}},
		"a registry with a fault of its own": {reference: h.ref("good"), want: []string{h.host(), "503 Service Unavailable"},
			misbehave: func(w http.ResponseWriter, r *http.Request) bool {
				if strings.Contains(r.URL.Path, "/manifests/") {
					w.WriteHeader(http.StatusServiceUnavailable)
					return true
				}
				return false
			}},
		"too many requests": {reference: h.ref("good"), want: []string{h.host(), "429 Too Many Requests"},
			misbehave: func(w http.ResponseWriter, r *http.Request) bool {
				if strings.Contains(r.URL.Path, "/manifests/") {
					w.WriteHeader(http.StatusTooManyRequests)
					return true
				}
				return false
			}},
		"a download that stalls": {reference: h.ref("good"), want: []string{h.host(), "nothing has come for too long"},
			config: func(c *oci.Config) { c.StallTimeout = 50 * time.Millisecond },
			misbehave: func(w http.ResponseWriter, r *http.Request) bool {
				if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/blobs/"+layer) {
					_, _ = w.Write(content[:100])
					w.(http.Flusher).Flush()
					<-r.Context().Done()
					return true
				}
				return false
			}},
		"a manifest that never ends": {reference: h.ref("good"), want: []string{h.host(), "did not answer within 200ms"},
			config: func(c *oci.Config) { c.StallTimeout = 100 * time.Millisecond },
			misbehave: func(w http.ResponseWriter, r *http.Request) bool {
				if strings.Contains(r.URL.Path, "/manifests/") {
					_, _ = io.WriteString(w, "{")
					w.(http.Flusher).Flush()
					<-r.Context().Done()
					return true
				}
				return false
			}},
		"a manifest too large for memory": {reference: h.ref("good"), want: []string{"manifest"},
			misbehave: func(w http.ResponseWriter, r *http.Request) bool {
				if strings.Contains(r.URL.Path, "/manifests/") {
					w.Header().Set("Content-Type", string(types.DockerManifestSchema2))
					_, _ = w.Write(bytes.Repeat([]byte(" "), 5<<20))
					return true
				}
				return false
			}},
		"a reserve that is not there": {reference: h.ref("good"), reason: fault.DiskFailed, want: []string{"disk is full", "stay reserved"},
			config: func(c *oci.Config) { c.ReserveBytes = 1 << 60 }},
	} {
		t.Run(name, func(t *testing.T) {
			h.misbehave(c.misbehave)
			root := t.TempDir()
			s := open(t, func(config *oci.Config) {
				config.Dir = filepath.Join(root, "images")
				if c.config != nil {
					c.config(config)
				}
			})
			if c.reason == "" {
				c.reason = fault.ImagePullFailed
			}
			link := filepath.Join(root, "link")
			_, _, err := s.Ensure(context.Background(), image.Request{Reference: c.reference, Architecture: amd64, LinkTo: link}, nil)
			if !fault.Is(err, c.reason) {
				t.Errorf("got %v, want %s", err, c.reason)
			}
			for _, word := range c.want {
				if err != nil && !strings.Contains(err.Error(), word) {
					t.Errorf("%q is not in: %v", word, err)
				}
			}
			if _, err := os.Lstat(link); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("a link was made (%v)", err)
			}
			if left := leftovers(t, root); len(left) != 0 {
				t.Errorf("left behind: %v", left)
			}
			h.misbehave(nil)
		})
	}
}

func TestADiskThatFillsWhileBuildingIsToldAndRepaired(t *testing.T) {
	ext4test.NeedRoot(t)
	h := newHub(t)
	h.push("big", picture{layers: []v1.Layer{gzipped(t, tarOf(t, map[string]string{"file": strings.Repeat("0123456789abcdef", 256<<10)}))}}.image(t))
	small := t.TempDir()
	if err := unix.Mount("tmpfs", small, "tmpfs", 0, "size=2m"); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(small, unix.MNT_DETACH) }()
	s := open(t, func(c *oci.Config) { c.Dir = filepath.Join(small, "images") })
	req := image.Request{Reference: h.ref("big"), Architecture: amd64, LinkTo: filepath.Join(small, "link")}
	_, _, err := s.Ensure(context.Background(), req, nil)
	if !fault.Is(err, fault.DiskFailed) || !strings.Contains(err.Error(), "disk is full") || !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("got %v, want DiskFailed with the cause", err)
	}
	if left := leftovers(t, small); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
	if err := unix.Mount("", small, "", unix.MS_REMOUNT, "size=64m"); err != nil {
		t.Fatal(err)
	}
	ensure(t, s, req)
}

func TestUnusedImagesMakeRoomForABuild(t *testing.T) {
	ext4test.NeedRoot(t)
	h := newHub(t)
	for name, size := range map[string]int{"old": 6 << 20, "new": 10 << 20} {
		h.push(name, picture{layers: []v1.Layer{gzipped(t, tarOf(t, map[string]string{"file": strings.Repeat(name, size/3)}))}}.image(t))
	}
	small := t.TempDir()
	if err := unix.Mount("tmpfs", small, "tmpfs", 0, "size=14m"); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(small, unix.MNT_DETACH) }()
	s := open(t, func(c *oci.Config) { c.Dir = filepath.Join(small, "images") })
	old := ensure(t, s, image.Request{Reference: h.ref("old"), Architecture: amd64})
	ensure(t, s, image.Request{Reference: h.ref("new"), Architecture: amd64})
	if _, err := os.Stat(old.Path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the unused image is still there (%v)", err)
	}
}

func TestNoSecretIsToldOrKept(t *testing.T) {
	h := newHub(t)
	h.push("private", plain(t, "x"))
	h.protect("private", "correct-horse")
	logged := &recorder{}
	root := t.TempDir()
	file := filepath.Join(t.TempDir(), "config.json")
	auth := fmt.Sprintf(`{"auths":{%q:{"auth":"dXNlcjpub2RlLXBhc3N3b3Jk"}}}`, h.host()) // user:node-password
	if err := os.WriteFile(file, []byte(auth), 0o600); err != nil {
		t.Fatal(err)
	}
	s := open(t, func(c *oci.Config) {
		c.Dir, c.Log, c.NodeCredentialsFile = filepath.Join(root, "images"), logTo(logged), file
	})
	told := &strings.Builder{}
	for _, c := range []image.Credential{
		{Registry: h.host(), Username: "user", Password: "wrong-staple"},
		{Registry: "https://" + h.host() + "/private", Username: "user", Password: "correct-horse"},
		{Registry: h.host(), IdentityToken: "wrong-identity-token"}, {Registry: h.host(), RegistryToken: "wrong-registry-token"},
	} {
		_, _, err := s.Ensure(context.Background(), image.Request{
			Reference: h.ref("private"), Architecture: amd64, Credentials: []image.Credential{c}, LinkTo: filepath.Join(root, "link"),
		}, func(p image.Progress) { fmt.Fprintln(told, p) })
		for e := err; e != nil; e = errors.Unwrap(e) {
			fmt.Fprintf(told, "%v %+v %#v\n", e, e, e)
		}
		if (err == nil) != (c.Password == "correct-horse") {
			t.Errorf("with %v: %v", c, err)
		}
	}
	everything := told.String() + logged.String()
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		everything += path + string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, secret := range []string{"wrong-staple", "correct-horse", "wrong-identity-token", "wrong-registry-token", "node-password", "dXNlcj"} {
		if at := strings.Index(everything, secret); at >= 0 {
			t.Errorf("%q is in: %s", secret, everything[max(0, at-200):min(len(everything), at+50)])
		}
	}
	if !strings.Contains(everything, "you sent [secret]") {
		t.Error("the registry's answer, which repeats the password, is not in what was told: this test shows nothing")
	}
}

func gzipped(t testing.TB, b []byte) v1.Layer {
	t.Helper()
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b)), nil })
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestTheBaseIsWhatTheImageSays(t *testing.T) {
	ext4test.NeedRoot(t)
	h := newHub(t)
	twice := gzipped(t, tarOf(t, map[string]string{"a": "lower", "b": "stays"}))
	img := picture{
		layers: []v1.Layer{twice, gzipped(t, tarOf(t, map[string]string{"a": "upper", ".wh.b": ""})), twice},
		edit: func(c *v1.ConfigFile) {
			c.Config = v1.Config{
				Entrypoint: []string{"/entry", "$x"}, Cmd: []string{"a b", "\"q\""}, Env: []string{"A=1", "B=\n"}, User: "1000:app", WorkingDir: "/w",
				StopSignal: "SIGINT", Volumes: map[string]struct{}{"/z": {}, "/data": {}}, Labels: map[string]string{"k": "v"},
			}
		},
	}.image(t)
	wrong := picture{architecture: "arm64", layers: []v1.Layer{twice}}.image(t)
	h.push("multi:v1", mutate.AppendManifests(empty.Index,
		mutate.IndexAddendum{Add: wrong, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "arm64", Variant: "v8"}}},
		mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: amd64}}},
		mutate.IndexAddendum{Add: wrong, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "unknown", Architecture: "unknown"}}}))
	want, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	base := ensure(t, open(t, nil), image.Request{Reference: h.ref("multi:v1"), Architecture: amd64})
	if base.Digest != want.String() {
		t.Errorf("digest %s, want the platform's %s", base.Digest, want)
	}
	if got := fmt.Sprintf("%q", base.Config); got != fmt.Sprintf("%q", image.Config{
		Entrypoint: []string{"/entry", "$x"}, Cmd: []string{"a b", "\"q\""}, Env: []string{"A=1", "B=\n"}, User: "1000:app", WorkingDir: "/w",
		StopSignal: "SIGINT", Volumes: []string{"/data", "/z"}, Labels: map[string]string{"k": "v"},
	}) {
		t.Errorf("configuration %s", got)
	}
	mounted := ext4test.Mount(t, base.Path)
	for name, content := range map[string]string{"a": "lower", "b": "stays"} {
		if b, err := os.ReadFile(filepath.Join(mounted, name)); err != nil || string(b) != content {
			t.Errorf("%s holds %q (%v), want %q", name, b, err, content)
		}
	}
	f, err := os.Open(base.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var id uuid.UUID
	if _, err := f.ReadAt(id[:], 1024+0x68); err != nil || id.String() != base.UUID {
		t.Errorf("the file system's UUID is %s (%v), want %s", id, err, base.UUID)
	}
}

func TestAStoreOpenedAgainKnowsItsBases(t *testing.T) {
	h := newHub(t)
	h.push("one", plain(t, "x"))
	root := t.TempDir()
	dir := filepath.Join(root, "images")
	s := open(t, func(c *oci.Config) { c.Dir = dir })
	if second, err := oci.New(oci.Config{Dir: dir}); err == nil {
		_ = second.Close()
		t.Error("a second store on the same directory was opened")
	}
	first := ensure(t, s, image.Request{Reference: h.ref("one"), Architecture: amd64})
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	for _, dead := range []string{"tmp/pull-dead/blob", "bases/sha256-orphan.ext4", "bases/.new-123", "access/sha256-gone.json"} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(filepath.Join(dir, dead)), 0o700), os.WriteFile(filepath.Join(dir, dead), []byte("x"), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	h.server.Close()
	again := open(t, func(c *oci.Config) { c.Dir = dir })
	got := ensure(t, again, image.Request{Reference: h.ref("one"), Digest: first.Digest, Architecture: amd64, LinkTo: filepath.Join(root, "link")})
	if fmt.Sprint(got) != fmt.Sprint(first) {
		t.Errorf("got %+v, want %+v", got, first)
	}
	for _, left := range leftovers(t, root) {
		if !strings.Contains(left, strings.ReplaceAll(first.Digest, ":", "-")) {
			t.Errorf("left behind: %s", left)
		}
	}
}

func TestTheLongestUnusedGoesFirst(t *testing.T) {
	h := newHub(t)
	clock := clocktesting.NewFakeClock(time.Unix(1_800_000_000, 0))
	root := t.TempDir()
	s := open(t, func(c *oci.Config) { c.Dir, c.Clock, c.BudgetBytes = filepath.Join(root, "images"), clock, 7<<20 })
	use := func(name string) image.Base {
		clock.Step(time.Minute)
		return ensure(t, s, image.Request{Reference: h.ref(name), Architecture: amd64})
	}
	for _, name := range []string{"a", "b", "c", "d"} {
		h.push(name, plain(t, strings.Repeat(name, 2<<20)))
	}
	a, b := use("a"), use("b")
	use("c")
	use("a")
	d := use("d") // 8 MiB and more: the budget is passed
	if _, err := os.Stat(b.Path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("b, the longest unused, is still there (%v)", err)
	}
	for _, kept := range []image.Base{a, d} {
		if _, err := os.Stat(kept.Path); err != nil {
			t.Errorf("a base that was used lately is gone: %v", err)
		}
	}
	usage, err := s.Usage(context.Background())
	if err != nil || usage.Bases != 3 || usage.Bytes > 7<<20 {
		t.Errorf("usage %+v, %v", usage, err)
	}
}

func TestAnImageBiggerThanTheBudgetStillStarts(t *testing.T) {
	h := newHub(t)
	h.push("big", plain(t, strings.Repeat("x", 1<<20)))
	root := t.TempDir()
	s := open(t, func(c *oci.Config) { c.Dir, c.BudgetBytes = filepath.Join(root, "images"), 1 })
	ensure(t, s, image.Request{Reference: h.ref("big"), Architecture: amd64, LinkTo: filepath.Join(root, "vm")})
}

func TestAForeignRegistryThatSaysYesGetsNothing(t *testing.T) {
	h := newHub(t)
	h.push("private", plain(t, "x"))
	h.protect("private", "pw-of-private")
	root := t.TempDir()
	s := open(t, func(c *oci.Config) { c.Dir = filepath.Join(root, "images") })
	base := ensure(t, s, image.Request{
		Reference: h.ref("private"), Architecture: amd64, Credentials: []image.Credential{{Registry: h.host(), Username: "user", Password: "pw-of-private"}},
	})
	liar := newHub(t)
	liar.misbehave(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "/manifests/") {
			return false
		}
		w.Header().Set("Docker-Content-Digest", base.Digest)
		w.Header().Set("Content-Type", string(types.DockerManifestSchema2))
		_, _ = io.WriteString(w, "{}")
		return true
	})
	for _, req := range []image.Request{
		{Reference: liar.ref("x@" + base.Digest), Architecture: amd64},
		{Reference: liar.ref("x"), Digest: base.Digest, Architecture: amd64},
	} {
		req.LinkTo = filepath.Join(root, "link")
		if _, _, err := s.Ensure(context.Background(), req, nil); !fault.Is(err, fault.ImagePullFailed) {
			t.Errorf("got %v, want ImagePullFailed", err)
		}
		if _, err := os.Lstat(req.LinkTo); !errors.Is(err, fs.ErrNotExist) {
			t.Error("the link was made")
		}
	}
}

func TestOnlyWhatIsWrongWithAPinnedImageIsPermanent(t *testing.T) {
	h := newHub(t)
	digest := h.push("bad", picture{layers: []v1.Layer{static.NewLayer(tarOf(t, map[string]string{"../x": ""}), types.OCIUncompressedLayer)}}.image(t))
	s := open(t, nil)
	for reference, want := range map[string]bool{h.ref("bad"): false, h.ref("bad@" + digest): true, h.ref("missing@" + digest): false} {
		_, _, err := s.Ensure(context.Background(), image.Request{Reference: reference, Architecture: amd64}, nil)
		if err == nil || fault.Of(err).Permanent != want {
			t.Errorf("%s: %v is permanent: %v, want %v", reference, err, !want, want)
		}
	}
}

func TestAPassingFaultOfTheRegistryIsTriedAgain(t *testing.T) {
	h := newHub(t)
	img := plain(t, strings.Repeat("x", 1<<20))
	h.push("one", img)
	broken := 0
	h.misbehave(func(w http.ResponseWriter, r *http.Request) bool {
		if broken < 2 && r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, layerOf(t, img)) {
			broken++
			w.Header().Set("Content-Length", "1050624")
			_, _ = w.Write(make([]byte, 1000)) // and then the connection breaks
			return true
		}
		return false
	})
	ensure(t, open(t, nil), image.Request{Reference: h.ref("one"), Architecture: amd64})
	if broken != 2 {
		t.Errorf("the registry broke %d times, want 2", broken)
	}
}

func TestTheNodesOwnCredentialsHoldForEveryVM(t *testing.T) {
	h := newHub(t)
	h.push("team/app", plain(t, "x"))
	h.protect("team/app", "node-password")
	file := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(file, fmt.Appendf(nil, `{"auths":{"http://%s/team/":{"username":"user","password":"node-password"}}}`, h.host()), 0o600); err != nil {
		t.Fatal(err)
	}
	s := open(t, func(c *oci.Config) { c.NodeCredentialsFile = file })
	ensure(t, s, image.Request{Reference: h.ref("team/app"), Architecture: amd64})
	h.reset()
	ensure(t, s, image.Request{Reference: h.ref("team/app"), Architecture: amd64, Policy: image.IfNotPresent})
	if n := h.count("/v2/"); n != 0 {
		t.Errorf("a cached image with the node's known credentials made %d requests", n)
	}
}

func TestALinkOnAnotherFileSystemIsAnErrorThatSaysSo(t *testing.T) {
	ext4test.NeedRoot(t)
	h := newHub(t)
	h.push("one", plain(t, "x"))
	other := t.TempDir()
	if err := unix.Mount("tmpfs", other, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(other, unix.MNT_DETACH) }()
	_, _, err := open(t, nil).Ensure(context.Background(), image.Request{Reference: h.ref("one"), Architecture: amd64, LinkTo: filepath.Join(other, "vm")}, nil)
	if !fault.Is(err, fault.DiskFailed) || !errors.Is(err, syscall.EXDEV) {
		t.Errorf("got %v, want DiskFailed with EXDEV", err)
	}
}
