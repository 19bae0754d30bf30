package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Options of a Tree.
type Options struct {
	// Parent is the group, relative to the mounts, below which everything is made; "" is their root.
	Parent string
	// Instance is the runtime's id; groups of other instances are never listed or touched.
	Instance string
	// Root is put before /proc and every mount point; for tests.
	Root string
}

// Tree is one runtime's part of the host's cgroups.
type Tree struct {
	layout layout
	base   string // <parent>/imp/INSTANCE
}

// validName keeps a name one path element: it can climb nowhere and meets no file of the kernel's ("memory.max" has a dot).
var validName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]{0,127}$`)

// Open looks at the host. It makes nothing.
func Open(o Options) (*Tree, error) {
	if !validName.MatchString(o.Instance) {
		return nil, fmt.Errorf("opening cgroups: bad instance name %q", o.Instance)
	}
	l, err := detect(o.Root)
	if err != nil {
		return nil, fmt.Errorf("opening cgroups: %w", err)
	}
	return &Tree{layout: l, base: filepath.Join("/", o.Parent, "imp", o.Instance)}, nil
}

// Version is V1, V2 or Hybrid.
func (t *Tree) Version() string { return t.layout.version }

// Missing lists the controllers among memory, cpu and pids that the host does not have, or does not hand down to us as found
// by Create. Their limits are not in force.
func (t *Tree) Missing() []string { return slices.Clone(t.layout.missing) }

// Limits of a group. 0 sets no limit.
type Limits struct {
	MemoryBytes int64
	Pids        int64
	// CPUs is how many processors' worth of time, in thousandths.
	MilliCPU int64
}

// Create makes the group name with its limits, or sets them on an existing one. A limit whose controller is missing is
// left out. On an error nothing of a new group stays.
func (t *Tree) Create(name string, l Limits) (*Group, error) {
	g, err := t.Group(name)
	if err != nil {
		return nil, err
	}
	for _, h := range t.layout.hierarchies {
		if err := t.makeDir(h, name); err != nil {
			_ = g.removeDirs()
			return nil, fmt.Errorf("making cgroup %s: %w", name, err)
		}
	}
	if err := g.limit(l); err != nil {
		_ = g.removeDirs()
		return nil, fmt.Errorf("limiting cgroup %s: %w", name, err)
	}
	return g, nil
}

// makeDir makes the directories from the mount down. On v2 each level has to hand its controllers to the next one before
// that can use them; a level that refuses (it holds processes itself) leaves the limits out, told by the group's missing files.
func (t *Tree) makeDir(h hierarchy, name string) error {
	const tries = 20
	var err error
	for range tries {
		// Whoever removed the last group of an instance, or the last instance, took the directory above away as well.
		if err = t.tryMakeDir(h, name); !errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	return err
}

func (t *Tree) tryMakeDir(h hierarchy, name string) error {
	dir := h.mount
	for _, part := range strings.Split(strings.Trim(filepath.Join(t.base, name), "/"), "/") {
		if h.v2 {
			for _, c := range h.controllers {
				_ = os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+c), 0)
			}
		}
		dir = filepath.Join(dir, part)
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return nil
}

// Path of the group name below each mount, for messages.
func (t *Tree) Path(name string) string { return filepath.Join(t.base, name) }

// Group names a group that may or may not exist.
func (t *Tree) Group(name string) (*Group, error) {
	if !validName.MatchString(name) {
		return nil, fmt.Errorf("naming cgroup: bad name %q", name)
	}
	return &Group{tree: t, name: name}, nil
}

// List gives the names of all groups of this instance, in any hierarchy, sorted.
func (t *Tree) List() ([]string, error) {
	var names []string
	for _, h := range t.layout.hierarchies {
		entries, err := os.ReadDir(filepath.Join(h.mount, t.base))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("listing cgroups: %w", err)
		}
		for _, e := range entries {
			if e.IsDir() {
				names = append(names, e.Name())
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// Close removes the instance's own group, which goes with its last run in any case, where nothing was ever made in it or something
// went wrong; an error says that runs are left.
func (t *Tree) Close() error {
	var errs []error
	for _, h := range t.layout.hierarchies {
		errs = append(errs, t.removeEmpty(h))
	}
	return errors.Join(errs...)
}

// removeEmpty removes the instance's directory and the one shared with other instances, each only if nothing is in it.
func (t *Tree) removeEmpty(h hierarchy) error {
	if err := unix.Rmdir(filepath.Join(h.mount, t.base)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing cgroup %s: %w", t.base, err)
	}
	_ = unix.Rmdir(filepath.Join(h.mount, filepath.Dir(t.base)))
	return nil
}

func readInt(path string) (int64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
}

// readKey gives the number after key in a file of "key number" lines.
func readKey(path, key string) (int64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	for _, line := range strings.Split(string(b), "\n") {
		if name, value, ok := strings.Cut(line, " "); ok && name == key {
			return strconv.ParseInt(strings.TrimSpace(value), 10, 64)
		}
	}
	return 0, fmt.Errorf("%s has no %s: %w", path, key, fs.ErrNotExist)
}
