// Package build makes one base file out of the blobs of an image's layers.
//
// It reads data that strangers wrote, so it is made to run in a process that can do nothing else: all it needs is an Order
// and open descriptors, no path, network, capability or user of its own. Run does the work in this process; Main is the entry
// point of a child that reads its order from stdin and tells progress and result on stdout; Child is the parent's side of that.
package build

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"imp.dev/imp/internal/image/oci/ext4"
	"imp.dev/imp/internal/image/oci/flatten"
)

// Format is the version of what Run makes of given layers. It is part of the base's UUID, since a private disk made over one
// base must not be used over another whose inode numbers differ.
const Format = 1

// UUID of the base of an image, from the digest of its manifest.
func UUID(digest string) uuid.UUID {
	return uuid.NewSHA1(uuid.NameSpaceOID, fmt.Appendf(nil, "imp.dev base %d %s", Format, digest))
}

// Order says what to build.
type Order struct {
	// Layers from the lowest up.
	Layers []Layer `json:"layers"`
	// Output is empty and is written from its start; the caller owns, syncs and publishes it.
	Output File `json:"output"`
	// UUID of the file system.
	UUID string `json:"uuid"`
	// Limits on what the layers hold.
	Limits flatten.Limits `json:"limits"`
	// ReserveBytes must stay free on the output's file system.
	ReserveBytes int64 `json:"reserveBytes"`
}

// Layer is one blob, verified by the caller.
type Layer struct {
	File
	// DiffID is the digest of the unpacked tar, from the image's configuration.
	DiffID string `json:"diffID"`
}

// File is a path, or, if that is empty, an open descriptor of the process that runs the order.
type File struct {
	Path string `json:"path,omitempty"`
	FD   int    `json:"fd,omitempty"`
}

func (f File) open(flag int) (*os.File, error) {
	if f.Path != "" {
		return os.OpenFile(f.Path, flag, 0)
	}
	if f.FD <= 2 {
		return nil, fmt.Errorf("descriptor %d is not one to work with", f.FD)
	}
	return os.NewFile(uintptr(f.FD), fmt.Sprintf("descriptor %d", f.FD)), nil
}

// Result of a build.
type Result struct {
	SizeBytes    int64 `json:"sizeBytes"`
	ContentBytes int64 `json:"contentBytes"`
	Inodes       int   `json:"inodes"`
}

// Progress is told in bytes of file content.
type Progress struct {
	Done  int64 `json:"done"`
	Total int64 `json:"total"`
}

// ErrReserve says that going on would leave less free space than is to stay.
var ErrReserve = errors.New("the disk would be fuller than the reserve allows")

// Run builds. Errors about the image's content are flatten.Refused; ErrReserve and ENOSPC are those of a full disk; a
// failed build leaves the output in any state. progress may be nil.
func Run(ctx context.Context, order Order, progress func(Progress)) (Result, error) {
	id, err := uuid.Parse(order.UUID)
	if err != nil {
		return Result{}, fmt.Errorf("reading order: %w", err)
	}
	var layers []flatten.Layer
	for _, l := range order.Layers {
		blob, err := l.open(os.O_RDONLY)
		if err != nil {
			return Result{}, fmt.Errorf("opening layer: %w", err)
		}
		defer blob.Close()
		info, err := blob.Stat()
		if err != nil {
			return Result{}, fmt.Errorf("opening layer: %w", err)
		}
		layers = append(layers, flatten.Layer{Blob: io.NewSectionReader(blob, 0, info.Size()), DiffID: l.DiffID})
	}
	out, err := order.Output.open(os.O_RDWR)
	if err != nil {
		return Result{}, fmt.Errorf("opening output: %w", err)
	}
	defer out.Close()
	tree, err := flatten.Flatten(ctx, layers, order.Limits)
	if err != nil {
		return Result{}, err
	}
	plan, err := ext4.NewPlan(tree.Root, id, tree.Order())
	if err != nil {
		return Result{}, &flatten.Refused{Reason: strings.TrimPrefix(err.Error(), "planning file system: ")}
	}
	w := &output{file: out, reserve: order.ReserveBytes, report: progress, total: tree.Bytes}
	w.tell()
	err = tree.Contents(ctx, layers, func(n *ext4.Inode, content io.Reader) error {
		at, ok := plan.Offset(n)
		if !ok {
			return errors.New("a file has no place")
		}
		return w.copy(content, at, n.Size)
	})
	if err != nil {
		return Result{}, err
	}
	if err := plan.WriteMetadata(w); err != nil {
		return Result{}, err
	}
	if err := out.Truncate(plan.Size()); err != nil {
		return Result{}, fmt.Errorf("writing base: %w", err)
	}
	return Result{SizeBytes: plan.Size(), ContentBytes: tree.Bytes, Inodes: plan.Inodes()}, nil
}

