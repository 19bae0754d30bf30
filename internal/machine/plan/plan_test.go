package plan

import (
	"errors"
	"strings"
	"testing"
	"time"

	guestv1 "imp.dev/imp/api/guest/v1"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/network"
	"imp.dev/imp/internal/vmm"
)

var noon = time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)

func networkInterface() network.Interface {
	return network.Interface{Name: "eth0", MAC: "02:00:00:00:00:01"}
}

func spec() machine.Spec {
	return machine.Spec{
		ID: "vm-1", Namespace: "default", Name: "vm", Assignment: 1, Generation: 1, Lifecycle: machine.Ephemeral,
		Image: machine.Image{Reference: "a", Policy: image.IfNotPresent}, VCPU: 1, MemoryMiB: 128, DiskGiB: 1, Grace: 30 * time.Second,
	}
}

// view is a VM in some state; each option takes it further.
func view(options ...func(*View)) View {
	v := View{Record: New(spec(), noon), Observed: Observation{VMM: Unknown}, Limits: DefaultLimits(), Now: noon}
	for _, o := range options {
		o(&v)
	}
	return v
}

func prepared(v *View) {
	v.Record.ImageReady("a", image.Base{Digest: "sha256:a"})
	v.Record.DiskReady(noon)
}

func launching(v *View) { prepared(v); v.Record.BeginBoot("n", "boot", 0, noon) }

func launched(v *View) {
	launching(v)
	v.Record.Launched(vmm.Handle{Driver: "fake"}, noon)
	v.Observed.VMM = Alive
}

func startSent(v *View) {
	launched(v)
	v.Record.Answered(noon)
	v.Record.ConfiguredNow(noon)
	v.Record.SendingStart(noon)
}

func running(v *View)    { startSent(v); v.Record.StartAccepted(noon) }
func removed(v *View)    { v.Record.OrderRemoval(machine.Removal{Grace: 30 * time.Second}, noon) }
func unlooked(v *View)   { v.Observed.VMM = Unknown }
func machineOff(v *View) { v.Observed.VMM = Over }
func later(d time.Duration) func(*View) {
	return func(v *View) { v.Now = noon.Add(d) }
}

func exited(code int) func(*View) {
	return func(v *View) { v.Observed.GuestExit = &guestv1.Exit{Code: code} }
}

func concluded(verdict machine.Verdict) func(*View) {
	return func(v *View) {
		v.Record.Concluded(machine.Exit{Incarnation: 1, Run: 1, Verdict: verdict, At: noon}, verdict == machine.Succeeded, 0, noon)
	}
}

func persistent(v *View) { v.Record.Spec.Lifecycle = machine.Persistent }

