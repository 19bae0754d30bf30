package qemu

import (
	"fmt"
	"hash/fnv"
	"os"
	"strconv"
	"sync"
	"syscall"

	"imp.dev/imp/internal/vmm/runner"
)

// uidPool gives each VM a user of its own, so that one guest that broke out of its VMM finds nothing of another's. What is in
// use is read off the living processes: there is nothing to lose with the runtime.
type uidPool struct {
	base, count int
	runner      *runner.Runner

	mu       sync.Mutex
	reserved map[int]bool // taken, but its process does not exist yet
}

func newUIDPool(base, count int, r *runner.Runner) *uidPool {
	return &uidPool{base: base, count: max(count, 1), runner: r, reserved: map[int]bool{}}
}

// take gives a uid for the run called name; release ends the reservation once the process exists or will not.
func (p *uidPool) take(name string) (uid int, release func(), err error) {
	if p.base <= 0 && os.Geteuid() == 0 {
		return 0, nil, fmt.Errorf("choosing a user for the VMM: uid %d would be root's", p.base)
	}
	if p.count == 1 {
		return p.base, func() {}, nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	used, err := p.used()
	if err != nil {
		return 0, nil, fmt.Errorf("choosing a user for the VMM: %w", err)
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(name))
	first := int(h.Sum32() % uint32(p.count))
	for i := range p.count {
		uid := p.base + (first+i)%p.count
		if used[uid] || p.reserved[uid] {
			continue
		}
		p.reserved[uid] = true
		return uid, func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			delete(p.reserved, uid)
		}, nil
	}
	return 0, nil, fmt.Errorf("choosing a user for the VMM: all %d from %d on are in use", p.count, p.base)
}

func (p *uidPool) used() (map[int]bool, error) {
	pids, err := p.runner.PIDs()
	if err != nil {
		return nil, err
	}
	used := map[int]bool{}
	for _, pid := range pids {
		info, err := os.Stat("/proc/" + strconv.Itoa(pid))
		if err != nil {
			continue // ended meanwhile
		}
		if st, ok := info.Sys().(*syscall.Stat_t); ok {
			used[int(st.Uid)] = true
		}
	}
	return used, nil
}
