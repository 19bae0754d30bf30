package ext4

import (
	"encoding/binary"
	"fmt"
	"io"
	"time"

	"golang.org/x/sys/unix"
)

const (
	superMagic    = 0xEF53
	extentMagic   = 0xF30A
	flagExtents   = 0x80000
	compatXattr   = 0x0008
	compatSparse2 = 0x0200
	incompat      = 0x0002 | 0x0040 | 0x0200          // filetype, extents, flex_bg
	roCompat      = 0x0002 | 0x0008 | 0x0040 | 0x1000 // large_file, huge_file, extra_isize, readonly
)

// WriteMetadata writes everything but the content of regular files, and only blocks that are not all zero. w is to be
// empty and read as zeros where nothing was written; its length becomes Size only if the caller sees to it.
func (p *Plan) WriteMetadata(w io.WriterAt) error {
	for _, step := range []func(io.WriterAt) error{p.writeInodes, p.writeBlocks, p.writeBitmaps, p.writeSuper} {
		if err := step(w); err != nil {
			return fmt.Errorf("writing file system: %w", err)
		}
	}
	return nil
}

// numbered gives the inode of a number, nil if there is none.
func (p *Plan) numbered(number uint32) *Inode {
	switch {
	case number == rootNumber:
		return p.inodes[0]
	case number < firstNumber || number-firstNumber+1 >= uint32(len(p.inodes)):
		return nil
	}
	return p.inodes[number-firstNumber+1]
}

func (p *Plan) writeInodes(w io.WriterAt) error {
	const chunk = 256 // inodes at a time
	buffer := make([]byte, chunk*inodeSize)
	count := p.groups * p.perGroup
	for first := uint32(1); first <= count; first += chunk {
		n := min(chunk, count-first+1)
		clear(buffer)
		empty := true
		for i := range n {
			if inode := p.numbered(first + i); inode != nil {
				empty = false
				if err := inode.encode(buffer[i*inodeSize : (i+1)*inodeSize]); err != nil {
					return err
				}
			}
		}
		if empty {
			continue
		}
		if _, err := w.WriteAt(buffer[:n*inodeSize], int64(p.inodeTables)*BlockSize+int64(first-1)*inodeSize); err != nil {
			return err
		}
	}
	return nil
}

func (n *Inode) encode(b []byte) error {
	le := binary.LittleEndian
	le.PutUint16(b[0x00:], uint16(n.Mode))
	le.PutUint16(b[0x02:], uint16(n.UID))
	size := n.Size
	switch {
	case n.IsDir():
		size = int64(n.dataBlocks) * BlockSize
	case n.IsSymlink():
		size = int64(len(n.Target))
	}
	le.PutUint32(b[0x04:], uint32(size))
	le.PutUint32(b[0x6C:], uint32(size>>32))
	low, high := encodeTime(n.ModTime)
	for _, at := range []struct{ low, high int }{{0x08, 0x8C}, {0x0C, 0x84}, {0x10, 0x88}, {0x90, 0x94}} { // a, c, m, creation
		le.PutUint32(b[at.low:], low)
		le.PutUint32(b[at.high:], high)
	}
	le.PutUint16(b[0x18:], uint16(n.GID))
	le.PutUint16(b[0x1A:], uint16(n.links))
	blocks := uint64(n.dataBlocks) + uint64(n.leaves())
	if n.xattrBlock != 0 {
		blocks++
	}
	sectors := blocks * (BlockSize / 512)
	le.PutUint32(b[0x1C:], uint32(sectors))
	le.PutUint16(b[0x74:], uint16(sectors>>32))
	le.PutUint32(b[0x68:], n.xattrBlock)
	le.PutUint16(b[0x78:], uint16(n.UID>>16))
	le.PutUint16(b[0x7A:], uint16(n.GID>>16))
	le.PutUint16(b[0x80:], extraSize)
	body := b[0x28:0x64]
	switch {
	case n.hasExtents():
		le.PutUint32(b[0x20:], flagExtents)
		n.putExtentRoot(body)
	case n.IsSymlink():
		copy(body, n.Target)
	case n.Mode&unix.S_IFMT == unix.S_IFCHR || n.Mode&unix.S_IFMT == unix.S_IFBLK:
		if n.Major < 256 && n.Minor < 256 {
			le.PutUint32(body, n.Major<<8|n.Minor)
		} else {
			le.PutUint32(body[4:], n.Minor&0xff|n.Major<<8|(n.Minor&^0xff)<<12)
		}
	}
	attributes, err := encodeXattrs(n.Xattrs)
	if err != nil {
		return err
	}
	copy(b[inodeBaseSize+extraSize:], attributes.inline)
	return nil
}