func TestNext(t *testing.T) {
	cases := map[string]struct {
		view View
		want Kind
	}{
		"a new VM gets its image first":                               {view(), EnsureImage},
		"a VM with an image gets a disk":                              {view(func(v *View) { v.Record.ImageReady("a", image.Base{Digest: "d"}) }), EnsureDisk},
		"a disk of another base is made anew":                         {view(prepared, func(v *View) { v.Record.Image.Digest = "sha256:b" }), EnsureDisk},
		"interfaces are opened before the launch":                     {view(prepared, func(v *View) { v.Record.Spec.Interfaces = []network.Interface{networkInterface()} }), AttachNetwork},
		"a prepared VM is launched":                                   {view(prepared), StartVMM},
		"a pull that needs secrets waits for them":                    {view(func(v *View) { v.Record.Spec.Image.NeedsCredentials = true }), WaitForSecrets},
		"a VM that has its image needs no secrets":                    {view(prepared, func(v *View) { v.Record.Spec.Image.NeedsCredentials = true }), StartVMM},
		"a launch without a handle is undone":                         {view(launching), DestroyVMM},
		"a VMM on record is looked for before anything else":          {view(running, unlooked), Recover},
		"a VMM on record is looked for before a removal":              {view(running, unlooked, removed), Recover},
		"a launched VMM's guest is awaited":                           {view(launched), AwaitGuest},
		"a guest that does not answer in time has failed to start":    {view(launched, later(31*time.Second)), FailStart},
		"a machine that ends before the start was sent has failed":    {view(launched, machineOff), FailStart},
		"a start that was sent and not answered is sent again":        {view(startSent), StartWorkload},
		"a start that was sent is repeated long after the deadline":   {view(startSent, later(time.Hour)), StartWorkload},
		"a machine that ends after the start was sent gets a verdict": {view(startSent, machineOff), CollectVerdict},
		"a running VM is watched":                                     {view(running), Watch},
		"a guest's report gets a verdict":                             {view(running, exited(0)), CollectVerdict},
		"a reported exit on record is acknowledged":                   {view(running, exited(0), concluded(machine.Succeeded)), Acknowledge},
		"an acknowledged guest may go off by itself":                  {view(running, concluded(machine.Succeeded), func(v *View) { v.Record.Acknowledged(noon) }), Watch},
		"an acknowledged guest that stays is destroyed":               {view(running, concluded(machine.Succeeded), func(v *View) { v.Record.Acknowledged(noon) }, later(11*time.Second)), DestroyVMM},
		"a machine that went off is cleared away":                     {view(running, concluded(machine.Succeeded), machineOff), DestroyVMM},
		"a running VM that is to be removed is asked to stop":         {view(running, removed), Stop},
		"a VM without grace is not asked":                             {view(running, func(v *View) { v.Record.OrderRemoval(machine.Removal{}, noon) }), CollectVerdict},
		"a booting VM that is to be removed is not asked":             {view(launched, removed), CollectVerdict},
		"a shorter grace is told to the guest":                        {view(running, removed, func(v *View) { v.Record.Stopping(time.Hour, machine.Stopped, noon) }), Stop},
		"a stopping guest has its grace and a moment":                 {view(running, removed, func(v *View) { v.Record.Stopping(30*time.Second, machine.Stopped, noon) }, later(39*time.Second)), Watch},
		"a guest that does not stop is ended":                         {view(running, removed, func(v *View) { v.Record.Stopping(30*time.Second, machine.Stopped, noon) }, later(40*time.Second)), CollectVerdict},
		"a removed VM without a boot detaches its network":            {view(prepared, removed, func(v *View) { v.Record.NetworkUsed = true }), Detach},
		"then frees its disk":                                         {view(prepared, removed), FreeDisk},
		"then becomes a tombstone":                                    {view(removed), WriteTombstone},
		"a tombstone stays a day":                                     {view(removed, func(v *View) { v.Record.Tombstoned(noon) }, later(23*time.Hour)), Watch},
		"and is then forgotten":                                       {view(removed, func(v *View) { v.Record.Tombstoned(noon) }, later(24*time.Hour)), Forget},
		"a successor takes the tombstone's place":                     {view(removed, func(v *View) { v.Record.Tombstoned(noon); v.Record.Successor = &machine.Spec{Assignment: 2} }), Succeed},
		"a finished VM frees its disk":                                {view(running, concluded(machine.Failed), func(v *View) { v.Record.VMMDestroyed(noon) }), FreeDisk},
		"a persistent VM that failed waits for its next try":          {view(persistent, running, concluded(machine.Failed), func(v *View) { v.Record.VMMDestroyed(noon) }), WaitUntil},
		"a persistent VM that rebooted is launched at once":           {view(persistent, running, concluded(machine.GuestReboot), func(v *View) { v.Record.VMMDestroyed(noon) }), StartVMM},
		"a deadline ends a running VM politely":                       {view(running, func(v *View) { v.Record.Spec.Deadline = &noon }), Stop},
		"a deadline ends a VM that never started":                     {view(func(v *View) { v.Record.Spec.Deadline = &noon }), Finish},
		"a step that failed waits":                                    {view(func(v *View) { v.Record.StepFailed(EnsureImage, fault.Of(errors.New("x")), time.Second, noon) }), WaitUntil},
		"and is tried again in time":                                  {view(func(v *View) { v.Record.StepFailed(EnsureImage, fault.Of(errors.New("x")), time.Second, noon) }, later(time.Second)), EnsureImage},
		"a step that cannot work with this spec waits for another": {view(func(v *View) {
			v.Record.StepFailed(EnsureImage, &fault.Error{Permanent: true, Err: errors.New("x")}, time.Second, noon)
		}, later(time.Hour)), WaitForSpec},
		"clearing away is never given up": {view(prepared, removed, func(v *View) {
			v.Record.StepFailed(FreeDisk, &fault.Error{Permanent: true, Err: errors.New("x")}, time.Second, noon)
		}, later(time.Hour)), FreeDisk},
		"a removal does not wait for the retry of a step it has no use for": {view(func(v *View) { v.Record.StepFailed(EnsureImage, fault.Of(errors.New("x")), time.Hour, noon) }, removed), WriteTombstone},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			s := Next(c.view)
			if s.Kind != c.want {
				t.Fatalf("got %s (%s: %s), want %s", s.Kind, s.Check, s.Why, c.want)
			}
			if s.Why == "" || s.Check == "" {
				t.Fatalf("%s does not say why: %+v", s.Kind, s)
			}
		})
	}
}

