package operator

import (
	"fmt"

	utilversion "k8s.io/apimachinery/pkg/util/version"
	"k8s.io/client-go/discovery"
)

// oldest Kubernetes that Imp works with: selectable fields of custom resources, node claims in tokens, and the CEL functions
// of the CRDs and policies are all there from then on.
const oldest = "1.33.0"

// checkVersion refuses an API server that is too old, before anything is done half.
func checkVersion(server discovery.ServerVersionInterface) error {
	info, err := server.ServerVersion()
	if err != nil {
		return fmt.Errorf("asking the API server for its version: %w", err)
	}
	return checkGitVersion(info.GitVersion)
}

func checkGitVersion(got string) error {
	version, err := utilversion.ParseGeneric(got)
	if err != nil {
		return fmt.Errorf("reading the API server's version: %w", err)
	}
	if version.LessThan(utilversion.MustParseGeneric(oldest)) {
		return fmt.Errorf("the API server is Kubernetes %s; Imp needs %s or newer", got, oldest)
	}
	return nil
}
