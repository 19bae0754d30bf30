package imagefile

import (
	"archive/tar"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// packDir streams dir as a tarball: owners by number, modes with setuid, hard links, symlinks, devices, extended
// attributes. Entries come in lexical order and times are whole seconds, so that one directory gives one digest.
func packDir(dir string) io.ReadCloser {
	reader, writer := io.Pipe()
	go func() {
		p := &packer{dir: dir, archive: tar.NewWriter(writer), links: map[[2]uint64]string{}}
		err := filepath.WalkDir(dir, p.add)
		if err == nil {
			err = p.archive.Close()
		}
		writer.CloseWithError(err) // nil becomes EOF
	}()
	return reader
}

type packer struct {
	dir     string
	archive *tar.Writer
	links   map[[2]uint64]string // device and inode of files with more than one name
}

func (p *packer) add(path string, entry fs.DirEntry, err error) error {
	if err != nil {
		return err
	}
	relative, err := filepath.Rel(p.dir, path)
	if err != nil || relative == "." {
		return err
	}
	info, err := entry.Info()
	if err != nil {
		return err
	}
	if info.Mode()&fs.ModeSocket != 0 {
		return nil // has no meaning in an image
	}
	header, err := p.header(path, relative, info)
	if err != nil {
		return fmt.Errorf("packing %s: %w", path, err)
	}
	if err := p.archive.WriteHeader(header); err != nil {
		return fmt.Errorf("packing %s: %w", path, err)
	}
	if header.Typeflag != tar.TypeReg {
		return nil
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := io.Copy(p.archive, f); err != nil {
		return fmt.Errorf("packing %s: %w", path, err)
	}
	return nil
}

func (p *packer) header(path, relative string, info fs.FileInfo) (*tar.Header, error) {
	target := ""
	if info.Mode()&fs.ModeSymlink != 0 {
		var err error
		if target, err = os.Readlink(path); err != nil {
			return nil, err
		}
	}
	header, err := tar.FileInfoHeader(info, target)
	if err != nil {
		return nil, err
	}
	header.Name = filepath.ToSlash(relative)
	if info.IsDir() {
		header.Name += "/"
	}
	header.Uname, header.Gname = "", "" // numbers are what counts; this machine's names are not the image's
	header.ModTime = info.ModTime().Truncate(time.Second)
	header.AccessTime, header.ChangeTime = time.Time{}, time.Time{}
	header.Format = tar.FormatPAX
	if stat, ok := info.Sys().(*syscall.Stat_t); ok && info.Mode().IsRegular() && stat.Nlink > 1 {
		key := [2]uint64{stat.Dev, stat.Ino}
		if first, seen := p.links[key]; seen {
			header.Typeflag, header.Linkname, header.Size = tar.TypeLink, first, 0
			return header, nil
		}
		p.links[key] = header.Name
	}
	header.PAXRecords, err = xattrs(path)
	return header, err
}

// xattrs gives a file's extended attributes as PAX records. Those of the kernel's own bookkeeping are left out.
func xattrs(path string) (map[string]string, error) {
	size, err := unix.Llistxattr(path, nil)
	if err != nil || size == 0 {
		return nil, nil //nolint:nilerr // a file system without attributes has none
	}
	list := make([]byte, size)
	if size, err = unix.Llistxattr(path, list); err != nil {
		return nil, fmt.Errorf("listing attributes: %w", err)
	}
	records := map[string]string{}
	for name := range strings.SplitSeq(strings.TrimRight(string(list[:size]), "\x00"), "\x00") {
		if !strings.HasPrefix(name, "user.") && name != "security.capability" {
			continue
		}
		value := make([]byte, 64<<10) // the kernel's limit
		n, err := unix.Lgetxattr(path, name, value)
		if err != nil {
			return nil, fmt.Errorf("reading attribute %s: %w", name, err)
		}
		records["SCHILY.xattr."+name] = string(value[:n])
	}
	return records, nil
}
