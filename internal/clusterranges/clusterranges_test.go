package clusterranges

import (
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func prefixes(texts ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, text := range texts {
		out = append(out, netip.MustParsePrefix(text))
	}
	return out
}

func cluster() Ranges {
	return Ranges{Nodes: prefixes("192.0.2.1/32", "192.0.2.2/32"), Pods: prefixes("10.42.0.0/16"), Services: prefixes("10.96.0.0/12")}
}

func TestWhatGuestsMayNotReach(t *testing.T) {
	for name, tc := range map[string]struct {
		ranges        Ranges
		clusterAccess bool
		want          []netip.Prefix
	}{
		"nodes, pods and Services":               {ranges: cluster(), want: prefixes("10.42.0.0/16", "10.96.0.0/12", "192.0.2.1/32", "192.0.2.2/32")},
		"the nodes even with cluster access":     {ranges: cluster(), clusterAccess: true, want: prefixes("192.0.2.1/32", "192.0.2.2/32")},
		"nothing where there is nothing":         {},
		"a range that is named twice, once":      {ranges: Ranges{Pods: prefixes("10.0.0.0/8"), Services: prefixes("10.0.0.0/8")}, want: prefixes("10.0.0.0/8")},
		"the outer of two ranges":                {ranges: Ranges{Pods: prefixes("10.0.0.0/8"), Services: prefixes("10.96.0.0/12")}, want: prefixes("10.0.0.0/8")},
		"no node's address that lies in a range": {ranges: Ranges{Nodes: prefixes("10.1.2.3/32"), Pods: prefixes("10.0.0.0/8")}, want: prefixes("10.0.0.0/8")},
		"but that address with cluster access":   {ranges: Ranges{Nodes: prefixes("10.1.2.3/32"), Pods: prefixes("10.0.0.0/8")}, clusterAccess: true, want: prefixes("10.1.2.3/32")},
		"neighbours, each for itself":            {ranges: Ranges{Pods: prefixes("10.0.1.0/24", "10.0.0.0/24")}, want: prefixes("10.0.0.0/24", "10.0.1.0/24")},
	} {
		t.Run(name, func(t *testing.T) {
			if got := tc.ranges.Denied(tc.clusterAccess); !slices.Equal(got, tc.want) {
				t.Errorf("denied are %v, want %v", got, tc.want)
			}
		})
	}
}

func TestTheConfigMapHoldsOnePrefixALineInOrder(t *testing.T) {
	r := Ranges{Nodes: prefixes("192.0.2.10/32", "192.0.2.9/32", "192.0.2.10/32"), Pods: prefixes("10.42.7.0/16")}
	want := map[string]string{"nodes": "192.0.2.9/32\n192.0.2.10/32\n", "pods": "10.42.0.0/16\n", "services": ""}
	if got := r.Encode(); !maps.Equal(got, want) {
		t.Errorf("the data is %q, want %q", got, want)
	}
}

func TestAConfigMapThatCannotBeUnderstoodIsRefused(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(map[string]string)
		want   string
	}{
		"no nodes":              {func(d map[string]string) { delete(d, "nodes") }, `key "nodes" is missing`},
		"no pods":               {func(d map[string]string) { delete(d, "pods") }, `key "pods" is missing`},
		"no services":           {func(d map[string]string) { delete(d, "services") }, `key "services" is missing`},
		"nothing at all":        {func(d map[string]string) { clear(d) }, "is missing"},
		"a name":                {func(d map[string]string) { d["pods"] = "10.42.0.0/16\npods\n" }, `"pods" in key "pods" is not an IPv4 prefix`},
		"an address":            {func(d map[string]string) { d["nodes"] = "192.0.2.1" }, `"192.0.2.1" in key "nodes" is not an IPv4 prefix`},
		"IPv6":                  {func(d map[string]string) { d["services"] = "fd00::/108" }, `"fd00::/108" in key "services" is not an IPv4 prefix`},
		"IPv4 inside of IPv6":   {func(d map[string]string) { d["pods"] = "::ffff:10.0.0.0/104" }, "is not an IPv4 prefix"},
		"a comma between two":   {func(d map[string]string) { d["pods"] = "10.0.0.0/24,10.0.1.0/24" }, "is not an IPv4 prefix"},
		"a prefix that is long": {func(d map[string]string) { d["pods"] = "10.0.0.0/33" }, "is not an IPv4 prefix"},
	} {
		t.Run(name, func(t *testing.T) {
			data := cluster().Encode()
			tc.change(data)
			got, err := Decode(data)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("read %v with error %v, want one that says %s", got, err, tc.want)
			}
			if len(got.Nodes)+len(got.Pods)+len(got.Services) > 0 {
				t.Errorf("half of it was given all the same: %v", got)
			}
		})
	}
}

