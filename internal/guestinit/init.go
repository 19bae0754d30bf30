// Package guestinit is the first process of a guest: it makes the machine out of an image's disk, runs one workload in it, tells
// the host how that ended, and stops the machine.
//
// The order, from top to bottom; the host's calls are on the right:
//
//	mounts, modules, reaper, port
//	                                  Hello
//	disks, overlay, new root,
//	devices, data paths, names, NICs  Configure
//	workload                          Start, Probe, Output, Stop
//	kill the rest, drain, marker      Wait
//	                                  Acknowledge
//	sync, unmount, power off
package guestinit

import (
	"context"
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"imp.dev/imp/internal/guest/server"
	"imp.dev/imp/internal/guest/wire"
	"imp.dev/imp/internal/initramfs/layout"
)

// acknowledgeLimit is how long an ended guest waits for a host to come for its result.
const acknowledgeLimit = 15 * time.Minute

// Run is the whole life of a guest. It must be process 1 and does not return.
func Run(version string) {
	born := bootMillis()
	// Every signal is caught: a workload that runs as root can send any to process 1, and one that the Go runtime treats as fatal
	// would end the guest (a kernel panic by any of HUP, INT, QUIT, … TERM: measured). Nothing reads the channel but the reaper.
	signals := make(chan os.Signal, 64)
	signal.Notify(signals)

	mountErr := mountEarly()
	console := newFeed(openConsole())
	log := &logger{console}
	if mountErr != nil {
		log.Printf("%v", mountErr)
	}
	// The kernel gives process 1 only 4096 open files as the most; servers expect what container engines give.
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 65536, Max: 1 << 20}); err != nil {
		log.Printf("raising the limit of open files: %v", err)
	}
	// Without this, Ctrl-Alt-Del (Firecracker's way to ask for a stop) resets the machine at once.
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_CAD_OFF); err != nil {
		log.Printf("disabling Ctrl-Alt-Del: %v", err)
	}
	cmdline := readTrimmed("/proc/cmdline")
	loadModules("/"+layout.Modules, log)

	r := newReaper()
	go r.run(signals)

	m := newMachine(version, born, stopByReboot(cmdline), console, log, r)
	go serve(m, log)
	m.untilStopped()
	m.stop()
}

// serve waits for hosts for ever, one after the other.
func serve(m *machine, log *logger) {
	const pause = 50 * time.Millisecond // after a failure, which would be repeated at once
	told := false
	for {
		p, err := openPort()
		if err != nil {
			if !told {
				log.Printf("waiting for the port to the host: %v", err)
				told = true
			}
			<-time.After(pause)
			continue
		}
		m.portOpened()
		conn, err := wire.Guest(p)
		if err != nil {
			_ = p.Close()
			<-time.After(pause)
			continue
		}
		p.connected.Store(true)
		_ = server.Serve(context.Background(), conn, m)
	}
}

// openConsole opens the console for the guest's own use. The descriptors the kernel gave stay as they are, for a panic's trace.
func openConsole() *os.File {
	fd, err := unix.Open("/dev/console", unix.O_WRONLY|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return os.Stderr
	}
	return os.NewFile(uintptr(fd), "/dev/console")
}