// output is the file, written with holes for zeros, with an eye on the disk.
type output struct {
	file        *os.File
	reserve     int64
	report      func(Progress)
	done, total int64
	buffer      []byte
	unchecked   int64 // bytes since the disk was looked at
}

const (
	chunk      = 256 << 10
	checkEvery = 16 << 20
)

func (o *output) tell() {
	if o.report != nil {
		o.report(Progress{Done: o.done, Total: o.total})
	}
}

// copy writes size bytes of content at offset.
func (o *output) copy(content io.Reader, offset, size int64) error {
	if o.buffer == nil {
		o.buffer = make([]byte, chunk)
	}
	for size > 0 {
		b := o.buffer[:min(size, chunk)]
		n, err := io.ReadFull(content, b)
		if err != nil {
			if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
				return errors.New("the layer changed while it was read")
			}
			return err
		}
		if _, err := o.WriteAt(b, offset); err != nil {
			return err
		}
		before := o.done / checkEvery
		o.done += int64(n)
		if o.done/checkEvery != before || o.done == o.total {
			o.tell()
		}
		offset, size = offset+int64(n), size-int64(n)
	}
	return nil
}

// WriteAt leaves out blocks that are zero: the file is new, so they read as zeros anyway. Offsets of large writes are
// multiples of a block.
func (o *output) WriteAt(b []byte, offset int64) (int, error) {
	written := 0
	for len(b) > 0 {
		skip := 0
		for skip < len(b) && isZero(b[skip:min(len(b), skip+ext4.BlockSize)]) {
			skip = min(len(b), skip+ext4.BlockSize)
		}
		take := skip
		for take < len(b) && !isZero(b[take:min(len(b), take+ext4.BlockSize)]) {
			take = min(len(b), take+ext4.BlockSize)
		}
		if take > skip {
			if err := o.room(int64(take - skip)); err != nil {
				return written, err
			}
			if n, err := o.file.WriteAt(b[skip:take], offset+int64(skip)); err != nil {
				return written + n, fmt.Errorf("writing base: %w", err)
			}
		}
		written, offset, b = written+take, offset+int64(take), b[take:]
	}
	return written, nil
}

func isZero(b []byte) bool {
	for len(b) >= 8 {
		if b[0]|b[1]|b[2]|b[3]|b[4]|b[5]|b[6]|b[7] != 0 {
			return false
		}
		b = b[8:]
	}
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

// room looks at the free space at the first write and then every checkEvery bytes.
func (o *output) room(n int64) error {
	if o.unchecked += n; o.unchecked != n && o.unchecked < checkEvery {
		return nil
	}
	o.unchecked = n
	if o.reserve <= 0 {
		return nil
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(o.file.Fd()), &fs); err != nil {
		return fmt.Errorf("looking at the disk: %w", err)
	}
	if free := int64(fs.Bavail) * fs.Bsize; free < o.reserve+checkEvery {
		return fmt.Errorf("writing base: %w: %d bytes are free, %d stay reserved", ErrReserve, free, o.reserve)
	}
	return nil
}
