package engine

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"
)

func trashed(t *testing.T, e *Engine) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(e.paths.trash)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, entry := range entries {
		content, err := os.ReadFile(filepath.Join(e.paths.trash, entry.Name()))
		if err != nil {
			t.Fatal(err)
		}
		out[entry.Name()] = string(content)
	}
	return out
}

func trashEngine(t *testing.T) *Engine {
	t.Helper()
	root := t.TempDir()
	e := &Engine{
		paths: paths{state: filepath.Join(root, "vm"), run: filepath.Join(root, "run"), trash: filepath.Join(root, "trash")},
		clock: clocktesting.NewFakeClock(time.Now()), log: slog.New(slog.DiscardHandler), workers: map[string]*worker{},
	}
	for _, dir := range []string{e.paths.dir("a"), e.paths.trash} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return e
}

func writeDisk(t *testing.T, e *Engine, content string) {
	t.Helper()
	if err := os.WriteFile(e.paths.private("a"), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestADiskInTheTrashIsNotReplacedByALaterOneOfItsName(t *testing.T) {
	e := trashEngine(t)
	for _, content := range []string{"first", "second", "third"} {
		writeDisk(t, e, content)
		if err := e.discard(e.paths.private("a"), "a", "1"); err != nil {
			t.Fatal(err)
		}
	}
	if got := trashed(t, e); len(got) != 3 || got["a.1.ext4"] != "first" || got["a.1.2.ext4"] != "second" || got["a.1.3.ext4"] != "third" {
		t.Errorf("the trash holds %v", got)
	}
	if err := e.discard(e.paths.private("a"), "a", "1"); err != nil {
		t.Errorf("discarding a disk that is not there: %v", err)
	}
}

func TestTheDiskOfAVMWithoutARecordIsKeptInTheTrash(t *testing.T) {
	e := trashEngine(t)
	writeDisk(t, e, "what a user wrote")
	if err := e.clear("a", e.paths.dir("a")); err != nil {
		t.Fatal(err)
	}
	if got := trashed(t, e); len(got) != 1 || got["a.orphan.ext4"] != "what a user wrote" {
		t.Errorf("the trash holds %v", got)
	}
	if _, err := os.Stat(e.paths.dir("a")); !os.IsNotExist(err) {
		t.Errorf("the directory is still there: %v", err)
	}
	if err := e.clear("b", e.paths.volatile("b")); err != nil {
		t.Errorf("clearing a directory without a disk: %v", err)
	}
}
