package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"imp.dev/imp/internal/devserver/imagefile"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// ImageName is the examples' image without its registry.
const ImageName = "busybox:demo"

// Image gives the examples' image: Debian's statically linked busybox and a page for its web server. The package is
// downloaded into the cache once and never installed.
func Image(ctx context.Context, cacheDir string) (v1.Image, error) {
	root := filepath.Join(cacheDir, "demo-image")
	if _, err := os.Stat(root); errors.Is(err, os.ErrNotExist) {
		if err := makeRoot(ctx, cacheDir, root); err != nil {
			return nil, fmt.Errorf("making the demo's image: %w", err)
		}
	}
	return imagefile.Load(root, imagefile.Config{Cmd: []string{"/bin/sh"}})
}

func makeRoot(ctx context.Context, cacheDir, root string) error {
	if err := os.MkdirAll(cacheDir, 0o755); err != nil {
		return err
	}
	work, err := os.MkdirTemp(cacheDir, "demo-image.new-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	if _, err := command(ctx, work, "apt-get", "download", "-q", "busybox-static"); err != nil {
		return err
	}
	packages, err := filepath.Glob(filepath.Join(work, "*.deb"))
	if err != nil || len(packages) != 1 {
		return fmt.Errorf("downloading busybox-static left %d packages: %w", len(packages), err)
	}
	unpacked := filepath.Join(work, "unpacked")
	if _, err := command(ctx, work, "dpkg-deb", "-x", packages[0], unpacked); err != nil {
		return err
	}
	next := filepath.Join(work, "root")
	if err := fillRoot(ctx, unpacked, next); err != nil {
		return err
	}
	return os.Rename(next, root)
}

// fillRoot lays out what busybox needs to feel at home.
func fillRoot(ctx context.Context, unpacked, root string) error {
	for _, dir := range []string{"bin", "etc", "www", "root", "proc", "sys", "dev", "tmp"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			return err
		}
	}
	files := map[string]string{
		"etc/passwd":     "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
		"etc/group":      "root:x:0:\nnogroup:x:65534:\n",
		"www/index.html": "<h1>Hello from a microVM</h1>\n",
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(root, name), []byte(content), 0o644); err != nil {
			return err
		}
	}
	if err := os.Chmod(filepath.Join(root, "tmp"), 0o1777|os.ModeSticky); err != nil {
		return err
	}
	busybox := filepath.Join(root, "bin", "busybox")
	source := filepath.Join(unpacked, "bin", "busybox")
	if _, err := os.Stat(source); err != nil {
		source = filepath.Join(unpacked, "usr", "bin", "busybox") // where newer releases have it
	}
	if err := os.Rename(source, busybox); err != nil {
		return err
	}
	applets, err := command(ctx, root, busybox, "--list")
	if err != nil {
		return err
	}
	for applet := range strings.FieldsSeq(applets) {
		if applet != "busybox" {
			if err := os.Symlink("busybox", filepath.Join(root, "bin", applet)); err != nil {
				return err
			}
		}
	}
	return nil
}

func command(ctx context.Context, dir, program string, args ...string) (stdout string, err error) {
	var out, problems bytes.Buffer
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, &out, &problems
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("running %s %s: %w\n%s", program, strings.Join(args, " "), err, problems.String())
	}
	return out.String(), nil
}
