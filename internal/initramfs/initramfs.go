// Package initramfs packs imp-guest and the kernel modules it needs into the archive that a VMM hands to the guest's kernel.
//
// The archive is not compressed: it is a local file, and unpacking costs boot time (measured: 0.03 to 0.15 s under TCG). It is the same bytes for the same input.
package initramfs

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/u-root/u-root/pkg/cpio"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/initramfs/layout"
)

// MaxSize is the most an unpacked initramfs may have, in bytes: it lies in the guest's memory.
const MaxSize = 16 << 20

// Modules gives the modules that a guest needs on the machines Imp makes (virtio over MMIO), by name. Modules they depend on are
// added, ones that the kernel has built in or was made without are left out. Their order is kept, save that a module
// comes after what it depends on: the console port's driver early, since the host waits for it. Every module costs boot
// time (5 to 50 ms under emulation): none is here on the off chance.
func Modules() []string {
	return []string{
		"virtio_mmio",
		"virtio_console", // the channel to the host
		"virtio_blk",
		// ext4 asks for this one by an alias, which only modprobe could resolve.
		"crc32c_generic", "ext4", "overlay",
		"virtio_net",
		"pvpanic", "pvpanic_mmio", // the word to the host that the kernel has died
		"virtio_rng",
	}
}

// Options of Build.
type Options struct {
	// Guest is the path of the imp-guest binary, statically linked.
	Guest string
	// ModulesDir is lib/modules/RELEASE of the kernel; empty for one that has everything built in.
	ModulesDir string
	// Modules to pack; nil means Modules().
	Modules []string
}

// Build writes the archive to out, whole or not at all.
func Build(out string, o Options) error {
	if err := build(out, o); err != nil {
		return fault.New(fault.RuntimeStartFailed, "building initramfs", err)
	}
	return nil
}

func build(out string, o Options) error {
	records, err := records(o)
	if err != nil {
		return err
	}
	temporary, err := os.CreateTemp(filepath.Dir(out), filepath.Base(out)+".new-*")
	if err != nil {
		return fmt.Errorf("creating archive: %w", err)
	}
	defer os.Remove(temporary.Name())
	defer temporary.Close()
	buffered := bufio.NewWriterSize(temporary, 1<<20)
	if err := write(buffered, records); err != nil {
		return err
	}
	if err := errors.Join(buffered.Flush(), temporary.Chmod(0o644), temporary.Sync()); err != nil {
		return fmt.Errorf("writing archive: %w", err)
	}
	if err := os.Rename(temporary.Name(), out); err != nil {
		return fmt.Errorf("publishing archive: %w", err)
	}
	return nil
}

func records(o Options) ([]cpio.Record, error) {
	guest, err := os.ReadFile(o.Guest)
	if err != nil {
		return nil, fmt.Errorf("reading imp-guest: %w", err)
	}
	if err := checkGuest(guest); err != nil {
		return nil, fmt.Errorf("imp-guest at %s: %w", o.Guest, err)
	}
	all := []cpio.Record{
		cpio.Directory("dev", 0o755), cpio.Directory("proc", 0o755), cpio.Directory("sys", 0o755),
		cpio.Directory("lib", 0o755), cpio.Directory(layout.Modules, 0o755),
		// Mount points: the base image, the private disk, and the overlay of both.
		cpio.Directory("m", 0o700), cpio.Directory(layout.Base, 0o755),
		cpio.Directory(layout.Private, 0o755), cpio.Directory(layout.Root, 0o755),
		// The kernel opens this as init's standard input and output before devtmpfs is mounted.
		cpio.CharDev("dev/console", 0o600, 5, 1),
		cpio.StaticFile(layout.Init, string(guest), 0o755),
	}
	total := len(guest)
	if o.ModulesDir != "" {
		wanted := o.Modules
		if wanted == nil {
			wanted = Modules()
		}
		modules, err := resolve(o.ModulesDir, wanted)
		if err != nil {
			return nil, err
		}
		for i, m := range modules {
			all = append(all, cpio.StaticFile(fmt.Sprintf("%s/%02d-%s.ko", layout.Modules, i, m.name), string(m.content), 0o644))
			total += len(m.content)
		}
	}
	if total > MaxSize {
		return nil, fmt.Errorf("unpacked size %d is over the limit of %d bytes", total, MaxSize)
	}
	return all, nil
}

func write(w io.Writer, records []cpio.Record) error {
	cpio.MakeAllReproducible(records)
	archive := cpio.Newc.Writer(w)
	for _, r := range records {
		if err := archive.WriteRecord(r); err != nil {
			return fmt.Errorf("packing %s: %w", r.Name, err)
		}
	}
	if err := cpio.WriteTrailer(archive); err != nil {
		return fmt.Errorf("packing trailer: %w", err)
	}
	return nil
}

// checkGuest refuses what the kernel could not execute as init: there is no dynamic linker in the archive.
func checkGuest(binary []byte) error {
	f, err := elfFile(binary)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if s := f.Section(".interp"); s != nil {
		return errors.New("is linked dynamically; build it with CGO_ENABLED=0")
	}
	return nil
}
