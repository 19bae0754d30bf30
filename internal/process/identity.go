package process

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// BootID is the running kernel's boot id (random(4)).
func BootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("reading boot id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// Identify gives the Identity of a pid that cannot be recycled meanwhile: the caller is its parent and has not waited, or
// holds a pidfd of it. ErrGone when there is none, or only a zombie.
func Identify(pid int) (Identity, error) {
	id, dead, err := identify(pid)
	if err == nil && dead {
		err = ErrGone
	}
	if err != nil {
		return Identity{}, err
	}
	return id, nil
}

func identify(pid int) (id Identity, dead bool, err error) {
	boot, err := BootID()
	if err != nil {
		return Identity{}, false, err
	}
	s, err := readStat(pid)
	if err != nil {
		return Identity{}, false, err
	}
	return Identity{PID: pid, StartTime: s.startTime, BootID: boot}, s.dead(), nil
}

// stat is the part of /proc/PID/stat that identity needs.
type stat struct {
	state     byte
	startTime uint64
}

// dead says that nothing of the process runs any more, though its parent may not have waited.
func (s stat) dead() bool { return s.state == 'Z' || s.state == 'X' || s.state == 'x' }

func readStat(pid int) (stat, error) {
	if pid <= 0 {
		return stat{}, ErrGone
	}
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if errors.Is(err, os.ErrNotExist) || (err != nil && isNoProcess(err)) {
		return stat{}, ErrGone
	}
	if err != nil {
		return stat{}, fmt.Errorf("reading process %d: %w", pid, err)
	}
	return parseStat(b)
}

// parseStat reads proc(5)'s stat line. The second field is the program's name in parentheses and may itself hold
// blanks and parentheses, so counting begins after the last one.
func parseStat(b []byte) (stat, error) {
	end := bytes.LastIndexByte(b, ')')
	if end < 0 {
		return stat{}, fmt.Errorf("parsing process state: no name in %q", b)
	}
	fields := strings.Fields(string(b[end+1:]))
	if len(fields) < 20 {
		return stat{}, fmt.Errorf("parsing process state: %d fields", len(fields))
	}
	start, err := strconv.ParseUint(fields[19], 10, 64)
	if err != nil {
		return stat{}, fmt.Errorf("parsing start time: %w", err)
	}
	return stat{state: fields[0][0], startTime: start}, nil
}
