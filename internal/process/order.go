package process

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"syscall"
)

// ChildCommand is the first argument of a re-exec that shall become a launcher child. A main that launches programs looks for
// it before anything else and calls ChildMain.
const ChildCommand = "launch-child"

// selfExe is the running binary, also where its file has been replaced or is of another mount namespace.
const selfExe = "/proc/self/exe"

// childOrder is what travels to the child: the Order and what only RunSandboxed may ask for.
type childOrder struct {
	Order
	// Umask of the program.
	Umask int `json:"umask"`
	// MaxAddressSpace is RLIMIT_AS in bytes, 0 for none.
	MaxAddressSpace uint64 `json:"maxAddressSpace,omitempty"`
	// NetNSFD is the descriptor of Order.NetNS, 0 for none.
	NetNSFD int `json:"netNSFD,omitempty"`
	// KeepParentDeathSignal arranges for SIGKILL when the parent's thread ends. Changing uid clears the signal, so it is set again.
	KeepParentDeathSignal bool `json:"parentDeathSignal,omitempty"`
}

// childReport is the child's answer on its status descriptor: a failing step, or Executing right before the exec. The
// descriptor is closed by the exec, so Executing and then the end of the stream means that the program runs.
type childReport struct {
	Executing bool   `json:"executing,omitempty"`
	Step      string `json:"step,omitempty"`
	Err       string `json:"err,omitempty"`
	Errno     int    `json:"errno,omitempty"`
}

// stepError is a launcher child's failure: which step, and the errno behind it for errors.Is.
type stepError struct {
	step, text string
	errno      syscall.Errno
}

func (e *stepError) Error() string { return e.step + ": " + e.text }

func (e *stepError) Unwrap() error {
	if e.errno == 0 {
		return nil
	}
	return e.errno
}

// pendingChild is a child command with its two pipes: the order goes in, the report comes out.
type pendingChild struct {
	cmd         *exec.Cmd
	order       []byte
	orderWrite  *os.File
	statusRead  *os.File
	childsFiles []*os.File // the child's ends, closed once it has them
}

// prepareChild makes the command. Descriptors of the child: 3.. are o.Files, then the order, the status, and a network namespace if there is one.
func prepareChild(exe string, o childOrder) (*pendingChild, error) {
	if o.NetNS != nil {
		o.NetNSFD = 5 + len(o.Files)
	}
	body, err := json.Marshal(o)
	if err != nil {
		return nil, fmt.Errorf("encoding order: %w", err)
	}
	orderRead, orderWrite, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("making order pipe: %w", err)
	}
	statusRead, statusWrite, err := os.Pipe()
	if err != nil {
		_ = orderRead.Close()
		_ = orderWrite.Close()
		return nil, fmt.Errorf("making status pipe: %w", err)
	}
	if exe == "" {
		exe = selfExe
	}
	// GOMAXPROCS: the child is single-minded; fewer threads make it quicker to start.
	cmd := &exec.Cmd{Path: exe, Args: []string{"imp-launch", ChildCommand, strconv.Itoa(len(o.Files))}, Env: []string{"GOMAXPROCS=1"}, Dir: "/"}
	cmd.ExtraFiles = append(append([]*os.File{}, o.Files...), orderRead, statusWrite)
	if o.NetNS != nil {
		cmd.ExtraFiles = append(cmd.ExtraFiles, o.NetNS)
	}
	return &pendingChild{cmd: cmd, order: body, orderWrite: orderWrite, statusRead: statusRead,
		childsFiles: []*os.File{orderRead, statusWrite}}, nil
}

// close releases whatever start or report have not released.
func (p *pendingChild) close() {
	for _, f := range append(p.childsFiles, p.orderWrite, p.statusRead) {
		_ = f.Close()
	}
}

// start forks the child and sends the order in the background.
func (p *pendingChild) start() error {
	if err := p.cmd.Start(); err != nil {
		return fmt.Errorf("starting launcher child %s: %w", p.cmd.Path, err)
	}
	for _, f := range p.childsFiles {
		_ = f.Close()
	}
	go func() {
		_, _ = p.orderWrite.Write(p.order) // a child that died first is seen by report
		_ = p.orderWrite.Close()
	}()
	return nil
}

// report waits for the exec or the failing step. Killing the child ends the wait.
func (p *pendingChild) report() error {
	var r childReport
	dec := json.NewDecoder(p.statusRead)
	executing := false
	for {
		r = childReport{}
		err := dec.Decode(&r)
		switch {
		case errors.Is(err, io.EOF) && executing:
			return nil
		case err != nil:
			return errors.New("launching: the launcher child died before executing the program")
		case r.Executing:
			executing = true
		default:
			return &stepError{step: r.Step, text: r.Err, errno: syscall.Errno(r.Errno)}
		}
	}
}
