// Package e2e has the tests of the whole: a real API server, the programs as they are built, real images, and either scripted
// machines (processes of the fake driver) or real guests (QEMU). What a user sees is what is asserted.
package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/devserver"
	"imp.dev/imp/internal/devserver/controlplane"
	"imp.dev/imp/internal/devserver/demo"
	"imp.dev/imp/internal/devserver/imagefile"
	vmmfake "imp.dev/imp/internal/vmm/fake"

	"github.com/go-logr/logr"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

const (
	registryUser     = "puller"
	registryPassword = "correct-horse-battery-staple"
	// poll is how often an object is looked at; the promise under test is never shorter than a second.
	poll = 50 * time.Millisecond
	// soon bounds what takes a moment; booting what a real guest takes on a busy machine.
	soon    = 30 * time.Second
	booting = 90 * time.Second
)

// clusters that tests of this binary share, by driver. A start costs seconds; tests keep apart by namespaces.
var clusters = struct {
	sync.Mutex
	byDriver map[string]*cluster
}{byDriver: map[string]*cluster{}}

func TestMain(m *testing.M) {
	log.SetLogger(logr.Discard())
	code := m.Run()
	for driver, c := range clusters.byDriver {
		if err := c.server.Stop(context.Background()); err != nil {
			fmt.Fprintf(os.Stderr, "stopping the %s cluster: %v\n", driver, err)
			code = 1
		}
		if code == 0 {
			_ = os.RemoveAll(c.server.Places.Dir)
		} else {
			fmt.Fprintf(os.Stderr, "logs of the %s cluster: %s\n", driver, c.server.Places.Logs())
		}
	}
	os.Exit(code)
}

// cluster is a development server with the means of a test.
type cluster struct {
	server *devserver.Server
	client client.Client
}

// need skips the test where this machine cannot run it, and fails it instead under IMP_REQUIRE_ALL=1.
func need(t *testing.T) (binDir, cacheDir string) {
	t.Helper()
	if os.Geteuid() != 0 {
		lacking(t, "needs root: nodes make cgroups and run programs as other users")
	}
	cacheDir, err := controlplane.CacheDir()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := controlplane.Find(cacheDir); err != nil {
		lacking(t, "needs a Kubernetes API server: %v", err)
	}
	binDir, err = filepath.Abs("../../bin")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(binDir, "imp-runtime")); err != nil {
		lacking(t, "needs Imp's programs: run make build")
	}
	return binDir, cacheDir
}

// lacking skips the test, or fails it where nothing may be lacking.
func lacking(t *testing.T, format string, args ...any) {
	t.Helper()
	if os.Getenv("IMP_REQUIRE_ALL") == "1" {
		t.Fatalf(format, args...)
	}
	t.Skipf(format, args...)
}

// shared gives the one cluster of this driver, started by the first test that asks.
func shared(t *testing.T, driver string) *cluster {
	t.Helper()
	binDir, cacheDir := need(t)
	clusters.Lock()
	defer clusters.Unlock()
	if c := clusters.byDriver[driver]; c != nil {
		return c
	}
	dir, err := os.MkdirTemp("", "imp-e2e-"+driver+"-")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	nodes := map[string]int{"fake": 2, "qemu": 3}[driver]
	c := up(t, devserver.Options{Dir: dir, Nodes: nodes, VMM: driver, BinDir: binDir, CacheDir: cacheDir})
	clusters.byDriver[driver] = c
	return c
}

// own gives a cluster for one test, which may break it.
func own(t *testing.T, opts devserver.Options) *cluster {
	t.Helper()
	opts.BinDir, opts.CacheDir = need(t)
	dir := t.TempDir()
	for d := dir; d != os.TempDir() && d != "/"; d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	opts.Dir = dir
	c := up(t, opts)
	t.Cleanup(func() {
		if err := c.server.Stop(context.Background()); err != nil {
			t.Errorf("stopping the cluster: %v", err)
		}
	})
	return c
}