func TestNoRestGoesPastTheDeadline(t *testing.T) {
	at := noon.Add(time.Minute)
	for name, v := range map[string]View{
		"running":             view(running),
		"waiting for secrets": view(func(v *View) { v.Record.Spec.Image.NeedsCredentials = true }),
		"backing off":         view(func(v *View) { next := noon.Add(time.Hour); v.Record.History.NextTryAt = &next }),
		"waiting for a spec": view(func(v *View) {
			v.Record.StepFailed(EnsureImage, &fault.Error{Permanent: true, Err: errors.New("x")}, time.Hour, noon)
		}),
		"waiting for a retry": view(func(v *View) { v.Record.StepFailed(EnsureImage, fault.Of(errors.New("x")), time.Hour, noon) }),
	} {
		v.Record.Spec.Deadline = &at
		if s := Next(v); !s.Rests() || !s.Until.Equal(at) {
			t.Errorf("%s: %s until %s, want a rest until the deadline", name, s.Kind, s.Until)
		}
	}
}

func TestJudge(t *testing.T) {
	boot := Boot{Incarnation: 2, Run: 3, Nonce: "abc", HostBootID: "boot", StartedAt: &noon}
	half := boot
	half.StartedAt = nil
	with := func(change func(*Testimony)) Testimony {
		x := Testimony{Boot: boot, HostBootID: "boot", Lifecycle: machine.Ephemeral, Now: noon}
		change(&x)
		return x
	}
	evidence := func(c vmm.Cause) func(*Testimony) {
		return func(x *Testimony) { x.Evidence = vmm.Evidence{State: vmm.Gone, Cause: c, Detail: "words"} }
	}
	cases := map[string]struct {
		in   Testimony
		want machine.Verdict
		code int
		text string
	}{
		"the guest's report comes first": {with(func(x *Testimony) { evidence(vmm.CausePanic)(x); x.Report = &guestv1.Exit{Code: 0} }), machine.Succeeded, 0, "exit code 0"},
		"a report of a failure":          {with(func(x *Testimony) { x.Report = &guestv1.Exit{Code: 127, Message: "no such file"} }), machine.Failed, 127, "no such file"},
		"a workload out of memory":       {with(func(x *Testimony) { x.Report = &guestv1.Exit{Code: 137, OOMKilled: true} }), machine.Failed, 137, "want of memory"},
		"the marker speaks for a guest that panicked after it": {with(func(x *Testimony) {
			evidence(vmm.CausePanic)(x)
			x.Console = []byte("x\r\nIMP_SUCCESS id=abc\r\nKernel panic")
		}), machine.Succeeded, 0, "exit code 0"},
		"the marker tells the code": {with(func(x *Testimony) { x.Console = []byte("IMP_FAILED code=3 id=abc\n") }), machine.Failed, 3, "exit code 3"},
		"a marker with another nonce is the workload's own": {with(func(x *Testimony) {
			evidence(vmm.CausePowerOff)(x)
			x.Console = []byte("IMP_SUCCESS id=abd\nIMP_SUCCESS\n")
		}), machine.GuestPowerOff, -1, "words"},
		"a panic":                                           {with(evidence(vmm.CausePanic)), machine.GuestPanic, -1, "words"},
		"a reboot":                                          {with(evidence(vmm.CauseReboot)), machine.GuestReboot, -1, "rebooted"},
		"a cgroup out of memory":                            {with(evidence(vmm.CauseOOM)), machine.OOMKilled, -1, "cgroup"},
		"a VMM that gave up":                                {with(evidence(vmm.CauseVMMError)), machine.VMMFailed, -1, "words"},
		"a VMM that somebody ended":                         {with(evidence(vmm.CauseHost)), machine.VMMKilled, -1, "somebody"},
		"no evidence at all is a kill":                      {with(func(*Testimony) {}), machine.VMMKilled, -1, "killed"},
		"another boot of the host":                          {with(func(x *Testimony) { x.HostBootID = "next" }), machine.LostWithHost, -1, "host"},
		"another boot of the host after the marker":         {with(func(x *Testimony) { x.HostBootID = "next"; x.Console = []byte("IMP_SUCCESS id=abc\n") }), machine.Succeeded, 0, ""},
		"a one-shot of which nobody knows whether it began": {with(func(x *Testimony) { x.Boot = half }), machine.Lost, -1, "under way"},
		"the same of a persistent VM is a kill":             {with(func(x *Testimony) { x.Boot = half; x.Lifecycle = machine.Persistent }), machine.VMMKilled, -1, ""},
		"evidence that cannot be had":                       {with(func(x *Testimony) { x.EvidenceErr = errors.New("gone") }), machine.Lost, -1, "gone"},
		"a guest that fell silent":                          {with(func(x *Testimony) { x.Hung = true; x.Why = "silent for 1m" }), machine.GuestHung, -1, "silent"},
		"one whose evidence cannot be had":                  {with(func(x *Testimony) { x.Hung, x.EvidenceErr = true, errors.New("gone") }), machine.GuestHung, -1, ""},
		"one that said how it ended before":                 {with(func(x *Testimony) { x.Hung = true; x.Console = []byte("IMP_FAILED code=3 id=abc\n") }), machine.Failed, 3, ""},
		"one whose kernel said why": {with(func(x *Testimony) {
			x.Hung = true
			x.Console = []byte("x\r\n[   12.345678] Kernel panic - not syncing: VFS\r\n[ 12.4] ---\r\n")
		}), machine.GuestPanic, -1, "VFS"},
		"one whose workload speaks of panics": {with(func(x *Testimony) { x.Hung = true; x.Console = []byte("Kernel panic - not syncing\n") }), machine.GuestHung, -1, ""},
		"an end by order":                     {with(func(x *Testimony) { x.Ordered = machine.Stopped; x.Report = &guestv1.Exit{Code: 143} }), machine.Stopped, 143, "143"},
		"a deadline":                          {with(func(x *Testimony) { x.Ordered = machine.DeadlineExceeded; x.Why = "no answer" }), machine.DeadlineExceeded, -1, "deadline"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			e, reported := Judge(c.in)
			if e.Verdict != c.want || !strings.Contains(e.Message, c.text) || reported != (c.in.Report != nil) {
				t.Fatalf("got %s %q, want %s with %q", e.Verdict, e.Message, c.want, c.text)
			}
			if (c.code >= 0) != (e.Code != nil) || (e.Code != nil && int(*e.Code) != c.code) {
				t.Fatalf("got code %v, want %d", e.Code, c.code)
			}
			if e.Incarnation != 2 || e.Run != 3 || !e.At.Equal(noon) {
				t.Fatalf("exit is not of this boot: %+v", e)
			}
		})
	}
}

