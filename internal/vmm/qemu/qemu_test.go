package qemu

import (
	"bufio"
	"context"
	"debug/elf"
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
	"github.com/vishvananda/netlink"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/cgroup"
	"imp.dev/imp/internal/devserver/kernelfetch"
	"imp.dev/imp/internal/initramfs"
	"imp.dev/imp/internal/kernel"
	"imp.dev/imp/internal/process"
	"imp.dev/imp/internal/vmm"
	"imp.dev/imp/internal/vmm/vmmtest"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case process.ChildCommand:
			process.ChildMain()
		case runtimeCommand:
			runtimeMain()
		}
	}
	code := m.Run()
	if made != "" {
		_ = os.RemoveAll(made)
	}
	os.Exit(code)
}

// made is boot's directory, once it is made.
var made string

const (
	testUID  = 64100
	testUIDs = 100
	bootTime = 90 * time.Second
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

// boot is what every guest of these tests boots: made once.
var boot = sync.OnceValues(func() (b struct{ kernel, initramfs string }, err error) {
	cache := os.Getenv("IMP_CACHE")
	if cache == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return b, err
		}
		cache = filepath.Join(home, ".cache", "imp")
	}
	cache = filepath.Join(cache, "kernel")
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	k, err := kernelfetch.FetchDebian(ctx, cache, slog.Default())
	if err != nil {
		return b, err
	}
	if b.kernel, err = kernel.Unpacked(k.Path, cache); err != nil {
		return b, err
	}
	dir, err := os.MkdirTemp("", "imp-qemu-test")
	if err != nil {
		return b, err
	}
	made = dir
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", filepath.Join(dir, "guest"), "./testdata/guest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return b, fmt.Errorf("building test guest: %w: %s", err, out)
	}
	b.initramfs = filepath.Join(dir, "initramfs.cpio")
	if err := initramfs.Build(b.initramfs, initramfs.Options{Guest: filepath.Join(dir, "guest"), ModulesDir: k.ModulesDir}); err != nil {
		return b, err
	}
	return b, os.Chmod(b.initramfs, 0o444)
})

type bench struct {
	tree     *cgroup.Tree
	instance string
	kernel   string
	initrd   string
}

func newBench(t *testing.T) bench {
	t.Helper()
	_, err := os.Stat(DefaultBinary)
	need(t, err == nil, "QEMU at "+DefaultBinary)
	need(t, os.Geteuid() == 0, "root")
	b := bench{instance: "test-" + uuid.NewString()[:8]}
	b.tree, err = cgroup.Open(cgroup.Options{Instance: b.instance})
	need(t, err == nil, fmt.Sprintf("cgroups: %v", err))
	t.Cleanup(func() {
		if err := b.tree.Close(); err != nil {
			t.Errorf("cgroups of the instance: %v", err)
		}
	})
	files, err := boot()
	need(t, err == nil, fmt.Sprintf("a guest kernel: %v", err))
	b.kernel, b.initrd = files.kernel, files.initramfs
	return b
}

func (b bench) options() Options {
	return Options{Launcher: process.New(process.Options{}), Instance: b.instance, Cgroups: b.tree, UIDBase: testUID, UIDCount: testUIDs, Log: quiet()}
}

func (b bench) driver(*testing.T) vmm.Driver { return New(b.options()) }

// config's directories are root's alone, and deep: QEMU's user may not need a path.
func (b bench) config(t *testing.T, words ...string) vmm.Config {
	t.Helper()
	id := uuid.NewString()
	dir := filepath.Join(t.TempDir(), strings.Repeat("deep/", 20), "run")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	var args []string
	for _, w := range words {
		args = append(args, "imptest="+w)
	}
	return vmm.Config{VMID: id, Run: 1, Dir: dir, ConsoleLog: filepath.Join(t.TempDir(), "console.log"), VCPU: 1, MemoryMiB: 128, Cgroup: id,
		Kernel: b.kernel, Initramfs: b.initrd, KernelArgs: args}
}

