package engine

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/plan"
)

func TestCommandAndArguments(t *testing.T) {
	full := image.Config{Entrypoint: []string{"/entry"}, Cmd: []string{"a", "b"}}
	for name, c := range map[string]struct {
		workload machine.Workload
		config   image.Config
		want     []string
	}{
		"nothing set runs the image's entrypoint with its command": {machine.Workload{}, full, []string{"/entry", "a", "b"}},
		"args replace the image's command":                         {machine.Workload{Args: []string{"x"}}, full, []string{"/entry", "x"}},
		"command replaces the entrypoint and drops the command":    {machine.Workload{Command: []string{"/mine"}}, full, []string{"/mine"}},
		"command and args replace both":                            {machine.Workload{Command: []string{"/mine"}, Args: []string{"x", ""}}, full, []string{"/mine", "x", ""}},
		"an image with a command only":                             {machine.Workload{}, image.Config{Cmd: []string{"sh"}}, []string{"sh"}},
		"args for an image with nothing":                           {machine.Workload{Args: []string{"sh"}}, image.Config{}, []string{"sh"}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := argv(c.workload, c.config)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(c.want, got); d != "" {
				t.Fatal(d)
			}
		})
	}
	t.Run("nothing anywhere is an invalid spec", func(t *testing.T) {
		if _, err := argv(machine.Workload{}, image.Config{}); !fault.Is(err, fault.InvalidSpec) || !fault.Of(err).Permanent {
			t.Fatalf("got %v", err)
		}
	})
}

func TestStartAndConfigureCarryBytesAsTheyAre(t *testing.T) {
	b := &plan.Boot{
		Incarnation: 3, Nonce: "n",
		Spec: machine.Spec{ID: "u", Name: "web." + strings.Repeat("x", 58) + ".y", Assignment: 2, Workload: machine.Workload{
			Args: []string{"a'b\"c$d\n", "ü"}, Env: []machine.EnvVar{{Name: "B", Value: "2=\n"}, {Name: "C", Value: ""}, {Name: "C", Value: "last"}},
			DataPaths: []string{"/data", "/more"},
		}},
		Image: plan.Image{Config: image.Config{
			Entrypoint: []string{"/e"}, Env: []string{"A=1", "B=1"}, User: "app:www", WorkingDir: "/srv", StopSignal: "SIGINT", Volumes: []string{"/data", "cache/", "/../", "."},
		}},
	}
	s, err := start(b)
	if err != nil {
		t.Fatal(err)
	}
	if got := string(bytes.Join(s.Argv, []byte{0})); got != "/e\x00a'b\"c$d\n\x00ü" {
		t.Errorf("argv %q", got)
	}
	if got := string(bytes.Join(s.Env, []byte{0})); got != "A=1\x00B=2=\n\x00C=last" {
		t.Errorf("env %q", got)
	}
	if s.ID != "u/2/3" || s.Nonce != "n" || s.User != "app:www" || s.WorkingDir != "/srv" || s.StopSignal != "SIGINT" {
		t.Errorf("start %+v", s)
	}
	now := time.Unix(5, 7)
	c := configure(b, make([]byte, 64), now)
	if d := cmp.Diff([]string{"/cache", "/data", "/more"}, c.DataPaths); d != "" {
		t.Error(d)
	}
	if len(c.Hostname) > 63 || !strings.HasPrefix(c.Hostname, "web.x") || strings.HasSuffix(c.Hostname, ".") || c.UnixNanos != now.UnixNano() || c.ID != "u/2/3" {
		t.Errorf("configure %+v", c)
	}
}
