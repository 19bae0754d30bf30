// Command imp-runtime looks after the microVMs of one node.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"imp.dev/imp/internal/runtimed"
)

func main() {
	if child := runtimed.Child(os.Args); child != nil {
		os.Exit(child())
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := runtimed.NewCommand().ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "imp-runtime:", err)
		os.Exit(runtimed.ExitCode(err))
	}
}
