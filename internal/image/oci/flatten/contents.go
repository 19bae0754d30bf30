package flatten

import (
	"archive/tar"
	"context"
	"fmt"
	"io"

	"imp.dev/imp/internal/image/oci/ext4"
)

// Contents reads the layers, the same that Flatten was given, once more and calls write with the content of each file that
// survived, once per inode. write must read all Inode.Size bytes.
func (t *Tree) Contents(ctx context.Context, layers []Layer, write func(*ext4.Inode, io.Reader) error) error {
	left := t.sources
	budget := newBudget(t.limits)
	for i, layer := range layers {
		n := 0
		for n < len(left) && left[n].layer == i {
			n++
		}
		if err := contentsOf(ctx, layer, left[:n], budget, write); err != nil {
			return fmt.Errorf("layer %d of %d: %w", i+1, len(layers), err)
		}
		left = left[n:]
	}
	if len(left) != 0 {
		return fmt.Errorf("the layers changed while they were read")
	}
	return nil
}

func contentsOf(ctx context.Context, layer Layer, wanted []source, budget *budget, write func(*ext4.Inode, io.Reader) error) error {
	if len(wanted) == 0 {
		return nil
	}
	s, err := open(ctx, layer, budget)
	if err != nil {
		return err
	}
	defer s.close()
	err = walk(s, func(number int, header *tar.Header, content io.Reader) error {
		if wanted[0].entry != number {
			return nil
		}
		if header.Size != wanted[0].inode.Size {
			return fmt.Errorf("the layer changed while it was read")
		}
		if err := write(wanted[0].inode, content); err != nil {
			return err
		}
		if wanted = wanted[1:]; len(wanted) == 0 {
			return io.EOF
		}
		return nil
	})
	if err == io.EOF { //nolint:errorlint // our own sign that nothing more is wanted
		return nil
	}
	if err == nil && len(wanted) != 0 {
		return fmt.Errorf("the layer changed while it was read")
	}
	return err
}
