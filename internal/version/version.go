// Package version tells which build of Imp is running.
package version

import (
	"fmt"
	"runtime"
	"runtime/debug"
)

// version as the Makefile has the linker set it: `git describe`, which works as well where the go command stamps nothing.
var version string //nolint:gochecknoglobals // the linker's -X sets a variable and nothing else

// String is what the Makefile had the linker set; without it the module's version as the go command stamped it: a tag, or a
// pseudo-version that ends in the commit, with "+dirty" for a changed tree. "devel" when the build carries none.
func String() string {
	if version != "" {
		return version
	}
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
