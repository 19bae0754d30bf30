package relay

import (
	"bufio"
	"errors"
	"net"
	"os"
	"testing"
	"time"
)

// echo is a server that gives back each line.
func echo(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				lines := bufio.NewScanner(c)
				for lines.Scan() {
					if _, err := c.Write([]byte(lines.Text() + "\n")); err != nil {
						return
					}
				}
			}()
		}
	}()
	return l.Addr().String()
}

func start(t *testing.T) *Relay {
	t.Helper()
	r, err := Listen(echo(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return r
}

func dial(t *testing.T, r *Relay) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", r.Address())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// ask sends a line and waits for it.
func ask(c net.Conn, within time.Duration) error {
	if _, err := c.Write([]byte("hello\n")); err != nil {
		return err
	}
	_ = c.SetReadDeadline(time.Now().Add(within))
	_, err := bufio.NewReader(c).ReadString('\n')
	return err
}

func TestARelayPassesBytes(t *testing.T) {
	if err := ask(dial(t, start(t)), 5*time.Second); err != nil {
		t.Fatal(err)
	}
}

func TestARelayThatRefusesCutsOldConnectionsAndTakesNoNewOnes(t *testing.T) {
	r := start(t)
	old := dial(t, r)
	if err := ask(old, 5*time.Second); err != nil {
		t.Fatal(err)
	}
	r.Set(Refuse)
	if err := ask(old, 5*time.Second); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the old connection: %v, want it cut", err)
	}
	if err := ask(dial(t, r), 5*time.Second); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a new connection: %v, want it cut", err)
	}
	r.Set(Pass)
	if err := ask(dial(t, r), 5*time.Second); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

func TestARelayThatHangsPassesNothingAndTellsNobody(t *testing.T) {
	r := start(t)
	old := dial(t, r)
	if err := ask(old, 5*time.Second); err != nil {
		t.Fatal(err)
	}
	r.Set(Hang)
	for name, c := range map[string]net.Conn{"old": old, "new": dial(t, r)} {
		if err := ask(c, 100*time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("the %s connection: %v, want silence", name, err)
		}
	}
	r.Set(Pass)
	if err := ask(dial(t, r), 5*time.Second); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}
