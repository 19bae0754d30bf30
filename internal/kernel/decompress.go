package kernel

import (
	"bytes"
	"compress/bzip2"
	"compress/gzip"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
	"github.com/ulikunitz/xz/lzma"
)

// Magic numbers of the payload formats (kernel: scripts/Makefile.lib, lib/decompress.c).
const (
	magicLZ4Legacy = "\x02\x21\x4c\x18"
	magicGzip      = "\x1f\x8b"
	magicXZ        = "\xfd7zXZ\x00"
	magicZstd      = "\x28\xb5\x2f\xfd"
	magicBzip2     = "BZh"
	magicLZMA      = "\x5d\x00\x00"
	magicLZO       = "\x89LZO"
)

// decompress writes the content of a payload. The kernel's build appends the unpacked size (4 bytes) to every format but
// gzip and plain ELF; a stream decoder must not see them.
func decompress(payload []byte, w io.Writer) error {
	var (
		name string
		err  error
	)
	body := payload[:max(0, len(payload)-4)]
	is := func(magic string) bool { return bytes.HasPrefix(payload, []byte(magic)) }
	switch {
	case is(elf.ELFMAG):
		_, err = w.Write(payload)
		return err
	case is(magicLZ4Legacy):
		name, err = "LZ4", lz4Legacy(body, w)
	case is(magicGzip):
		name, err = "gzip", gunzip(payload, w)
	case is(magicXZ):
		name, err = "xz", unxz(body, w)
	case is(magicZstd):
		name, err = "zstd", unzstd(body, w)
	case is(magicBzip2):
		name = "bzip2"
		_, err = io.Copy(w, bzip2.NewReader(bytes.NewReader(body)))
	case is(magicLZMA):
		name, err = "LZMA", unlzma(body, w)
	case is(magicLZO):
		return errors.New("kernel is compressed with LZO, which is not supported: give the unpacked vmlinux")
	default:
		return fmt.Errorf("kernel's compression is not known (first bytes %x)", payload[:min(8, len(payload))])
	}
	if err != nil {
		return fmt.Errorf("unpacking %s payload: %w", name, err)
	}
	return nil
}

func gunzip(payload []byte, w io.Writer) error {
	r, err := gzip.NewReader(bytes.NewReader(payload))
	if err != nil {
		return err
	}
	// The size that follows the stream is no second member.
	r.Multistream(false)
	_, err = io.Copy(w, r)
	return err
}

func unzstd(body []byte, w io.Writer) error {
	r, err := zstd.NewReader(bytes.NewReader(body), zstd.WithDecoderMaxWindow(maxSize), zstd.WithDecoderConcurrency(1))
	if err != nil {
		return err
	}
	defer r.Close()
	_, err = io.Copy(w, r)
	return err
}

func unlzma(body []byte, w io.Writer) error {
	r, err := lzma.NewReader(bytes.NewReader(body))
	if err != nil {
		return err
	}
	_, err = io.Copy(w, r)
	return err
}

// lz4Legacy decodes the old frame of lz4 -l: the magic, then blocks of at most 8 MiB of content, each preceded by its
// compressed size; a magic in a size's place begins another frame.
func lz4Legacy(body []byte, w io.Writer) error {
	const blockSize = 8 << 20
	out := make([]byte, blockSize)
	for len(body) >= 4 {
		size := int64(binary.LittleEndian.Uint32(body))
		if bytes.HasPrefix(body, []byte(magicLZ4Legacy)) {
			body = body[4:]
			continue
		}
		if size == 0 || size > int64(len(body)-4) {
			return fmt.Errorf("block of %d bytes with %d left", size, len(body)-4)
		}
		n, err := lz4.UncompressBlock(body[4:4+size], out)
		if err != nil {
			return err
		}
		if _, err := w.Write(out[:n]); err != nil {
			return err
		}
		body = body[4+size:]
	}
	if len(body) != 0 {
		return fmt.Errorf("%d bytes behind the last block", len(body))
	}
	return nil
}
