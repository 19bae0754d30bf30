package guestinit_test

import (
	"strings"
	"testing"

	guestv1 "imp.dev/imp/api/guest/v1"
)

func TestAShellPrintsAndSucceeds(t *testing.T) {
	l := needLab(t)
	e, out, v := l.once(t, guestv1.Configure{}, shell("echo hello; mount; cat /etc/hosts; ls -la / /dev /run; cat /proc/meminfo | head -3"))
	if e.Code != 0 || !strings.Contains(out, "hello\n") {
		t.Errorf("exit %+v, output %q", e, out)
	}
	if !strings.Contains(v.log(), "\nIMP_SUCCESS id=n0nce\n") {
		t.Error("no marker on the console")
	}
	t.Log(out)
}