// encodeTime: 32 bits of seconds, signed, then 2 bits that extend them and 30 bits of nanoseconds.
func encodeTime(t time.Time) (low, high uint32) {
	const earliest, latest = -1 << 31, 3<<32 + 1<<31 - 1
	s, ns := int64(0), int64(0)
	if !t.IsZero() {
		s, ns = t.Unix(), int64(t.Nanosecond())
	}
	if s < earliest {
		s, ns = earliest, 0
	}
	if s > latest {
		s, ns = latest, 0
	}
	low = uint32(s)
	epoch := uint32((s-int64(int32(low)))>>32) & 3
	return low, uint32(ns)<<2 | epoch
}

func putExtentHeader(b []byte, entries, limit, depth uint32) {
	le := binary.LittleEndian
	le.PutUint16(b[0:], extentMagic)
	le.PutUint16(b[2:], uint16(entries))
	le.PutUint16(b[4:], uint16(limit))
	le.PutUint16(b[6:], uint16(depth))
}

// putExtents describes count runs from the run number first on.
func (n *Inode) putExtents(b []byte, first, count uint32) {
	le := binary.LittleEndian
	for i := range count {
		logical := (first + i) * extentBlocks
		e := b[12+i*12:]
		le.PutUint32(e[0:], logical)
		le.PutUint16(e[4:], uint16(min(extentBlocks, n.dataBlocks-logical)))
		le.PutUint32(e[8:], n.dataBlock+logical)
	}
}

func (n *Inode) putExtentRoot(b []byte) {
	if n.leaves() == 0 {
		putExtentHeader(b, n.extents(), extentsPerInode, 0)
		n.putExtents(b, 0, n.extents())
		return
	}
	putExtentHeader(b, n.leaves(), extentsPerInode, 1)
	for i := range n.leaves() {
		binary.LittleEndian.PutUint32(b[12+i*12:], i*extentsPerLeaf*extentBlocks)
		binary.LittleEndian.PutUint32(b[12+i*12+4:], n.leafBlock+i)
	}
}

// writeBlocks writes what inodes own besides file data: attributes, extent leaves, directories, long link targets.
func (p *Plan) writeBlocks(w io.WriterAt) error {
	put := func(b []byte, block uint32) error {
		_, err := w.WriteAt(b, int64(block)*BlockSize)
		return err
	}
	for _, n := range p.inodes {
		if n.xattrBlock != 0 {
			attributes, err := encodeXattrs(n.Xattrs)
			if err != nil {
				return err
			}
			if err := put(attributes.block, n.xattrBlock); err != nil {
				return err
			}
		}
		for i := range n.leaves() {
			leaf := make([]byte, BlockSize)
			count := min(extentsPerLeaf, n.extents()-i*extentsPerLeaf)
			putExtentHeader(leaf, count, extentsPerLeaf, 0)
			n.putExtents(leaf, i*extentsPerLeaf, count)
			if err := put(leaf, n.leafBlock+i); err != nil {
				return err
			}
		}
		switch {
		case n.IsDir():
			if err := put(p.encodeDirectory(n), n.dataBlock); err != nil {
				return err
			}
		case n.IsSymlink() && n.dataBlocks != 0:
			target := make([]byte, BlockSize)
			copy(target, n.Target)
			if err := put(target, n.dataBlock); err != nil {
				return err
			}
		}
	}
	return nil
}

