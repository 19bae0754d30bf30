package devserver

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"imp.dev/imp/internal/devserver/fabric"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

func TestEachNodeHasAHostOfItsOwnWithTheAddressThatItsNodeObjectTells(t *testing.T) {
	opts := options(t)
	opts.Network = networkLinux
	server, err := Up(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = server.Stop(t.Context()) // names the stand-in's VMMs
		clean(t, opts.Dir)
	}()
	c, err := server.client()
	if err != nil {
		t.Fatal(err)
	}
	for i, name := range server.NodeNames() {
		host := server.Fabric().Node(name)
		node := &corev1.Node{}
		if err := c.Get(t.Context(), client.ObjectKey{Name: name}, node); err != nil {
			t.Fatal(err)
		}
		if got := node.Status.Addresses[0].Address; got != host.Address.String() {
			t.Errorf("%s says its address is %s; its namespace has %s", name, got, host.Address)
		}
		if want := []string{"10.244.1.0/24", "10.244.2.0/24"}[i]; node.Spec.PodCIDR != want {
			t.Errorf("%s has the pods' range %q, want %q", name, node.Spec.PodCIDR, want)
		}
		content, err := os.ReadFile(filepath.Join(server.Places.stateDir(name), "args"))
		if err != nil {
			t.Fatal(err)
		}
		args := strings.Split(string(content), "\n")
		for _, want := range []string{"--network=linux", "--host-netns=" + host.Path(), "--node-address=" + host.Address.String(), "--node-routes=10.0.0.0/8"} {
			if !slices.Contains(args, want) {
				t.Errorf("the runtime of %s was not given %s: %q", name, want, args)
			}
		}
	}
}

func TestWithoutRealNetworksNoNamespaceIsMade(t *testing.T) {
	opts := options(t)
	server, err := Up(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = server.Stop(t.Context()) }() // names the stand-in's VMMs
	if left, err := fabric.Namespaces(server.Places.Namespaces); err != nil || len(left) != 0 || server.Fabric() != nil {
		t.Errorf("there are %v (%v)", left, err)
	}
}

func TestNetworksOfARuntimeAreKnownByItsStateDirectory(t *testing.T) {
	p := Places{Data: t.TempDir()}
	for node, id := range map[string]string{"node-1": "0123abcd\n", "node-2": "4567ef01\n", "node-3": ""} {
		if err := os.MkdirAll(p.stateDir(node), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(p.stateDir(node), "instance"), []byte(id), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got := p.networks(); !slices.Equal(got, []string{"imp-0123abcd-", "imp-4567ef01-"}) {
		t.Errorf("networks begin with %v; an id that is not there must not stand for all", got)
	}
}
