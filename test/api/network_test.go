package api

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"imp.dev/imp/api/v1alpha1"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"
)

// network is an ImpNetwork with the given spec, in flow or block YAML.
func (c *cluster) network(name, spec string) *unstructured.Unstructured {
	c.t.Helper()
	u := object(c.t, "apiVersion: imp.dev/v1alpha1\nkind: ImpNetwork\nmetadata: {name: "+name+", namespace: "+c.namespace+"}\n")
	var fields map[string]any
	must(c.t, yaml.Unmarshal([]byte(spec), &fields))
	u.Object["spec"] = fields
	return u
}

// createdNetwork makes an ImpNetwork and gives it typed.
func (c *cluster) createdNetwork(name, spec string) *v1alpha1.ImpNetwork {
	c.t.Helper()
	must(c.t, c.admin.Create(c.t.Context(), c.network(name, spec)))
	network := &v1alpha1.ImpNetwork{}
	must(c.t, c.admin.Get(c.t.Context(), client.ObjectKey{Namespace: c.namespace, Name: name}, network))
	return network
}

// networkCase is one spec and what its refusal must say; nothing means that it is accepted.
type networkCase struct {
	spec string
	want []string
}

// checkNetworks creates each without keeping it. A refusal must have no more causes than one, or the user mends the wrong thing.
func checkNetworks(t *testing.T, cases map[string]networkCase) {
	t.Helper()
	c := newCluster(t)
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			err := c.admin.Create(t.Context(), c.network("checked", tc.spec), client.DryRunAll)
			refused(t, err, tc.want...)
			if n := len(causes(err)); n > 1 {
				t.Errorf("was refused for %d causes, want one: %v", n, err)
			}
		})
	}
}

// causes are what a refusal finds fault with, without the API server's remark that it has not looked at everything.
func causes(err error) []metav1.StatusCause {
	var status apierrors.APIStatus
	if !errors.As(err, &status) || status.Status().Details == nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(status.Status().Details.Causes), func(c metav1.StatusCause) bool { return c.Field == "<nil>" })
}

