package engine

import (
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/plan"
)

// maxHostname is the kernel's limit for a node name, in bytes (uname(2), without the final zero).
const maxHostname = 63

// argv puts the command together by Kubernetes' rules: Command replaces Entrypoint and drops Cmd, Args replace Cmd.
func argv(w machine.Workload, c image.Config) ([]string, error) {
	entrypoint, cmd := c.Entrypoint, c.Cmd
	if len(w.Command) > 0 {
		entrypoint, cmd = w.Command, nil
	}
	if len(w.Args) > 0 {
		cmd = w.Args
	}
	words := slices.Concat(entrypoint, cmd)
	if len(words) == 0 {
		return nil, fault.Permanent(fault.Errorf(fault.InvalidSpec, "reading spec.command", "neither command nor args are set and the image names no command of its own"))
	}
	return words, nil
}

// environment is the image's with the spec's on top; a name keeps the place where it was first seen.
func environment(w machine.Workload, c image.Config) [][]byte {
	var out [][]byte
	at := map[string]int{}
	put := func(name string, line string) {
		if i, ok := at[name]; ok {
			out[i] = []byte(line)
			return
		}
		at[name] = len(out)
		out = append(out, []byte(line))
	}
	for _, line := range c.Env {
		name, _, _ := strings.Cut(line, "=")
		put(name, line)
	}
	for _, v := range w.Env {
		put(v.Name, v.Name+"="+v.Value)
	}
	return out
}

// configure gives the guest of a boot its identity. The ID names the incarnation: a repeat is the same request.
func configure(b *plan.Boot, entropy []byte, now time.Time) guestv1.Configure {
	c := guestv1.Configure{
		ID: bootID(b), Hostname: hostname(b.Spec.Name), DataPaths: dataPaths(b), UnixNanos: now.UnixNano(), Entropy: entropy,
	}
	for _, n := range b.Spec.Interfaces {
		c.Interfaces = append(c.Interfaces, guestv1.Interface{MAC: n.MAC, Addresses: n.Addresses, Gateway: n.Gateway, MTU: n.MTU})
		c.Nameservers = append(c.Nameservers, n.Nameservers...)
		c.SearchDomains = append(c.SearchDomains, n.SearchDomains...)
	}
	return c
}

// start is the order to run the workload of a boot.
func start(b *plan.Boot) (guestv1.Start, error) {
	words, err := argv(b.Spec.Workload, b.Image.Config)
	if err != nil {
		return guestv1.Start{}, err
	}
	s := guestv1.Start{
		ID: bootID(b), Nonce: b.Nonce, Env: environment(b.Spec.Workload, b.Image.Config), User: b.Image.Config.User,
		WorkingDir: b.Spec.Workload.WorkingDir, StopSignal: b.Image.Config.StopSignal,
	}
	if s.WorkingDir == "" {
		s.WorkingDir = b.Image.Config.WorkingDir
	}
	for _, word := range words {
		s.Argv = append(s.Argv, []byte(word))
	}
	return s, nil
}

func bootID(b *plan.Boot) string {
	return fmt.Sprintf("%s/%d/%d", b.Spec.ID, b.Spec.Assignment, b.Incarnation)
}

// hostname is the VM's name, cut where the kernel would refuse it, without a dot or dash at its end.
func hostname(name string) string {
	if len(name) > maxHostname {
		name = name[:maxHostname]
	}
	return strings.TrimRight(name, ".-")
}

// dataPaths are the image's volumes and the user's paths, each once. A volume is the image author's word: a relative one is meant from
// the root, and the root itself is no volume.
func dataPaths(b *plan.Boot) []string {
	all := slices.Clone(b.Spec.Workload.DataPaths)
	for _, volume := range b.Image.Config.Volumes {
		if clean := path.Join("/", volume); clean != "/" {
			all = append(all, clean)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}
