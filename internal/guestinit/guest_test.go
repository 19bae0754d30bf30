package guestinit_test

import (
	"context"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/guest"
	"imp.dev/imp/internal/guest/guesttest"
)

func TestTheRealGuestPassesTheSuite(t *testing.T) {
	l := needLab(t)
	guesttest.Run(t, func(t *testing.T, w guesttest.Workload) guesttest.Machine {
		script := ""
		if w.Deaf {
			script += "trap '' TERM\n"
		}
		script += "printf '%s' \"$1\"\n" // after the trap: the suite waits for it
		if w.Forever {
			script += "while :; do sleep 1000; done\n"
		}
		script += "exit $2\n"
		start := guestv1.Start{Argv: argv("/bin/sh", "-c", script, "sh", w.Prints, string(rune('0'+w.Code)))}
		if w.Forever && !w.Deaf {
			// A shell waits for its child before it dies of a signal; the sleeper itself does not.
			start.Argv = argv("/bin/sleep", "100000")
		}
		v := l.boot(t, vmOptions{})
		return guesttest.Machine{Client: v.client, Start: start, Drop: v.drop, Off: v.ended}
	})
}

// lines gives the output's lines "name=value" as a map; values are hex where the script made them so.
func lines(out string) map[string]string {
	all := map[string]string{}
	for line := range strings.Lines(out) {
		if name, value, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "="); ok {
			all[name] = value
		}
	}
	return all
}

func expect(t *testing.T, got, want map[string]string) {
	t.Helper()
	for name, w := range want {
		if got[name] != w {
			t.Errorf("%s: got %q, want %q", name, got[name], w)
		}
	}
}

func TestTheWorkloadRunsAsTheImageAndTheVMSay(t *testing.T) {
	l := needLab(t)
	odd := "quote\" 'single' $HOME `x` \\ line\nbreak ünïcode \xff\xfe bytes"
	script := `
echo user=$(id -u):$(id -g) groups=$(id -G)
echo home=$HOME
echo cwd=$(pwd)
echo cwdmode=$(stat -c %a:%u .)
echo argument=$(printf %s "$1" | od -An -v -tx1 | tr -d ' \n')
echo variable=$(printf %s "$ODD" | od -An -v -tx1 | tr -d ' \n')
echo hostname=$(hostname)
echo hosts=$(grep -c '10.9.8.7	tiny' /etc/hosts) localhost=$(grep -c '^127.0.0.1	localhost$' /etc/hosts)
echo resolv=$(tr '\n' ' ' < /etc/resolv.conf)
echo resolvkind=$(stat -c %F /etc/resolv.conf)
echo year=$(date -u +%Y)
echo address=$(ip -4 -o addr show dev eth0 | awk '{print $4}') mtu=$(cat /sys/class/net/eth0/mtu)
echo route=$(ip route show default | awk '/^default/ {print $1, $3, $5}')
echo lo=$(ip -o addr show dev lo | awk '{print $4}' | head -1)
echo stdin=$(readlink /proc/self/fd/0)
echo session=$(awk '{print $6 == $1}' /proc/$$/stat)
echo mounts=$(awk '{print $2 ":" $3}' /proc/mounts | tr '\n' ' ')
echo run=$(stat -c %a:%u:%g /run/daemon)
echo root=$(stat -c %a:%u:%g /)
echo shm=$(stat -c %a /dev/shm)
echo pts=$(ls -d /dev/pts/ptmx) fd=$(readlink /dev/fd)
echo bydevice=yes > /dev/stdout; echo byerror=yes > /dev/stderr
echo files=$(ulimit -Sn):$(ulimit -Hn)
echo port=$(cat /proc/sys/net/ipv4/ip_unprivileged_port_start)
`
	e, out, v := l.once(t, guestv1.Configure{
		Hostname: "tiny", Nameservers: []string{"10.9.8.1"}, SearchDomains: []string{"imp.test"}, UnixNanos: time.Date(2031, 5, 6, 7, 8, 9, 0, time.UTC).UnixNano(),
		Entropy:    []byte(strings.Repeat("random", 8)),
		Interfaces: []guestv1.Interface{{MAC: strings.ToUpper(testMAC), Addresses: []string{"10.9.8.7/24"}, Gateway: "10.9.8.1", MTU: 1400}},
	}, guestv1.Start{
		Argv: argv("sh", "-c", script, "sh", odd), Env: argv("ODD=" + odd), User: "alice", WorkingDir: "/new/place",
	})
	if e.Code != 0 {
		t.Fatalf("exit %+v, output %s", e, out)
	}
	got := lines(out)
	expect(t, got, map[string]string{
		"user": "1000:1000 groups=1000 50 60", "home": "/home/alice", "cwd": "/new/place", "cwdmode": "755:0",
		"argument": hex.EncodeToString([]byte(odd)), "variable": hex.EncodeToString([]byte(odd)),
		"hostname": "tiny", "hosts": "1 localhost=1", "resolv": "search imp.test nameserver 10.9.8.1", "resolvkind": "regular file", "year": "2031",
		"address": "10.9.8.7/24 mtu=1400", "route": "default 10.9.8.1 eth0", "lo": "127.0.0.1/8", "stdin": "/dev/null", "session": "1", "run": "3777:1000:1000", "root": "755:0:0", "shm": "1777", "pts": "/dev/pts/ptmx fd=/proc/self/fd", "port": "0",
		"bydevice": "yes", "byerror": "yes", "files": "65536:1048576",
	})
	for _, m := range []string{"/:overlay", "/dev:devtmpfs", "/proc:proc", "/sys:sysfs", "/dev/pts:devpts", "/dev/shm:tmpfs", "/dev/mqueue:mqueue", "/run:tmpfs", "/sys/fs/cgroup:cgroup2"} {
		if !slices.Contains(strings.Fields(got["mounts"]), m) {
			t.Errorf("no mount %s in %s", m, got["mounts"])
		}
	}
	if !strings.Contains(v.log(), "\nIMP_SUCCESS id=n0nce\n") {
		t.Error("no marker on the console")
	}
}

