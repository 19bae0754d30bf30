package runtimed

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine/machinetest"
	"imp.dev/imp/internal/network"
	networkfake "imp.dev/imp/internal/network/fake"
)

func networkFlags(t *testing.T, env map[string]string, args ...string) NetworkOptions {
	t.Helper()
	o, f := NetworkOptions{}, pflag.NewFlagSet("", pflag.ContinueOnError)
	o.register(f, func(name string) string { return env[name] })
	if err := f.Parse(args); err != nil {
		t.Fatal(err)
	}
	return o
}

func TestNetworkFlags(t *testing.T) {
	defaults := NetworkOptions{Network: "linux", NetNSDir: "/run/netns", VXLANPort: 14789}
	for name, c := range map[string]struct {
		vmm, hostNamespaces string
		user                bool
		env                 map[string]string
		args                []string
		want                func(*NetworkOptions)
	}{
		"qemu has real networks":                           {vmm: "qemu"},
		"the fake driver has fake ones":                    {vmm: "fake", want: func(o *NetworkOptions) { o.Network = "fake" }},
		"without root there are none":                      {vmm: "qemu", user: true, want: func(o *NetworkOptions) { o.Network = "none" }},
		"what is asked for wins":                           {vmm: "fake", args: []string{"--network=linux"}},
		"the host's namespace is beside the others":        {vmm: "qemu", hostNamespaces: "/host/proc/1/ns", want: func(o *NetworkOptions) { o.HostNetNS = "/host/proc/1/ns/net" }},
		"the host's namespace may be another":              {vmm: "qemu", hostNamespaces: "/host/proc/1/ns", args: []string{"--host-netns=/run/netns/n1"}, want: func(o *NetworkOptions) { o.HostNetNS = "/run/netns/n1" }},
		"the node's address comes from the environment":    {vmm: "qemu", env: map[string]string{"NODE_ADDRESS": "192.0.2.1"}, want: func(o *NetworkOptions) { o.NodeAddress = "192.0.2.1" }},
		"routes are several ranges, after one flag or two": {vmm: "qemu", args: []string{"--node-routes=10.0.0.0/8,172.16.0.0/12", "--node-routes=192.168.0.0/16"}, want: func(o *NetworkOptions) { o.NodeRoutes = []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"} }},
	} {
		t.Run(name, func(t *testing.T) {
			want := defaults
			if c.want != nil {
				c.want(&want)
			}
			got, err := networkFlags(t, c.env, c.args...).complete(c.vmm, c.hostNamespaces, !c.user)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("options differ (-want +got):\n%s", d)
			}
		})
	}
	for arg, words := range map[string]string{
		"--network=linux":              "run as root, or take --network=none",
		"--network=bridge":             "must be linux, fake or none",
		"--host-netns=n1":              "must be an absolute path",
		"--netns-dir=netns":            "must be an absolute path",
		"--node-address=node-1":        "must be an IPv4 address",
		"--node-address=fd00::1":       "must be an IPv4 address",
		"--node-address=127.0.0.1":     "that other nodes can reach",
		"--vxlan-port=0":               "1 to 65535",
		"--vxlan-port=70000":           "1 to 65535",
		"--node-routes=10.0.0.1/8":     "without host bits",
		"--node-routes=fd00::/8":       "IPv4",
		"--network-failures=often":     "RATE,SEED",
		"--network-failures=1.5":       "0 to 1",
		"--network-failures=NaN":       "0 to 1",
		"--network-failures=0.1,seven": "RATE,SEED",
	} {
		t.Run(arg+" is refused with the remedy", func(t *testing.T) {
			_, err := networkFlags(t, nil, arg).complete("qemu", "", !strings.Contains(arg, "=linux"))
			flag, _, _ := strings.Cut(arg, "=")
			if err == nil || !strings.Contains(err.Error(), flag) || !strings.Contains(err.Error(), words) {
				t.Errorf("got %v, want an error that names %s and says %q", err, flag, words)
			}
		})
	}
}

func TestTheAskedShareOfNetworkStepsFails(t *testing.T) {
	real, err := networkfake.New(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	run := func(text string) (failed int, pattern string) {
		f, err := newFailures(text)
		if err != nil {
			t.Fatal(err)
		}
		n := failing{Network: real, failures: f}
		spec := machinetest.NewNetwork()
		for range 250 {
			for _, err := range []error{
				n.Set(t.Context(), spec), attachAndClose(t, n, spec), n.Detach(t.Context(), "vm"), n.Forget(t.Context(), spec.ID),
			} {
				mark := "."
				switch {
				case err == nil:
				case fault.Is(err, fault.NetworkSetupFailed):
					mark = "x"
					failed++
				default:
					t.Fatalf("got %v, want NetworkSetupFailed", err)
				}
				pattern += mark
			}
			if err := errors.Join(real.Detach(t.Context(), "vm"), real.Forget(t.Context(), spec.ID)); err != nil {
				t.Fatal(err)
			}
		}
		return failed, pattern
	}
	if failed, _ := run(""); failed != 0 {
		t.Errorf("without the flag %d steps failed", failed)
	}
	first, pattern := run("0.1,7")
	if first < 60 || first > 240 { // attaching fails as well where setting was made to fail
		t.Errorf("%d of 1000 steps failed at a rate of 0.1", first)
	}
	if _, again := run("0.1,7"); again != pattern {
		t.Error("the same seed made other steps fail")
	}
	if _, other := run("0.1,8"); other == pattern {
		t.Error("another seed made the same steps fail")
	}
}

func attachAndClose(t *testing.T, n network.Network, spec network.Spec) error {
	t.Helper()
	attachments, err := n.Attach(t.Context(), "vm", []network.Interface{{Name: "eth0", Network: spec.ID, MAC: network.GuestMAC("vm", 0).String()}})
	for _, a := range attachments {
		if err := a.TAP.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return err
}

func TestTrafficIsCountedForEachInterface(t *testing.T) {
	n, err := networkfake.New(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	spec := machinetest.NewNetwork()
	if err := n.Set(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	for _, vm := range []string{"u1", "u2", "orphan"} {
		attachments, err := n.Attach(t.Context(), vm, []network.Interface{{Name: "eth0", Network: spec.ID, MAC: network.GuestMAC(vm, 0).String()}})
		if err != nil {
			t.Fatal(err)
		}
		if err := attachments[0].TAP.Close(); err != nil {
			t.Fatal(err)
		}
		n.SetCounters(network.Counters{VM: vm, Interface: "eth0", ReceivedBytes: 10, SentBytes: 20, Dropped: 3})
	}
	n.SetProblem(spec.ID, "the bridge is not there")
	registry := prometheus.NewRegistry()
	registry.MustRegister(newTraffic(n, func(id string) (string, string, bool) { return "ns", "same-name", id != "orphan" }))
	got, err := gather(registry)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]float64{"imp_network_problems": 1}
	for _, vm := range []string{"u1", "u2"} {
		labels := " interface=eth0 name=same-name namespace=ns vm=" + vm
		want["imp_vm_network_received_bytes_total"+labels] = 10
		want["imp_vm_network_sent_bytes_total"+labels] = 20
		want["imp_vm_network_dropped_packets_total"+labels] = 3
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("metrics differ (-want +got):\n%s", d)
	}
}
