package linux

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"imp.dev/imp/internal/netns"
)

func TestWhatBelongsToNoNetworkIsRemovedAndToldAndNothingOfOthers(t *testing.T) {
	n := newSite(t, 1500).newNode(t)
	before := n.residue(t)
	namespace := func(name string) string {
		path := filepath.Join(n.o.NamespaceDir, name)
		f, err := netns.Make(path)
		must(t, err)
		f.Close()
		t.Cleanup(func() { _ = netns.Unname(path) })
		return path
	}
	mine, foreign := namespace(n.names.namespacePrefix()+"12345678"), namespace("imp-ffffffff-12345678")
	device := func(name, alias string) {
		must(t, n.host.nl.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name}}))
		must(t, n.host.nl.LinkSetAlias(mustLink(t, n.host, name), alias))
	}
	device(n.names.prefix()+"0123456789", n.names.alias("somebody"))
	device(n.names.prefix()+"9876543210", "of another instance with the same four digits")

	found, err := n.Audit(t.Context(), true)
	must(t, err)
	told := ""
	for _, f := range found {
		if !f.Orphan || !f.Repaired || f.Problem != "" {
			t.Errorf("%+v", f)
		}
		told += f.Kind + " " + f.Name + "\n"
	}
	if told != "namespace "+mine+"\ndevice "+n.names.prefix()+"0123456789\n" {
		t.Errorf("the audit tells:\n%s", told)
	}
	if _, err := os.Stat(foreign); err != nil {
		t.Errorf("another instance's namespace: %v", err)
	}
	must(t, n.host.nl.LinkDel(mustLink(t, n.host, n.names.prefix()+"9876543210")))
	must(t, netns.Unname(foreign))
	same(t, "cleared", before, n.residue(t))
	if again, err := n.Audit(t.Context(), true); err != nil || len(again) != 0 {
		t.Errorf("the next audit tells %v, %v", again, err)
	}
	if said := n.log.String(); strings.Count(said, "was removed") != 2 {
		t.Errorf("the log says: %s", said)
	}
}
