package fake_test

import (
	"io/fs"
	"path/filepath"
	"testing"

	"imp.dev/imp/internal/network"
	"imp.dev/imp/internal/network/fake"
	"imp.dev/imp/internal/network/networktest"
)

func TestSuite(t *testing.T) {
	networktest.Run(t, func(t *testing.T) *networktest.Harness {
		dir := t.TempDir()
		open := func(t *testing.T) *fake.Network {
			t.Helper()
			n, err := fake.New(dir)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
		n := open(t)
		return &networktest.Harness{
			Network: n,
			Reopen:  func(t *testing.T) network.Network { n = open(t); return n },
			Fail:    func(err error) { n.Fail(err) },
			Residue: func(t *testing.T) []string {
				t.Helper()
				var files []string
				if err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
					files = append(files, path)
					return err
				}); err != nil {
					t.Fatal(err)
				}
				return files
			},
		}
	})
}
