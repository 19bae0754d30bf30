package api

import (
	"strings"
	"testing"

	"github.com/distribution/reference"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// TestImageReferencesAreThoseOfTheRegistries compares the schema's pattern with the reference implementation of the grammar: what
// one takes and the other does not would be refused late, on the node, or without need.
func TestImageReferencesAreThoseOfTheRegistries(t *testing.T) {
	c := newCluster(t)
	digest := "@sha256:" + strings.Repeat("0a", 32)
	for _, image := range []string{
		"alpine", "alpine:3", "library/alpine:3.20", "a.b/c", "localhost/c", "localhost:5000/c:tag", "registry.example:443/a/b/c/d:1",
		"127.0.0.1:5000/x", "[::1]:5000/x", "[fe80::1]/x", "a_b/c__d/e-f/g---h/i.j:T_a-g.1", "alpine" + digest, "alpine:3" + digest, "r.example/a" + digest,
		"EXAMPLE.com/a", "Example.com:80/a", "a/b:" + strings.Repeat("x", 128), "xn--n3h.com/a", "a.b.c.d.e/f",
		"", " ", "a b", "a:", "a@", ":tag", "/a", "a/", "a//b", "A", "a/B", "a___b", "a..b", "a.-b", "-a", "a-", "_a", "a:-x", "a:.x", "a:" + strings.Repeat("x", 129),
		"https://a.b/c", "a.b:port/c", "a.b:80:80/c", "a@sha256:12", "a" + digest + digest, "a@sha256:" + strings.Repeat("0A", 32), "ä", "a\nb", "a\n", "a.b-/c", "-a.b/c", "a..b/c",
		"a?b", "a$b", "../a", "./a",
	} {
		t.Run(image, func(t *testing.T) {
			vm := c.vm("image", `{}`)
			vm.Object["spec"] = map[string]any{"image": image}
			_, parse := reference.ParseNormalizedNamed(image)
			api := c.admin.Create(t.Context(), vm, client.DryRunAll)
			if (parse == nil) != (api == nil) {
				t.Errorf("%q:\n  the grammar: %v\n  the API:     %v", image, parse, api)
			}
		})
	}
}
