package chaos

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// vmm is one live VMM process, as /proc has it.
type vmm struct {
	pid   int
	start string // field 22 of stat: with pid it names the process
	uid   string // of the VM
}

// alive asks /proc again. A process that has ended but was not waited for is not alive.
func (p vmm) alive() bool {
	state, start := stat(p.pid)
	return start == p.start && state != "Z" && state != "X"
}

func (p vmm) signal(sig syscall.Signal) error { return syscall.Kill(p.pid, sig) }

// stat gives state and start time of a process; empty when it is gone.
func stat(pid int) (state, start string) {
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", ""
	}
	_, rest, _ := strings.Cut(string(content[max(0, bytes.LastIndexByte(content, ')')):]), " ")
	fields := strings.Fields(rest)
	if len(fields) < 20 {
		return "", ""
	}
	return fields[0], fields[19]
}

// reality looks at the VMMs of the nodes of one server, not at what anybody says of them.
type reality struct {
	instances map[string]bool // ids of the runtimes

	mu    sync.Mutex
	known map[int]vmm // by pid; uid "" for processes that are no VMMs of ours
	last  map[string][]vmm
	seen  map[string]time.Time // when a VM's process was last seen alive
	at    time.Time            // of the last look
}

// newReality reads which runtimes' processes are meant: each marks its VMMs' environment with its id and the VM's UID.
func newReality(stateDirs []string) (*reality, error) {
	r := &reality{instances: map[string]bool{}, known: map[int]vmm{}, last: map[string][]vmm{}, seen: map[string]time.Time{}}
	for _, dir := range stateDirs {
		id, err := os.ReadFile(filepath.Join(dir, "instance"))
		if err != nil {
			return nil, fmt.Errorf("reading the id of a runtime: %w", err)
		}
		r.instances[strings.TrimSpace(string(id))] = true
	}
	return r, nil
}

// look scans /proc and gives the live VMMs by VM.
func (r *reality) look() map[string][]vmm {
	r.mu.Lock()
	defer r.mu.Unlock()
	entries, _ := os.ReadDir("/proc")
	now := map[int]vmm{}
	byVM := map[string][]vmm{}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		p, ok := r.identify(pid)
		if !ok {
			continue
		}
		now[pid] = p
		if p.uid != "" && p.alive() {
			byVM[p.uid] = append(byVM[p.uid], p)
		}
	}
	r.known, r.last, r.at = now, byVM, time.Now()
	for uid := range byVM {
		r.seen[uid] = r.at
	}
	return byVM
}

// identify reads a process's mark. A launcher's child gets it only with its exec, so what is not marked is asked again while it is
// young; processes that are none of ours are mostly old, and threads of the kernel have no environment.
func (r *reality) identify(pid int) (vmm, bool) {
	if p, ok := r.known[pid]; ok && p.uid != "" {
		if _, start := stat(pid); start == p.start {
			return p, true
		}
	}
	_, start := stat(pid)
	if start == "" {
		return vmm{}, false
	}
	environment, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	return vmm{pid: pid, start: start, uid: r.marked(environment)}, true
}

// marked gives the VM's UID of IMP_RUN=INSTANCE/DRIVER/UID.
func (r *reality) marked(environment []byte) string {
	for _, variable := range bytes.Split(environment, []byte{0}) {
		value, ok := bytes.CutPrefix(variable, []byte("IMP_RUN="))
		if !ok {
			continue
		}
		parts := strings.SplitN(string(value), "/", 3)
		if len(parts) == 3 && r.instances[parts[0]] {
			return parts[2]
		}
	}
	return ""
}

// of gives the VMMs of a VM as they were at the last look, less those that have ended since.
func (r *reality) of(uid string) (live []vmm) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.last[uid] {
		if p.alive() {
			live = append(live, p)
		}
	}
	return live
}

// missingFor says how long no process of the VM has been seen, 0 while there is one. One that was never seen counts from since.
func (r *reality) missingFor(uid string, since time.Time) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.last[uid]) > 0 {
		return 0
	}
	last := r.seen[uid]
	if last.Before(since) {
		last = since
	}
	return r.at.Sub(last)
}

// starts counts how often the workload of a VM says that it was started, over the consoles that the nodes keep of it.
func starts(stateDirs []string, uid string) int {
	n := 0
	for _, dir := range stateDirs {
		content, _ := os.ReadFile(filepath.Join(dir, "vm", uid, "console.log"))
		n += bytes.Count(content, []byte(strings.TrimSpace(StartedWord)))
	}
	return n
}

// Processes gives the pid of each VM's live VMM on the node with this state directory, by the VM's UID. Two of one VM are an error.
func Processes(stateDir string) (map[string]int, error) {
	r, err := newReality([]string{stateDir})
	if err != nil {
		return nil, err
	}
	pids := map[string]int{}
	for uid, live := range r.look() {
		if len(live) > 1 && live[0].alive() && live[1].alive() {
			return nil, fmt.Errorf("VM %s has two live VMMs, %d and %d", uid, live[0].pid, live[1].pid)
		}
		pids[uid] = live[0].pid
	}
	return pids, nil
}
