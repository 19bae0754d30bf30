package guestinit

import (
	"bufio"
	"errors"
	"io/fs"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"

	guestv1 "imp.dev/imp/api/guest/v1"
)

const (
	testPasswd = "root:x:0:0:root:/root:/bin/sh\n# comment\n\nbroken\nalice:x:1000:1001::/home/alice:/bin/sh\n12:x:77:78::/twelve:\n"
	testGroup  = "root:x:0:\nalice:x:1001:\nstaff:x:50:bob,alice\n99:x:98:\n"
)

func TestLookupUser(t *testing.T) {
	for name, c := range map[string]struct {
		spec   string
		noFile bool
		want   identity
		err    string
	}{
		"nothing is root": {spec: "", want: identity{home: "/root"}},
		"a name has its group, home and further groups": {spec: "alice", want: identity{uid: 1000, gid: 1001, groups: []uint32{50}, home: "/home/alice"}},
		"a number with an entry is the same user":       {spec: "1000", want: identity{uid: 1000, gid: 1001, groups: []uint32{50}, home: "/home/alice"}},
		"a number without an entry is fine":             {spec: "4711", want: identity{uid: 4711}},
		"a name that is a number wins over the number":  {spec: "12", want: identity{uid: 77, gid: 78, home: "/twelve"}},
		"with a group there are no further ones":        {spec: "alice:staff", want: identity{uid: 1000, gid: 50, home: "/home/alice"}},
		"a group that is a number needs no entry":       {spec: "alice:4711", want: identity{uid: 1000, gid: 4711, home: "/home/alice"}},
		"two numbers need no files at all":              {spec: "5:6", noFile: true, want: identity{uid: 5, gid: 6}},
		"an empty group is as none":                     {spec: "alice:", want: identity{uid: 1000, gid: 1001, groups: []uint32{50}, home: "/home/alice"}},
		"a group alone is root's":                       {spec: ":staff", want: identity{gid: 50, home: "/root"}},
		"an unknown name is refused":                    {spec: "nobody-here", err: `no user "nobody-here"`},
		"a name in an image without passwd is refused":  {spec: "alice", noFile: true, err: `no user "alice"`},
		"an unknown group is refused":                   {spec: "alice:nogroup", err: `no group "nogroup"`},
		"the number that means unchanged is no user":    {spec: "4294967295", err: "no user"},
		"a number beyond 32 bits is no user":            {spec: "4294967296", err: "no user"},
	} {
		t.Run(name, func(t *testing.T) {
			passwd, group := strings.NewReader(testPasswd), strings.NewReader(testGroup)
			got, err := lookupUser(c.spec, passwd, group)
			if c.noFile {
				got, err = lookupUser(c.spec, nil, nil)
			}
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Errorf("error %v, want %q", err, c.err)
				}
				return
			}
			if err != nil || !reflect.DeepEqual(got, c.want) {
				t.Errorf("got %+v, %v; want %+v", got, err, c.want)
			}
		})
	}
}

func TestParseSignal(t *testing.T) {
	for in, want := range map[string]int{
		"": 15, "SIGTERM": 15, "TERM": 15, "term": 15, "9": 9, "SIGQUIT": 3, "SIGRTMIN": 34, "RTMIN+3": 37, "SIGRTMAX-1": 63, "SIGRTMAX": 64, "64": 64,
	} {
		if got, err := parseSignal(in); err != nil || int(got) != want {
			t.Errorf("%q: got %d, %v; want %d", in, got, err, want)
		}
	}
	for _, in := range []string{"0", "65", "-1", "SIGNOTHING", "RTMIN+40", "RTMAX+1", "SIG"} {
		if got, err := parseSignal(in); err == nil {
			t.Errorf("%q: got %d, want an error", in, got)
		}
	}
}

func TestLookCommand(t *testing.T) {
	denied := errors.New("permission denied")
	files := map[string]error{"/bin/tool": nil, "/usr/bin/tool": denied, "/work/run": nil, "/work/sub/run": nil, "/usr/bin/locked": denied, "/dir": errors.New("is a directory")}
	check := func(p string) error {
		if err, ok := files[p]; ok {
			return err
		}
		if strings.HasPrefix(p, "/bin/tool/") {
			return syscall.ENOTDIR
		}
		return fs.ErrNotExist
	}
	for name, c := range map[string]struct {
		argv0, path, dir string
		want             string
		code             int
	}{
		"found in PATH": {"tool", "/sbin:/bin", "/", "/bin/tool", 0},
		"one that may not be executed is passed over":   {"tool", "/usr/bin:/bin", "/", "/bin/tool", 0},
		"only one that may not be executed":             {"locked", "/bin:/usr/bin", "/", "", 126},
		"not in PATH":                                   {"nothing", "/bin", "/", "", 127},
		"an empty element of PATH is the directory":     {"run", "/bin::/usr/bin", "/work", "/work/run", 0},
		"a relative element starts from the directory":  {"run", "sub", "/work", "/work/sub/run", 0},
		"a name with a slash starts from the directory": {"./run", "/bin", "/work", "/work/run", 0},
		"an absolute name is taken as it is":            {"/bin/tool", "", "/work", "/bin/tool", 0},
		"an absolute name that is not there":            {"/bin/none", "/bin", "/", "", 127},
		"a directory is not executable":                 {"/dir", "", "/", "", 126},
		"below a file there is nothing":                 {"/bin/tool/x", "", "/", "", 127},
	} {
		t.Run(name, func(t *testing.T) {
			got, code, err := lookCommand(c.argv0, c.path, c.dir, check)
			if got != c.want || code != c.code || (err == nil) != (code == 0) {
				t.Errorf("got %q, %d, %v; want %q, %d", got, code, err, c.want, c.code)
			}
		})
	}
}

