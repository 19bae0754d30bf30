package kernel

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/ulikunitz/xz"
	"github.com/ulikunitz/xz/lzma"
)

// unxz decodes an xz stream. The kernel's build passes code through the x86 branch filter before LZMA2 ("xz --x86 --lzma2"),
// which the xz package does not know: such a stream is taken apart here. It has one block; its checks are not verified (the
// ELF is looked at afterwards, and the file was the administrator's choice).
func unxz(body []byte, w io.Writer) error {
	block, filters, err := xzBlock(body)
	if err != nil {
		return err
	}
	if len(filters) == 1 {
		r, err := xz.NewReader(bytes.NewReader(body))
		if err != nil {
			return err
		}
		_, err = io.Copy(w, r)
		return err
	}
	if len(filters) != 2 || filters[0].id != filterX86 || filters[1].id != filterLZMA2 {
		return errors.New("xz filters other than x86 and LZMA2")
	}
	r, err := lzma.Reader2Config{DictCap: dictionarySize(filters[1].properties)}.NewReader2(bytes.NewReader(block))
	if err != nil {
		return err
	}
	code, err := io.ReadAll(io.LimitReader(r, maxSize))
	if err != nil {
		return err
	}
	undoX86(code)
	_, err = w.Write(code)
	return err
}

// Filter ids of the .xz format, section 5.3.
const (
	filterX86   = 0x04
	filterLZMA2 = 0x21
)

type xzFilter struct {
	id         uint64
	properties []byte
}

// xzBlock gives the filters of the first block and what follows its header. Layout: .xz file format 1.2, sections 2.1.1 and 3.1.
func xzBlock(body []byte) (rest []byte, filters []xzFilter, err error) {
	const streamHeader = 12
	broken := errors.New("xz header is broken")
	if len(body) < streamHeader+1 || body[streamHeader] == 0 {
		return nil, nil, broken
	}
	size := (int(body[streamHeader]) + 1) * 4
	if len(body) < streamHeader+size {
		return nil, nil, broken
	}
	header := bytes.NewReader(body[streamHeader+2 : streamHeader+size-4])
	flags := body[streamHeader+1]
	for _, present := range []byte{0x40, 0x80} { // compressed and uncompressed size
		if flags&present == 0 {
			continue
		}
		if _, err := binary.ReadUvarint(header); err != nil {
			return nil, nil, broken
		}
	}
	for range int(flags&3) + 1 {
		id, err1 := binary.ReadUvarint(header)
		length, err2 := binary.ReadUvarint(header)
		if err1 != nil || err2 != nil || length > uint64(header.Len()) {
			return nil, nil, broken
		}
		f := xzFilter{id: id, properties: make([]byte, length)}
		if _, err := io.ReadFull(header, f.properties); err != nil {
			return nil, nil, fmt.Errorf("%w: %w", broken, err)
		}
		filters = append(filters, f)
	}
	return body[streamHeader+size:], filters, nil
}

// dictionarySize decodes LZMA2's property byte, section 5.3.1.
func dictionarySize(properties []byte) int {
	const largest = 64 << 20 // the kernel's build uses 32 MiB
	if len(properties) != 1 || properties[0] > 40 {
		return largest
	}
	bits := int(properties[0])
	size := (2 | int64(bits&1)) << (bits/2 + 11)
	return int(min(size, largest))
}

// undoX86 reverses the x86 filter: the operands of CALL (E8) and JMP (E9), stored as absolute addresses so that repeated
// targets compress, become relative again. The mask keeps the last opcodes seen, since an E8 or E9 that is itself part of an operand
// was left alone by the encoder.
func undoX86(b []byte) {
	plausible := func(v byte) bool { return v == 0 || v == 0xff }
	allowed := [8]bool{true, true, true, false, true, false, false, false}
	position := [8]int{0, 1, 2, 2, 3, 3, 3, 3}
	previous, mask := -1, 0
	for i := 0; i+4 < len(b); {
		if b[i]&0xfe != 0xe8 {
			i++
			continue
		}
		if gap := i - previous; previous >= 0 && gap <= 3 {
			mask = mask << (gap - 1) & 7
			if mask != 0 && (!allowed[mask] || plausible(b[i+4-position[mask]])) {
				previous, mask = i, mask<<1&7|1
				i++
				continue
			}
		} else {
			mask = 0
		}
		previous = i
		if !plausible(b[i+4]) {
			mask = mask<<1&7 | 1
			i++
			continue
		}
		absolute := binary.LittleEndian.Uint32(b[i+1:])
		relative := absolute - uint32(i+5)
		for mask != 0 {
			shift := position[mask] * 8
			if !plausible(byte(relative >> (24 - shift))) {
				break
			}
			absolute = relative ^ (1<<(32-shift) - 1)
			relative = absolute - uint32(i+5)
		}
		relative &= 1<<25 - 1
		if relative&(1<<24) != 0 {
			relative |= 0xff000000
		}
		binary.LittleEndian.PutUint32(b[i+1:], relative)
		mask = 0
		i += 5
	}
}
