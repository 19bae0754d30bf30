package firecracker

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/guest/channel"
	"imp.dev/imp/internal/vmm"
	"imp.dev/imp/internal/vmm/firecracker/fcfake"

	"k8s.io/utils/clock"
)

func start(t *testing.T, d vmm.Driver, c vmm.Config) vmm.Instance {
	t.Helper()
	i, err := d.Start(context30(t), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = i.Close()
		if err := d.Destroy(context30(t), c, i.Handle()); err != nil {
			t.Error(err)
		}
	})
	return i
}

func awaitDone(t *testing.T, i vmm.Instance) {
	t.Helper()
	select {
	case <-i.Done():
	case <-time.After(waitTime):
		t.Fatal("the machine did not end")
	}
}

func await(t *testing.T, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.After(waitTime); !cond(); {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("waited in vain until %s", what)
		}
	}
}

func TestGuestIsReachedAsSoonAsItListens(t *testing.T) {
	b := newBench(t, false, false, fcfake.Config{})
	for name, g := range map[string]fcfake.Guest{
		"at once":                                   {},
		"after its driver was late":                 {DriverMillis: 400},
		"after its init was late":                   {ListenMillis: 400},
		"when its first bytes come with the answer": {Coalesce: "\n\x00junk of an earlier session\n"},
	} {
		t.Run(name, func(t *testing.T) {
			d, c := b.driver(t), b.config(t, g)
			i := start(t, d, c)
			began := time.Now()
			client := channel.New(i.DialGuest, clock.RealClock{}, quiet())
			defer func() { _ = client.Close() }()
			hello, err := client.Hello(context30(t))
			if err != nil || hello.Version != guestv1.Version {
				t.Fatalf("%+v, %v", hello, err)
			}
			if took, most := time.Since(began), time.Duration(g.DriverMillis+g.ListenMillis)*time.Millisecond+time.Second; took > most {
				t.Errorf("it took %v", took)
			}
		})
	}
	t.Run("bytes behind the answer are the guest's", func(t *testing.T) {
		i := start(t, b.driver(t), b.config(t, fcfake.Guest{Coalesce: "hello"}))
		conn, err := i.DialGuest(context30(t))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		got := make([]byte, 5)
		if _, err := io.ReadFull(conn, got); err != nil || string(got) != "hello" {
			t.Errorf("got %q, %v", got, err)
		}
	})
	t.Run("a guest that never comes is waited for until the caller's patience ends, or the machine", func(t *testing.T) {
		i := start(t, b.driver(t), b.config(t, fcfake.Guest{DriverMillis: 1 << 30, End: fcfake.Killed, EndMillis: 500}))
		if _, err := i.DialGuest(context30(t)); !errors.Is(err, vmm.ErrGone) {
			t.Errorf("got %v", err)
		}
	})
}

