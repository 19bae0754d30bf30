// Package fabric gives each pretended node a network namespace of its own as its "host", and joins them as a data centre does:
//
//	NAME-node-1          NAME-node-2    …        NAME-fabric                          NAME-outside
//	eth0 192.0.2.11      eth0 192.0.2.12         bridge 192.0.2.1 ── 198.51.100.0 ═══ 198.51.100.1
//	  └──────────────────────┴───────────────────────┘
//
// A node's default route leads to the fabric, and the fabric's to the outside, which knows the nodes and nobody else: what it is
// sent from a guest's own address it cannot answer. Nothing leads from there to the machine's real networks. The links carry
// 9050 bytes, so that guests have an MTU of 9000 in an overlay that takes 50.
package fabric

import (
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// MTU of every link.
const MTU = 9050

// MaxNodes that have addresses in the underlay.
const MaxNodes = 100

const (
	bridgeName  = "underlay"
	nodeLink    = "eth0"
	outsideLink = "outside"
)

// Fabric is what was made.
type Fabric struct {
	prefix string
	nodes  map[string]Host
}

// Host is one node's namespace.
type Host struct {
	Namespace
	// Address in the underlay.
	Address netip.Addr
}

// Addresses of the plan. They are set aside for documentation (RFC 5737), so that they are nobody's.
func underlay() netip.Prefix    { return netip.MustParsePrefix("192.0.2.0/24") }
func router() netip.Addr        { return netip.MustParseAddr("192.0.2.1") }
func nodeAddr(i int) netip.Addr { return netip.AddrFrom4([4]byte{192, 0, 2, byte(11 + i)}) }
func outsideNear() netip.Addr   { return netip.MustParseAddr("198.51.100.0") }

// OutsideAddress is the one that the outside has from the beginning.
func OutsideAddress() netip.Addr { return netip.MustParseAddr("198.51.100.1") }

// Make makes the namespaces of the nodes, in this order, and of what lies between them. Their names begin with prefix and "-".
// There must be none of that prefix. On an error nothing is left.
func Make(prefix string, nodes []string) (_ *Fabric, err error) {
	if len(nodes) > MaxNodes {
		return nil, fmt.Errorf("making network namespaces: addresses are for %d nodes, not %d", MaxNodes, len(nodes))
	}
	defer func() {
		if err != nil {
			_, failed := Remove(prefix + "-")
			err = errors.Join(remedy(err), failed)
		}
	}()
	f := &Fabric{prefix: prefix, nodes: map[string]Host{}}
	for _, name := range []string{f.Switch().Name, f.Outside().Name} {
		if _, err := Create(name); err != nil {
			return nil, fmt.Errorf("making network namespace %s: %w", name, err)
		}
	}
	if err := f.Switch().Do(f.makeSwitch); err != nil {
		return nil, fmt.Errorf("joining network namespaces: %w", err)
	}
	if err := f.connectOutside(); err != nil {
		return nil, fmt.Errorf("making the outside: %w", err)
	}
	for i, name := range nodes {
		host := Host{Namespace: Namespace{Name: prefix + "-" + name}, Address: nodeAddr(i)}
		if _, err := Create(host.Name); err != nil {
			return nil, fmt.Errorf("making network namespace %s: %w", host.Name, err)
		}
		if err := f.connectNode(name, host); err != nil {
			return nil, fmt.Errorf("connecting %s: %w", name, err)
		}
		f.nodes[name] = host
	}
	return f, nil
}

// Node gives the host of a node that Make was told of.
func (f *Fabric) Node(name string) Host { return f.nodes[name] }

// Switch is the namespace between the nodes, Outside the one beyond it.
func (f *Fabric) Switch() Namespace { return Namespace{Name: f.prefix + "-fabric"} }

// Outside is where the world begins.
func (f *Fabric) Outside() Namespace { return Namespace{Name: f.prefix + "-outside"} }

// remedy says what to do about the errors that people meet.
func remedy(err error) error {
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES), errors.Is(err, unix.EROFS):
		return fmt.Errorf("%w (each node has one: that needs CAP_SYS_ADMIN and CAP_NET_ADMIN, and /run and /proc/sys/net to be writable, "+
			"as in a privileged container; --network=none runs guests without networks)", err)
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOSYS):
		return fmt.Errorf("%w (the kernel needs network namespaces, veth and bridge: modprobe veth bridge; --network=none runs guests without networks)", err)
	case errors.Is(err, unix.ENOSPC):
		return fmt.Errorf("%w (the machine's limit of network namespaces: /proc/sys/user/max_net_namespaces)", err)
	}
	return err
}

