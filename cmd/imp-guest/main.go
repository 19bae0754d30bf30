// Command imp-guest is the first process of a guest. Build it with CGO_ENABLED=0; it is packed into the initramfs.
package main

import (
	"fmt"
	"os"

	"imp.dev/imp/internal/guestinit"
	"imp.dev/imp/internal/version"
)

func main() {
	if os.Getpid() != 1 {
		fmt.Fprintln(os.Stderr, "imp-guest is the init of a microVM and runs only as process 1")
		os.Exit(2)
	}
	guestinit.Run(version.String())
}
