// Package demo boots real microVMs through the Kubernetes API on one machine and shows what they said: the examples of
// this repository, from apply to deletion, each held against what it has to come to.
package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/examples"
	"imp.dev/imp/internal/devserver"
	"imp.dev/imp/internal/devserver/controlplane"
	"imp.dev/imp/internal/devserver/imagefile"

	"sigs.k8s.io/controller-runtime/pkg/client"
)

// bootTimeout bounds the wait for the examples; deleteTimeout that for their removal. Two emulated processors boot three guests in some 20 s.
const (
	bootTimeout   = 3 * time.Minute
	deleteTimeout = time.Minute
)

// Run runs the demo with a server in a temporary folder; opts say how, save for Dir and RegistryPort. A nil error means that all went as expected
// and that nothing is left on the machine.
func Run(ctx context.Context, opts devserver.Options, out io.Writer) (err error) {
	began := time.Now()
	dir, err := os.MkdirTemp("", "imp-demo-")
	if err != nil {
		return fmt.Errorf("making the demo's folder: %w", err)
	}
	opts.Dir, opts.RegistryPort = dir, 0
	// VMMs run as users of their own and must get to their files.
	if err := os.Chmod(dir, 0o755); err != nil {
		return err
	}
	server, err := devserver.Up(ctx, opts)
	if err != nil {
		return errors.Join(err, fmt.Errorf("the logs are in %s", dir))
	}
	d := &run{server: server, out: out, began: began, cache: opts.CacheDir}
	err = d.all(ctx)
	fmt.Fprintln(out, "\nStopping everything.")
	if stopped := server.Stop(context.WithoutCancel(ctx)); stopped != nil {
		err = errors.Join(err, stopped)
	}
	if err != nil {
		return errors.Join(err, fmt.Errorf("the logs are in %s", server.Places.Logs()))
	}
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	fmt.Fprintf(out, "All went as expected, and nothing is left. %.0f s in all.\n", time.Since(began).Seconds())
	return nil
}

type run struct {
	server *devserver.Server
	client client.Client
	out    io.Writer
	began  time.Time
	cache  string
}

func (d *run) all(ctx context.Context) (err error) {
	if d.client, err = devserver.NewClient(d.server.Config()); err != nil {
		return err
	}
	if err := d.pushImage(ctx); err != nil {
		return err
	}
	if err := d.apply(ctx); err != nil {
		return err
	}
	fmt.Fprintln(d.out)
	vms, err := d.await(ctx, "the examples to come to what they should", bootTimeout, allReached)
	// What the guests said is most wanted when something went wrong.
	err = errors.Join(err, d.consoles(ctx, vms))
	fmt.Fprintln(d.out, "\nWhere the time of each start went:")
	timings(d.out, vms)
	if err != nil {
		return err
	}
	return d.delete(ctx, vms)
}

func (d *run) pushImage(ctx context.Context) error {
	img, err := Image(ctx, d.cache)
	if err != nil {
		return err
	}
	_, err = imagefile.Push(ctx, img, d.server.Registry+"/"+ImageName, nil)
	return err
}

// apply applies the examples, with the address of this server's registry in place of the one they name.
func (d *run) apply(ctx context.Context) error {
	names, err := fs.Glob(examples.Files, "*.yaml")
	if err != nil {
		return err
	}
	// The class first. Any order works in the end, but a VM before its class is an InvalidSpec for a moment.
	slices.SortStableFunc(names, func(a, b string) int { return order(a) - order(b) })
	for _, name := range names {
		content, err := fs.ReadFile(examples.Files, name)
		if err != nil {
			return err
		}
		content = bytes.ReplaceAll(content, []byte(examples.Registry), []byte(d.server.Registry))
		objects, err := controlplane.ParseManifests(content)
		if err != nil {
			return fmt.Errorf("reading examples/%s: %w", name, err)
		}
		fmt.Fprintf(d.out, "kubectl apply -f examples/%s\n", name)
		if err := controlplane.Apply(ctx, d.client, objects); err != nil {
			return err
		}
	}
	return nil
}

func order(name string) int {
	if name == "class.yaml" {
		return 0
	}
	return 1
}

