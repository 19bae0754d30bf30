// Package fcfake is a Firecracker and a jailer that run no guest: small real processes that speak the API and take the arguments as strictly as the
// real ones, and misbehave on request. For tests of the driver where there is neither KVM nor Firecracker.
//
// A program is one binary for both; what it is and how it misbehaves is a trailer behind its end (Make), so that it needs no file, no
// argument and no environment: a jail has none of them. How its guest behaves travels on the kernel's command line (Guest.Word).
package fcfake

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	guestfake "imp.dev/imp/internal/guest/fake"
)

// Config of a program. The zero value is a Firecracker of the version that is current.
type Config struct {
	// Jailer makes it a jailer.
	Jailer bool `json:"jailer,omitempty"`
	// Version it says it is; "" is 1.16.1.
	Version string `json:"version,omitempty"`
	// APIVersion is what GET /version says where that is something else.
	APIVersion string `json:"apiVersion,omitempty"`
	// NoSocket: the API's socket never comes. Panic: it gives up before that, as a Rust program does.
	NoSocket bool   `json:"noSocket,omitempty"`
	Panic    string `json:"panic,omitempty"`
	// SlowMillis pass before the answer to a path. Cut breaks the connection in the middle of the answer, Mute before it.
	SlowMillis map[string]int64 `json:"slowMillis,omitempty"`
	Cut, Mute  string           `json:",omitempty"`
	// Refuse answers a path with these words. Huge answers it with more than anybody wants to read.
	Refuse map[string]string `json:"refuse,omitempty"`
	Huge   string            `json:"huge,omitempty"`
	// ExitAt ends the process with the code when the path is asked for.
	ExitAt map[string]int `json:"exitAt,omitempty"`
}

const trailer = "\nfcfake-trailer:"

// Make writes a program of the configuration to the path, out of the binary of a main that calls Main.
func Make(binary, path string, c Config) error {
	content, err := os.ReadFile(binary)
	if err != nil {
		return fmt.Errorf("making a fake: %w", err)
	}
	tail, err := json.Marshal(c)
	if err != nil {
		return fmt.Errorf("making a fake: %w", err)
	}
	content = append(append(content, trailer...), tail...)
	if err := os.WriteFile(path, content, 0o755); err != nil {
		return fmt.Errorf("making a fake: %w", err)
	}
	return nil
}

// own reads the trailer of the running program. A jail has no /proc: the program is where its first argument says.
func own() (Config, error) {
	var c Config
	content, err := os.ReadFile("/proc/self/exe")
	if errors.Is(err, os.ErrNotExist) {
		content, err = os.ReadFile(os.Args[0])
	}
	if err != nil {
		return c, err
	}
	// The last of its kind: the program's own constants hold the word, too.
	at := bytes.LastIndex(content, []byte(trailer))
	if err := json.Unmarshal(content[at+len(trailer):], &c); err != nil {
		return c, fmt.Errorf("this program was not made by Make: %w", err)
	}
	return c, nil
}

func (c Config) version() string {
	if c.Version == "" {
		return "1.16.1"
	}
	return c.Version
}

// Ways in which a machine ends.
const (
	// PowerOff on x86: the kernel says so and halts; the process goes on.
	PowerOff = "PowerOff"
	// Reboot and Panic end the process with code 0, after the kernel's words. Stop is a reboot that imp-guest means as switching off.
	Reboot = "Reboot"
	Panic  = "Panic"
	Stop   = "Stop"
	// TripleFault and BadSyscall are errors of Firecracker's own; Killed leaves no word.
	TripleFault = "TripleFault"
	BadSyscall  = "BadSyscall"
	Killed      = "Killed"
)

// Guest is how the guest behaves.
type Guest struct {
	// Script is that of its agent, which listens at a vsock port.
	Script guestfake.Script `json:"script"`
	Port   uint32           `json:"port"`
	// DriverMillis pass before the guest's vsock driver is there: until then nothing answers a CONNECT. ListenMillis more pass before it listens: until
	// then it is refused.
	DriverMillis int64 `json:"driverMillis,omitempty"`
	ListenMillis int64 `json:"listenMillis,omitempty"`
	// Console is printed at the boot.
	Console string `json:"console,omitempty"`
	// End is how the machine ends, EndMillis after the boot or, with AfterStart, after its workload was started. AtKeys: when Ctrl-Alt-Del is pressed.
	End        string `json:"end,omitempty"`
	EndMillis  int64  `json:"endMillis,omitempty"`
	AfterStart bool   `json:"afterStart,omitempty"`
	AtKeys     bool   `json:"atKeys,omitempty"`
	// Coalesce sends the guest's first bytes in one piece with the answer to CONNECT.
	Coalesce string `json:"coalesce,omitempty"`
}

const guestWord = "fcfake="

// Word is the word of the kernel's command line that tells of the behaviour.
func (g Guest) Word() string {
	content, _ := json.Marshal(g) // of plain fields: cannot fail
	return guestWord + base64.RawURLEncoding.EncodeToString(content)
}

func guestOf(bootArgs string) (Guest, error) {
	var g Guest
	for _, word := range strings.Fields(bootArgs) {
		if encoded, ok := strings.CutPrefix(word, guestWord); ok {
			content, err := base64.RawURLEncoding.DecodeString(encoded)
			if err != nil {
				return g, err
			}
			return g, json.Unmarshal(content, &g)
		}
	}
	return g, nil
}

// Main is the whole life of a fake. It never returns.
func Main() {
	c, err := own()
	if err != nil {
		fmt.Fprintln(os.Stderr, "fcfake: "+err.Error())
		os.Exit(1)
	}
	if c.Jailer {
		os.Exit(jail(c, os.Args[1:]))
	}
	os.Exit(run(c, os.Args[1:]))
}
