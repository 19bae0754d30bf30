// Package bench prints Imp's figures: each a comparison within one run, because machines differ and are noisy.
package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/devserver"
	"imp.dev/imp/internal/devserver/demo"
	"imp.dev/imp/internal/devserver/imagefile"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const (
	namespace = "default"
	patience  = 3 * time.Minute
	// manyVMs is how many run at once for the figure of the daemons' memory.
	manyVMs = 20
	look    = 5 * time.Millisecond
)

// Run starts a server with two nodes, of which only the figures of networks use the second, and prints all figures. Rounds is how often each timing is taken.
func Run(ctx context.Context, opts devserver.Options, rounds int, out io.Writer) (err error) {
	dir, err := os.MkdirTemp("", "imp-bench-")
	if err != nil {
		return fmt.Errorf("making the benchmark's folder: %w", err)
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // VMMs run as users of their own and must get to their files
		return err
	}
	opts.Dir, opts.RegistryPort, opts.Nodes, opts.VMM = dir, 0, 2, "qemu"
	opts.VCPU = max(opts.VCPU, 2*manyVMs) // processors are shared by time
	server, err := devserver.Up(ctx, opts)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop(context.WithoutCancel(ctx))) }()
	b := &bench{server: server, opts: opts, rounds: rounds, out: out}
	if b.client, err = devserver.NewClient(server.Config()); err != nil {
		return err
	}
	for _, step := range []func(context.Context) error{b.prepare, b.firstLine, b.disks, b.writes, b.memory, b.overlay} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

type bench struct {
	server *devserver.Server
	client client.Client
	opts   devserver.Options
	rounds int
	out    io.Writer
}

func (b *bench) prepare(ctx context.Context) error {
	class := &v1alpha1.ImpVMClass{
		ObjectMeta: metav1.ObjectMeta{Name: "bench"},
		Spec:       v1alpha1.ImpVMClassSpec{VCPU: 1, MemoryMiB: 192, DiskGiB: 1},
	}
	if err := b.client.Create(ctx, class); err != nil {
		return err
	}
	image, err := demo.Image(ctx, b.opts.CacheDir)
	if err != nil {
		return err
	}
	if _, err := imagefile.Push(ctx, image, b.server.Registry+"/"+demo.ImageName, nil); err != nil {
		return err
	}
	// The image's pull and build belong to no figure below.
	vm, err := b.create(ctx, "warm-up", "exit 0")
	if err != nil {
		return err
	}
	if _, err := b.await(ctx, vm, finished); err != nil {
		return err
	}
	return b.remove(ctx, vm)
}

func (b *bench) vm(name, script string) *v1alpha1.ImpVM {
	return &v1alpha1.ImpVM{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: v1alpha1.ImpVMSpec{
			NodeName: b.server.NodeNames()[0],
			ClassRef: &v1alpha1.ClassReference{Name: "bench"},
			Image:    b.server.Registry + "/" + demo.ImageName,
			Command:  []string{"/bin/sh", "-c", script},
			// A figure is not to wait for a polite end.
			TerminationGracePeriodSeconds: ptr.To(int64(0)),
		},
	}
}

func (b *bench) create(ctx context.Context, name, script string) (*v1alpha1.ImpVM, error) {
	vm := b.vm(name, script)
	return vm, b.client.Create(ctx, vm)
}

func finished(vm *v1alpha1.ImpVM) bool {
	return meta.IsStatusConditionTrue(vm.Status.Conditions, v1alpha1.ConditionFinished)
}

func started(vm *v1alpha1.ImpVM) bool { return vm.Status.StartedAt != nil }

// await gives the VM once it is as wanted. A VM that has finished otherwise is an error.
func (b *bench) await(ctx context.Context, vm *v1alpha1.ImpVM, is func(*v1alpha1.ImpVM) bool) (*v1alpha1.ImpVM, error) {
	now := &v1alpha1.ImpVM{}
	err := poll(ctx, func() (bool, error) {
		if err := b.client.Get(ctx, client.ObjectKeyFromObject(vm), now); err != nil {
			return false, err
		}
		if now.Status.Phase == v1alpha1.PhaseFailed {
			return false, fmt.Errorf("%s has failed: %v", vm.Name, now.Status.Conditions)
		}
		return is(now), nil
	})
	return now, err
}

func (b *bench) remove(ctx context.Context, vm *v1alpha1.ImpVM) error {
	if err := b.client.Delete(ctx, vm); err != nil {
		return err
	}
	return poll(ctx, func() (bool, error) {
		err := b.client.Get(ctx, client.ObjectKeyFromObject(vm), &v1alpha1.ImpVM{})
		return apierrors.IsNotFound(err), client.IgnoreNotFound(err)
	})
}

// poll tries until ok, an error, or patience ends.
func poll(ctx context.Context, try func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	ticker := time.NewTicker(look)
	defer ticker.Stop()
	for {
		if ok, err := try(); ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
	}
}

// spread prints minimum, median and maximum.
func spread(d []time.Duration) string {
	s := slices.Sorted(slices.Values(d))
	return fmt.Sprintf("min %s, median %s, max %s", short(s[0]), short(median(d)), short(s[len(s)-1]))
}

func short(d time.Duration) string {
	if d < 100*time.Millisecond {
		return d.Round(10 * time.Microsecond).String()
	}
	return d.Round(time.Millisecond).String()
}

func median(d []time.Duration) time.Duration {
	s := slices.Sorted(slices.Values(d))
	return s[len(s)/2]
}
