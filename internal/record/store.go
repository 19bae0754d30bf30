// Package record keeps one versioned JSON file per VM in a state directory that one process holds.
//
// A write is a temporary file, fsync, rename, fsync of the directory: after a crash there is the old record or the new one. A file that
// cannot be read (half written by a broken disk, or of a version this program does not know) is set aside under its VM's
// name with a loud log line and reported as such: it is neither lost nor guessed at, and its VM is not run a second time.
package record

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// TempPrefix is how the name of a file begins that WriteFile has not finished.
const TempPrefix = ".new-"

const (
	suffix   = ".json"
	aside    = ".aside"
	lockName = "lock"
	idName   = "instance"
	folder   = "records"
)

// ErrHeld says that another process holds the state directory.
var ErrHeld = errors.New("it is held by another process")

// Store is the records below one state directory. Methods for different VMs may be called from many goroutines.
type Store[T any] struct {
	dir      string
	version  int
	log      *slog.Logger
	lock     *os.File
	instance string
}

type envelope struct {
	Version int             `json:"version"`
	ID      string          `json:"id"`
	Record  json.RawMessage `json:"record"`
}

// Open takes the state directory for this process, making it (0700) and its instance id where they are missing. version is the
// one that Save writes and Load reads. ErrHeld: somebody else has it.
func Open[T any](stateDir string, version int, log *slog.Logger) (*Store[T], error) {
	dir := filepath.Join(stateDir, folder)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making records directory: %w", err)
	}
	lock, err := os.OpenFile(filepath.Join(stateDir, lockName), os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening lock: %w", err)
	}
	if err := Hold(lock); err != nil {
		_ = lock.Close()
		return nil, fmt.Errorf("locking %s: %w", stateDir, err)
	}
	s := &Store[T]{dir: dir, version: version, log: log, lock: lock}
	if s.instance, err = instanceOf(stateDir); err != nil {
		_ = lock.Close()
		return nil, err
	}
	return s, nil
}

const (
	holdPatience = 2 * time.Second
	holdPace     = 20 * time.Millisecond
)

// Hold takes f, a file or directory, for this process until f is closed. ErrHeld: another process has it. A process that dies while
// it starts a program leaves its locks to the half-made child for an instant; so a little patience is part of asking.
func Hold(f *os.File) error {
	pace := time.NewTicker(holdPace)
	defer pace.Stop()
	for end := time.Now().Add(holdPatience); ; <-pace.C {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return err
		}
		if time.Now().After(end) {
			return ErrHeld
		}
	}
}

// Close lets go of the state directory.
func (s *Store[T]) Close() error { return s.lock.Close() }

// Instance is the id of this state directory: eight hexadecimal digits, made once.
func (s *Store[T]) Instance() string { return s.instance }

// Loaded is what Load found.
type Loaded[T any] struct {
	Records map[string]T
	// Unreadable VMs have a file that was set aside, now or earlier; the value says why.
	Unreadable map[string]string
}

// Load reads every record, removes what interrupted writes left, and sets aside what it cannot read. What was set aside earlier and
// can be read now, by a program that was rolled back and forth, is a record again.
func (s *Store[T]) Load() (Loaded[T], error) {
	out := Loaded[T]{Records: map[string]T{}, Unreadable: map[string]string{}}
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return out, fmt.Errorf("reading records directory: %w", err)
	}
	for _, e := range entries {
		name := e.Name()
		switch {
		case strings.HasPrefix(name, TempPrefix):
			if err := os.Remove(filepath.Join(s.dir, name)); err != nil {
				return out, fmt.Errorf("removing interrupted write: %w", err)
			}
		case strings.HasSuffix(name, aside):
			if err := s.loadAside(strings.TrimSuffix(name, suffix+aside), &out); err != nil {
				return out, err
			}
		case strings.HasSuffix(name, suffix):
			if err := s.load(strings.TrimSuffix(name, suffix), &out); err != nil {
				return out, err
			}
		}
	}
	return out, nil
}

// loadAside takes up a file that was set aside. Beside a record it says nothing: that one came after it, with the VM's removal.
func (s *Store[T]) loadAside(id string, out *Loaded[T]) error {
	from, to := s.path(id)+aside, s.path(id)
	if _, err := os.Lstat(to); err == nil {
		return nil
	}
	v, err := s.read(from, id)
	if err != nil {
		out.Unreadable[id] = "its record was set aside as " + from
		s.log.Error("record of VM is set aside, nothing of it is touched until the VM is removed", "vm", id, "file", from, "error", err)
		return nil
	}
	s.log.Warn("record of VM that was set aside can be read again", "vm", id, "file", from)
	if err := os.Rename(from, to); err != nil {
		return fmt.Errorf("taking up record set aside: %w", err)
	}
	out.Records[id] = v
	return s.sync()
}