func up(t *testing.T, opts devserver.Options) *cluster {
	t.Helper()
	opts.Accel, opts.RegistryPassword = "tcg", registryUser+":"+registryPassword
	opts.RuntimeArgs = append(opts.RuntimeArgs, "--images=oci") // machines may pretend here, images never do
	opts.Progress = func(line string) { t.Log(line) }
	server, err := devserver.Up(t.Context(), opts)
	if err != nil {
		t.Fatalf("starting the cluster: %v", err)
	}
	c := &cluster{server: server}
	if c.client, err = devserver.NewClient(server.Config()); err != nil {
		t.Fatal(err)
	}
	class := &v1alpha1.ImpVMClass{
		ObjectMeta: metav1.ObjectMeta{Name: "small"},
		Spec:       v1alpha1.ImpVMClassSpec{VCPU: 1, MemoryMiB: 192, DiskGiB: 1},
	}
	probed := &v1alpha1.ImpVMClass{
		ObjectMeta: metav1.ObjectMeta{Name: "probed"},
		Spec: v1alpha1.ImpVMClassSpec{VCPU: 1, MemoryMiB: 192, DiskGiB: 1, Probes: &v1alpha1.Probes{
			ReadinessProbe: &v1alpha1.ReadinessProbe{HTTP: v1alpha1.HTTPGet{Path: "/", Port: 8080}, PeriodSeconds: 1},
		}},
	}
	for _, object := range []client.Object{class, probed} {
		if err := c.client.Create(t.Context(), object); err != nil {
			t.Fatal(err)
		}
	}
	c.push(t, c.busybox(t), demo.ImageName)
	return c
}

func (c *cluster) busybox(t *testing.T) v1.Image {
	t.Helper()
	_, cacheDir := need(t)
	image, err := demo.Image(t.Context(), cacheDir)
	if err != nil {
		t.Fatal(err)
	}
	return image
}

func (c *cluster) push(t *testing.T, image v1.Image, name string) {
	t.Helper()
	if _, err := imagefile.Push(t.Context(), image, c.server.Registry+"/"+name, nil); err != nil {
		t.Fatal(err)
	}
}

// namespace makes one for the test and deletes its VMs in the end, so that nothing runs on beside the next test.
func (c *cluster) namespace(t *testing.T) string {
	t.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "e2e-"}}
	if err := c.client.Create(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), soon)
		defer cancel()
		vms := &v1alpha1.ImpVMList{}
		if err := c.client.List(ctx, vms, client.InNamespace(ns.Name)); err != nil {
			t.Error(err)
			return
		}
		if t.Failed() {
			for i := range vms.Items {
				t.Logf("left: %s", describe(&vms.Items[i]))
			}
		}
		for i := range vms.Items {
			vm := &vms.Items[i]
			before := vm.DeepCopy()
			vm.Spec.TerminationGracePeriodSeconds = ptr.To(int64(0))
			_ = c.client.Patch(ctx, vm, client.MergeFrom(before)) // the deletion alone would do, only later
			if err := c.client.Delete(ctx, vm); err != nil && !apierrors.IsNotFound(err) {
				t.Error(err)
			}
		}
	})
	return ns.Name
}

// vm builds an ImpVM of the busybox image and class small.
func (c *cluster) vm(namespace, name string, change ...func(*v1alpha1.ImpVM)) *v1alpha1.ImpVM {
	vm := &v1alpha1.ImpVM{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: v1alpha1.ImpVMSpec{
			ClassRef: &v1alpha1.ClassReference{Name: "small"},
			Image:    c.server.Registry + "/" + demo.ImageName,
			Command:  []string{"/bin/sh", "-c", "exit 0"},
		},
	}
	for _, f := range change {
		f(vm)
	}
	return vm
}

func shell(script string) func(*v1alpha1.ImpVM) {
	return func(vm *v1alpha1.ImpVM) { vm.Spec.Command = []string{"/bin/sh", "-c", script} }
}

func persistent(vm *v1alpha1.ImpVM) { vm.Spec.Lifecycle = v1alpha1.LifecyclePersistent }

func grace(seconds int64) func(*v1alpha1.ImpVM) {
	return func(vm *v1alpha1.ImpVM) { vm.Spec.TerminationGracePeriodSeconds = ptr.To(seconds) }
}

func image(reference string) func(*v1alpha1.ImpVM) {
	return func(vm *v1alpha1.ImpVM) { vm.Spec.Image = reference }
}

func class(name string) func(*v1alpha1.ImpVM) {
	return func(vm *v1alpha1.ImpVM) { vm.Spec.ClassRef = &v1alpha1.ClassReference{Name: name} }
}

func scripted(script vmmfake.Script) func(*v1alpha1.ImpVM) {
	return func(vm *v1alpha1.ImpVM) {
		words, err := json.Marshal(script)
		if err != nil {
			panic(err)
		}
		metav1.SetMetaDataAnnotation(&vm.ObjectMeta, v1alpha1.AnnotationFakeScript, string(words))
	}
}