// writeBitmaps: every block up to used is taken, every inode in the list too; bits beyond the end are set.
func (p *Plan) writeBitmaps(w io.WriterAt) error {
	for g := range p.groups {
		for _, m := range []struct{ at, taken, valid uint32 }{
			{p.blockBitmaps + g, clampGroup(p.used, g, blocksPerGroup), clampGroup(p.totalBlocks, g, blocksPerGroup)},
			{p.inodeBitmaps + g, clampGroup(p.lastNumber(), g, p.perGroup), p.perGroup},
		} {
			b := make([]byte, BlockSize)
			setBits(b, 0, m.taken)
			setBits(b, m.valid, BlockSize*8)
			if _, err := w.WriteAt(b, int64(m.at)*BlockSize); err != nil {
				return err
			}
		}
	}
	return nil
}

func (p *Plan) lastNumber() uint32 { return firstNumber + uint32(len(p.inodes)) - 2 }

// clampGroup says how many of the first n things lie in group g of size per.
func clampGroup(n, g, per uint32) uint32 {
	if n <= g*per {
		return 0
	}
	return min(per, n-g*per)
}

func setBits(b []byte, from, to uint32) {
	for i := from; i < to; i++ {
		if i%8 == 0 && to-i >= 8 {
			b[i/8] = 0xff
			i += 7
			continue
		}
		b[i/8] |= 1 << (i % 8)
	}
}

// writeSuper comes last: a file without it is no file system.
func (p *Plan) writeSuper(w io.WriterAt) error {
	le := binary.LittleEndian
	directories := make([]uint32, p.groups)
	for _, n := range p.inodes {
		if n.IsDir() {
			directories[(n.number-1)/p.perGroup]++
		}
	}
	descriptors := make([]byte, int(p.descriptorBlocks)*BlockSize)
	for g := range p.groups {
		d := descriptors[g*descriptorSize:]
		le.PutUint32(d[0:], p.blockBitmaps+g)
		le.PutUint32(d[4:], p.inodeBitmaps+g)
		le.PutUint32(d[8:], p.inodeTables+g*p.tableBlocks)
		free := clampGroup(p.totalBlocks, g, blocksPerGroup) - clampGroup(p.used, g, blocksPerGroup)
		le.PutUint16(d[12:], uint16(free))
		le.PutUint16(d[14:], uint16(p.perGroup-clampGroup(p.lastNumber(), g, p.perGroup)))
		le.PutUint16(d[16:], uint16(directories[g]))
	}
	if _, err := w.WriteAt(descriptors, BlockSize); err != nil {
		return err
	}
	s := make([]byte, 1024)
	for _, f := range []struct{ at, value uint32 }{
		{0x00, p.groups * p.perGroup}, {0x04, p.totalBlocks}, {0x0C, p.totalBlocks - p.used},
		{0x10, p.groups*p.perGroup - p.lastNumber()}, {0x18, 2}, {0x1C, 2}, // block and cluster size: 1024 << 2
		{0x20, blocksPerGroup}, {0x24, blocksPerGroup}, {0x28, p.perGroup},
		{0x4C, 1}, {0x54, firstNumber}, // revision with variable inode size
		{0x5C, compatXattr | compatSparse2}, {0x60, incompat}, {0x64, roCompat},
		{0x100, 0x0C}, // default mount options: user attributes and ACLs
		{0x160, 1},    // directory hashes are of signed bytes
	} {
		le.PutUint32(s[f.at:], f.value)
	}
	for _, f := range []struct {
		at    int
		value uint16
	}{{0x36, 0xffff}, {0x38, superMagic}, {0x3A, 1}, {0x3C, 1}, {0x58, inodeSize}, {0x15C, extraSize}, {0x15E, extraSize}} {
		le.PutUint16(s[f.at:], f.value)
	}
	s[0xFC] = 1  // default hash: half MD4
	s[0x174] = 4 // 16 groups a flex group
	copy(s[0x68:], p.uuid[:])
	copy(s[0xEC:], p.uuid[:]) // hash seed
	_, err := w.WriteAt(s, 1024)
	return err
}
