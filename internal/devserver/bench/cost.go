package bench

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/devserver"
	"imp.dev/imp/internal/devserver/apicount"
	"imp.dev/imp/internal/devserver/imagefile"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/rpc"

	"sigs.k8s.io/controller-runtime/pkg/client"
)

// disks compares what a VM's disks cost for a small and a large cached image.
func (b *bench) disks(ctx context.Context) error {
	sizes := []struct {
		name  string
		bytes int64
	}{{"10 MiB", 10 << 20}, {"1 GiB", 1 << 30}}
	took := make([][]time.Duration, len(sizes))
	references := make([]string, len(sizes))
	for i, size := range sizes {
		references[i] = fmt.Sprintf("%s/bulk:%d", b.server.Registry, size.bytes)
		if err := pushBulk(ctx, references[i], size.bytes); err != nil {
			return fmt.Errorf("pushing a %s image: %w", size.name, err)
		}
	}
	runtime, err := rpc.NewClient(b.server.Places.RuntimeSocket(b.server.NodeNames()[0]))
	if err != nil {
		return err
	}
	defer runtime.Close()
	rounds := 2 * b.rounds // they are short, and so the noisier
	for round := range rounds + 1 {
		for i, size := range sizes {
			vm := b.vm(fmt.Sprintf("disk-%d-%d", i, round), "")
			vm.Spec.Image, vm.Spec.Command = references[i], []string{"/none"} // it starts, and cannot run: its disks are what counts
			if err := b.client.Create(ctx, vm); err != nil {
				return err
			}
			now := &v1alpha1.ImpVM{}
			if err := poll(ctx, func() (bool, error) {
				err := b.client.Get(ctx, client.ObjectKeyFromObject(vm), now)
				return now.Status.Timings != nil && finished(now), err
			}); err != nil {
				return fmt.Errorf("waiting for the disks of a %s image: %w (%+v)", size.name, err, now.Status)
			}
			if round > 0 { // the first pulls and builds
				d, err := diskTime(ctx, runtime, string(vm.UID)) // finer than the object has it
				if err != nil {
					return err
				}
				took[i] = append(took[i], d)
			}
			if err := b.remove(ctx, vm); err != nil {
				return err
			}
		}
	}
	fmt.Fprintf(b.out, "\ndisks of a VM (base of a cached image and private disk), %d rounds in turn\n", rounds)
	for i, size := range sizes {
		fmt.Fprintf(b.out, "  %-7s %s\n", size.name, spread(took[i]))
	}
	fmt.Fprintf(b.out, "  ratio of medians %.2f (aim ≤ 1.2)\n", float64(median(took[1]))/float64(median(took[0])))
	return nil
}

// diskTime is what the runtime says that the VM's disks took.
func diskTime(ctx context.Context, runtime machine.Service, uid string) (time.Duration, error) {
	all, err := runtime.List(ctx)
	if err != nil {
		return 0, err
	}
	for _, status := range all {
		if status.ID == uid {
			return status.Timings.Pull + status.Timings.Disk, nil
		}
	}
	return 0, fmt.Errorf("the runtime does not know VM %s", uid)
}

// pushBulk pushes an image with one file of that many bytes, none of its pages empty.
func pushBulk(ctx context.Context, reference string, size int64) error {
	dir, err := os.MkdirTemp("", "imp-bulk-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := fill(filepath.Join(dir, "bulk"), size); err != nil {
		return err
	}
	image, err := imagefile.Load(dir, imagefile.Config{Cmd: []string{"/none"}})
	if err != nil {
		return err
	}
	_, err = imagefile.Push(ctx, image, reference, nil)
	return err
}

func fill(path string, size int64) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer file.Close()
	block := make([]byte, 1<<20)
	for written := int64(0); written < size; written += int64(len(block)) {
		for i := 0; i < len(block); i += 4096 { // one word a page: no zero pages, quick to compress
			copy(block[i:], strconv.FormatInt(written+int64(i), 10))
		}
		if _, err := file.Write(block); err != nil {
			return err
		}
	}
	return nil
}

// writes counts what the life of one VM costs the API server, by kind.
func (b *bench) writes(ctx context.Context) error {
	before, err := apicount.Writes(ctx, b.server.Config())
	if err != nil {
		return err
	}
	const n = 5
	for i := range n {
		vm, err := b.create(ctx, fmt.Sprintf("writes-%d", i), "sleep 3")
		if err != nil {
			return err
		}
		if _, err := b.await(ctx, vm, finished); err != nil {
			return err
		}
		if err := b.remove(ctx, vm); err != nil {
			return err
		}
	}
	after, err := apicount.Writes(ctx, b.server.Config())
	if err != nil {
		return err
	}
	fmt.Fprintf(b.out, "\nAPI writes per VM (one-shot, image cached, create to gone, the user's own create and delete included), mean of %d\n", n)
	var kinds []string
	for kind := range after {
		kinds = append(kinds, kind)
	}
	slices.Sort(kinds)
	for _, kind := range kinds {
		if d := after[kind] - before[kind]; d > 0 && !strings.Contains(kind, " leases") {
			fmt.Fprintf(b.out, "  %-28s %.1f\n", kind, d/n)
		}
	}
	return nil
}

// memory prints what agent and runtime hold with one VM and with twenty.
func (b *bench) memory(ctx context.Context) error {
	fmt.Fprintf(b.out, "\nresident memory of the daemons of one node, MiB\n")
	node := b.server.NodeNames()[0]
	var vms []*v1alpha1.ImpVM
	for _, n := range []int{1, manyVMs} {
		for len(vms) < n {
			vm, err := b.create(ctx, fmt.Sprintf("memory-%d", len(vms)), "sleep 3600")
			if err != nil {
				return err
			}
			vms = append(vms, vm)
		}
		for _, vm := range vms {
			if _, err := b.await(ctx, vm, started); err != nil {
				return err
			}
		}
		agent, err := resident(b.server.PID(devserver.Agent, node))
		if err != nil {
			return err
		}
		runtime, err := resident(b.server.PID(devserver.Runtime, node))
		if err != nil {
			return err
		}
		fmt.Fprintf(b.out, "  %2d VMs: agent %.0f, runtime %.0f\n", n, agent, runtime)
	}
	for _, vm := range vms {
		if err := b.remove(ctx, vm); err != nil {
			return err
		}
	}
	return nil
}

// resident gives VmRSS of a process in MiB.
func resident(pid int) (float64, error) {
	status, err := os.Open(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	defer status.Close()
	content, err := io.ReadAll(status)
	if err != nil {
		return 0, err
	}
	for l := range strings.Lines(string(content)) {
		var kib float64
		if n, _ := fmt.Sscanf(l, "VmRSS: %f kB", &kib); n == 1 {
			return kib / 1024, nil
		}
	}
	return 0, fmt.Errorf("no VmRSS of process %d", pid)
}
