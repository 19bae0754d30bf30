package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/devserver"
	"imp.dev/imp/internal/devserver/apicount"
	"imp.dev/imp/internal/devserver/chaos"
	"imp.dev/imp/internal/machine/rpc"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// fleet is how many VMs run during the figures of supervision.
const fleet = 200

// Supervision starts a server with one node of fake machines and prints how soon is told what became of one of 200, how soon 200 are
// adopted, and what 200 at rest cost the API server. kills is how many VMMs are killed for each distribution: at most 100.
func Supervision(ctx context.Context, opts devserver.Options, kills int, out io.Writer) (err error) {
	if kills < 1 || kills > fleet/2 {
		return fmt.Errorf("reading --kills: %d is not between 1 and %d", kills, fleet/2)
	}
	dir, err := os.MkdirTemp("", "imp-bench-")
	if err != nil {
		return fmt.Errorf("making the benchmark's folder: %w", err)
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // VMMs run as users of their own and must get to their files
		return err
	}
	opts.Dir, opts.RegistryPort, opts.Nodes, opts.VMM = dir, 0, 1, "fake"
	server, err := devserver.Up(ctx, opts)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop(context.WithoutCancel(ctx))) }()
	b := &supervision{bench: bench{server: server, opts: opts, out: out}, kills: kills, stateDir: filepath.Join(server.Places.Data, server.NodeNames()[0])}
	if b.client, err = devserver.NewClient(server.Config()); err != nil {
		return err
	}
	if b.watcher, err = client.NewWithWatch(server.Config(), client.Options{Scheme: b.client.Scheme()}); err != nil {
		return err
	}
	for _, step := range []func(context.Context) error{b.populate, b.atRest, b.told, b.toldWithoutOperator, b.adopted, b.takenUp} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

type supervision struct {
	bench
	watcher  client.WithWatch
	kills    int
	stateDir string
	vms      []*v1alpha1.ImpVM
}

func (b *supervision) node() string { return b.server.NodeNames()[0] }

// populate starts the fleet: VMs that run until they are stopped, and are started again at once, or nearly.
func (b *supervision) populate(ctx context.Context) error {
	class := &v1alpha1.ImpVMClass{ObjectMeta: metav1.ObjectMeta{Name: "bench"}, Spec: v1alpha1.ImpVMClassSpec{VCPU: 1, MemoryMiB: 128, DiskGiB: 1}}
	if err := b.client.Create(ctx, class); err != nil {
		return err
	}
	began := time.Now()
	for i := range fleet {
		vm := b.vm(fmt.Sprintf("vm-%03d", i), "")
		vm.Spec.Image, vm.Spec.Lifecycle = "fake/bench:1", v1alpha1.LifecyclePersistent
		vm.Spec.RestartPolicy = &v1alpha1.RestartPolicy{Backoff: &v1alpha1.RestartBackoff{InitialDelay: &metav1.Duration{Duration: time.Second}}}
		if err := b.client.Create(ctx, vm); err != nil {
			return err
		}
		b.vms = append(b.vms, vm)
	}
	if err := b.allReady(ctx); err != nil {
		return err
	}
	fmt.Fprintf(b.out, "\n%d fake VMs on one node: created and Ready in %s\n", fleet, short(time.Since(began)))
	return nil
}

func (b *supervision) allReady(ctx context.Context) error {
	return b.all(ctx, func(vm *v1alpha1.ImpVM) bool {
		return meta.IsStatusConditionTrue(vm.Status.Conditions, v1alpha1.ConditionReady)
	})
}

// all waits until every VM is as wanted.
func (b *supervision) all(ctx context.Context, is func(*v1alpha1.ImpVM) bool) error {
	return poll(ctx, func() (bool, error) {
		list := &v1alpha1.ImpVMList{}
		if err := b.client.List(ctx, list, client.InNamespace(namespace)); err != nil {
			return false, err
		}
		for i := range list.Items {
			if !is(&list.Items[i]) {
				return false, nil
			}
		}
		return true, nil
	})
}

// atRest counts writes of a minute in which nothing happens.
func (b *supervision) atRest(ctx context.Context) error {
	// Events of the start are counted up every 10 s at most: let the last of them pass.
	if err := pass(ctx, 15*time.Second); err != nil {
		return err
	}
	before, err := apicount.Writes(ctx, b.server.Config())
	if err != nil {
		return err
	}
	if err := pass(ctx, time.Minute); err != nil {
		return err
	}
	after, err := apicount.Writes(ctx, b.server.Config())
	if err != nil {
		return err
	}
	fmt.Fprintf(b.out, "\nAPI writes in a minute with %d VMs at rest (aim 0 beside leases)\n", fleet)
	for _, kind := range slices.Sorted(maps.Keys(after)) {
		if n := after[kind] - before[kind]; n > 0 {
			fmt.Fprintf(b.out, "  %-28s %.0f\n", kind, n)
		}
	}
	return nil
}

