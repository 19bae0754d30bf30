package process

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

func isNoProcess(err error) bool { return errors.Is(err, syscall.ESRCH) }

// pidfd refers to one process for good. It is waited for through Go's poller, so a thousand of them cost no thread.
type pidfd struct {
	file *os.File
}

func openPidfd(pid int) (*pidfd, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if isNoProcess(err) || errors.Is(err, syscall.EINVAL) { // EINVAL: no leader of a process
		return nil, ErrGone
	}
	if err != nil {
		return nil, fmt.Errorf("opening pidfd of %d: %w", pid, err)
	}
	return &pidfd{file: os.NewFile(uintptr(fd), "pidfd")}, nil
}

func (p *pidfd) signal(sig syscall.Signal) error {
	raw, err := p.file.SyscallConn()
	if err != nil {
		return fmt.Errorf("sending signal: %w", err)
	}
	var sent error
	if err := raw.Control(func(fd uintptr) { sent = unix.PidfdSendSignal(int(fd), sig, nil, 0) }); err != nil {
		return fmt.Errorf("sending signal: %w", err)
	}
	if isNoProcess(sent) {
		return ErrGone
	}
	if sent != nil {
		return fmt.Errorf("sending signal: %w", sent)
	}
	return nil
}

// wait returns nil when the process has ended, or an error once the pidfd is closed.
func (p *pidfd) wait() error {
	raw, err := p.file.SyscallConn()
	if err != nil {
		return fmt.Errorf("waiting for process: %w", err)
	}
	var failed error
	err = raw.Read(func(fd uintptr) bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		if err != nil && !errors.Is(err, syscall.EINTR) {
			failed = err
			return true
		}
		return n > 0
	})
	return errors.Join(err, failed)
}

func (p *pidfd) close() error { return p.file.Close() }