func TestTheSubnetOfAnImpNetworkIsChecked(t *testing.T) {
	const reserved = "reserved for other purposes: take a part of 10.0.0.0/8, 172.16.0.0/12 or 192.168.0.0/16"
	const form = "must be an IPv4 subnet in CIDR form, like 10.44.0.0/24"
	const field = `spec.subnet: Invalid value: `
	checkNetworks(t, map[string]networkCase{
		"a subnet alone is enough":        {spec: `{subnet: 10.44.0.0/24}`},
		"10.4.0.0/24 is a subnet as well": {spec: `{subnet: 10.4.0.0/24}`},
		"the largest":                     {spec: `{subnet: 10.0.0.0/8}`},
		"the smallest":                    {spec: `{subnet: 192.168.7.252/30}`},
		"public addresses are the administrator's concern": {spec: `{subnet: 203.0.113.0/24}`},
		"no subnet is refused":                             {`{}`, []string{"spec.subnet: Required value"}},
		"an empty subnet is refused":                       {`{subnet: ""}`, []string{field, form}},
		"a name is refused":                                {`{subnet: lan}`, []string{field, form}},
		"an address without a length is refused":           {`{subnet: 10.4.0.0}`, []string{field, form}},
		"a length over 32 is refused":                      {`{subnet: 10.4.0.0/33}`, []string{field, form}},
		"three bytes are refused":                          {`{subnet: 10.4.0/24}`, []string{field, form}},
		"leading zeros, octal to some, are refused":        {`{subnet: 010.4.0.0/24}`, []string{field, form}},
		"a mask in dotted form is refused":                 {`{subnet: 10.4.0.0/255.255.255.0}`, []string{field, form}},
		"blanks are refused":                               {`{subnet: " 10.4.0.0/24"}`, []string{field, form}},
		"IPv6 is refused":                                  {`{subnet: "fd00::/64"}`, []string{field, form}},
		"IPv6 at its longest is refused for being IPv6":    {`{subnet: "fd00:1111:2222:3333:4444:5555:6666:7777/128"}`, []string{field, form}},
		"IPv4 inside IPv6 is refused":                      {`{subnet: "::ffff:10.4.0.0/120"}`, []string{field, form}},
		"no more than an address is read":                  {`{subnet: "` + strings.Repeat("1", 65) + `"}`, []string{"spec.subnet: Too long: may not be more than 64"}},
		"host bits are refused, with what to write":        {`{subnet: 10.4.0.7/24}`, []string{field, "has host bits set: write 10.4.0.0/24"}},
		"host bits of the smallest are refused":            {`{subnet: 10.4.0.7/30}`, []string{field, "has host bits set: write 10.4.0.4/30"}},
		"host bits of the largest are refused":             {`{subnet: 10.4.0.0/8}`, []string{field, "has host bits set: write 10.0.0.0/8"}},
		"/31 is too small":                                 {`{subnet: 10.4.0.0/31}`, []string{field, "is too small for a gateway and a guest: take /30 or a shorter prefix"}},
		"/32 is too small":                                 {`{subnet: 10.4.0.1/32}`, []string{field, "is too small for a gateway and a guest"}},
		"/7 is too large":                                  {`{subnet: 10.0.0.0/7}`, []string{field, "is too large: take /8 or a longer prefix"}},
		"this network is reserved":                         {`{subnet: 0.0.0.0/8}`, []string{field, "overlaps 0.0.0.0/8, " + reserved}},
		"loopback is reserved":                             {`{subnet: 127.0.0.0/8}`, []string{field, "overlaps 127.0.0.0/8, " + reserved}},
		"a part of loopback is reserved":                   {`{subnet: 127.9.0.0/16}`, []string{field, "overlaps 127.0.0.0/8, " + reserved}},
		"link-local is reserved":                           {`{subnet: 169.254.0.0/16}`, []string{field, "overlaps 169.254.0.0/16, " + reserved}},
		"where metadata lives is reserved":                 {`{subnet: 169.254.169.252/30}`, []string{field, "overlaps 169.254.0.0/16, " + reserved}},
		"what contains link-local is refused":              {`{subnet: 169.0.0.0/8}`, []string{field, "overlaps 169.254.0.0/16, " + reserved}},
		"next to link-local is not it":                     {spec: `{subnet: 169.253.0.0/16}`},
		"multicast is reserved":                            {`{subnet: 224.0.0.0/8}`, []string{field, "overlaps 224.0.0.0/4, " + reserved}},
		"the end of multicast is reserved":                 {`{subnet: 239.255.0.0/16}`, []string{field, "overlaps 224.0.0.0/4, " + reserved}},
		"the range for the future is reserved":             {`{subnet: 240.0.0.0/8}`, []string{field, "overlaps 240.0.0.0/4, " + reserved}},
		"limited broadcast is reserved":                    {`{subnet: 255.255.255.252/30}`, []string{field, "overlaps 240.0.0.0/4, " + reserved}},
		"next to multicast is not it":                      {spec: `{subnet: 223.255.255.0/24}`},
		"a wrong subnet silences the rules on the gateway": {`{subnet: lan, gateway: 10.4.0.1, dns: [10.4.0.1]}`, []string{field, form}},
	})
}

// The message is put together from letters by a rule that a table of examples would not trust.
func TestASubnetWithHostBitsIsToldWhatToWriteForEveryLength(t *testing.T) {
	c := newCluster(t)
	for _, address := range []string{"172.213.98.255", "10.9.100.3"} {
		for length := 8; length <= 30; length++ {
			given := netip.PrefixFrom(netip.MustParseAddr(address), length)
			err := c.admin.Create(t.Context(), c.network("checked", `{subnet: `+given.String()+`}`), client.DryRunAll)
			refused(t, err, `spec.subnet: Invalid value: "`+given.String()+`": has host bits set: write `+given.Masked().String())
			if found := causes(err); len(found) != 1 || !strings.HasSuffix(found[0].Message, ": write "+given.Masked().String()) {
				t.Errorf("%s is refused with %v", given, found)
			}
		}
	}
}

