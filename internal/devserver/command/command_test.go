package command

import (
	"strings"
	"testing"

	"imp.dev/imp/internal/devserver"
	"imp.dev/imp/internal/devserver/controlplane"
)

// The README calls kubectl and imp-dev by name after these two lines.
func TestTheTwoExportLinesMakeTheReadmesCommandsFindable(t *testing.T) {
	var out strings.Builder
	howTo(&out, &devserver.Server{
		Places: devserver.Places{Dir: "/here/.dev"}, ControlPlane: &controlplane.ControlPlane{Kubectl: "/cache/kube/kubectl"},
	}, "/here/bin")
	for _, want := range []string{"export KUBECONFIG=/here/.dev/kubeconfig\n", "export PATH=/here/bin:/cache/kube:$PATH\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in\n%s", want, out.String())
		}
	}
}

func TestAConsoleIsLookedForWhereTheKubeconfigLies(t *testing.T) {
	for kubeconfig, want := range map[string]string{
		"/tmp/x/kubeconfig":   "/tmp/x",
		"":                    DefaultDir,
		"/root/.kube/config":  DefaultDir,
		"relative/kubeconfig": DefaultDir,
	} {
		if got := serverDir(kubeconfig); got != want {
			t.Errorf("KUBECONFIG=%q: %s, want %s", kubeconfig, got, want)
		}
	}
}

func TestAPushWithoutARegistryIsRefusedBeforeItGoesToAStranger(t *testing.T) {
	for _, name := range []string{"mine:1", "team/mine:1"} {
		cmd := New()
		cmd.SetArgs([]string{"image", "push", t.TempDir(), name})
		if err := cmd.Execute(); err == nil || !strings.Contains(err.Error(), "names no registry") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
