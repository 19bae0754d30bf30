package ext4

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
)

const (
	xattrMagic       = 0xEA020000
	inlineXattrSpace = inodeSize - inodeBaseSize - extraSize // magic included
	xattrHeader      = 32                                    // of a block
	xattrEntry       = 16
	maxXattrName     = 255
)

// Names of POSIX access control lists. They are stored in another form than setxattr(2) takes.
const (
	ACLAccess  = "system.posix_acl_access"
	ACLDefault = "system.posix_acl_default"
)

// XattrSupported says whether the kernel's ext4 can show an attribute of this name at all.
func XattrSupported(name string) bool {
	_, _, ok := splitXattrName(name)
	return ok
}

// splitXattrName gives the index that stands for the prefix on the disk, and the rest.
func splitXattrName(name string) (index uint8, rest string, ok bool) {
	switch name {
	case ACLAccess:
		return 2, "", true
	case ACLDefault:
		return 3, "", true
	}
	for _, p := range []struct {
		prefix string
		index  uint8
	}{{"user.", 1}, {"trusted.", 4}, {"security.", 6}} {
		if rest, found := strings.CutPrefix(name, p.prefix); found {
			return p.index, rest, true
		}
	}
	return 0, "", false
}

type xattr struct {
	index uint8
	name  string
	value []byte
}

func (x xattr) entrySize() int { return xattrEntry + pad4(len(x.name)) }
func (x xattr) size() int      { return x.entrySize() + pad4(len(x.value)) }

func pad4(n int) int { return (n + 3) &^ 3 }

// hash of name and value, as the kernel's ext4_xattr_hash_entry.
func (x xattr) hash() uint32 {
	var h uint32
	for i := range len(x.name) {
		h = h<<5 ^ h>>27 ^ uint32(x.name[i])
	}
	padded := make([]byte, pad4(len(x.value)))
	copy(padded, x.value)
	for ; len(padded) > 0; padded = padded[4:] {
		h = h<<16 ^ h>>16 ^ binary.LittleEndian.Uint32(padded)
	}
	return h
}

// encodedXattrs is what goes behind the inode and, if that is not enough, into one block of its own.
type encodedXattrs struct {
	inline, block []byte
}

// encodeXattrs sorts as the kernel searches a block: by index, length of the name, name.
func encodeXattrs(all map[string][]byte) (encodedXattrs, error) {
	if len(all) == 0 {
		return encodedXattrs{}, nil
	}
	list := make([]xattr, 0, len(all))
	for name, value := range all {
		index, rest, ok := splitXattrName(name)
		if !ok || rest == "" && index != 2 && index != 3 || len(name) > maxXattrName {
			return encodedXattrs{}, fmt.Errorf("extended attribute %q: the name is not one ext4 can hold", name)
		}
		if index == 2 || index == 3 {
			var err error
			if value, err = encodeACL(value); err != nil {
				return encodedXattrs{}, fmt.Errorf("extended attribute %q: %w", name, err)
			}
		}
		list = append(list, xattr{index, rest, value})
	}
	slices.SortFunc(list, func(a, b xattr) int {
		return cmp.Or(cmp.Compare(a.index, b.index), cmp.Compare(len(a.name), len(b.name)), strings.Compare(a.name, b.name))
	})
	var inline, block []xattr
	inlineLeft, blockLeft := inlineXattrSpace-4-4, BlockSize-xattrHeader-4 // 4 zero bytes end the list
	for _, x := range list {
		switch {
		case x.size() <= inlineLeft:
			inline, inlineLeft = append(inline, x), inlineLeft-x.size()
		case x.size() <= blockLeft:
			block, blockLeft = append(block, x), blockLeft-x.size()
		default:
			return encodedXattrs{}, errors.New("extended attributes do not fit: together they may take about 3.9 KiB")
		}
	}
	out := encodedXattrs{}
	if len(inline) > 0 {
		out.inline = make([]byte, inlineXattrSpace)
		binary.LittleEndian.PutUint32(out.inline, xattrMagic)
		putXattrs(out.inline[4:], inline, 0)
	}
	if len(block) > 0 {
		out.block = make([]byte, BlockSize)
		le := binary.LittleEndian
		le.PutUint32(out.block[0:], xattrMagic)
		le.PutUint32(out.block[4:], 1) // references
		le.PutUint32(out.block[8:], 1) // blocks
		le.PutUint32(out.block[12:], putXattrs(out.block[xattrHeader:], block, xattrHeader))
	}
	return out, nil
}

