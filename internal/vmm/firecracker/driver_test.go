package firecracker

import (
	"context"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"k8s.io/utils/clock"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/cgroup"
	"imp.dev/imp/internal/guest/channel"
	"imp.dev/imp/internal/process"
	"imp.dev/imp/internal/vmm"
	"imp.dev/imp/internal/vmm/firecracker/fcfake"
	"imp.dev/imp/internal/vmm/vmmtest"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == process.ChildCommand {
		process.ChildMain()
	}
	code := m.Run()
	if made != "" {
		_ = os.RemoveAll(made)
	}
	os.Exit(code)
}

// made is the directory of fakeBinary, once it is made.
var made string

// fakeBinary is linked statically: a jail has no libraries.
var fakeBinary = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "imp-fcfake")
	if err != nil {
		return "", err
	}
	made = dir
	path := filepath.Join(dir, "fake")
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", path, "./fcfake/testdata/fake")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building fake: %w: %s", err, out)
	}
	return path, nil
})

const (
	testUIDs = 100
	waitTime = 20 * time.Second
)

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

// need skips, or fails where nothing may be skipped.
func need(t *testing.T, ok bool, what string) {
	t.Helper()
	if ok {
		return
	}
	if os.Getenv("IMP_REQUIRE_ALL") == "1" {
		t.Fatal("needs " + what)
	}
	t.Skip("needs " + what)
}

// bench is what the drivers of one test share.
type bench struct {
	dir  string
	tree *cgroup.Tree
	Options
}

// newBench makes programs of the configuration, and with jail the surroundings for one.
func newBench(t *testing.T, jailed, cgroups bool, c fcfake.Config) *bench {
	t.Helper()
	b := &bench{dir: t.TempDir()}
	binary, err := fakeBinary()
	if err != nil {
		t.Fatal(err)
	}
	b.Options = Options{Binary: filepath.Join(b.dir, "firecracker"), Jailer: filepath.Join(b.dir, "jailer"), Unjailed: !jailed, Dir: filepath.Join(b.dir, "jails"),
		Launcher: process.New(process.Options{}), Instance: "test-" + uuid.NewString()[:8], UIDBase: 2_000_000_000, UIDCount: testUIDs, Arch: amd64, Log: quiet(),
		Period: 20 * time.Millisecond, FigurePeriod: 50 * time.Millisecond}
	b.make(t, b.Binary, c)
	b.make(t, b.Jailer, fcfake.Config{Jailer: true, Version: c.Version})
	_ = binary
	if jailed {
		need(t, os.Geteuid() == 0, "root")
	}
	if cgroups {
		need(t, os.Geteuid() == 0, "root")
		b.tree, err = cgroup.Open(cgroup.Options{Instance: b.Instance})
		need(t, err == nil, fmt.Sprintf("cgroups: %v", err))
		b.Cgroups = b.tree
		t.Cleanup(func() {
			if err := b.tree.Close(); err != nil {
				t.Errorf("cgroups of the instance: %v", err)
			}
		})
	}
	if jailed {
		t.Cleanup(func() { b.nothingJailed(t) })
	}
	return b
}