func (f *Fabric) makeSwitch() error {
	attributes := netlink.NewLinkAttrs()
	attributes.Name, attributes.MTU = bridgeName, MTU
	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attributes}); err != nil {
		return fmt.Errorf("making bridge %s: %w", bridgeName, err)
	}
	if err := address(bridgeName, netip.PrefixFrom(router(), underlay().Bits())); err != nil {
		return err
	}
	return forward()
}

// connectOutside makes the link to the outside, and in each direction the route.
func (f *Fabric) connectOutside() error {
	if err := f.cable(f.Switch(), outsideLink, f.Outside(), nodeLink); err != nil {
		return err
	}
	if err := f.Switch().Do(func() error {
		if err := address(outsideLink, netip.PrefixFrom(outsideNear(), 31)); err != nil {
			return err
		}
		return route(netip.PrefixFrom(netip.IPv4Unspecified(), 0), OutsideAddress())
	}); err != nil {
		return err
	}
	return f.Outside().Do(func() error {
		if err := address(nodeLink, netip.PrefixFrom(OutsideAddress(), 31)); err != nil {
			return err
		}
		return route(underlay(), outsideNear())
	})
}

func (f *Fabric) connectNode(name string, host Host) error {
	if err := f.cable(f.Switch(), name, host.Namespace, nodeLink); err != nil {
		return err
	}
	if err := f.Switch().Do(func() error { return enslave(name) }); err != nil {
		return err
	}
	return host.Do(func() error {
		if err := address(nodeLink, netip.PrefixFrom(host.Address, underlay().Bits())); err != nil {
			return err
		}
		if err := route(netip.PrefixFrom(netip.IPv4Unspecified(), 0), router()); err != nil {
			return err
		}
		return forward()
	})
}

// cable makes a pair of links between two namespaces. Both ends are made where they belong, so that no name of this machine's
// own namespace is taken, even for a moment.
func (f *Fabric) cable(here Namespace, name string, there Namespace, peer string) error {
	far, err := os.Open(there.Path())
	if err != nil {
		return err
	}
	defer far.Close()
	return here.Do(func() error {
		attributes := netlink.NewLinkAttrs()
		attributes.Name, attributes.MTU = name, MTU
		link := &netlink.Veth{LinkAttrs: attributes, PeerName: peer, PeerMTU: MTU, PeerNamespace: netlink.NsFd(int(far.Fd()))}
		if err := netlink.LinkAdd(link); err != nil {
			return fmt.Errorf("making links %s and %s: %w", name, peer, err)
		}
		return nil
	})
}

func enslave(name string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("finding link %s: %w", name, err)
	}
	bridge, err := netlink.LinkByName(bridgeName)
	if err != nil {
		return fmt.Errorf("finding bridge %s: %w", bridgeName, err)
	}
	if err := netlink.LinkSetMaster(link, bridge); err != nil {
		return fmt.Errorf("adding %s to bridge %s: %w", name, bridgeName, err)
	}
	return setUp(name)
}

func setUp(name string) error {
	link, err := netlink.LinkByName(name)
	if err == nil {
		err = netlink.LinkSetUp(link)
	}
	if err != nil {
		return fmt.Errorf("setting link %s up: %w", name, err)
	}
	return nil
}

// address gives a link an address and sets it up.
func address(name string, prefix netip.Prefix) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("finding link %s: %w", name, err)
	}
	parsed, err := netlink.ParseIPNet(prefix.String())
	if err != nil {
		return err
	}
	if err := netlink.AddrAdd(link, &netlink.Addr{IPNet: parsed}); err != nil {
		return fmt.Errorf("giving %s the address %s: %w", name, prefix, err)
	}
	return setUp(name)
}

func route(to netip.Prefix, via netip.Addr) error {
	destination, err := netlink.ParseIPNet(to.String())
	if err != nil {
		return err
	}
	if err := netlink.RouteAdd(&netlink.Route{Dst: destination, Gw: via.AsSlice()}); err != nil {
		return fmt.Errorf("adding a route to %s by %s: %w", to, via, err)
	}
	return nil
}

// forward lets the namespace pass packets on. A new one takes over what the machine has set.
func forward() error {
	const file = "/proc/sys/net/ipv4/ip_forward"
	if err := os.WriteFile(file, []byte("1"), 0o644); err != nil {
		return fmt.Errorf("setting net.ipv4.ip_forward: %w", err)
	}
	return nil
}
