package devserver

import (
	"context"
	"fmt"
	"io"
	"time"

	"imp.dev/imp/internal/machine/rpc"
)

const (
	consoleChunk = 64 << 10
	followEvery  = 200 * time.Millisecond
)

// CopyConsole copies the serial console of the VM with this id (its UID) from its node's runtime to out, from the beginning. With follow
// it goes on as the console grows, until ctx ends, which is no error then.
func CopyConsole(ctx context.Context, socket, id string, follow bool, out io.Writer) error {
	runtime, err := rpc.NewClient(socket)
	if err != nil {
		return fmt.Errorf("reaching the runtime at %s: %w", socket, err)
	}
	defer func() { _ = runtime.Close() }()
	ticker := time.NewTicker(followEvery)
	defer ticker.Stop()
	for offset := int64(0); ; {
		chunk, err := runtime.Console(ctx, id, offset, consoleChunk)
		if err != nil {
			if follow && ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("reading the console: %w", err)
		}
		if chunk.Offset > offset {
			fmt.Fprintf(out, "\n[%d bytes are not kept]\n", chunk.Offset-offset)
		}
		if _, err := out.Write(chunk.Data); err != nil {
			return err
		}
		offset = chunk.Offset + int64(len(chunk.Data))
		if len(chunk.Data) > 0 {
			continue
		}
		if !follow {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}
