package guestinit

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
)

// identity is who the workload runs as.
type identity struct {
	uid, gid uint32
	groups   []uint32 // supplementary
	home     string   // from passwd; empty without an entry
}

// passwdEntry is one line of /etc/passwd, groupEntry one of /etc/group.
type passwdEntry struct {
	name, home string
	uid, gid   uint32
}

type groupEntry struct {
	name    string
	gid     uint32
	members []string
}

// lookupUser resolves the user of an OCI config: "", "name", "uid", "name:group", "uid:gid". passwd and group are the image's files, or
// nil where it has none. A number needs no entry; a name does. Without a group, the user's own and supplementary ones apply;
// with one, only that one.
func lookupUser(spec string, passwd, group io.Reader) (identity, error) {
	user, groupName, hasGroup := strings.Cut(spec, ":")
	id := identity{}
	name := ""
	if user == "" {
		user = "0"
	}
	number, isNumber := parseID(user)
	found := false
	for _, e := range readPasswd(passwd) {
		if e.name == user || isNumber && e.uid == number {
			id.uid, id.gid, id.home, name, found = e.uid, e.gid, e.home, e.name, true
			break
		}
	}
	switch {
	case found:
	case isNumber:
		id.uid = number
	default:
		return identity{}, fmt.Errorf("no user %q in the image's /etc/passwd", user)
	}
	groups := readGroup(group)
	if !hasGroup || groupName == "" {
		for _, g := range groups {
			for _, m := range g.members {
				if name != "" && m == name {
					id.groups = append(id.groups, g.gid)
					break
				}
			}
		}
		return id, nil
	}
	number, isNumber = parseID(groupName)
	for _, g := range groups {
		if g.name == groupName || isNumber && g.gid == number {
			id.gid = g.gid
			return id, nil
		}
	}
	if !isNumber {
		return identity{}, fmt.Errorf("no group %q in the image's /etc/group", groupName)
	}
	id.gid = number
	return id, nil
}

// parseID reads a uid or gid. 2^32-1 is (uid_t)-1, which system calls take for "unchanged": not an id.
func parseID(s string) (uint32, bool) {
	n, err := strconv.ParseUint(s, 10, 32)
	return uint32(n), err == nil && n != math.MaxUint32
}

func readPasswd(r io.Reader) (all []passwdEntry) {
	for _, f := range readColons(r, 7) {
		uid, ok1 := parseID(f[2])
		gid, ok2 := parseID(f[3])
		if ok1 && ok2 {
			all = append(all, passwdEntry{name: f[0], uid: uid, gid: gid, home: f[5]})
		}
	}
	return all
}

func readGroup(r io.Reader) (all []groupEntry) {
	for _, f := range readColons(r, 4) {
		if gid, ok := parseID(f[2]); ok {
			all = append(all, groupEntry{name: f[0], gid: gid, members: strings.Split(f[3], ",")})
		}
	}
	return all
}

// readColons gives the lines of a colon-separated file, padded to at least n fields.
func readColons(r io.Reader, n int) (all [][]string) {
	if r == nil {
		return nil
	}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		text := strings.TrimSpace(lines.Text())
		if text == "" || strings.HasPrefix(text, "#") {
			continue
		}
		fields := strings.Split(text, ":")
		for len(fields) < n {
			fields = append(fields, "")
		}
		all = append(all, fields)
	}
	return all
}
