package oci

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"

	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/image/oci/flatten"
)

// ask is a request made plain: which repository, what of it, and who wants it.
type ask struct {
	image.Request
	written    string // the reference, for messages
	reference  name.Reference
	repository string // host/path
	tries      []candidate
	identity   string // of all credentials in play: who this is
}

func (s *Store) newAsk(req image.Request) (*ask, error) {
	a := &ask{Request: req, written: printable(req.Reference)}
	ref, err := name.ParseReference(req.Reference, name.WithDefaultTag("latest"))
	if err != nil {
		return a, &flatten.Refused{Reason: fmt.Sprintf("the reference is not one: %s", printable(err.Error()))}
	}
	if req.Digest != "" {
		if _, err := v1.NewHash(req.Digest); err != nil {
			return a, &flatten.Refused{Reason: fmt.Sprintf("the pinned digest %q is not one", printable(req.Digest))}
		}
	}
	switch req.Policy {
	case image.Always, image.IfNotPresent, image.Never:
	case "":
		a.Policy = image.IfNotPresent
	default:
		return a, &flatten.Refused{Reason: fmt.Sprintf("pull policy %q is not Always, IfNotPresent or Never", req.Policy)}
	}
	a.reference, a.repository = ref, ref.Context().Name()
	a.tries, err = s.candidates(req.Credentials, ref.Context().RegistryStr(), ref.Context().RepositoryStr())
	if err != nil {
		return a, err
	}
	var hashes []string
	for _, c := range a.tries {
		hashes = append(hashes, c.hash)
	}
	a.identity = a.repository + " " + strings.Join(hashes, " ")
	return a, nil
}

// fixed says that the reference can only ever mean one image.
func (a *ask) fixed() bool {
	if a.Digest != "" || a.reference == nil {
		return true
	}
	_, byDigest := a.reference.(name.Digest)
	return byDigest
}

func (a *ask) host() string { return a.reference.Context().RegistryStr() }

// byDigest names a manifest of the asked repository.
func (a *ask) byDigest(digest string) name.Digest { return a.reference.Context().Digest(digest) }

// resolution is the answer to what an ask means here. Without session nothing had to be asked.
type resolution struct {
	digest   string
	session  *session
	manifest []byte
}

var errNever = errors.New("the pull policy is Never")

// resolve says which image is meant and that the asker may have it. It asks the registry only if it must: with Always, if the
// base is not here, or if these credentials have not been seen to open this repository's image.
func (s *Store) resolve(ctx context.Context, a *ask) (resolution, error) {
	local := a.Digest
	if local == "" && (a.Policy != image.Always || a.fixed()) {
		local = s.lookupTag(a)
	}
	here := local != "" && s.has(local)
	if here && a.Policy != image.Always && s.allowed(local, a) {
		return resolution{digest: local}, nil
	}
	if a.Policy == image.Never {
		if here {
			return resolution{}, fmt.Errorf("%w, and whether these credentials may have the image that is here only the registry %s knows", errNever, a.host())
		}
		return resolution{}, fmt.Errorf("%w, and the image is not on this node", errNever)
	}
	if here && (a.Policy != image.Always || a.Digest != "") {
		return resolution{digest: local}, s.prove(ctx, a, local)
	}
	found, err := s.ask(ctx, a)
	if err == nil && s.has(found.digest) {
		err = s.admit(ctx, a, found)
	}
	return found, err
}

// ask asks the registry, once for all who ask the same.
func (s *Store) ask(ctx context.Context, a *ask) (resolution, error) {
	key := strings.Join([]string{a.reference.String(), a.Digest, a.Architecture, a.identity}, "\n")
	found, _, err := s.resolving.do(ctx, key, a.identity, func(ctx context.Context, _ func(image.Progress)) (resolution, error) {
		ref := a.reference
		if a.Digest != "" {
			ref = a.byDigest(a.Digest)
		}
		found, err := s.each(ctx, a, func(ctx context.Context, session *session) (resolution, error) {
			return session.resolve(ctx, ref)
		})
		if err != nil {
			return resolution{}, err
		}
		if a.Digest != "" && found.digest != a.Digest {
			return resolution{}, &flatten.Refused{Reason: fmt.Sprintf("the pinned digest %s is an index, not an image", a.Digest)}
		}
		if a.Digest == "" {
			err = s.rememberTag(a, found.digest)
		}
		return found, err
	}, nil)
	return found, err
}

// each tries the ask's credentials in turn until one is let in. The first refusal is what is told. A try is about manifests,
// which are small, so it has a time limit: whoever answers drop by drop does not keep a VM waiting for ever.
func (s *Store) each(ctx context.Context, a *ask, try func(context.Context, *session) (resolution, error)) (resolution, error) {
	var first error
	for _, c := range a.tries {
		session, err := s.connect(a, c)
		if err != nil {
			return resolution{}, err
		}
		limited, cancel := context.WithTimeout(ctx, 2*s.config.StallTimeout)
		found, err := try(limited, session)
		cancel()
		if err == nil {
			return found, nil
		}
		told := session.explain(ctx, err)
		if first == nil {
			first = told
		}
		if !isRefusal(err) {
			return resolution{}, told
		}
	}
	return resolution{}, first
}
