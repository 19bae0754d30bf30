package fcfake

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// States, as the API names them.
const (
	notStarted = "Not started"
	running    = "Running"
	paused     = "Paused"
)

const (
	beforeBoot = "The requested operation is not supported before starting the microVM."
	afterBoot  = "The requested operation is not supported after starting the microVM."
)

// machine is the fake's process.
type machine struct {
	config  Config
	id      string
	logFile *os.File
	metrics *os.File

	mu     sync.Mutex
	state  string
	source map[string]any // body of PUT /boot-source
	vsock  net.Listener
	drives int
	nics   int
	taps   []*os.File
	guest  *guest
}

// options of the command line, which is refused for anything else.
type options struct {
	id, apiSock, logPath, metricsPath string
}

func parseArgs(args []string) (options, error) {
	o := options{id: "anonymous-instance", apiSock: "/run/firecracker.socket"}
	ignored := ""
	values := map[string]*string{"--id": &o.id, "--api-sock": &o.apiSock, "--log-path": &o.logPath, "--metrics-path": &o.metricsPath, "--level": &ignored,
		"--start-time-us": &ignored, "--start-time-cpu-us": &ignored, "--parent-cpu-time-us": &ignored}
	for i := 0; i < len(args); i += 2 {
		value, ok := values[args[i]]
		if !ok {
			return o, fmt.Errorf("Found argument '%s' which wasn't expected, or isn't valid in this context.", args[i])
		}
		if i+1 == len(args) {
			return o, fmt.Errorf("The argument '%s' requires a value, but none was supplied.", args[i])
		}
		*value = args[i+1]
	}
	return o, nil
}

// run is the life of a fake Firecracker.
func run(c Config, args []string) int {
	if len(args) == 1 && args[0] == "--version" {
		fmt.Println("Firecracker v" + c.version() + "\n")
		return 0
	}
	o, err := parseArgs(args)
	if err != nil {
		fmt.Fprintf(os.Stderr, "Arguments parsing error: %v\n\nFor more information try --help.\n", err)
		return 153
	}
	m := &machine{config: c, id: o.id, state: notStarted, logFile: os.Stdout}
	open := func(path string) *os.File {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600) // not appended to, as the real one
		if err != nil {
			m.giveUp(1, "Could not initialize logger: Failed to open target file: %v", err)
		}
		return f
	}
	if o.logPath != "" {
		m.logFile = open(o.logPath)
	}
	if o.metricsPath != "" {
		m.metrics = open(o.metricsPath)
	}
	m.log("Running Firecracker v%s", c.version())
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	go func() {
		<-hup
		m.log("Shutting down VM after intercepting signal 1, code 0.")
		os.Exit(156)
	}()
	if c.Panic != "" {
		m.log("Firecracker panicked at src/fake.rs:1:1: %s", c.Panic)
		_ = syscall.Kill(os.Getpid(), syscall.SIGABRT)
	}
	if c.NoSocket {
		select {}
	}
	l, err := net.Listen("unix", o.apiSock)
	if err != nil {
		m.giveUp(1, "RunWithApi error: Failed to open the API socket at: %s. Check that it is not already used.", o.apiSock)
	}
	m.serve(l)
	return 1
}

func (m *machine) log(format string, args ...any) {
	fmt.Fprintf(m.logFile, "%s [%s:main] %s\n", time.Now().Format("2006-01-02T15:04:05.000000000"), m.id, fmt.Sprintf(format, args...))
}

// giveUp ends the process as an error of Firecracker's own does.
func (m *machine) giveUp(code int, format string, args ...any) {
	m.exit(code, fmt.Sprintf(format, args...))
}

func (m *machine) exit(code int, words string) {
	if m.metrics != nil {
		m.writeMetrics()
	}
	if code == 0 {
		m.log("Vmm is stopping.")
		m.log("Firecracker exiting successfully. exit_code=0")
		os.Exit(0)
	}
	if words != "" {
		m.log("%s", words)
	}
	m.log("Firecracker exiting with error. exit_code=%d", code)
	os.Exit(code)
}

func (m *machine) writeMetrics() {
	// Deltas since the last line: the same each time.
	_ = json.NewEncoder(m.metrics).Encode(map[string]any{
		"utc_timestamp_ms": time.Now().UnixMilli(),
		"vcpu":             map[string]int{"exit_io_in": 1, "exit_io_out": 2, "exit_mmio_read": 3, "exit_mmio_write": 4, "failures": 0},
		"block":            map[string]int{"read_bytes": 512, "write_bytes": 1024, "rate_limiter_throttled_events": 1, "io_engine_throttled_events": 0},
		"net":              map[string]int{"rx_bytes_count": 60, "tx_bytes_count": 120, "rx_rate_limiter_throttled": 2, "tx_rate_limiter_throttled": 3},
	})
}

func (m *machine) minor() int {
	var major, minor int
	_, _ = fmt.Sscanf(m.config.version(), "%d.%d", &major, &minor)
	return minor
}

// obey carries out a request whose body is as it must be.
func (m *machine) obey(what string, body map[string]any) *refusal {
	switch what {
	case "actions":
		return m.act(body["action_type"])
	case "vm":
		return m.setState(body["state"])
	}
	if m.state != notStarted {
		return bad(afterBoot)
	}
	switch what {
	case "machine-config":
		return checkMachine(body)
	case "boot-source":
		return m.setSource(body)
	case "drives":
		return m.addDrive(body)
	case "network-interfaces":
		return m.addNIC(body)
	case "vsock":
		return m.setVsock(body)
	}
	return nil
}

