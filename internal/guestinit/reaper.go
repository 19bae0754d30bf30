package guestinit

import (
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// reaper takes every child that ends: the workload's process, and the orphans that process 1 inherits. There is one place that waits,
// so no child is started by os/exec, whose own wait would race with it.
type reaper struct {
	mu      sync.Mutex
	waiting map[int]chan<- unix.WaitStatus
}

func newReaper() *reaper { return &reaper{waiting: map[int]chan<- unix.WaitStatus{}} }

// run sweeps at every signal, not only SIGCHLD: that one is lost if it comes while the channel is full of others.
func (r *reaper) run(signals <-chan os.Signal) {
	for range signals {
		r.sweep()
	}
}

// start runs launch, which starts a child, and gives the channel on which the child's status will come. Nothing is reaped meanwhile,
// so that a child that ends at once is not missed.
func (r *reaper) start(launch func() (int, error)) (int, <-chan unix.WaitStatus, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	pid, err := launch()
	if err != nil {
		return 0, nil, err
	}
	status := make(chan unix.WaitStatus, 1)
	r.waiting[pid] = status
	return pid, status, nil
}

// signal sends s to a child that has not been reaped; its number may belong to somebody else afterwards.
func (r *reaper) signal(pid int, s syscall.Signal) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.waiting[pid]; !ok {
		return unix.ESRCH
	}
	return unix.Kill(pid, s)
}

// sweep reaps whatever has ended, and says whether no child is left.
func (r *reaper) sweep() (none bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return true
		case pid <= 0:
			return false
		}
		if c, ok := r.waiting[pid]; ok {
			delete(r.waiting, pid)
			c <- status
		}
	}
}
