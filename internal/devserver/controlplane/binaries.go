package controlplane

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

// The module files that pin what is built: etcd by its own module, everything of Kubernetes by the module that
// replaces each staging module by its published version. They are stored under names Go does not take for a module's.
//
//go:embed modules
var modules embed.FS

const kubeVersion = "v1.37.2"

// buildStep is one module and the programs built from it, in one folder of the cache.
type buildStep struct {
	module   string // stem of the files in modules/
	programs map[string]string
	ldflags  string
}

func buildSteps() []buildStep {
	return []buildStep{
		{module: "etcd", programs: map[string]string{"etcd": "go.etcd.io/etcd/server/v3"}, ldflags: "-s -w"},
		{
			module: "kube",
			programs: map[string]string{
				"kube-apiserver":          "k8s.io/kubernetes/cmd/kube-apiserver",
				"kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
				"kubectl":                 "k8s.io/kubernetes/cmd/kubectl",
			},
			// Without these the API server reports version 0.0.0 and clients that check it refuse to work.
			ldflags: "-s -w -X k8s.io/component-base/version.gitVersion=" + kubeVersion +
				" -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=37",
		},
	}
}

// Binaries are the paths of the programs of a control plane.
type Binaries struct {
	Etcd, APIServer, ControllerManager, Kubectl string
}

// CacheDir is where everything downloaded or built once for development lives: $IMP_CACHE, else .cache/imp in the home folder.
func CacheDir() (string, error) {
	if dir := os.Getenv("IMP_CACHE"); dir != "" {
		return filepath.Abs(dir)
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("finding the cache folder (set IMP_CACHE): %w", err)
	}
	return filepath.Join(home, ".cache", "imp"), nil
}

// ErrNotBuilt says that Find looked into a cache without the programs.
var ErrNotBuilt = errors.New("the control plane's programs are not built yet (run: imp-dev build-control-plane)")

// Find gives the programs if the cache has them all, else ErrNotBuilt. It builds nothing.
func Find(cacheDir string) (Binaries, error) {
	at := map[string]string{}
	for _, step := range buildSteps() {
		dir, err := step.dir(cacheDir)
		if err != nil {
			return Binaries{}, err
		}
		for name := range step.programs {
			at[name] = filepath.Join(dir, name)
			if _, err := os.Stat(at[name]); err != nil {
				return Binaries{}, fmt.Errorf("looking for %s: %w", at[name], ErrNotBuilt)
			}
		}
	}
	return Binaries{
		Etcd: at["etcd"], APIServer: at["kube-apiserver"],
		ControllerManager: at["kube-controller-manager"], Kubectl: at["kubectl"],
	}, nil
}

// Build gives the programs, building with the go command what the cache does not have: some ten minutes and 2 GB of
// downloads and build cache on a small machine the first time, nothing afterwards. progress receives one line every few
// seconds. A second builder waits for the first one's lock, and then finds its result.
func Build(ctx context.Context, cacheDir string, progress func(line string)) (Binaries, error) {
	if found, err := Find(cacheDir); err == nil || !errors.Is(err, ErrNotBuilt) {
		return found, err
	}
	root := filepath.Join(cacheDir, "bin")
	if err := os.MkdirAll(root, 0o755); err != nil {
		return Binaries{}, fmt.Errorf("making the cache folder: %w", err)
	}
	unlock, err := lock(ctx, filepath.Join(root, ".lock"), func() {
		progress("another process is building the control plane; waiting for it")
	})
	if err != nil {
		return Binaries{}, err
	}
	defer unlock()
	for _, step := range buildSteps() {
		if err := step.build(ctx, cacheDir, progress); err != nil {
			return Binaries{}, fmt.Errorf("building the control plane: %w", err)
		}
	}
	return Find(cacheDir)
}