// putXattrs writes entries from the front and values from the back of space; offsets count from base bytes before it.
// It gives the hash of the whole list.
func putXattrs(space []byte, list []xattr, base int) uint32 {
	var all uint32
	entry, end := 0, len(space)
	for _, x := range list {
		end -= pad4(len(x.value))
		copy(space[end:], x.value)
		e := space[entry:]
		e[0], e[1] = uint8(len(x.name)), x.index
		offset := base + end
		if len(x.value) == 0 {
			offset = 0
		}
		binary.LittleEndian.PutUint16(e[2:], uint16(offset))
		binary.LittleEndian.PutUint32(e[8:], uint32(len(x.value)))
		h := x.hash()
		binary.LittleEndian.PutUint32(e[12:], h)
		copy(e[xattrEntry:], x.name)
		entry += x.entrySize()
		all = all<<16 ^ all>>16 ^ h
	}
	return all
}

// Tags of an ACL entry (POSIX.1e, linux/posix_acl.h).
const (
	aclUserObj  = 0x01
	aclUser     = 0x02
	aclGroupObj = 0x04
	aclGroup    = 0x08
	aclMask     = 0x10
	aclOther    = 0x20
)

type aclEntry struct {
	tag, perm uint16
	id        uint32
}

// parseACL reads the form of setxattr(2): version 2, then 8 bytes an entry. It accepts what the kernel would accept.
func parseACL(value []byte) ([]aclEntry, error) {
	le := binary.LittleEndian
	if len(value) < 4 || (len(value)-4)%8 != 0 || le.Uint32(value) != 2 {
		return nil, errors.New("not an access control list of version 2")
	}
	var list []aclEntry
	seen := map[uint16]int{}
	for rest := value[4:]; len(rest) > 0; rest = rest[8:] {
		e := aclEntry{le.Uint16(rest), le.Uint16(rest[2:]), le.Uint32(rest[4:])}
		if e.perm > 7 || !slices.Contains([]uint16{aclUserObj, aclUser, aclGroupObj, aclGroup, aclMask, aclOther}, e.tag) {
			return nil, errors.New("an entry of the access control list has an unknown tag or permission")
		}
		if n := len(list); n > 0 && list[n-1].tag > e.tag {
			return nil, errors.New("the entries of the access control list are out of order")
		}
		seen[e.tag]++
		list = append(list, e)
	}
	named := seen[aclUser]+seen[aclGroup] > 0
	if seen[aclUserObj] != 1 || seen[aclGroupObj] != 1 || seen[aclOther] != 1 || seen[aclMask] > 1 || named && seen[aclMask] == 0 {
		return nil, errors.New("the access control list lacks an entry or has one twice")
	}
	return list, nil
}

// ACLMode gives the nine permission bits that an access ACL implies, and whether it says no more than those.
// The kernel keeps mode and ACL in step when one is set; a tree for NewPlan should do the same.
func ACLMode(value []byte) (mode uint32, minimal bool, err error) {
	list, err := parseACL(value)
	if err != nil {
		return 0, false, err
	}
	minimal = len(list) == 3
	for _, e := range list {
		switch e.tag {
		case aclUserObj:
			mode |= uint32(e.perm) << 6
		case aclGroupObj:
			if minimal {
				mode |= uint32(e.perm) << 3
			}
		case aclMask:
			mode |= uint32(e.perm) << 3
		case aclOther:
			mode |= uint32(e.perm)
		}
	}
	return mode, minimal, nil
}

// encodeACL turns the form of setxattr(2) into the one on the disk: version 1, no id where none is meant.
func encodeACL(value []byte) ([]byte, error) {
	list, err := parseACL(value)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	le := binary.LittleEndian
	out.Write(le.AppendUint32(nil, 1))
	for _, e := range list {
		out.Write(le.AppendUint16(le.AppendUint16(nil, e.tag), e.perm))
		if e.tag == aclUser || e.tag == aclGroup {
			out.Write(le.AppendUint32(nil, e.id))
		}
	}
	return out.Bytes(), nil
}
