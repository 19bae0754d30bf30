package guestinit

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// stopWord is the word on the kernel's command line that says how the machine is stopped: imp.stop=poweroff (the default; QEMU) or
// imp.stop=reboot (Firecracker on x86, where only a reboot ends the VMM).
const stopWord = "imp.stop="

// stopByReboot reads the kernel's command line.
func stopByReboot(cmdline string) bool {
	reboot := false
	for _, word := range strings.Fields(cmdline) {
		if v, ok := strings.CutPrefix(word, stopWord); ok {
			reboot = v == "reboot"
		}
	}
	return reboot
}

// loadModules loads what was packed, in its order. A module that fails is told in the log and passed over: what needs it will say more
// precisely what is missing.
func loadModules(dir string, log *logger) {
	names, err := filepath.Glob(filepath.Join(dir, "*.ko"))
	if err != nil {
		return
	}
	slices.Sort(names)
	for _, name := range names {
		if err := loadModule(name); err != nil {
			log.Printf("loading module %s: %v", filepath.Base(name), err)
		}
	}
}

func loadModule(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	return nil
}

// kernelLog reads the kernel's messages from a point in time on.
type kernelLog struct{ fd int }

// openKernelLog begins at the messages to come. Where it cannot be opened there are none.
func openKernelLog() *kernelLog {
	fd, err := unix.Open("/dev/kmsg", unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return &kernelLog{-1}
	}
	_, _ = unix.Seek(fd, 0, unix.SEEK_END)
	return &kernelLog{fd}
}

func (k *kernelLog) close() {
	if k.fd >= 0 {
		closeFD(k.fd)
	}
}

// last gives the last n messages since the log was opened.
func (k *kernelLog) last(n int) (lines []string) {
	buf := make([]byte, 8<<10)
	for k.fd >= 0 {
		size, err := unix.Read(k.fd, buf)
		if errors.Is(err, unix.EPIPE) { // overwritten meanwhile
			continue
		}
		if err != nil || size <= 0 {
			break
		}
		if text := kernelMessage(buf[:size]); text != "" {
			lines = append(lines, text)
		}
	}
	return lines[max(0, len(lines)-n):]
}

// kernelMessage gives the text of one record of /dev/kmsg: "prio,seq,usec,flags;text\n key=value…".
func kernelMessage(record []byte) string {
	_, text, ok := bytes.Cut(record, []byte{';'})
	if !ok {
		return ""
	}
	text, _, _ = bytes.Cut(text, []byte{'\n'})
	return string(text)
}

// oomKills gives how many processes this kernel has killed for want of memory.
func oomKills() int64 {
	content, err := os.ReadFile("/proc/vmstat")
	if err != nil {
		return 0
	}
	return vmstatValue(string(content), "oom_kill")
}

func vmstatValue(content, key string) int64 {
	for line := range strings.Lines(content) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if name == key {
			n, _ := strconv.ParseInt(value, 10, 64)
			return n
		}
	}
	return 0
}

// bootMillis is the time since the kernel began, in milliseconds.
func bootMillis() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		return 0
	}
	return t.Nano() / 1e6
}

// readTrimmed gives a small file's content without surrounding space, or "".
func readTrimmed(path string) string {
	content, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(content))
}

// logger prints the guest's own lines on the console, through the feed, so that it never waits.
type logger struct{ feed *feed }

// Printf prints one line.
func (l *logger) Printf(format string, args ...any) {
	l.feed.Line("imp-guest: " + fmt.Sprintf(format, args...))
}
