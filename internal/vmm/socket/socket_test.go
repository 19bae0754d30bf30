package socket

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestSocketsWorkInDirectoriesDeeperThanAnAddressHolds(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("deep/", 60))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time over the first one's leftover
		f, err := Listen(dir, "guest.sock")
		if err != nil {
			t.Fatal(err)
		}
		l, err := net.FileListener(f)
		if err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
		conn, err := Dial(t.Context(), dir, "guest.sock")
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.Close()
		l.(*net.UnixListener).SetUnlinkOnClose(false)
		_ = l.Close()
	}
	if _, err := Dial(t.Context(), dir, "guest.sock"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a leftover: %v", err)
	}
	if _, err := Dial(t.Context(), dir, "none.sock"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no socket: %v", err)
	}
	if _, err := Listen(filepath.Join(dir, "none"), "x"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no directory: %v", err)
	}
}
