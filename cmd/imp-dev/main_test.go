package main

import (
	"os"
	"os/exec"
	"syscall"
	"testing"
)

const asProgram = "IMP_DEV_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// Ctrl-C on "imp-dev up | tee log" ends tee as well: the line "removing the VMs" must not be imp-dev's last act.
func TestAReaderThatGoesAwayDoesNotKillTheServer(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	cmd := exec.Command(os.Args[0], "--help")
	cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), asProgram+"=1"), w, w
	_ = cmd.Run() // what counts is how it ended
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signaled() {
		t.Errorf("imp-dev that cannot write its output was killed: %v", cmd.ProcessState)
	}
}
