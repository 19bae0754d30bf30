package disk_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"imp.dev/imp/internal/disk"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image/oci/ext4/ext4test"
)

func needTools(t testing.TB) {
	t.Helper()
	for _, tool := range []string{"mke2fs", "e2fsck"} {
		if _, err := exec.LookPath(tool); err != nil {
			if os.Getenv("IMP_REQUIRE_ALL") == "1" {
				t.Fatalf("needs e2fsprogs, and IMP_REQUIRE_ALL=1 allows no skip: %v", err)
			}
			t.Skipf("needs e2fsprogs: %v", err)
		}
	}
}

func allocated(t testing.TB, path string) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

func TestADiskIsSparseCleanAndUsable(t *testing.T) {
	needTools(t)
	for _, size := range []int{1, 10, 100} {
		t.Run(fmt.Sprintf("%d GiB", size), func(t *testing.T) {
			d := disk.Disk{Path: filepath.Join(t.TempDir(), "private.ext4"), SizeGiB: size, UUID: uuid.NewString()}
			began := time.Now()
			if err := disk.Create(context.Background(), d); err != nil {
				t.Fatal(err)
			}
			t.Logf("%d GiB made in %v, %d KiB on the disk", size, time.Since(began).Round(100*time.Microsecond), allocated(t, d.Path)>>10)
			info, err := os.Stat(d.Path)
			if err != nil || info.Size() != int64(size)<<30 || info.Mode() != 0o600 {
				t.Fatalf("the file is %v, %v", info, err)
			}
			if n := allocated(t, d.Path); n > 4<<20 {
				t.Errorf("it takes %d bytes", n)
			}
			if out, err := exec.Command("e2fsck", "-fn", d.Path).CombinedOutput(); err != nil {
				t.Errorf("e2fsck -fn is not content: %v\n%s", err, out)
			}
			var id uuid.UUID
			f, err := os.Open(d.Path)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if _, err := f.ReadAt(id[:], 1024+0x68); err != nil || id.String() != d.UUID {
				t.Errorf("its UUID is %s (%v), want %s", id, err, d.UUID)
			}
			if os.Geteuid() == 0 || os.Getenv("IMP_REQUIRE_ALL") == "1" {
				ext4test.NeedRoot(t)
				mounted := ext4test.MountWritable(t, d.Path)
				if err := os.WriteFile(filepath.Join(mounted, "file"), []byte("x"), 0o600); err != nil {
					t.Errorf("writing into it: %v", err)
				}
			}
		})
	}
}

func TestMakingADiskAgainKeepsItsContent(t *testing.T) {
	needTools(t)
	d := disk.Disk{Path: filepath.Join(t.TempDir(), "private.ext4"), SizeGiB: 1}
	if err := os.WriteFile(d.Path+".new", []byte("of a process that died"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := disk.Create(context.Background(), d); err != nil {
		t.Fatal(err)
	}
	mark := func() string {
		f, err := os.OpenFile(d.Path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		b := make([]byte, 4)
		if _, err := f.ReadAt(b, 500<<20); err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteAt([]byte("mine"), 500<<20); err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	mark()
	if err := disk.Create(context.Background(), d); err != nil {
		t.Fatal(err)
	}
	if got := mark(); got != "mine" {
		t.Errorf("after a second call the disk holds %q", got)
	}
	if list, err := os.ReadDir(filepath.Dir(d.Path)); err != nil || len(list) != 1 {
		t.Errorf("beside the disk there is something: %v %v", list, err)
	}
	d.SizeGiB = 2
	if err := disk.Create(context.Background(), d); !fault.Is(err, fault.DiskFailed) || !strings.Contains(err.Error(), "there already") {
		t.Errorf("a disk of another size: got %v", err)
	}
}

func TestFailuresAreDiskFailedAndLeaveNothing(t *testing.T) {
	needTools(t)
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	for name, c := range map[string]struct {
		ctx  context.Context
		edit func(*disk.Disk)
		want string
	}{
		"no size":                  {edit: func(d *disk.Disk) { d.SizeGiB = 0 }, want: "0 GiB is not between 1 and 16384"},
		"a UUID that is none":      {edit: func(d *disk.Disk) { d.UUID = "x" }, want: "not a UUID"},
		"a directory not there":    {edit: func(d *disk.Disk) { d.Path = filepath.Join(filepath.Dir(d.Path), "no", "disk") }, want: "no such file"},
		"a reserve not there":      {edit: func(d *disk.Disk) { d.ReserveBytes = 1 << 60 }, want: "disk is full"},
		"a directory in its place": {edit: func(d *disk.Disk) { d.Path = filepath.Dir(d.Path) }, want: "there already"},
		"a context that has ended": {ctx: ended, want: "context canceled"},
	} {
		t.Run(name, func(t *testing.T) {
			d := disk.Disk{Path: filepath.Join(t.TempDir(), "disk"), SizeGiB: 1}
			dir := filepath.Dir(d.Path)
			if c.edit != nil {
				c.edit(&d)
			}
			if c.ctx == nil {
				c.ctx = context.Background()
			}
			if err := disk.Create(c.ctx, d); !fault.Is(err, fault.DiskFailed) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want DiskFailed with %q", err, c.want)
			}
			if list, err := os.ReadDir(dir); err != nil || len(list) != 0 {
				t.Errorf("left behind: %v %v", list, err)
			}
		})
	}
}

func TestAFullDiskIsToldAsSuch(t *testing.T) {
	needTools(t)
	ext4test.NeedRoot(t)
	full := t.TempDir()
	if err := unix.Mount("tmpfs", full, "tmpfs", 0, "size=16k"); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(full, unix.MNT_DETACH) }()
	err := disk.Create(context.Background(), disk.Disk{Path: filepath.Join(full, "disk"), SizeGiB: 1})
	if !fault.Is(err, fault.DiskFailed) || !strings.Contains(err.Error(), "disk is full") || !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("got %v", err)
	}
	if _, err := os.Lstat(filepath.Join(full, "disk")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("half a disk was published: %v", err)
	}
}

func BenchmarkCreate(b *testing.B) {
	needTools(b)
	for _, size := range []int{1, 10, 100} {
		b.Run(fmt.Sprintf("%dGiB", size), func(b *testing.B) {
			dir := b.TempDir()
			for i := 0; b.Loop(); i++ {
				if err := disk.Create(context.Background(), disk.Disk{Path: filepath.Join(dir, fmt.Sprint(i)), SizeGiB: size}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
