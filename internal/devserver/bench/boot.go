package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/devserver"

	"github.com/u-root/u-root/pkg/cpio"
)

const line = "the-first-line"

// firstLine compares Imp, from the create call to the workload's first line on the console, with a bare QEMU that boots the same
// kernel with the same disks to the same line by a shell script.
func (b *bench) firstLine(ctx context.Context) error {
	bare, err := b.bare(ctx)
	if err != nil {
		return fmt.Errorf("preparing bare QEMU: %w", err)
	}
	defer os.RemoveAll(bare.dir)
	var withImp, without []time.Duration
	for i := range b.rounds {
		d, err := bare.run(ctx)
		if err != nil {
			return fmt.Errorf("booting bare QEMU: %w", err)
		}
		without = append(without, d)
		if d, err = b.impLine(ctx, fmt.Sprintf("line-%d", i)); err != nil {
			return err
		}
		withImp = append(withImp, d)
	}
	fmt.Fprintf(b.out, "\ncreate → workload's first line, image cached, %d rounds in turn\n", b.rounds)
	fmt.Fprintf(b.out, "  imp        %s\n  bare QEMU  %s\n", spread(withImp), spread(without))
	fmt.Fprintf(b.out, "  ratio of medians %.2f (aim ≤ 1.5)\n", float64(median(withImp))/float64(median(without)))
	return nil
}

func (b *bench) impLine(ctx context.Context, name string) (time.Duration, error) {
	began := time.Now()
	vm, err := b.create(ctx, name, "echo "+line+"; sleep 600")
	if err != nil {
		return 0, err
	}
	socket := b.server.Places.RuntimeSocket(b.server.NodeNames()[0])
	err = poll(ctx, func() (bool, error) {
		var console strings.Builder
		_ = devserver.CopyConsole(ctx, socket, string(vm.UID), false, &console) // until it is there, it is not
		return strings.Contains(console.String(), line), nil
	})
	took := time.Since(began)
	if err != nil {
		return 0, fmt.Errorf("waiting for the first line of %s: %w", name, err)
	}
	return took, b.remove(ctx, vm)
}

// bare is a QEMU invocation without Imp.
type bare struct {
	dir    string
	args   []string
	binary string
}

// bareInit does what has to be done between the kernel and the workload, by a shell: modules, disks, overlay.
const bareInit = `#!/bare/busybox sh
/bare/busybox mount -t devtmpfs dev /dev
/bare/busybox mount -t proc proc /proc
/bare/busybox mount -t sysfs sys /sys
for m in /lib/modules/*; do /bare/busybox insmod $m; done
/bare/busybox mkdir -p /m/base /m/private /m/root
/bare/busybox mount -t ext4 -o ro /dev/vda /m/base
/bare/busybox mount -t ext4 -o noinit_itable /dev/vdb /m/private
/bare/busybox mkdir -p /m/private/upper /m/private/work
/bare/busybox mount -t overlay -o lowerdir=/m/base,upperdir=/m/private/upper,workdir=/m/private/work,redirect_dir=on,index=on,metacopy=on overlay /m/root
/bare/busybox chroot /m/root /bin/sh -c 'echo ` + line + `'
/bare/busybox poweroff -f
`

// bare takes kernel, its words, initramfs and disks from a running VM of Imp, so that both boot the same.
func (b *bench) bare(ctx context.Context) (_ *bare, err error) {
	vm, err := b.create(ctx, "model", "sleep 600")
	if err != nil {
		return nil, err
	}
	if vm, err = b.await(ctx, vm, started); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.remove(ctx, vm)) }()
	pid, command, err := vmmOf(vm)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "imp-bare-")
	if err != nil {
		return nil, err
	}
	binary, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		return nil, err
	}
	kernel, err := os.Readlink(after(command, "-kernel", pid))
	if err != nil {
		return nil, err
	}
	initramfs := filepath.Join(dir, "initramfs.cpio")
	if err := extend(after(command, "-initrd", pid), filepath.Join(b.opts.CacheDir, "demo-image", "bin", "busybox"), initramfs); err != nil {
		return nil, err
	}
	base, err := findBase(b.server.Places.Data, string(vm.UID))
	if err != nil {
		return nil, err
	}
	args := []string{
		"-M", "microvm,acpi=on", "-accel", after(command, "-accel", 0), "-cpu", after(command, "-cpu", 0),
		"-m", after(command, "-m", 0), "-smp", after(command, "-smp", 0), "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-kernel", kernel, "-initrd", initramfs, "-append", after(command, "-append", 0) + " rdinit=/bare/init", "-serial", "stdio",
		"-drive", "if=none,id=d0,format=raw,readonly=on,file=" + filepath.Join(dir, "base.ext4"), "-device", "virtio-blk-device,drive=d0",
		"-drive", "if=none,id=d1,format=raw,file=" + filepath.Join(dir, "private.ext4"), "-device", "virtio-blk-device,drive=d1",
	}
	if err := os.Link(base, filepath.Join(dir, "base.ext4")); err != nil {
		if err := copyFile(base, filepath.Join(dir, "base.ext4")); err != nil {
			return nil, err
		}
	}
	return &bare{dir: dir, args: args, binary: binary}, nil
}

