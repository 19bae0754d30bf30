package guestinit

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// bindDataPaths puts directories of the private disk's own ext4 where the workload wants a real file system: an overlay cannot be
// mounted in an overlay, and databases dislike it. Each is filled from the image's directory when it is first made.
func bindDataPaths(outside int, paths []string, log *logger) error {
	sorted := make([]string, len(paths))
	for i, p := range paths {
		sorted[i] = path.Clean(p)
	}
	slices.Sort(sorted) // a parent before what is below it
	for _, p := range slices.Compact(sorted) {
		if reserved(p) {
			// Images made for systemd declare /run or /sys/fs/cgroup as volumes: they have them anyway.
			log.Printf("data path %s is the guest's own: left out", p)
			continue
		}
		if err := bindDataPath(outside, p); err != nil {
			return fmt.Errorf("preparing data path %s: %w", p, err)
		}
	}
	return nil
}

// dataName is the name of a data path's directory on the private disk.
func dataName(p string) string {
	sum := sha256.Sum256([]byte(p))
	return hex.EncodeToString(sum[:16])
}

func bindDataPath(outside int, target string) error {
	if err := os.MkdirAll(target, 0o755); err != nil {
		return err
	}
	data, err := unix.Openat(outside, strings.TrimPrefix(dataDir, "/"), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer closeFD(data)
	name := dataName(target)
	err = unix.Faccessat(data, name, unix.F_OK, 0)
	if errors.Is(err, unix.ENOENT) {
		err = fillDataPath(data, name, target)
	}
	if err != nil {
		return err
	}
	source, err := unix.Openat(data, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer closeFD(source)
	if err := unix.Mount(fmt.Sprintf("/proc/self/fd/%d", source), target, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("binding: %w", err)
	}
	return nil
}

// fillDataPath copies the directory at target to a new one beside its final name and publishes it by rename, so that a machine that dies
// amid the copy begins again.
func fillDataPath(data int, name, target string) error {
	unfinished := name + ".new"
	into := fmt.Sprintf("/proc/self/fd/%d/%s", data, unfinished)
	if err := os.RemoveAll(into); err != nil {
		return err
	}
	if err := unix.Mkdirat(data, unfinished, 0o755); err != nil {
		return err
	}
	from, err := unix.Open(target, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer closeFD(from)
	if err := copyTree(from, into); err != nil {
		return fmt.Errorf("copying the image's content: %w", err)
	}
	if err := unix.Syncfs(data); err != nil {
		return fmt.Errorf("writing to disk: %w", err)
	}
	return unix.Renameat(data, unfinished, data, name)
}

// reserved says whether a directory is the guest's own.
func reserved(p string) bool {
	for _, own := range []string{"/dev", "/proc", "/sys"} {
		if p == own || strings.HasPrefix(p, own+"/") {
			return true
		}
	}
	return p == "/run"
}

func validateDataPath(p string) error {
	switch {
	case !path.IsAbs(p):
		return fmt.Errorf("data path %q is not absolute", p)
	case path.Clean(p) == "/":
		return errors.New("data path / would be the whole image")
	case strings.ContainsRune(p, 0):
		return fmt.Errorf("data path %q has a NUL byte in it", p)
	}
	return nil
}
