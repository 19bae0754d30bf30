package build

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	"imp.dev/imp/internal/image/oci/flatten"
)

// message is one line of what a child says. Exactly one of the fields is set; Result or Error is the last.
type message struct {
	Progress *Progress `json:"progress,omitempty"`
	Result   *Result   `json:"result,omitempty"`
	Error    *failure  `json:"error,omitempty"`
}

// failure carries an error's kind over the pipe.
type failure struct {
	Kind string `json:"kind"` // refused, full, other
	Text string `json:"text"`
}

// Main is what a child process does: read an Order as JSON from stdin, run it, tell progress and result as lines of JSON on
// stdout. It gives the exit status: 0, or 1 after an error that was told.
func Main(ctx context.Context, stdin io.Reader, stdout io.Writer) int {
	say := json.NewEncoder(stdout)
	var order Order
	err := json.NewDecoder(stdin).Decode(&order)
	if err != nil {
		err = fmt.Errorf("reading order: %w", err)
	}
	var result Result
	if err == nil {
		result, err = Run(ctx, order, func(p Progress) { _ = say.Encode(message{Progress: &p}) })
	}
	if err == nil {
		err = say.Encode(message{Result: &result})
	} else {
		kind := "other"
		switch {
		case flatten.IsRefused(err):
			kind = "refused"
		case errors.Is(err, ErrReserve) || errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT):
			kind = "full"
		}
		_ = say.Encode(message{Error: &failure{Kind: kind, Text: err.Error()}})
	}
	if err != nil {
		return 1
	}
	return 0
}

// full is a child's full disk, in its own words.
type full struct{ text string }

func (f *full) Error() string { return f.text }

// Unwrap makes it ErrReserve for those who ask: to them the two are one.
func (f *full) Unwrap() error { return ErrReserve }

// Builder runs an order whose files are open in this process: layers[i] is Order.Layers[i], out is Order.Output. The files
// named in the order itself are not looked at. The caller closes the files afterwards.
type Builder func(ctx context.Context, order Order, layers []*os.File, out *os.File, progress func(Progress)) (Result, error)

// InProcess is the Builder without a child.
func InProcess(ctx context.Context, order Order, layers []*os.File, out *os.File, progress func(Progress)) (Result, error) {
	order.Layers = append([]Layer(nil), order.Layers...)
	for i, l := range layers {
		order.Layers[i].File = File{Path: l.Name()}
	}
	order.Output = File{Path: out.Name()}
	return Run(ctx, order, progress)
}

// Child is a Builder by a child process. start runs one that calls Main, with files as its descriptors from 3 on, and
// returns when it has ended; a cancelled ctx must end it. It is the caller's to give it a user, limits and a cgroup: measured,
// an image of 300 000 files takes 240 MiB of memory. Limits.MetadataBytes is what bounds hostile ones; their worst case under
// the default limits has not been measured.
func Child(start func(ctx context.Context, stdin io.Reader, stdout io.Writer, files []*os.File) error) Builder {
	return func(ctx context.Context, order Order, layers []*os.File, out *os.File, progress func(Progress)) (Result, error) {
		order.Layers = append([]Layer(nil), order.Layers...)
		files := append([]*os.File(nil), layers...)
		for i := range layers {
			order.Layers[i].File = File{FD: 3 + i}
		}
		order.Output = File{FD: 3 + len(files)}
		files = append(files, out)
		stdin, err := json.Marshal(order)
		if err != nil {
			return Result{}, fmt.Errorf("writing order: %w", err)
		}
		listener := &listener{progress: progress}
		ended := start(ctx, bytes.NewReader(stdin), listener, files)
		if err := ctx.Err(); err != nil {
			return Result{}, err
		}
		return listener.verdict(ended)
	}
}

// listener takes a child's lines apart as they come.
type listener struct {
	progress func(Progress)
	rest     []byte
	result   *Result
	failure  *failure
}

const longestLine = 64 << 10

// Write never fails: what the child says wrong is found at the end, when no result is there.
func (l *listener) Write(b []byte) (int, error) {
	l.rest = append(l.rest, b...)
	for {
		line, tail, found := bytes.Cut(l.rest, []byte("\n"))
		if !found {
			break
		}
		l.hear(line)
		l.rest = tail
	}
	if len(l.rest) > longestLine {
		l.rest = nil
	}
	return len(b), nil
}

func (l *listener) hear(line []byte) {
	var m message
	if json.Unmarshal(line, &m) != nil {
		return
	}
	switch {
	case m.Progress != nil && l.progress != nil:
		l.progress(*m.Progress)
	case m.Result != nil:
		l.result = m.Result
	case m.Error != nil:
		l.failure = m.Error
	}
}

// verdict makes the child's last words this process's error again.
func (l *listener) verdict(ended error) (Result, error) {
	switch {
	case l.failure != nil && l.failure.Kind == "refused":
		return Result{}, &flatten.Refused{Reason: l.failure.Text}
	case l.failure != nil && l.failure.Kind == "full":
		return Result{}, &full{l.failure.Text}
	case l.failure != nil:
		return Result{}, errors.New(l.failure.Text)
	case ended != nil:
		return Result{}, fmt.Errorf("running builder: %w", ended)
	case l.result == nil:
		return Result{}, errors.New("running builder: it ended without a result")
	}
	return *l.result, nil
}