// after gives the word after flag; one that names a descriptor becomes the path of it seen from outside.
func after(command []string, flag string, pid int) string {
	for i, word := range command[:len(command)-1] {
		if word == flag {
			return strings.Replace(command[i+1], "/proc/self/", fmt.Sprintf("/proc/%d/", pid), 1)
		}
	}
	return ""
}

// extend appends a second archive to the initramfs: the kernel unpacks both.
func extend(initramfs, busybox, out string) error {
	first, err := os.ReadFile(initramfs)
	if err != nil {
		return err
	}
	program, err := os.ReadFile(busybox)
	if err != nil {
		return err
	}
	var second bytes.Buffer
	writer := cpio.Newc.Writer(&second)
	for _, record := range []cpio.Record{
		cpio.Directory("bare", 0o755),
		cpio.StaticFile("bare/busybox", string(program), 0o755),
		cpio.StaticFile("bare/init", bareInit, 0o755),
		cpio.TrailerRecord,
	} {
		if err := writer.WriteRecord(record); err != nil {
			return err
		}
	}
	return os.WriteFile(out, append(first, second.Bytes()...), 0o644)
}

func findBase(data, uid string) (path string, err error) {
	err = filepath.WalkDir(data, func(p string, entry fs.DirEntry, err error) error {
		if err == nil && strings.Contains(p, uid) && strings.HasPrefix(entry.Name(), "base") && entry.Type().IsRegular() {
			path = p
		}
		return nil
	})
	if path == "" {
		err = errors.Join(err, fmt.Errorf("no base disk of %s below %s", uid, data))
	}
	return path, err
}

func copyFile(from, to string) error {
	content, err := os.Open(from)
	if err != nil {
		return err
	}
	defer content.Close()
	target, err := os.Create(to)
	if err != nil {
		return err
	}
	_, err = io.Copy(target, content)
	return errors.Join(err, target.Close())
}

// vmmOf finds the VMM of a VM by its cgroup.
func vmmOf(vm *v1alpha1.ImpVM) (pid int, command []string, err error) {
	groups, err := filepath.Glob("/proc/[0-9]*/cgroup")
	if err != nil {
		return 0, nil, err
	}
	for _, path := range groups {
		content, err := os.ReadFile(path)
		if err != nil || !strings.Contains(string(content), string(vm.UID)) {
			continue
		}
		words, err := os.ReadFile(filepath.Join(filepath.Dir(path), "cmdline"))
		if err != nil {
			return 0, nil, err
		}
		if _, err := fmt.Sscan(filepath.Base(filepath.Dir(path)), &pid); err != nil {
			return 0, nil, err
		}
		return pid, strings.Split(strings.TrimRight(string(words), "\x00"), "\x00"), nil
	}
	return 0, nil, fmt.Errorf("no VMM of %s", vm.Name)
}

// run boots once and gives the time from the spawn to the line. The disk is new each time, as Imp's is.
func (b *bare) run(ctx context.Context) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	began := time.Now()
	private := filepath.Join(b.dir, "private.ext4")
	if err := os.RemoveAll(private); err != nil {
		return 0, err
	}
	if out, err := exec.CommandContext(ctx, "mke2fs", "-q", "-F", "-t", "ext4", "-m", "0",
		"-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard", private, "1G").CombinedOutput(); err != nil {
		return 0, fmt.Errorf("%w: %s", err, out)
	}
	cmd := exec.CommandContext(ctx, b.binary, b.args...)
	console, err := cmd.StdoutPipe()
	if err != nil {
		return 0, err
	}
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	var said bytes.Buffer
	var took time.Duration
	chunk := make([]byte, 4096)
	for {
		n, err := console.Read(chunk)
		said.Write(chunk[:n])
		if took == 0 && bytes.Contains(said.Bytes(), []byte(line)) {
			took = time.Since(began)
		}
		if err != nil {
			break
		}
	}
	if err := cmd.Wait(); err != nil && took == 0 {
		return 0, fmt.Errorf("%w: %s", err, said.String())
	}
	if took == 0 {
		return 0, fmt.Errorf("the line never came: %s", said.String())
	}
	return took, nil
}
