package oci

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
)

// writeFile puts content in place of path: whole or not at all, also after a power cut.
func writeFile(path string, content []byte, mode os.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return err
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// workDirectory gives a directory below tmp/ and the function that removes it.
func (s *Store) workDirectory() (dir string, done func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	dir, err = os.MkdirTemp(s.path("tmp"), "pull-")
	if err != nil {
		return "", nil, onDisk(err)
	}
	s.active[dir] = true
	return dir, func() {
		_ = os.RemoveAll(dir)
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.active, dir)
	}, nil
}

// tag is what a reference meant when it was last resolved.
type tag struct {
	Reference    string `json:"reference"`
	Architecture string `json:"architecture"`
	Digest       string `json:"digest"`
}

func (s *Store) tagPath(a *ask) string {
	sum := sha256.Sum256([]byte(a.reference.Name() + "\n" + a.Architecture))
	return s.path("tags", hex.EncodeToString(sum[:])+".json")
}

// lookupTag gives the digest, or "" if the reference has not been resolved here.
func (s *Store) lookupTag(a *ask) string {
	b, err := os.ReadFile(s.tagPath(a))
	var t tag
	if err != nil || json.Unmarshal(b, &t) != nil || t.Reference != a.reference.Name() || t.Architecture != a.Architecture {
		return ""
	}
	return t.Digest
}

func (s *Store) rememberTag(a *ask, digest string) error {
	if s.lookupTag(a) == digest {
		return nil
	}
	b, err := json.Marshal(tag{a.reference.Name(), a.Architecture, digest})
	if err != nil {
		return err
	}
	s.mu.Lock() // against clean
	defer s.mu.Unlock()
	return onDisk(writeFile(s.tagPath(a), b, 0o600))
}
