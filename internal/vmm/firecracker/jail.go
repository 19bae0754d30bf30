package firecracker

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"imp.dev/imp/internal/process"
	"imp.dev/imp/internal/vmm"
)

// jails makes, finds and removes the jails of one runtime. Below dir:
//
//	uids/UID               whose that user is
//	cache/…                kernel and initramfs, where they cannot be linked from where they are
//	<program>/ID/…         one jail: log and metrics
//	<program>/ID/root/     what its VMM sees as /
type jails struct {
	dir string
	// program is the base name of Firecracker's binary: the jailer makes it a part of the path.
	program string
	uids    uids
	cache   *linkCache
}

func newJails(dir, program string, uidBase, uidCount int) *jails {
	return &jails{dir: dir, program: program, uids: uids{filepath.Join(dir, "uids"), uidBase, uidCount}, cache: &linkCache{dir: filepath.Join(dir, "cache")}}
}

func (j *jails) path(id string) string { return filepath.Join(j.dir, j.program, id) }

func (j *jails) home(id string) home {
	return home{Containment: Jailed, Root: filepath.Join(j.path(id), "root"), Keep: j.path(id)}
}

// usable refuses a place where a jail cannot be.
func (j *jails) usable() error {
	if os.Geteuid() != 0 {
		return errors.New("a jail needs root: run the runtime as root, or switch the jail off for development (--firecracker-jail=false)")
	}
	for _, dir := range []string{j.dir, j.uids.dir, j.cache.dir, filepath.Join(j.dir, j.program)} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("making directory of jails: %w", err)
		}
	}
	var st unix.Statfs_t
	if err := unix.Statfs(j.dir, &st); err != nil {
		return fmt.Errorf("looking at the file system of jails: %w", err)
	}
	for flag, what := range map[int64]string{unix.ST_NODEV: "nodev", unix.ST_NOEXEC: "noexec"} {
		if st.Flags&flag != 0 {
			return fmt.Errorf("the file system of %s is mounted %s, and a jail holds devices and a program: name another directory by --firecracker-jail-dir, on the file system of the state directory", j.dir, what)
		}
	}
	return nil
}

// make builds the jail of a run, up to what the jailer does itself, in place of what an earlier run of this name left. Kernel, initramfs and
// read-only disks stay root's; a private disk becomes the VM's user's.
func (j *jails) make(id string, c vmm.Config) (home, spec, error) {
	h := j.home(id)
	if err := j.remove(id); err != nil {
		return h, spec{}, err
	}
	uid, err := j.uids.take(id)
	if err != nil {
		return h, spec{}, err
	}
	h.UID = uid
	if err := os.MkdirAll(h.Root, 0o700); err != nil {
		return h, spec{}, fmt.Errorf("making jail: %w", err)
	}
	s := spec{Kernel: "kernel", Initramfs: "initramfs"}
	for name, path := range map[string]string{s.Kernel: c.Kernel, s.Initramfs: c.Initramfs} {
		if err := j.cache.link(path, filepath.Join(h.Root, name)); err != nil {
			return h, spec{}, err
		}
	}
	for i, d := range c.Disks {
		name := diskID(i)
		if err := linkDisk(d, filepath.Join(h.Root, name), uid); err != nil {
			return h, spec{}, err
		}
		s.Disks = append(s.Disks, specDisk{Path: name, ReadOnly: d.ReadOnly})
	}
	return h, s, h.makeLogs()
}

func linkDisk(d vmm.Disk, to string, uid int) error {
	if d.ReadOnly {
		if err := worldReadable(d.Path); err != nil {
			return fmt.Errorf("disk %s: %w", d.Path, err)
		}
	}
	err := os.Link(d.Path, to)
	if errors.Is(err, syscall.EXDEV) {
		return fmt.Errorf("disk %s is on another file system than its jail %s: name a directory beside it by --firecracker-jail-dir", d.Path, to)
	}
	if err == nil && !d.ReadOnly {
		err = os.Lchown(to, uid, uid)
	}
	if err != nil {
		return fmt.Errorf("putting disk into the jail: %w", err)
	}
	return nil
}

// worldReadable: a shared file stays root's, and the VM's user reads it as one of the others.
func worldReadable(path string) error {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return err
	case !info.Mode().IsRegular():
		return errors.New("not a regular file")
	case info.Mode().Perm()&0o004 == 0:
		return fmt.Errorf("mode %v lets the VMM's user not read it; chmod o+r", info.Mode().Perm())
	}
	return nil
}

// remove takes a jail away and gives its disks and its user back. Its VMM must be gone.
func (j *jails) remove(id string) error {
	root := j.home(id).Root
	for i := range maxDevices {
		if err := os.Lchown(filepath.Join(root, diskID(i)), 0, 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("taking disk out of the jail: %w", err)
		}
	}
	if err := os.RemoveAll(j.path(id)); err != nil {
		return fmt.Errorf("removing jail: %w", err)
	}
	return j.uids.giveBack(id)
}

// list gives the IDs of all jails, and of all that have a user.
func (j *jails) list() ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(j.dir, j.program))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("listing jails: %w", err)
	}
	ids := make([]string, 0, len(entries))
	for _, e := range entries {
		ids = append(ids, e.Name())
	}
	return ids, nil
}

// jailerCapabilities are what the jailer needs to make a jail: it gives up all of them by changing its user.
func jailerCapabilities() []int {
	return []int{unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE, unix.CAP_FOWNER, unix.CAP_MKNOD, unix.CAP_SETGID, unix.CAP_SETUID, unix.CAP_SYS_ADMIN, unix.CAP_SYS_CHROOT}
}

const (
	jailOpenFiles = 1024
	// jailFileBytes bounds what a VMM may make of any file: far more than any disk or console, and less than would fill a file system's offsets.
	jailFileBytes = 16 << 40
)

// order starts Firecracker through the jailer, which becomes it: one process from the start on. Its cgroup and its network namespace are
// entered before.
func (j *jails) order(o process.Order, jailer, binary, id string, uid int) process.Order {
	o.Args = append([]string{
		"--id", id, "--exec-file", binary, "--uid", strconv.Itoa(uid), "--gid", strconv.Itoa(uid), "--chroot-base-dir", j.dir,
		"--resource-limit", "no-file=" + strconv.Itoa(jailOpenFiles), "--resource-limit", "fsize=" + strconv.FormatInt(jailFileBytes, 10), "--",
	}, firecrackerArgs()...)
	o.Path, o.Dir, o.UID, o.GID, o.Capabilities = jailer, "/", 0, 0, jailerCapabilities()
	return o
}

// firecrackerArgs are the same with and without a jail.
func firecrackerArgs() []string {
	return []string{"--api-sock", apiName, "--log-path", logName, "--level", "Info", "--metrics-path", metricsName}
}

// validID is what Firecracker and the jailer take.
func validID(id string) error {
	const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-"
	if id == "" || len(id) > 64 || strings.Trim(id, letters) != "" {
		return fmt.Errorf("%q cannot be the ID of a Firecracker: 1 to 64 letters, digits and -", id)
	}
	return nil
}
