package demo

import (
	"bytes"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/examples"
	"imp.dev/imp/internal/devserver/controlplane"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

func TestTheAPIServerAcceptsEveryExample(t *testing.T) {
	cp := controlplane.ForTest(t)
	c, err := cp.Client()
	if err != nil {
		t.Fatal(err)
	}
	names, err := fs.Glob(examples.Files, "*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	vms := map[string]bool{}
	for _, name := range names {
		content, err := fs.ReadFile(examples.Files, name)
		if err != nil {
			t.Fatal(err)
		}
		objects, err := controlplane.ParseManifests(content)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := controlplane.Apply(t.Context(), c, objects); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for _, object := range objects {
			if object.GetKind() != "ImpVM" {
				continue
			}
			vms[object.GetName()] = true
			if !strings.Contains(string(content), "image: "+examples.Registry+"/"+ImageName) {
				t.Errorf("%s does not use the demo's image, %s/%s", name, examples.Registry, ImageName)
			}
		}
	}
	for _, want := range expectations() {
		if !vms[want.name] {
			t.Errorf("something is expected of %s, which no example makes", want.name)
		}
		delete(vms, want.name)
	}
	if len(vms) > 0 {
		t.Errorf("nothing is expected of %v", vms)
	}
}

func vm(name string, phase v1alpha1.Phase, code *int32, conditions ...string) v1alpha1.ImpVM {
	out := v1alpha1.ImpVM{ObjectMeta: metav1.ObjectMeta{Name: name}}
	out.Status.Phase, out.Status.ExitCode = phase, code
	for _, kind := range conditions {
		out.Status.Conditions = append(out.Status.Conditions, metav1.Condition{Type: kind, Status: metav1.ConditionTrue})
	}
	return out
}

func TestAllReached(t *testing.T) {
	hello := vm("hello", v1alpha1.PhaseSucceeded, ptr.To(int32(0)), v1alpha1.ConditionFinished)
	exit3 := vm("exit-3", v1alpha1.PhaseFailed, ptr.To(int32(3)), v1alpha1.ConditionFinished)
	web := vm("web", v1alpha1.PhaseRunning, nil, v1alpha1.ConditionReady)
	for _, c := range []struct {
		name    string
		vms     []v1alpha1.ImpVM
		reached bool
		wrong   string
	}{
		{"all as they should be is the end", []v1alpha1.ImpVM{hello, exit3, web}, true, ""},
		{"no VM at all is waited for", nil, false, ""},
		{"a server that is not ready yet is waited for", []v1alpha1.ImpVM{hello, exit3, vm("web", v1alpha1.PhaseRunning, nil)}, false, ""},
		{"another exit code is wrong", []v1alpha1.ImpVM{hello, vm("exit-3", v1alpha1.PhaseFailed, ptr.To(int32(1)), v1alpha1.ConditionFinished), web}, false, "exit-3 ended as"},
		{"an end without an exit code is wrong", []v1alpha1.ImpVM{hello, vm("exit-3", v1alpha1.PhaseFailed, nil, v1alpha1.ConditionFinished), web}, false, "exit-3 ended as"},
		{"a server that ended is wrong", []v1alpha1.ImpVM{hello, exit3, vm("web", v1alpha1.PhaseFailed, nil, v1alpha1.ConditionFinished)}, false, "web ended as"},
	} {
		t.Run(c.name, func(t *testing.T) {
			reached, err := allReached(c.vms)
			if reached != c.reached {
				t.Errorf("reached is %v, want %v", reached, c.reached)
			}
			if (err == nil) != (c.wrong == "") || err != nil && !strings.Contains(err.Error(), c.wrong) {
				t.Errorf("the error is %v, want %q", err, c.wrong)
			}
		})
	}
}

func TestElsewhereThanOnATerminalOnlyChangesArePrinted(t *testing.T) {
	var out bytes.Buffer
	b := newBoard(&out, time.Now())
	starting := vm("web", v1alpha1.PhaseStarting, nil)
	running := vm("web", v1alpha1.PhaseRunning, nil, v1alpha1.ConditionReady)
	for _, now := range []v1alpha1.ImpVM{starting, starting, running, running} {
		b.show([]v1alpha1.ImpVM{now})
	}
	b.show(nil)
	b.show(nil)
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 3 || !strings.HasSuffix(lines[2], "web is gone") {
		t.Errorf("two states and an end gave %d lines:\n%s", len(lines), out.String())
	}
	if strings.Contains(out.String(), "\x1b") {
		t.Error("a terminal's control characters are in it")
	}
}

func TestTheDemosImageHasAShellAndAWebServer(t *testing.T) {
	if _, err := exec.LookPath("apt-get"); err != nil {
		if os.Getenv("IMP_REQUIRE_ALL") != "" {
			t.Fatal("needs apt-get")
		}
		t.Skip("needs Debian's apt-get to fetch busybox")
	}
	cache, err := controlplane.CacheDir()
	if err != nil {
		t.Fatal(err)
	}
	img, err := Image(t.Context(), cache)
	if err != nil {
		t.Fatal(err)
	}
	layers, err := img.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("the image has layers %v (%v), want one", layers, err)
	}
	for _, applet := range []string{"sh", "httpd", "uname", "env", "sort", "sed", "free"} {
		if _, err := os.Lstat(cache + "/demo-image/bin/" + applet); err != nil {
			t.Errorf("the examples use %s: %v", applet, err)
		}
	}
}
