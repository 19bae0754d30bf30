package guestinit_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/utils/clock"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/devserver/kernelfetch"
	"imp.dev/imp/internal/guest"
	"imp.dev/imp/internal/guest/channel"
	"imp.dev/imp/internal/initramfs"
	"imp.dev/imp/internal/kernel"
)

// lab is what all real-guest tests share: built once.
type lab struct {
	dir       string
	kernel    string
	initramfs string
	busybox   string // ext4 image with a shell
	tree      string // the tree it was made of
	khz       string
}

var theLab = sync.OnceValues(buildLab)

func TestMain(m *testing.M) {
	code := m.Run()
	if built.Load() {
		if l, err := theLab(); err == nil {
			_ = os.RemoveAll(l.dir)
		}
	}
	os.Exit(code)
}

// built says that theLab was asked for.
var built atomic.Bool

// needLab gives the lab, or skips the test where a real guest cannot be run.
func needLab(t *testing.T) *lab {
	t.Helper()
	if testing.Short() {
		t.Skip("real guests are not run in short mode")
	}
	built.Store(true)
	l, err := theLab()
	if err != nil {
		if os.Getenv("IMP_REQUIRE_ALL") == "1" {
			t.Fatalf("real guests are required here: %v", err)
		}
		t.Skipf("real guests cannot be run here: %v", err)
	}
	return l
}

func cacheDir() (string, error) {
	if dir := os.Getenv("IMP_CACHE"); dir != "" {
		return dir, nil
	}
	home, err := os.UserHomeDir()
	return filepath.Join(home, ".cache", "imp"), err
}

func buildLab() (*lab, error) {
	for _, needed := range []string{"qemu-system-x86_64", "mke2fs", "e2fsck", "tune2fs", "debugfs", "dpkg-deb"} {
		if _, err := exec.LookPath(needed); err != nil {
			return nil, err
		}
	}
	if os.Getuid() != 0 {
		return nil, errors.New("root is needed to make images with owners")
	}
	ctx := context.Background()
	cache, err := cacheDir()
	if err != nil {
		return nil, err
	}
	k, err := kernelfetch.FetchDebian(ctx, filepath.Join(cache, "kernel"), slog.Default())
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "imp-guest-lab-")
	if err != nil {
		return nil, err
	}
	l := &lab{dir: dir, initramfs: filepath.Join(dir, "initramfs.cpio"), khz: tscKHz()}
	if l.kernel, err = kernel.Unpacked(k.Path, filepath.Join(cache, "kernel")); err != nil {
		return nil, err
	}
	binary := filepath.Join(dir, "imp-guest")
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", binary, "imp.dev/imp/cmd/imp-guest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("building imp-guest: %w: %s", err, out)
	}
	if err := initramfs.Build(l.initramfs, initramfs.Options{Guest: binary, ModulesDir: k.ModulesDir}); err != nil {
		return nil, err
	}
	if l.tree, err = busyboxTree(cache, dir); err != nil {
		return nil, err
	}
	l.busybox, err = makeImage(l.tree, filepath.Join(dir, "busybox.ext4"), "11111111-1111-4111-8111-111111111111")
	return l, err
}

// tscKHz gives the rate of the processor's counter, without which emulated boots hang (the kernel cannot measure it there).
func tscKHz() string {
	for _, source := range []struct {
		cmd     []string
		pattern string
	}{
		{[]string{"dmesg"}, `tsc: (?:Refined TSC clocksource calibration: |Detected )([0-9]+)\.([0-9]{3}) MHz`},
		{[]string{"cat", "/proc/cpuinfo"}, `cpu MHz\s*: ([0-9]+)\.([0-9]{3})`},
	} {
		out, err := exec.Command(source.cmd[0], source.cmd[1:]...).Output()
		if err != nil {
			continue
		}
		if all := regexp.MustCompile(source.pattern).FindAllSubmatch(out, -1); all != nil {
			return string(all[len(all)-1][1]) + string(all[len(all)-1][2])
		}
	}
	return ""
}