func TestTheWorkloadStartsWithDefaultSignalsAndWithoutStrangersDescriptors(t *testing.T) {
	l := needLab(t)
	e, out, _ := l.once(t, guestv1.Configure{}, guestv1.Start{Argv: argv("ls", "/proc/self/fd"), User: "1000"})
	if e.Code != 0 || out != "0\n1\n2\n3\n" { // 3 is the directory that ls itself reads
		t.Errorf("exit %+v, descriptors: %q", e, out)
	}
	e, out, _ = l.once(t, guestv1.Configure{}, guestv1.Start{Argv: argv("grep", "-E", "^Sig(Blk|Ign|Cgt)|^Uid|^Groups", "/proc/self/status"), User: "1000"})
	want := "Uid:\t1000\t1000\t1000\t1000\nGroups:\t50 60 1000 \nSigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\nSigCgt:\t0000000000000000\n"
	if e.Code != 0 || out != want {
		t.Errorf("exit %+v, got %q, want %q", e, out, want)
	}
}

func TestAWorkloadThatCannotRunOrDiesTellsWhy(t *testing.T) {
	l := needLab(t)
	for name, c := range map[string]struct {
		start   guestv1.Start
		code    int
		message string
	}{
		"a command that is not there":           {guestv1.Start{Argv: argv("nosuchcommand")}, 127, "nosuchcommand: no such file in PATH"},
		"a file that is not executable":         {guestv1.Start{Argv: argv("/usr/bin/notexec")}, 126, "permission denied"},
		"a script whose interpreter is missing": {guestv1.Start{Argv: argv("badscript")}, 127, "interpreter"},
		"a file that is no program":             {guestv1.Start{Argv: argv("garbage")}, 126, "exec format error"},
		"a user that is not there":              {guestv1.Start{Argv: argv("true"), User: "nobody-here"}, 126, `no user "nobody-here"`},
		"a working directory that is a file":    {guestv1.Start{Argv: argv("true"), WorkingDir: "/etc/passwd"}, 126, "working directory"},
		"an environment that is too large":      {guestv1.Start{Argv: argv("true"), Env: argv("A=" + strings.Repeat("x", 200<<10))}, 126, "too large"},
		"a workload that dies of a signal":      {shell("kill -SEGV $$"), 139, "SIGSEGV"},
	} {
		t.Run(name, func(t *testing.T) {
			e, _, v := l.once(t, guestv1.Configure{}, c.start)
			if e.Code != c.code || !strings.Contains(e.Message, c.message) {
				t.Errorf("exit %+v, want code %d and a message with %q", e, c.code, c.message)
			}
			if log := v.log(); !strings.Contains(log, c.message) || !strings.Contains(log, "\nIMP_FAILED code=") {
				t.Error("the console has not both reason and marker")
			}
		})
	}
}

func TestAnImageOfOneFileRuns(t *testing.T) {
	l := needLab(t)
	tree := filepath.Join(t.TempDir(), "tree")
	content, err := os.ReadFile(filepath.Join(l.dir, "imp-guest"))
	if err == nil {
		err = errors.Join(os.Mkdir(tree, 0o755), os.WriteFile(filepath.Join(tree, "program"), content, 0o755))
	}
	if err != nil {
		t.Fatal(err)
	}
	image, err := makeImage(tree, filepath.Join(tempDir(t), "scratch.ext4"), "22222222-2222-4222-8222-222222222222")
	if err != nil {
		t.Fatal(err)
	}
	v := l.boot(t, vmOptions{base: image})
	v.configure(guestv1.Configure{Nameservers: []string{"10.0.0.1"}})
	v.start(guestv1.Start{Argv: argv("/program"), User: "1000:1000", WorkingDir: "/made/for/it"})
	// The program is imp-guest, which says that it is not process 1 and exits with 2.
	if e, out := v.finish(); e.Code != 2 || !strings.Contains(out, "runs only as process 1") {
		t.Errorf("exit %+v, output %q", e, out)
	}
}