// pass lets time pass.
func pass(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (b *supervision) told(ctx context.Context) error {
	return b.killEach(ctx, "", b.vms[:b.kills])
}

func (b *supervision) toldWithoutOperator(ctx context.Context) error {
	if err := b.server.Kill(devserver.Operator, ""); err != nil {
		return err
	}
	if err := b.killEach(ctx, ", operator stopped", b.vms[fleet/2:fleet/2+b.kills]); err != nil {
		return err
	}
	return b.server.Start(devserver.Operator, "")
}

// killEach kills the VMM of each VM, one after another, and waits until a watch shows the condition and the event.
func (b *supervision) killEach(ctx context.Context, words string, vms []*v1alpha1.ImpVM) error {
	pids, err := chaos.Processes(b.stateDir)
	if err != nil {
		return err
	}
	var conditions, events []time.Duration
	for _, vm := range vms {
		condition, event, err := b.killOne(ctx, vm, pids[string(vm.UID)])
		if err != nil {
			return fmt.Errorf("waiting for what is said of %s: %w", vm.Name, err)
		}
		conditions, events = append(conditions, condition), append(events, event)
	}
	fmt.Fprintf(b.out, "\nVMM killed → seen by a watch through the API%s, %d of %d VMs (aim p99 ≤ 1 s)\n", words, len(vms), fleet)
	for _, line := range []struct {
		name string
		took []time.Duration
	}{{"condition", conditions}, {"event", events}} {
		s := slices.Sorted(slices.Values(line.took))
		fmt.Fprintf(b.out, "  %-9s p50 %s, p99 %s, max %s\n", line.name, short(s[len(s)/2]), short(s[min(len(s)-1, len(s)*99/100)]), short(s[len(s)-1]))
	}
	return b.allReady(ctx)
}

func (b *supervision) killOne(ctx context.Context, vm *v1alpha1.ImpVM, pid int) (condition, event time.Duration, err error) {
	if pid == 0 {
		return 0, 0, errors.New("it has no process")
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	objects, err := b.watcher.Watch(ctx, &v1alpha1.ImpVMList{}, client.InNamespace(namespace), client.MatchingFields{"metadata.name": vm.Name})
	if err != nil {
		return 0, 0, err
	}
	defer objects.Stop()
	said, err := b.watcher.Watch(ctx, &corev1.EventList{}, client.InNamespace(namespace), client.MatchingFields{"involvedObject.uid": string(vm.UID)})
	if err != nil {
		return 0, 0, err
	}
	defer said.Stop()
	at := time.Now()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		return 0, 0, err
	}
	for condition == 0 || event == 0 {
		select {
		case <-ctx.Done():
			return 0, 0, ctx.Err()
		case e, ok := <-objects.ResultChan():
			if !ok {
				return 0, 0, errors.New("the watch of objects ended")
			}
			if now, ok := e.Object.(*v1alpha1.ImpVM); ok && condition == 0 && toldKilled(now) {
				condition = time.Since(at)
			}
		case e, ok := <-said.ResultChan():
			if !ok {
				return 0, 0, errors.New("the watch of events ended")
			}
			if now, ok := e.Object.(*corev1.Event); ok && event == 0 && e.Type != watch.Deleted && isKilled(now) {
				event = time.Since(at)
			}
		}
	}
	return condition, event, nil
}

// toldKilled says whether the object says that its VM does not run, and why.
func toldKilled(vm *v1alpha1.ImpVM) bool {
	return vm.Status.LastFailure != nil && vm.Status.LastFailure.Reason == "VMMKilled" &&
		meta.IsStatusConditionFalse(vm.Status.Conditions, v1alpha1.ConditionReady)
}

func isKilled(e *corev1.Event) bool {
	return e.Reason == "VMMKilled" || strings.Contains(e.Message, "VMMKilled")
}

// adopted kills the runtime and waits until it says that it has found all VMs again.
func (b *supervision) adopted(ctx context.Context) error {
	if err := b.server.Kill(devserver.Runtime, b.node()); err != nil {
		return err
	}
	at := time.Now()
	if err := b.server.Start(devserver.Runtime, b.node()); err != nil {
		return err
	}
	runtime, err := rpc.NewClient(b.server.Places.RuntimeSocket(b.node()))
	if err != nil {
		return err
	}
	defer runtime.Close()
	err = poll(ctx, func() (bool, error) {
		all, err := runtime.List(ctx)
		n := 0
		for _, status := range all {
			if status.Counters.Adopted > 0 {
				n++
			}
		}
		return err == nil && n == fleet, nil // an error is a runtime that does not listen yet
	})
	if err != nil {
		return fmt.Errorf("waiting for all to be adopted: %w", err)
	}
	fmt.Fprintf(b.out, "\nruntime killed and started → all %d VMMs adopted: %s (aim ≤ 5 s)\n", fleet, short(time.Since(at)))
	return b.allReady(ctx)
}

// takenUp kills the agent, edits every VM, and waits until all the edits have reached the node: the agent has then taken up every VM.
func (b *supervision) takenUp(ctx context.Context) error {
	if err := b.server.Kill(devserver.Agent, b.node()); err != nil {
		return err
	}
	for _, vm := range b.vms {
		before := vm.DeepCopy()
		vm.Spec.TerminationGracePeriodSeconds = ptr.To(int64(1))
		if err := b.client.Patch(ctx, vm, client.MergeFrom(before)); err != nil {
			return err
		}
	}
	pids, err := chaos.Processes(b.stateDir)
	if err != nil {
		return err
	}
	at := time.Now()
	if err := b.server.Start(devserver.Agent, b.node()); err != nil {
		return err
	}
	if err := b.all(ctx, func(vm *v1alpha1.ImpVM) bool { return vm.Status.ObservedGeneration == vm.Generation }); err != nil {
		return fmt.Errorf("waiting for all edits: %w", err)
	}
	took := time.Since(at)
	now, err := chaos.Processes(b.stateDir)
	if err != nil {
		return err
	}
	if !maps.Equal(pids, now) {
		return errors.New("the restart of the agent has changed which VMMs run")
	}
	fmt.Fprintf(b.out, "\nagent killed and started → all %d VMs taken up, with an edit each that was made meanwhile: %s (aim ≤ 5 s)\n", fleet, short(took))
	return nil
}
