package guestinit

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	guestv1 "imp.dev/imp/api/guest/v1"
)

// port is the guest's end of the virtio-serial port. While no host is connected the kernel answers reads with 0 bytes at once, again
// and again; a read then parks on the poller, which a host's connection wakes. Once a session runs, 0 bytes mean that the
// host has gone.
type port struct {
	*os.File
	raw       syscall.RawConn
	connected atomic.Bool
}

// openPort finds the port by its name. A second opener gets EBUSY.
func openPort() (*port, error) {
	names, err := filepath.Glob("/sys/class/virtio-ports/*/name")
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if readTrimmed(name) == guestv1.PortName {
			return openPortFile("/dev/" + filepath.Base(filepath.Dir(name)))
		}
	}
	return nil, fmt.Errorf("no virtio-serial port named %s", guestv1.PortName)
}

func openPortFile(path string) (*port, error) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	raw, err := f.SyscallConn()
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return &port{File: f, raw: raw}, nil
}

// Read implements io.Reader.
func (p *port) Read(b []byte) (n int, err error) {
	if len(b) == 0 {
		return 0, nil
	}
	waitErr := p.raw.Read(func(fd uintptr) bool {
		n, err = unix.Read(int(fd), b)
		switch {
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR):
			return false
		case n == 0 && err == nil && !p.connected.Load():
			return false
		}
		return true
	})
	switch {
	case waitErr != nil:
		return 0, waitErr
	case err != nil:
		return 0, err
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}
