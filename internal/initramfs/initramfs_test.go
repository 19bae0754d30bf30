package initramfs

import (
	"bytes"
	"compress/gzip"
	"debug/elf"
	"encoding/binary"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/u-root/u-root/pkg/cpio"
	"github.com/ulikunitz/xz"
)

// elfWith makes an ELF file that has one section beside the string table.
func elfWith(section, content string) []byte {
	names := "\x00" + section + "\x00.shstrtab\x00"
	h := elf.Header64{
		Type: uint16(elf.ET_REL), Machine: uint16(elf.EM_X86_64), Version: uint32(elf.EV_CURRENT),
		Ehsize: 64, Shoff: 64, Shentsize: 64, Shnum: 3, Shstrndx: 2,
	}
	copy(h.Ident[:], elf.ELFMAG+"\x02\x01\x01")
	at := uint64(64 + 3*64)
	var b bytes.Buffer
	for _, v := range []any{
		h, elf.Section64{},
		elf.Section64{Name: 1, Type: uint32(elf.SHT_PROGBITS), Off: at, Size: uint64(len(content))},
		elf.Section64{Name: uint32(len(section)) + 2, Type: uint32(elf.SHT_STRTAB), Off: at + uint64(len(content)), Size: uint64(len(names))},
	} {
		_ = binary.Write(&b, binary.LittleEndian, v)
	}
	return append(b.Bytes(), content+names...)
}

func ko(depends string) []byte {
	return elfWith(".modinfo", "license=GPL\x00depends="+depends+"\x00name=x\x00")
}

