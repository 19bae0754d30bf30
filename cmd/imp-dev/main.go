// Command imp-dev runs all of Imp on one machine, for development, tests and trying it out.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"imp.dev/imp/internal/devserver/command"
)

func main() {
	// Nobody reads this channel, which makes a write to nobody an error like others: Ctrl-C on "imp-dev up | tee log" ends tee first,
	// and imp-dev must live to remove its VMs. It is no order to end: a socket whose peer is gone raises the signal as well.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends at once; the next start cleans up
	err := command.New().ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "imp-dev:", err)
		os.Exit(1)
	}
}
