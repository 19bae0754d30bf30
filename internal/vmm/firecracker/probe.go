package firecracker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"imp.dev/imp/internal/process"
	"imp.dev/imp/internal/vmm"
)

// Probe implements vmm.Driver. It looks at programs, their releases, KVM and the place for jails; whether KVM runs a guest is found out by
// running one.
func (d *Driver) Probe(ctx context.Context) vmm.Capabilities {
	c := vmm.Capabilities{Accelerator: "kvm", Containment: d.containment()}
	r, err := d.releaseOf(ctx, d.options.Binary)
	if err != nil {
		c.Problem = d.explainBinary(err).Error()
		return c
	}
	c.VMMVersion, c.Flaws = "Firecracker v"+r.String(), r.flaws()
	err = errors.Join(r.supported(), d.usable(ctx, r))
	if err != nil {
		c.Problem = err.Error()
		return c
	}
	c.Usable = true
	return c
}

func (d *Driver) usable(ctx context.Context, r release) error {
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("no KVM on this host: %w; Firecracker needs it", err)
	}
	_ = f.Close()
	if d.options.Unjailed {
		return nil
	}
	if err := d.jails.usable(); err != nil {
		return err
	}
	j, err := d.releaseOf(ctx, d.options.Jailer)
	if err != nil {
		return d.explainBinary(err)
	}
	if j != r {
		return fmt.Errorf("the jailer at %s is of release %s and Firecracker at %s of %s: install both of one release", d.options.Jailer, j, d.options.Binary, r)
	}
	return nil
}

// releaseOf asks a program for its version: "Firecracker v1.16.1" or "Jailer v1.16.1" is its first line.
func (d *Driver) releaseOf(ctx context.Context, path string) (release, error) {
	r, err := process.Run(ctx, process.Cmd{Path: d.onHost(path), Args: []string{"--version"}})
	if err != nil {
		return release{}, err
	}
	first, _, _ := strings.Cut(strings.TrimSpace(string(r.Stdout)), "\n")
	_, version, ok := strings.Cut(first, " ")
	if !ok {
		return release{}, fmt.Errorf("%s says %.64q instead of its version", path, first)
	}
	parsed, err := parseRelease(version)
	if err != nil {
		return parsed, fmt.Errorf("%s: %w", path, err)
	}
	return parsed, nil
}

// explainBinary names the remedy for a program that is not there. Its words are in the runbook: they name FC_BIN.
func (d *Driver) explainBinary(err error) error {
	if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	for _, program := range []struct{ path, what string }{
		{d.options.Binary, "no Firecracker at %s: set FC_BIN (--firecracker-bin) to where it is on this node, or install it there: %w"},
		{d.options.Jailer, "no jailer at %s: set JAILER_BIN (--jailer-bin) to where it is on this node, or install it there beside Firecracker: %w"},
	} {
		if program.path == "" || !exists(d.onHost(program.path)) {
			if program.path == "" {
				program.path = `""`
			}
			return fmt.Errorf(program.what, program.path, err)
		}
	}
	return err
}

// check refuses what could only fail later and in other words.
func (d *Driver) check(c vmm.Config) error {
	if len(c.Script) > 0 && string(c.Script) != "null" { // null: none, in JSON
		return errors.New("a fake script is for the fake driver only")
	}
	if err := validID(d.runner.ID(c.Cgroup)); err != nil {
		return err
	}
	programs := []string{d.options.Binary}
	if !d.options.Unjailed {
		programs = append(programs, d.options.Jailer)
	}
	for _, path := range programs {
		if _, err := os.Stat(d.onHost(path)); err != nil {
			return d.explainBinary(err)
		}
	}
	for what, path := range map[string]string{"kernel": c.Kernel, "initramfs": c.Initramfs} {
		if err := worldReadable(path); err != nil {
			return fmt.Errorf("%s %s: %w", what, path, err)
		}
	}
	if err := checkKernel(c.Kernel, d.options.Arch); err != nil {
		return fmt.Errorf("kernel %s: %w", c.Kernel, err)
	}
	for _, n := range c.NICs {
		if n.Lend == nil {
			return fmt.Errorf("network interface %s: its network has no TAP that Firecracker can open by name", n.MAC)
		}
	}
	return nil
}
