package oci

import "testing"

func TestKeysMatchAsInDockerAndKubernetes(t *testing.T) {
	for _, c := range []struct {
		key, registry, repository string
		want                      bool
	}{
		{"https://index.docker.io/v1/", "index.docker.io", "library/debian", true},
		{"docker.io", "index.docker.io", "library/debian", true},
		{"quay.io", "index.docker.io", "library/debian", false},
		{"quay.io", "quay.io", "a/b", true},
		{"https://quay.io", "quay.io", "a/b", true},
		{"https://quay.io/v2/", "quay.io", "a/b", true},
		{"quay.io/a", "quay.io", "a/b", true},
		{"quay.io/a/b", "quay.io", "a/b", true},
		{"quay.io/a/b/", "quay.io", "a/b", true},
		{"quay.io/a", "quay.io", "ab/c", false},
		{"quay.io/a/b/c", "quay.io", "a/b", false},
		{"quay.io:443", "quay.io", "a/b", false},
		{"127.0.0.1:5000", "127.0.0.1:5000", "a", true},
		{"127.0.0.1:5001", "127.0.0.1:5000", "a", false},
		{"*.example.com", "registry.example.com", "a", true},
		{"*.example.com", "example.com", "a", false},
		{"*.example.com", "a.b.example.com", "a", false},
		{"*", "quay.io", "a", false},
		{"QUAY.io", "quay.io", "a", true},
		{"", "quay.io", "a", false},
		{"[", "quay.io", "a", false},
	} {
		if got := matchKey(c.key, c.registry, c.repository) > 0; got != c.want {
			t.Errorf("key %q for %s/%s matches: %v, want %v", c.key, c.registry, c.repository, got, c.want)
		}
	}
	if matchKey("quay.io/a/b", "quay.io", "a/b") <= matchKey("quay.io/a", "quay.io", "a/b") || matchKey("quay.io", "quay.io", "a") <= matchKey("*.io", "quay.io", "a") {
		t.Error("the more specific key does not come first")
	}
}
