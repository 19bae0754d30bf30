package guestinit

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"imp.dev/imp/internal/initramfs/layout"
)

// mountForWorkload mounts what an OCI runtime gives a container, inside the new root. None of it stops a guest from starting: what
// fails is told in the log.
func mountForWorkload(outside int, log *logger) {
	const common = unix.MS_NOSUID | unix.MS_NOEXEC
	for _, m := range []struct {
		target, fstype string
		flags          uintptr
		data           string
	}{
		{"/dev/pts", "devpts", common, "newinstance,ptmxmode=0666,mode=0620,gid=5"},
		{"/dev/shm", "tmpfs", common | unix.MS_NODEV, "mode=1777"},
		{"/dev/mqueue", "mqueue", common | unix.MS_NODEV, ""},
		{"/sys/fs/cgroup", "cgroup2", common | unix.MS_NODEV, ""},
	} {
		// In /sys nothing can be made: the directory is there if the kernel has the feature.
		if err := os.Mkdir(m.target, 0o755); err != nil && !errors.Is(err, os.ErrExist) && !errors.Is(err, os.ErrPermission) {
			log.Printf("making %s: %v", m.target, err)
			continue
		}
		if err := mount(m.fstype, m.target, m.fstype, m.flags, m.data); err != nil {
			log.Printf("%v", err)
		}
	}
	if err := mountRun(outside); err != nil {
		log.Printf("%v", err)
	}
	for name, target := range map[string]string{
		"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
	} {
		if err := os.Symlink(target, filepath.Join("/dev", name)); err != nil && !errors.Is(err, os.ErrExist) {
			log.Printf("making /dev/%s: %v", name, err)
		}
	}
	// As container engines do: a workload without privileges may listen on any port of its own machine and send pings.
	for name, value := range map[string]string{
		"/proc/sys/net/ipv4/ip_unprivileged_port_start": "0",
		"/proc/sys/net/ipv4/ping_group_range":           "0 2147483647",
	} {
		if err := os.WriteFile(name, []byte(value), 0); err != nil {
			log.Printf("writing %s: %v", name, err)
		}
	}
}

// mountRun gives the workload an empty /run at every boot, as daemons expect (a PID file of the last boot keeps them from starting), with
// what the image itself has there: images prepare directories for their daemons in it.
func mountRun(outside int) error {
	if s, err := os.Lstat("/run"); err != nil || !s.IsDir() {
		return fmt.Errorf("mounting /run: the image has no directory there")
	}
	if err := mount("tmpfs", "/run", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
		return err
	}
	base, err := unix.Openat(outside, layout.Base, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("filling /run: %w", err)
	}
	defer closeFD(base)
	source, err := unix.Openat(base, "run", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("filling /run: %w", err)
	}
	defer closeFD(source)
	if err := copyTree(source, "/run"); err != nil {
		return fmt.Errorf("filling /run: %w", err)
	}
	return nil
}
