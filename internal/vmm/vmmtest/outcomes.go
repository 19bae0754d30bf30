package vmmtest

import (
	"errors"
	"strings"
	"syscall"
	"testing"

	"imp.dev/imp/internal/vmm"
)

// outcomes is every end in every situation of the runtime.
func (s suite) outcomes(t *testing.T) {
	guest := func(t *testing.T, i vmm.Instance) { s.Trigger(t, i) }
	host := func(sig syscall.Signal) func(*testing.T, vmm.Instance) {
		return func(_ *testing.T, i vmm.Instance) { _ = syscall.Kill(i.PID(), sig) }
	}
	for name, o := range map[string]struct {
		behaviour Behaviour
		cause     func(t *testing.T, i vmm.Instance)
		want      vmm.Evidence
	}{
		"the guest powers off":        {PowersOff, guest, vmm.Evidence{State: vmm.Ended, Cause: vmm.CausePowerOff}},
		"the guest reboots":           {Reboots, guest, vmm.Evidence{State: vmm.Ended, Cause: vmm.CauseReboot}},
		"the guest panics":            {Panics, guest, vmm.Evidence{State: vmm.Panicked, Cause: vmm.CausePanic}},
		"the VMM is killed by -9":     {RunsOn, host(syscall.SIGKILL), vmm.Evidence{State: vmm.Gone, Cause: vmm.CauseUnknown}},
		"the VMM is ended by SIGTERM": {RunsOn, host(syscall.SIGTERM), vmm.Evidence{State: vmm.Gone, Cause: vmm.CauseHost}},
	} {
		if s.Mute && o.behaviour != PowersOff {
			o.want.State = vmm.Gone
		}
		if s.Mute && o.want.Cause == vmm.CauseHost {
			o.want.Cause = vmm.CauseUnknown
		}
		t.Run(name, func(t *testing.T) {
			details := map[string]string{}
			for _, mode := range []string{"with the runtime up", "with the runtime down meanwhile", "with the runtime restarted before"} {
				t.Run(mode, func(t *testing.T) {
					details[mode] = s.outcome(t, mode, o.behaviour, o.cause, o.want)
				})
			}
			for mode, detail := range details {
				if want := details["with the runtime up"]; comparable(detail) != comparable(want) {
					t.Errorf("%s the detail is %q, with the runtime up %q", mode, detail, want)
				}
			}
		})
	}
}

// comparable drops what differs between two machines: numbers.
func comparable(s string) string {
	return strings.Map(func(r rune) rune {
		if r >= '0' && r <= '9' {
			return -1
		}
		return r
	}, s)
}

func (s suite) outcome(t *testing.T, mode string, b Behaviour, cause func(*testing.T, vmm.Instance), want vmm.Evidence) string {
	d, c := s.NewDriver(t), s.Config(t, b)
	i := s.start(t, d, c)
	h := i.Handle()
	switch mode {
	case "with the runtime up":
		cause(t, i)
		s.awaitDone(t, i)
	case "with the runtime down meanwhile":
		cause(t, i)
		_ = i.Close()
		d = s.NewDriver(t)
		s.await(t, "the end is in the evidence", func() bool { return s.evidence(t, d, c, h).State == want.State })
		again, err := d.Recover(s.context(t), c, h)
		if want.State == vmm.Gone {
			if !errors.Is(err, vmm.ErrGone) {
				t.Errorf("recovering: %v", err)
			}
		} else if err != nil {
			t.Errorf("recovering: %v", err)
		} else {
			s.awaitDone(t, again)
			_ = again.Close()
		}
	case "with the runtime restarted before":
		_ = i.Close()
		var again vmm.Instance
		d, again = s.recover(t, c, h)
		cause(t, again)
		s.awaitDone(t, again)
	}
	// A VMM that tells of its end before it exits is Ended for a moment.
	s.await(t, "the machine is "+string(want.State), func() bool { return s.evidence(t, d, c, h).State == want.State })
	got := s.evidence(t, d, c, h)
	if got.State != want.State || got.Cause != want.Cause {
		t.Errorf("evidence %+v, want %+v", got, want)
	}
	if err := d.Destroy(s.context(t), c, h); err != nil {
		t.Fatal(err)
	}
	after := s.evidence(t, d, c, h)
	if after.State != vmm.Gone || after.Cause != want.Cause || after.Detail != got.Detail {
		t.Errorf("evidence after destroying %+v, before %+v", after, got)
	}
	s.nothingLeft(t, d, c, i.PID())
	return got.Detail
}
