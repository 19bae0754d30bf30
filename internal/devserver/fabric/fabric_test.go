package fabric

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		lacking(t, "needs root: it makes network namespaces")
	}
}

// lacking skips the test, or fails it where nothing may be lacking.
func lacking(t *testing.T, why string) {
	t.Helper()
	if os.Getenv("IMP_REQUIRE_ALL") == "1" {
		t.Fatal(why)
	}
	t.Skip(why)
}

// make3 makes a fabric of three nodes that ends with the test.
func make3(t *testing.T) *Fabric {
	t.Helper()
	needRoot(t)
	prefix := "impdevtest-" + uuid.NewString()[:8]
	f, err := Make(prefix, []string{"node-1", "node-2", "node-3"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := Remove(prefix + "-"); err != nil {
			t.Error(err)
		}
		if left, err := Namespaces(prefix); err != nil || len(left) != 0 {
			t.Errorf("after Remove there are %v: %v", left, err)
		}
	})
	return f
}

// serve answers every connection with the address that it came from.
func serve(t *testing.T, n Namespace, address string) {
	t.Helper()
	listener, err := n.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			_, _ = fmt.Fprint(conn, conn.RemoteAddr().(*net.TCPAddr).IP)
			conn.Close()
		}
	}()
}

func ask(t *testing.T, n Namespace, address string) (answer string, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	conn, err := n.Dial(ctx, "tcp", address)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(2 * time.Second))
	all, err := io.ReadAll(conn)
	return string(all), err
}

func TestNodesReachEachOtherAndTheOutsideByTheirOwnAddresses(t *testing.T) {
	f := make3(t)
	one, two := f.Node("node-1"), f.Node("node-2")
	serve(t, two.Namespace, "0.0.0.0:8080")
	serve(t, f.Outside(), "198.51.100.1:80")
	for _, c := range []struct {
		name, address string
		want          string
	}{
		{"another node", two.Address.String() + ":8080", one.Address.String()},
		{"the outside", OutsideAddress().String() + ":80", one.Address.String()},
	} {
		if got, err := ask(t, one.Namespace, c.address); err != nil || got != c.want {
			t.Errorf("%s saw node-1 as %q (%v), want %s", c.name, got, err, c.want)
		}
	}
	if _, err := ask(t, f.Node("node-3").Namespace, "127.0.0.1:8080"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("node-3's loopback has what listens on node-2: %v", err)
	}
}

func TestTheOutsideCannotAnswerWhomItDoesNotKnow(t *testing.T) {
	f := make3(t)
	serve(t, f.Outside(), "198.51.100.1:80")
	guest := netip.MustParsePrefix("10.44.0.2/32")
	if err := f.Node("node-1").Do(func() error { return address("lo", guest) }); err != nil {
		t.Fatal(err)
	}
	dial := func(from net.IP) error {
		return f.Node("node-1").Do(func() error {
			conn, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: from}, Timeout: time.Second}).Dial("tcp", "198.51.100.1:80")
			if err == nil {
				conn.Close()
			}
			return err
		})
	}
	if err := dial(f.Node("node-1").Address.AsSlice()); err != nil {
		t.Fatalf("the node itself is not answered: %v", err)
	}
	if err := dial(guest.Addr().AsSlice()); err == nil {
		t.Error("a sender that was not translated was answered; then a test of NAT shows nothing")
	}
}

func TestALinkCarriesAGuestsLargestFrameInTheOverlay(t *testing.T) {
	f := make3(t)
	for _, n := range []Namespace{f.Node("node-1").Namespace, f.Node("node-2").Namespace, f.Outside()} {
		if err := n.Do(func() error {
			link, err := netlink.LinkByName(nodeLink)
			if err == nil && link.Attrs().MTU != 9050 {
				err = fmt.Errorf("MTU %d, want 9050", link.Attrs().MTU)
			}
			return err
		}); err != nil {
			t.Errorf("%s: %v", n.Name, err)
		}
	}
	// Longer than the MTU is refused where it is sent; so the path carries what is not.
	serve := func(size int) error {
		return f.Node("node-1").Do(func() error {
			conn, err := net.Dial("udp", f.Node("node-2").Address.String()+":9")
			if err != nil {
				return err
			}
			defer conn.Close()
			raw, err := conn.(*net.UDPConn).SyscallConn()
			if err != nil {
				return err
			}
			if err := raw.Control(func(fd uintptr) {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO)
			}); err != nil {
				return err
			}
			_, err = conn.Write(make([]byte, size))
			return err
		})
	}
	if err := serve(MTU - 28); err != nil {
		t.Errorf("a packet of %d bytes: %v", MTU, err)
	}
	if err := serve(MTU - 27); !errors.Is(err, unix.EMSGSIZE) {
		t.Errorf("a packet of %d bytes: %v, want it refused", MTU+1, err)
	}
}

