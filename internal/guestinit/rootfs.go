package guestinit

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/initramfs/layout"
)

const (
	baseDir    = "/" + layout.Base
	privateDir = "/" + layout.Private
	rootDir    = "/" + layout.Root
	upperDir   = privateDir + "/upper"
	workDir    = privateDir + "/work"
	// dataDir holds one directory for each data path.
	dataDir = privateDir + "/data"
)

// rootfs is the workload's file system, after it has become this process's root.
type rootfs struct {
	// outside is a descriptor of the initramfs's root, the way back to the mounts below it.
	outside int
}

func mount(source, target, fstype string, flags uintptr, data string) error {
	if err := unix.Mount(source, target, fstype, flags, data); err != nil {
		return fmt.Errorf("mounting %s on %s: %w", fstype, target, err)
	}
	return nil
}

// mountEarly mounts what process 1 itself needs.
func mountEarly() error {
	const flags = unix.MS_NOSUID | unix.MS_NOEXEC
	err := errors.Join(
		mount("devtmpfs", "/dev", "devtmpfs", unix.MS_NOSUID, "mode=0755"),
		mount("proc", "/proc", "proc", flags|unix.MS_NODEV, ""),
		mount("sysfs", "/sys", "sysfs", flags|unix.MS_NODEV, ""),
	)
	return err
}

// makeRoot mounts the disks and the overlay, fills it with what an OCI runtime provides, makes it the root, and puts the data paths in.
func makeRoot(dataPaths []string, log *logger) (*rootfs, error) {
	if err := mountDisks(); err != nil {
		return nil, err
	}
	outside, err := switchRoot(log)
	if err != nil {
		return nil, err
	}
	mountForWorkload(outside, log)
	if err := bindDataPaths(outside, dataPaths, log); err != nil {
		return nil, err
	}
	return &rootfs{outside: outside}, nil
}

func mountDisks() error {
	base, err := findDisk(guestv1.SerialBase)
	if err != nil {
		return err
	}
	private, err := findDisk(guestv1.SerialPrivate)
	if err != nil {
		return err
	}
	if err := unix.Mount(base, baseDir, "ext4", unix.MS_RDONLY, ""); err != nil {
		return fmt.Errorf("mounting base disk: %w", err)
	}
	// noinit_itable: no background work on a disk that may live for seconds.
	if err := unix.Mount(private, privateDir, "ext4", unix.MS_NODEV, "noinit_itable"); err != nil {
		return fmt.Errorf("mounting private disk: %w", err)
	}
	if err := prepareUpper(); err != nil {
		return fmt.Errorf("preparing private disk: %w", err)
	}
	options := "lowerdir=" + baseDir + ",upperdir=" + upperDir + ",workdir=" + workDir + ",redirect_dir=on,index=on,metacopy=on"
	err = unix.Mount("overlay", rootDir, "overlay", 0, options)
	switch {
	case errors.Is(err, unix.ESTALE):
		return fmt.Errorf("mounting overlay: the private disk belongs to another base image: %w", err)
	case err != nil:
		return fmt.Errorf("mounting overlay: %w", err)
	}
	return nil
}