// Likewise the broadcast address is found by arithmetic.
func TestTheLastAddressOfASubnetIsNoGatewayWhateverItsLength(t *testing.T) {
	c := newCluster(t)
	for length := 8; length <= 30; length++ {
		subnet := netip.PrefixFrom(netip.MustParseAddr("10.85.170.85"), length).Masked()
		first := binary.BigEndian.Uint32(subnet.Addr().AsSlice())
		last := first | (1<<(32-length) - 1)
		for gateway, want := range map[uint32][]string{first: {"itself"}, last: {"is the broadcast address of subnet " + subnet.String()}, first + 1: nil, last - 1: nil} {
			spec := fmt.Sprintf(`{subnet: %s, gateway: %s}`, subnet, netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, gateway))))
			refused(t, c.admin.Create(t.Context(), c.network("checked", spec), client.DryRunAll), want...)
		}
	}
}

func TestTheGatewayOfAnImpNetworkIsChecked(t *testing.T) {
	const form = "must be an IPv4 address, like 10.44.0.1"
	const field = `spec.gateway: Invalid value: `
	with := func(subnet, gateway string) string { return `{subnet: ` + subnet + `, gateway: "` + gateway + `"}` }
	network := func(subnet string) []string {
		return []string{field, "is the address of subnet " + subnet + " itself: take one of its host addresses, or leave it out for the first"}
	}
	broadcast := func(subnet string) []string {
		return []string{field, "is the broadcast address of subnet " + subnet + ": take one of its host addresses, or leave it out for the first"}
	}
	outside := func(subnet string) []string {
		return []string{field, "must be an address of subnet " + subnet + "; left out it is the first host address"}
	}
	checkNetworks(t, map[string]networkCase{
		"the first host":                               {spec: with("10.44.0.0/24", "10.44.0.1")},
		"the last host":                                {spec: with("10.44.0.0/24", "10.44.0.254")},
		"any host":                                     {spec: with("10.0.0.0/8", "10.200.0.0")},
		"both hosts of a /30, the first":               {spec: with("10.44.0.4/30", "10.44.0.5")},
		"both hosts of a /30, the last":                {spec: with("10.44.0.4/30", "10.44.0.6")},
		"255 at the end may be a host":                 {spec: with("10.44.0.0/16", "10.44.0.255")},
		"0 at the end may be a host":                   {spec: with("10.44.0.0/23", "10.44.1.0")},
		"an empty one is none":                         {spec: with("10.44.0.0/24", "")},
		"a name is refused":                            {with("10.44.0.0/24", "gw"), []string{field, form}},
		"leading zeros are refused":                    {with("10.44.0.0/24", "10.44.0.01"), []string{field, form}},
		"a prefix is refused":                          {with("10.44.0.0/24", "10.44.0.1/24"), []string{field, form}},
		"IPv6 is refused":                              {with("10.44.0.0/24", "fe80::1"), []string{field, form}},
		"outside the subnet is refused":                {with("10.44.0.0/24", "10.4.0.1"), outside("10.44.0.0/24")},
		"just below the subnet is refused":             {with("10.44.1.0/24", "10.44.0.255"), outside("10.44.1.0/24")},
		"just above the subnet is refused":             {with("10.44.0.0/24", "10.44.1.0"), outside("10.44.0.0/24")},
		"what looks like it by its letters is refused": {with("10.4.0.0/24", "10.44.0.1"), outside("10.4.0.0/24")},
		"the network's address is refused":             {with("10.44.0.0/24", "10.44.0.0"), network("10.44.0.0/24")},
		"the network's address of a /30 is refused":    {with("10.44.0.4/30", "10.44.0.4"), network("10.44.0.4/30")},
		"the broadcast address is refused":             {with("10.44.0.0/24", "10.44.0.255"), broadcast("10.44.0.0/24")},
		"the broadcast address of a /30 is refused":    {with("10.44.0.4/30", "10.44.0.7"), broadcast("10.44.0.4/30")},
		"the broadcast address of a /16 is refused":    {with("10.44.0.0/16", "10.44.255.255"), broadcast("10.44.0.0/16")},
		"the broadcast address of a /25 is refused":    {with("10.44.0.0/25", "10.44.0.127"), broadcast("10.44.0.0/25")},
		"the broadcast address of a /8 is refused":     {with("10.0.0.0/8", "10.255.255.255"), broadcast("10.0.0.0/8")},
	})
}