func trigger(t *testing.T, i vmm.Instance) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), bootTime)
	defer cancel()
	conn, err := i.DialGuest(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(bootTime))
	if _, err := conn.Write([]byte("go\n")); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(conn).ReadString('\n'); err != nil || line != "ok\n" {
		t.Fatalf("the guest answered %q, %v", line, err)
	}
}

func TestDriver(t *testing.T) {
	b := newBench(t)
	vmmtest.Run(t, vmmtest.Fixture{
		NewDriver: b.driver,
		Config: func(t *testing.T, behaviour vmmtest.Behaviour) vmm.Config {
			word := map[vmmtest.Behaviour]string{vmmtest.PowersOff: "poweroff", vmmtest.Reboots: "reboot", vmmtest.Panics: "panic", vmmtest.RunsOn: "run"}
			return b.config(t, word[behaviour])
		},
		Trigger: trigger,
		Timeout: bootTime,
		Broken: map[string]vmmtest.Broken{
			"no QEMU": {Driver: func(*testing.T) vmm.Driver {
				o := b.options()
				o.Binary = "/no/such/qemu"
				return New(o)
			}, Want: "no QEMU at /no/such/qemu: install it"},
			"a QEMU that is no QEMU": {Driver: func(*testing.T) vmm.Driver {
				o := b.options()
				o.Binary = "/bin/false"
				return New(o)
			}, Want: "starting VMM"},
			"no kernel":    {Change: func(_ *testing.T, c *vmm.Config) { c.Kernel = "/no/kernel" }, Want: "/no/kernel"},
			"no initramfs": {Change: func(_ *testing.T, c *vmm.Config) { c.Initramfs = "/no/initramfs" }, Want: "/no/initramfs"},
			"no disk":      {Change: func(_ *testing.T, c *vmm.Config) { c.Disks = []vmm.Disk{{Serial: "base", Path: "/no/disk"}} }, Want: "/no/disk"},
			"a kernel that is not one": {Change: func(t *testing.T, c *vmm.Config) {
				c.Kernel = filepath.Join(t.TempDir(), "kernel")
				if err := os.WriteFile(c.Kernel, []byte(strings.Repeat("not a kernel ", 100)), 0o644); err != nil {
					t.Fatal(err)
				}
			}, Want: "kernel: not an ELF kernel"},
			"an ELF that is no kernel": {Change: func(_ *testing.T, c *vmm.Config) { c.Kernel = "/bin/true" }, Want: "qemu-system-x86_64: "},
			"words QEMU does not know": {Change: func(_ *testing.T, c *vmm.Config) { c.VCPU = 4096 }, Want: "qemu-system-x86_64: "},
		},
	})
}

func start(t *testing.T, d vmm.Driver, c vmm.Config) vmm.Instance {
	t.Helper()
	i, err := d.Start(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = i.Close()
		ctx, cancel := context.WithTimeout(context.Background(), bootTime)
		defer cancel()
		if err := d.Destroy(ctx, c, i.Handle()); err != nil {
			t.Error(err)
		}
	})
	return i
}

// awaitConsole waits for text on the console.
func awaitConsole(t *testing.T, c vmm.Config, text string) string {
	t.Helper()
	deadline := time.After(bootTime)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		b, _ := os.ReadFile(c.ConsoleLog)
		if strings.Contains(string(b), text) {
			return string(b)
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("no %q on the console:\n%s", text, b)
		}
	}
}