// dir is the step's folder in the cache. Its name is the digest of all that decides what comes out of the build.
func (s buildStep) dir(cacheDir string) (string, error) {
	sum := sha256.New()
	for _, file := range []string{s.module + ".go.mod", s.module + ".go.sum"} {
		content, err := modules.ReadFile("modules/" + file)
		if err != nil {
			return "", fmt.Errorf("reading embedded %s: %w", file, err)
		}
		sum.Write(content)
	}
	fmt.Fprintf(sum, "\x00%s\x00%s/%s", s.ldflags, runtime.GOOS, runtime.GOARCH)
	return filepath.Join(cacheDir, "bin", s.module+"-"+hex.EncodeToString(sum.Sum(nil))[:16]), nil
}

func (s buildStep) build(ctx context.Context, cacheDir string, progress func(string)) error {
	dir, err := s.dir(cacheDir)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	source, err := os.MkdirTemp(dir, ".source-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(source)
	for _, name := range []string{"go.mod", "go.sum"} {
		content, err := modules.ReadFile("modules/" + s.module + "." + name)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(source, name), content, 0o644); err != nil {
			return err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(s.programs)) {
		final := filepath.Join(dir, name)
		if _, err := os.Stat(final); err == nil {
			continue
		}
		built := filepath.Join(source, name)
		if err := goBuild(ctx, source, built, s.programs[name], s.ldflags, progress); err != nil {
			return fmt.Errorf("building %s: %w", name, err)
		}
		if err := os.Rename(built, final); err != nil {
			return fmt.Errorf("publishing %s: %w", name, err)
		}
		progress(name + " is built")
	}
	return nil
}

// goBuild runs `go build -v` and turns its list of packages into progress.
func goBuild(ctx context.Context, dir, out, pkg, ldflags string, progress func(string)) error {
	goTool, err := exec.LookPath("go")
	if err != nil {
		return fmt.Errorf("finding the go command, which builds the control plane: %w", err)
	}
	name := filepath.Base(out)
	progress("building " + name)
	cmd := exec.CommandContext(ctx, goTool, "build", "-v", "-trimpath", "-ldflags", ldflags, "-o", out, pkg)
	cmd.Dir = dir
	// GOWORK and GOFLAGS of the caller's own project must not reach this one.
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off", "GOFLAGS=-mod=readonly")
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) } // go build removes its work folder then
	cmd.WaitDelay = 10 * time.Second
	stderr, err := cmd.StderrPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	tail := follow(name, stderr, progress)
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("running go build: %w\n%s", err, tail)
	}
	return nil
}

// follow reads go build's output to its end, reports every few seconds, and gives the last lines for an error message.
func follow(name string, output io.Reader, progress func(string)) string {
	const every = 3 * time.Second
	var tail []string
	downloaded, compiled := 0, 0
	last := time.Now()
	lines := bufio.NewScanner(output)
	for lines.Scan() {
		line := lines.Text()
		if strings.HasPrefix(line, "go: downloading ") {
			downloaded++
		} else {
			compiled++
		}
		if tail = append(tail, line); len(tail) > 20 {
			tail = tail[1:]
		}
		if time.Since(last) >= every {
			last = time.Now()
			progress(fmt.Sprintf("building %s: %d modules downloaded, %d packages compiled, now %s",
				name, downloaded, compiled, strings.TrimPrefix(line, "go: downloading ")))
		}
	}
	_, _ = io.Copy(io.Discard, output) // a line too long for the scanner must not block the build
	return string(bytes.TrimSpace([]byte(strings.Join(tail, "\n"))))
}

// lock takes an exclusive flock on path, calling waiting once if another process holds it.
func lock(ctx context.Context, path string, waiting func()) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("opening lock: %w", err)
	}
	said := false
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { _ = f.Close() }, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			_ = f.Close()
			return nil, fmt.Errorf("locking %s: %w", path, err)
		}
		if !said {
			said = true
			waiting()
		}
		select {
		case <-ctx.Done():
			_ = f.Close()
			return nil, fmt.Errorf("waiting for lock %s: %w", path, ctx.Err())
		case <-time.After(500 * time.Millisecond):
		}
	}
}