func TestMayExecute(t *testing.T) {
	alice := identity{uid: 1000, gid: 1001, groups: []uint32{50}}
	for name, c := range map[string]struct {
		mode, uid, gid uint32
		id             identity
		want           bool
	}{
		"root needs any execute bit":           {0o001, 5, 5, identity{}, true},
		"root cannot without one":              {0o666, 0, 0, identity{}, false},
		"the owner's bit counts for the owner": {0o100, 1000, 5, alice, true},
		"the owner has not what others have":   {0o011, 1000, 1001, alice, false},
		"a further group counts":               {0o010, 5, 50, alice, true},
		"a member has not what others have":    {0o001, 5, 50, alice, false},
		"others have the last bit":             {0o001, 5, 5, alice, true},
	} {
		if got := mayExecute(c.mode, c.uid, c.gid, c.id); got != c.want {
			t.Errorf("%s: got %v", name, got)
		}
	}
}

func TestEnvironmentKeepsBytesAndAddsWhatIsMissing(t *testing.T) {
	odd := []byte("A=\xff\n\"$x'")
	got := environment([][]byte{odd, []byte("HOME=")}, "/home/alice")
	if want := []string{string(odd), "HOME=", "PATH=" + defaultPath}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := environment([][]byte{[]byte("PATH=/x")}, ""); !slices.Equal(got, []string{"PATH=/x", "HOME=/"}) {
		t.Errorf("got %q", got)
	}
	if got := valueOf([]string{"PATH=/a", "XPATH=/c", "PATH=/b"}, "PATH"); got != "/b" {
		t.Errorf("PATH twice: got %q", got)
	}
}