func TestVMMHasNoPowersAndAUserOfItsOwn(t *testing.T) {
	b := newBench(t)
	d := b.driver(t)
	users := map[string]bool{}
	for range 2 {
		i := start(t, d, b.config(t, "run"))
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", i.PID()))
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"CapEff:\t0000000000000000", "CapPrm:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"} {
			if !strings.Contains(string(status), want) {
				t.Errorf("no %q in\n%s", want, status)
			}
		}
		if adj, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", i.PID())); err != nil || strings.TrimSpace(string(adj)) != "100" {
			t.Errorf("oom_score_adj is %q (%v): a host short of memory is to end a VM before its own programs", adj, err)
		}
		for _, line := range strings.Split(string(status), "\n") {
			if rest, ok := strings.CutPrefix(line, "Uid:"); ok {
				users[strings.Fields(rest)[0]] = true
			}
		}
	}
	if len(users) != 2 || users["0"] {
		t.Errorf("users %v", users)
	}
}

func TestDisksAreReadAndWrittenThroughDescriptorsAlone(t *testing.T) {
	b := newBench(t)
	d, c := b.driver(t), b.config(t, "disks", "run")
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, disk := range []vmm.Disk{{Serial: guestv1.SerialBase, ReadOnly: true}, {Serial: guestv1.SerialPrivate}} {
		disk.Path = filepath.Join(dir, disk.Serial)
		if err := os.WriteFile(disk.Path, append([]byte("hello"), make([]byte, 1<<20)...), 0o400); err != nil {
			t.Fatal(err)
		}
		c.Disks = append(c.Disks, disk)
	}
	start(t, d, c)
	got := awaitConsole(t, c, "test guest is up")
	for _, want := range []string{`holds "hello" <nil>`, "written false", "written true"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	base, _ := os.ReadFile(c.Disks[0].Path)
	private, _ := os.ReadFile(c.Disks[1].Path)
	if string(base[:5]) != "hello" || string(private[:5]) != "guest" {
		t.Errorf("base %q, private %q", base[:5], private[:5])
	}
}

func TestInterfaceComesFromAnInheritedTAP(t *testing.T) {
	b := newBench(t)
	name := "it" + uuid.NewString()[:8]
	tap := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: name}, Mode: netlink.TUNTAP_MODE_TAP, Queues: 1,
		Flags: netlink.TUNTAP_NO_PI | netlink.TUNTAP_VNET_HDR | netlink.TUNTAP_ONE_QUEUE, NonPersist: true}
	if err := netlink.LinkAdd(tap); err != nil {
		need(t, false, fmt.Sprintf("TAP devices: %v", err))
	}
	d, c := b.driver(t), b.config(t, "nics", "run")
	c.NICs = []vmm.NIC{{MAC: "52:54:00:98:00:02", TAP: tap.Fds[0]}}
	start(t, d, c)
	_ = tap.Fds[0].Close()
	if got := awaitConsole(t, c, "test guest is up"); !strings.Contains(got, "nic 52:54:00:98:00:02") {
		t.Errorf("console:\n%s", got)
	}
}

func TestPanicBeforeThePanicDeviceIsAPanic(t *testing.T) {
	b := newBench(t)
	d, c := b.driver(t), b.config(t)
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, nil, 0o444); err != nil {
		t.Fatal(err)
	}
	c.Initramfs = empty
	i := start(t, d, c)
	select {
	case <-i.Done():
	case <-time.After(bootTime):
		t.Fatal("the machine did not end")
	}
	e, err := d.Evidence(t.Context(), c, i.Handle())
	if err != nil || e.Cause != vmm.CausePanic || e.State != vmm.Panicked || !strings.Contains(e.Detail, "Unable to mount root fs") {
		t.Errorf("%+v %v", e, err)
	}
}

func TestVMMThatNeedsMoreThanItsCgroupIsOOMKilled(t *testing.T) {
	b := newBench(t)
	d, c := b.driver(t), b.config(t, "memory", "run")
	i := start(t, d, c)
	g, err := b.tree.Create(c.Cgroup, cgroup.Limits{MemoryBytes: 100 << 20})
	if err != nil {
		t.Fatal(err)
	}
	_ = g
	select {
	case <-i.Done():
	case <-time.After(bootTime):
		t.Fatal("the machine did not end")
	}
	if e, err := d.Evidence(t.Context(), c, i.Handle()); err != nil || e.Cause != vmm.CauseOOM {
		t.Errorf("%+v %v", e, err)
	}
}

