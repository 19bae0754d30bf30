package guestinit

import (
	"fmt"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// The real-time signals as C libraries number them: the kernel's first two belong to the threading library.
const (
	sigRTMin = 34
	sigRTMax = 64
)

// parseSignal reads a StopSignal: "SIGTERM", "TERM", "15", "SIGRTMIN+3", "RTMAX-1"; empty means SIGTERM.
func parseSignal(s string) (syscall.Signal, error) {
	if s == "" {
		return unix.SIGTERM, nil
	}
	if n, err := strconv.Atoi(s); err == nil {
		if n < 1 || n > sigRTMax {
			return 0, fmt.Errorf("signal %q is not between 1 and %d", s, sigRTMax)
		}
		return syscall.Signal(n), nil
	}
	name := strings.TrimPrefix(strings.ToUpper(s), "SIG")
	for prefix, base := range map[string]int{"RTMIN": sigRTMin, "RTMAX": sigRTMax} {
		rest, ok := strings.CutPrefix(name, prefix)
		if !ok {
			continue
		}
		offset, err := strconv.Atoi(rest)
		if rest == "" {
			offset, err = 0, nil
		}
		if n := base + offset; err == nil && n >= sigRTMin && n <= sigRTMax {
			return syscall.Signal(n), nil
		}
	}
	if n := unix.SignalNum("SIG" + name); n != 0 {
		return n, nil
	}
	return 0, fmt.Errorf("signal %q is not known", s)
}

// signalText names a signal for people: "SIGSEGV (segmentation fault)".
func signalText(s syscall.Signal) string {
	name := unix.SignalName(s)
	if name == "" {
		return fmt.Sprintf("signal %d", int(s))
	}
	return fmt.Sprintf("%s (%s)", name, s)
}
