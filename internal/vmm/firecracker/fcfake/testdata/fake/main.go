// The program behind the fakes.
package main

import "imp.dev/imp/internal/vmm/firecracker/fcfake"

func main() { fcfake.Main() }
