package devserver

import (
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"imp.dev/imp/internal/devserver/fabric"
	"imp.dev/imp/internal/devserver/sweep"

	"github.com/vishvananda/netlink"
)

// Leftovers names what is on this machine of the VM with this id (its UID): VMM processes, cgroups, links, folders, disks, sockets and
// mounts. The record of a removed VM is none: it is kept for a day to answer late orders.
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
			if !entry.IsDir() && filepath.Ext(path) == ".json" && filepath.Base(filepath.Dir(path)) == "records" {
				return nil
			}
			left = append(left, fmt.Sprintf("%s %s", kind(entry), path))
			if entry.IsDir() {
				return fs.SkipDir
			}
			return nil
		})
	}
	return append(left, s.links(id)...)
}

// links are those of the networks' namespaces that say that they are of the VM.
func (s *Server) links(id string) (found []string) {
	for _, prefix := range s.Places.networks() {
		namespaces, err := fabric.Namespaces(prefix)
		if err != nil {
			return []string{err.Error()}
		}
		for _, n := range namespaces {
			_ = n.Do(func() error { // what vanishes meanwhile is not left
				links, err := netlink.LinkList()
				for _, link := range links {
					if strings.Contains(link.Attrs().Alias, id) {
						found = append(found, fmt.Sprintf("link %s in network namespace %s", link.Attrs().Name, n.Name))
					}
				}
				return err
			})
		}
	}
	return found
}

// Networks are the network namespaces of the guests' networks that are on the nodes: none while there is no guest.
func (s *Server) Networks() (names []string, err error) {
	for _, prefix := range s.Places.networks() {
		found, err := fabric.Namespaces(prefix)
		if err != nil {
			return nil, err
		}
		for _, n := range found {
			names = append(names, n.Name)
		}
	}
	return names, nil
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