func (s *Store[T]) load(id string, out *Loaded[T]) error {
	v, err := s.read(s.path(id), id)
	if err == nil {
		out.Records[id] = v
		return nil
	}
	from, to := s.path(id), s.path(id)+aside
	s.log.Error("record of VM cannot be read and is set aside, nothing of it is touched until the VM is removed", "vm", id, "file", to, "error", err)
	if err := os.Rename(from, to); err != nil {
		return fmt.Errorf("setting record aside: %w", err)
	}
	out.Unreadable[id] = fmt.Sprintf("its record was set aside as %s: %v", to, err)
	return s.sync()
}

func (s *Store[T]) read(path, id string) (T, error) {
	var v T
	data, err := os.ReadFile(path)
	if err != nil {
		return v, fmt.Errorf("reading record: %w", err)
	}
	var e envelope
	if err := json.Unmarshal(data, &e); err != nil {
		return v, fmt.Errorf("decoding record: %w", err)
	}
	if e.Version != s.version {
		return v, fmt.Errorf("record has version %d, this program knows %d", e.Version, s.version)
	}
	if e.ID != id {
		return v, fmt.Errorf("record is of VM %q", e.ID)
	}
	if err := json.Unmarshal(e.Record, &v); err != nil {
		return v, fmt.Errorf("decoding record: %w", err)
	}
	return v, nil
}

// Save writes the record of VM id so that it survives a crash of the host from the moment Save has returned. A file that was
// set aside under this id stays until Forget.
func (s *Store[T]) Save(id string, v T) error {
	body, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encoding record: %w", err)
	}
	data, err := json.Marshal(envelope{Version: s.version, ID: id, Record: body})
	if err != nil {
		return fmt.Errorf("encoding record: %w", err)
	}
	if err := WriteFile(s.dir, id+suffix, data); err != nil {
		return fmt.Errorf("writing record: %w", err)
	}
	return nil
}

// Forget removes all that is kept of VM id; nothing there is success.
func (s *Store[T]) Forget(id string) error {
	for _, path := range []string{s.path(id), s.path(id) + aside} {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("removing record: %w", err)
		}
	}
	return s.sync()
}

// ForgetAside removes the file that was set aside for VM id: its removal was ordered.
func (s *Store[T]) ForgetAside(id string) error {
	if err := os.Remove(s.path(id) + aside); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing record set aside: %w", err)
	}
	return s.sync()
}

func (s *Store[T]) path(id string) string { return filepath.Join(s.dir, id+suffix) }

func (s *Store[T]) sync() error { return SyncDir(s.dir) }

// instanceOf reads the instance id, or makes it.
func instanceOf(stateDir string) (string, error) {
	data, err := os.ReadFile(filepath.Join(stateDir, idName))
	if err == nil {
		id := strings.TrimSpace(string(data))
		if len(id) != 8 || strings.Trim(id, "0123456789abcdef") != "" {
			return "", fmt.Errorf("instance id in %s is damaged: %q", filepath.Join(stateDir, idName), id)
		}
		return id, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("reading instance id: %w", err)
	}
	random := make([]byte, 4)
	if _, err := rand.Read(random); err != nil {
		return "", fmt.Errorf("making instance id: %w", err)
	}
	id := hex.EncodeToString(random)
	if err := WriteFile(stateDir, idName, slices.Concat([]byte(id), []byte("\n"))); err != nil {
		return "", fmt.Errorf("writing instance id: %w", err)
	}
	return id, nil
}

// WriteFile replaces dir/name as a whole, durably: after a crash there is the old file or the new one, and perhaps a file whose name
// begins with TempPrefix.
func WriteFile(dir, name string, data []byte) (err error) {
	f, err := os.CreateTemp(dir, TempPrefix+"*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return err
	}
	if err := os.Rename(f.Name(), filepath.Join(dir, name)); err != nil {
		return err
	}
	return SyncDir(dir)
}

// SyncDir makes what was made, renamed and removed in dir survive a crash of the host.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("opening directory: %w", err)
	}
	defer d.Close()
	if err := d.Sync(); err != nil {
		return fmt.Errorf("syncing directory: %w", err)
	}
	return nil
}
