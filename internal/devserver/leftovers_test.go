package devserver

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"imp.dev/imp/internal/devserver/fabric"

	"github.com/google/uuid"
	"github.com/vishvananda/netlink"
)

func TestEverythingOfAVMButItsRecordIsALeftover(t *testing.T) {
	const id = "5b2b53e0-63d8-4a94-8a3e-4a2f6f3b8f11"
	root := t.TempDir()
	s := &Server{Places: Places{Data: filepath.Join(root, "data"), Run: filepath.Join(root, "run"), Cgroup: "/imp-leftovers-test-none"}}
	for _, c := range []struct {
		name, path string
		left       int
	}{
		{"a record is kept to answer late orders", "data/node-1/records/" + id + ".json", 0},
		{"what a network knows of it is left", "data/node-1/network/vms/" + id + ".json", 1},
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

func TestALinkThatIsAliasedAfterAVMIsALeftover(t *testing.T) {
	if os.Geteuid() != 0 {
		if os.Getenv("IMP_REQUIRE_ALL") != "" {
			t.Fatal("needs root: it makes a network namespace")
		}
		t.Skip("needs root: it makes a network namespace")
	}
	const id = "5b2b53e0-63d8-4a94-8a3e-4a2f6f3b8f12"
	s := &Server{Places: Places{Data: t.TempDir(), Run: t.TempDir(), Cgroup: "/imp-leftovers-test-none"}}
	instance := uuid.NewString()[:8]
	if err := os.MkdirAll(s.Places.stateDir("node-1"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(s.Places.instanceFile("node-1"), []byte(instance+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	n, err := fabric.Create(s.NetworkNamespace("node-1", "0123456789").Name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = fabric.Remove(n.Name) })
	for name, alias := range map[string]string{"ione": "imp " + instance + " vm " + id + " eth0", "itwo": "imp " + instance + " vm another eth0"} {
		if err := n.Do(func() error {
			attributes := netlink.NewLinkAttrs()
			attributes.Name = name
			link := &netlink.Bridge{LinkAttrs: attributes}
			return errors.Join(netlink.LinkAdd(link), netlink.LinkSetAlias(link, alias))
		}); err != nil {
			t.Fatal(err)
		}
	}
	if left := s.Leftovers(id); len(left) != 1 || !strings.Contains(left[0], "link ione in network namespace "+n.Name) {
		t.Errorf("leftovers are %v, want the one link", left)
	}
	if names, err := s.Networks(); err != nil || len(names) != 1 || names[0] != n.Name {
		t.Errorf("networks are %v (%v), want %s", names, err, n.Name)
	}
}
