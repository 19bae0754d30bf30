package qemu

import (
	"fmt"
	"strconv"
	"strings"

	"imp.dev/imp/api/guest/v1"
)

// Accelerators.
const (
	TCG = "tcg"
	KVM = "kvm"
)

// invocation is everything a command line is made of. Numbers of descriptors are QEMU's own: it inherits all it needs, and its
// user needs no right to any path but the program's.
type invocation struct {
	Name      string
	Accel     string
	TBSizeMiB int
	VCPU      int
	MemoryMiB int64
	// TSCKHz is the host's rate, 0 where unknown.
	TSCKHz     int64
	KernelArgs []string

	QMPFD, GuestFD, ConsoleFD, QMPLogFD, KernelFD, InitramfsFD int
	Disks                                                      []diskFD
	NICs                                                       []nicFD
}

// diskFD is one disk. QEMU opens a writable disk read-only first and for writing when a device claims it, and takes from a set the
// descriptor of the very mode it wants: so WriteFD is one more, 0 on a read-only disk.
type diskFD struct {
	FD, WriteFD int
	Serial      string
}

type nicFD struct {
	FD  int
	MAC string
}

// arguments gives QEMU's command line without the program.
//
// The choices, each measured (docs/adr/0004): microvm with ACPI, so that the guest finds its MMIO devices in a table; -action so
// that a machine which has ended waits to be asked why; a log of the monitor's own output, which tells the end although
// nobody was connected; descriptors in place of paths.
func (v invocation) arguments() []string {
	accel, cpu := fmt.Sprintf("tcg,tb-size=%d", v.TBSizeMiB), "max"
	if v.Accel == KVM {
		accel, cpu = "kvm", "host"
	}
	args := []string{
		"-name", v.Name,
		"-M", "microvm,acpi=on",
		"-accel", accel,
		"-cpu", cpu,
		"-m", strconv.FormatInt(v.MemoryMiB, 10) + "M",
		"-smp", strconv.Itoa(v.VCPU),
		"-nodefaults", "-no-user-config", "-display", "none",
		"-action", "reboot=shutdown,shutdown=pause,panic=pause",
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
		"-kernel", inherited(v.KernelFD),
		"-initrd", inherited(v.InitramfsFD),
		"-append", strings.Join(v.kernelCommandLine(), " "),
	}
	set := 0
	fdset := func(fds ...int) string {
		set++
		for _, fd := range fds {
			args = append(args, "-add-fd", fmt.Sprintf("fd=%d,set=%d", fd, set))
		}
		return fmt.Sprintf("/dev/fdset/%d", set)
	}
	qmpLog, console := fdset(v.QMPLogFD), fdset(v.ConsoleFD)
	args = append(args,
		"-chardev", fmt.Sprintf("socket,id=qmp,fd=%d,server=on,wait=off,logfile=%s,logappend=on", v.QMPFD, qmpLog),
		"-mon", "chardev=qmp,mode=control",
		"-chardev", "file,id=console,path="+console+",append=on",
		"-serial", "chardev:console",
		"-device", "pvpanic",
		"-device", "virtio-rng-device",
		"-chardev", fmt.Sprintf("socket,id=guest,fd=%d,server=on,wait=off", v.GuestFD),
		"-device", "virtio-serial-device",
		"-device", "virtserialport,chardev=guest,id=guest-port,name="+guestv1.PortName,
	)
	for i, d := range v.Disks {
		fds, mode := []int{d.FD}, "readonly=on"
		if d.WriteFD != 0 {
			fds, mode = append(fds, d.WriteFD), "discard=unmap"
		}
		file := fdset(fds...)
		args = append(args,
			"-drive", fmt.Sprintf("if=none,id=disk%d,format=raw,file=%s,%s", i, file, mode),
			"-device", fmt.Sprintf("virtio-blk-device,drive=disk%d,serial=%s", i, d.Serial))
	}
	for i, n := range v.NICs {
		args = append(args,
			"-netdev", fmt.Sprintf("tap,id=net%d,fd=%d", i, n.FD),
			"-device", fmt.Sprintf("virtio-net-device,netdev=net%d,mac=%s", i, n.MAC))
	}
	return args
}

// kernelCommandLine: reboot=t because microvm's guest hangs in a reboot by any other means; panic=-1 for a panic before the
// panic device's driver is there; tsc_early_khz and tsc=reliable because a guest under TCG cannot measure its own clock and hangs in
// most boots (measured: 7 of 10 on an idle host); cryptomgr.notests saves 0.25 s.
func (v invocation) kernelCommandLine() []string {
	words := []string{"console=ttyS0", "quiet", "panic=-1", "reboot=t", "cryptomgr.notests"}
	if v.Accel == TCG && v.TSCKHz > 0 {
		words = append(words, fmt.Sprintf("tsc_early_khz=%d", v.TSCKHz), "tsc=reliable")
	}
	return append(words, v.KernelArgs...)
}

func inherited(fd int) string { return fmt.Sprintf("/proc/self/fd/%d", fd) }
