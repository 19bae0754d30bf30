// The smallest guest that does as it is told: PID 1 of the machines in the driver's tests. Words of the kernel's command line
// choose what it does once a line arrives on the port.
package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/initramfs/layout"
)

func main() {
	for _, m := range [][2]string{{"devtmpfs", "/dev"}, {"proc", "/proc"}, {"sysfs", "/sys"}} {
		_ = os.MkdirAll(m[1], 0o755)
		_ = unix.Mount(m[0], m[1], m[0], 0, "")
	}
	loadModules()
	cmdline, _ := os.ReadFile("/proc/cmdline")
	told := func(word string) bool {
		return strings.Contains(" "+strings.TrimSpace(string(cmdline))+" ", " imptest="+word+" ")
	}
	if told("disks") {
		disks()
	}
	if told("nics") {
		nics()
	}
	if told("memory") {
		touchAll()
	}
	fmt.Println("test guest is up")
	if !told("atonce") {
		awaitLine()
		time.Sleep(400 * time.Millisecond)
	}
	switch {
	case told("poweroff"):
		die(unix.LINUX_REBOOT_CMD_POWER_OFF)
	case told("reboot"):
		die(unix.LINUX_REBOOT_CMD_RESTART)
	case told("panic"):
		_ = os.WriteFile("/proc/sysrq-trigger", []byte("c"), 0)
	}
	select {}
}

func die(how int) {
	unix.Sync()
	fmt.Println(unix.Reboot(how))
}

func loadModules() {
	files, _ := filepath.Glob("/" + layout.Modules + "/*.ko")
	sort.Strings(files)
	for _, path := range files {
		f, err := os.Open(path)
		if err != nil {
			continue
		}
		if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil {
			fmt.Println("module", path, err)
		}
		_ = f.Close()
	}
}

// awaitLine reads the port, whose read gives nothing while no host is connected.
func awaitLine() {
	var port string
	for port == "" {
		names, _ := filepath.Glob("/sys/class/virtio-ports/*/name")
		for _, n := range names {
			b, _ := os.ReadFile(n)
			if strings.TrimSpace(string(b)) == guestv1.PortName {
				port = "/dev/" + filepath.Base(filepath.Dir(n))
			}
		}
		time.Sleep(20 * time.Millisecond)
	}
	fd, err := unix.Open(port, unix.O_RDWR, 0)
	if err != nil {
		fmt.Println("port", err)
		return
	}
	b := make([]byte, 256)
	for {
		n, _ := unix.Read(fd, b)
		if n > 0 && bytes.ContainsRune(b[:n], '\n') {
			_, _ = unix.Write(fd, []byte("ok\n"))
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func disks() {
	names, _ := filepath.Glob("/sys/block/vd*/serial")
	for _, n := range names {
		serial, _ := os.ReadFile(n)
		dev := "/dev/" + filepath.Base(filepath.Dir(n))
		b := make([]byte, 5)
		f, err := os.OpenFile(dev, os.O_RDONLY, 0)
		if err == nil {
			_, err = f.Read(b)
		}
		fmt.Printf("disk %s holds %q %v\n", serial, b, err)
		w, err := os.OpenFile(dev, os.O_RDWR, 0)
		if err == nil {
			if _, err = w.Write([]byte("guest")); err == nil {
				err = w.Sync()
			}
		}
		fmt.Printf("disk %s written %v\n", serial, err == nil)
	}
}

func nics() {
	found, _ := filepath.Glob("/sys/class/net/*/address")
	for _, f := range found {
		b, _ := os.ReadFile(f)
		fmt.Println("nic", strings.TrimSpace(string(b)))
	}
}

// touchAll dirties nearly all memory, so that the host's side is at its largest.
func touchAll() {
	var info unix.Sysinfo_t
	_ = unix.Sysinfo(&info)
	n := int(info.Freeram) - 24<<20
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		fmt.Println("memory", err)
		return
	}
	for i := 0; i < len(b); i += 4096 {
		b[i] = 1
	}
	fmt.Println("touched", n>>20, "MiB")
}
