package kernel

import (
	"bytes"
	"compress/gzip"
	"debug/elf"
	"encoding/binary"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
	"github.com/ulikunitz/xz"
	"github.com/ulikunitz/xz/lzma"

	"imp.dev/imp/internal/fault"
)

// anELF is the head of an ELF program and half a megabyte of real code, of this test itself.
func anELF(t *testing.T) []byte {
	t.Helper()
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	header := elf.Header64{
		Type: uint16(elf.ET_EXEC), Machine: uint16(elf.EM_X86_64), Version: uint32(elf.EV_CURRENT),
		Phoff: 64, Ehsize: 64, Phentsize: 56, Phnum: 1, Shentsize: 64,
	}
	copy(header.Ident[:], elf.ELFMAG+"\x02\x01\x01")
	if err := binary.Write(&b, binary.LittleEndian, header); err != nil {
		t.Fatal(err)
	}
	if err := binary.Write(&b, binary.LittleEndian, elf.Prog64{Type: uint32(elf.PT_LOAD), Off: 120, Filesz: 512 << 10}); err != nil {
		t.Fatal(err)
	}
	return append(b.Bytes(), self[1<<20:1<<20+512<<10]...)
}

// bzImage wraps a payload as the kernel's build does.
func bzImage(payload []byte) []byte {
	const sectors = 3
	image := make([]byte, (sectors+1)*sectorSize)
	image[offSetupSects] = sectors
	copy(image[offHeaderMagic:], "HdrS")
	binary.LittleEndian.PutUint16(image[offVersion:], 0x020f)
	padding := 100
	binary.LittleEndian.PutUint32(image[offPayload:], uint32(padding))
	binary.LittleEndian.PutUint32(image[offPayloadLength:], uint32(len(payload)))
	image = append(image, make([]byte, padding)...)
	return append(append(image, payload...), "what follows"...)
}

func sized(payload []byte, size int) []byte {
	return binary.LittleEndian.AppendUint32(payload, uint32(size))
}

func lz4Blocks(t *testing.T, content []byte) []byte {
	t.Helper()
	out := []byte(magicLZ4Legacy)
	for len(content) > 0 {
		n := min(len(content), 8<<20)
		block := make([]byte, lz4.CompressBlockBound(n))
		size, err := lz4.CompressBlock(content[:n], block, nil)
		if err != nil {
			t.Fatal(err)
		}
		out = append(binary.LittleEndian.AppendUint32(out, uint32(size)), block[:size]...)
		content = content[n:]
	}
	return out
}

func piped(t *testing.T, content []byte, name string, args ...string) []byte {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Stdin = bytes.NewReader(content)
	out, err := cmd.Output()
	if err != nil {
		if os.Getenv("IMP_REQUIRE_ALL") == "1" {
			t.Fatalf("%s: %v", name, err)
		}
		t.Skipf("%s: %v", name, err)
	}
	return out
}