func packed(t *testing.T, ext string, content []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	var w interface {
		Write([]byte) (int, error)
		Close() error
	}
	var err error
	switch ext {
	case ".gz":
		w = gzip.NewWriter(&b)
	case ".xz":
		w, err = xz.NewWriter(&b)
	case ".zst":
		w, err = zstd.NewWriter(&b)
	default:
		return content
	}
	if err == nil {
		_, err = w.Write(content)
	}
	if err != nil || w.Close() != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// modulesDir makes a lib/modules/RELEASE. Keys are file names.
func modulesDir(t *testing.T, files map[string][]byte, builtin ...string) string {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		path := filepath.Join(dir, "kernel", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, content, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "modules.builtin"), []byte(strings.Join(builtin, "\n")), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

func guestBinary(t *testing.T, content []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "imp-guest")
	if err := os.WriteFile(path, content, 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func built(t *testing.T, o Options) ([]cpio.Record, []byte, error) {
	t.Helper()
	out := filepath.Join(t.TempDir(), "initramfs")
	if err := Build(out, o); err != nil {
		if left, _ := os.ReadDir(filepath.Dir(out)); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
		return nil, nil, err
	}
	raw, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	records, err := cpio.ReadAllRecords(cpio.Newc.Reader(bytes.NewReader(raw)))
	if err != nil {
		t.Fatal(err)
	}
	return records, raw, nil
}

func modulesOf(records []cpio.Record) (names []string) {
	for _, r := range records {
		if name, ok := strings.CutPrefix(r.Name, "lib/modules/"); ok {
			names = append(names, name)
		}
	}
	return names
}

func TestModulesArePackedInTheOrderOfLoading(t *testing.T) {
	for name, c := range map[string]struct {
		files   map[string][]byte
		builtin []string
		wanted  []string
		want    []string
		err     string
	}{
		"what a module depends on comes first, however it is packed": {
			files: map[string][]byte{
				"drivers/net/virtio_net.ko.xz": packed(t, ".xz", ko("net_failover,virtio_ring")), "drivers/net/net_failover.ko.zst": packed(t, ".zst", ko("failover")),
				"net/failover.ko.gz": packed(t, ".gz", ko("")), "virtio_ring.ko": ko(""),
			},
			wanted: []string{"virtio_net"},
			want:   []string{"00-failover.ko", "01-net_failover.ko", "02-virtio_ring.ko", "03-virtio_net.ko"},
		},
		"names with - and _ are the same": {
			files:  map[string][]byte{"virtio-rng.ko": ko("rng-core"), "rng_core.ko": ko("")},
			wanted: []string{"virtio_rng"},
			want:   []string{"00-rng_core.ko", "01-virtio_rng.ko"},
		},
		"what is built in or absent is left out": {
			files:   map[string][]byte{"overlay.ko": ko("crc16")},
			builtin: []string{"kernel/fs/ext4/ext4.ko", "kernel/fs/crc16/crc16.ko"},
			wanted:  []string{"ext4", "overlay", "pvpanic"},
			want:    []string{"00-overlay.ko"},
		},
		"a missing dependency fails the build": {
			files:  map[string][]byte{"virtio_blk.ko": ko("virtio_ring")},
			wanted: []string{"virtio_blk"}, err: "module virtio_blk needs virtio_ring",
		},
		"a file that is no module fails the build": {
			files:  map[string][]byte{"virtio_blk.ko": elfWith(".text", "")},
			wanted: []string{"virtio_blk"}, err: "not a kernel module",
		},
		"a directory without modules fails the build": {err: "no kernel modules in"},
		"an archive over the limit fails the build": {
			files:  map[string][]byte{"a.ko": append(ko("b"), make([]byte, MaxSize-1000)...), "b.ko": append(ko(""), make([]byte, 2000)...)},
			wanted: []string{"a"}, err: "over the limit",
		},
	} {
		t.Run(name, func(t *testing.T) {
			o := Options{Guest: guestBinary(t, elfWith(".text", "")), ModulesDir: modulesDir(t, c.files, c.builtin...), Modules: c.wanted}
			records, _, err := built(t, o)
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Fatalf("error %v, want %q in it", err, c.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got := modulesOf(records); !slices.Equal(got, c.want) {
				t.Errorf("packed %v, want %v", got, c.want)
			}
			for _, r := range records {
				content := make([]byte, 4)
				if strings.HasSuffix(r.Name, ".ko") {
					if _, err := r.ReadAt(content, 0); err != nil || string(content) != elf.ELFMAG {
						t.Errorf("%s is not unpacked: %q", r.Name, content)
					}
				}
			}
		})
	}
}

func TestTheArchive(t *testing.T) {
	o := Options{Guest: guestBinary(t, elfWith(".text", "x")), ModulesDir: modulesDir(t, map[string][]byte{"overlay.ko": ko("")})}
	records, raw, err := built(t, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Run("has a console for the kernel to open and an init to start", func(t *testing.T) {
		want := map[string]uint64{"dev/console": cpio.S_IFCHR | 0o600, "init": cpio.S_IFREG | 0o755, "m/root": cpio.S_IFDIR | 0o755}
		for _, r := range records {
			if mode, ok := want[r.Name]; ok && r.Mode == mode {
				delete(want, r.Name)
			}
			if r.Name == "dev/console" && (r.Rmajor != 5 || r.Rminor != 1) {
				t.Errorf("console is device %d:%d", r.Rmajor, r.Rminor)
			}
		}
		if len(want) > 0 {
			t.Errorf("missing: %v", want)
		}
	})
	t.Run("is the same bytes each time", func(t *testing.T) {
		_, again, err := built(t, o)
		if err != nil || !bytes.Equal(raw, again) {
			t.Errorf("differs (%v)", err)
		}
	})
	t.Run("needs no modules for a kernel that has everything built in", func(t *testing.T) {
		records, _, err := built(t, Options{Guest: o.Guest})
		if err != nil || len(modulesOf(records)) != 0 {
			t.Errorf("packed %v (%v)", modulesOf(records), err)
		}
	})
	t.Run("refuses a guest that is linked dynamically", func(t *testing.T) {
		_, _, err := built(t, Options{Guest: guestBinary(t, elfWith(".interp", "/lib/ld.so"))})
		if err == nil || !strings.Contains(err.Error(), "CGO_ENABLED=0") {
			t.Errorf("error %v", err)
		}
	})
	t.Run("refuses a guest that is no program", func(t *testing.T) {
		_, _, err := built(t, Options{Guest: guestBinary(t, []byte("#!/bin/sh"))})
		if err == nil || !strings.Contains(err.Error(), "no ELF file") {
			t.Errorf("error %v", err)
		}
	})
}