// run runs a tool of the test.
func run(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

// busyboxTree makes the tree of a small image with a shell, users and some files to look at.
func busyboxTree(cache, dir string) (string, error) {
	unpacked := filepath.Join(cache, "test", "busybox")
	if _, err := os.Stat(filepath.Join(unpacked, "bin", "busybox")); err != nil {
		work, err := os.MkdirTemp(dir, "deb-")
		if err != nil {
			return "", err
		}
		get := exec.Command("apt-get", "download", "-q", "busybox-static")
		get.Dir = work
		if out, err := get.CombinedOutput(); err != nil {
			return "", fmt.Errorf("downloading busybox-static: %w: %s", err, out)
		}
		debs, _ := filepath.Glob(filepath.Join(work, "*.deb"))
		if len(debs) != 1 {
			return "", fmt.Errorf("apt-get download left %v", debs)
		}
		if err := errors.Join(os.MkdirAll(unpacked, 0o755), run("dpkg-deb", "-x", debs[0], unpacked)); err != nil {
			return "", err
		}
	}
	tree := filepath.Join(dir, "tree")
	script := `set -e
mkdir -p bin etc home/alice var/lib/data/sub run/daemon tmp usr/share/things opt/locked usr/bin
chmod 1777 tmp; chmod 755 .
cp "$1/bin/busybox" bin/busybox
for a in $(bin/busybox --list); do [ "$a" = busybox ] || ln -s busybox bin/$a; done
printf 'root:x:0:0:root:/root:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/sh\n' > etc/passwd
printf 'root:x:0:\nalice:x:1000:\nstaff:x:50:alice\nwheel:x:60:bob,alice\nother:x:70:bob\n' > etc/group
ln -s ../run/resolv.conf etc/resolv.conf
chown 1000:1000 home/alice run/daemon; chmod 3777 run/daemon
echo first > var/lib/data/a; ln var/lib/data/a var/lib/data/b; ln -s a var/lib/data/link
echo secret > var/lib/data/sub/s; chown 1000:50 var/lib/data/sub/s; chmod 4750 var/lib/data/sub/s
chown 1000:50 var/lib/data; chmod 2770 var/lib/data
mkfifo var/lib/data/pipe; mknod var/lib/data/null c 1 3
setfattr -n user.color -v blue var/lib/data/a 2>/dev/null || true
echo one > usr/share/things/one
chmod 700 opt/locked
echo text > usr/bin/notexec; printf '#!/no/such/interpreter\n' > usr/bin/badscript; chmod 755 usr/bin/badscript
printf 'garbage' > usr/bin/garbage; chmod 755 usr/bin/garbage
`
	if err := os.MkdirAll(tree, 0o755); err != nil {
		return "", err
	}
	make := exec.Command("sh", "-c", script, "sh", unpacked)
	make.Dir = tree
	if out, err := make.CombinedOutput(); err != nil {
		return "", fmt.Errorf("making image tree: %w: %s", err, out)
	}
	return tree, nil
}

func makeImage(tree, image, uuid string) (string, error) {
	_ = os.Remove(image)
	return image, run("mke2fs", "-q", "-F", "-t", "ext4", "-U", uuid, "-d", tree, image, "64M")
}

// tempDir is like t.TempDir, with a name that QEMU takes: a comma would end a value on its command line.
func tempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "imp-guest-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// privateDisk makes a VM's own disk.
func privateDisk(t *testing.T) string {
	t.Helper()
	path := filepath.Join(tempDir(t), "private.ext4")
	if err := run("mke2fs", "-q", "-F", "-t", "ext4", "-m", "0", "-E", "lazy_itable_init=1,lazy_journal_init=1", path, "128M"); err != nil {
		t.Fatal(err)
	}
	return path
}

// vm is one boot of a real guest.
type vm struct {
	t       *testing.T
	client  *channel.Client
	console string // path of its log
	ended   chan struct{}
	process *os.Process
	mu      sync.Mutex
	conns   []net.Conn
}

type vmOptions struct {
	base, private string
	memory        string
	undrained     bool // the console is a pipe nobody reads
	noSerials     bool // disks are told apart by their order, as on Firecracker
	append        string
}

// boot starts a guest; the test's end ends it.
func (l *lab) boot(t *testing.T, o vmOptions) *vm {
	t.Helper()
	if o.base == "" {
		o.base = l.busybox
	}
	if o.private == "" {
		o.private = privateDisk(t)
	}
	if o.memory == "" {
		o.memory = "256"
	}
	dir := tempDir(t)
	v := &vm{t: t, console: filepath.Join(dir, "console"), ended: make(chan struct{})}
	serial := []string{"-chardev", "file,id=ser0,path=" + v.console, "-serial", "chardev:ser0"}
	args := append([]string{
		"-M", "microvm,acpi=on", "-accel", "tcg,tb-size=64", "-cpu", "max", "-m", o.memory, "-smp", "1", "-nodefaults", "-no-user-config",
		"-display", "none", "-no-reboot", "-kernel", l.kernel, "-initrd", l.initramfs,
		"-append", "console=ttyS0 panic=-1 reboot=t quiet tsc_early_khz=" + l.khz + " tsc=reliable cryptomgr.notests " + o.append,
		"-device", "pvpanic",
		"-chardev", "socket,id=vc0,path=" + dir + "/port,server=on,wait=off", "-device", "virtio-serial-device",
		"-device", "virtserialport,chardev=vc0,name=" + guestv1.PortName + ",id=imp0",
		"-drive", "if=none,id=d0,format=raw,readonly=on,file=" + o.base, "-device", "virtio-blk-device,drive=d0,serial=" + guestv1.SerialBase,
		"-drive", "if=none,id=d1,format=raw,file=" + o.private, "-device", "virtio-blk-device,drive=d1,serial=" + guestv1.SerialPrivate,
		"-netdev", "user,id=n0,restrict=on", "-device", "virtio-net-device,netdev=n0,mac=" + testMAC,
	}, serial...)
	if o.noSerials {
		for i := range args {
			args[i], _, _ = strings.Cut(args[i], ",serial=")
		}
	}
	cmd := exec.Command("qemu-system-x86_64", args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if o.undrained {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = r.Close() })
		defer w.Close()
		cmd.Args = append(cmd.Args[:len(cmd.Args)-4], "-serial", "stdio")
		cmd.Stdout = w
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	v.process = cmd.Process
	go func() {
		_ = cmd.Wait()
		close(v.ended)
	}()
	v.client = channel.New(v.dialer(dir+"/port"), clock.RealClock{}, slog.New(slog.NewTextHandler(io.Discard, nil)))
	t.Cleanup(func() {
		_ = v.client.Close()
		_ = cmd.Process.Kill()
		<-v.ended
		if t.Failed() {
			t.Logf("qemu: %s\nconsole:\n%s", stderr.String(), v.log())
		}
	})
	return v
}

const testMAC = "52:54:00:98:00:02"

func (v *vm) dialer(path string) guest.Dialer {
	return func(ctx context.Context) (net.Conn, error) {
		select {
		case <-v.ended:
			return nil, guest.ErrGone
		default:
		}
		var d net.Dialer
		conn, err := d.DialContext(ctx, "unix", path)
		if err == nil {
			v.mu.Lock()
			v.conns = append(v.conns, conn)
			v.mu.Unlock()
		}
		return conn, err
	}
}

// drop breaks the connection without a word.
func (v *vm) drop() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, c := range v.conns {
		_ = c.Close()
	}
	v.conns = nil
}

