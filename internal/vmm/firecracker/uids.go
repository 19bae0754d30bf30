package firecracker

import (
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// uids gives each jailed VM a user of its own: base, base+1, … One that is taken has a file of its name, with the run's ID in it, so that it is
// given back whatever happened to the runtime in between.
type uids struct {
	dir         string
	base, count int
}

func (u uids) path(uid int) string { return filepath.Join(u.dir, strconv.Itoa(uid)) }

// take gives the uid of id, a new one if it has none.
func (u uids) take(id string) (int, error) {
	if u.base <= 0 || u.count <= 0 {
		return 0, fmt.Errorf("choosing a user for the VMM: there are %d from %d on to choose from", u.count, u.base)
	}
	if uid, err := u.of(id); err != nil || uid != 0 {
		return uid, err
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(id))
	first := int(h.Sum32() % uint32(u.count))
	for i := range u.count {
		uid := u.base + (first+i)%u.count
		// Whole or not at all: a file without its ID would be nobody's for ever.
		temporary, err := os.CreateTemp(u.dir, "new-")
		if err != nil {
			return 0, fmt.Errorf("choosing a user for the VMM: %w", err)
		}
		_, err = temporary.WriteString(id)
		err = errors.Join(err, temporary.Close())
		if err == nil {
			err = os.Link(temporary.Name(), u.path(uid))
		}
		_ = os.Remove(temporary.Name())
		if err == nil {
			return uid, nil
		}
		if !errors.Is(err, fs.ErrExist) {
			return 0, fmt.Errorf("choosing a user for the VMM: %w", err)
		}
	}
	return 0, fmt.Errorf("choosing a user for the VMM: all %d from %d on are in use", u.count, u.base)
}

// of finds the uid that id has, 0 if none.
func (u uids) of(id string) (int, error) {
	entries, err := os.ReadDir(u.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("looking for the VMM's user: %w", err)
	}
	for _, e := range entries {
		uid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		content, err := os.ReadFile(u.path(uid))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return 0, fmt.Errorf("looking for the VMM's user: %w", err)
		}
		if err == nil && strings.TrimSpace(string(content)) == id {
			return uid, nil
		}
	}
	return 0, nil
}

// giveBack frees the uid of id. One that has none is success.
func (u uids) giveBack(id string) error {
	uid, err := u.of(id)
	if err != nil || uid == 0 {
		return err
	}
	if err := os.Remove(u.path(uid)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("giving back the VMM's user: %w", err)
	}
	return nil
}
