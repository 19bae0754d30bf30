package firecracker

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write golden files")

func disks(n int) (out []specDisk) {
	for i := range n {
		out = append(out, specDisk{Path: diskID(i), ReadOnly: i == 0})
	}
	return out
}

func nics(n int) (out []specNIC) {
	for i := range n {
		out = append(out, specNIC{Device: fmt.Sprintf("i0a1b%010d", i), MAC: fmt.Sprintf("02:00:00:00:00:%02x", i)})
	}
	return out
}

// Every request of ten machines, in order: a change in what Firecracker is told is seen here.
func TestRequestsOfMachines(t *testing.T) {
	jailed := spec{Arch: amd64, VCPU: 1, MemoryMiB: 128, Kernel: "kernel", Initramfs: "initramfs", Disks: disks(2)}
	for name, change := range map[string]func(*spec){
		"the usual machine in its jail": func(*spec) {},
		"the smallest machine":          func(s *spec) { s.Initramfs, s.Disks, s.MemoryMiB = "", nil, 1 },
		"the largest machine":           func(s *spec) { s.VCPU, s.MemoryMiB, s.Disks, s.NICs = 32, 1<<20, disks(7), nics(7) },
		"an interface":                  func(s *spec) { s.NICs = nics(1) },
		"three interfaces":              func(s *spec) { s.NICs = nics(3) },
		"two vCPUs and kernel words":    func(s *spec) { s.VCPU, s.KernelArgs = 2, []string{"imp.debug=1", "loglevel=7"} },
		"without a jail": func(s *spec) {
			s.Kernel, s.Initramfs = "/var/lib/imp/kernel/vmlinux-1", "/usr/lib/imp/initramfs.cpio"
			s.Disks = []specDisk{{Path: "/var/lib/imp/vms/u/base", ReadOnly: true}, {Path: "/var/lib/imp/vms/u/private"}}
		},
		"a volume beside the disks":            func(s *spec) { s.Disks = disks(3) },
		"the usual machine on arm64":           func(s *spec) { s.Arch = arm64 },
		"an interface and four vCPUs on arm64": func(s *spec) { s.Arch, s.VCPU, s.NICs = arm64, 4, nics(1) },
	} {
		t.Run(name, func(t *testing.T) {
			s := jailed
			change(&s)
			calls, err := s.calls()
			if err != nil {
				t.Fatal(err)
			}
			var got bytes.Buffer
			for _, c := range calls {
				body, err := json.MarshalIndent(c.Body, "", "  ")
				if err != nil {
					t.Fatal(err)
				}
				fmt.Fprintf(&got, "%s %s\n%s\n", c.Method, c.Path, body)
			}
			path := filepath.Join("testdata", "golden", strings.ReplaceAll(name, " ", "-")+".http")
			if *update {
				if err := os.WriteFile(path, got.Bytes(), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if got.String() != string(want) {
				t.Errorf("got\n%s\nwant\n%s", got.String(), want)
			}
		})
	}
}

func TestBootArgumentsLeaveRoomForWhatFirecrackerAppends(t *testing.T) {
	for _, arch := range []string{amd64, arm64} {
		for devices := range maxDevices + 1 {
			fits := sizeThatFits(t, arch, devices)
			line, err := bootArgs(arch, devices, []string{strings.Repeat("x", fits)})
			if err != nil {
				t.Fatal(err)
			}
			// What Firecracker 1.16 appends on x86: pci=off, and of each device its place in memory and its interrupt.
			appended := " pci=off"
			for i := range devices {
				if arch == arm64 { // its devices are in the device tree
					break
				}
				appended += fmt.Sprintf(" virtio_mmio.device=4K@0x%x:%d", 0xc0001000+i*0x1000, 5+i)
			}
			if n := len(line) + len(appended) + 1; n > 2048 {
				t.Errorf("%s with %d devices: %d bytes", arch, devices, n)
			}
			if _, err := bootArgs(arch, devices, []string{strings.Repeat("x", fits+1)}); err == nil {
				t.Error("a longer line was accepted")
			}
		}
	}
	if _, err := bootArgs("riscv64", 3, nil); err == nil {
		t.Error("riscv64 was accepted")
	}
}

func sizeThatFits(t *testing.T, arch string, devices int) int {
	t.Helper()
	for n := maxBootArgs; n > 0; n-- {
		if _, err := bootArgs(arch, devices, []string{strings.Repeat("x", n)}); err == nil {
			return n
		}
	}
	t.Fatal("nothing fits")
	return 0
}

func TestReleases(t *testing.T) {
	for text, want := range map[string]struct {
		supported, losesGuest bool
		flaws                 int
	}{
		"1.14.2":           {false, false, 0},
		"1.15.0":           {true, false, 0},
		"v1.15.3":          {true, false, 0},
		"1.16.0":           {true, true, 2},
		"1.16.1":           {true, true, 1},
		"1.17.0-dev":       {true, false, 0},
		"1.20.0":           {true, false, 0},
		"0.99.9":           {false, false, 0},
		"2.0.0":            {false, false, 0},
		"1.16.1-2-gabc+do": {true, true, 1},
	} {
		r, err := parseRelease(text)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if got := r.supported() == nil; got != want.supported {
			t.Errorf("%s: supported %v (%v)", text, got, r.supported())
		}
		if r.losesGuestAfterPause() != want.losesGuest || len(r.flaws()) != want.flaws {
			t.Errorf("%s: loses its guest %v, flaws %q", text, r.losesGuestAfterPause(), r.flaws())
		}
	}
	for _, text := range []string{"", "1.16", "1.16.x", "latest", "1.99999999999999999999.0"} {
		if r, err := parseRelease(text); err == nil {
			t.Errorf("%q was taken for %v", text, r)
		}
	}
}
