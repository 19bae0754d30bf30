package flatten

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"path"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"imp.dev/imp/internal/image/oci/ext4"
)

// entry is one tar header that means something, reduced to what the tree needs.
type entry struct {
	number       int    // its place among the layer's headers, to find its content again
	name         string // cleaned, without slash in front; "" is the root
	mode         uint32 // with type; 0 for a hard link
	uid, gid     uint32
	size         int64
	mtime        time.Time
	target       string // of a symbolic link as written; of a hard link cleaned
	major, minor uint32
	xattrs       map[string][]byte
}

// budget is what is left of the limits that hold for all layers together.
type budget struct {
	limits   Limits
	entries  int
	unpacked int64
	metadata int64
}

func newBudget(limits Limits) *budget { return &budget{limits: limits} }

func (b *budget) unpack(n int64) error {
	b.unpacked += n
	if most := b.limits.TotalBytes; most > 0 && b.unpacked > most {
		return refuse("the layers unpack to more than %d bytes, the limit", most)
	}
	return nil
}

func (b *budget) count(header *tar.Header) error {
	b.entries++
	if most := b.limits.Entries; most > 0 && b.entries > most {
		return refuse("the layers have more than %d entries, the limit", most)
	}
	b.metadata += int64(len(header.Name) + len(header.Linkname))
	for key, value := range header.PAXRecords {
		b.metadata += int64(len(key) + len(value))
	}
	if most := b.limits.MetadataBytes; most > 0 && b.metadata > most {
		return refuse("names and attributes take more than %d bytes, the limit", most)
	}
	if most := b.limits.TotalBytes; most > 0 && header.Size > most {
		return refuse("%s claims %d bytes, the limit of all is %d", quote(header.Name), header.Size, most)
	}
	return nil
}

// readIndex reads every header of a layer and checks the digest of the whole.
func readIndex(ctx context.Context, layer Layer, budget *budget) ([]entry, error) {
	s, err := open(ctx, layer, budget)
	if err != nil {
		return nil, err
	}
	defer s.close()
	var out []entry
	err = walk(s, func(number int, header *tar.Header, _ io.Reader) error {
		if err := budget.count(header); err != nil {
			return err
		}
		e, ok, err := parse(number, header, budget.limits)
		if err != nil {
			return err
		}
		if ok {
			out = append(out, e)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	digest, err := s.drain()
	if err != nil {
		return nil, err
	}
	if layer.DiffID != "" && layer.DiffID != digest {
		return nil, refuse("the unpacked content has digest %s, the image's configuration promises %s", digest, quote(layer.DiffID))
	}
	return out, nil
}

// walk calls visit for each header in order.
func walk(in io.Reader, visit func(number int, header *tar.Header, content io.Reader) error) error {
	archive := tar.NewReader(in)
	for number := 0; ; number++ {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return badArchive(number, err)
		}
		if err := visit(number, header, archive); err != nil {
			return err
		}
	}
}

func badArchive(number int, err error) error {
	switch {
	case IsRefused(err) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) || isPathError(err):
		return err
	case errors.Is(err, io.ErrUnexpectedEOF):
		return refuse("the archive ends in the middle of entry %d: it is truncated or claims a wrong size", number+1)
	}
	return refuse("entry %d of the archive cannot be read: %v", number+1, err)
}

// isPathError tells a failing read of the node's own file.
func isPathError(err error) bool {
	errno, file := syscall.Errno(0), (*fs.PathError)(nil)
	return errors.As(err, &errno) || errors.As(err, &file)
}

// parse checks one header. ok is false for those that mean nothing here.
func parse(number int, h *tar.Header, limits Limits) (e entry, ok bool, err error) {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return entry{}, false, nil
	}
	e = entry{number: number, size: h.Size, mtime: h.ModTime}
	if e.name, err = cleanName(h.Name, limits); err != nil {
		return entry{}, false, err
	}
	if e.uid, err = id(h.Uid); err == nil {
		e.gid, err = id(h.Gid)
	}
	if err != nil {
		return entry{}, false, refuse("%s: owner %d:%d is not between 0 and 4294967295", quote(h.Name), h.Uid, h.Gid)
	}
	e.mode = uint32(h.Mode & 0o7777)
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeRegA, tar.TypeCont, tar.TypeGNUSparse: //nolint:staticcheck // old archives have TypeRegA
		e.mode |= unix.S_IFREG
		if e.size < 0 || e.size > ext4.MaxFileSize {
			return entry{}, false, refuse("%s: a file of %d bytes, the limit is %d", quote(h.Name), e.size, ext4.MaxFileSize)
		}
	case tar.TypeDir:
		e.mode |= unix.S_IFDIR
	case tar.TypeSymlink:
		e.mode, e.target = unix.S_IFLNK|0o777, h.Linkname
		if len(e.target) == 0 || len(e.target) > ext4.MaxLinkTarget {
			return entry{}, false, refuse("%s: a symbolic link to %d bytes, the limits are 1 and %d", quote(h.Name), len(e.target), ext4.MaxLinkTarget)
		}
	case tar.TypeLink:
		e.mode = 0
		if e.target, err = cleanName(h.Linkname, limits); err != nil {
			return entry{}, false, fmt.Errorf("hard link %s: %w", quote(h.Name), err)
		}
	case tar.TypeChar, tar.TypeBlock:
		e.mode |= unix.S_IFCHR
		if h.Typeflag == tar.TypeBlock {
			e.mode = e.mode&0o7777 | unix.S_IFBLK
		}
		if h.Devmajor < 0 || h.Devmajor >= 1<<12 || h.Devminor < 0 || h.Devminor >= 1<<20 {
			return entry{}, false, refuse("%s: device number %d:%d is out of range", quote(h.Name), h.Devmajor, h.Devminor)
		}
		e.major, e.minor = uint32(h.Devmajor), uint32(h.Devminor)
	case tar.TypeFifo:
		e.mode |= unix.S_IFIFO
	default:
		return entry{}, false, refuse("%s: entry type %q is not one a layer may have", quote(h.Name), h.Typeflag)
	}
	if e.mode != 0 {
		err = e.readXattrs(h, limits)
	}
	return e, true, err
}

