package oci_test

import (
	"archive/tar"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"imp.dev/imp/internal/disk"
	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/image/oci"
)

// pattern never ends and has no zeros: what is made of it takes room.
type pattern struct{}

func (pattern) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = byte(i%251 + 1)
	}
	return len(b), nil
}

func big(b *testing.B, size int64) v1.Layer {
	b.Helper()
	path := filepath.Join(b.TempDir(), "layer.tar")
	f, err := os.Create(path)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	w := tar.NewWriter(f)
	const files = 16
	for i := range files {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: fmt.Sprint(i), Mode: 0o644, Size: size / files}); err != nil {
			b.Fatal(err)
		}
		if _, err := io.CopyN(w, pattern{}, size/files); err != nil {
			b.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		b.Fatal(err)
	}
	l, err := tarball.LayerFromFile(path)
	if err != nil {
		b.Fatal(err)
	}
	return l
}

// BenchmarkDisksOfACachedImage shows what a VM's two disks cost once the image is here: the size of the image must not matter.
// The ratio of the two is the figure to look at (at most 1.2).
func BenchmarkDisksOfACachedImage(b *testing.B) {
	h := newHub(b)
	root := b.TempDir()
	s := open(b, func(c *oci.Config) { c.Dir = filepath.Join(root, "images") })
	sizes := []struct {
		name string
		size int64
	}{{"10mib", 10 << 20}, {"1gib", 1 << 30}}
	for _, c := range sizes {
		h.push(c.name, picture{layers: []v1.Layer{big(b, c.size)}}.image(b))
		began := time.Now()
		_, timing, err := s.Ensure(context.Background(), image.Request{Reference: h.ref(c.name), Architecture: amd64}, nil)
		if err != nil {
			b.Fatal(err)
		}
		b.Logf("%s: first time %v (pull %v, build %v)", c.name, time.Since(began), timing.Pull, timing.Build)
	}
	var spent [2]time.Duration
	n := 0
	for b.Loop() {
		for i, c := range sizes { // interleaved, so that the machine's mood is the same for both
			vm := filepath.Join(root, fmt.Sprintf("vm-%d-%d", n, i))
			if err := os.Mkdir(vm, 0o700); err != nil {
				b.Fatal(err)
			}
			began := time.Now()
			ensure(b, s, image.Request{Reference: h.ref(c.name), Architecture: amd64, LinkTo: filepath.Join(vm, "base.ext4")})
			if err := disk.Create(context.Background(), disk.Disk{Path: filepath.Join(vm, "private.ext4"), SizeGiB: 10}); err != nil {
				b.Fatal(err)
			}
			spent[i] += time.Since(began)
		}
		n++
	}
	for i, c := range sizes {
		b.ReportMetric(float64(spent[i].Microseconds())/float64(n), "us/"+c.name)
	}
	b.ReportMetric(float64(spent[1])/float64(spent[0]), "ratio")
}