func TestAStartThatExecveCannotTakeIsRefused(t *testing.T) {
	good := func() guestv1.Start { return guestv1.Start{ID: "a", Argv: [][]byte{[]byte("x")}} }
	for name, change := range map[string]func(*guestv1.Start){
		"no id":                        func(s *guestv1.Start) { s.ID = "" },
		"no command":                   func(s *guestv1.Start) { s.Argv = nil },
		"an empty command":             func(s *guestv1.Start) { s.Argv[0] = nil },
		"NUL in an argument":           func(s *guestv1.Start) { s.Argv = append(s.Argv, []byte("a\x00b")) },
		"NUL in a variable":            func(s *guestv1.Start) { s.Env = [][]byte{[]byte("a=\x00")} },
		"a relative working directory": func(s *guestv1.Start) { s.WorkingDir = "here" },
		"an unknown stop signal":       func(s *guestv1.Start) { s.StopSignal = "SIGNOTHING" },
	} {
		s := good()
		change(&s)
		if err := validateStart(&s); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if s := good(); validateStart(&s) != nil {
		t.Errorf("a good one: %v", validateStart(&s))
	}
}

func TestAConfigureThatCannotWorkIsRefused(t *testing.T) {
	good := func() guestv1.Configure { return guestv1.Configure{ID: "a", Hostname: "vm"} }
	for name, change := range map[string]func(*guestv1.Configure){
		"no hostname":                  func(c *guestv1.Configure) { c.Hostname = "" },
		"a hostname of 64 characters":  func(c *guestv1.Configure) { c.Hostname = strings.Repeat("a", 64) },
		"a hostname with a line break": func(c *guestv1.Configure) { c.Hostname = "a\nb" },
		"too little entropy":           func(c *guestv1.Configure) { c.Entropy = make([]byte, 31) },
		"a relative data path":         func(c *guestv1.Configure) { c.DataPaths = []string{"data"} },
		"the root as a data path":      func(c *guestv1.Configure) { c.DataPaths = []string{"/x/.."} },
		"a MAC that is none":           func(c *guestv1.Configure) { c.Interfaces = []guestv1.Interface{{MAC: "x"}} },
		"an address without its prefix": func(c *guestv1.Configure) {
			c.Interfaces = []guestv1.Interface{{MAC: "52:54:00:00:00:01", Addresses: []string{"10.0.0.1"}}}
		},
		"a gateway that is a name": func(c *guestv1.Configure) {
			c.Interfaces = []guestv1.Interface{{MAC: "52:54:00:00:00:01", Gateway: "router"}}
		},
		"a nameserver in the guest itself": func(c *guestv1.Configure) { c.Nameservers = []string{"127.0.0.53"} },
		"a nameserver nowhere":             func(c *guestv1.Configure) { c.Nameservers = []string{"0.0.0.0"} },
		"a nameserver with a line break":   func(c *guestv1.Configure) { c.Nameservers = []string{"1.1.1.1\nx"} },
	} {
		c := good()
		change(&c)
		if err := validateConfigure(&c); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if c := good(); validateConfigure(&c) != nil {
		t.Errorf("a good one: %v", validateConfigure(&c))
	}
}

func TestNameFiles(t *testing.T) {
	for name, c := range map[string]struct {
		configure guestv1.Configure
		resolv    string
	}{
		"without name servers the image's resolv.conf stands": {guestv1.Configure{Hostname: "vm"}, ""},
		"search domains alone are not worth a resolv.conf":    {guestv1.Configure{Hostname: "vm", SearchDomains: []string{"apps.test"}}, ""},
		"name servers and search domains make one":            {guestv1.Configure{Hostname: "vm", Nameservers: []string{"192.0.2.53"}, SearchDomains: []string{"apps.test"}}, "search apps.test\nnameserver 192.0.2.53\n"},
	} {
		t.Run(name, func(t *testing.T) {
			files := nameFiles(&c.configure)
			if got := files["/etc/resolv.conf"]; got != c.resolv {
				t.Errorf("resolv.conf is %q, want %q", got, c.resolv)
			}
			if files["/etc/hostname"] != "vm\n" || !strings.Contains(files["/etc/hosts"], "127.0.1.1\tvm\n") {
				t.Errorf("files are %q", files)
			}
		})
	}
}

func TestReadStatus(t *testing.T) {
	for name, c := range map[string]struct {
		answer string
		want   int
	}{
		"an ordinary answer":             {"HTTP/1.1 200 OK\r\nX: y\r\n\r\n", 200},
		"a server of the oldest kind":    {"HTTP/1.0 404\n", 404},
		"interim answers are not it":     {"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 503 No\r\n", 503},
		"another protocol":               {"SSH-2.0-OpenSSH_9\r\n", 0},
		"a line that never ends":         {strings.Repeat("x", 100), 0},
		"nothing":                        {"", 0},
		"interim answers without an end": {strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", 20), 0},
	} {
		got, err := readStatus(bufio.NewReader(strings.NewReader(c.answer)))
		if got != c.want || (err == nil) != (c.want != 0) {
			t.Errorf("%s: got %d, %v", name, got, err)
		}
	}
}

func TestSmallRules(t *testing.T) {
	for cmdline, want := range map[string]bool{"": false, "quiet imp.stop=reboot x": true, "imp.stop=poweroff": false, "imp.stop=reboot imp.stop=poweroff": false} {
		if got := stopByReboot(cmdline); got != want {
			t.Errorf("stop by reboot for %q: %v", cmdline, got)
		}
	}
	if got := kernelMessage([]byte("6,339,5140900,-;NET: Registered\n SUBSYSTEM=x\n")); got != "NET: Registered" {
		t.Errorf("kernel message: %q", got)
	}
	if got := vmstatValue("oom_kill_x 9\noom_kill 3\n", "oom_kill"); got != 3 {
		t.Errorf("oom_kill: %d", got)
	}
	if got := requestTarget("a b\r\nHost: x"); got != "/a%20b%0D%0AHost:%20x" {
		t.Errorf("request target: %q", got)
	}
	if got := marker(guestv1.Exit{Code: 3}, "n"); got != "IMP_FAILED code=3 id=n" {
		t.Errorf("marker: %q", got)
	}
	if got := marker(guestv1.Exit{}, "n"); got != "IMP_SUCCESS id=n" {
		t.Errorf("marker: %q", got)
	}
	hosts := hostsFile("vm", []guestv1.Interface{{Addresses: []string{"10.1.2.3/24"}}})
	if !strings.Contains(hosts, "10.1.2.3\tvm\n") || !strings.Contains(hosts, "127.0.0.1\tlocalhost\n") {
		t.Errorf("hosts: %q", hosts)
	}
	if got := resolvConf([]string{"1.1.1.1", "::1"}, []string{"a.b", "c"}); got != "search a.b c\nnameserver 1.1.1.1\nnameserver ::1\n" {
		t.Errorf("resolv.conf: %q", got)
	}
}