func TestUnpackGivesTheKernelBack(t *testing.T) {
	want := anELF(t)
	write := func(t *testing.T, w interface {
		Write([]byte) (int, error)
		Close() error
	}, err error) {
		t.Helper()
		if err == nil {
			_, err = w.Write(want)
		}
		if err := errors.Join(err, w.Close()); err != nil {
			t.Fatal(err)
		}
	}
	for name, payload := range map[string]func(t *testing.T) []byte{
		"LZ4": func(t *testing.T) []byte { return sized(lz4Blocks(t, want), len(want)) },
		"gzip": func(t *testing.T) []byte {
			var b bytes.Buffer
			write(t, gzip.NewWriter(&b), nil)
			return b.Bytes()
		},
		"zstd": func(t *testing.T) []byte {
			var b bytes.Buffer
			w, err := zstd.NewWriter(&b)
			write(t, w, err)
			return sized(b.Bytes(), len(want))
		},
		"xz": func(t *testing.T) []byte {
			var b bytes.Buffer
			w, err := xz.NewWriter(&b)
			write(t, w, err)
			return sized(b.Bytes(), len(want))
		},
		"xz with the x86 filter, as the kernel's build makes it": func(t *testing.T) []byte {
			return sized(piped(t, want, "xz", "--check=crc32", "--x86", "--lzma2=preset=1"), len(want))
		},
		"LZMA": func(t *testing.T) []byte {
			var b bytes.Buffer
			w, err := lzma.NewWriter(&b)
			write(t, w, err)
			return sized(b.Bytes(), len(want))
		},
		"bzip2":   func(t *testing.T) []byte { return sized(piped(t, want, "bzip2", "-1"), len(want)) },
		"nothing": func(*testing.T) []byte { return want },
	} {
		t.Run("packed with "+name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "vmlinuz")
			if err := os.WriteFile(path, bzImage(payload(t)), 0o644); err != nil {
				t.Fatal(err)
			}
			out, err := Unpacked(path, filepath.Join(dir, "cache"))
			if err != nil {
				t.Fatal(err)
			}
			if got, err := os.ReadFile(out); err != nil || !bytes.Equal(got, want) {
				t.Fatalf("unpacked %d bytes, want %d (%v)", len(got), len(want), err)
			}
			again, err := Unpacked(path, filepath.Join(dir, "cache"))
			if err != nil || again != out {
				t.Errorf("second time: %s, %v", again, err)
			}
		})
	}
	t.Run("an ELF is taken as it is", func(t *testing.T) {
		in, out := filepath.Join(t.TempDir(), "elf"), filepath.Join(t.TempDir(), "vmlinux")
		if err := errors.Join(os.WriteFile(in, want, 0o644), Unpack(in, out)); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(out); err != nil || !bytes.Equal(got, want) {
			t.Errorf("got %d bytes, want %d (%v)", len(got), len(want), err)
		}
	})
}

func TestAFileThatIsNoKernelIsRefusedWithItsReason(t *testing.T) {
	var script bytes.Buffer
	w := gzip.NewWriter(&script)
	_, _ = w.Write([]byte("#!/bin/sh\n"))
	_ = w.Close()
	whole := bzImage(lz4Blocks(t, anELF(t)))
	for name, c := range map[string]struct {
		content []byte
		want    string
		kind    error
	}{
		"an empty file":               {nil, "the file is empty", ErrNotKernel},
		"a text":                      {bytes.Repeat([]byte("no kernel "), 100), "neither an ELF file nor an x86 bzImage", ErrNotKernel},
		"an initramfs":                {append([]byte("070701"), make([]byte, 1000)...), "an initramfs?", ErrNotKernel},
		"a bzImage that is cut off":   {whole[:5000], "cut off", nil},
		"a bzImage with broken data":  {bzImage(append([]byte(magicLZ4Legacy), bytes.Repeat([]byte{9}, 600)...)), "unpacking LZ4 payload", nil},
		"an unknown compression":      {bzImage(bytes.Repeat([]byte{9}, 600)), "compression is not known", nil},
		"a bzImage of something else": {bzImage(script.Bytes()), "no ELF image", ErrNotKernel},
		"a kernel packed with LZO":    {bzImage(append([]byte(magicLZO), make([]byte, 600)...)), "LZO", nil},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "wrong")
			if err := os.WriteFile(path, c.content, 0o644); err != nil {
				t.Fatal(err)
			}
			err := Unpack(path, filepath.Join(dir, "vmlinux"))
			if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), path) {
				t.Errorf("error %v: want it to name the file and %q", err, c.want)
			}
			if c.kind != nil && !errors.Is(err, c.kind) {
				t.Errorf("error %v is no %v", err, c.kind)
			}
			if !fault.Is(err, fault.RuntimeStartFailed) {
				t.Errorf("error %v has not the reason RuntimeStartFailed", err)
			}
			if left, _ := filepath.Glob(filepath.Join(dir, "vmlinux*")); left != nil {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}
