// Package cgroup gives each run a control group of its own: limits, accounting, and a name under which everything that
// belongs to the run is found, whatever else is lost. It speaks cgroup v1, v2, and the hybrid of both.
//
//	<mount of a hierarchy>/<parent>/imp/INSTANCE/NAME      the same path in every hierarchy that is used
package cgroup

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Controllers that are used where the host has them.
const (
	controllerMemory  = "memory"
	controllerCPU     = "cpu"
	controllerCPUAcct = "cpuacct"
	controllerPids    = "pids"
)

// Versions of a Layout.
const (
	V1     = "v1"
	V2     = "v2"
	Hybrid = "hybrid"
)

// hierarchy is one mounted cgroup tree with the controllers that are used from it.
type hierarchy struct {
	mount       string
	v2          bool
	controllers []string
}

func (h hierarchy) has(controller string) bool { return slices.Contains(h.controllers, controller) }

// layout is how the host mounts its cgroups.
type layout struct {
	version     string
	hierarchies []hierarchy
	missing     []string
}

// ErrNone says that the host mounts no cgroups at all.
var ErrNone = errors.New("no cgroup hierarchy is mounted")

// detect reads root/proc/self/mountinfo and, for v2, what the mount offers. root is "" but in tests.
func detect(root string) (layout, error) {
	mounts, err := cgroupMounts(root)
	if err != nil {
		return layout{}, err
	}
	var l layout
	seen := map[string]bool{}
	v1, v2 := 0, 0
	for _, m := range mounts {
		h := hierarchy{mount: filepath.Join(root, m.point), v2: m.v2}
		offered := m.options
		if m.v2 {
			b, err := os.ReadFile(filepath.Join(h.mount, "cgroup.controllers"))
			if err != nil {
				return layout{}, fmt.Errorf("reading controllers of %s: %w", h.mount, err)
			}
			offered = strings.Fields(string(b))
			v2++
		}
		for _, c := range wanted(m.v2) {
			if !seen[c] && slices.Contains(offered, c) {
				seen[c] = true
				h.controllers = append(h.controllers, c)
			}
		}
		if !m.v2 && len(h.controllers) > 0 {
			v1++
		}
		// The v2 tree is used without controllers, too: it kills a group in one step.
		if len(h.controllers) > 0 || m.v2 {
			l.hierarchies = append(l.hierarchies, h)
		}
	}
	switch {
	case v1 > 0 && v2 > 0:
		l.version = Hybrid
	case v2 > 0:
		l.version = V2
	case v1 > 0:
		l.version = V1
	default:
		return layout{}, ErrNone
	}
	for _, c := range []string{controllerMemory, controllerCPU, controllerPids} {
		if !seen[c] {
			l.missing = append(l.missing, c)
		}
	}
	return l, nil
}

func wanted(v2 bool) []string {
	if v2 { // cpuacct is part of every v2 group
		return []string{controllerMemory, controllerCPU, controllerPids}
	}
	return []string{controllerMemory, controllerCPU, controllerCPUAcct, controllerPids}
}

type mount struct {
	point   string
	v2      bool
	options []string
}

// cgroupMounts reads proc(5)'s mountinfo: "… root point options optional… - type source super-options". The last mount on a
// point is the one that is seen.
func cgroupMounts(root string) ([]mount, error) {
	f, err := os.Open(filepath.Join(root, "/proc/self/mountinfo"))
	if err != nil {
		return nil, fmt.Errorf("reading mounts: %w", err)
	}
	defer f.Close()
	var all []mount
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		left, right, ok := strings.Cut(lines.Text(), " - ")
		fields, super := strings.Fields(left), strings.Fields(right)
		if !ok || len(fields) < 5 || len(super) < 3 {
			continue
		}
		if super[0] != "cgroup" && super[0] != "cgroup2" {
			continue
		}
		m := mount{point: unescape(fields[4]), v2: super[0] == "cgroup2", options: strings.Split(super[2], ",")}
		all = slices.DeleteFunc(all, func(o mount) bool { return o.point == m.point })
		all = append(all, m)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("reading mounts: %w", err)
	}
	return all, nil
}

// unescape undoes mountinfo's octal escapes.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}
