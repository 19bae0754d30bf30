package devserver

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"imp.dev/imp/internal/devserver/kernelfetch"
	"imp.dev/imp/internal/initramfs"
	"imp.dev/imp/internal/kernel"
)

// bootFiles are what a guest is booted from.
type bootFiles struct{ kernel, initramfs string }

// KernelCache is where fetched kernels lie below a cache folder.
func KernelCache(cacheDir string) string { return filepath.Join(cacheDir, "kernel") }

// prepareBoot gets the kernel and builds the initramfs, and puts both where a VMM, which runs as a user of its own, can read them.
func (s *Server) prepareBoot(ctx context.Context) error {
	if s.opts.VMM != "qemu" {
		return nil
	}
	k := kernel.Kernel{Path: s.opts.Kernel, ModulesDir: s.opts.Modules}
	if k.Path == "" {
		s.opts.Progress("looking for the guests' kernel (fetched from Debian if it is not in the cache)")
		var err error
		if k, err = kernelfetch.FetchDebian(ctx, KernelCache(s.opts.CacheDir), s.opts.Log); err != nil {
			return err
		}
	}
	s.boot = bootFiles{
		kernel:    filepath.Join(s.Places.boot(), "kernel"),
		initramfs: filepath.Join(s.Places.boot(), "initramfs.cpio"),
	}
	if err := copyFile(k.Path, s.boot.kernel); err != nil {
		return fmt.Errorf("copying the kernel: %w", err)
	}
	return initramfs.Build(s.boot.initramfs, initramfs.Options{
		Guest: filepath.Join(s.opts.BinDir, "imp-guest"), ModulesDir: k.ModulesDir,
	})
}

// placePrograms copies Imp's programs if the users they run as cannot reach them, as below a home folder of mode 0700.
func (s *Server) placePrograms(context.Context) error {
	s.binDir = s.opts.BinDir
	if reachableByOthers(s.opts.BinDir) {
		return nil
	}
	s.binDir = filepath.Join(s.Places.Data, "bin")
	if err := os.MkdirAll(s.binDir, 0o755); err != nil {
		return fmt.Errorf("placing programs: %w", err)
	}
	for _, program := range s.opts.programs() {
		to := filepath.Join(s.binDir, program)
		if err := copyFile(filepath.Join(s.opts.BinDir, program), to); err != nil {
			return fmt.Errorf("placing programs: %w", err)
		}
		if err := os.Chmod(to, 0o755); err != nil {
			return fmt.Errorf("placing programs: %w", err)
		}
	}
	return nil
}

func copyFile(from, to string) error {
	source, err := os.Open(from)
	if err != nil {
		return err
	}
	defer source.Close()
	target, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o644)
	if err != nil {
		return err
	}
	if _, err := io.Copy(target, source); err != nil {
		_ = target.Close()
		return err
	}
	return target.Close()
}
