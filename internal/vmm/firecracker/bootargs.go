package firecracker

import (
	"fmt"
	"strings"
)

// Architectures, as Go names them.
const (
	amd64 = "amd64"
	arm64 = "arm64"
)

// maxBootArgs is Firecracker's limit (CMDLINE_MAX_SIZE), its closing zero included. On x86 it appends pci=off and a word for each device.
const (
	maxBootArgs       = 2048
	appendedWords     = len(" pci=off")
	appendedPerDevice = len(" virtio_mmio.device=4K@0xc0000000:255")
)

// bootArgs is the whole command line of the guest's kernel: Firecracker's own defaults go when any is given, which is meant, since they forbid
// modules and switch the console off.
//
// On x86 reboot=k ends the VMM (a write to the keyboard controller) and a power-off does not, so the guest's init is told to stop by
// reboot; on arm64 both do. The i8042 words save the time of probing for a mouse and leave Ctrl-Alt-Del working.
func bootArgs(arch string, devices int, more []string) (string, error) {
	words := []string{"console=ttyS0", "quiet", "panic=-1", "reboot=k", "cryptomgr.notests"}
	appended := appendedWords
	switch arch {
	case amd64:
		words = append(words, "i8042.noaux", "i8042.nomux", "i8042.dumbkbd", "swiotlb=noforce", "imp.stop=reboot")
		appended += devices * appendedPerDevice
	case arm64:
		words = append(words, "imp.stop=poweroff")
	default:
		return "", fmt.Errorf("Firecracker runs on %s and %s, not on %s", amd64, arm64, arch)
	}
	line := strings.Join(append(words, more...), " ")
	if most := maxBootArgs - 1 - appended; len(line) > most {
		return "", fmt.Errorf("the kernel's command line has %d bytes and may have %d: shorten the kernel's arguments", len(line), most)
	}
	return line, nil
}
