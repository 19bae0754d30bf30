package flatten

import (
	"fmt"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"imp.dev/imp/internal/image/oci/ext4"
)

const (
	whiteoutPrefix = ".wh."
	opaqueMarker   = ".wh..wh..opq"
	metaPrefix     = ".wh..wh." // aufs' own files: nothing to us
	maxSymlinks    = 40         // followed on the way to one entry, as the kernel's limit
)

// Tree is the result: what a container of the image would see.
type Tree struct {
	Root *ext4.Inode
	// Bytes of content, each inode counted once.
	Bytes int64

	limits  Limits
	sources []source // of every file ever made, in the order layers hold them; finish drops those that lost
}

// source says where the content of a file stands.
type source struct {
	inode        *ext4.Inode
	layer, entry int
}

func newTree(limits Limits) *Tree {
	return &Tree{Root: newDirectory(), limits: limits}
}

func newDirectory() *ext4.Inode {
	return &ext4.Inode{Mode: unix.S_IFDIR | 0o755, Children: map[string]*ext4.Inode{}}
}

// apply puts one layer on the tree: first what it hides, then what it brings.
func (t *Tree) apply(layer int, entries []entry) error {
	directories := map[string]bool{} // that this layer brings itself
	for i := range entries {
		if entries[i].mode&unix.S_IFMT == unix.S_IFDIR {
			directories[entries[i].name] = true
		}
	}
	for i := range entries {
		if err := t.hide(entries[i].name, directories); err != nil {
			return err
		}
	}
	for i := range entries {
		marker, err := isMarker(entries[i].name)
		if err != nil {
			return err
		}
		if marker {
			continue
		}
		if err := t.put(layer, &entries[i]); err != nil {
			return err
		}
	}
	return nil
}

// isMarker says whether an entry is only there for what it says about others. Nothing can stand below a whiteout.
func isMarker(name string) (bool, error) {
	parent, base := path.Split(name)
	for part := range strings.SplitSeq(parent, "/") {
		switch {
		case strings.HasPrefix(part, metaPrefix):
			return true, nil
		case strings.HasPrefix(part, whiteoutPrefix):
			return false, refuse("%s: a name below a whiteout", quote(name))
		}
	}
	return strings.HasPrefix(base, whiteoutPrefix), nil
}

// hide carries out a whiteout, and does nothing for other names.
func (t *Tree) hide(name string, directories map[string]bool) error {
	parent, base := path.Split(name)
	if !strings.HasPrefix(base, whiteoutPrefix) {
		return nil
	}
	hidden := strings.TrimPrefix(base, whiteoutPrefix)
	if base != opaqueMarker {
		if strings.HasPrefix(base, metaPrefix) {
			return nil
		}
		if hidden == "" || hidden == "." || hidden == ".." {
			return refuse("%s: a whiteout of nothing", quote(name))
		}
	}
	w := walker{tree: t, own: directories}
	dir, err := w.find(strings.TrimSuffix(parent, "/"))
	if err != nil || dir == nil {
		return err
	}
	if base == opaqueMarker {
		clear(dir.Children)
		return nil
	}
	delete(dir.Children, hidden)
	return nil
}

// put carries out an entry that is no whiteout.
func (t *Tree) put(layer int, e *entry) error {
	if e.name == "" {
		if e.mode&unix.S_IFMT != unix.S_IFDIR {
			return refuse("an entry that would replace the root by something else")
		}
		e.setAttributes(t.Root)
		return nil
	}
	parent, base := path.Split(e.name)
	w := walker{tree: t, make: true}
	dir, err := w.find(strings.TrimSuffix(parent, "/"))
	if err != nil {
		return fmt.Errorf("entry %s: %w", quote(e.name), err)
	}
	if most := t.limits.Depth; most > 0 && w.depth() >= most {
		return refuse("%s lies more than %d directories deep", quote(e.name), most)
	}
	if e.mode == 0 {
		return t.link(dir, base, e)
	}
	old := dir.Children[base]
	if old != nil && old.IsDir() && e.mode&unix.S_IFMT == unix.S_IFDIR {
		e.setAttributes(old)
		return nil
	}
	n := &ext4.Inode{}
	e.setAttributes(n)
	switch {
	case n.IsDir():
		n.Children = map[string]*ext4.Inode{}
	case n.IsRegular():
		n.Size = e.size
		if n.Size > 0 {
			t.sources = append(t.sources, source{n, layer, e.number})
		}
	case n.IsSymlink():
		n.Target = e.target
	}
	dir.Children[base] = n
	return nil
}

