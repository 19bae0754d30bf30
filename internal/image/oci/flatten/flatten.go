// Package flatten turns the layers of an OCI image into the one tree that a container of it would see.
//
// Layers are applied from the lowest up, on a tree in memory; nothing is ever unpacked into a directory, so no name, link or
// device in a layer can reach the host. The rules are those of the OCI image specification's layer.md, made exact where it is
// silent:
//
//   - Whiteouts of a layer act before its entries, and only on what lower layers made. A whiteout below a directory that
//     this very layer puts in place of something else hides nothing.
//   - Of several entries with one name in a layer the last wins. A directory over a directory keeps its children and takes
//     the new attributes, all of them; anything else replaces what was there.
//   - Parents are found as the kernel would in a chroot: symbolic links are followed inside the root, ".." stops at it.
//     Missing parents are made: root's, 0755, of 1970. A parent that is a file is refused.
//   - A hard link is resolved at its place in its layer and shares the inode, not the name: replacing one name later leaves
//     the other as it was.
//   - Global pax headers are skipped; GNU and PAX sparse files are read as what they stand for.
//
// Content is not kept: the tree remembers in which entry of which layer each file's bytes stand, and Contents reads the layers
// once more to hand them out.
package flatten

import (
	"context"
	"errors"
	"fmt"
	"io"
)

// Limits on an image. Reading stops at the first one passed, so that a bomb costs no more than the limit. Zero is no limit.
type Limits struct {
	Layers int `json:"layers"`
	// Entries of all layers together, those hidden by others too.
	Entries int `json:"entries"`
	// TotalBytes of all layers unpacked, and of the content of the resulting tree.
	TotalBytes int64 `json:"totalBytes"`
	// MetadataBytes of names, link targets and attributes of all entries: what is held in memory.
	MetadataBytes int64 `json:"metadataBytes"`
	// XattrBytes of one inode: 16 bytes, the name and the value of each attribute.
	XattrBytes int `json:"xattrBytes"`
	// Subdirectories of one directory.
	Subdirectories int `json:"subdirectories"`
	// NameBytes of one component, PathBytes of a whole name, Depth in directories.
	NameBytes int `json:"nameBytes"`
	PathBytes int `json:"pathBytes"`
	Depth     int `json:"depth"`
}

// DefaultLimits hold for any image a person has a use for.
func DefaultLimits() Limits {
	return Limits{
		Layers: 512, Entries: 500_000, TotalBytes: 64 << 30, MetadataBytes: 256 << 20,
		XattrBytes: 3584, Subdirectories: 60_000, NameBytes: 255, PathBytes: 4095, Depth: 1024,
	}
}

// Refused is content that no retry cures: the image itself is not what an image may be.
type Refused struct{ Reason string }

func (r *Refused) Error() string { return r.Reason }

func refuse(format string, args ...any) error {
	return &Refused{Reason: fmt.Sprintf(format, args...)}
}

// IsRefused says whether err is about the image's content rather than this node.
func IsRefused(err error) bool {
	r := (*Refused)(nil)
	return errors.As(err, &r)
}

// Layer is one layer's blob, readable again and again.
type Layer struct {
	// Blob is the content as the registry gave it: a tar, bare or compressed by gzip or zstd.
	Blob *io.SectionReader
	// DiffID is the digest of the unpacked tar ("sha256:…"); empty is not checked.
	DiffID string
}

// quote shows a name of the image in an error: escaped, and cut where it is long.
func quote(name string) string {
	const most = 160
	if len(name) > most {
		return fmt.Sprintf("%.160q… (%d bytes)", name, len(name))
	}
	return fmt.Sprintf("%q", name)
}

// Flatten reads all layers, lowest first, and gives the winning tree. Errors are Refused, those of reading blobs, or ctx's.
func Flatten(ctx context.Context, layers []Layer, limits Limits) (*Tree, error) {
	if limits.Layers > 0 && len(layers) > limits.Layers {
		return nil, refuse("the image has %d layers, the limit is %d", len(layers), limits.Layers)
	}
	tree := newTree(limits)
	budget := newBudget(limits)
	for i, layer := range layers {
		entries, err := readIndex(ctx, layer, budget)
		if err != nil {
			return nil, fmt.Errorf("layer %d of %d: %w", i+1, len(layers), err)
		}
		if err := tree.apply(i, entries); err != nil {
			return nil, fmt.Errorf("layer %d of %d: %w", i+1, len(layers), err)
		}
	}
	if err := tree.finish(); err != nil {
		return nil, err
	}
	return tree, nil
}