func TestNameServersAndSearchDomainsOfAnImpNetworkAreChecked(t *testing.T) {
	dns := func(servers string) string { return `{subnet: 10.44.0.0/24, dns: ` + servers + `}` }
	search := func(domains string) string {
		return `{subnet: 10.44.0.0/24, dns: [1.1.1.1], searchDomains: ` + domains + `}`
	}
	item := func(list string, n int) string { return fmt.Sprintf("spec.%s[%d]: Invalid value: ", list, n) }
	const form = "must be the IPv4 address of a name server, like 1.1.1.1: guests have no IPv6"
	const itself = "is the guest itself, where no name server listens: take the address of one in the network or outside"
	const local = "cannot be reached by guests, as all link-local and multicast addresses: take the name server's own address"
	const domain = "must be a DNS domain in lower case, like apps.example.com"
	// 253 characters, the longest name there is: 63.63.63.61.
	longest := strings.Join([]string{strings.Repeat("a", 63), strings.Repeat("b", 63), strings.Repeat("c", 63), strings.Repeat("d", 61)}, ".")
	checkNetworks(t, map[string]networkCase{
		"three name servers":                        {spec: dns(`[1.1.1.1, 8.8.8.8, 9.9.9.9]`)},
		"a guest may be the name server":            {spec: dns(`[10.44.0.53]`)},
		"a Service may be the name server":          {spec: `{subnet: 10.44.0.0/24, nat: {enabled: true, clusterAccess: true}, dns: [10.96.0.10]}`},
		"no name server":                            {spec: dns(`[]`)},
		"four are refused, as resolvers read three": {dns(`[1.1.1.1, 8.8.8.8, 9.9.9.9, 4.4.4.4]`), []string{"spec.dns", "must have at most 3 items"}},
		"one twice is refused":                      {dns(`[1.1.1.1, 1.1.1.1]`), []string{"spec.dns[1]: Duplicate value"}},
		"a name is refused":                         {dns(`[1.1.1.1, one.one.one.one]`), []string{item("dns", 1), form}},
		"an empty one is refused":                   {dns(`[""]`), []string{item("dns", 0), form}},
		"a port is refused":                         {dns(`["1.1.1.1:53"]`), []string{item("dns", 0), form}},
		"IPv6 is refused":                           {dns(`[1.1.1.1, "2606:4700:4700::1111"]`), []string{item("dns", 1), form}},
		"IPv6 in link-local form is refused":        {dns(`["fe80::1%eth0"]`), []string{item("dns", 0), form}},
		"the loopback is refused":                   {dns(`[127.0.0.1]`), []string{item("dns", 0), itself}},
		"systemd-resolved's stub is refused":        {dns(`[1.1.1.1, 127.0.0.53]`), []string{item("dns", 1), itself}},
		"the end of the loopback range is refused":  {dns(`[127.255.255.255]`), []string{item("dns", 0), itself}},
		"0.0.0.0 is refused":                        {dns(`[0.0.0.0]`), []string{item("dns", 0), itself}},
		"a cloud's link-local one is refused":       {dns(`[169.254.169.253]`), []string{item("dns", 0), local}},
		"a node's cache of names is refused":        {dns(`[169.254.20.10]`), []string{item("dns", 0), local}},
		"mDNS is refused":                           {dns(`[224.0.0.251]`), []string{item("dns", 0), local}},
		"broadcast is refused":                      {dns(`[255.255.255.255]`), []string{item("dns", 0), local}},
		"the gateway is refused": {`{subnet: 10.44.0.0/24, gateway: 10.44.0.9, dns: [1.1.1.1, 10.44.0.9]}`,
			[]string{"spec.dns: Invalid value: ", "must not hold the gateway: it answers no DNS"}},
		"the gateway by default is refused":             {dns(`[10.44.0.1]`), []string{"spec.dns: Invalid value: ", "must not hold the gateway: it answers no DNS"}},
		"the first host is no gateway where another is": {spec: `{subnet: 10.44.0.0/24, gateway: 10.44.0.9, dns: [10.44.0.1]}`},

		"six search domains":                     {spec: search(`[default.svc.cluster.local, svc.cluster.local, cluster.local, a-1.example, b.example, local]`)},
		"the longest search domain":              {spec: search(`[` + longest + `]`)},
		"seven search domains are refused":       {search(`[a, b, c, d, e, f, g]`), []string{"spec.searchDomains", "must have at most 6 items"}},
		"one character too many is refused":      {search(`[` + longest + `e]`), []string{"spec.searchDomains[0]: Too long: may not be more than 253"}},
		"a search domain in capitals is refused": {search(`[a, Example.com]`), []string{item("searchDomains", 1), domain}},
		"an empty search domain is refused":      {search(`[""]`), []string{item("searchDomains", 0), domain}},
		"a final dot is refused":                 {search(`[example.com.]`), []string{item("searchDomains", 0), domain}},
		"two in one are refused":                 {search(`["a.example b.example"]`), []string{item("searchDomains", 0), domain}},
		"a line of one's own is refused":         {search(`["a.example\nnameserver 6.6.6.6"]`), []string{item("searchDomains", 0), domain}},
		"a search domain twice is refused":       {search(`[a, a]`), []string{"spec.searchDomains[1]: Duplicate value"}},
		"search domains without name servers are refused": {`{subnet: 10.44.0.0/24, searchDomains: [a]}`,
			[]string{"spec.searchDomains: Invalid value: ", "need dns: without name servers the image's own resolv.conf is left as it is"}},
		"search domains with an empty list of them are refused": {`{subnet: 10.44.0.0/24, dns: [], searchDomains: [a]}`,
			[]string{"spec.searchDomains: Invalid value: ", "need dns: "}},
		"no search domains need no name servers": {spec: `{subnet: 10.44.0.0/24, searchDomains: []}`},
	})
}

