package devserver

import (
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"imp.dev/imp/internal/devserver/sweep"
)

// Leftovers names what is on this machine of the VM with this id (its UID): VMM processes, cgroups, folders, disks, sockets and mounts. The
// record of a removed VM is none: it is kept for a day to answer late orders.
func (s *Server) Leftovers(id string) []string {
	var left []string
	area := s.area()
	for _, p := range sweep.ProcessesNaming(id) {
		left = append(left, p.String())
	}
	for _, dir := range area.Cgroups() {
		if strings.Contains(dir, id) {
			left = append(left, "cgroup "+dir)
		}
	}
	for _, point := range area.Mounts() {
		if strings.Contains(point, id) {
			left = append(left, "mount "+point)
		}
	}
	for _, root := range area.Dirs {
		_ = filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || !strings.Contains(entry.Name(), id) {
				return nil //nolint:nilerr // what vanishes meanwhile is not left
			}
			if !entry.IsDir() && filepath.Ext(path) == ".json" {
				return nil
			}
			left = append(left, fmt.Sprintf("%s %s", kind(entry), path))
			if entry.IsDir() {
				return fs.SkipDir
			}
			return nil
		})
	}
	return left
}

func kind(entry fs.DirEntry) string {
	switch {
	case entry.IsDir():
		return "folder"
	case entry.Type()&fs.ModeSocket != 0:
		return "socket"
	default:
		return "file"
	}
}