func TestAConfigMapIsReadHoweverItWasWritten(t *testing.T) {
	got, err := Decode(map[string]string{
		"nodes": "  192.0.2.2/32\r\n\n192.0.2.1/32 192.0.2.2/32", "pods": "10.42.3.4/16", "services": "", "else": "?",
	})
	want := Ranges{Nodes: prefixes("192.0.2.1/32", "192.0.2.2/32"), Pods: prefixes("10.42.0.0/16")}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("read %v (%v), want %v", got, err, want)
	}
}

// anyPrefixes draws IPv4 prefixes with host bits, repeats and overlaps, out of few bytes so that these happen.
func anyPrefixes() *rapid.Generator[[]netip.Prefix] {
	octet := rapid.SampledFrom([]byte{0, 1, 10, 128, 255})
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) netip.Prefix {
		address := netip.AddrFrom4([4]byte{octet.Draw(t, "a"), octet.Draw(t, "b"), octet.Draw(t, "c"), octet.Draw(t, "d")})
		return netip.PrefixFrom(address, rapid.IntRange(0, 32).Draw(t, "length"))
	}), 0, 12)
}

func anyRanges() *rapid.Generator[Ranges] {
	return rapid.Custom(func(t *rapid.T) Ranges {
		return Ranges{
			Nodes: anyPrefixes().Draw(t, "nodes"), Pods: anyPrefixes().Draw(t, "pods"), Services: anyPrefixes().Draw(t, "services"),
		}
	})
}

func TestWhatTheOperatorWritesIsWhatAgentsRead(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		written := anyRanges().Draw(t, "ranges")
		read, err := Decode(written.Encode())
		if err != nil {
			t.Fatal(err)
		}
		for _, access := range []bool{false, true} {
			if !slices.Equal(read.Denied(access), written.Denied(access)) {
				t.Fatalf("agents deny %v, the operator meant %v", read.Denied(access), written.Denied(access))
			}
		}
		if again, err := Decode(read.Encode()); err != nil || !reflect.DeepEqual(again, read) {
			t.Fatalf("written again it reads %v (%v), before %v", again, err, read)
		}
	})
}

// The order in which a cluster's nodes are listed must not make a write, and with it work on every node.
func TestTheSameRangesInAnotherOrderGiveTheSameBytes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		one := anyRanges().Draw(t, "ranges")
		other := Ranges{
			Nodes:    rapid.Permutation(append(one.Nodes, one.Nodes...)).Draw(t, "nodes"),
			Pods:     rapid.Permutation(one.Pods).Draw(t, "pods"),
			Services: rapid.Permutation(one.Services).Draw(t, "services"),
		}
		if !maps.Equal(one.Encode(), other.Encode()) {
			t.Fatalf("%v is written as %q, %v as %q", one, one.Encode(), other, other.Encode())
		}
	})
}

func TestADeniedAddressIsInExactlyOnePrefix(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := anyRanges().Draw(t, "ranges")
		denied := r.Denied(false)
		if !slices.IsSortedFunc(denied, netip.Prefix.Compare) {
			t.Fatalf("%v is not in order", denied)
		}
		for _, p := range slices.Concat(r.Nodes, r.Pods, r.Services) {
			within := 0
			for _, d := range denied {
				if d.Overlaps(p) && d.Bits() <= p.Bits() {
					within++
				}
			}
			if within != 1 {
				t.Fatalf("%v is within %d of %v, want 1", p, within, denied)
			}
		}
		for i, p := range denied {
			for _, q := range denied[i+1:] {
				if p.Overlaps(q) {
					t.Fatalf("%v and %v overlap", p, q)
				}
			}
		}
	})
}
