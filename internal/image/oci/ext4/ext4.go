// Package ext4 writes one read-only ext4 file system out of a tree that is known beforehand.
//
// Knowing the whole tree is what keeps it small: every inode, directory and extent gets its place first, and then each
// block is written once, in any order, without a free-space allocator, a journal or a second look:
//
//	| super | group descriptors | block bitmaps | inode bitmaps | inode tables | xattrs, directories, links, extents | file data |
//
// All metadata stands at the front (flex_bg lets it), there are no backup superblocks (sparse_super2), so a file's data is
// one contiguous run. The result has no free space, no lost+found and the feature bit "readonly": the kernel refuses to
// mount it for writing. The same tree gives the same bytes. The format is that of the kernel's
// Documentation/filesystems/ext4; what counts as right is `e2fsck -fn` and a mount of the result.
package ext4

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// BlockSize is the size of a block in bytes.
const BlockSize = 4096

const (
	inodeSize       = 256
	inodeBaseSize   = 128 // what every ext2 inode has; the rest is i_extra_isize and attributes
	extraSize       = 32  // through i_projid
	blocksPerGroup  = BlockSize * 8
	maxPerGroup     = BlockSize * 8 // inodes: one bitmap block
	inodesPerBlock  = BlockSize / inodeSize
	descriptorSize  = 32
	rootNumber      = 2
	firstNumber     = 11    // 1..10 are reserved
	extentBlocks    = 32768 // longest initialised extent
	extentsPerLeaf  = (BlockSize - 12) / 12
	extentsPerInode = 4
	fastLink        = 59    // a longer symlink target needs a block
	maxLinks        = 65000 // EXT4_LINK_MAX
	maxName         = 255   // EXT4_NAME_LEN
)

// MaxFileSize is the longest file in bytes that one level of extent tree holds (170 GiB).
const MaxFileSize = int64(extentsPerInode*extentsPerLeaf) * extentBlocks * BlockSize

// MaxLinkTarget is the longest target of a symbolic link, in bytes.
const MaxLinkTarget = BlockSize - 1

// MaxSize is the largest file system in bytes: block numbers have 32 bits.
const MaxSize = int64(1)<<44 - BlockSize

// ErrTooLarge says that the tree does not fit a file system of MaxSize.
var ErrTooLarge = errors.New("tree is larger than a file system can be")

// Inode is one file of the tree. The same *Inode under several names is a hard link; directories have one name.
type Inode struct {
	// Mode is the type and permission bits as stat(2) has them (unix.S_IFREG|0o644).
	Mode     uint32
	UID, GID uint32
	// ModTime serves for all four times. Times outside 1901–2446 are clamped to that range.
	ModTime time.Time
	// Size of a regular file in bytes; its content is written by the caller, at Plan.Offset.
	Size int64
	// Target of a symbolic link, 1 to MaxLinkTarget bytes.
	Target string
	// Major and Minor of a device: 12 and 20 bits.
	Major, Minor uint32
	// Xattrs by full name ("security.capability"); values as setxattr(2) takes them.
	Xattrs map[string][]byte
	// Children of a directory, nil for everything else.
	Children map[string]*Inode

	number     uint32
	links      uint32
	xattrBlock uint32
	leafBlock  uint32 // first of the blocks that hold extents
	dataBlock  uint32 // first block of content
	dataBlocks uint32
	placed     bool
}

// IsDir says whether n is a directory.
func (n *Inode) IsDir() bool { return n.Mode&unix.S_IFMT == unix.S_IFDIR }

// IsRegular says whether n is a regular file.
func (n *Inode) IsRegular() bool { return n.Mode&unix.S_IFMT == unix.S_IFREG }

// IsSymlink says whether n is a symbolic link.
func (n *Inode) IsSymlink() bool { return n.Mode&unix.S_IFMT == unix.S_IFLNK }

func (n *Inode) hasExtents() bool {
	return n.IsDir() || n.IsRegular() || n.IsSymlink() && len(n.Target) > fastLink
}

// extents and leaves say how the content is described: runs of at most extentBlocks, in the inode itself or in leaf blocks.
func (n *Inode) extents() uint32 { return (n.dataBlocks + extentBlocks - 1) / extentBlocks }

func (n *Inode) leaves() uint32 {
	if n.extents() <= extentsPerInode {
		return 0
	}
	return (n.extents() + extentsPerLeaf - 1) / extentsPerLeaf
}

// check refuses what the format cannot hold.
func (n *Inode) check() error {
	switch n.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		if n.Size < 0 || n.Size > MaxFileSize {
			return fmt.Errorf("size %d is not between 0 and %d", n.Size, MaxFileSize)
		}
	case unix.S_IFLNK:
		if len(n.Target) == 0 || len(n.Target) > MaxLinkTarget {
			return fmt.Errorf("target of %d bytes, a symbolic link has 1 to %d", len(n.Target), MaxLinkTarget)
		}
	case unix.S_IFCHR, unix.S_IFBLK:
		if n.Major >= 1<<12 || n.Minor >= 1<<20 {
			return fmt.Errorf("device number %d:%d is out of range", n.Major, n.Minor)
		}
	case unix.S_IFDIR, unix.S_IFIFO, unix.S_IFSOCK:
	default:
		return fmt.Errorf("unknown file type %#o", n.Mode)
	}
	return nil
}
