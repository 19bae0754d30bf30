package linux

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"imp.dev/imp/internal/network"
)

// networkRecord is what is kept of a network: what was ordered and what was chosen for it here.
type networkRecord struct {
	Spec network.Spec `json:"spec"`
	// Namespace is the name of its network namespace.
	Namespace string `json:"namespace"`
	// Transit is the number of the /31 that leads to the host, -1 while none is chosen.
	Transit int `json:"transit"`
}

// vmRecord is what is kept of a VM: every interface that has, may have or had something in the kernel.
type vmRecord struct {
	Interfaces []network.Interface `json:"interfaces"`
}

const (
	stateVersion = 1
	networksDir  = "networks"
	vmsDir       = "vms"
	talliesFile  = "counters.json"
	suffix       = ".json"
	aside        = ".aside"
	tempPrefix   = ".new-"
)

// store is the state on disk: one file a network, one a VM, and one of counters, which may be some seconds old.
type store struct {
	dir string
	log *slog.Logger
}

type envelope struct {
	Version int             `json:"version"`
	ID      string          `json:"id"`
	Record  json.RawMessage `json:"record"`
}

func openStore(dir string, log *slog.Logger) (*store, error) {
	for _, folder := range []string{networksDir, vmsDir} {
		if err := os.MkdirAll(filepath.Join(dir, folder), 0o700); err != nil {
			return nil, fmt.Errorf("making state directory: %w", err)
		}
	}
	return &store{dir: dir, log: log}, nil
}

// load reads everything. What cannot be read is set aside and told; a VM of which that is true is still one that has something here.
func (s *store) load() (map[string]networkRecord, map[string]vmRecord, error) {
	networks, _, err := loadFolder[networkRecord](s, networksDir)
	if err != nil {
		return nil, nil, err
	}
	vms, damaged, err := loadFolder[vmRecord](s, vmsDir)
	if err != nil {
		return nil, nil, err
	}
	for _, id := range damaged {
		if _, again := vms[id]; !again {
			vms[id] = vmRecord{}
		}
	}
	return networks, vms, nil
}

func loadFolder[T any](s *store, folder string) (map[string]T, []string, error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, folder))
	if err != nil {
		return nil, nil, fmt.Errorf("reading state directory: %w", err)
	}
	records, damaged := map[string]T{}, []string(nil)
	for _, e := range entries {
		path := filepath.Join(s.dir, folder, e.Name())
		id, isRecord := strings.CutSuffix(e.Name(), suffix)
		switch {
		case strings.HasPrefix(e.Name(), tempPrefix):
			os.Remove(path) // what an interrupted write left
		case strings.HasSuffix(e.Name(), suffix+aside):
			damaged = append(damaged, strings.TrimSuffix(e.Name(), suffix+aside))
		case isRecord:
			var record T
			if err := readRecord(path, id, &record); err != nil {
				s.log.Error("record of a network's state cannot be read and is set aside", "folder", folder, "id", id, "file", path+aside, "error", err)
				if err := os.Rename(path, path+aside); err != nil {
					return nil, nil, fmt.Errorf("setting record aside: %w", err)
				}
				damaged = append(damaged, id)
				continue
			}
			records[id] = record
		}
	}
	return records, damaged, nil
}

func readRecord(path, id string, into any) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	e := envelope{}
	if err := json.Unmarshal(data, &e); err != nil {
		return err
	}
	if e.Version != stateVersion || e.ID != id {
		return fmt.Errorf("it is of version %d and of %q, not of version %d and of %q", e.Version, e.ID, stateVersion, id)
	}
	return json.Unmarshal(e.Record, into)
}

// save writes a record so that it survives a crash of the host from the moment save has returned.
func (s *store) save(folder, id string, record any) error {
	if !fileName(id) {
		return fmt.Errorf("writing state: %q is not an ID", id)
	}
	body, err := json.Marshal(record)
	if err != nil {
		return fmt.Errorf("writing state: %w", err)
	}
	data, err := json.Marshal(envelope{Version: stateVersion, ID: id, Record: body})
	if err != nil {
		return fmt.Errorf("writing state: %w", err)
	}
	dir := filepath.Join(s.dir, folder)
	if err := writeFile(dir, id+suffix, data, true); err != nil {
		return fmt.Errorf("writing state: %w", err)
	}
	return nil
}

// remove deletes a record, and what was set aside of it; none is success.
func (s *store) remove(folder, id string) error {
	dir := filepath.Join(s.dir, folder)
	for _, name := range []string{id + suffix, id + suffix + aside} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("removing state: %w", err)
		}
	}
	return syncDir(dir)
}

// saveTallies writes counters; the loss of a write costs some seconds of counting and is not worth a flush of the disk.
func (s *store) saveTallies(t map[string]map[string]tally) error {
	data, err := json.Marshal(t)
	if err != nil {
		return fmt.Errorf("writing counters: %w", err)
	}
	if err := writeFile(s.dir, talliesFile, data, false); err != nil {
		return fmt.Errorf("writing counters: %w", err)
	}
	return nil
}

func (s *store) loadTallies() map[string]map[string]tally {
	t := map[string]map[string]tally{}
	data, err := os.ReadFile(filepath.Join(s.dir, talliesFile))
	if err == nil {
		err = json.Unmarshal(data, &t)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.log.Warn("counters of guests begin anew", "error", err)
		return map[string]map[string]tally{}
	}
	return t
}

func writeFile(dir, name string, data []byte, durable bool) error {
	f, err := os.CreateTemp(dir, tempPrefix)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil && durable {
		err = f.Sync()
	}
	if closing := f.Close(); err == nil {
		err = closing
	}
	if err == nil {
		err = os.Rename(f.Name(), filepath.Join(dir, name))
	}
	if err != nil {
		os.Remove(f.Name())
		return err
	}
	if durable {
		return syncDir(dir)
	}
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
