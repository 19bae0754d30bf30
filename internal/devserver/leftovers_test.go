package devserver

import (
	"os"
	"path/filepath"
	"testing"
)

func TestEverythingOfAVMButItsRecordIsALeftover(t *testing.T) {
	const id = "5b2b53e0-63d8-4a94-8a3e-4a2f6f3b8f11"
	root := t.TempDir()
	s := &Server{Places: Places{Data: filepath.Join(root, "data"), Run: filepath.Join(root, "run"), Cgroup: "/imp-leftovers-test-none"}}
	for _, c := range []struct {
		name, path string
		left       int
	}{
		{"a record is kept to answer late orders", "data/node-1/record/" + id + ".json", 0},
		{"another VM's disk is not this one's", "data/node-1/vm/another/private.ext4", 0},
		{"a folder with its disk is left, and told once", "data/node-1/vm/" + id + "/private.ext4", 1},
		{"what is in the run folder is left", "run/node-1/vm/" + id + "/1/qmp.sock", 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(root, c.path)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.RemoveAll(filepath.Dir(path)) })
			if left := s.Leftovers(id); len(left) != c.left {
				t.Errorf("leftovers are %v, want %d", left, c.left)
			}
		})
	}
}
