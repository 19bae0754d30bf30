package kernelfetch

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"imp.dev/imp/internal/fault"
)

// onPath puts scripts in front of PATH in place of the real tools.
func onPath(t *testing.T, scripts map[string]string) {
	t.Helper()
	dir := t.TempDir()
	for name, body := range scripts {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+body), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

const (
	policy = "echo 'linux-image-cloud-amd64:'; echo '  Installed: (none)'; echo '  Candidate: 6.1.9-1'"
	show   = "echo 'Depends: linux-image-6.1.0-9-cloud-amd64 (= 6.1.9-1)'"
	cached = `case "$1" in policy) ` + policy + ` ;; show) [ "$2" = linux-image-cloud-amd64=6.1.9-1 ] && ` + show + ` ;; esac`
	get    = `[ "$1" = download ] && touch "$3_6.1.9-1_amd64.deb"`
	unpack = `mkdir -p "$3/boot" "$3/LIB/modules/6.1.0-9-cloud-amd64/kernel"; echo image > "$3/boot/vmlinuz-6.1.0-9-cloud-amd64"`
)

func TestFetchDebian(t *testing.T) {
	for _, lib := range []string{"lib", "usr/lib"} {
		t.Run("a package with its modules in "+lib, func(t *testing.T) {
			onPath(t, map[string]string{"apt-cache": cached, "apt-get": get, "dpkg-deb": strings.ReplaceAll(unpack, "LIB", lib)})
			cache := t.TempDir()
			k, err := FetchDebian(t.Context(), cache, slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatal(err)
			}
			if content, err := os.ReadFile(k.Path); err != nil || string(content) != "image\n" {
				t.Errorf("kernel %s: %q, %v", k.Path, content, err)
			}
			if k.Release != "6.1.0-9-cloud-amd64" || !strings.HasSuffix(k.ModulesDir, lib+"/modules/"+k.Release) {
				t.Errorf("got %+v", k)
			}
			// A second time nothing is asked for: the tools would fail.
			onPath(t, map[string]string{"apt-cache": "exit 1", "apt-get": "exit 1", "dpkg-deb": "exit 1"})
			if again, err := FetchDebian(t.Context(), cache, slog.New(slog.DiscardHandler)); err != nil || again != k {
				t.Errorf("second time: %+v, %v", again, err)
			}
		})
	}
	for name, c := range map[string]struct {
		scripts map[string]string
		want    string
	}{
		"a Debian whose lists are not there":    {map[string]string{"apt-cache": "true"}, "run apt-get update"},
		"no network":                            {map[string]string{"apt-cache": cached, "apt-get": "echo 'E: Failed to fetch' >&2; exit 100"}, "E: Failed to fetch"},
		"a package that cannot be unpacked":     {map[string]string{"apt-cache": cached, "apt-get": get, "dpkg-deb": "exit 2"}, "dpkg-deb"},
		"a package without a kernel":            {map[string]string{"apt-cache": cached, "apt-get": get, "dpkg-deb": "mkdir -p \"$3\""}, "0 files boot/vmlinuz"},
		"a package whose modules are elsewhere": {map[string]string{"apt-cache": cached, "apt-get": get, "dpkg-deb": strings.ReplaceAll(unpack, "LIB", "opt")}, "no modules of 6.1.0-9"},
	} {
		t.Run(name, func(t *testing.T) {
			onPath(t, c.scripts)
			cache := t.TempDir()
			_, err := FetchDebian(t.Context(), cache, slog.New(slog.DiscardHandler))
			if err == nil || !strings.Contains(err.Error(), c.want) || !fault.Is(err, fault.RuntimeStartFailed) {
				t.Errorf("error %v, want %q in it", err, c.want)
			}
			if left, _ := filepath.Glob(filepath.Join(cache, "debian*")); len(left) != 1 || filepath.Base(left[0]) != "debian.lock" {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}
