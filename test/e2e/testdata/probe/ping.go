package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"syscall"
	"time"
)

// ping ADDRESS COUNT EVERY-MS SIZE DF sends echo requests with SIZE bytes of data, DF with "don't fragment", and tells what came
// back within a second after the last: sent, received, the longest run of numbers that are missing, refused by the own system.
func ping(args []string) (string, error) {
	target := net.ParseIP(args[0])
	numbers := make([]int, 3)
	for i, word := range args[1:4] {
		var err error
		if numbers[i], err = strconv.Atoi(word); err != nil {
			return "", err
		}
	}
	count, every, size := numbers[0], time.Duration(numbers[1])*time.Millisecond, numbers[2]
	conn, err := net.ListenPacket("ip4:icmp", "0.0.0.0")
	if err != nil {
		return "", err
	}
	defer conn.Close()
	if args[4] == "df" {
		if err := dontFragment(conn.(*net.IPConn)); err != nil {
			return "", err
		}
	}
	id := uint16(os.Getpid()) ^ uint16(time.Now().UnixNano())
	got := make(chan map[uint16]bool)
	go func() { got <- replies(conn, id, count) }()
	refused := 0
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for seq := range count {
		if seq > 0 {
			<-ticker.C
		}
		if _, err := conn.WriteTo(echoRequest(id, uint16(seq), size), &net.IPAddr{IP: target}); err != nil {
			if !errors.Is(err, syscall.EMSGSIZE) {
				return "", err
			}
			refused++
		}
	}
	_ = conn.SetReadDeadline(time.Now().Add(time.Second))
	received := <-got
	gap, longest := 0, 0
	for seq := range count {
		gap++
		if received[uint16(seq)] {
			gap = 0
		}
		longest = max(longest, gap)
	}
	return fmt.Sprintf("sent=%d received=%d gap=%d refused=%d", count, len(received), longest, refused), nil
}

// replies collects the numbers that come back until all have or the deadline passes.
func replies(conn net.PacketConn, id uint16, count int) map[uint16]bool {
	received := map[uint16]bool{}
	buf := make([]byte, 65536)
	for len(received) < count {
		n, _, err := conn.ReadFrom(buf) // without the IP header
		if err != nil {
			break
		}
		if n >= 8 && buf[0] == 0 && binary.BigEndian.Uint16(buf[4:]) == id {
			received[binary.BigEndian.Uint16(buf[6:])] = true
		}
	}
	return received
}

func echoRequest(id, seq uint16, size int) []byte {
	packet := make([]byte, 8+size)
	packet[0] = 8
	binary.BigEndian.PutUint16(packet[4:], id)
	binary.BigEndian.PutUint16(packet[6:], seq)
	var sum uint32
	for i := 0; i+1 < len(packet); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(packet[i:]))
	}
	if len(packet)%2 == 1 {
		sum += uint32(packet[len(packet)-1]) << 8
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	binary.BigEndian.PutUint16(packet[2:], ^uint16(sum))
	return packet
}

func dontFragment(conn *net.IPConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		failed = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_IP, syscall.IP_MTU_DISCOVER, syscall.IP_PMTUDISC_DO)
	})
	return errors.Join(err, failed)
}
