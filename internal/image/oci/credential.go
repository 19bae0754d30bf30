package oci

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"

	"imp.dev/imp/internal/image"
)

// candidate is a credential that may open a repository, or nobody's (anonymous).
type candidate struct {
	image.Credential
	hash      string // keyed, of all of it
	anonymous bool
}

func (c candidate) authenticator() authn.Authenticator {
	if c.anonymous {
		return authn.Anonymous
	}
	return authn.FromConfig(authn.AuthConfig{
		Username: c.Username, Password: c.Password, IdentityToken: c.IdentityToken, RegistryToken: c.RegistryToken,
	})
}

// shortestSecret is what can be taken out of a text without tearing it apart.
const shortestSecret = 4

// secrets are the strings that must not appear anywhere.
func (c candidate) secrets() []string {
	var out []string
	for _, s := range []string{c.Password, c.IdentityToken, c.RegistryToken} {
		if len(s) < shortestSecret {
			continue
		}
		out = append(out, s, url.QueryEscape(s), url.PathEscape(s), base64.StdEncoding.EncodeToString([]byte(s)))
	}
	if c.Password != "" {
		out = append(out, base64.StdEncoding.EncodeToString([]byte(c.Username+":"+c.Password)))
	}
	return out
}

// candidates picks those credentials that are meant for a repository, as the kubelet does: the most specific key first, the
// VM's own before the node's; without any it is tried anonymously.
func (s *Store) candidates(own []image.Credential, registry, repository string) ([]candidate, error) {
	node, err := readDockerConfig(s.config.NodeCredentialsFile)
	if err != nil {
		return nil, err
	}
	var out []candidate
	for _, list := range [][]image.Credential{own, node} {
		type match struct {
			image.Credential
			specific int
		}
		var matches []match
		for _, c := range list {
			if n := matchKey(c.Registry, registry, repository); n > 0 {
				matches = append(matches, match{c, n})
			}
		}
		slices.SortStableFunc(matches, func(a, b match) int { return b.specific - a.specific })
		for _, m := range matches {
			c := candidate{Credential: m.Credential}
			c.hash = s.hash(registry, c.Username, c.Password, c.IdentityToken, c.RegistryToken)
			if !slices.ContainsFunc(out, func(o candidate) bool { return o.hash == c.hash }) {
				out = append(out, c)
			}
		}
	}
	if len(out) == 0 {
		out = []candidate{{anonymous: true, hash: s.hash("anonymous")}}
	}
	return out, nil
}

// isDockerHub knows its names: more than one, and the address in docker config files is none that is spoken to.
func isDockerHub(host string) bool {
	return slices.Contains([]string{"index.docker.io", "docker.io", "registry-1.docker.io", "registry.hub.docker.com"}, host)
}

// matchKey says how specifically a docker config key names a repository; 0 is not at all. A key is a host, which may hold
// "*" within a label as Kubernetes allows, with or without scheme, port, API version, and leading part of the repository.
func matchKey(key, registry, repository string) int {
	key = strings.TrimPrefix(strings.TrimPrefix(key, "https://"), "http://")
	host, prefix, _ := strings.Cut(key, "/")
	prefix = strings.Trim(prefix, "/")
	if prefix == "v1" || prefix == "v2" {
		prefix = ""
	}
	if !matchHost(host, registry) {
		return 0
	}
	if prefix != "" && repository != prefix && !strings.HasPrefix(repository, prefix+"/") {
		return 0
	}
	specific := 1 + 2*len(prefix)
	if !strings.Contains(host, "*") {
		specific++
	}
	return specific
}

func matchHost(pattern, registry string) bool {
	if isDockerHub(pattern) && isDockerHub(registry) {
		return true
	}
	want, have := strings.Split(strings.ToLower(pattern), "."), strings.Split(strings.ToLower(registry), ".")
	if len(want) != len(have) {
		return false
	}
	for i := range want {
		if ok, err := path.Match(want[i], have[i]); err != nil || !ok {
			return false
		}
	}
	return true
}

// readDockerConfig reads the auths of a docker config file. Its errors name the file and never its content.
func readDockerConfig(file string) ([]image.Credential, error) {
	if file == "" {
		return nil, nil
	}
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the node's registry credentials: %w", err)
	}
	var config struct {
		Auths map[string]struct{ Auth, Username, Password, IdentityToken, RegistryToken string }
	}
	if json.Unmarshal(b, &config) != nil {
		return nil, fmt.Errorf("reading the node's registry credentials: %s is not a docker config file", file)
	}
	var out []image.Credential
	for key, a := range config.Auths {
		c := image.Credential{Registry: key, Username: a.Username, Password: a.Password, IdentityToken: a.IdentityToken, RegistryToken: a.RegistryToken}
		if a.Auth != "" {
			plain, err := base64.StdEncoding.DecodeString(a.Auth)
			user, password, ok := strings.Cut(string(plain), ":")
			if err != nil || !ok {
				return nil, fmt.Errorf("reading the node's registry credentials: %s: the auth of %q is not base64 of user:password", file, key)
			}
			c.Username, c.Password = user, strings.TrimRight(password, "\x00")
		}
		out = append(out, c)
	}
	slices.SortFunc(out, func(a, b image.Credential) int { return strings.Compare(a.Registry, b.Registry) })
	return out, nil
}

// hash of a credential under the store's own key: what is kept on the disk says nothing about the secret, and nothing to
// somebody with another store's records.
func (s *Store) hash(parts ...string) string {
	h := hmac.New(sha256.New, s.key)
	for _, p := range parts {
		fmt.Fprintf(h, "%d:%s", len(p), p)
	}
	return hex.EncodeToString(h.Sum(nil))
}

const keySize = 32

func loadKey(file string) ([]byte, error) {
	key, err := os.ReadFile(file)
	if err == nil && len(key) == keySize {
		return key, nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	key = make([]byte, keySize)
	if _, err := rand.Read(key); err != nil {
		return nil, err
	}
	return key, writeFile(file, key, 0o600)
}
