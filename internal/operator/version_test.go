package operator

import (
	"strings"
	"testing"
)

func TestAnAPIServerThatIsTooOldIsRefused(t *testing.T) {
	for version, ok := range map[string]bool{
		"v1.32.9": false, "v1.33.0": true, "v1.33.4-gke.100": true, "v1.37.2+k3s1": true, "v2.0.0": true, "nonsense": false,
	} {
		err := checkGitVersion(version)
		if (err == nil) != ok {
			t.Errorf("%s: %v", version, err)
		}
		if err != nil && version != "nonsense" && !strings.Contains(err.Error(), "needs 1.33.0 or newer") {
			t.Errorf("%s: %v", version, err)
		}
	}
}