func (b *bench) make(t *testing.T, path string, c fcfake.Config) {
	t.Helper()
	binary, err := fakeBinary()
	if err == nil {
		err = fcfake.Make(binary, path, c)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// nothingJailed checks that neither jails nor users are left.
func (b *bench) nothingJailed(t *testing.T) {
	t.Helper()
	for _, dir := range []string{"uids", filepath.Base(b.Binary)} {
		entries, _ := os.ReadDir(filepath.Join(b.Dir, dir))
		if len(entries) > 0 {
			t.Errorf("in %s is still %v", dir, entries)
		}
	}
}

func (b *bench) driver(*testing.T) vmm.Driver { return New(b.Options) }

// kernelFile is the head of an ELF: nobody executes it.
func kernelFile(t *testing.T, path string) string {
	t.Helper()
	head := make([]byte, 64)
	copy(head, elf.ELFMAG)
	head[4] = byte(elf.ELFCLASS64)
	binary.LittleEndian.PutUint16(head[18:], uint16(elf.EM_X86_64))
	return file(t, path, head, 0o644)
}

func file(t *testing.T, path string, content []byte, mode os.FileMode) string {
	t.Helper()
	if err := errors.Join(os.WriteFile(path, content, mode), os.Chmod(path, mode)); err != nil {
		t.Fatal(err)
	}
	return path
}

// config is a machine with two disks, in directories that are deep and root's alone.
func (b *bench) config(t *testing.T, g fcfake.Guest) vmm.Config {
	t.Helper()
	g.Port = guestv1.VsockPort
	id := uuid.NewString()
	dir := filepath.Join(b.dir, id, strings.Repeat("deep/", 20), "run")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	disks := []vmm.Disk{
		{Serial: "base", Path: file(t, filepath.Join(dir, "../base"), make([]byte, 4096), 0o444), ReadOnly: true},
		{Serial: "private", Path: file(t, filepath.Join(dir, "../private"), make([]byte, 4096), 0o600)},
	}
	return vmm.Config{VMID: id, Run: 1, Dir: dir, ConsoleLog: filepath.Join(t.TempDir(), "console.log"), VCPU: 1, MemoryMiB: 128, Cgroup: id,
		Kernel: kernelFile(t, filepath.Join(b.dir, "vmlinux")), Initramfs: file(t, filepath.Join(b.dir, "initramfs"), []byte("cpio"), 0o644), Disks: disks,
		KernelArgs: []string{g.Word()}}
}

func context30(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), waitTime)
	t.Cleanup(cancel)
	return ctx
}

func startWorkload(t *testing.T, i vmm.Instance) {
	t.Helper()
	ctx := context30(t)
	c := channel.New(i.DialGuest, clock.RealClock{}, quiet())
	defer func() { _ = c.Close() }()
	err := errors.Join(c.Configure(ctx, guestv1.Configure{ID: "c", Hostname: "h"}), c.Start(ctx, guestv1.Start{ID: "s", Nonce: "n", Argv: [][]byte{[]byte("x")}}))
	if err != nil {
		t.Fatal(err)
	}
}

func fixture(b *bench) vmmtest.Fixture {
	end := map[vmmtest.Behaviour]string{vmmtest.PowersOff: fcfake.PowerOff, vmmtest.Reboots: fcfake.Reboot, vmmtest.Panics: fcfake.Panic}
	return vmmtest.Fixture{
		NewDriver: b.driver,
		Config: func(t *testing.T, behaviour vmmtest.Behaviour) vmm.Config {
			return b.config(t, fcfake.Guest{Console: "booting\r\n", End: end[behaviour], AfterStart: true, EndMillis: 300})
		},
		Trigger: startWorkload, Timeout: waitTime, Mute: true, Broken: broken(b),
	}
}