// prepareUpper makes the overlay's directories on a new private disk. The upper one becomes the root directory the workload sees, so
// it gets the attributes of the image's; it is made last and renamed into place, so that it never lacks them.
func prepareUpper() error {
	for _, dir := range []string{workDir, dataDir} {
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	if _, err := os.Lstat(upperDir); err == nil {
		return nil
	}
	var s unix.Stat_t
	if err := unix.Stat(baseDir, &s); err != nil {
		return err
	}
	unfinished := upperDir + ".new"
	if err := os.RemoveAll(unfinished); err != nil {
		return err
	}
	if err := os.Mkdir(unfinished, 0o755); err != nil {
		return err
	}
	if err := attributes(baseDir, unfinished, &s); err != nil {
		return err
	}
	return os.Rename(unfinished, upperDir)
}

// findDisk gives the device of the disk with a serial. Where no disk has one (Firecracker sets none), the order decides: base first.
func findDisk(serial string) (string, error) {
	const (
		limit    = 2 * time.Second // devices are there when their module is loaded; built-in drivers may be later
		interval = 10 * time.Millisecond
	)
	found, all := "", []string(nil)
	if !await(limit, interval, func() bool {
		found, all = lookDisk(serial)
		return found != ""
	}) {
		return "", fmt.Errorf("looking for disks: no disk with serial %q among %d", serial, len(all))
	}
	return "/dev/" + found, nil
}

func lookDisk(serial string) (found string, all []string) {
	disks, err := filepath.Glob("/sys/block/vd*")
	if err != nil {
		return "", nil
	}
	anySerial := false
	for _, d := range disks { // Glob sorts
		s := readTrimmed(d + "/serial")
		if s == serial {
			return filepath.Base(d), disks
		}
		anySerial = anySerial || s != ""
	}
	order := map[string]int{guestv1.SerialBase: 0, guestv1.SerialPrivate: 1}
	if n := order[serial]; !anySerial && len(disks) >= len(order) {
		return filepath.Base(disks[n]), disks
	}
	return "", disks
}

// switchRoot makes the overlay this process's root. The initramfs cannot be pivoted away: the overlay is moved on top of it, and what it
// holds is deleted, since it lies in memory.
func switchRoot(log *logger) (outside int, err error) {
	// Images need not have these (one made from scratch has nothing).
	for name, mode := range map[string]os.FileMode{"dev": 0o755, "proc": 0o755, "sys": 0o755, "run": 0o755, "etc": 0o755, "tmp": 0o777 | os.ModeSticky} {
		dir := filepath.Join(rootDir, name)
		if _, err := os.Lstat(dir); err == nil {
			continue
		}
		if err := errors.Join(os.Mkdir(dir, mode), os.Chmod(dir, mode)); err != nil {
			return -1, fmt.Errorf("making /%s: %w", name, err)
		}
	}
	for _, name := range []string{"dev", "proc", "sys"} {
		if err := unix.Mount("/"+name, filepath.Join(rootDir, name), "", unix.MS_MOVE, ""); err != nil {
			return -1, fmt.Errorf("moving /%s: %w", name, err)
		}
	}
	outside, err = unix.Open("/", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("opening initramfs: %w", err)
	}
	if err := unix.Chdir(rootDir); err != nil {
		return -1, fmt.Errorf("entering new root: %w", err)
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return -1, fmt.Errorf("moving new root: %w", err)
	}
	if err := errors.Join(unix.Chroot("."), unix.Chdir("/")); err != nil {
		return -1, fmt.Errorf("changing root: %w", err)
	}
	if err := emptyDir(outside); err != nil {
		log.Printf("emptying initramfs: %v", err)
	}
	return outside, nil
}

// emptyDir removes all files below dir that are on its own file system; directories that are mount points stay.
func emptyDir(dir int) error {
	var own unix.Stat_t
	if err := unix.Fstat(dir, &own); err != nil {
		return err
	}
	// A descriptor of its own: the one given must keep its place.
	again, err := unix.Openat(dir, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(again), ".")
	defer f.Close()
	names, err := f.Readdirnames(-1)
	if err != nil {
		return err
	}
	for _, name := range names {
		var s unix.Stat_t
		if err := unix.Fstatat(dir, name, &s, unix.AT_SYMLINK_NOFOLLOW); err != nil || s.Dev != own.Dev {
			continue
		}
		if s.Mode&unix.S_IFMT != unix.S_IFDIR {
			_ = unix.Unlinkat(dir, name, 0)
			continue
		}
		sub, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			continue
		}
		err = emptyDir(sub)
		closeFD(sub)
		if err != nil {
			return err
		}
		_ = unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
	}
	return nil
}

// release puts the disks in a clean state: everything written, the private disk read-only, so that the next mount finds no journal to
// replay. Nothing here may fail the stop.
func (r *rootfs) release(log *logger) {
	unix.Sync()
	if err := errors.Join(unix.Fchdir(r.outside), unix.Chroot(".")); err != nil {
		log.Printf("leaving root: %v", err)
		return
	}
	if err := unix.Mount("", privateDir, "", unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_NODEV, ""); err != nil {
		log.Printf("making private disk read-only: %v", err)
	}
	_ = unix.Unmount(baseDir, unix.MNT_DETACH)
}

// drainConsole waits until the UART has sent what it holds, for limit at most.
func drainConsole(limit time.Duration) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		fd, err := unix.Open("/dev/console", unix.O_WRONLY|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
		if err != nil {
			return
		}
		defer closeFD(fd)
		_ = unix.IoctlSetInt(fd, unix.TCSBRK, 1)
	}()
	select {
	case <-done:
	case <-time.After(limit):
	}
}
