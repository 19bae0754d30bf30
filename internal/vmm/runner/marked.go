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

// findMarked looks through the process table for environments with a variable that begins with prefix. It is the stand-in for
// cgroups where there are none; other users' processes cannot be looked at and are not ours.
func findMarked(prefix string) ([]marked, error) {
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
		env, err := os.ReadFile("/proc/" + e.Name() + "/environ")
		if err != nil {
			continue
		}
		for _, v := range bytes.Split(env, []byte{0}) {
			if name, ok := strings.CutPrefix(string(v), prefix); ok && (name == "" || strings.HasSuffix(prefix, "/")) {
				found = append(found, marked{name: name, identity: id})
			}
		}
	}
	return found, nil
}