func broken(b *bench) map[string]vmmtest.Broken {
	with := func(c fcfake.Config, change func(*Options)) func(*testing.T) vmm.Driver {
		return func(t *testing.T) vmm.Driver {
			other := *b
			dir := t.TempDir()
			other.Binary = filepath.Join(dir, filepath.Base(b.Binary))
			b.make(t, other.Binary, c)
			if change != nil {
				change(&other.Options)
			}
			return New(other.Options)
		}
	}
	return map[string]vmmtest.Broken{
		"no Firecracker":                   {Driver: with(fcfake.Config{}, func(o *Options) { o.Binary = "/no/such/firecracker" }), Want: "no Firecracker at /no/such/firecracker: set FC_BIN"},
		"a Firecracker that is too old":    {Driver: with(fcfake.Config{Version: "1.14.2"}, nil), Want: "Firecracker 1.14.2 is too old: install 1.15"},
		"a Firecracker of another API":     {Driver: with(fcfake.Config{Version: "2.0.0"}, nil), Want: "another API than 1.x"},
		"a Firecracker without a version":  {Driver: with(fcfake.Config{APIVersion: "unknown"}, nil), Want: `"unknown" is no version`},
		"a Firecracker that panics":        {Driver: with(fcfake.Config{Panic: "index out of bounds"}, nil), Want: "Firecracker panicked at src/fake.rs:1:1: index out of bounds"},
		"a Firecracker that never answers": {Driver: with(fcfake.Config{NoSocket: true}, func(o *Options) { o.AnswerTimeout = 300 * time.Millisecond }), Want: "did not answer within 300ms"},
		"an answer that breaks off":        {Driver: with(fcfake.Config{Cut: "/version"}, nil), Want: "unexpected EOF"},
		"a request that is not answered":   {Driver: with(fcfake.Config{Mute: "/machine-config"}, nil), Want: "PUT /machine-config: "},
		"an answer without end":            {Driver: with(fcfake.Config{Huge: "/version"}, nil), Want: "larger than"},
		"a machine that KVM refuses": {Driver: with(fcfake.Config{Refuse: map[string]string{"/actions": "Start microvm error: Kvm error: Error creating KVM object: No such file or directory (os error 2)"}}, nil),
			Want: "Firecracker refuses PUT /actions (status 400): Start microvm error: Kvm error"},
		"a Firecracker that ends on the way": {Driver: with(fcfake.Config{ExitAt: map[string]int{"/vsock": 1}}, nil), Want: "asked for /vsock (exit code 1)"},
		"no kernel":                          {Change: func(_ *testing.T, c *vmm.Config) { c.Kernel = "/no/kernel" }, Want: "/no/kernel"},
		"a kernel that is not one": {Change: func(t *testing.T, c *vmm.Config) {
			c.Kernel = file(t, filepath.Join(t.TempDir(), "bzImage"), make([]byte, 4096), 0o644)
		}, Want: "not an ELF kernel"},
		"an initramfs that others may not read": {Change: func(t *testing.T, c *vmm.Config) {
			c.Initramfs = file(t, filepath.Join(t.TempDir(), "initramfs"), nil, 0o600)
		}, Want: "chmod o+r"},
		"no disk": {Change: func(_ *testing.T, c *vmm.Config) { c.Disks[0].Path = "/no/disk" }, Want: "/no/disk"},
		"more disks than there is room for": {Change: func(_ *testing.T, c *vmm.Config) {
			for len(c.Disks) < 15 {
				c.Disks = append(c.Disks, c.Disks[0])
			}
		}, Want: "room for 14"},
		"more vCPUs than there may be": {Change: func(_ *testing.T, c *vmm.Config) { c.VCPU = 33 }, Want: "32 at the most"},
		"a command line that is too long": {Change: func(_ *testing.T, c *vmm.Config) {
			c.KernelArgs = append(c.KernelArgs, strings.Repeat("x", 2000))
		}, Want: "shorten the kernel's arguments"},
		"a console that cannot be opened":       {Change: func(_ *testing.T, c *vmm.Config) { c.ConsoleLog = "/no/console" }, Want: "/no/console"},
		"a name that Firecracker does not take": {Change: func(_ *testing.T, c *vmm.Config) { c.Cgroup = "a_b" }, Want: "cannot be the ID"},
		"an interface whose network has no TAPs": {Change: func(_ *testing.T, c *vmm.Config) {
			c.NICs = []vmm.NIC{{MAC: "02:00:00:00:00:01"}}
		}, Want: "no TAP that Firecracker can open by name"},
	}
}

func TestDriverWithoutJail(t *testing.T) {
	vmmtest.Run(t, fixture(newBench(t, false, true, fcfake.Config{})))
}
func TestDriverWithoutCgroups(t *testing.T) {
	vmmtest.Run(t, fixture(newBench(t, false, false, fcfake.Config{})))
}
func TestDriverInJail(t *testing.T) {
	vmmtest.Run(t, fixture(newBench(t, true, true, fcfake.Config{})))
}