// The formula of OverheadMiB is checked against guests that touch all of their memory, the worst case.
func TestOverheadIsAsMeasured(t *testing.T) {
	b := newBench(t)
	d := b.driver(t)
	for _, size := range []struct {
		vcpu   int
		memory int64
	}{{1, 128}, {2, 512}} {
		c := b.config(t, "memory", "run")
		c.VCPU, c.MemoryMiB = size.vcpu, size.memory
		i := start(t, d, c)
		awaitConsole(t, c, "test guest is up")
		var rss, anon int64
		status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", i.PID()))
		for _, line := range strings.Split(string(status), "\n") {
			_, _ = fmt.Sscanf(line, "VmRSS: %d kB", &rss)
			_, _ = fmt.Sscanf(line, "RssAnon: %d kB", &anon)
		}
		u, _ := i.Usage(t.Context())
		over := d.OverheadMiB(size.vcpu, size.memory)
		t.Logf("%d vCPU, %d MiB: RSS %d MiB (anonymous %d), cgroup %d MiB, guest + overhead %d MiB, start to up CPU %v", size.vcpu, size.memory, rss>>10, anon>>10,
			u.MemoryBytes>>20, size.memory+over, time.Duration(u.CPUNanos).Round(10*time.Millisecond))
		if anon>>10 > size.memory+over-8 {
			t.Errorf("anonymous memory %d MiB leaves no room in %d MiB", anon>>10, size.memory+over)
		}
	}
}

func TestProbeTellsWhatIsMissing(t *testing.T) {
	b := newBench(t)
	c := New(b.options()).Probe(t.Context())
	if !c.Usable || !strings.Contains(c.VMMVersion, "QEMU emulator version") || c.Accelerator != TCG {
		t.Errorf("%+v", c)
	}
	o := b.options()
	o.Binary = "/no/such/qemu"
	if c := New(o).Probe(t.Context()); c.Usable || !strings.Contains(c.Problem, "/no/such/qemu") {
		t.Errorf("%+v", c)
	}
}

func TestKernelsAreCheckedBeforeQEMUSeesThem(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, b []byte, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, b, mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	head := func(class, machine byte) []byte {
		b := make([]byte, 64)
		copy(b, "\x7fELF")
		b[4], b[18] = class, machine
		return b
	}
	for name, c := range map[string]struct{ path, want string }{
		"a text":                   {write("text", []byte("this is no kernel at all"), 0o644), "not an ELF kernel"},
		"an empty file":            {write("empty", nil, 0o644), "not an ELF kernel"},
		"a bzImage":                {write("bz", append([]byte("MZ"), make([]byte, 600)...), 0o644), "not an ELF kernel"},
		"a 32-bit ELF":             {write("elf32", head(byte(elf.ELFCLASS32), byte(elf.EM_386)), 0o644), "not an ELF kernel"},
		"another architecture":     {write("arm", head(byte(elf.ELFCLASS64), byte(elf.EM_AARCH64)), 0o644), "another architecture"},
		"nothing":                  {filepath.Join(dir, "none"), "no such file"},
		"a directory":              {dir, "not a regular file"},
		"a kernel that will do":    {write("good", head(byte(elf.ELFCLASS64), byte(elf.EM_X86_64)), 0o644), ""},
		"one the user cannot read": {write("secret", head(byte(elf.ELFCLASS64), byte(elf.EM_X86_64)), 0o600), "chmod o+r"},
	} {
		t.Run(name, func(t *testing.T) {
			if strings.Contains(c.want, "chmod") {
				need(t, os.Geteuid() == 0, "root")
			}
			err := checkKernel(c.path)
			if (err == nil) != (c.want == "") || (err != nil && !strings.Contains(err.Error(), c.want)) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}
