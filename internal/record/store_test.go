package record

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

type vm struct {
	Name string `json:"name"`
}

func open(t *testing.T, dir string, version int, log *bytes.Buffer) *Store[vm] {
	t.Helper()
	s, err := Open[vm](dir, version, slog.New(slog.NewTextHandler(log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func TestARecordIsFoundAgainByTheNextProcess(t *testing.T) {
	dir, log := t.TempDir(), &bytes.Buffer{}
	first := open(t, dir, 1, log)
	for _, name := range []string{"one", "two"} {
		if err := first.Save("vm-1", vm{name}); err != nil {
			t.Fatal(err)
		}
	}
	instance := first.Instance()
	_ = first.Close()
	second := open(t, dir, 1, log)
	got, err := second.Load()
	if err != nil {
		t.Fatal(err)
	}
	if got.Records["vm-1"].Name != "two" || len(got.Records) != 1 || len(got.Unreadable) != 0 {
		t.Fatalf("got %+v", got)
	}
	if second.Instance() != instance {
		t.Fatalf("instance changed from %s to %s", instance, second.Instance())
	}
	if err := second.Forget("vm-1"); err != nil {
		t.Fatal(err)
	}
	if got, _ := second.Load(); len(got.Records) != 0 {
		t.Fatalf("a forgotten record is still there: %+v", got)
	}
}

func TestTheStateDirectoryHasOneHolder(t *testing.T) {
	dir, log := t.TempDir(), &bytes.Buffer{}
	open(t, dir, 1, log)
	if _, err := Open[vm](dir, 1, slog.Default()); !errors.Is(err, ErrHeld) {
		t.Fatalf("a second holder got %v, want ErrHeld", err)
	}
}

func TestWhatCannotBeReadIsSetAsideLoudlyAndKept(t *testing.T) {
	for name, content := range map[string]string{
		"a half-written file":                 `{"version":1,"id":"vm-1","rec`,
		"an empty file":                       ``,
		"a version of a newer program":        `{"version":2,"id":"vm-1","record":{"name":"x"}}`,
		"a record that belongs to another VM": `{"version":1,"id":"vm-2","record":{"name":"x"}}`,
		"a record of another shape":           `{"version":1,"id":"vm-1","record":[]}`,
	} {
		t.Run(name, func(t *testing.T) {
			dir, log := t.TempDir(), &bytes.Buffer{}
			s := open(t, dir, 1, log)
			if err := os.WriteFile(filepath.Join(dir, "records", "vm-1.json"), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			for _, when := range []string{"first", "second"} {
				log.Reset()
				got, err := s.Load()
				if err != nil {
					t.Fatal(err)
				}
				if got.Unreadable["vm-1"] == "" || len(got.Records) != 0 {
					t.Fatalf("%s load: got %+v", when, got)
				}
				if !strings.Contains(log.String(), "level=ERROR") || !strings.Contains(log.String(), "vm-1") {
					t.Fatalf("%s load: log does not name the VM loudly: %s", when, log)
				}
			}
			kept, err := os.ReadFile(filepath.Join(dir, "records", "vm-1.json.aside"))
			if err != nil || string(kept) != content {
				t.Fatalf("content was not kept: %q %v", kept, err)
			}
			if err := s.ForgetAside("vm-1"); err != nil {
				t.Fatal(err)
			}
			if got, _ := s.Load(); len(got.Unreadable) != 0 {
				t.Fatalf("still unreadable after removal: %+v", got)
			}
		})
	}
}

func TestAnInterruptedWriteLeavesTheOldRecordAndNoLitter(t *testing.T) {
	dir, log := t.TempDir(), &bytes.Buffer{}
	s := open(t, dir, 1, log)
	if err := s.Save("vm-1", vm{"old"}); err != nil {
		t.Fatal(err)
	}
	litter := filepath.Join(dir, "records", TempPrefix+"123")
	if err := os.WriteFile(litter, []byte(`{"version":1,"id":"vm-1","rec`), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := s.Load()
	if err != nil || got.Records["vm-1"].Name != "old" {
		t.Fatalf("got %+v, %v", got, err)
	}
	if _, err := os.Stat(litter); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("interrupted write is still there: %v", err)
	}
}

func TestARecordOfANewerProgramIsTakenUpAgainAfterTheRollback(t *testing.T) {
	dir, log := t.TempDir(), &bytes.Buffer{}
	newer := open(t, dir, 2, log)
	if err := newer.Save("vm-1", vm{"new"}); err != nil {
		t.Fatal(err)
	}
	_ = newer.Close()
	older := open(t, dir, 1, log)
	if got, err := older.Load(); err != nil || got.Unreadable["vm-1"] == "" || len(got.Records) != 0 {
		t.Fatalf("the older program got %+v, %v", got, err)
	}
	_ = older.Close()
	again := open(t, dir, 2, log)
	for _, when := range []string{"first", "second"} {
		if got, err := again.Load(); err != nil || got.Records["vm-1"].Name != "new" || len(got.Unreadable) != 0 {
			t.Fatalf("%s load of the newer program: %+v, %v", when, got, err)
		}
	}
}

func TestAFileSetAsideDoesNotCountBesideARecordThatCameAfterIt(t *testing.T) {
	dir, log := t.TempDir(), &bytes.Buffer{}
	s := open(t, dir, 1, log)
	if err := os.WriteFile(filepath.Join(dir, "records", "vm-1.json.aside"), []byte("damaged"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.Save("vm-1", vm{"to be removed"}); err != nil {
		t.Fatal(err)
	}
	if got, err := s.Load(); err != nil || got.Records["vm-1"].Name != "to be removed" || len(got.Unreadable) != 0 {
		t.Fatalf("got %+v, %v", got, err)
	}
	if err := s.Forget("vm-1"); err != nil {
		t.Fatal(err)
	}
	if got, err := s.Load(); err != nil || len(got.Records)+len(got.Unreadable) != 0 {
		t.Fatalf("after it was forgotten: %+v, %v", got, err)
	}
}
