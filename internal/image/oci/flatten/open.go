package flatten

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"hash"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

// zstdWindow is the largest look-back of a zstd frame that is accepted, in bytes: it is memory. `zstd --long` asks for this.
const zstdWindow = 128 << 20

// stream is a layer unpacked, counted against the budget and hashed.
type stream struct {
	ctx    context.Context
	in     io.Reader
	close  func()
	hash   hash.Hash
	budget *budget
}

// open finds out by the first bytes how the blob is compressed: what a manifest says about it is often wrong.
func open(ctx context.Context, layer Layer, budget *budget) (*stream, error) {
	raw := bufio.NewReaderSize(io.NewSectionReader(layer.Blob, 0, layer.Blob.Size()), 256<<10)
	s := &stream{ctx: ctx, in: raw, close: func() {}, hash: sha256.New(), budget: budget}
	magic, err := raw.Peek(4)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	switch {
	case bytes.HasPrefix(magic, []byte{0x1f, 0x8b}):
		r, err := gzip.NewReader(raw)
		if err != nil {
			return nil, damaged(err)
		}
		s.in, s.close = r, func() { _ = r.Close() }
	case bytes.Equal(magic, []byte{0x28, 0xb5, 0x2f, 0xfd}) || len(magic) == 4 && magic[0]&0xf0 == 0x50 && bytes.Equal(magic[1:], []byte{0x2a, 0x4d, 0x18}):
		r, err := zstd.NewReader(raw, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(zstdWindow), zstd.WithDecoderLowmem(true))
		if err != nil {
			return nil, damaged(err)
		}
		s.in, s.close = r, r.Close
	}
	return s, nil
}

func (s *stream) Read(b []byte) (int, error) {
	if err := s.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := s.in.Read(b)
	s.hash.Write(b[:n])
	if over := s.budget.unpack(int64(n)); over != nil {
		return n, over
	}
	if err != nil && !errors.Is(err, io.EOF) {
		err = damaged(err)
	}
	return n, err
}

// drain reads what follows the archive's end, which belongs to the digest, and gives that.
func (s *stream) drain() (string, error) {
	if _, err := io.Copy(io.Discard, s); err != nil {
		return "", err
	}
	return "sha256:" + hex.EncodeToString(s.hash.Sum(nil)), nil
}

// damaged tells a broken stream, which is the image's fault, from a failing disk or an ended context.
func damaged(err error) error {
	if IsRefused(err) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	for _, known := range []error{
		io.ErrUnexpectedEOF, io.EOF, gzip.ErrHeader, gzip.ErrChecksum, zstd.ErrMagicMismatch, zstd.ErrWindowSizeExceeded,
		zstd.ErrDecoderSizeExceeded, zstd.ErrUnexpectedBlockSize, zstd.ErrCRCMismatch, zstd.ErrCompressedSizeTooBig, zstd.ErrBlockTooSmall,
		zstd.ErrReservedBlockType, zstd.ErrUnknownDictionary, zstd.ErrFrameSizeExceeded, zstd.ErrFrameSizeMismatch, zstd.ErrWindowSizeTooSmall,
	} {
		if errors.Is(err, known) {
			return refuse("the compressed data is damaged: %v", err)
		}
	}
	if isPathError(err) {
		return err
	}
	return refuse("the compressed data is damaged: %v", err)
}