// await shows the VMs until done says so, a program dies, or time is up. It gives the VMs as they were last.
func (d *run) await(ctx context.Context, what string, limit time.Duration, done func([]v1alpha1.ImpVM) (bool, error)) ([]v1alpha1.ImpVM, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	ticker := time.NewTicker(250 * time.Millisecond)
	defer ticker.Stop()
	shown := newBoard(d.out, d.began)
	list := &v1alpha1.ImpVMList{}
	for {
		if err := d.client.List(ctx, list); err != nil {
			return list.Items, fmt.Errorf("waiting for %s: %w", what, err)
		}
		shown.show(list.Items)
		if finished, err := done(list.Items); finished || err != nil {
			return list.Items, err
		}
		select {
		case err := <-d.server.Ended():
			return list.Items, fmt.Errorf("waiting for %s: %w", what, err)
		case <-ctx.Done():
			return list.Items, fmt.Errorf("waiting for %s: %w", what, ctx.Err())
		case <-ticker.C:
		}
	}
}

func allReached(vms []v1alpha1.ImpVM) (bool, error) {
	var wrong []error
	open := 0
	for _, want := range expectations() {
		i := slices.IndexFunc(vms, func(vm v1alpha1.ImpVM) bool { return vm.Name == want.name })
		if i < 0 {
			open++
			continue
		}
		reached, problem := want.reached(&vms[i])
		if problem != "" {
			wrong = append(wrong, errors.New(problem))
		} else if !reached {
			open++
		}
	}
	return open == 0 && len(wrong) == 0, errors.Join(wrong...)
}

// consoles prints what each guest said, and checks it.
func (d *run) consoles(ctx context.Context, vms []v1alpha1.ImpVM) error {
	var problems []error
	for i := range vms {
		vm := &vms[i]
		if vm.Status.NodeName == "" {
			continue
		}
		var console bytes.Buffer
		err := devserver.CopyConsole(ctx, d.server.Places.RuntimeSocket(vm.Status.NodeName), string(vm.UID), false, &console)
		if err != nil {
			problems = append(problems, fmt.Errorf("%s: %w", vm.Name, err))
			continue
		}
		fmt.Fprintf(d.out, "\nThe console of %s:\n", vm.Name)
		for line := range strings.Lines(console.String()) {
			fmt.Fprintf(d.out, "  | %s\n", strings.TrimRight(line, "\r\n"))
		}
		for _, want := range expectations() {
			if missing := want.missing(console.String()); want.name == vm.Name && len(missing) > 0 {
				problems = append(problems, fmt.Errorf("the console of %s lacks %q", vm.Name, missing))
			}
		}
	}
	return errors.Join(problems...)
}

// noNetworkLeft waits until the nodes have taken away the networks of the guests that are gone.
func (d *run) noNetworkLeft(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, deleteTimeout)
	defer cancel()
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	for {
		left, err := d.server.Networks()
		if err != nil || len(left) == 0 {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("deleting the VMs: these network namespaces are left: %s", strings.Join(left, ", "))
		case <-ticker.C:
		}
	}
}

// delete deletes the VMs, waits until the objects are gone, and looks for what is left of them.
func (d *run) delete(ctx context.Context, vms []v1alpha1.ImpVM) error {
	fmt.Fprintln(d.out, "\nkubectl delete impvm --all")
	for i := range vms {
		if err := client.IgnoreNotFound(d.client.Delete(ctx, &vms[i])); err != nil {
			return fmt.Errorf("deleting %s: %w", vms[i].Name, err)
		}
	}
	_, err := d.await(ctx, "the VMs to be gone", deleteTimeout, func(left []v1alpha1.ImpVM) (bool, error) { return len(left) == 0, nil })
	if err != nil {
		return err
	}
	var left []string
	for i := range vms {
		left = append(left, d.server.Leftovers(string(vms[i].UID))...)
	}
	if len(left) > 0 {
		return fmt.Errorf("deleting the VMs: this is left of them:\n  %s", strings.Join(left, "\n  "))
	}
	if err := d.noNetworkLeft(ctx); err != nil {
		return err
	}
	fmt.Fprintln(d.out, "No process, cgroup, network, disk or socket of them is left.")
	return nil
}