func TestTheImageOfAReferenceDoesNotChangeUnderAVM(t *testing.T) {
	r := New(spec(), noon)
	r.Spec.Image.Digest = "sha256:known-to-the-object"
	if got := r.WantedDigest(); got != "sha256:known-to-the-object" {
		t.Fatalf("before the first start %q is wanted", got)
	}
	r.ImageReady("a", image.Base{Digest: "sha256:a"})
	r.Spec.Image.Digest = "sha256:a"
	if got := r.WantedDigest(); got != "sha256:a" {
		t.Fatalf("%q is wanted for the same reference", got)
	}
	r.Spec.Image.Reference = "b"
	if got := r.WantedDigest(); got != "" {
		t.Fatalf("%q is wanted for another reference", got)
	}
}

func TestWhatAVMTakesOfTheNode(t *testing.T) {
	overhead := func(int, int64) int64 { return 10 }
	sized := func(vcpu int, memory, disk int64) machine.Spec {
		return machine.Spec{VCPU: vcpu, MemoryMiB: memory, DiskGiB: disk}
	}
	successor := sized(4, 50, 1)
	for name, c := range map[string]struct {
		record Record
		want   Need
	}{
		"what is wished": {Record{Spec: sized(1, 100, 2)}, Need{1, 110, 2}},
		"the greater of what is wished and what still runs": {Record{Spec: sized(1, 100, 2), Boot: &Boot{Spec: sized(2, 90, 3)}}, Need{2, 110, 3}},
		"room for the successor that was accepted":          {Record{Spec: sized(1, 100, 2), Successor: &successor}, Need{4, 110, 2}},
		"nothing once it is removed":                        {Record{Spec: sized(1, 100, 2), RemovedAt: &noon}, Need{}},
		"the successor's part once it is removed":           {Record{Spec: sized(1, 100, 2), RemovedAt: &noon, Successor: &successor}, Need{4, 60, 1}},
		"all of it while a finished VM still has a disk":    {Record{Spec: sized(1, 100, 2), Final: &machine.Exit{}, Disk: &Disk{}}, Need{1, 110, 2}},
		"nothing once a finished VM has been cleared away":  {Record{Spec: sized(1, 100, 2), Final: &machine.Exit{}}, Need{}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := NeedOf(c.record, overhead); got != c.want {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
		})
	}
}
