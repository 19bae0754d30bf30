// Package kernelfetch gets a guest kernel from Debian's archive into a cache directory, without installing anything.
//
// It runs apt-get and dpkg-deb, so it belongs to the development server and is no part of the product's daemons.
package kernelfetch

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/kernel"
)

// Package is the Debian package that always depends on the newest kernel for virtual machines.
const Package = "linux-image-cloud-amd64"

const (
	stage = "fetching guest kernel"
	// noteName is the file that tells a complete kernel directory from one whose unpacking was interrupted.
	noteName = "kernel.json"
)

// FetchDebian gives the kernel in cacheDir, downloading and unpacking it first if there is none. Once there it is used for good, also
// without network; remove cacheDir/debian for a newer one.
func FetchDebian(ctx context.Context, cacheDir string, log *slog.Logger) (kernel.Kernel, error) {
	dir := filepath.Join(cacheDir, "debian")
	if k, err := read(dir); err == nil {
		return k, nil
	}
	unlock, err := lock(cacheDir)
	if err != nil {
		return kernel.Kernel{}, fault.New(fault.RuntimeStartFailed, stage, err)
	}
	defer unlock()
	if k, err := read(dir); err == nil {
		return k, nil
	}
	if err := fetch(ctx, cacheDir, dir, log); err != nil {
		return kernel.Kernel{}, fault.New(fault.RuntimeStartFailed, stage, err)
	}
	k, err := read(dir)
	return k, fault.New(fault.RuntimeStartFailed, stage, err)
}

// lock keeps two processes (tests of two packages, say) from fetching into one cache at once.
func lock(cacheDir string) (unlock func(), err error) {
	if err := os.MkdirAll(cacheDir, 0o755); err != nil {
		return nil, fmt.Errorf("creating cache: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(cacheDir, "debian.lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("locking cache: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("locking cache: %w", err)
	}
	return func() { _ = f.Close() }, nil
}

func read(dir string) (kernel.Kernel, error) {
	note, err := os.ReadFile(filepath.Join(dir, noteName))
	if err != nil {
		return kernel.Kernel{}, err
	}
	var k kernel.Kernel
	if err := json.Unmarshal(note, &k); err != nil {
		return kernel.Kernel{}, fmt.Errorf("reading %s: %w", noteName, err)
	}
	k.Path, k.ModulesDir = filepath.Join(dir, k.Path), filepath.Join(dir, k.ModulesDir)
	for _, needed := range []string{k.Path, k.ModulesDir} {
		if _, err := os.Stat(needed); err != nil {
			return kernel.Kernel{}, fmt.Errorf("looking at cached kernel: %w", err)
		}
	}
	return k, nil
}

func fetch(ctx context.Context, cacheDir, dir string, log *slog.Logger) error {
	work, err := os.MkdirTemp(cacheDir, "debian.new-")
	if err != nil {
		return fmt.Errorf("creating cache: %w", err)
	}
	defer os.RemoveAll(work)
	name, err := concrete(ctx)
	if err != nil {
		return err
	}
	log.Info("downloading guest kernel", "package", name)
	if _, err := run(ctx, work, "apt-get", "download", "-q", name); err != nil {
		return err
	}
	archives, err := filepath.Glob(filepath.Join(work, "*.deb"))
	if err != nil || len(archives) != 1 {
		return fmt.Errorf("apt-get download left %d packages of %s", len(archives), name)
	}
	root := filepath.Join(work, "root")
	if _, err := run(ctx, work, "dpkg-deb", "-x", archives[0], root); err != nil {
		return err
	}
	if err := os.Remove(archives[0]); err != nil {
		return fmt.Errorf("removing package: %w", err)
	}
	k, err := Locate(root)
	if err != nil {
		return err
	}
	k.Path, k.ModulesDir = strings.TrimPrefix(k.Path, work+"/"), strings.TrimPrefix(k.ModulesDir, work+"/")
	note, err := json.Marshal(k)
	if err != nil {
		return fmt.Errorf("noting kernel: %w", err)
	}
	if err := os.WriteFile(filepath.Join(work, noteName), note, 0o644); err != nil {
		return fmt.Errorf("noting kernel: %w", err)
	}
	if err := errors.Join(os.RemoveAll(dir), os.Chmod(work, 0o755), os.Rename(work, dir)); err != nil {
		return fmt.Errorf("publishing kernel: %w", err)
	}
	log.Info("guest kernel is ready", "release", k.Release)
	return nil
}

// concrete gives the package that Package depends on, in the version that would be installed.
func concrete(ctx context.Context) (string, error) {
	policy, err := run(ctx, "", "apt-cache", "policy", Package)
	if err != nil {
		return "", err
	}
	candidate := regexp.MustCompile(`(?m)^\s*Candidate:\s*(\S+)`).FindSubmatch(policy)
	if candidate == nil || string(candidate[1]) == "(none)" {
		return "", fmt.Errorf("apt knows no package %s: run apt-get update, or give a kernel of your own", Package)
	}
	shown, err := run(ctx, "", "apt-cache", "show", Package+"="+string(candidate[1]))
	if err != nil {
		return "", err
	}
	depends := regexp.MustCompile(`(?m)^Depends:.*?\b(linux-image-[0-9]\S*)`).FindSubmatch(shown)
	if depends == nil {
		return "", fmt.Errorf("package %s %s names no kernel", Package, candidate[1])
	}
	return string(depends[1]), nil
}

// Locate finds kernel and modules in an unpacked kernel package.
func Locate(root string) (kernel.Kernel, error) {
	images, err := filepath.Glob(filepath.Join(root, "boot", "vmlinuz-*"))
	if err != nil || len(images) != 1 {
		return kernel.Kernel{}, fmt.Errorf("kernel package has %d files boot/vmlinuz-*", len(images))
	}
	release := strings.TrimPrefix(filepath.Base(images[0]), "vmlinuz-")
	for _, parent := range []string{"lib", "usr/lib"} {
		modules := filepath.Join(root, parent, "modules", release)
		if _, err := os.Stat(modules); err == nil {
			return kernel.Kernel{Path: images[0], ModulesDir: modules, Release: release}, nil
		}
	}
	return kernel.Kernel{}, fmt.Errorf("kernel package has no modules of %s: %w", release, fs.ErrNotExist)
}

func run(ctx context.Context, dir, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("running %s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.Bytes(), nil
}
