package guestinit

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	guestv1 "imp.dev/imp/api/guest/v1"
)

const (
	probeTimeout = time.Second // where the request gives none
	// maxInterim bounds the 1xx answers before the real one.
	maxInterim = 5
)

// probe makes one HTTP GET to a port of this machine. It is written out here because net/http would double the init, which lies in the
// guest's memory for good. Only the status line is of interest; a redirection counts as healthy and is not followed.
func probe(ctx context.Context, p guestv1.Probe) guestv1.ProbeResult {
	if p.Port < 1 || p.Port > 65535 {
		return guestv1.ProbeResult{Message: fmt.Sprintf("port %d is not between 1 and 65535", p.Port)}
	}
	timeout := time.Duration(p.TimeoutMillis) * time.Millisecond
	if timeout <= 0 {
		timeout = probeTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	status, err := get(ctx, net.JoinHostPort("127.0.0.1", strconv.Itoa(p.Port)), p.Path)
	switch {
	case err != nil && (ctx.Err() != nil || errors.Is(err, os.ErrDeadlineExceeded)):
		return guestv1.ProbeResult{Message: fmt.Sprintf("no answer from port %d within %s", p.Port, timeout)}
	case err != nil:
		return guestv1.ProbeResult{Message: err.Error()}
	case status < 200 || status > 399:
		return guestv1.ProbeResult{Status: status, Message: fmt.Sprintf("GET %s on port %d: status %d", requestTarget(p.Path), p.Port, status)}
	}
	return guestv1.ProbeResult{Healthy: true, Status: status}
}

// requestTarget makes what stands in a request line out of a path: it begins with a slash and holds no space or control character.
func requestTarget(path string) string {
	b := strings.Builder{}
	if !strings.HasPrefix(path, "/") {
		b.WriteByte('/')
	}
	for i := range len(path) {
		if c := path[i]; c <= ' ' || c >= 0x7f {
			fmt.Fprintf(&b, "%%%02X", c)
		} else {
			b.WriteByte(c)
		}
	}
	return b.String()
}

func get(ctx context.Context, address, path string) (status int, err error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	if deadline, ok := ctx.Deadline(); ok {
		_ = conn.SetDeadline(deadline)
	}
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	request := "GET " + requestTarget(path) + " HTTP/1.1\r\nHost: " + address + "\r\nUser-Agent: imp-probe/1\r\nAccept: */*\r\nConnection: close\r\n\r\n"
	if _, err := conn.Write([]byte(request)); err != nil {
		return 0, fmt.Errorf("sending request: %w", err)
	}
	return readStatus(bufio.NewReaderSize(conn, 16<<10))
}

// readStatus reads the status of the first answer that is not an interim one.
func readStatus(r *bufio.Reader) (int, error) {
	for range maxInterim {
		head, err := r.ReadString('\n')
		if err != nil {
			return 0, fmt.Errorf("reading answer: %w", err)
		}
		version, rest, _ := strings.Cut(strings.TrimRight(head, "\r\n"), " ")
		code, _, _ := strings.Cut(strings.TrimLeft(rest, " "), " ")
		status, err := strconv.Atoi(code)
		if !strings.HasPrefix(version, "HTTP/") || err != nil || status < 100 || status > 999 {
			return 0, fmt.Errorf("answer is not HTTP: %.40q", head)
		}
		if status >= 200 {
			return status, nil
		}
		for line := ""; line != "\r\n" && line != "\n"; {
			if line, err = r.ReadString('\n'); err != nil {
				return 0, fmt.Errorf("reading answer: %w", err)
			}
		}
	}
	return 0, errors.New("only interim answers")
}
