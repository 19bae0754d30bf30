package firecracker

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"regexp"
)

// maxVCPUs is Firecracker's own limit; maxDevices what its x86 machine has interrupts for since 1.15 (arm64 has more).
const (
	maxVCPUs   = 32
	maxDevices = 17
	// fixedDevices of every machine: balloon, vsock, entropy.
	fixedDevices = 3
	// guestCID is the same in every machine: the socket tells them apart.
	guestCID = 3
)

// spec is a machine in Firecracker's terms: what is true of it wherever its files lie. Paths are as the VMM sees them.
type spec struct {
	Arch       string
	VCPU       int
	MemoryMiB  int64
	Kernel     string
	Initramfs  string
	KernelArgs []string
	Disks      []specDisk
	NICs       []specNIC
}

type specDisk struct {
	Path     string
	ReadOnly bool
}

type specNIC struct {
	Device, MAC string
}

// calls gives every request between the first answer and InstanceStart, in their order: devices are numbered in it, so that the guest's first
// disk is the first here.
func (s spec) calls() ([]call, error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	args, err := bootArgs(s.Arch, fixedDevices+len(s.Disks)+len(s.NICs), s.KernelArgs)
	if err != nil {
		return nil, err
	}
	var out []call
	put := func(path string, body any) { out = append(out, call{http.MethodPut, path, body}) }
	put("/machine-config", machineConfig{VCPUCount: s.VCPU, MemSizeMiB: s.MemoryMiB})
	put("/boot-source", bootSource{KernelImagePath: s.Kernel, InitrdPath: s.Initramfs, BootArgs: args})
	for i, d := range s.Disks {
		// The root is named by the guest's init and not here: with an initramfs a root device would only add words to the command line. A guest's
		// flush reaches the host's disk.
		id := diskID(i)
		put("/drives/"+id, drive{DriveID: id, PathOnHost: d.Path, IsReadOnly: d.ReadOnly, CacheType: "Writeback", IOEngine: "Sync"})
	}
	for i, n := range s.NICs {
		id := nicID(i)
		put("/network-interfaces/"+id, networkInterface{IfaceID: id, HostDevName: n.Device, GuestMAC: n.MAC})
	}
	put("/vsock", vsockDevice{GuestCID: guestCID, UDSPath: vsockName})
	put("/entropy", entropyDevice{})
	// An empty balloon costs nothing, and one that is not there at the start can never come.
	put("/balloon", balloon{DeflateOnOOM: true})
	return out, nil
}

// Ids may hold letters, digits and _ only.
func diskID(i int) string { return fmt.Sprintf("disk%d", i) }
func nicID(i int) string  { return fmt.Sprintf("net%d", i) }

// validDevice is a name that the kernel takes for an interface, IFNAMSIZ less its closing zero.
var validDevice = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,15}$`)

// check refuses what Firecracker would refuse in other words, or take and fail with later.
func (s spec) check() error {
	switch {
	case s.VCPU < 1 || s.MemoryMiB < 1:
		return fmt.Errorf("%d vCPUs and %d MiB of memory are no machine", s.VCPU, s.MemoryMiB)
	case s.VCPU > maxVCPUs:
		return fmt.Errorf("%d vCPUs: Firecracker's machine has %d at the most", s.VCPU, maxVCPUs)
	case s.Kernel == "":
		return errors.New("no kernel")
	}
	if n := fixedDevices + len(s.Disks) + len(s.NICs); n > maxDevices {
		return fmt.Errorf("%d disks and %d network interfaces: Firecracker's machine has room for %d in all", len(s.Disks), len(s.NICs), maxDevices-fixedDevices)
	}
	for _, n := range s.NICs {
		if mac, err := net.ParseMAC(n.MAC); err != nil || len(mac) != 6 {
			return fmt.Errorf("network interface with MAC address %q: that is none", n.MAC)
		}
		if !validDevice.MatchString(n.Device) {
			return fmt.Errorf("network interface %s: %q is no name of a TAP", n.MAC, n.Device)
		}
	}
	return nil
}
