// Package clusterranges is what guests may not reach of a cluster, and how the operator writes it into the ConfigMap
// imp-cluster-ranges (v1alpha1.ClusterRangesName) and agents read it there. It is pure.
package clusterranges

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Keys of the ConfigMap's data. Each holds prefixes in CIDR form, one a line.
const (
	keyNodes    = "nodes"
	keyPods     = "pods"
	keyServices = "services"
)

// Ranges of a cluster, IPv4 only, each sorted and without repeats.
type Ranges struct {
	// Nodes are the nodes' own addresses. No guest may ever reach them.
	Nodes []netip.Prefix
	// Pods and Services are out of reach unless the network has nat.clusterAccess.
	Pods, Services []netip.Prefix
}

// Denied gives what guests of a network may not reach, sorted, and no prefix that lies within another: a set of intervals in
// the kernel takes no overlaps.
func (r Ranges) Denied(clusterAccess bool) []netip.Prefix {
	denied := slices.Clone(r.Nodes)
	if !clusterAccess {
		denied = append(append(denied, r.Pods...), r.Services...)
	}
	var outer []netip.Prefix
	for _, p := range tidy(denied) { // what contains others comes before them
		if len(outer) == 0 || !outer[len(outer)-1].Overlaps(p) {
			outer = append(outer, p)
		}
	}
	return outer
}

// Encode gives the ConfigMap's data. The same ranges give the same bytes.
func (r Ranges) Encode() map[string]string {
	return map[string]string{keyNodes: lines(r.Nodes), keyPods: lines(r.Pods), keyServices: lines(r.Services)}
}

// Decode reads what Encode wrote. Data that cannot be understood is an error: guests are not let loose on a guess.
func Decode(data map[string]string) (Ranges, error) {
	r := Ranges{}
	for _, part := range []struct {
		key string
		to  *[]netip.Prefix
	}{{keyNodes, &r.Nodes}, {keyPods, &r.Pods}, {keyServices, &r.Services}} {
		text, ok := data[part.key]
		if !ok {
			return Ranges{}, fmt.Errorf("reading cluster ranges: key %q is missing", part.key)
		}
		for line := range strings.FieldsSeq(text) {
			p, err := netip.ParsePrefix(line)
			if err != nil || !p.Addr().Is4() {
				return Ranges{}, fmt.Errorf("reading cluster ranges: %q in key %q is not an IPv4 prefix", line, part.key)
			}
			*part.to = append(*part.to, p)
		}
		*part.to = tidy(*part.to)
	}
	return r, nil
}

func lines(prefixes []netip.Prefix) string {
	b := strings.Builder{}
	for _, p := range tidy(prefixes) {
		b.WriteString(p.String() + "\n")
	}
	return b.String()
}

func tidy(prefixes []netip.Prefix) []netip.Prefix {
	out := slices.Clone(prefixes)
	for i, p := range out {
		out[i] = p.Masked()
	}
	slices.SortFunc(out, netip.Prefix.Compare)
	return slices.Compact(out)
}
