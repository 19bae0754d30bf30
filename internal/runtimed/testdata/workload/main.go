// Command workload is what the real guests of the tests run.
package main

import (
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"
)

func main() {
	fmt.Println("workload begins")
	switch word := os.Args[1]; word {
	case "exit":
		code, _ := strconv.Atoi(os.Args[2])
		os.Exit(code)
	case "show":
		fmt.Printf("args=%q env=%q\n", os.Args[2:], os.Getenv("TRICKY"))
	case "count": // how often this private disk has been here, and then wait
		old, _ := os.ReadFile("/count")
		if err := os.WriteFile("/count", append(old, '+'), 0o600); err != nil {
			panic(err)
		}
		syscall.Sync()
		fmt.Printf("boots=%s+\n", old)
		wait()
	case "wait":
		wait()
	case "poweroff":
		_ = syscall.Reboot(syscall.LINUX_REBOOT_CMD_POWER_OFF)
	case "reboot":
		_ = syscall.Reboot(syscall.LINUX_REBOOT_CMD_RESTART)
	case "panic":
		_ = os.WriteFile("/proc/sysrq-trigger", []byte("c"), 0)
	}
}

// wait ends with 5 when it is asked to.
func wait() {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGTERM)
	<-c
	fmt.Println("asked to stop")
	os.Exit(5)
}
