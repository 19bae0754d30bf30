package firecracker

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"imp.dev/imp/internal/vmm/firecracker/fcfake"
)

// process starts a fake without a driver and gives a client of it.
func fakeProcess(t *testing.T, c fcfake.Config) *client {
	t.Helper()
	dir, err := os.MkdirTemp("", "fc") // a socket's path may have 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	binary, err := fakeBinary()
	if err == nil {
		err = fcfake.Make(binary, filepath.Join(dir, "firecracker"), c)
	}
	if err != nil {
		t.Fatal(err)
	}
	kernelFile(t, filepath.Join(dir, "kernel"))
	file(t, filepath.Join(dir, "disk0"), make([]byte, 512), 0o600)
	cmd := exec.Command(filepath.Join(dir, "firecracker"), "--api-sock", "api.sock", "--log-path", "log")
	cmd.Dir = dir
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	api := newClient(func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(dir, "api.sock"))
	})
	t.Cleanup(api.close)
	for deadline := time.Now().Add(waitTime); ; {
		conn, err := net.Dial("unix", filepath.Join(dir, "api.sock"))
		if err == nil {
			_ = conn.Close()
			return api
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// The fake refuses what Firecracker refuses, in its words: these are from a Firecracker 1.16.1 (TestRealRefusals compares).
func refusals() map[string]struct {
	calls []call
	want  string
} {
	type object = map[string]any
	put := func(path string, body any) call { return call{http.MethodPut, path, body} }
	kernel := put("/boot-source", object{"kernel_image_path": "kernel"})
	return map[string]struct {
		calls []call
		want  string
	}{
		"a path that is not there":           {[]call{put("/nothing", object{})}, "Invalid request method and/or path: PUT nothing."},
		"a method that a path does not have": {[]call{{http.MethodPatch, "/vsock", object{}}}, "Invalid request method and/or path: PATCH vsock."},
		"a field that is not known":          {[]call{put("/machine-config", object{"vcpu_count": 1, "mem_size_mib": 128, "vcpus": 1})}, "unknown field `vcpus`"},
		"a field that is missing":            {[]call{put("/machine-config", object{"vcpu_count": 1})}, "missing field `mem_size_mib`"},
		"a machine without a CPU":            {[]call{put("/machine-config", object{"vcpu_count": 0, "mem_size_mib": 128})}, "The vCPU number is invalid"},
		"a machine without memory":           {[]call{put("/machine-config", object{"vcpu_count": 1, "mem_size_mib": 0})}, "The memory size (MiB) is invalid"},
		"a kernel that is not there":         {[]call{put("/boot-source", object{"kernel_image_path": "no-kernel"})}, "The kernel file cannot be opened: No such file or directory"},
		"a disk whose IDs differ":            {[]call{put("/drives/a", object{"drive_id": "b", "is_root_device": false, "path_on_host": "disk0"})}, "The id from the path does not match the id from the body!"},
		"a disk with a hyphen":               {[]call{put("/drives/a-b", object{"drive_id": "a-b", "is_root_device": false, "path_on_host": "disk0"})}, "can only contain alphanumeric characters and underscores"},
		"a disk that is not there":           {[]call{put("/drives/a", object{"drive_id": "a", "is_root_device": false, "path_on_host": "no-disk"})}, "No such file or directory"},
		"a TAP that cannot be opened":        {[]call{put("/network-interfaces/a", object{"iface_id": "a", "host_dev_name": "a-name-that-is-too-long"})}, "Open tap device failed"},
		"a guest CID of the host":            {[]call{put("/vsock", object{"guest_cid": 2, "uds_path": "v.sock"})}, "Vsock config error"},
		"a vsock socket that is there":       {[]call{put("/vsock", object{"guest_cid": 3, "uds_path": "kernel"})}, "Error binding to the host-side Unix socket"},
		"a start without a kernel":           {[]call{put("/actions", action{actionStart})}, "Cannot start microvm without kernel configuration"},
		"an action that is none":             {[]call{put("/actions", object{"action_type": "Explode"})}, "unknown variant `Explode`"},
		"a pause before the start":           {[]call{kernel, {http.MethodPatch, "/vm", vmState{statePaused}}}, "not supported before starting the microVM"},
		"figures before the start":           {[]call{kernel, put("/actions", action{actionFlush})}, "not supported before starting the microVM"},
		"keys before the start":              {[]call{kernel, put("/actions", action{actionCtrlAltDel})}, "not supported before starting the microVM"},
		"an empty request":                   {[]call{put("/vsock", nil)}, "Empty PUT request."},
	}
}

func refused(t *testing.T, api *client, calls []call, want string) {
	t.Helper()
	for at, one := range calls {
		err := api.call(t.Context(), one)
		if at < len(calls)-1 {
			if err != nil {
				t.Fatal(err)
			}
			continue
		}
		e := (*Error)(nil)
		if !errors.As(err, &e) || e.Status != http.StatusBadRequest || !strings.Contains(e.Fault, want) {
			t.Errorf("got %v, want status 400 and %q", err, want)
		}
	}
}

func TestFakeRefusesWhatFirecrackerRefuses(t *testing.T) {
	for name, c := range refusals() {
		t.Run(name, func(t *testing.T) { refused(t, fakeProcess(t, fcfake.Config{}), c.calls, c.want) })
	}
	t.Run("a device after the start", func(t *testing.T) {
		api := fakeProcess(t, fcfake.Config{})
		refused(t, api, []call{
			{http.MethodPut, "/boot-source", bootSource{KernelImagePath: "kernel", BootArgs: "console=ttyS0"}},
			{http.MethodPut, "/actions", action{actionStart}},
			{http.MethodPut, "/vsock", vsockDevice{3, "v.sock"}},
		}, "not supported after starting the microVM")
	})
	t.Run("a field that a later release brought", func(t *testing.T) {
		nic := call{http.MethodPut, "/network-interfaces/a", map[string]any{"iface_id": "a", "host_dev_name": "a-name-that-is-too-long", "mtu": 1500}}
		refused(t, fakeProcess(t, fcfake.Config{Version: "1.15.1"}), []call{nic}, "unknown field `mtu`")
		refused(t, fakeProcess(t, fcfake.Config{Version: "1.16.1"}), []call{nic}, "Open tap device failed")
	})
}

func TestClient(t *testing.T) {
	t.Run("keeps to two connections however many ask", func(t *testing.T) {
		api := fakeProcess(t, fcfake.Config{SlowMillis: map[string]int64{"/": 20}})
		done := make(chan error, 40)
		for range cap(done) {
			go func() {
				_, err := api.describe(t.Context())
				done <- err
			}()
		}
		for range cap(done) {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	})
	t.Run("the eleventh connection is told that there are too many", func(t *testing.T) {
		api := fakeProcess(t, fcfake.Config{})
		dial := api.http.Transport.(*http.Transport).DialContext
		for range 10 {
			conn, err := dial(t.Context(), "", "")
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
		}
		for deadline := time.Now().Add(waitTime); ; { // until the server has accepted all ten
			_, err := api.describe(t.Context())
			if e := (*Error)(nil); errors.As(err, &e) && e.Status == http.StatusServiceUnavailable && strings.Contains(e.Fault, "Too many open connections") {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("got %v", err)
			}
		}
	})
	t.Run("gives up a request that takes too long", func(t *testing.T) {
		api := fakeProcess(t, fcfake.Config{SlowMillis: map[string]int64{"/": 60_000}})
		api.timeout = 100 * time.Millisecond
		began := time.Now()
		if _, err := api.describe(t.Context()); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "GET /: no answer within 100ms") {
			t.Errorf("got %v", err)
		}
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("it took %v", took)
		}
		if _, err := api.version(t.Context()); err != nil {
			t.Errorf("the next request: %v", err)
		}
	})
	t.Run("says of an answer that breaks off that it does", func(t *testing.T) {
		for _, c := range []fcfake.Config{{Cut: "/version"}, {Mute: "/version"}} {
			if _, err := fakeProcess(t, c).version(t.Context()); err == nil || !strings.Contains(err.Error(), "EOF") {
				t.Errorf("got %v", err)
			}
		}
	})
	t.Run("reads no more of an answer than an answer has", func(t *testing.T) {
		if _, err := fakeProcess(t, fcfake.Config{Huge: "/"}).describe(t.Context()); err == nil || !strings.Contains(err.Error(), "larger than") {
			t.Errorf("got %v", err)
		}
	})
}