func (v *vm) log() string {
	content, _ := os.ReadFile(v.console)
	return strings.ReplaceAll(string(content), "\r", "")
}

// limit of a whole boot with its workload, on a busy machine under emulation.
const limit = 90 * time.Second

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	return ctx
}

func (v *vm) configure(c guestv1.Configure) {
	v.t.Helper()
	if c.ID == "" {
		c.ID = "c1"
	}
	if c.Hostname == "" {
		c.Hostname = "tiny"
	}
	if err := v.client.Configure(within(v.t), c); err != nil {
		v.t.Fatalf("Configure: %v", err)
	}
}

func (v *vm) start(s guestv1.Start) {
	v.t.Helper()
	s.ID, s.Nonce = "s1", "n0nce"
	if err := v.client.Start(within(v.t), s); err != nil {
		v.t.Fatalf("Start: %v", err)
	}
}

func (v *vm) wait() guestv1.Exit {
	v.t.Helper()
	e, err := v.client.Wait(within(v.t))
	if err != nil {
		v.t.Fatalf("Wait: %v", err)
	}
	return e
}

// finish waits for the end, acknowledges it, and waits for the machine to go off.
func (v *vm) finish() (guestv1.Exit, string) {
	v.t.Helper()
	e := v.wait()
	out := v.output()
	if err := v.client.Acknowledge(within(v.t)); err != nil && !errors.Is(err, guest.ErrGone) {
		v.t.Fatalf("Acknowledge: %v", err)
	}
	v.awaitOff()
	return e, out
}

func (v *vm) awaitOff() {
	v.t.Helper()
	select {
	case <-v.ended:
	case <-time.After(limit):
		v.t.Fatal("the machine did not go off")
	}
}

func (v *vm) output() string {
	v.t.Helper()
	var b bytes.Buffer
	if _, _, err := v.client.Output(within(v.t), guestv1.Output{}, &b); err != nil {
		v.t.Fatalf("Output: %v", err)
	}
	return b.String()
}

func argv(words ...string) (all [][]byte) {
	for _, w := range words {
		all = append(all, []byte(w))
	}
	return all
}

func shell(script string) guestv1.Start { return guestv1.Start{Argv: argv("/bin/sh", "-c", script)} }

// once boots a guest, runs one script in it and gives its end.
func (l *lab) once(t *testing.T, c guestv1.Configure, s guestv1.Start) (guestv1.Exit, string, *vm) {
	t.Helper()
	v := l.boot(t, vmOptions{})
	v.configure(c)
	v.start(s)
	e, out := v.finish()
	return e, out, v
}
