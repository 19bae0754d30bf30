package guestinit_test

import (
	"crypto/sha256"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/guest"
)

func digest(t *testing.T, path string) [32]byte {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return sha256.Sum256(content)
}

// clean checks that a disk needs no journal replay and has no fault.
func clean(t *testing.T, disk string) {
	t.Helper()
	if out, err := exec.Command("e2fsck", "-fn", disk).CombinedOutput(); err != nil {
		t.Errorf("e2fsck: %v: %s", err, out)
	}
	out, err := exec.Command("dumpe2fs", "-h", disk).Output()
	if err != nil || strings.Contains(string(out), "needs_recovery") {
		t.Errorf("the private disk was not left clean (%v)", err)
	}
}

func TestThePrivateDiskKeepsWhatTheWorkloadDid(t *testing.T) {
	l := needLab(t)
	private, before := privateDisk(t), digest(t, l.busybox)
	boot := func(script string, paths ...string) map[string]string {
		v := l.boot(t, vmOptions{private: private})
		v.configure(guestv1.Configure{DataPaths: paths})
		v.start(shell(script))
		e, out := v.finish()
		if e.Code != 0 {
			t.Fatalf("exit %+v, output %s", e, out)
		}
		clean(t, private)
		return lines(out)
	}
	paths := []string{"/var/lib/data", "/brand/new", "/sys/fs/cgroup", "/var/lib/data/sub/"}
	inspect := `
cd /var/lib/data
echo fs=$(awk '$2 == "/var/lib/data" {print $3}' /proc/mounts) nested=$(awk '$2 == "/var/lib/data/sub" {print $3}' /proc/mounts)
echo dir=$(stat -c %a:%u:%g .) a=$(stat -c %a:%u:%g:%h a) same=$([ $(stat -c %i a) = $(stat -c %i b) ] && echo yes)
echo s=$(stat -c %a:%u:%g sub/s) pipe=$(stat -c %F pipe) null=$(stat -c %t:%T null) link=$(readlink link)
`
	got := boot(`set -e`+inspect+`
echo content=$(cat a) $(cat sub/s)
echo new=$(stat -c %a:%u /brand/new)
mkdir -p o/l o/u o/w o/m; echo lower > o/l/f
mount -t overlay -o lowerdir=o/l,upperdir=o/u,workdir=o/w none o/m; echo changed > o/m/f
echo overlay=$(cat o/u/f)
echo second >> a
mv /usr/share/things /usr/share/moved; echo moved=$(cat /usr/share/moved/one) gone=$(ls /usr/share)
echo kept > /etc/kept; rm /etc/group; chown -R 5:5 /home/alice
echo stale > /run/pidfile
`, paths...)
	want := map[string]string{
		"fs": "ext4 nested=ext4", "dir": "2770:1000:50 a=644:0:0:2 same=yes", "s": "4750:1000:50 pipe=fifo null=1:3 link=a",
		"content": "first secret", "new": "755:0", "overlay": "changed", "moved": "one gone=moved",
	}
	expect(t, got, want)
	got = boot(inspect+`
echo content=$(cat a) 
echo etc=$(cat /etc/kept) $(ls /etc/group 2>/dev/null) moved=$(cat /usr/share/moved/one) gone=$(ls /usr/share)
echo home=$(stat -c %u:%g /home/alice) run=$(ls /run)
`, paths...)
	want["content"], want["etc"], want["home"] = "first second", "kept moved=one gone=moved", "5:5 run=daemon"
	delete(want, "new")
	delete(want, "overlay")
	delete(want, "moved")
	expect(t, got, want)
	if digest(t, l.busybox) != before {
		t.Error("the base image was changed")
	}

	t.Run("another base image refuses it", func(t *testing.T) {
		other, err := makeImage(l.tree, filepath.Join(tempDir(t), "other.ext4"), "33333333-3333-4333-8333-333333333333")
		if err != nil {
			t.Fatal(err)
		}
		v := l.boot(t, vmOptions{base: other, private: private})
		refused(t, v, "another base image")
	})
}

func refused(t *testing.T, v *vm, text string) {
	t.Helper()
	c := guestv1.Configure{ID: "c1", Hostname: "tiny"}
	err := v.client.Configure(within(t), c)
	r := (*guest.RefusedError)(nil)
	if !errors.As(err, &r) || r.Code != guestv1.CodeFailed || !strings.Contains(r.Message, text) {
		t.Fatalf("Configure: %v, want a refusal with %q", err, text)
	}
	if again := v.client.Configure(within(t), c); again == nil || again.Error() != err.Error() {
		t.Errorf("the same Configure again: %v", again)
	}
	if err := v.client.Start(within(t), guestv1.Start{ID: "s1", Argv: argv("true")}); !errors.As(err, &r) {
		t.Errorf("Start in a guest that was not configured: %v", err)
	}
}

func TestAConfigureThatFailsNamesTheStepAndTheKernelsWords(t *testing.T) {
	l := needLab(t)
	t.Run("a private disk without a file system", func(t *testing.T) {
		blank := filepath.Join(tempDir(t), "blank")
		if err := errors.Join(os.WriteFile(blank, nil, 0o600), os.Truncate(blank, 16<<20)); err != nil {
			t.Fatal(err)
		}
		v := l.boot(t, vmOptions{private: blank})
		refused(t, v, "mounting private disk: invalid argument (kernel: ")
	})
	t.Run("an interface that is not there", func(t *testing.T) {
		v := l.boot(t, vmOptions{})
		err := v.client.Configure(within(t), guestv1.Configure{ID: "c1", Hostname: "x", Interfaces: []guestv1.Interface{{MAC: "02:00:00:00:00:01"}}})
		if err == nil || !strings.Contains(err.Error(), "interface 02:00:00:00:00:01: not there") {
			t.Errorf("Configure: %v", err)
		}
	})
}
