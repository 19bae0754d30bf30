package ipam_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"imp.dev/imp/internal/ipam"

	"pgregory.net/rapid"
)

func address(s string) netip.Addr { return netip.MustParseAddr(s) }

func pool(t *testing.T, subnet, gateway string) ipam.Pool {
	t.Helper()
	p, err := ipam.Parse(subnet, gateway)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestWhatAPoolIsMadeOf(t *testing.T) {
	for name, test := range map[string]struct {
		subnet, gateway string
		wantGateway     string
		wantCapacity    int64
		wantError       string
	}{
		"a /24 has its first host as gateway":     {subnet: "10.44.0.0/24", wantGateway: "10.44.0.1", wantCapacity: 253},
		"a gateway of one's own":                  {subnet: "10.44.0.0/24", gateway: "10.44.0.254", wantGateway: "10.44.0.254", wantCapacity: 253},
		"a /30 has room for one guest":            {subnet: "192.168.7.4/30", wantGateway: "192.168.7.5", wantCapacity: 1},
		"a /8 has room for sixteen millions":      {subnet: "10.0.0.0/8", wantGateway: "10.0.0.1", wantCapacity: 16777213},
		"no CIDR":                                 {subnet: "10.44.0.0", wantError: `subnet "10.44.0.0" is not an IPv4 subnet in CIDR form, like 10.44.0.0/24`},
		"IPv6":                                    {subnet: "fd00::/64", wantError: `subnet "fd00::/64" is not an IPv4 subnet in CIDR form, like 10.44.0.0/24`},
		"host bits":                               {subnet: "10.44.0.7/24", wantError: "subnet 10.44.0.7/24 has host bits set: write 10.44.0.0/24"},
		"too small":                               {subnet: "10.44.0.0/31", wantError: "subnet 10.44.0.0/31 is none of /8 to /30"},
		"too large":                               {subnet: "0.0.0.0/7", wantError: "subnet 0.0.0.0/7 is none of /8 to /30"},
		"a gateway outside":                       {subnet: "10.44.0.0/24", gateway: "10.45.0.1", wantError: "gateway 10.45.0.1 is outside subnet 10.44.0.0/24"},
		"the subnet's own address as gateway":     {subnet: "10.44.0.0/24", gateway: "10.44.0.0", wantError: "gateway 10.44.0.0 is the address of subnet 10.44.0.0/24 itself"},
		"the broadcast address as gateway":        {subnet: "10.44.0.0/24", gateway: "10.44.0.255", wantError: "gateway 10.44.0.255 is the broadcast address of subnet 10.44.0.0/24"},
		"a gateway that is no address":            {subnet: "10.44.0.0/24", gateway: "gw", wantError: `gateway "gw" is not an IPv4 address`},
		"an IPv4 address in IPv6 form is refused": {subnet: "10.44.0.0/24", gateway: "::ffff:10.44.0.9", wantError: `gateway "::ffff:10.44.0.9" is not an IPv4 address`},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := ipam.Parse(test.subnet, test.gateway)
			if got := fmt.Sprint(err); test.wantError != "" || err != nil {
				if got != test.wantError {
					t.Errorf("got %s, want %s", got, test.wantError)
				}
				return
			}
			if p.Gateway() != address(test.wantGateway) || p.Capacity() != test.wantCapacity {
				t.Errorf("gateway %s, capacity %d; want %s, %d", p.Gateway(), p.Capacity(), test.wantGateway, test.wantCapacity)
			}
		})
	}
}

func TestWhyAnAddressCannotBeAGuests(t *testing.T) {
	p := pool(t, "10.44.0.0/24", "10.44.0.9")
	for given, want := range map[string]string{
		"10.44.0.1":   "<nil>", // the first host, where another is the gateway
		"10.44.0.254": "<nil>",
		"10.44.0.9":   "is the gateway of subnet 10.44.0.0/24",
		"10.44.0.0":   "is the address of subnet 10.44.0.0/24 itself",
		"10.44.0.255": "is the broadcast address of subnet 10.44.0.0/24",
		"10.44.1.1":   "is outside subnet 10.44.0.0/24",
		"10.4.0.1":    "is outside subnet 10.44.0.0/24",
		"fd00::1":     "is outside subnet 10.44.0.0/24",
	} {
		if got := fmt.Sprint(p.Check(address(given))); got != want {
			t.Errorf("%s: %s, want %s", given, got, want)
		}
	}
}

