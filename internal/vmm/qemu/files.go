package qemu

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"syscall"

	"imp.dev/imp/internal/vmm"
	"imp.dev/imp/internal/vmm/socket"
)

// files are the descriptors one QEMU inherits, with the command line that speaks of them.
type files struct {
	invocation invocation
	inherit    []*os.File
	own        []*os.File // to be closed by close: all but the caller's TAPs
}

func (f *files) close() {
	for _, file := range f.own {
		_ = file.Close()
	}
}

// add gives the number the file has in QEMU.
func (f *files) add(file *os.File) int {
	f.inherit = append(f.inherit, file)
	return 2 + len(f.inherit)
}

func (f *files) open(path string, flags int) (int, error) {
	file, err := os.OpenFile(path, flags, 0o600)
	if err != nil {
		return 0, err
	}
	f.own = append(f.own, file)
	return f.add(file), nil
}

func (f *files) listen(dir, name string) (int, error) {
	file, err := socket.Listen(dir, name)
	if err != nil {
		return 0, err
	}
	f.own = append(f.own, file)
	return f.add(file), nil
}

func (d *Driver) open(c vmm.Config) (*files, error) {
	f := &files{invocation: invocation{Name: c.VMID, Accel: d.options.Accel, TBSizeMiB: d.options.TBSizeMiB, VCPU: c.VCPU, MemoryMiB: c.MemoryMiB,
		KernelArgs: c.KernelArgs}}
	v := &f.invocation
	var errs []error
	keep := func(n int, err error) int {
		errs = append(errs, err)
		return n
	}
	const appending = os.O_CREATE | os.O_APPEND | os.O_WRONLY
	v.KernelFD = keep(f.open(c.Kernel, os.O_RDONLY))
	v.InitramfsFD = keep(f.open(c.Initramfs, os.O_RDONLY))
	v.ConsoleFD = keep(f.open(c.ConsoleLog, appending))
	v.QMPLogFD = keep(f.open(filepath.Join(c.Dir, qmpLogName), appending))
	v.QMPFD = keep(f.listen(c.Dir, qmpSocketName))
	v.GuestFD = keep(f.listen(c.Dir, guestSocketName))
	for _, disk := range c.Disks {
		fd := diskFD{FD: keep(f.open(disk.Path, os.O_RDONLY)), Serial: disk.Serial}
		if !disk.ReadOnly {
			fd.WriteFD = keep(f.open(disk.Path, os.O_RDWR))
		}
		v.Disks = append(v.Disks, fd)
	}
	for _, n := range c.NICs {
		v.NICs = append(v.NICs, nicFD{FD: f.add(n.TAP), MAC: n.MAC})
	}
	if d.options.Accel == TCG {
		rate, err := d.tsc()
		v.TSCKHz = rate
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		f.close()
		return nil, err
	}
	return f, nil
}

// validSerial is what virtio-blk can carry, less what QEMU's option syntax would take apart.
var validSerial = regexp.MustCompile(`^[A-Za-z0-9_-]{1,20}$`)

// check refuses what QEMU would refuse in words nobody understands, or obey in a way nobody meant.
func (d *Driver) check(c vmm.Config) error {
	if len(c.Script) > 0 && string(c.Script) != "null" { // null: none, in JSON
		return errors.New("a fake script is for the fake driver only")
	}
	if d.options.Namespaces == "" { // in a container the binary is the host's and is looked for by the exec
		if _, err := os.Stat(d.options.Binary); err != nil {
			return d.explainBinary(err)
		}
	}
	if c.VCPU < 1 || c.MemoryMiB < 1 {
		return fmt.Errorf("%d vCPUs and %d MiB of memory are no machine", c.VCPU, c.MemoryMiB)
	}
	for _, disk := range c.Disks {
		if !validSerial.MatchString(disk.Serial) {
			return fmt.Errorf("disk serial %q: at most 20 letters, digits, - and _", disk.Serial)
		}
	}
	for _, n := range c.NICs {
		if mac, err := net.ParseMAC(n.MAC); err != nil || len(mac) != 6 || n.TAP == nil {
			return fmt.Errorf("network interface %q has no MAC address or no TAP", n.MAC)
		}
	}
	if err := checkKernel(c.Kernel); err != nil {
		return fmt.Errorf("kernel %s: %w", c.Kernel, err)
	}
	if err := checkReadable(c.Initramfs); err != nil {
		return fmt.Errorf("initramfs %s: %w", c.Initramfs, err)
	}
	return nil
}

// checkReadable: QEMU opens kernel and initramfs anew by its inherited descriptor, with the rights of its own user.
func checkReadable(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return errors.New("not a regular file")
	}
	if os.Geteuid() == 0 && info.Mode().Perm()&0o004 == 0 {
		return fmt.Errorf("mode %v lets the VMM's user not read it; chmod o+r", info.Mode().Perm())
	}
	return nil
}

// checkKernel wants a 64-bit x86 ELF; QEMU's own error for anything else is about a format it guessed.
func checkKernel(path string) error {
	if err := checkReadable(path); err != nil {
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	var head [20]byte
	if _, err := io.ReadFull(f, head[:]); err != nil {
		return fmt.Errorf("not an ELF kernel: %w", err)
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

func groupOf(path string) (int, bool) {
	info, err := os.Stat(path)
	if err != nil {
		return 0, false
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, false
	}
	return int(st.Gid), true
}