func TestEndsOfFirecrackerItself(t *testing.T) {
	b := newBench(t, false, true, fcfake.Config{})
	for name, c := range map[string]struct {
		guest fcfake.Guest
		want  vmm.Evidence
	}{
		"a triple fault":                {fcfake.Guest{End: fcfake.TripleFault, EndMillis: 200}, vmm.Evidence{State: vmm.Gone, Cause: vmm.CauseVMMError, Detail: "KVM_EXIT_SHUTDOWN signal (exit code 1)"}},
		"a system call it may not make": {fcfake.Guest{End: fcfake.BadSyscall, EndMillis: 200}, vmm.Evidence{State: vmm.Gone, Cause: vmm.CauseVMMError, Detail: "intercepting a bad syscall (41)"}},
		"a kill from outside":           {fcfake.Guest{End: fcfake.Killed, EndMillis: 200}, vmm.Evidence{State: vmm.Gone}},
		"a guest that was stopped":      {fcfake.Guest{End: fcfake.Stop, EndMillis: 200}, vmm.Evidence{State: vmm.Gone, Cause: vmm.CausePowerOff}},
		"keys that the guest obeys":     {fcfake.Guest{End: fcfake.Stop, AtKeys: true}, vmm.Evidence{State: vmm.Gone, Cause: vmm.CausePowerOff}},
	} {
		t.Run(name, func(t *testing.T) {
			d, cfg := b.driver(t), b.config(t, c.guest)
			i := start(t, d, cfg)
			if c.guest.AtKeys {
				if err := i.(vmm.Interruptible).CtrlAltDel(context30(t)); err != nil {
					t.Fatal(err)
				}
			}
			awaitDone(t, i)
			e, err := d.Evidence(context30(t), cfg, i.Handle())
			if err != nil || e.State != c.want.State || e.Cause != c.want.Cause || !strings.Contains(e.Detail, c.want.Detail) {
				t.Errorf("evidence %+v, %v; want %+v", e, err, c.want)
			}
		})
	}
	t.Run("keys where there is no keyboard", func(t *testing.T) {
		i := &instance{driver: New(Options{Arch: arm64})}
		if err := i.CtrlAltDel(t.Context()); err == nil || !strings.Contains(err.Error(), "arm64") {
			t.Errorf("got %v", err)
		}
	})
}

func TestPause(t *testing.T) {
	t.Run("a paused machine says so, also to a runtime that was restarted, and answers when it goes on", func(t *testing.T) {
		b := newBench(t, false, true, fcfake.Config{Version: "1.15.1"})
		c := b.config(t, fcfake.Guest{})
		first := start(t, b.driver(t), c)
		if err := first.Close(); err != nil {
			t.Fatal(err)
		}
		again, err := b.driver(t).Recover(context30(t), c, first.Handle())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = again.Close() }()
		machine := again.(vmm.Pausable)
		for _, step := range []struct {
			do   func() error
			want bool
		}{
			{func() error { return nil }, false},
			{func() error { return machine.Pause(context30(t)) }, true},
			{func() error { return machine.Pause(context30(t)) }, true},
			{func() error { return machine.Resume(context30(t)) }, false},
		} {
			if err := step.do(); err != nil {
				t.Fatal(err)
			}
			if paused, err := machine.Paused(context30(t)); err != nil || paused != step.want {
				t.Fatalf("paused %v, %v", paused, err)
			}
		}
		startWorkload(t, again)
	})
	t.Run("a release that would lose its guest refuses", func(t *testing.T) {
		b := newBench(t, false, false, fcfake.Config{Version: "1.16.1"})
		i := start(t, b.driver(t), b.config(t, fcfake.Guest{}))
		if err := i.(vmm.Pausable).Pause(context30(t)); err == nil || !strings.Contains(err.Error(), "install 1.15.x, or 1.17 or newer") {
			t.Errorf("got %v", err)
		}
		if paused, err := i.(vmm.Pausable).Paused(context30(t)); err != nil || paused {
			t.Errorf("paused %v, %v", paused, err)
		}
	})
}

