// Command probe is what tests run in a guest: it serves, and does from inside what it is asked to over HTTP, so that one boot
// answers many questions.
//
//	probe serve           TCP and UDP port 7: the hostname, then what was sent · TCP 7000: POST /run, GET /blob?bytes=N
//	probe COMMAND [ARG…]  one command, its answer on stdout
package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"
)

// patience bounds one attempt to reach something.
const patience = 2 * time.Second

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: probe serve | COMMAND [ARG…]")
		os.Exit(2)
	}
	if os.Args[1] == "serve" {
		fmt.Fprintln(os.Stderr, serve())
		os.Exit(1)
	}
	answer, err := run(os.Args[1], os.Args[2:])
	fmt.Println(answer)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// run carries out one command.
func run(command string, args []string) (string, error) {
	commands := map[string]struct {
		args int
		do   func([]string) (string, error)
	}{
		"tcp":    {1, func(a []string) (string, error) { return tcp(a[0]) }},
		"udp":    {2, func(a []string) (string, error) { return udp(a[0], a[1]) }},
		"shoot":  {2, func(a []string) (string, error) { return shoot(a[0], a[1]) }},
		"fetch":  {1, func(a []string) (string, error) { return fetch(a[0]) }},
		"ping":   {5, ping},
		"frames": {2, frames},
		"watch":  {2, watch},
		"look":   {0, look},
		"read":   {1, func(a []string) (string, error) { content, err := os.ReadFile(a[0]); return string(content), err }},
		"exec":   {1, program},
		"reboot": {0, reboot},
	}
	c, ok := commands[command]
	if !ok || len(args) < c.args {
		return "", fmt.Errorf("no command %q with %d arguments", command, len(args))
	}
	return c.do(args)
}

func serve() error {
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	stream, err := net.Listen("tcp", "0.0.0.0:7")
	if err != nil {
		return err
	}
	datagrams, err := net.ListenPacket("udp", "0.0.0.0:7")
	if err != nil {
		return err
	}
	go echo(stream, name)
	go echoPackets(datagrams, name)
	mux := http.NewServeMux()
	mux.HandleFunc("POST /run", serveRun)
	mux.HandleFunc("GET /blob", serveBlob)
	fmt.Println("probe serves")
	return http.ListenAndServe("0.0.0.0:7000", mux)
}

func echo(listener net.Listener, name string) {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		go func() {
			defer conn.Close()
			fmt.Fprintln(conn, name)
			_, _ = io.Copy(conn, conn)
		}()
	}
}

func echoPackets(conn net.PacketConn, name string) {
	buf := make([]byte, 65536)
	for {
		n, from, err := conn.ReadFrom(buf)
		if err != nil {
			return
		}
		_, _ = conn.WriteTo(append([]byte(name+" "), buf[:n]...), from)
	}
}

// Answer of POST /run, whose body is the words of a command.
type Answer struct{ Out, Err string }

func serveRun(w http.ResponseWriter, r *http.Request) {
	var words []string
	if err := json.NewDecoder(r.Body).Decode(&words); err != nil || len(words) == 0 {
		http.Error(w, "not a list of words", http.StatusBadRequest)
		return
	}
	answer := Answer{}
	out, err := run(words[0], words[1:])
	answer.Out = out
	if err != nil {
		answer.Err = err.Error()
	}
	_ = json.NewEncoder(w).Encode(answer)
}

// serveBlob sends bytes that whoever has the same generator can make, too.
func serveBlob(w http.ResponseWriter, r *http.Request) {
	n, err := strconv.ParseInt(r.URL.Query().Get("bytes"), 10, 64)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Length", strconv.FormatInt(n, 10))
	_, _ = io.CopyN(w, rand.NewChaCha8([32]byte{}), n)
}

func fetch(url string) (string, error) {
	began := time.Now()
	answer, err := http.Get(url)
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	sum := sha256.New()
	n, err := io.Copy(sum, answer.Body)
	return fmt.Sprintf("%d %s %d", n, hex.EncodeToString(sum.Sum(nil)), time.Since(began).Milliseconds()), err
}

// tcp gives the first line of who answers at address, or "open" from one that says nothing.
func tcp(address string) (string, error) {
	conn, err := net.DialTimeout("tcp4", address, patience)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(patience))
	buf := make([]byte, 256)
	n, err := conn.Read(buf)
	if n == 0 && err != nil {
		return "open", nil
	}
	return string(buf[:n]), nil
}

// udp sends words until it is answered, three times at most.
func udp(address, words string) (string, error) {
	conn, err := net.Dial("udp4", address)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	buf := make([]byte, 65536)
	for range 3 {
		if _, err = conn.Write([]byte(words)); err != nil {
			return "", err
		}
		_ = conn.SetDeadline(time.Now().Add(patience / 3))
		var n int
		if n, err = conn.Read(buf); err == nil {
			return string(buf[:n]), nil
		}
	}
	return "", err
}

// shoot sends one datagram with these bytes, in hexadecimal, and waits for nothing.
func shoot(address, bytes string) (string, error) {
	payload, err := hex.DecodeString(bytes)
	if err != nil {
		return "", err
	}
	conn, err := net.Dial("udp4", address)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	_, err = conn.Write(payload)
	return "", err
}

func program(args []string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, args[0], args[1:]...).CombinedOutput()
	return string(out), err
}

// reboot ends the guest at once, after the answer has had time to leave.
func reboot([]string) (string, error) {
	go func() {
		time.Sleep(200 * time.Millisecond)
		_ = syscall.Reboot(syscall.LINUX_REBOOT_CMD_RESTART)
	}()
	return "rebooting", nil
}
