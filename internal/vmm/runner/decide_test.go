package runner

import (
	"strings"
	"testing"

	"imp.dev/imp/internal/vmm"
)

func TestEvidenceIsTheFirstFactThatTellsAnEnd(t *testing.T) {
	const (
		off     = "hello\n[    3.200000] reboot: Power down\n"
		restart = "[    3.200000] reboot: Restarting system\r\n"
		panics  = "[    2.1] ok\n[    2.111111] Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000200\n[    2.2] Call Trace:\n[    2.3]  panic+0x1\n"
	)
	for name, c := range map[string]struct {
		facts  Facts
		state  vmm.State
		cause  vmm.Cause
		detail string
	}{
		"a live process without an event is running":                    {Facts{Alive: true}, vmm.Running, vmm.CauseUnknown, ""},
		"a live process is running whatever its guest printed":          {Facts{Alive: true, Console: []byte(off)}, vmm.Running, vmm.CauseUnknown, ""},
		"a power-off told by the VMM, which waits":                      {Facts{Alive: true, Event: vmm.CausePowerOff}, vmm.Ended, vmm.CausePowerOff, ""},
		"the same, the VMM destroyed since":                             {Facts{Event: vmm.CausePowerOff}, vmm.Gone, vmm.CausePowerOff, ""},
		"a reboot told by the VMM":                                      {Facts{Alive: true, Event: vmm.CauseReboot, Console: []byte(restart)}, vmm.Ended, vmm.CauseReboot, ""},
		"a panic told by the VMM, in the kernel's words":                {Facts{Alive: true, Event: vmm.CausePanic, Console: []byte(panics)}, vmm.Panicked, vmm.CausePanic, "Kernel panic - not syncing: Attempted"},
		"a panic without the device is a reset after the panic's words": {Facts{Alive: true, Event: vmm.CauseReboot, Console: []byte(panics)}, vmm.Panicked, vmm.CausePanic, "Kernel panic"},
		"power-off known from the console alone":                        {Facts{Console: []byte(off)}, vmm.Gone, vmm.CausePowerOff, "reboot: Power down"},
		"reboot known from the console alone":                           {Facts{Console: []byte(restart)}, vmm.Gone, vmm.CauseReboot, "reboot: Restarting system"},
		"panic known from the console alone":                            {Facts{Console: []byte(panics)}, vmm.Gone, vmm.CausePanic, "Kernel panic"},
		"the event counts more than the console":                        {Facts{Event: vmm.CausePowerOff, Console: []byte(panics)}, vmm.Gone, vmm.CausePowerOff, ""},
		"a workload that prints the words without the kernel's stamp":   {Facts{Console: []byte("reboot: Power down\nKernel panic - not syncing: joke\n")}, vmm.Gone, vmm.CauseUnknown, ""},
		"old words far from the end do not count":                       {Facts{Console: []byte(off + strings.Repeat("more\n", 10))}, vmm.Gone, vmm.CauseUnknown, ""},
		"an OOM kill": {Facts{OOMKills: 1}, vmm.Gone, vmm.CauseOOM, "killed the VMM"},
		"the console counts more than the cgroup":               {Facts{OOMKills: 1, Console: []byte(off)}, vmm.Gone, vmm.CausePowerOff, ""},
		"the VMM's own words":                                   {Facts{Log: "x\nqemu-system-x86_64: no space left\n"}, vmm.Gone, vmm.CauseVMMError, "qemu-system-x86_64: no space left"},
		"a signal that the VMM told of":                         {Facts{Log: "qemu-system-x86_64: terminating on signal 15 from pid 7 (kill)\n"}, vmm.Gone, vmm.CauseHost, "terminating on signal 15"},
		"an end by signal, told by the VMM, in its log's words": {Facts{Event: vmm.CauseHost, EventDetail: "host-signal", Log: "qemu-system-x86_64: terminating on signal 15 from pid 7 (kill)"}, vmm.Gone, vmm.CauseHost, "terminating on signal 15"},
		"gone without a word was killed":                        {Facts{}, vmm.Gone, vmm.CauseUnknown, ""},
		"gone since the host was booted":                        {Facts{OtherBoot: true}, vmm.Gone, vmm.CauseHostBoot, "booted"},
		"ended before the host was booted":                      {Facts{OtherBoot: true, Event: vmm.CausePowerOff}, vmm.Gone, vmm.CausePowerOff, ""},
		"a stale OOM count says nothing of a living VMM":        {Facts{Alive: true, OOMKills: 3}, vmm.Running, vmm.CauseUnknown, ""},
		"an error logged by a VMM that lives is no end yet":     {Facts{Alive: true, Log: "oops"}, vmm.Running, vmm.CauseUnknown, ""},
	} {
		t.Run(name, func(t *testing.T) {
			got := Decide(c.facts)
			if got.State != c.state || got.Cause != c.cause || !strings.Contains(got.Detail, c.detail) {
				t.Errorf("got %+v", got)
			}
		})
	}
}