func TestAnInterfaceHasWhatItWasGivenAndNoIPv6OfItsOwn(t *testing.T) {
	l := needLab(t)
	v := l.boot(t, vmOptions{})
	v.configure(guestv1.Configure{Interfaces: []guestv1.Interface{{MAC: testMAC, Addresses: []string{"10.9.8.7/24"}, Gateway: "10.9.8.1", MTU: 1400}}})
	// As after a restore, somewhere else: an MTU above the device's own, and a gateway that is not in the subnet.
	v.configure(guestv1.Configure{
		ID: "c2", Hostname: "moved", SearchDomains: []string{"not.used"},
		Interfaces: []guestv1.Interface{{MAC: testMAC, Addresses: []string{"10.1.2.3/30"}, Gateway: "192.0.2.254", MTU: 8950}},
	})
	v.start(shell(`
echo address=$(ip -o addr show dev eth0 | awk '{print $4}' | tr '\n' ' ') mtu=$(cat /sys/class/net/eth0/mtu)
echo route=$(ip route show | grep ^default)
echo six=$(cat /proc/sys/net/ipv6/conf/eth0/disable_ipv6) routes=$(ip -6 route show dev eth0 | wc -l) lo=$(ip -6 -o addr show dev lo | wc -l)
echo resolv=$(readlink /etc/resolv.conf)
echo hosts=$(grep -c '^10.1.2.3	moved$' /etc/hosts)`))
	e, out := v.finish()
	if e.Code != 0 {
		t.Fatalf("exit %+v, output %s", e, out)
	}
	expect(t, lines(out), map[string]string{
		"address": "10.1.2.3/30 mtu=8950", "route": "default via 192.0.2.254 dev eth0 onlink", "six": "1 routes=0 lo=1", "resolv": "../run/resolv.conf", "hosts": "1",
	})
}

func TestAServerIsProbedRenamedAndStopped(t *testing.T) {
	l := needLab(t)
	v := l.boot(t, vmOptions{})
	v.configure(guestv1.Configure{})
	s := shell(`mkdir /www; echo hello > /www/index.html
trap 'kill $!; hostname > /dev/kmsg; echo bye; (sleep 1000 &) ; exit 5' USR1
i=0; while [ $i -lt 50 ]; do (sleep 0 &); i=$((i+1)); done
httpd -f -p 127.0.0.1:8080 -h /www & wait; wait`)
	s.StopSignal = "SIGUSR1"
	v.start(s)
	ctx := within(t)
	for {
		r, err := v.client.Probe(ctx, guestv1.Probe{Port: 8080, Path: "/", TimeoutMillis: 5000})
		if err != nil {
			t.Fatal(err)
		}
		if r.Healthy {
			if r.Status != 200 {
				t.Errorf("probe: %+v", r)
			}
			break
		}
	}
	if r, err := v.client.Probe(ctx, guestv1.Probe{Port: 8080, Path: "/none", TimeoutMillis: 5000}); err != nil || r.Healthy || r.Status != 404 {
		t.Errorf("probe of a page that is not there: %+v, %v", r, err)
	}
	if r, err := v.client.Probe(ctx, guestv1.Probe{Port: 9, Path: "/", TimeoutMillis: 5000}); err != nil || r.Healthy || !strings.Contains(r.Message, "refused") {
		t.Errorf("probe of a port that is closed: %+v, %v", r, err)
	}
	v.configure(guestv1.Configure{ID: "c2", Hostname: "renamed"})
	if err := v.client.Stop(ctx, guestv1.Stop{GraceMillis: limit.Milliseconds()}); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	e, out := v.finish()
	if e.Code != 5 || out != "bye\n" {
		t.Errorf("exit %+v, output %q", e, out)
	}
	if took := time.Since(begin); took > limit/2 {
		t.Errorf("a process left in the background held the end up for %s", took)
	}
}

func TestOrphansAreReapedAndProcess1IsSafe(t *testing.T) {
	l := needLab(t)
	e, out, _ := l.once(t, guestv1.Configure{}, shell(`
i=0; while [ $i -lt 100 ]; do (true &); i=$((i+1)); done
for s in HUP INT QUIT ILL TRAP ABRT BUS FPE KILL SEGV TERM SYS USR1 PIPE; do kill -$s 1; done
sleep 1
echo zombies=$(grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l)
echo hidden=$(ls -d /m /init /lib/modules 2>/dev/null | wc -l)
`))
	if e.Code != 0 {
		t.Fatalf("exit %+v", e)
	}
	expect(t, lines(out), map[string]string{"zombies": "0", "hidden": "0"})
}

