package ext4

import (
	"encoding/binary"
	"slices"

	"golang.org/x/sys/unix"
)

const direntHeader = 8

func direntSize(name string) int { return direntHeader + pad4(len(name)) }

// sortedNames is the order of entries on the disk, and of numbers.
func sortedNames(dir *Inode) []string {
	names := make([]string, 0, len(dir.Children))
	for name := range dir.Children {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// directoryBlocks says how many blocks the entries of dir take.
func directoryBlocks(dir *Inode) uint32 {
	blocks, left := uint32(1), BlockSize-direntSize(".")-direntSize("..")
	for _, name := range sortedNames(dir) {
		size := direntSize(name)
		if size > left {
			blocks, left = blocks+1, BlockSize
		}
		left -= size
	}
	return blocks
}

// encodeDirectory gives the blocks of a directory: linear, without hash tree, each block filled by its last entry.
func (p *Plan) encodeDirectory(dir *Inode) []byte {
	out := make([]byte, int(dir.dataBlocks)*BlockSize)
	at, last := 0, -1
	put := func(n *Inode, name string) {
		size := direntSize(name)
		if left := BlockSize - at%BlockSize; last >= 0 && at%BlockSize == 0 || size > left {
			stretch(out, last)
			at = (at + BlockSize - 1) / BlockSize * BlockSize
		}
		e := out[at:]
		binary.LittleEndian.PutUint32(e, n.number)
		binary.LittleEndian.PutUint16(e[4:], uint16(size))
		e[6], e[7] = uint8(len(name)), n.entryType()
		copy(e[direntHeader:], name)
		last = at
		at += size
	}
	put(dir, ".")
	put(p.parent[dir], "..")
	for _, name := range p.sorted[dir] {
		put(dir.Children[name], name)
	}
	stretch(out, last)
	return out
}

// stretch makes the entry at offset reach the end of its block.
func stretch(b []byte, offset int) {
	binary.LittleEndian.PutUint16(b[offset+4:], uint16(BlockSize-offset%BlockSize))
}

func (n *Inode) entryType() uint8 {
	switch n.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return 1
	case unix.S_IFDIR:
		return 2
	case unix.S_IFCHR:
		return 3
	case unix.S_IFBLK:
		return 4
	case unix.S_IFIFO:
		return 5
	case unix.S_IFSOCK:
		return 6
	case unix.S_IFLNK:
		return 7
	}
	return 0
}
