package guestinit

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	guestv1 "imp.dev/imp/api/guest/v1"
)

const (
	maxHostname = 63
	minEntropy  = 32
)

// validateConfigure refuses what cannot work, before anything is touched.
func validateConfigure(c *guestv1.Configure) error {
	if c.Hostname == "" || len(c.Hostname) > maxHostname || strings.ContainsAny(c.Hostname, "/\n\x00 ") {
		return fmt.Errorf("hostname %q is not a name of 1 to %d characters", c.Hostname, maxHostname)
	}
	if n := len(c.Entropy); n != 0 && n < minEntropy {
		return fmt.Errorf("entropy has %d bytes; 0 or at least %d are expected", n, minEntropy)
	}
	for _, p := range c.DataPaths {
		if err := validateDataPath(p); err != nil {
			return err
		}
	}
	for _, i := range c.Interfaces {
		if _, err := net.ParseMAC(i.MAC); err != nil {
			return fmt.Errorf("interface: %w", err)
		}
		for _, a := range i.Addresses {
			if _, err := netip.ParsePrefix(a); err != nil {
				return fmt.Errorf("interface %s: %w", i.MAC, err)
			}
		}
		if _, err := netip.ParseAddr(i.Gateway); i.Gateway != "" && err != nil {
			return fmt.Errorf("interface %s: gateway: %w", i.MAC, err)
		}
	}
	for _, n := range c.Nameservers {
		a, err := netip.ParseAddr(n)
		if err != nil {
			return fmt.Errorf("nameserver: %w", err)
		}
		if a.IsLoopback() || a.IsUnspecified() {
			return fmt.Errorf("nameserver %s is this machine itself, where none listens", n)
		}
	}
	return nil
}

// hostsFile renders /etc/hosts.
func hostsFile(hostname string, interfaces []guestv1.Interface) string {
	b := strings.Builder{}
	b.WriteString("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n")
	own := false
	for _, i := range interfaces {
		for _, a := range i.Addresses {
			if p, err := netip.ParsePrefix(a); err == nil {
				fmt.Fprintf(&b, "%s\t%s\n", p.Addr(), hostname)
				own = true
			}
		}
	}
	if !own {
		fmt.Fprintf(&b, "127.0.1.1\t%s\n", hostname)
	}
	return b.String()
}

// resolvConf renders /etc/resolv.conf.
func resolvConf(nameservers, search []string) string {
	b := strings.Builder{}
	if len(search) > 0 {
		fmt.Fprintf(&b, "search %s\n", strings.Join(search, " "))
	}
	for _, n := range nameservers {
		fmt.Fprintf(&b, "nameserver %s\n", n)
	}
	return b.String()
}

// writeNames writes the files that name this machine and others. An image in which that is not possible (/etc is a file, say) still
// runs.
func writeNames(c *guestv1.Configure, log *logger) {
	for path, content := range nameFiles(c) {
		if err := replaceFile(path, content); err != nil {
			log.Printf("writing %s: %v", path, err)
		}
	}
}

// nameFiles gives the files by path. Search domains alone make no resolv.conf: without name servers the image's own stands.
func nameFiles(c *guestv1.Configure) map[string]string {
	files := map[string]string{"/etc/hostname": c.Hostname + "\n", "/etc/hosts": hostsFile(c.Hostname, c.Interfaces)}
	if len(c.Nameservers) > 0 {
		files["/etc/resolv.conf"] = resolvConf(c.Nameservers, c.SearchDomains)
	}
	return files
}

// replaceFile writes a new file and renames it over path: resolv.conf is often a symlink, to a file that does not exist.
func replaceFile(path, content string) error {
	temporary := path + ".imp-new"
	if err := os.Remove(temporary); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	err := os.WriteFile(temporary, []byte(content), 0o644)
	if err == nil {
		err = os.Rename(temporary, path)
	}
	if err != nil {
		_ = os.Remove(temporary)
	}
	return err
}

// setClock sets the wall clock; 0 leaves it.
func setClock(unixNanos int64) error {
	if unixNanos == 0 {
		return nil
	}
	t := unix.NsecToTimespec(unixNanos)
	return unix.ClockSettime(unix.CLOCK_REALTIME, &t)
}

// Requests of random(4).
const (
	rndAddEntropy = 0x40085203
	rndReseedCRNG = 0x5207
)

// addEntropy mixes bytes from the host into the kernel's pool, credits them, and makes the generator use them at once. A guest that
// is a copy of another has no other way to differ from it: distribution kernels may lack the VMGenID driver.
func addEntropy(entropy []byte) error {
	if len(entropy) == 0 {
		return nil
	}
	f, err := os.OpenFile("/dev/random", os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	// struct rand_pool_info: bits credited, bytes that follow.
	words := make([]uint32, 2+(len(entropy)+3)/4)
	words[0], words[1] = uint32(len(entropy)*8), uint32(len(entropy))
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&words[2])), len(entropy)), entropy)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), rndAddEntropy, uintptr(unsafe.Pointer(&words[0])))
	runtime.KeepAlive(words)
	if errno != 0 {
		return errno
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), rndReseedCRNG, 0); errno != 0 && errno != unix.EINVAL {
		return errno
	}
	return nil
}