func TestAGuestWithoutMemoryIsToldApart(t *testing.T) {
	l := needLab(t)
	v := l.boot(t, vmOptions{memory: "128"})
	v.configure(guestv1.Configure{})
	v.start(guestv1.Start{Argv: argv("tail", "/dev/zero")})
	if e, _ := v.finish(); !e.OOMKilled || e.Code != 137 || !strings.Contains(e.Message, "out of memory") {
		t.Errorf("exit %+v", e)
	}
}

func TestAMachineOfAnotherKind(t *testing.T) {
	l := needLab(t)
	v := l.boot(t, vmOptions{append: "imp.stop=reboot", noSerials: true})
	v.configure(guestv1.Configure{})
	v.start(shell("grep -c imp.stop=reboot /proc/cmdline"))
	if e, out := v.finish(); e.Code != 0 || out != "1\n" {
		t.Errorf("exit %+v, output %q", e, out)
	}
	if log := v.log(); !strings.Contains(log, "reboot: Restarting system") {
		t.Errorf("the machine was not stopped by a reboot: %s", log)
	}
}

func TestAConsoleThatNobodyReadsHoldsNothingUp(t *testing.T) {
	l := needLab(t)
	v := l.boot(t, vmOptions{undrained: true})
	v.configure(guestv1.Configure{})
	v.start(shell("head -c 20000000 /dev/zero | tr '\\0' 'x'; exit 4"))
	e, out := v.finish()
	if e.Code != 4 {
		t.Errorf("exit %+v", e)
	}
	if len(out) != 1<<20 {
		t.Errorf("%d bytes of output are kept, want %d", len(out), 1<<20)
	}
}

func TestTheMachineEndsWithoutAWordOfTheGuest(t *testing.T) {
	l := needLab(t)
	for name, c := range map[string]struct{ script, console string }{
		"power-off by the workload": {"sync; busybox poweroff -f", ""},
		"reboot by the workload":    {"sync; busybox reboot -f", ""},
		"kernel panic":              {"echo c > /proc/sysrq-trigger", "Kernel panic"},
	} {
		t.Run(name, func(t *testing.T) {
			v := l.boot(t, vmOptions{})
			v.configure(guestv1.Configure{})
			v.start(shell(c.script))
			if _, err := v.client.Wait(within(t)); !errors.Is(err, guest.ErrGone) {
				t.Errorf("Wait: %v", err)
			}
			v.awaitOff()
			if log := v.log(); strings.Contains(log, "IMP_") || !strings.Contains(log, c.console) {
				t.Errorf("console: %s", log)
			}
		})
	}
}

func TestConnectionsThatBreakAmidAStreamLoseNothingThatIsKept(t *testing.T) {
	l := needLab(t)
	v := l.boot(t, vmOptions{})
	v.configure(guestv1.Configure{})
	v.start(shell("i=0; while [ $i -lt 60 ]; do head -c 10000 /dev/zero | tr '\\0' 'x'; i=$((i+1)); done; exit 6"))
	var b dropper
	b.every, b.drop = 50_000, v.drop
	first, next, err := v.client.Output(within(t), guestv1.Output{Follow: true}, &b)
	if err != nil || first != 0 || next != 600_000 || b.n != 600_000 || b.drops == 0 {
		t.Errorf("first %d, next %d, %d bytes, %d drops, %v", first, next, b.n, b.drops, err)
	}
	if e, _ := v.finish(); e.Code != 6 {
		t.Errorf("exit %+v", e)
	}
}

// dropper counts what it is given and breaks the connection now and then.
type dropper struct {
	n, every, drops int
	drop            func()
}

func (d *dropper) Write(p []byte) (int, error) {
	if d.n/d.every != (d.n+len(p))/d.every {
		d.drops++
		d.drop()
	}
	d.n += len(p)
	return len(p), nil
}

func TestAGuestWhoseHostIsAwayKeepsItsResult(t *testing.T) {
	l := needLab(t)
	v := l.boot(t, vmOptions{})
	v.configure(guestv1.Configure{})
	v.start(shell("exit 9"))
	v.drop()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	for !strings.Contains(v.log(), "IMP_FAILED code=9 id=n0nce") {
		select {
		case <-ctx.Done():
			t.Fatal("no marker")
		case <-time.After(20 * time.Millisecond):
		}
	}
	if e, _ := v.finish(); e.Code != 9 {
		t.Errorf("exit %+v", e)
	}
}