func TestMTUAndNATOfAnImpNetworkAreChecked(t *testing.T) {
	mtu := func(bytes string) string { return `{subnet: 10.44.0.0/24, mtu: ` + bytes + `}` }
	nat := func(fields string) string { return `{subnet: 10.44.0.0/24, nat: ` + fields + `}` }
	egress := func(name string) string { return nat(`{enabled: true, egressInterface: "` + name + `"}`) }
	badMTU := []string{"spec.mtu: Invalid value: ", "must be from 576 to 65485; left out it is what the nodes' network carries"}
	badName := []string{"spec.nat.egressInterface: Invalid value: ", "must be the name of a network interface of the nodes, like eth0: no blanks, '/' or ':'"}
	needsNAT := []string{"spec.nat.egressInterface: Invalid value: ", "says how guests' traffic leaves by NAT: set nat.enabled to true too, or leave it out"}
	accessNeedsNAT := []string{"spec.nat.clusterAccess: Invalid value: ", "widens what guests reach by NAT: set nat.enabled to true too, or leave it out"}
	checkNetworks(t, map[string]networkCase{
		"the smallest MTU":              {spec: mtu("576")},
		"the largest MTU":               {spec: mtu("65485")},
		"an MTU of 575 is refused":      {mtu("575"), badMTU},
		"an MTU of 0 is refused":        {mtu("0"), badMTU},
		"a negative MTU is refused":     {mtu("-1450"), badMTU},
		"an MTU of 65486 is refused":    {mtu("65486"), badMTU},
		"a number in quotes is refused": {mtu(`"1450"`), []string{"spec.mtu: Invalid value: ", "must be of type integer"}},

		"NAT":                                 {spec: nat(`{enabled: true}`)},
		"NAT by one interface":                {spec: nat(`{enabled: true, egressInterface: enp0s31f6.100, clusterAccess: true}`)},
		"no NAT":                              {spec: nat(`{enabled: false}`)},
		"no NAT, said with all words":         {spec: nat(`{enabled: false, egressInterface: "", clusterAccess: false}`)},
		"NAT says nothing":                    {spec: nat(`{}`)},
		"an interface without NAT is refused": {nat(`{egressInterface: eth0}`), needsNAT},
		"an interface with NAT switched off is refused":    {nat(`{enabled: false, egressInterface: eth0}`), needsNAT},
		"cluster access without NAT is refused":            {nat(`{clusterAccess: true}`), accessNeedsNAT},
		"cluster access with NAT switched off is refused":  {nat(`{enabled: false, clusterAccess: true}`), accessNeedsNAT},
		"an interface's name of 15 characters":             {spec: egress("abcdefghijklmno")},
		"one of 16, which Linux does not have, is refused": {egress("abcdefghijklmnop"), []string{"spec.nat.egressInterface: Too long: may not be more than 15"}},
		"an interface's name with a blank is refused":      {egress("eth 0"), badName},
		"an interface's name with a newline is refused":    {egress(`eth0\n`), badName},
		"an interface's name with a slash is refused":      {egress("../eth0"), badName},
		"an alias is refused":                              {egress("eth0:1"), badName},
		"a dot is refused":                                 {egress("."), badName},
		"two dots are refused":                             {egress(".."), badName},
		"an interface's name that is not ASCII is refused": {egress("é0"), badName},
	})
}

