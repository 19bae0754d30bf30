package devserver

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"imp.dev/imp/internal/devserver/controlplane"
	"imp.dev/imp/internal/devserver/fabric"
)

// nodeRoutes are the ranges in which a node gets routes to its own guests: nodes that are only pretended have no others there.
const nodeRoutes = "10.0.0.0/8"

// Fabric gives the network namespaces of the nodes and of what lies between and beyond them; nil if guests' networks are not
// made of Linux'.
func (s *Server) Fabric() *fabric.Fabric { return s.fabric }

func (s *Server) makeHosts(context.Context) (err error) {
	if s.opts.Network != networkLinux {
		return nil
	}
	s.opts.Progress("making network namespaces for the nodes: " + s.Places.Namespaces + "-…")
	s.fabric, err = fabric.Make(s.Places.Namespaces, s.NodeNames())
	return err
}

// networkArgs tell a runtime what networks are made of and where its host is.
func (s *Server) networkArgs(node string) []string {
	args := []string{"--network=" + s.opts.Network}
	if s.fabric == nil {
		return args
	}
	host := s.fabric.Node(node)
	return append(args, "--host-netns="+host.Path(), "--node-address="+host.Address.String(), "--node-routes="+nodeRoutes)
}

// kubeletsWord is what the node's kubelet would say of it.
func (s *Server) kubeletsWord(node, bootID string) controlplane.Node {
	said := controlplane.Node{
		Name: node, BootID: bootID, Address: "127.0.0.1", PodCIDR: podRange(slices.Index(s.NodeNames(), node)).String(),
	}
	if s.fabric != nil {
		said.Address = s.fabric.Node(node).Address.String()
	}
	return said
}

// podRange is what a cluster would give the pods of the i-th node, counted from 0.
func podRange(i int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244, byte(1 + i), 0}), 24)
}

func (p Places) instanceFile(node string) string { return filepath.Join(p.stateDir(node), "instance") }

// networks are what the names of the network namespaces of these places' runtimes begin with: each runtime has an instance id in
// its state directory.
func (p Places) networks() []string {
	files, err := filepath.Glob(p.instanceFile("*"))
	if err != nil {
		return nil // the pattern's fault alone
	}
	var prefixes []string
	for _, file := range files {
		content, err := os.ReadFile(file)
		if id := strings.TrimSpace(string(content)); err == nil && id != "" {
			prefixes = append(prefixes, "imp-"+id+"-")
		}
	}
	return prefixes
}

// NetworkNamespace is where the node has the guests' network of that UID. It is there while a guest is.
func (s *Server) NetworkNamespace(node, uid string) fabric.Namespace {
	id, _ := os.ReadFile(s.Places.instanceFile(node)) // without one there is no such namespace, whatever the name
	return fabric.Namespace{Name: "imp-" + strings.TrimSpace(string(id)) + "-" + uid[:min(8, len(uid))]}
}
