package firecracker

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// release is a version of Firecracker.
type release struct {
	major, minor, patch int
	text                string
}

// The oldest release that is supported: since 1.15 a triple fault is told as an error, and the devices have the room that is counted on.
const minMajor, minMinor = 1, 15

var releasePattern = regexp.MustCompile(`^v?(\d+)\.(\d+)\.(\d+)(?:[-+][0-9A-Za-z.+-]+)?$`)

func parseRelease(text string) (release, error) {
	m := releasePattern.FindStringSubmatch(strings.TrimSpace(text))
	if m == nil {
		return release{}, fmt.Errorf("%.64q is no version of Firecracker", text)
	}
	r := release{text: strings.TrimPrefix(m[0], "v")}
	for at, field := range []*int{&r.major, &r.minor, &r.patch} {
		n, err := strconv.Atoi(m[at+1])
		if err != nil {
			return release{}, fmt.Errorf("%.64q is no version of Firecracker", text)
		}
		*field = n
	}
	return r, nil
}

func (r release) String() string { return r.text }

func (r release) before(major, minor, patch int) bool {
	switch {
	case r.major != major:
		return r.major < major
	case r.minor != minor:
		return r.minor < minor
	}
	return r.patch < patch
}

// supported refuses what the driver is not made for.
func (r release) supported() error {
	if r.before(minMajor, minMinor, 0) {
		return fmt.Errorf("Firecracker %s is too old: install %d.%d or a newer 1.x", r, minMajor, minMinor)
	}
	if r.major != minMajor {
		return fmt.Errorf("Firecracker %s has another API than %d.x: install a release of %d.x", r, minMajor, minMajor)
	}
	return nil
}

// losesGuestAfterPause says that nobody reaches a guest any more that was paused and resumed without a snapshot (Firecracker's pull request
// 6100, mended after 1.16).
func (r release) losesGuestAfterPause() bool { return r.major == 1 && r.minor == 16 }

// flaws are what is known to be wrong with a release that works otherwise, each with its remedy, for an administrator to read.
func (r release) flaws() []string {
	var found []string
	if r.major == 1 && r.minor == 16 && r.patch == 0 {
		found = append(found, "Firecracker 1.16.0 loses what a guest sends over vsock after a restore from a snapshot: install 1.16.1")
	}
	if r.losesGuestAfterPause() {
		found = append(found, fmt.Sprintf("Firecracker %s reaches no guest over vsock after it was paused and resumed, so it is not paused: install 1.15.x, or 1.17 or newer", r))
	}
	return found
}
