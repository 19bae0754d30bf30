package machine

import (
	"net"
	"net/netip"
	"strings"
	"testing"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/network"
)

func validNetwork() network.Spec {
	return network.Spec{
		ID: "1c2d", Namespace: "default", Name: "net", Subnet: "10.44.0.0/16", Gateway: "10.44.0.1", MTU: 1450, VNI: 7, NAT: true, EgressInterface: "bond0.12",
		Denied: []string{"10.96.0.0/12", "192.0.2.1/32", "0.0.0.0/0"},
		Peers: []network.Peer{
			{Address: "10.44.0.9", MAC: "02:00:00:00:00:09", VTEP: "192.0.2.9"},
			{Address: "10.44.0.10", MAC: "02:00:00:00:00:0a", VTEP: "10.0.0.9"},
		},
	}
}

func TestValidateNetwork(t *testing.T) {
	if err := ValidateNetwork(validNetwork()); err != nil {
		t.Fatalf("a good network is refused: %v", err)
	}
	type change = func(*network.Spec)
	for name, c := range map[string]struct {
		change change
		field  string
	}{
		"an id that climbs":                        {func(s *network.Spec) { s.ID = "../x" }, "id"},
		"an id with a newline at its end":          {func(s *network.Spec) { s.ID = "abc\n" }, "id"},
		"an id that is too long":                   {func(s *network.Spec) { s.ID = strings.Repeat("a", 65) }, "id"},
		"a name with a newline":                    {func(s *network.Spec) { s.Name = "a\nb" }, "name"},
		"a namespace with a space":                 {func(s *network.Spec) { s.Namespace = "a b" }, "namespace"},
		"no subnet":                                {func(s *network.Spec) { s.Subnet = "" }, "subnet"},
		"a subnet of IPv6":                         {func(s *network.Spec) { s.Subnet = "fd00::/64" }, "subnet"},
		"a subnet with host bits":                  {func(s *network.Spec) { s.Subnet = "10.44.0.1/24" }, "subnet"},
		"a subnet in another spelling":             {func(s *network.Spec) { s.Subnet = "10.44.0.0/016" }, "subnet"},
		"a subnet of everything":                   {func(s *network.Spec) { s.Subnet = "0.0.0.0/0" }, "subnet"},
		"a subnet without room":                    {func(s *network.Spec) { s.Subnet = "10.44.0.0/31" }, "subnet"},
		"a subnet of loopback addresses":           {func(s *network.Spec) { s.Subnet = "127.0.0.0/8" }, "subnet"},
		"a subnet that holds link-local addresses": {func(s *network.Spec) { s.Subnet = "169.0.0.0/8" }, "subnet"},
		"a subnet of groups":                       {func(s *network.Spec) { s.Subnet = "239.1.0.0/16" }, "subnet"},
		"no gateway":                               {func(s *network.Spec) { s.Gateway = "" }, "gateway"},
		"a gateway of IPv6 that holds IPv4":        {func(s *network.Spec) { s.Gateway = "::ffff:10.44.0.1" }, "gateway"},
		"a gateway outside":                        {func(s *network.Spec) { s.Gateway = "10.45.0.1" }, "gateway"},
		"a gateway that is the network":            {func(s *network.Spec) { s.Gateway = "10.44.0.0" }, "gateway"},
		"a gateway that is the broadcast address":  {func(s *network.Spec) { s.Gateway = "10.44.255.255" }, "gateway"},
		"an MTU that no IPv4 host may have":        {func(s *network.Spec) { s.MTU = 575 }, "mtu"},
		"an MTU beyond the kernel's":               {func(s *network.Spec) { s.MTU = 65536 }, "mtu"},
		"no VNI":                                   {func(s *network.Spec) { s.VNI = 0 }, "vni"},
		"a VNI of more than 24 bits":               {func(s *network.Spec) { s.VNI = 1 << 24 }, "vni"},
		"an interface with a slash":                {func(s *network.Spec) { s.EgressInterface = "../eth0" }, "egressInterface"},
		"an interface with a blank":                {func(s *network.Spec) { s.EgressInterface = "eth0 x" }, "egressInterface"},
		"an interface with a quote and a newline":  {func(s *network.Spec) { s.EgressInterface = "a\"\nb" }, "egressInterface"},
		"an interface of sixteen letters":          {func(s *network.Spec) { s.EgressInterface = strings.Repeat("a", 16) }, "egressInterface"},
		"an interface that is a directory":         {func(s *network.Spec) { s.EgressInterface = ".." }, "egressInterface"},
		"a denied prefix that is an address":       {func(s *network.Spec) { s.Denied[1] = "192.0.2.1" }, "denied[1]"},
		"a denied prefix of IPv6":                  {func(s *network.Spec) { s.Denied[1] = "fd00::/8" }, "denied[1]"},
		"a denied prefix with host bits":           {func(s *network.Spec) { s.Denied[1] = "192.0.2.1/24" }, "denied[1]"},
		"too many denied prefixes":                 {func(s *network.Spec) { s.Denied = make([]string, MaxDenied+1) }, "denied"},
		"too many peers":                           {func(s *network.Spec) { s.Peers = make([]network.Peer, MaxPeers+1) }, "peers"},
		"a peer of IPv6":                           {func(s *network.Spec) { s.Peers[0].Address = "fd00::1" }, "peers[0].address"},
		"a peer outside the subnet":                {func(s *network.Spec) { s.Peers[0].Address = "10.43.0.9" }, "peers[0].address"},
		"a peer with the gateway's address":        {func(s *network.Spec) { s.Peers[0].Address = s.Gateway }, "peers[0].address"},
		"a peer with the broadcast address":        {func(s *network.Spec) { s.Peers[0].Address = "10.44.255.255" }, "peers[0].address"},
		"two peers of one address":                 {func(s *network.Spec) { s.Peers[1].Address = s.Peers[0].Address }, "peers[1].address"},
		"peers out of order":                       {func(s *network.Spec) { s.Peers[0], s.Peers[1] = s.Peers[1], s.Peers[0] }, "peers[1].address"},
		"a peer with the MAC of a group":           {func(s *network.Spec) { s.Peers[0].MAC = "ff:ff:ff:ff:ff:ff" }, "peers[0].mac"},
		"a peer with no MAC":                       {func(s *network.Spec) { s.Peers[0].MAC = "00:00:00:00:00:00" }, "peers[0].mac"},
		"a peer with a MAC of eight bytes":         {func(s *network.Spec) { s.Peers[0].MAC = "02:00:00:00:00:00:00:01" }, "peers[0].mac"},
		"a peer without a node":                    {func(s *network.Spec) { s.Peers[0].VTEP = "" }, "peers[0].vtep"},
		"a peer on the loopback":                   {func(s *network.Spec) { s.Peers[0].VTEP = "127.0.0.1" }, "peers[0].vtep"},
		"a peer on a group of nodes":               {func(s *network.Spec) { s.Peers[0].VTEP = "239.1.1.1" }, "peers[0].vtep"},
	} {
		t.Run(name+" is refused", func(t *testing.T) {
			s := validNetwork()
			c.change(&s)
			err := ValidateNetwork(s)
			if f := fault.Of(err); err == nil || f.Reason != fault.InvalidSpec || !f.Permanent || !strings.Contains(err.Error(), c.field) {
				t.Fatalf("got %v, want a permanent InvalidSpec that names %s", err, c.field)
			}
		})
	}
}