func TestFiguresAreSummedUpFromWhereARuntimeTookOver(t *testing.T) {
	b := newBench(t, false, false, fcfake.Config{})
	d, c := b.driver(t).(*Driver), b.config(t, fcfake.Guest{})
	i := start(t, d, c)
	seen := func(d *Driver) (f vmm.Figures) {
		for _, f := range d.Figures() {
			if f.VMID == c.VMID {
				return f
			}
		}
		return f
	}
	await(t, "three lines were read", func() bool { return seen(d).BlockRead >= 3*512 })
	f := seen(d)
	lines := f.BlockRead / 512
	want := vmm.Figures{VMID: c.VMID, BlockRead: lines * 512, BlockWritten: lines * 1024, NetReceived: lines * 60, NetSent: lines * 120}
	if f.BlockWritten != want.BlockWritten || f.NetReceived != want.NetReceived || f.NetSent != want.NetSent ||
		f.Exits["io_in"] != lines || f.Exits["io_out"] != 2*lines || f.Exits["mmio_read"] != 3*lines || f.Exits["mmio_write"] != 4*lines ||
		f.Throttles["block"] != lines || f.Throttles["net_rx"] != 2*lines || f.Throttles["net_tx"] != 3*lines {
		t.Errorf("figures %+v", f)
	}
	_ = i.Close()
	again := b.driver(t).(*Driver)
	second, err := again.Recover(context30(t), c, i.Handle())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = second.Close() }()
	await(t, "the next lines were read", func() bool { return seen(again).BlockRead > 0 })
	if n := seen(again).BlockRead / 512; n > lines {
		t.Errorf("what an earlier runtime has counted is counted again: %d lines", n)
	}
	if err := again.Destroy(context30(t), c, second.Handle()); err != nil {
		t.Fatal(err)
	}
	if f := seen(again); f.VMID != "" {
		t.Errorf("figures of a run that was destroyed: %+v", f)
	}
}

// status gives a field of /proc/PID/status.
func status(t *testing.T, pid int, field string) string {
	t.Helper()
	content, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(string(content), "\n") {
		if value, ok := strings.CutPrefix(line, field+":"); ok {
			return strings.Join(strings.Fields(value), " ")
		}
	}
	t.Fatalf("no %s in the status of %d", field, pid)
	return ""
}

func namespaceOf(t *testing.T, pid, kind string) string {
	t.Helper()
	link, err := os.Readlink("/proc/" + pid + "/ns/" + kind)
	if err != nil {
		t.Fatal(err)
	}
	return link
}

