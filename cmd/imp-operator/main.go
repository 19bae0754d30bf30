// Command imp-operator places microVMs on nodes and speaks for nodes that are silent.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"imp.dev/imp/internal/operator"
)

func main() { os.Exit(run()) }

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if operator.Command(os.Stderr).ExecuteContext(ctx) != nil {
		return 1 // cobra has said why
	}
	return 0
}