func id(n int) (uint32, error) {
	if n < 0 || n > math.MaxUint32 {
		return 0, errRange
	}
	return uint32(n), nil
}

var errRange = errors.New("out of range")

// cleanName makes a name relative to the root. A ".." in it is refused: no tool writes one, so somebody tries something.
func cleanName(name string, limits Limits) (string, error) {
	if most := limits.PathBytes; most > 0 && len(name) > most {
		return "", refuse("%s: a name of more than %d bytes", quote(name), most)
	}
	if strings.IndexByte(name, 0) >= 0 {
		return "", refuse("%s: a name with a zero byte", quote(name))
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." {
			return "", refuse("%s: a name that climbs with \"..\"", quote(name))
		}
		if most := limits.NameBytes; most > 0 && len(part) > most {
			return "", refuse("%s: a component of more than %d bytes", quote(name), most)
		}
	}
	return path.Clean("/" + name)[1:], nil
}

const xattrRecord = "SCHILY.xattr."

// readXattrs keeps what Linux could hold on such a file and what is not an order to the overlay that later lies above it.
func (e *entry) readXattrs(h *tar.Header, limits Limits) error {
	bytes := 0
	for key, value := range h.PAXRecords {
		name, ok := strings.CutPrefix(key, xattrRecord)
		if !ok || !keepXattr(name, e.mode) {
			continue
		}
		if len(name) > 255 || strings.HasSuffix(name, ".") {
			return refuse("%s: extended attribute %s has no name a file can hold", quote(h.Name), quote(name))
		}
		if bytes += 16 + len(name) + len(value); limits.XattrBytes > 0 && bytes > limits.XattrBytes {
			return refuse("%s: its extended attributes take more than %d bytes, the limit", quote(h.Name), limits.XattrBytes)
		}
		if e.xattrs == nil {
			e.xattrs = map[string][]byte{}
		}
		e.xattrs[name] = []byte(value)
	}
	for _, name := range []string{ext4.ACLAccess, ext4.ACLDefault} {
		value, ok := e.xattrs[name]
		if !ok {
			continue
		}
		bits, minimal, err := ext4.ACLMode(value)
		if err != nil {
			return refuse("%s: %s: %v", quote(h.Name), name, err)
		}
		if name == ext4.ACLAccess { // as setxattr(2): mode and list say the same, and a list that adds nothing goes
			e.mode = e.mode&^0o777 | bits
			if minimal {
				delete(e.xattrs, name)
			}
		}
	}
	return nil
}

func keepXattr(name string, mode uint32) bool {
	kind := mode & unix.S_IFMT
	switch {
	case !ext4.XattrSupported(name), strings.HasPrefix(name, "trusted.overlay."):
		return false
	case strings.HasPrefix(name, "user."):
		return kind == unix.S_IFREG || kind == unix.S_IFDIR
	case name == ext4.ACLDefault:
		return kind == unix.S_IFDIR
	case name == ext4.ACLAccess:
		return kind != unix.S_IFLNK
	}
	return true
}
