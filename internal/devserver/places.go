package devserver

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// Places are where one development server keeps its things. Two servers differ by Dir, and then share nothing.
type Places struct {
	// Dir is what the user gave, absolute. It keeps the logs and the registry's images; the rest of it ends with the server.
	Dir string
	// Data holds what nodes keep on disk. It is below Dir, unless other users cannot reach that (a home folder of mode
	// 0700): VMMs run as users of their own.
	Data string
	// Run holds sockets, tokens and what must be on a tmpfs. It is short, because a socket's path may have 107 bytes.
	Run string
	// Cgroup is the path, from each hierarchy's root, below which every VM's cgroup lies.
	Cgroup string
	// Namespaces is what the names of the nodes' network namespaces begin with, before a "-".
	Namespaces string
}

// PlacesOf computes the places of the server over dir. It touches nothing.
func PlacesOf(dir string) (Places, error) {
	absolute, err := filepath.Abs(dir)
	if err != nil {
		return Places{}, fmt.Errorf("reading --dir: %w", err)
	}
	if parent, err := filepath.EvalSymlinks(filepath.Dir(absolute)); err == nil {
		absolute = filepath.Join(parent, filepath.Base(absolute)) // one folder, one server, whatever way leads there
	}
	sum := sha256.Sum256([]byte(absolute))
	hash := hex.EncodeToString(sum[:4])
	name := "imp-dev-" + hash
	p := Places{
		Dir: absolute, Data: filepath.Join(absolute, "data"), Run: "/run/" + name, Cgroup: "/" + name,
		Namespaces: "impdev-" + hash, // not imp-…, which are the runtimes' own
	}
	if !reachableByOthers(filepath.Dir(absolute)) {
		p.Data = "/var/lib/" + name
	}
	return p, nil
}

// reachableByOthers says whether every existing folder on the way to dir may be passed by any user.
func reachableByOthers(dir string) bool {
	for ; ; dir = filepath.Dir(dir) {
		if info, err := os.Stat(dir); err == nil && info.Mode()&0o001 == 0 {
			return false
		}
		if dir == "/" {
			return true
		}
	}
}

// Kubeconfig is the admin's.
func (p Places) Kubeconfig() string { return filepath.Join(p.Dir, "kubeconfig") }

// Logs holds one file per process.
func (p Places) Logs() string { return filepath.Join(p.Dir, "log") }

// RuntimeSocket of a node.
func (p Places) RuntimeSocket(node string) string {
	return filepath.Join(p.runDir(node), "runtime.sock")
}

func (p Places) runDir(node string) string   { return filepath.Join(p.Run, node) }
func (p Places) stateDir(node string) string { return filepath.Join(p.Data, node) }
func (p Places) registry() string            { return filepath.Join(p.Dir, "registry") }
func (p Places) boot() string                { return filepath.Join(p.Data, "boot") }

// credentials is the folder with the kubeconfig and the token of one program; owner is who may read it.
func (p Places) credentials(program string) string {
	return filepath.Join(p.Run, "credentials", program)
}

// lock makes sure that one server at a time works over Dir. The lock ends with the process, so a killed one leaves none.
func (p Places) lock() (unlock func(), err error) {
	path := filepath.Join(p.Dir, ".lock")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("opening lock: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		holder, _ := os.ReadFile(path)
		_ = f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("imp-dev already runs over %s (pid %s); stop it or give another --dir",
				p.Dir, strings.TrimSpace(string(holder)))
		}
		return nil, fmt.Errorf("locking %s: %w", path, err)
	}
	if err := f.Truncate(0); err == nil {
		_, _ = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	return func() { _ = os.Remove(path); _ = f.Close() }, nil
}