func (c *cluster) create(t *testing.T, vm *v1alpha1.ImpVM) *v1alpha1.ImpVM {
	t.Helper()
	if err := c.client.Create(t.Context(), vm); err != nil {
		t.Fatalf("creating %s: %v", vm.Name, err)
	}
	return vm
}

// await looks at the VM until it is as the words say, and gives it as it was then.
func (c *cluster) await(t *testing.T, vm *v1alpha1.ImpVM, within time.Duration, words string, is func(*v1alpha1.ImpVM) bool) *v1alpha1.ImpVM {
	t.Helper()
	now := &v1alpha1.ImpVM{}
	if !eventually(t.Context(), within, func() bool {
		if err := c.client.Get(t.Context(), client.ObjectKeyFromObject(vm), now); err != nil {
			t.Fatalf("waiting until %s is %s: %v", vm.Name, words, err)
		}
		return is(now)
	}) {
		t.Fatalf("%s is not %s after %s:\n%s", vm.Name, words, within, describe(now))
	}
	return now
}

func (c *cluster) awaitGone(t *testing.T, vm *v1alpha1.ImpVM, within time.Duration) {
	t.Helper()
	now := &v1alpha1.ImpVM{}
	if !eventually(t.Context(), within, func() bool {
		err := c.client.Get(t.Context(), client.ObjectKeyFromObject(vm), now)
		if err != nil && !apierrors.IsNotFound(err) {
			t.Fatal(err)
		}
		return err != nil || now.UID != vm.UID
	}) {
		t.Fatalf("%s is still there after %s:\n%s", vm.Name, within, describe(now))
	}
}

// eventually tries until ok is true or the time is up.
func eventually(ctx context.Context, within time.Duration, ok func() bool) bool {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	ticker := time.NewTicker(poll)
	defer ticker.Stop()
	for !ok() {
		select {
		case <-ctx.Done():
			return false
		case <-ticker.C:
		}
	}
	return true
}

func condition(vm *v1alpha1.ImpVM, kind string) metav1.Condition {
	if c := meta.FindStatusCondition(vm.Status.Conditions, kind); c != nil {
		return *c
	}
	return metav1.Condition{Type: kind, Status: "absent"}
}

func finished(vm *v1alpha1.ImpVM) bool {
	return condition(vm, v1alpha1.ConditionFinished).Status == metav1.ConditionTrue
}

func ready(vm *v1alpha1.ImpVM) bool {
	return condition(vm, v1alpha1.ConditionReady).Status == metav1.ConditionTrue
}

// reason says whether Ready is false for this reason.
func reason(reason string) func(*v1alpha1.ImpVM) bool {
	return func(vm *v1alpha1.ImpVM) bool {
		c := condition(vm, v1alpha1.ConditionReady)
		return c.Status == metav1.ConditionFalse && c.Reason == reason
	}
}

func describe(vm *v1alpha1.ImpVM) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s/%s on %q phase %s assignment %d incarnation %d\n", vm.Namespace, vm.Name, vm.Status.NodeName,
		vm.Status.Phase, vm.Status.Assignment, vm.Status.Incarnation)
	for _, c := range vm.Status.Conditions {
		fmt.Fprintf(&b, "  %s=%s %s: %s\n", c.Type, c.Status, c.Reason, c.Message)
	}
	if vm.Status.ConsoleTail != "" {
		fmt.Fprintf(&b, "  console: …%s\n", vm.Status.ConsoleTail)
	}
	return b.String()
}

// nothingLeft fails the test for everything that is on the machine of a VM that was deleted.
func (c *cluster) nothingLeft(t *testing.T, vm *v1alpha1.ImpVM) {
	t.Helper()
	var left []string
	if !eventually(t.Context(), 5*time.Second, func() bool {
		left = c.server.Leftovers(string(vm.UID))
		return len(left) == 0
	}) {
		t.Errorf("%s is deleted, but left behind:\n  %s", vm.Name, strings.Join(left, "\n  "))
	}
}

// console of a VM that has a node.
func (c *cluster) console(t *testing.T, vm *v1alpha1.ImpVM) string {
	t.Helper()
	var b strings.Builder
	if err := devserver.CopyConsole(t.Context(), c.server.Places.RuntimeSocket(vm.Status.NodeName), string(vm.UID), false, &b); err != nil {
		t.Fatal(err)
	}
	return b.String()
}
