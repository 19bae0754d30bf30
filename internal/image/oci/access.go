package oci

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// The cache is shared by namespaces that do not trust each other, and a digest is no secret: it stands in status fields. So a
// cached image is given out only to a credential that the registry has been seen to serve it to, from that repository.
//
//   - The credential is on record for (repository, digest): nothing is asked.
//   - The repository is on record, the credential is not: a HEAD of the manifest shows whether it is let in.
//   - The repository is not on record: it could be somebody's own registry, which says yes to any HEAD. It must give the
//     manifest and the configuration themselves, which one who only knows the digest cannot make up.

// grant says that a credential was served the image from a repository.
type grant struct {
	Repository string `json:"repository"`
	Credential string `json:"credential"`
}

type accessRecord struct {
	Grants []grant `json:"grants"` // oldest first
}

// mostGrants bounds a record; who falls out proves access again.
const mostGrants = 256

func (s *Store) accessFile(digest string) string {
	return s.path("access", fileName(digest)+".json")
}

// grants reads a record. One that is not there or broken grants nothing.
func (s *Store) grants(digest string) []grant {
	b, err := os.ReadFile(s.accessFile(digest))
	var record accessRecord
	if err != nil || json.Unmarshal(b, &record) != nil {
		return nil
	}
	return record.Grants
}

func (s *Store) allowed(digest string, a *ask) bool {
	for _, g := range s.grants(digest) {
		for _, c := range a.tries {
			if g == (grant{a.repository, c.hash}) {
				return true
			}
		}
	}
	return false
}

func (s *Store) grant(digest string, a *ask, c candidate) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := grant{a.repository, c.hash}
	list := s.grants(digest)
	if slices.Contains(list, g) {
		return nil
	}
	list = append(list, g)
	if len(list) > mostGrants {
		list = list[len(list)-mostGrants:]
	}
	b, err := json.Marshal(accessRecord{list})
	if err != nil {
		return err
	}
	return onDisk(writeFile(s.accessFile(digest), b, 0o600))
}

// prove shows that the asker may have a base that is here, by asking the registry.
func (s *Store) prove(ctx context.Context, a *ask, digest string) error {
	known := slices.ContainsFunc(s.grants(digest), func(g grant) bool { return g.Repository == a.repository })
	_, err := s.each(ctx, a, func(ctx context.Context, session *session) (resolution, error) {
		ref := a.byDigest(digest)
		if known {
			err := session.head(ctx, ref)
			if err == nil {
				err = s.grant(digest, a, session.candidate)
			}
			return resolution{}, err
		}
		found, err := session.resolve(ctx, ref)
		if err == nil {
			err = s.admit(ctx, a, found)
		}
		return found, err
	})
	return err
}

// admit puts on record that the session's credential was served found.manifest, after looking closer where that alone
// proves too little.
func (s *Store) admit(ctx context.Context, a *ask, found resolution) error {
	if found.session == nil || s.allowed(found.digest, a) {
		return nil
	}
	if !slices.ContainsFunc(s.grants(found.digest), func(g grant) bool { return g.Repository == a.repository }) {
		manifest, err := v1.ParseManifest(strings.NewReader(string(found.manifest)))
		if err != nil {
			return fmt.Errorf("reading manifest: %w", err)
		}
		if err := found.session.blob(ctx, manifest.Config, maxConfigBytes, io.Discard); err != nil {
			return found.session.explain(ctx, err)
		}
	}
	return s.grant(found.digest, a, found.session.candidate)
}