func TestTwoFabricsAreApart(t *testing.T) {
	first, second := make3(t), make3(t)
	serve(t, first.Node("node-2").Namespace, "0.0.0.0:8080")
	if _, err := ask(t, second.Node("node-1").Namespace, second.Node("node-2").Address.String()+":8080"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("a node reaches one of the same address in another fabric: %v", err)
	}
}

func TestNoNameOfTheMachinesOwnNamespaceIsTaken(t *testing.T) {
	links := func() string {
		all, err := netlink.LinkList()
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, link := range all {
			names = append(names, link.Attrs().Name)
		}
		return strings.Join(names, " ")
	}
	needRoot(t)
	before := links()
	make3(t)
	if after := links(); after != before {
		t.Errorf("links were %q, and are %q", before, after)
	}
}

func ipProgram(t *testing.T) string {
	t.Helper()
	ip, err := exec.LookPath("ip")
	if err != nil {
		ip = "/sbin/ip"
	}
	if _, err := os.Stat(ip); err != nil {
		lacking(t, "needs iproute2: "+err.Error())
	}
	return ip
}

func TestIPNetnsKnowsTheNamespacesByName(t *testing.T) {
	ip := ipProgram(t)
	f := make3(t)
	out, err := exec.Command(ip, "netns", "exec", f.Node("node-3").Name, ip, "-4", "-o", "address", "show", "eth0").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "192.0.2.13/24") {
		t.Errorf("ip netns exec gave %v: %s", err, out)
	}
}

func TestANameCanBeRemovedAfterSomebodyElseHasMadeNamespaces(t *testing.T) {
	f := make3(t) // its clean-up is what is tested
	other := Namespace{Name: "impdevtest-ip-" + uuid.NewString()[:8]}
	if out, err := exec.Command(ipProgram(t), "netns", "add", other.Name).CombinedOutput(); err != nil {
		t.Fatalf("ip netns add: %v: %s", err, out)
	}
	if err := other.remove(); err != nil {
		t.Error(err)
	}
	if err := f.Node("node-1").Do(func() error { return nil }); err != nil {
		t.Errorf("a namespace is hidden by what ip did: %v", err)
	}
}

func TestAFabricThatCannotBeMadeLeavesNothingAndSaysWhy(t *testing.T) {
	needRoot(t)
	prefix := "impdevtest-" + uuid.NewString()[:8]
	if err := os.MkdirAll(namespaceDir, 0o755); err != nil {
		t.Fatal(err)
	}
	long := "node-with-a-name-too-long-for-a-link"
	_, err := Make(prefix, []string{"node-1", long})
	if err == nil || !strings.Contains(err.Error(), long) {
		t.Errorf("a name too long for a link gave %v", err)
	}
	left, err := filepath.Glob(filepath.Join(namespaceDir, prefix+"*"))
	if err != nil || len(left) > 0 {
		t.Errorf("%v is left (%v)", left, err)
	}
	for _, c := range []struct {
		cause error
		says  string
	}{
		{unix.EPERM, "CAP_SYS_ADMIN"}, {unix.EOPNOTSUPP, "modprobe veth bridge"}, {unix.ENOSPC, "max_net_namespaces"},
	} {
		if got := remedy(fmt.Errorf("making: %w", c.cause)).Error(); !strings.Contains(got, c.says) || !strings.Contains(got, c.cause.Error()) {
			t.Errorf("%v is told as %q, want %q in it", c.cause, got, c.says)
		}
	}
}

func TestAThreadComesBackFromANamespace(t *testing.T) {
	f := make3(t)
	before, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	inside := ""
	for range 50 {
		if err := f.Outside().Do(func() (err error) {
			inside, err = os.Readlink("/proc/thread-self/ns/net")
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	if inside == before {
		t.Error("Do ran in the machine's own namespace")
	}
	threads, err := filepath.Glob("/proc/self/task/*/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	for _, thread := range threads {
		if now, err := os.Readlink(thread); err == nil && now != before {
			t.Errorf("%s is still in %s", thread, now)
		}
	}
}
