package firecracker

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
)

// checkKernel wants what every supported release loads: an ELF on x86, an Image on arm64.
func checkKernel(path, arch string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	var head [64]byte
	if _, err := io.ReadFull(f, head[:]); err != nil {
		return fmt.Errorf("not a kernel: %w", err)
	}
	if arch == arm64 {
		const imageMagic = "ARM\x64" // at 56: Linux, Documentation/arch/arm64/booting.rst
		if string(head[56:60]) != imageMagic {
			return errors.New("not an arm64 kernel (an Image that is not compressed)")
		}
		return nil
	}
	const class64, machineX86 = 2, 62 // elf(5): ELFCLASS64, EM_X86_64
	if !bytes.Equal(head[:4], []byte("\x7fELF")) || head[4] != class64 {
		return errors.New("not an ELF kernel (an unpacked vmlinux)")
	}
	if m := binary.LittleEndian.Uint16(head[18:]); m != machineX86 {
		return fmt.Errorf("an ELF kernel of another architecture (machine %d)", m)
	}
	return nil
}
