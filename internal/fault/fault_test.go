package fault_test

import (
	"errors"
	"testing"

	"imp.dev/imp/internal/fault"
)

func TestAStageIsNotSaidTwiceInARow(t *testing.T) {
	cause := errors.New("no QEMU")
	driver := fault.Permanent(fault.New(fault.RuntimeStartFailed, "starting VMM", cause))
	for sentence, tc := range map[string]struct {
		err  error
		want string
	}{
		"the same stage again adds nothing": {fault.New(fault.Internal, "starting VMM", driver), "starting VMM: no QEMU"},
		"another stage comes before it":     {fault.New(fault.Internal, "carrying out step", driver), "carrying out step: starting VMM: no QEMU"},
	} {
		t.Run(sentence, func(t *testing.T) {
			f := fault.Of(tc.err)
			if f.Error() != tc.want {
				t.Errorf("it says %q, want %q", f, tc.want)
			}
			if f.Reason != fault.RuntimeStartFailed || !f.Permanent || !errors.Is(f, cause) {
				t.Errorf("reason, permanence or cause were lost: %+v", f)
			}
		})
	}
}
