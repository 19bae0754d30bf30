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
	for _, want := range []string{"export KUBECONFIG=/here/.dev/kubeconfig\n", "export PATH=$PATH:/cache/kube:/here/bin\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in\n%s", want, out.String())
		}
	}
}
