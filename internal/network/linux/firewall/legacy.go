package firewall

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"imp.dev/imp/internal/netns"
)

// Options and structures of legacy iptables (linux/netfilter_ipv4/ip_tables.h), offsets in bytes.
const (
	getInfo, getEntries = 64, 65
	nameBytes           = 32 // of a table
	infoBytes           = 84 // name, hooks, entry by hook, underflow by hook, number of entries, size
	infoHooks           = 32
	infoForward         = 44 // where the hook's chain begins
	infoSize            = 80
	entriesHeader       = 40 // name, size
	forwardHook         = 2
)

// legacyBlocks names the tables of iptables' legacy variant that drop what our veths forward: nftables neither sees nor amends
// them. A table is named only if our traffic surely ends in it, or if it cannot be read.
func legacyBlocks(ns int, prefix string) (blocked []string, err error) {
	err = netns.Inside(ns, func() error {
		// A table is in the list once somebody has used it. Asking for another would make it, and its hooks.
		names, err := os.ReadFile("/proc/thread-self/net/ip_tables_names")
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("listing tables of legacy iptables: %w", err)
		}
		for name := range strings.FieldsSeq(string(names)) {
			t, err := readLegacy(name)
			if err != nil {
				blocked = append(blocked, fmt.Sprintf("ip %s FORWARD: it is of legacy iptables, may drop, and cannot be read: %v", name, err))
				continue
			}
			outside, err := defaultDevice()
			if err != nil {
				return err
			}
			ours, others := device{name: prefix, begins: true}, device{name: outside}
			if t.ends(passage{in: ours, out: others, opens: true}) || t.ends(passage{in: others, out: ours}) {
				blocked = append(blocked, fmt.Sprintf("ip %s FORWARD: it is of legacy iptables and drops what guests send or are answered; what helps is "+
					"iptables-legacy -t %s -I FORWARD -i %s+ -j ACCEPT, and the same with -o", name, name, prefix))
			}
		}
		return nil
	})
	return blocked, err
}

// readLegacy gives a table as the kernel has it in the namespace of the calling thread.
func readLegacy(name string) (legacy, error) {
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return legacy{}, fmt.Errorf("opening socket: %w", err)
	}
	defer unix.Close(socket) //nolint:errcheck // nothing was written
	for {
		info := append([]byte(name), make([]byte, infoBytes-len(name))...)
		if err := getOption(socket, getInfo, info); err != nil {
			return legacy{}, fmt.Errorf("reading table: %w", err)
		}
		if number(info[infoHooks:])&(1<<forwardHook) == 0 {
			return legacy{}, nil
		}
		entries := append([]byte(name), make([]byte, entriesHeader-len(name)+int(number(info[infoSize:])))...)
		copy(entries[nameBytes:], info[infoSize:])
		switch err := getOption(socket, getEntries, entries); {
		case errors.Is(err, unix.EAGAIN): // it has become longer or shorter between the two questions
			continue
		case err != nil:
			return legacy{}, fmt.Errorf("reading rules: %w", err)
		}
		return legacy{rules: entries[entriesHeader:], forward: int(number(info[infoForward:]))}, nil
	}
}

// getOption fills the buffer, which also holds the question.
func getOption(socket, option int, buffer []byte) error {
	length := uint32(len(buffer)) //nolint:gosec // a table of 4 GiB is none
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(socket), unix.SOL_IP, uintptr(option),
		uintptr(unsafe.Pointer(unsafe.SliceData(buffer))), uintptr(unsafe.Pointer(&length)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// defaultDevice gives the device that packets to the outside leave by, "" where there is none.
func defaultDevice() (string, error) {
	routes, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Dst: nil}, netlink.RT_FILTER_DST)
	if err != nil {
		return "", fmt.Errorf("looking for the default route: %w", err)
	}
	for _, r := range routes {
		if link, err := netlink.LinkByIndex(r.LinkIndex); err == nil {
			return link.Attrs().Name, nil
		}
	}
	return "", nil
}
