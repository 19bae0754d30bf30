package guestinit

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"
	"syscall"

	guestv1 "imp.dev/imp/api/guest/v1"
)

// defaultPath is PATH where the image sets none, as OCI runtimes have it.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Exit codes of a workload that never ran, as shells and OCI runtimes have them.
const (
	codeCannotExecute = 126
	codeNotFound      = 127
	codeSignal        = 128 // plus the signal's number
)

// validateStart refuses what execve cannot take, before the Start is accepted.
func validateStart(s *guestv1.Start) error {
	switch {
	case s.ID == "":
		return errors.New("start request has no id")
	case len(s.Argv) == 0 || len(s.Argv[0]) == 0:
		return errors.New("workload has no command")
	case s.WorkingDir != "" && !path.IsAbs(s.WorkingDir):
		return fmt.Errorf("working directory %q is not absolute", s.WorkingDir)
	case strings.ContainsRune(s.WorkingDir, 0):
		return errors.New("working directory has a NUL byte in it")
	}
	for _, list := range [][][]byte{s.Argv, s.Env} {
		for _, b := range list {
			if bytes.IndexByte(b, 0) >= 0 {
				return fmt.Errorf("NUL byte in %q", b)
			}
		}
	}
	if _, err := parseSignal(s.StopSignal); err != nil {
		return err
	}
	return nil
}

// environment gives the workload's environment: env, with PATH and HOME added where missing. Bytes stay as they are.
func environment(env [][]byte, home string) []string {
	all := make([]string, 0, len(env)+2)
	hasPath, hasHome := false, false
	for _, e := range env {
		all = append(all, string(e))
		hasPath = hasPath || bytes.HasPrefix(e, []byte("PATH="))
		hasHome = hasHome || bytes.HasPrefix(e, []byte("HOME="))
	}
	if !hasPath {
		all = append(all, "PATH="+defaultPath)
	}
	if !hasHome {
		if home == "" {
			home = "/"
		}
		all = append(all, "HOME="+home)
	}
	return all
}

// valueOf gives the value of a variable; of its last occurrence, as OCI runtimes do.
func valueOf(env []string, name string) string {
	value := ""
	for _, e := range env {
		if v, ok := strings.CutPrefix(e, name+"="); ok {
			value = v
		}
	}
	return value
}

// executable says whether the file at p can be executed by the workload's user: nil, fs.ErrNotExist, or why not.
type executable func(p string) error

// lookCommand finds what to execute for argv0. A name with a slash is taken from the working directory; another is looked up in PATH.
// The error says what was not found or not executable; code is the workload's exit code then.
func lookCommand(argv0, pathValue, workingDir string, check executable) (found string, code int, err error) {
	if strings.Contains(argv0, "/") {
		p := argv0
		if !path.IsAbs(p) {
			p = path.Join("/", workingDir, p)
		}
		switch err := check(p); {
		case err == nil:
			return p, 0, nil
		case absent(err):
			return "", codeNotFound, fmt.Errorf("%s: no such file in the image", argv0)
		default:
			return "", codeCannotExecute, fmt.Errorf("%s: %w", argv0, err)
		}
	}
	var refused error
	for _, dir := range strings.Split(pathValue, ":") {
		if !path.IsAbs(dir) {
			dir = path.Join("/", workingDir, dir)
		}
		p := path.Join(dir, argv0)
		switch err := check(p); {
		case err == nil:
			return p, 0, nil
		case !absent(err) && refused == nil:
			refused = fmt.Errorf("%s: %w", p, err)
		}
	}
	if refused != nil {
		return "", codeCannotExecute, refused
	}
	return "", codeNotFound, fmt.Errorf("%s: no such file in PATH (%s)", argv0, pathValue)
}

func absent(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR)
}

// execFailure turns execve's error into exit code and message.
func execFailure(command string, err error) (code int, message string) {
	switch {
	case errors.Is(err, syscall.ENOENT):
		return codeNotFound, command + ": its interpreter is not in the image"
	case errors.Is(err, syscall.ENOEXEC):
		return codeCannotExecute, command + ": exec format error (made for another architecture, or a script without #!)"
	case errors.Is(err, syscall.E2BIG):
		return codeCannotExecute, command + ": arguments and environment are too large"
	}
	return codeCannotExecute, fmt.Sprintf("%s: %v", command, err)
}

// mayExecute applies the permission bits of a file to an identity, as execve would.
func mayExecute(mode uint32, uid, gid uint32, id identity) bool {
	if id.uid == 0 {
		return mode&0o111 != 0
	}
	if id.uid == uid {
		return mode&0o100 != 0
	}
	member := id.gid == gid
	for _, g := range id.groups {
		member = member || g == gid
	}
	if member {
		return mode&0o010 != 0
	}
	return mode&0o001 != 0
}
