package initramfs

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
)

// module is one kernel module, unpacked.
type module struct {
	name    string
	content []byte
	depends []string
}

// normal gives a module's name as the kernel prints it: files say virtio-rng, .modinfo says virtio_rng.
func normal(name string) string { return strings.ReplaceAll(name, "-", "_") }

// tree is one lib/modules/RELEASE.
type tree struct {
	files   map[string]string // by normal name
	builtin map[string]bool
}

// resolve gives the wanted modules and what they depend on, in the order of loading.
func resolve(dir string, wanted []string) ([]module, error) {
	t, err := openTree(dir)
	if err != nil {
		return nil, err
	}
	var (
		order []module
		done  = map[string]bool{}
		visit func(name, neededBy string) error
	)
	visit = func(name, neededBy string) error {
		if done[name] || t.builtin[name] {
			return nil
		}
		done[name] = true
		path, ok := t.files[name]
		if !ok {
			if neededBy == "" {
				return nil // the kernel was made without it
			}
			return fmt.Errorf("module %s needs %s, which is neither in %s nor built into the kernel", neededBy, name, dir)
		}
		m, err := load(path, name)
		if err != nil {
			return err
		}
		for _, d := range m.depends {
			if err := visit(d, name); err != nil {
				return err
			}
		}
		order = append(order, m)
		return nil
	}
	for _, name := range wanted {
		if err := visit(normal(name), ""); err != nil {
			return nil, err
		}
	}
	return order, nil
}

func openTree(dir string) (*tree, error) {
	t := &tree{files: map[string]string{}, builtin: map[string]bool{}}
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		if name, _, ok := strings.Cut(entry.Name(), ".ko"); ok {
			t.files[normal(name)] = path
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("reading kernel modules: %w", err)
	}
	list, err := os.ReadFile(filepath.Join(dir, "modules.builtin"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("reading list of built-in modules: %w", err)
	}
	lines := bufio.NewScanner(bytes.NewReader(list))
	for lines.Scan() {
		t.builtin[normal(strings.TrimSuffix(filepath.Base(lines.Text()), ".ko"))] = true
	}
	if len(t.files) == 0 && len(t.builtin) == 0 {
		return nil, fmt.Errorf("no kernel modules in %s", dir)
	}
	return t, nil
}

func load(path, name string) (module, error) {
	content, err := unpacked(path)
	if err != nil {
		return module{}, fmt.Errorf("reading module %s: %w", path, err)
	}
	depends, err := dependencies(content)
	if err != nil {
		return module{}, fmt.Errorf("reading module %s: %w", path, err)
	}
	return module{name: name, content: content, depends: depends}, nil
}

// unpacked reads a module file. Its name tells the compression; the guest's kernel may lack the code to undo it.
func unpacked(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var r io.Reader
	switch filepath.Ext(path) {
	case ".ko":
		r = f
	case ".gz":
		r, err = gzip.NewReader(f)
	case ".xz":
		r, err = xz.NewReader(f)
	case ".zst":
		var d *zstd.Decoder
		if d, err = zstd.NewReader(f, zstd.WithDecoderConcurrency(1)); err == nil {
			defer d.Close()
			r = d
		}
	default:
		return nil, fmt.Errorf("compression %q is not known", filepath.Ext(path))
	}
	if err != nil {
		return nil, err
	}
	content, err := io.ReadAll(io.LimitReader(r, MaxSize+1))
	if len(content) > MaxSize {
		return nil, fmt.Errorf("unpacks to more than %d bytes", MaxSize)
	}
	return content, err
}

func elfFile(content []byte) (*elf.File, error) {
	f, err := elf.NewFile(bytes.NewReader(content))
	if err != nil {
		return nil, fmt.Errorf("is no ELF file: %w", err)
	}
	return f, nil
}

// dependencies reads "depends=a,b" from the section .modinfo, a list of NUL-ended strings.
func dependencies(content []byte) ([]string, error) {
	f, err := elfFile(content)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	section := f.Section(".modinfo")
	if section == nil {
		return nil, errors.New("has no .modinfo section: not a kernel module")
	}
	info, err := section.Data()
	if err != nil {
		return nil, fmt.Errorf("reading .modinfo: %w", err)
	}
	for _, entry := range strings.Split(string(info), "\x00") {
		list, ok := strings.CutPrefix(entry, "depends=")
		if !ok || list == "" {
			continue
		}
		names := strings.Split(list, ",")
		for i := range names {
			names[i] = normal(names[i])
		}
		return names, nil
	}
	return nil, nil
}