func TestValidateNetworkOfTheGreatestSize(t *testing.T) {
	if err := ValidateNetwork(largestNetwork()); err != nil {
		t.Fatal(err)
	}
}

// FuzzValidateNetwork: whatever passes can be a path element, a line of a log, a route and a forwarding entry, and nothing else.
func FuzzValidateNetwork(f *testing.F) {
	f.Add("1c2d", "net", "10.44.0.0/16", "10.44.0.1", "eth0", "10.0.0.0/8", "10.44.0.9", "02:00:00:00:00:09", "192.0.2.9", 1450, uint32(7))
	f.Add("..", "a b", "0.0.0.0/0", "::1", "../x", "::/0", "10.44.0.9%eth0", "ff-ff-ff-ff-ff-ff", "0.0.0.0", -1, uint32(1<<31))
	f.Fuzz(func(t *testing.T, id, name, subnet, gateway, egress, denied, address, mac, vtep string, mtu int, vni uint32) {
		s := network.Spec{
			ID: id, Namespace: name, Name: name, Subnet: subnet, Gateway: gateway, MTU: mtu, VNI: vni, EgressInterface: egress, Denied: []string{denied},
			Peers: []network.Peer{{Address: address, MAC: mac, VTEP: vtep}},
		}
		if ValidateNetwork(s) != nil {
			return
		}
		if strings.ContainsAny(id+egress, "/\x00\n ") || id == "" || id[0] == '.' || len(egress) > 15 || strings.ContainsAny(name, "/\n\x00") {
			t.Fatalf("%q %q %q passed", id, name, egress)
		}
		_, block, err := net.ParseCIDR(subnet) // another reader must see the same
		if err != nil || block.String() != subnet || !block.Contains(net.ParseIP(gateway)) || !block.Contains(net.ParseIP(address)) || address == gateway {
			t.Fatalf("%q %q %q passed", subnet, gateway, address)
		}
		if ones, bits := block.Mask.Size(); bits != 32 || ones < 8 || ones > 30 || mtu < 576 || mtu > 65535 || vni == 0 || vni >= 1<<24 {
			t.Fatalf("%q %d %d passed", subnet, mtu, vni)
		}
		if p, err := netip.ParsePrefix(denied); err != nil || !p.Addr().Is4() {
			t.Fatalf("%q passed", denied)
		}
		if hw, err := net.ParseMAC(mac); err != nil || len(hw) != 6 || hw[0]&1 != 0 {
			t.Fatalf("%q passed", mac)
		}
		if ip := net.ParseIP(vtep); ip.To4() == nil || ip.IsLoopback() || ip.IsMulticast() || ip.IsUnspecified() {
			t.Fatalf("%q passed", vtep)
		}
	})
}

func largestNetwork() network.Spec {
	s := network.Spec{
		ID: strings.Repeat("a", 64), Namespace: strings.Repeat("b", 253), Name: strings.Repeat("c", 253), Subnet: "100.0.0.0/8", Gateway: "100.0.0.1",
		MTU: 65535, VNI: 1<<24 - 1, NAT: true, EgressInterface: strings.Repeat("d", 15),
	}
	for i := range MaxDenied {
		s.Denied = append(s.Denied, netip.AddrFrom4([4]byte{192, 168, byte(i >> 8), byte(i)}).String()+"/32")
	}
	for i := range MaxPeers {
		s.Peers = append(s.Peers, network.Peer{
			Address: netip.AddrFrom4([4]byte{100, 100 + byte(i>>16), byte(i >> 8), byte(i)}).String(), MAC: network.GuestMAC(s.ID, i).String(), VTEP: "192.168.100.100",
		})
	}
	return s
}
