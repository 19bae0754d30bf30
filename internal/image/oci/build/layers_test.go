package build_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"imp.dev/imp/internal/image/oci/build"
	"imp.dev/imp/internal/image/oci/ext4/ext4test"
	"imp.dev/imp/internal/image/oci/flatten"
)

// item is one entry of a layer under construction.
type item struct {
	header  tar.Header
	content []byte
}

type option func(*item)

func file(name, content string, options ...option) item {
	return made(tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(content))}, []byte(content), options)
}
func dir(name string, options ...option) item {
	return made(tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: 0o755}, nil, options)
}
func symlink(name, target string, options ...option) item {
	return made(tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777}, nil, options)
}
func hardlink(name, target string) item {
	return made(tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: target}, nil, nil)
}
func device(name string, kind byte, major, minor int64, options ...option) item {
	return made(tar.Header{Typeflag: kind, Name: name, Mode: 0o600, Devmajor: major, Devminor: minor}, nil, options)
}
func fifo(name string, options ...option) item {
	return made(tar.Header{Typeflag: tar.TypeFifo, Name: name, Mode: 0o600}, nil, options)
}
func whiteout(name string) item { return file(name, "") }

func made(h tar.Header, content []byte, options []option) item {
	i := item{header: h, content: content}
	for _, o := range options {
		o(&i)
	}
	return i
}

func owned(uid, gid int) option { return func(i *item) { i.header.Uid, i.header.Gid = uid, gid } }
func mode(m int64) option       { return func(i *item) { i.header.Mode = m } }
func at(t time.Time) option {
	return func(i *item) { i.header.ModTime, i.header.Format = t, tar.FormatPAX }
}
func xattr(name, value string) option {
	return func(i *item) {
		if i.header.PAXRecords == nil {
			i.header.PAXRecords = map[string]string{}
		}
		i.header.PAXRecords["SCHILY.xattr."+name] = value
	}
}

func layer(t testing.TB, items ...item) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, i := range items {
		if err := w.WriteHeader(&i.header); err != nil {
			t.Fatalf("writing %q: %v", i.header.Name, err)
		}
		if _, err := w.Write(i.content); err != nil {
			t.Fatalf("writing %q: %v", i.header.Name, err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// helper is what the functions below need of a test; rapid's T has it too.
type helper interface {
	Helper()
	Fatalf(format string, args ...any)
}

func smallLimits() flatten.Limits {
	l := flatten.DefaultLimits()
	l.Entries, l.TotalBytes, l.Subdirectories = 20_000, 64<<20, 1000
	return l
}

// order writes the blobs below dir and orders their build. Without diff ids: the blobs may be compressed.
func order(h helper, dir string, blobs ...[]byte) build.Order {
	h.Helper()
	o := build.Order{Limits: smallLimits(), UUID: build.UUID("sha256:test").String(), Output: build.File{Path: filepath.Join(dir, "base.ext4")}}
	for i, b := range blobs {
		path := filepath.Join(dir, "blob"+string(rune('a'+i)))
		if err := os.WriteFile(path, b, 0o600); err != nil {
			h.Fatalf("writing blob: %v", err)
		}
		o.Layers = append(o.Layers, build.Layer{File: build.File{Path: path}})
	}
	if err := os.WriteFile(o.Output.Path, nil, 0o600); err != nil {
		h.Fatalf("making output: %v", err)
	}
	return o
}

func diffID(tarball []byte) string {
	sum := sha256.Sum256(tarball)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// view builds the layers, checks the file system and tells what the kernel sees in it.
func view(t *testing.T, blobs ...[]byte) map[string]ext4test.Entry {
	t.Helper()
	ext4test.NeedRoot(t)
	o := order(t, t.TempDir(), blobs...)
	if _, err := build.Run(context.Background(), o, nil); err != nil {
		t.Fatalf("building: %v", err)
	}
	fsck(t, o.Output.Path)
	return ext4test.Walk(t, ext4test.Mount(t, o.Output.Path), nil)
}

func fsck(h helper, image string) {
	h.Helper()
	if out, err := exec.Command("e2fsck", "-fn", image).CombinedOutput(); err != nil {
		h.Fatalf("e2fsck -fn is not content: %v\n%s", err, out)
	}
}