func checkMachine(body map[string]any) *refusal {
	vcpu, _ := body["vcpu_count"].(float64)
	if vcpu < 1 || vcpu > 32 {
		return bad("Machine config error: The vCPU number is invalid! The vCPU number can only be 1 or an even number when SMT is enabled.")
	}
	if mem, _ := body["mem_size_mib"].(float64); mem < 1 {
		return bad("Machine config error: The memory size (MiB) is invalid.")
	}
	return nil
}

func (m *machine) setSource(body map[string]any) *refusal {
	for key, words := range map[string]string{"kernel_image_path": "The kernel file cannot be opened: %v", "initrd_path": "The initrd file cannot be opened due to invalid path or invalid permissions. %v"} {
		path, _ := body[key].(string)
		if path == "" {
			continue
		}
		f, err := os.Open(path)
		if err != nil {
			return bad("Boot source error: "+words, osWords(err))
		}
		_ = f.Close()
	}
	args, _ := body["boot_args"].(string)
	if len(args) > 2047 {
		return bad("Boot source error: The kernel command line is invalid: The command line string is larger than the capacity")
	}
	if _, err := guestOf(args); err != nil {
		return bad("Boot source error: %v", err)
	}
	m.source = body
	return nil
}

// osWords are an error of the system in Rust's words.
func osWords(err error) string {
	var no syscall.Errno
	if !errors.As(err, &no) {
		return err.Error()
	}
	words := no.Error()
	return fmt.Sprintf("%s%s (os error %d)", strings.ToUpper(words[:1]), words[1:], int(no))
}

func (m *machine) addDrive(body map[string]any) *refusal {
	path, _ := body["path_on_host"].(string)
	flags := os.O_RDWR
	if readOnly, _ := body["is_read_only"].(bool); readOnly {
		flags = os.O_RDONLY
	}
	f, err := os.OpenFile(path, flags, 0)
	if err != nil {
		return bad("Drive config error: Unable to create the virtio block device: Virtio backend error: Error manipulating the backing file: %s %s", osWords(err), path)
	}
	_ = f.Close()
	m.drives++
	return nil
}

// addNIC opens the TAP for good, as the real one does. It must be there.
func (m *machine) addNIC(body map[string]any) *refusal {
	name, _ := body["host_dev_name"].(string)
	fail := func(err error) *refusal {
		return bad("Network config error: Could not create the network device: Open tap device failed: Error while creating ifreq structure: %v. Invalid TUN/TAP Backend provided by %s. Check our documentation on setting up the network devices.", err, name)
	}
	request, err := unix.NewIfreq(name)
	if err != nil {
		return fail(err)
	}
	request.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	f, err := os.OpenFile("/dev/net/tun", os.O_RDWR, 0)
	if err != nil {
		return fail(err)
	}
	if err := unix.IoctlIfreq(int(f.Fd()), unix.TUNSETIFF, request); err != nil {
		_ = f.Close()
		return fail(err)
	}
	m.taps = append(m.taps, f)
	m.nics++
	return nil
}

func (m *machine) setVsock(body map[string]any) *refusal {
	if cid, _ := body["guest_cid"].(float64); cid < 3 {
		return bad("Vsock config error: Cannot create vsock device: guest CID %v", cid)
	}
	path, _ := body["uds_path"].(string)
	l, err := net.Listen("unix", path)
	if err != nil {
		return bad("Vsock config error: Cannot create backend for vsock device: Error binding to the host-side Unix socket: %v", err)
	}
	m.vsock = l
	return nil
}

func (m *machine) setState(state any) *refusal {
	if m.state == notStarted {
		return bad(beforeBoot)
	}
	switch state {
	case "Paused":
		m.state = paused
	case "Resumed":
		m.state = running
	default:
		return bad(serde+"unknown variant `%v`, expected `Paused` or `Resumed` at line 1 column 1.", state)
	}
	m.guest.pause(m.state == paused)
	return nil
}

func (m *machine) act(what any) *refusal {
	switch what {
	case "InstanceStart":
		if m.state != notStarted {
			return bad(afterBoot)
		}
		return m.start()
	case "FlushMetrics":
		if m.state == notStarted {
			return bad(beforeBoot)
		}
		if m.metrics != nil {
			m.writeMetrics()
		}
		return nil
	case "SendCtrlAltDel":
		if m.state == notStarted {
			return bad(beforeBoot)
		}
		m.guest.keys()
		return nil
	}
	return bad(serde+"unknown variant `%v`, expected one of `FlushMetrics`, `InstanceStart`, `SendCtrlAltDel` at line 1 column 1.", what)
}

func (m *machine) start() *refusal {
	if m.source == nil {
		return bad("Start microvm error: Cannot start microvm without kernel configuration.")
	}
	args, _ := m.source["boot_args"].(string)
	behaviour, err := guestOf(args)
	if err != nil {
		return bad("Start microvm error: %v", err)
	}
	m.state = running
	m.guest = newGuest(m, behaviour)
	if !strings.Contains(args, "console=ttyS0") {
		m.guest.silent = true
	}
	go m.guest.run(context.Background())
	return nil
}