func TestDefaultsOfAnImpNetwork(t *testing.T) {
	c := newCluster(t)
	got := c.network("plain", `{subnet: 10.44.0.0/24}`)
	must(t, c.admin.Create(t.Context(), got))
	must(t, c.admin.Get(t.Context(), client.ObjectKeyFromObject(got), got))
	enabled, found, err := unstructured.NestedBool(got.Object, "spec", "nat", "enabled")
	must(t, err)
	if !found || enabled {
		t.Errorf("nat.enabled is %v (said: %v), want it said to be false, so that kubectl get shows it", enabled, found)
	}
	for _, field := range []string{"gateway", "mtu", "dns", "searchDomains"} {
		if _, found, _ := unstructured.NestedFieldNoCopy(got.Object, "spec", field); found {
			t.Errorf("%s has a default in the spec; what is in use is the status's to say", field)
		}
	}
	if _, found := got.Object["status"]; found {
		t.Error("a new network has a status though nobody has looked at it")
	}
}

func TestWhatMayBeEditedOfAnImpNetwork(t *testing.T) {
	c := newCluster(t)
	anew := func(field string) []string {
		return []string{"spec." + field + ": Invalid value: ", "cannot be changed", "create a new ImpNetwork"}
	}
	const full = `{subnet: 10.44.0.0/24, gateway: 10.44.0.1, mtu: 1400, nat: {enabled: true, egressInterface: eth0}, dns: [1.1.1.1], searchDomains: [a]}`
	for name, tc := range map[string]struct {
		spec, change string
		want         []string
	}{
		"subnet":                               {full, `spec: {subnet: 10.44.0.0/16}`, anew("subnet")},
		"gateway, to another":                  {full, `spec: {gateway: 10.44.0.2}`, anew("gateway")},
		"gateway, away":                        {full, `spec: {gateway: null}`, anew("gateway")},
		"gateway, emptied":                     {full, `spec: {gateway: ""}`, anew("gateway")},
		"gateway, added later":                 {`{subnet: 10.44.0.0/24}`, `spec: {gateway: 10.44.0.9}`, anew("gateway")},
		"gateway, added as it is by default":   {`{subnet: 10.44.0.0/24}`, `spec: {gateway: 10.44.0.1}`, anew("gateway")},
		"gateway, from nothing to empty":       {`{subnet: 10.44.0.0/24}`, `spec: {gateway: ""}`, nil},
		"gateway, from empty to nothing":       {`{subnet: 10.44.0.0/24, gateway: ""}`, `spec: {gateway: null}`, nil},
		"mtu, to another":                      {full, `spec: {mtu: 1500}`, anew("mtu")},
		"mtu, away":                            {full, `spec: {mtu: null}`, anew("mtu")},
		"mtu, added later":                     {`{subnet: 10.44.0.0/24}`, `spec: {mtu: 1500}`, anew("mtu")},
		"nat, switched off with all it has":    {full, `spec: {nat: null}`, nil},
		"nat, switched off with its interface": {full, `spec: {nat: {enabled: false}}`, []string{"spec.nat.egressInterface", "set nat.enabled to true too"}},
		"nat, switched on":                     {`{subnet: 10.44.0.0/24}`, `spec: {nat: {enabled: true}}`, nil},
		"nat, by another interface":            {full, `spec: {nat: {egressInterface: eth1}}`, nil},
		"nat, with cluster access":             {full, `spec: {nat: {clusterAccess: true}}`, nil},
		"dns, to others":                       {full, `spec: {dns: [8.8.8.8, 9.9.9.9]}`, nil},
		"dns, to the gateway":                  {full, `spec: {dns: [10.44.0.1]}`, []string{"spec.dns", "must not hold the gateway"}},
		"dns, away without searchDomains":      {full, `spec: {dns: null}`, []string{"spec.searchDomains", "need dns"}},
		"dns and searchDomains, away":          {full, `spec: {dns: null, searchDomains: null}`, nil},
		"searchDomains, to others":             {full, `spec: {searchDomains: [b, c]}`, nil},
		"labels":                               {full, `metadata: {labels: {a: b}}`, nil},
		"finalizers":                           {full, `metadata: {finalizers: [imp.dev/network]}`, nil},
	} {
		t.Run(name, func(t *testing.T) {
			network := c.createdNetwork(dnsName(name), tc.spec)
			refused(t, patch(t, c.admin, network, tc.change), tc.want...)
		})
	}
}

// dnsName makes a name of an object out of a sentence.
func dnsName(sentence string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9':
			return r
		case r >= 'A' && r <= 'Z':
			return r + 'a' - 'A'
		case r == ' ':
			return '-'
		}
		return -1
	}, sentence)
}

// A program that reads a network into Imp's types and writes it back drops what is empty. That is no change.
func TestAnImpNetworkThatIsWrittenBackByAProgramIsNotChanged(t *testing.T) {
	c := newCluster(t)
	for name, spec := range map[string]string{
		"all-empty": `{subnet: 10.44.0.0/24, gateway: "", dns: [], searchDomains: [], nat: {enabled: false, egressInterface: "", clusterAccess: false}}`,
		"least":     `{subnet: 10.44.0.0/24}`,
		"full":      `{subnet: 10.44.0.0/24, gateway: 10.44.0.1, mtu: 1400, nat: {enabled: true}, dns: [1.1.1.1], searchDomains: [a]}`,
	} {
		t.Run(name, func(t *testing.T) {
			network := c.createdNetwork(name, spec)
			network.Labels = map[string]string{"touched": "true"}
			must(t, c.admin.Update(t.Context(), network))
		})
	}
}
