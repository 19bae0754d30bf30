// Command print prints the version it was linked with.
package main

import (
	"fmt"

	"imp.dev/imp/internal/version"
)

func main() { fmt.Println(version.String()) }