// jailed checks from outside that a process is in its jail.
func jailed(t *testing.T, b *bench, i vmm.Instance, c vmm.Config) {
	t.Helper()
	pid := i.PID()
	number := strconv.Itoa(pid)
	uid := i.(*instance).home.UID
	all := strings.TrimSpace(strings.Repeat(strconv.Itoa(uid)+" ", 4))
	if uid < 2_000_000_000 || status(t, pid, "Uid") != all || status(t, pid, "Gid") != all || status(t, pid, "Groups") != "" {
		t.Errorf("uid %d; %s, %s, groups %q", uid, status(t, pid, "Uid"), status(t, pid, "Gid"), status(t, pid, "Groups"))
	}
	for _, set := range []string{"CapInh", "CapPrm", "CapEff", "CapAmb"} {
		if got := status(t, pid, set); strings.Trim(got, "0") != "" {
			t.Errorf("%s is %s", set, got)
		}
	}
	if got := status(t, pid, "NoNewPrivs"); got != "1" {
		t.Errorf("NoNewPrivs is %s", got)
	}
	for _, kind := range []string{"mnt", "net"} {
		if namespaceOf(t, number, kind) == namespaceOf(t, "self", kind) {
			t.Errorf("it is in the host's %s namespace", kind)
		}
	}
	devices, err := os.ReadFile("/proc/" + number + "/net/dev")
	if err != nil || strings.Count(string(devices), ":") != 1 || !strings.Contains(string(devices), "lo:") {
		t.Errorf("in its network namespace there is %q, %v", devices, err)
	}
	inside, err := os.ReadDir("/proc/" + number + "/root/")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range inside {
		names = append(names, e.Name())
	}
	if want := []string{apiName, "dev", "disk0", "disk1", filepath.Base(b.Binary), logName, metricsName, "initramfs", "kernel", "run", vsockName}; !slices.Equal(slices.Sorted(slices.Values(names)), slices.Sorted(slices.Values(want))) {
		t.Errorf("its root holds %v", names)
	}
	groups, err := os.ReadFile("/proc/" + number + "/cgroup")
	if err != nil || !strings.Contains(string(groups), "/imp/"+b.Instance+"/"+c.Cgroup) {
		t.Errorf("cgroups %s, %v", groups, err)
	}
	root := filepath.Join("/proc", number, "root")
	for name, want := range map[string]struct {
		uid  int
		mode os.FileMode
	}{"kernel": {0, 0o644}, "initramfs": {0, 0o644}, "disk0": {0, 0o444}, "disk1": {uid, 0o600}} {
		info, err := os.Stat(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		if st := info.Sys().(*syscall.Stat_t); int(st.Uid) != want.uid || info.Mode().Perm() != want.mode || st.Nlink < 2 {
			t.Errorf("%s in the jail: uid %d, mode %v, %d links", name, st.Uid, info.Mode(), st.Nlink)
		}
	}
}

func TestJail(t *testing.T) {
	b := newBench(t, true, true, fcfake.Config{})
	d := b.driver(t)
	c, other := b.config(t, fcfake.Guest{}), b.config(t, fcfake.Guest{})
	i, j := start(t, d, c), start(t, d, other)
	jailed(t, b, i, c)
	jailed(t, b, j, other)
	if i.(*instance).home.UID == j.(*instance).home.UID {
		t.Error("two VMs have one user")
	}
	for limit, want := range map[string]string{"Max open files": "1024", "Max file size": strconv.FormatInt(jailFileBytes, 10), "Max core file size": "0"} {
		content, err := os.ReadFile("/proc/" + strconv.Itoa(i.PID()) + "/limits")
		if err != nil {
			t.Fatal(err)
		}
		at := strings.Index(string(content), limit)
		if got := strings.Fields(string(content)[at+len(limit):])[0]; got != want {
			t.Errorf("%s: %s", limit, got)
		}
	}
	if err := d.Destroy(context30(t), c, i.Handle()); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(c.Disks[1].Path)
	if err != nil || info.Sys().(*syscall.Stat_t).Uid != 0 {
		t.Errorf("the private disk is still the user's: %v", err)
	}
	if _, err := os.Stat(filepath.Join(c.Dir, logName)); err != nil {
		t.Errorf("the log was not kept: %v", err)
	}
}

func TestWhatAJailedVMMPutsInThePlaceOfItsSocketsIsNotFollowed(t *testing.T) {
	b := newBench(t, true, true, fcfake.Config{})
	d, c := b.driver(t), b.config(t, fcfake.Guest{})
	i := start(t, d, c)
	root := i.(*instance).home.Root
	target := filepath.Join(b.dir, "host.sock")
	l, err := net.Listen("unix", target)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, name := range []string{apiName, vsockName} {
		path := filepath.Join(root, name)
		if err := errors.Join(os.Rename(path, path+".away"), os.Symlink(target, path)); err != nil {
			t.Fatal(err)
		}
		if conn, err := i.(*instance).DialSocketIn(context30(t), root, name); err == nil || !strings.Contains(err.Error(), "something else of this name") {
			t.Errorf("%s: %v, %v", name, conn, err)
		}
	}
}

func TestPlacesWhereAJailCannotBe(t *testing.T) {
	need(t, os.Geteuid() == 0, "root")
	for options, want := range map[string]string{"nodev": "mounted nodev", "noexec": "mounted noexec"} {
		t.Run(options, func(t *testing.T) {
			b := newBench(t, true, true, fcfake.Config{})
			flags := map[string]uintptr{"nodev": syscall.MS_NODEV, "noexec": syscall.MS_NOEXEC}[options]
			if err := errors.Join(os.Mkdir(b.Dir, 0o700), syscall.Mount("tmpfs", b.Dir, "tmpfs", flags, "size=1m")); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = syscall.Unmount(b.Dir, 0) }()
			if _, err := b.driver(t).Start(context30(t), b.config(t, fcfake.Guest{})); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "--firecracker-jail-dir") {
				t.Errorf("got %v", err)
			}
		})
	}
	t.Run("another file system than the disks'", func(t *testing.T) {
		b := newBench(t, true, true, fcfake.Config{})
		if err := errors.Join(os.Mkdir(b.Dir, 0o700), syscall.Mount("tmpfs", b.Dir, "tmpfs", 0, "size=64m")); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = syscall.Unmount(b.Dir, 0) }()
		c := b.config(t, fcfake.Guest{})
		if _, err := b.driver(t).Start(context30(t), c); err == nil || !strings.Contains(err.Error(), "another file system than its jail") {
			t.Errorf("got %v", err)
		}
		c.Disks = nil // kernel and initramfs are copied once instead
		first := start(t, b.driver(t), c)
		second := b.config(t, fcfake.Guest{})
		second.Disks = nil
		start(t, b.driver(t), second)
		kernels, err := os.ReadDir(filepath.Join(b.Dir, "cache"))
		if err != nil || len(kernels) != 2 {
			t.Errorf("copies %v, %v", kernels, err)
		}
		_ = first
	})
}

