package runtimed

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"

	"github.com/spf13/pflag"
	"k8s.io/utils/clock"

	"imp.dev/imp/internal/network"
	networkfake "imp.dev/imp/internal/network/fake"
	"imp.dev/imp/internal/network/linux"
	"imp.dev/imp/internal/network/none"
)

// Kinds of networks.
const (
	networkLinux = "linux"
	networkFake  = "fake"
	networkNone  = "none"
)

// NetworkOptions are imp-runtime's flags about guests' networks.
type NetworkOptions struct {
	// Network is the kind; "" follows the driver.
	Network string
	// HostNetNS is the file of the network namespace that is the host's; "" is the runtime's own, or that of HostNamespaces.
	HostNetNS string
	// NetNSDir is where namespaces of networks are kept by name.
	NetNSDir string
	// NodeAddress is where other nodes send guests' frames to (VTEP); "" is the source address of the default route.
	NodeAddress string
	VXLANPort   int
	// NodeRoutes are ranges in which the host gets routes to its guests' subnets.
	NodeRoutes []string
	// NetworkFailures is RATE[,SEED]: that share of steps is made to fail. For tests.
	NetworkFailures string
}

func (o *NetworkOptions) register(f *pflag.FlagSet, env func(string) string) {
	f.StringVar(&o.Network, "network", "", "guests' networks: linux, fake (files that tell what would be), or none (default: fake for --vmm=fake, else linux, which needs root)")
	f.StringVar(&o.HostNetNS, "host-netns", "", "file of the network namespace that is the host's (default: net in --host-namespaces if that is set, else the runtime's own)")
	f.StringVar(&o.NetNSDir, "netns-dir", "/run/netns", "directory where networks' namespaces are kept by name")
	f.StringVar(&o.NodeAddress, "node-address", env("NODE_ADDRESS"), "IPv4 address of this node that other nodes send guests' packets to (environment: NODE_ADDRESS; default: the source of the default route)")
	f.IntVar(&o.VXLANPort, "vxlan-port", network.DefaultPort, "UDP port of the overlay, the same on every node")
	f.StringSliceVar(&o.NodeRoutes, "node-routes", nil, "ranges in CIDR form in which this node gets routes to its own guests' subnets; without any it reaches no guest")
	f.StringVar(&o.NetworkFailures, "network-failures", "", "RATE[,SEED]: share of network steps, 0 to 1, that are made to fail; for tests")
	_ = f.MarkHidden("network-failures") // it was defined in the line above
}

// complete fills in what follows from other flags, and refuses what cannot work with the flag and the remedy.
func (o NetworkOptions) complete(vmm, hostNamespaces string, root bool) (NetworkOptions, error) {
	switch {
	case o.Network != "":
	case vmm == "fake":
		o.Network = networkFake
	case root:
		o.Network = networkLinux
	default:
		o.Network = networkNone // as there are no cgroups and no users for VMs without root
	}
	if o.HostNetNS == "" && hostNamespaces != "" {
		o.HostNetNS = filepath.Join(hostNamespaces, "net")
	}
	switch o.Network {
	case networkFake, networkNone:
	case networkLinux:
		if !root {
			return o, fmt.Errorf("reading flags: --network=linux needs root: run as root, or take --network=none")
		}
	default:
		return o, fmt.Errorf("reading flags: --network is %q and must be linux, fake or none", o.Network)
	}
	for flag, path := range map[string]string{"--host-netns": o.HostNetNS, "--netns-dir": o.NetNSDir} {
		if path != "" && !filepath.IsAbs(path) {
			return o, fmt.Errorf("reading flags: %s is %q and must be an absolute path", flag, path)
		}
	}
	if o.NodeAddress != "" {
		if a, err := netip.ParseAddr(o.NodeAddress); err != nil || !a.Is4() || !a.IsGlobalUnicast() {
			return o, fmt.Errorf("reading flags: --node-address is %q and must be an IPv4 address of this node that other nodes can reach, like 192.0.2.10", o.NodeAddress)
		}
	}
	if o.VXLANPort < 1 || o.VXLANPort > 65535 {
		return o, fmt.Errorf("reading flags: --vxlan-port is %d and must be 1 to 65535, the same on every node", o.VXLANPort)
	}
	for _, r := range o.NodeRoutes {
		if p, err := netip.ParsePrefix(r); err != nil || !p.Addr().Is4() || p != p.Masked() {
			return o, fmt.Errorf("reading flags: --node-routes holds %q; each must be an IPv4 range without host bits, like 10.44.0.0/16", r)
		}
	}
	if _, err := newFailures(o.NetworkFailures); err != nil {
		return o, err
	}
	return o, nil
}

// hostNetwork is a network and what has to go on beside it.
type hostNetwork struct {
	network.Network
	// run keeps it as it should be until ctx ends; nil where nothing has to be done.
	run func(ctx context.Context) error
	// close lets go of it; guests' networks stay. nil where there is nothing to let go of.
	close func()
}

func newNetwork(o Options, instance string, clk clock.WithTicker, log *slog.Logger) (hostNetwork, error) {
	failures, err := newFailures(o.NetworkFailures)
	if err != nil {
		return hostNetwork{}, err
	}
	dir := filepath.Join(o.StateDir, "network")
	switch o.Network {
	case networkLinux:
		return newLinux(linux.Options{
			StateDir: dir, Instance: instance, HostNamespace: o.HostNetNS, NamespaceDir: o.NetNSDir, Port: o.VXLANPort,
			Clock: clk, Log: log, Failpoint: failures.point,
		}, o.NodeAddress, o.NodeRoutes)
	case networkFake:
		n, err := networkfake.New(dir)
		if err != nil {
			return hostNetwork{}, err
		}
		if o.NodeAddress != "" {
			n.SetHost(network.Host{VTEP: o.NodeAddress, MTU: 1500, Port: o.VXLANPort, Addresses: []string{o.NodeAddress}})
		}
		return hostNetwork{Network: failing{Network: n, failures: failures}}, nil
	default:
		return hostNetwork{Network: none.Network{}}, nil
	}
}

// newLinux makes networks of the kernel's own. address and routes were checked with the flags.
func newLinux(o linux.Options, address string, routes []string) (hostNetwork, error) {
	if address != "" {
		a, err := netip.ParseAddr(address)
		if err != nil {
			return hostNetwork{}, fmt.Errorf("reading flags: --node-address: %w", err)
		}
		o.VTEP = a
	}
	for _, r := range routes {
		p, err := netip.ParsePrefix(r)
		if err != nil {
			return hostNetwork{}, fmt.Errorf("reading flags: --node-routes: %w", err)
		}
		o.NodeRoutes = append(o.NodeRoutes, p)
	}
	n, err := linux.New(o)
	if err != nil {
		return hostNetwork{}, err
	}
	return hostNetwork{
		Network: n,
		run:     func(ctx context.Context) error { n.Run(ctx); return nil },
		close:   n.Close,
	}, nil
}
