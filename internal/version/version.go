// Package version tells which build of Imp is running.
package version

import (
	"fmt"
	"runtime"
	"runtime/debug"
)

// String is the module's version as the go command stamped it: a tag, or a pseudo-version that ends in the commit, with
// "+dirty" for a changed tree. "devel" when the build carries none (tests, builds outside a repository).
func String() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" || info.Main.Version == "(devel)" {
		return "devel"
	}
	return info.Main.Version
}

// Long is one line for --version: version, Go release and platform.
func Long() string {
	return fmt.Sprintf("%s (%s, %s/%s)", String(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
