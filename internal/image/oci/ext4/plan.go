package ext4

import (
	"fmt"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// Plan is the place of everything in a file system that is still to be written.
type Plan struct {
	uuid   [16]byte
	inodes []*Inode // root first, then in the order of their numbers from firstNumber on
	sorted map[*Inode][]string
	dirs   uint32
	parent map[*Inode]*Inode

	groups, perGroup  uint32
	descriptorBlocks  uint32
	blockBitmaps      uint32
	inodeBitmaps      uint32
	inodeTables       uint32
	tableBlocks       uint32 // of one group
	used, totalBlocks uint32
}

// NewPlan gives every inode of the tree its number and place; a tree can be planned once. order lists regular files in the order their content should
// have on the disk; those that are not in the tree are passed over, and those of the tree that are not listed follow.
// Errors name the file that cannot be held.
func NewPlan(root *Inode, uuid [16]byte, order []*Inode) (*Plan, error) {
	p := &Plan{uuid: uuid, sorted: map[*Inode][]string{}, parent: map[*Inode]*Inode{}}
	if !root.IsDir() {
		return nil, fmt.Errorf("planning file system: the root is not a directory")
	}
	p.inodes = append(p.inodes, root)
	root.number, root.links, root.placed = rootNumber, 2, false
	p.parent[root] = root
	if err := p.measure(root, "/"); err != nil {
		return nil, err
	}
	if err := p.number(root, "/"); err != nil {
		return nil, err
	}
	if err := p.place(order); err != nil {
		return nil, err
	}
	return p, nil
}

// number walks the tree in the order of names: the same tree always gets the same numbers.
func (p *Plan) number(dir *Inode, at string) error {
	p.dirs++
	names := sortedNames(dir)
	p.sorted[dir] = names
	for _, name := range names {
		child := dir.Children[name]
		if name == "" || name == "." || name == ".." || len(name) > maxName || strings.ContainsAny(name, "/\x00") {
			return fmt.Errorf("planning file system: %q in %q is not a name a file can have", name, at)
		}
		if child.number != 0 {
			child.links++
			if child.links > maxLinks {
				return fmt.Errorf("planning file system: %q has more than %d hard links", path.Join(at, name), maxLinks)
			}
			continue
		}
		child.number = firstNumber + uint32(len(p.inodes)) - 1
		child.links = 1
		child.placed = false
		p.inodes = append(p.inodes, child)
		if child.IsDir() {
			child.links = 2
			dir.links++
			p.parent[child] = dir
			if dir.links > maxLinks {
				return fmt.Errorf("planning file system: %q has more than %d subdirectories", at, maxLinks-2)
			}
		}
		if err := p.measure(child, path.Join(at, name)); err != nil {
			return err
		}
	}
	for _, name := range names {
		if child := dir.Children[name]; child.IsDir() {
			if err := p.number(child, path.Join(at, name)); err != nil {
				return err
			}
		}
	}
	return nil
}

// measure says how many blocks the content takes and whether the attributes need one.
func (p *Plan) measure(n *Inode, at string) error {
	if err := n.check(); err != nil {
		return fmt.Errorf("planning file system: %q: %w", at, err)
	}
	switch n.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		n.dataBlocks = uint32((n.Size + BlockSize - 1) / BlockSize)
	case unix.S_IFDIR:
		n.dataBlocks = directoryBlocks(n)
	case unix.S_IFLNK:
		n.dataBlocks = 0
		if len(n.Target) > fastLink {
			n.dataBlocks = 1
		}
	default:
		n.dataBlocks = 0
	}
	attributes, err := encodeXattrs(n.Xattrs)
	if err != nil {
		return fmt.Errorf("planning file system: %q: %w", at, err)
	}
	n.xattrBlock = 0
	if attributes.block != nil {
		n.xattrBlock = 1 // the place comes later
	}
	return nil
}

// place lays out groups, metadata and content, in this order.
func (p *Plan) place(order []*Inode) error {
	var content uint64
	for _, n := range p.inodes {
		content += uint64(n.dataBlocks) + uint64(n.leaves()) + uint64(n.xattrBlock)
	}
	count := uint64(firstNumber - 1 + len(p.inodes) - 1)
	var total uint64
	for groups := uint64(1); ; {
		perGroup := (count + groups - 1) / groups
		perGroup = (perGroup + inodesPerBlock - 1) / inodesPerBlock * inodesPerBlock
		descriptors := (groups*descriptorSize + BlockSize - 1) / BlockSize
		table := perGroup / inodesPerBlock
		total = 1 + descriptors + groups*(2+table) + content
		if total > uint64(MaxSize/BlockSize) {
			return fmt.Errorf("planning file system: %w", ErrTooLarge)
		}
		if need := max((total+blocksPerGroup-1)/blocksPerGroup, (count+maxPerGroup-1)/maxPerGroup); need > groups {
			groups = need
			continue
		}
		p.groups, p.perGroup, p.tableBlocks, p.descriptorBlocks = uint32(groups), uint32(perGroup), uint32(table), uint32(descriptors)
		break
	}
	p.used = uint32(total)
	// The last group must exist, if only by one block, for the inodes that are counted in it.
	p.totalBlocks = max(p.used, (p.groups-1)*blocksPerGroup+1)
	p.blockBitmaps = 1 + p.descriptorBlocks
	p.inodeBitmaps = p.blockBitmaps + p.groups
	p.inodeTables = p.inodeBitmaps + p.groups
	next := p.inodeTables + p.groups*p.tableBlocks
	take := func(blocks uint32) uint32 {
		at := next
		next += blocks
		return at
	}
	for _, n := range p.inodes {
		if n.xattrBlock != 0 {
			n.xattrBlock = take(1)
		}
		if leaves := n.leaves(); leaves != 0 {
			n.leafBlock = take(leaves)
		}
		if !n.IsRegular() {
			n.dataBlock, n.placed = take(n.dataBlocks), true
		}
	}
	for _, list := range [][]*Inode{order, p.inodes} {
		for _, n := range list {
			if n.number != 0 && n.IsRegular() && !n.placed {
				n.dataBlock, n.placed = take(n.dataBlocks), true
			}
		}
	}
	if next != p.used {
		return fmt.Errorf("planning file system: placed %d blocks of %d", next, p.used)
	}
	return nil
}

// Size of the finished file system in bytes.
func (p *Plan) Size() int64 { return int64(p.totalBlocks) * BlockSize }

// Inodes is the number of files.
func (p *Plan) Inodes() int { return len(p.inodes) }

// Offset is where the content of a regular file begins, in bytes; it runs on for Inode.Size bytes. ok is false for a file
// that is not in the tree.
func (p *Plan) Offset(n *Inode) (offset int64, ok bool) {
	return int64(n.dataBlock) * BlockSize, n.placed
}