// A pool gives each of its addresses once, none that Check refuses, and says that there is none only when all are taken.
func TestAPoolGivesEachOfItsAddressesOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		bits := rapid.IntRange(22, 30).Draw(t, "bits")
		base := netip.AddrFrom4([4]byte{10, byte(rapid.IntRange(0, 255).Draw(t, "second")), byte(rapid.IntRange(0, 255).Draw(t, "third")), 0})
		subnet := netip.PrefixFrom(base, bits).Masked()
		gateway := ""
		if rapid.Bool().Draw(t, "own gateway") {
			gateway = subnet.Addr().Next().Next().String()
		}
		p, err := ipam.Parse(subnet.String(), gateway)
		if err != nil {
			t.Fatal(err)
		}
		taken := map[netip.Addr]bool{}
		for i := range p.Capacity() {
			got, ok := p.Pick(fmt.Sprintf("vm-%d", i), func(a netip.Addr) bool { return taken[a] })
			if !ok {
				t.Fatalf("none is left after %d of %d", i, p.Capacity())
			}
			if taken[got] {
				t.Fatalf("%s was given twice", got)
			}
			if err := p.Check(got); err != nil {
				t.Fatalf("%s %v", got, err)
			}
			taken[got] = true
		}
		if got, ok := p.Pick("one more", func(a netip.Addr) bool { return taken[a] }); ok {
			t.Fatalf("%s was given though all are taken", got)
		}
	})
}

func TestAPickDependsOnNothingButSeedAndWhatIsTaken(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, err := ipam.Parse("10.44.0.0/26", "")
		if err != nil {
			t.Fatal(err)
		}
		seed := rapid.String().Draw(t, "seed")
		taken := rapid.MapOf(rapid.IntRange(2, 62), rapid.Just(true)).Draw(t, "taken")
		asked := 0
		ask := func(a netip.Addr) bool { asked++; return taken[int(a.As4()[3])] }
		first, ok := p.Pick(seed, ask)
		if asked > len(taken)+1 {
			t.Fatalf("asked of %d addresses with %d taken", asked, len(taken))
		}
		again, okAgain := p.Pick(seed, ask)
		if first != again || ok != okAgain {
			t.Fatalf("%s %v, then %s %v", first, ok, again, okAgain)
		}
	})
}

func TestTwoThatDoNotSeeEachOthersPicksSeldomPickTheSame(t *testing.T) {
	p := pool(t, "10.44.0.0/16", "")
	picked := map[netip.Addr]int{}
	for i := range 1000 {
		got, _ := p.Pick(fmt.Sprintf("6ba7b810-9dad-11d1-80b4-%012x", i), func(netip.Addr) bool { return false })
		picked[got]++
	}
	// 1000 of 65533 by pure chance: 992.4 different ones, with a standard deviation under 3.
	if len(picked) < 980 {
		t.Errorf("1000 picks fell on %d addresses", len(picked))
	}
}

func TestAPickOfALargePoolAllocatesNothing(t *testing.T) {
	p := pool(t, "10.0.0.0/8", "")
	taken := func(a netip.Addr) bool { return a.As4()[3] != 7 }
	if got, ok := p.Pick("vm", taken); !ok || got.As4()[3] != 7 {
		t.Fatalf("%s %v", got, ok)
	}
	if n := testing.AllocsPerRun(100, func() { p.Pick("vm", taken) }); n > 2 {
		t.Errorf("%v allocations", n)
	}
}

func TestWhomASubnetOverlaps(t *testing.T) {
	ranges := []ipam.Range{
		{netip.MustParsePrefix("10.44.0.17/32"), "a node"}, {netip.MustParsePrefix("10.0.0.0/8"), "pods"},
		{netip.MustParsePrefix("10.44.1.0/24"), "the next subnet"}, {netip.MustParsePrefix("10.4.0.0/24"), "one of like digits"},
	}
	var got []string
	for _, r := range pool(t, "10.44.0.0/24", "").Overlapping(ranges) {
		got = append(got, r.Of)
	}
	if want := []string{"a node", "pods"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
