package firecracker

import (
	"strings"
	"testing"

	"imp.dev/imp/internal/vmm"
	"imp.dev/imp/internal/vmm/runner"
)

const (
	logHead  = "2026-12-06T11:36:27.123456789 [test-vm:main] "
	logBegun = logHead + "Running Firecracker v1.16.1\n" + logHead + "Listening on API socket (\"api.sock\").\n" +
		logHead + "The API server received a Put request on \"/actions\" with body \"{\\\"action_type\\\":\\\"InstanceStart\\\"}\".\n" +
		logHead + "The request was executed successfully. Status code: 204 No Content.\n"
)

func TestLastWordOfTheLog(t *testing.T) {
	for name, c := range map[string]struct {
		log    string
		cause  vmm.Cause
		detail string
	}{
		"nothing":                              {"", vmm.CauseUnknown, ""},
		"no last word":                         {logBegun, vmm.CauseUnknown, ""},
		"a reset":                              {logBegun + logHead + "Vmm is stopping.\n" + logHead + "Firecracker exiting successfully. exit_code=0\n", vmm.CauseReboot, "the guest reset the machine"},
		"an error":                             {logBegun + logHead + "RunWithApiError error: MicroVM stopped with an error: GenericError\n" + logHead + "Firecracker exiting with error. exit_code=1\n", vmm.CauseVMMError, "RunWithApiError error: MicroVM stopped with an error: GenericError (exit code 1)"},
		"a bad syscall":                        {logBegun + logHead + "Shutting down VM after intercepting a bad syscall (41).\n", vmm.CauseVMMError, "Shutting down VM after intercepting a bad syscall (41)."},
		"a panic":                              {logBegun + logHead + "Firecracker panicked at src/vmm/src/lib.rs:1:1:\nboom\n", vmm.CauseVMMError, "Firecracker panicked at src/vmm/src/lib.rs:1:1:"},
		"a request whose body holds the words": {logBegun + logHead + "The API server received a Put request on \"/x\" with body \"Firecracker exiting successfully. exit_code=0\".\n", vmm.CauseUnknown, ""},
		"the words without a head":             {logBegun + "Firecracker exiting successfully. exit_code=0\n", vmm.CauseUnknown, ""},
	} {
		t.Run(name, func(t *testing.T) {
			if cause, detail := causeOf(c.log); cause != c.cause || detail != c.detail {
				t.Errorf("got %q, %q", cause, detail)
			}
		})
	}
}

func TestFarewellIsTheLastThatIsOnTheConsole(t *testing.T) {
	for name, c := range map[string]struct {
		console string
		said    bool
	}{
		"a power-off":                       {"login:\n[    3.2] reboot: Power down\r\n", true},
		"a halt":                            {"[   13.200000] reboot: System halted\n", true},
		"a reset":                           {"[    3.2] reboot: Restarting system\n", false},
		"words without the kernel's stamp":  {"reboot: Power down\n", false},
		"words that are followed by others": {"[    3.2] reboot: Power down\nhello\n", false},
		"an empty console":                  {"", false},
	} {
		t.Run(name, func(t *testing.T) {
			if _, said := farewell([]byte(c.console)); said != c.said {
				t.Errorf("said %v", said)
			}
		})
	}
}

func TestResetThatMeansSwitchingOff(t *testing.T) {
	const restart = "[    3.3] reboot: Restarting system\n"
	for name, c := range map[string]struct {
		arch, console string
		want          vmm.Cause
	}{
		"a guest that was stopped":                   {amd64, "[    3.2] imp-guest: power off\n" + restart, vmm.CausePowerOff},
		"a guest that rebooted":                      {amd64, restart, vmm.CauseReboot},
		"a workload that prints the words":           {amd64, "imp-guest: power off\n" + restart, vmm.CauseReboot},
		"words of long ago":                          {amd64, "[    3.2] imp-guest: power off\n" + strings.Repeat("more\n", 6) + restart, vmm.CauseReboot},
		"arm64, where the kernel's own word decides": {arm64, "[    3.3] reboot: Power down\n", vmm.CausePowerOff},
		"arm64, and a reset":                         {arm64, restart, vmm.CauseReboot},
	} {
		t.Run(name, func(t *testing.T) {
			d := New(Options{Arch: c.arch})
			f := runner.Facts{Event: vmm.CauseReboot, Console: []byte(c.console)}
			d.asked(&f)
			if e := runner.Decide(f); e.Cause != c.want {
				t.Errorf("got %+v", e)
			}
		})
	}
}
