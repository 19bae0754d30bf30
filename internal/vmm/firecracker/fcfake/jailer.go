package fcfake

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// jail is the life of a fake jailer: in the real one's order it makes a jail, gives up everything, and becomes the program.
func jail(c Config, args []string) int {
	if len(args) == 1 && args[0] == "--version" {
		fmt.Println("Jailer v" + c.version() + "\n")
		return 0
	}
	runtime.LockOSThread()
	fmt.Fprintf(os.Stderr, "Jailer error: %v\n", tryJail(args))
	return 1
}

type jailArgs struct {
	id, execFile, base string
	uid, gid           int
	limits             map[string]uint64
	more               []string
}

func parseJail(args []string) (jailArgs, error) {
	a := jailArgs{base: "/srv/jailer", uid: -1, gid: -1, limits: map[string]uint64{}}
	number := func(to *int) func(string) error {
		return func(v string) (err error) { *to, err = strconv.Atoi(v); return err }
	}
	text := func(to *string) func(string) error {
		return func(v string) error { *to = v; return nil }
	}
	known := map[string]func(string) error{
		"--id": text(&a.id), "--exec-file": text(&a.execFile), "--chroot-base-dir": text(&a.base), "--uid": number(&a.uid), "--gid": number(&a.gid),
		"--resource-limit": func(v string) error {
			name, value, ok := strings.Cut(v, "=")
			n, err := strconv.ParseUint(value, 10, 64)
			if !ok || err != nil || name != "no-file" && name != "fsize" {
				return fmt.Errorf("Invalid resource argument: %s", v)
			}
			a.limits[name] = n
			return nil
		},
	}
	for i := 0; i < len(args); i += 2 {
		if args[i] == "--" {
			a.more = args[i+1:]
			break
		}
		set, ok := known[args[i]]
		if !ok || i+1 == len(args) {
			return a, fmt.Errorf("Failed to parse arguments: Found argument '%s' which wasn't expected, or isn't valid in this context.", args[i])
		}
		if err := set(args[i+1]); err != nil {
			return a, err
		}
	}
	if a.id == "" || a.execFile == "" || a.uid < 0 || a.gid < 0 {
		return a, errors.New("Failed to parse arguments: a mandatory argument is missing")
	}
	return a, nil
}

// tryJail returns only when something failed.
func tryJail(args []string) error {
	a, err := parseJail(args)
	if err != nil {
		return err
	}
	_ = unix.CloseRange(3, 1<<31-1, unix.CLOSE_RANGE_CLOEXEC) // not at once: some are the Go runtime's
	exec, err := filepath.EvalSymlinks(a.execFile)
	if err != nil {
		return fmt.Errorf("Failed to canonicalize path %s: %w", a.execFile, err)
	}
	base, err := filepath.EvalSymlinks(a.base)
	if err != nil {
		return fmt.Errorf("Failed to canonicalize path %s: %w", a.base, err)
	}
	name := filepath.Base(exec)
	root := filepath.Join(base, name, a.id, "root")
	if err := os.MkdirAll(root, 0o755); err != nil {
		return err
	}
	if err := copyExec(exec, filepath.Join(root, name), a); err != nil {
		return err
	}
	for which, resource := range map[string]int{"no-file": unix.RLIMIT_NOFILE, "fsize": unix.RLIMIT_FSIZE} {
		if n, ok := a.limits[which]; ok {
			if err := syscall.Setrlimit(resource, &syscall.Rlimit{Cur: n, Max: n}); err != nil {
				return err
			}
		}
	}
	if err := enterRoot(root); err != nil {
		return err
	}
	if err := furnish(a); err != nil {
		return err
	}
	if err := errors.Join(syscall.Setgroups(nil), syscall.Setgid(a.gid), syscall.Setuid(a.uid)); err != nil {
		return err
	}
	argv := append([]string{"/" + name, "--id", a.id, "--start-time-us", "1", "--start-time-cpu-us", "1", "--parent-cpu-time-us", "1"}, a.more...)
	return fmt.Errorf("Failed to exec into Firecracker: %w", syscall.Exec("/"+name, argv, nil))
}

func copyExec(from, to string, a jailArgs) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|unix.O_NOFOLLOW, 0o755)
	if err != nil {
		return err
	}
	defer out.Close()
	if err := out.Chown(a.uid, a.gid); err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return err
}

func enterRoot(root string) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("Failed to unshare into new mount namespace: %w", err)
	}
	const old = "old_root"
	for _, step := range []func() error{
		func() error { return unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, "") },
		func() error { return unix.Mount(root, root, "", unix.MS_BIND|unix.MS_REC, "") },
		func() error { return unix.Chdir(root) },
		func() error { return unix.Mkdir(old, 0o600) },
		func() error { return unix.PivotRoot(".", old) },
		func() error { return unix.Chdir("/") },
		func() error { return unix.Unmount(old, unix.MNT_DETACH) },
		func() error { return unix.Rmdir(old) },
	} {
		if err := step(); err != nil {
			return fmt.Errorf("Failed to change the root: %w", err)
		}
	}
	return nil
}

// furnish makes the directories and devices of a jail.
func furnish(a jailArgs) error {
	for _, dir := range []string{"/", "/dev", "/dev/net", "/run"} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
		if err := errors.Join(os.Chmod(dir, 0o700), os.Chown(dir, a.uid, a.gid)); err != nil {
			return err
		}
	}
	for _, d := range []struct {
		path         string
		major, minor uint32
	}{{"/dev/net/tun", 10, 200}, {"/dev/kvm", 10, 232}, {"/dev/urandom", 1, 9}} {
		if err := unix.Mknod(d.path, unix.S_IFCHR|0o600, int(unix.Mkdev(d.major, d.minor))); err != nil {
			return fmt.Errorf("Failed to create %s via mknod inside the jail: %w", d.path, err)
		}
		if err := os.Chown(d.path, a.uid, a.gid); err != nil {
			return err
		}
	}
	return nil
}
