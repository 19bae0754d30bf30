package version_test

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The linker is silent about a variable that does not exist: every program would call itself "devel".
func TestTheMakefilesLinkerFlagReachesTheVersion(t *testing.T) {
	program := filepath.Join(t.TempDir(), "print")
	build := exec.Command("go", "build", "-ldflags", "-X imp.dev/imp/internal/version.version=v1.2.3-test", "-o", program, "./testdata/print")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	out, err := exec.Command(program).Output()
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.TrimSpace(string(out)); got != "v1.2.3-test" {
		t.Errorf("the program says that it is %q", got)
	}
}
