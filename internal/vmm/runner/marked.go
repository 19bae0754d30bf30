package runner

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"

	"imp.dev/imp/internal/process"
)

type marked struct {
	name     string
	identity process.Identity
}

// findMarked looks through the process table for the mark of the run called name, or of any run for "". It is the stand-in for
// cgroups where there are none; other users' processes cannot be looked at and are not ours.
func (r *Runner) findMarked(name string) ([]marked, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("listing processes: %w", err)
	}
	var found []marked
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		// The identity first: if the pid changes hands afterwards, the identity matches nobody.
		id, err := process.Identify(pid)
		if err != nil {
			continue
		}
		if of, ok := r.markOf(e.Name()); ok && (name == "" || name == of) {
			found = append(found, marked{name: of, identity: id})
		}
	}
	return found, nil
}

// markOf gives the name of the run that a process is, by its environment or by the argument that stands in for it.
func (r *Runner) markOf(pid string) (name string, ok bool) {
	env, err := os.ReadFile("/proc/" + pid + "/environ")
	if err != nil {
		return "", false
	}
	for _, v := range bytes.Split(env, []byte{0}) {
		if name, ok := strings.CutPrefix(string(v), r.mark("")); ok {
			return name, true
		}
	}
	if r.IDFlag == "" {
		return "", false
	}
	line, err := os.ReadFile("/proc/" + pid + "/cmdline")
	if err != nil {
		return "", false
	}
	args := bytes.Split(line, []byte{0})
	for i := 1; i < len(args); i++ {
		if string(args[i-1]) == r.IDFlag {
			return strings.CutPrefix(string(args[i]), r.ID(""))
		}
	}
	return "", false
}