// link gives an existing inode one more name. The attributes of a hard link's header are the target's own.
func (t *Tree) link(dir *ext4.Inode, base string, e *entry) error {
	find := func() (*ext4.Inode, error) {
		parent, name := path.Split(e.target)
		if name == "" {
			return t.Root, nil
		}
		w := walker{tree: t}
		from, err := w.find(strings.TrimSuffix(parent, "/"))
		if err != nil || from == nil {
			return nil, err
		}
		return from.Children[name], nil
	}
	target, err := find()
	if err != nil {
		return fmt.Errorf("hard link %s: %w", quote(e.name), err)
	}
	old := dir.Children[base]
	if target != nil && target == old && !target.IsDir() && e.name != e.target {
		return nil // it is that link already
	}
	delete(dir.Children, base)
	// Looked up again: what the entry replaces may have held the target.
	if target, err = find(); err != nil {
		return fmt.Errorf("hard link %s: %w", quote(e.name), err)
	}
	switch {
	case target == nil:
		return refuse("hard link %s: its target %s does not exist at that place of the layers", quote(e.name), quote(e.target))
	case target.IsDir():
		return refuse("hard link %s: its target %s is a directory", quote(e.name), quote(e.target))
	}
	dir.Children[base] = target
	return nil
}

func (e *entry) setAttributes(n *ext4.Inode) {
	n.Mode, n.UID, n.GID, n.ModTime = e.mode, e.uid, e.gid, e.mtime
	n.Major, n.Minor, n.Xattrs = e.major, e.minor, e.xattrs
}

// walker finds a directory by its name as a process whose root is the tree's would.
type walker struct {
	tree *Tree
	// make says that what is missing is made. Without it find gives nil.
	make bool
	// own are the directories the layer at work brings itself: below one that replaces something else there is nothing old.
	own   map[string]bool
	stack []*ext4.Inode // from the root to where the walk stands
	links int
}

func (w *walker) depth() int { return len(w.stack) }

func (w *walker) find(name string) (*ext4.Inode, error) {
	w.stack = append(w.stack[:0], w.tree.Root)
	for rest := name; rest != ""; {
		part, tail, _ := strings.Cut(rest, "/")
		done := len(name) - len(tail) // bytes of name walked
		if tail != "" {
			done--
		}
		rest = tail
		next := w.stack[len(w.stack)-1].Children[part]
		if next != nil && !next.IsDir() && w.own[name[:done]] {
			return nil, nil
		}
		ok, err := w.step(part)
		if err != nil || !ok {
			return nil, err
		}
	}
	return w.stack[len(w.stack)-1], nil
}

// step goes to one component, through symbolic links. ok is false where nothing is and nothing may be made.
func (w *walker) step(part string) (ok bool, err error) {
	switch part {
	case "", ".":
		return true, nil
	case "..":
		if len(w.stack) > 1 {
			w.stack = w.stack[:len(w.stack)-1]
		}
		return true, nil
	}
	here := w.stack[len(w.stack)-1]
	next := here.Children[part]
	switch {
	case next == nil && !w.make:
		return false, nil
	case next == nil:
		if most := w.tree.limits.NameBytes; most > 0 && len(part) > most {
			return false, refuse("a symbolic link on the way has a component of more than %d bytes", most)
		}
		if most := w.tree.limits.Depth; most > 0 && len(w.stack) >= most {
			return false, refuse("it lies more than %d directories deep", most)
		}
		next = newDirectory()
		here.Children[part] = next
	case next.IsSymlink():
		if w.links++; w.links > maxSymlinks {
			if !w.make {
				return false, nil // a loop leads to nothing
			}
			return false, refuse("more than %d symbolic links on the way", maxSymlinks)
		}
		if strings.HasPrefix(next.Target, "/") {
			w.stack = w.stack[:1]
		}
		for part := range strings.SplitSeq(next.Target, "/") {
			if ok, err := w.step(part); err != nil || !ok {
				return ok, err
			}
		}
		return true, nil
	case !next.IsDir():
		if !w.make {
			return false, nil
		}
		return false, refuse("%s on the way is not a directory", quote(part))
	}
	w.stack = append(w.stack, next)
	return true, nil
}

// finish checks what can only be known at the end and forgets content nobody refers to.
func (t *Tree) finish() error {
	alive := map[*ext4.Inode]bool{}
	if err := t.survey(t.Root, "/", alive); err != nil {
		return err
	}
	kept := t.sources[:0]
	for _, s := range t.sources {
		if alive[s.inode] {
			kept = append(kept, s)
		}
	}
	t.sources = kept
	return nil
}

func (t *Tree) survey(dir *ext4.Inode, at string, alive map[*ext4.Inode]bool) error {
	directories := 0
	for name, child := range dir.Children {
		if child.IsDir() {
			directories++
			if err := t.survey(child, path.Join(at, name), alive); err != nil {
				return err
			}
			continue
		}
		if !alive[child] {
			alive[child] = true
			t.Bytes += child.Size
		}
	}
	if most := t.limits.Subdirectories; most > 0 && directories > most {
		return refuse("%s has %d subdirectories, the limit is %d", quote(at), directories, most)
	}
	if most := t.limits.TotalBytes; most > 0 && t.Bytes > most {
		return refuse("the files take more than %d bytes, the limit", most)
	}
	return nil
}

// Order lists the files with content in the order Contents will give them.
func (t *Tree) Order() []*ext4.Inode {
	out := make([]*ext4.Inode, len(t.sources))
	for i, s := range t.sources {
		out[i] = s.inode
	}
	return out
}