func TestUsersAreGivenOnceAndGivenBack(t *testing.T) {
	u := uids{t.TempDir(), 2_000_000_000, 3}
	seen := map[int]string{}
	for _, id := range []string{"a", "b", "c"} {
		uid, err := u.take(id)
		if err != nil || uid < u.base || uid >= u.base+u.count || seen[uid] != "" {
			t.Fatalf("%s: %d, %v", id, uid, err)
		}
		seen[uid] = id
		if again, err := u.take(id); err != nil || again != uid {
			t.Errorf("taking again: %d, %v", again, err)
		}
	}
	if _, err := u.take("d"); err == nil || !strings.Contains(err.Error(), "all 3 from 2000000000 on are in use") {
		t.Errorf("got %v", err)
	}
	if err := errors.Join(u.giveBack("b"), u.giveBack("b")); err != nil {
		t.Fatal(err)
	}
	if uid, err := u.take("d"); err != nil || seen[uid] != "b" {
		t.Errorf("got %d, %v", uid, err)
	}
	for _, bad := range []uids{{t.TempDir(), 0, 10}, {t.TempDir(), 10, 0}} {
		if uid, err := bad.take("a"); err == nil {
			t.Errorf("%+v gave %d", bad, uid)
		}
	}
}

func TestProbe(t *testing.T) {
	_, err := os.Stat("/dev/kvm")
	need(t, err == nil, "/dev/kvm")
	need(t, os.Geteuid() == 0, "root")
	b := newBench(t, true, false, fcfake.Config{})
	if c := b.driver(t).Probe(context30(t)); !c.Usable || c.VMMVersion != "Firecracker v1.16.1" || c.Containment != Jailed || len(c.Flaws) != 1 || c.Accelerator != "kvm" {
		t.Errorf("got %+v", c)
	}
	b.make(t, b.Jailer, fcfake.Config{Jailer: true, Version: "1.15.0"})
	if c := b.driver(t).Probe(context30(t)); c.Usable || !strings.Contains(c.Problem, "install both of one release") {
		t.Errorf("got %+v", c)
	}
	for name, change := range map[string]func(*Options){
		"no jailer at /no/jailer: set JAILER_BIN":       func(o *Options) { o.Jailer = "/no/jailer" },
		"no Firecracker at /no/firecracker: set FC_BIN": func(o *Options) { o.Binary = "/no/firecracker" },
		"/bin/true: ": func(o *Options) { o.Binary = "/bin/true" },
	} {
		o := b.Options
		change(&o)
		if c := New(o).Probe(context30(t)); c.Usable || !strings.Contains(c.Problem, name) {
			t.Errorf("%s: %+v", name, c)
		}
	}
	o := b.Options
	o.Unjailed, o.Jailer = true, "/no/jailer"
	if c := New(o).Probe(context30(t)); !c.Usable || c.Containment != Unjailed {
		t.Errorf("without a jail: %+v", c)
	}
}
