package machine

import (
	"strings"
	"testing"
	"time"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/network"
	"imp.dev/imp/internal/restart"
)

func valid() Spec {
	return Spec{
		ID: "0b1c", Namespace: "default", Name: "web.example", Assignment: 1, Generation: 1, Lifecycle: Persistent, Restart: restart.Default(),
		Image: Image{Reference: "docker.io/library/nginx:1", Policy: image.IfNotPresent}, VCPU: 1, MemoryMiB: 128, DiskGiB: 1,
		Workload:   Workload{Command: []string{"sh", "-c", "a 'b' \"c\" $d\n"}, Env: []EnvVar{{"A", "ü="}}, WorkingDir: "/srv", DataPaths: []string{"/var/lib"}},
		Interfaces: []network.Interface{{Name: "eth0", Network: "1c2d", MAC: "02:00:00:00:00:01", Addresses: []string{"10.0.0.2/24"}, Gateway: "10.0.0.1", MTU: 1400, Nameservers: []string{"10.0.0.53"}, SearchDomains: []string{"svc.local"}}},
		Probe:      &Probe{Path: "/healthz?a=b", Port: 80, Period: time.Second, Timeout: time.Second, FailureThreshold: 1},
	}
}

func TestValidate(t *testing.T) {
	if err := Validate(valid()); err != nil {
		t.Fatalf("a good spec is refused: %v", err)
	}
	ordered := valid()
	ordered.Halt, ordered.Reset, ordered.Cluster = &Halt{Reason: "Evacuated", Message: "node n1 is drained"}, "2026-05-01 é", "0b1c-9"
	ordered.Restart = restart.Policy{Mode: restart.Reschedule, InitialDelay: time.Second, MaxDelay: time.Minute, OnExhaustion: restart.CoolDown, CoolDown: time.Minute}
	if err := Validate(ordered); err != nil {
		t.Fatalf("a good spec with orders is refused: %v", err)
	}
	many := make([]string, 1000)
	for i := range many {
		many[i] = "/d"
	}
	for name, c := range map[string]struct {
		change func(*Spec)
		field  string
	}{
		"an id that climbs":                     {func(s *Spec) { s.ID = "../x" }, "id"},
		"an id with a slash":                    {func(s *Spec) { s.ID = "a/b" }, "id"},
		"an id of dots":                         {func(s *Spec) { s.ID = ".." }, "id"},
		"an empty id":                           {func(s *Spec) { s.ID = "" }, "id"},
		"an id with a newline at its end":       {func(s *Spec) { s.ID = "abc\n" }, "id"},
		"an id that is too long":                {func(s *Spec) { s.ID = strings.Repeat("a", 65) }, "id"},
		"a name with a newline":                 {func(s *Spec) { s.Name = "a\nb" }, "name"},
		"a namespace with a space":              {func(s *Spec) { s.Namespace = "a b" }, "namespace"},
		"no assignment":                         {func(s *Spec) { s.Assignment = 0 }, "assignment"},
		"a lifecycle nobody knows":              {func(s *Spec) { s.Lifecycle = "eternal" }, "lifecycle"},
		"no vCPU":                               {func(s *Spec) { s.VCPU = 0 }, "vcpu"},
		"too little memory":                     {func(s *Spec) { s.MemoryMiB = 127 }, "memoryMiB"},
		"memory that overflows":                 {func(s *Spec) { s.MemoryMiB = 1 << 62 }, "memoryMiB"},
		"a negative disk":                       {func(s *Spec) { s.DiskGiB = -1 }, "diskGiB"},
		"a negative grace":                      {func(s *Spec) { s.Grace = -1 }, "grace"},
		"no image":                              {func(s *Spec) { s.Image.Reference = "" }, "image"},
		"an image with a newline":               {func(s *Spec) { s.Image.Reference = "a\nb" }, "image"},
		"a pull policy nobody knows":            {func(s *Spec) { s.Image.Policy = "Sometimes" }, "imagePullPolicy"},
		"a digest that is a path":               {func(s *Spec) { s.Image.Digest = "sha256:../../etc" }, "digest"},
		"a zero byte in an argument":            {func(s *Spec) { s.Workload.Args = []string{"a\x00b"} }, "args[0]"},
		"a command that is not UTF-8":           {func(s *Spec) { s.Workload.Command = []string{"\xff"} }, "command[0]"},
		"a variable with an equals sign":        {func(s *Spec) { s.Workload.Env = []EnvVar{{"A=B", ""}} }, "env[0]"},
		"a variable without a name":             {func(s *Spec) { s.Workload.Env = []EnvVar{{"", "x"}} }, "env[0]"},
		"more environment than the kernel lets": {func(s *Spec) { s.Workload.Env = []EnvVar{{"A", strings.Repeat("x", MaxWorkloadBytes)}} }, "env"},
		"a relative working directory":          {func(s *Spec) { s.Workload.WorkingDir = "srv" }, "workingDir"},
		"a data path that climbs":               {func(s *Spec) { s.Workload.DataPaths = []string{"/a/../.."} }, "dataPaths[0]"},
		"the root as a data path":               {func(s *Spec) { s.Workload.DataPaths = []string{"/"} }, "dataPaths[0]"},
		"a thousand data paths":                 {func(s *Spec) { s.Workload.DataPaths = many }, "dataPaths"},
		"a MAC that is none":                    {func(s *Spec) { s.Interfaces[0].MAC = "x" }, "mac"},
		"the MAC of a group":                    {func(s *Spec) { s.Interfaces[0].MAC = "01:00:5e:00:00:01" }, "mac"},
		"two interfaces of one name":            {func(s *Spec) { s.Interfaces = append(s.Interfaces, s.Interfaces[0]) }, "interfaces[1].name"},
		"two interfaces of one MAC":             {func(s *Spec) { s.Interfaces = append(s.Interfaces, s.Interfaces[0]); s.Interfaces[1].Name = "b" }, "interfaces[1].mac"},
		"a network that climbs":                 {func(s *Spec) { s.Interfaces[0].Network = "../x" }, "network"},
		"an interface without a network":        {func(s *Spec) { s.Interfaces[0].Network = "" }, "network"},
		"an IPv6 address":                       {func(s *Spec) { s.Interfaces[0].Addresses = []string{"fd00::1/64"} }, "addresses[0]"},
		"a thousand addresses":                  {func(s *Spec) { s.Interfaces[0].Addresses = many }, "addresses"},
		"a gateway that is a group":             {func(s *Spec) { s.Interfaces[0].Gateway = "224.0.0.1" }, "gateway"},
		"a name server on the guest itself":     {func(s *Spec) { s.Interfaces[0].Nameservers = []string{"127.0.0.53"} }, "nameservers[0]"},
		"an MTU no packet fits":                 {func(s *Spec) { s.Interfaces[0].MTU = 100 }, "mtu"},
		"an address without a prefix":           {func(s *Spec) { s.Interfaces[0].Addresses = []string{"10.0.0.1"} }, "addresses[0]"},
		"a name server by name":                 {func(s *Spec) { s.Interfaces[0].Nameservers = []string{"dns"} }, "nameservers[0]"},
		"a search domain with a newline":        {func(s *Spec) { s.Interfaces[0].SearchDomains = []string{"a\nnameserver 1.2.3.4"} }, "searchDomains[0]"},
		"a probe of another host":               {func(s *Spec) { s.Probe.Path = "http://elsewhere/" }, "probe path"},
		"a probe that splits the request":       {func(s *Spec) { s.Probe.Path = "/ HTTP/1.1\r\nHost: x" }, "probe path"},
		"a probe in a hot loop":                 {func(s *Spec) { s.Probe.Period = time.Microsecond }, "probe period"},
		"a restart in a hot loop":               {func(s *Spec) { s.Restart.InitialDelay = time.Nanosecond }, "initialDelay"},
		"a maximum below the beginning":         {func(s *Spec) { s.Restart.MaxDelay = time.Second }, "maxDelay"},
		"a restart where nobody knows":          {func(s *Spec) { s.Restart.Mode = "somewhere" }, "mode"},
		"an exhaustion nobody knows":            {func(s *Spec) { s.Restart.OnExhaustion = "panic" }, "onExhaustion"},
		"a negative cool-down":                  {func(s *Spec) { s.Restart.CoolDown = -time.Hour }, "coolDown"},
		"a cool-down in a hot loop":             {func(s *Spec) { s.Restart.CoolDown = time.Nanosecond }, "coolDown"},
		"a reset with a newline":                {func(s *Spec) { s.Reset = "a\nb" }, "reset"},
		"a reset that is a book":                {func(s *Spec) { s.Reset = strings.Repeat("x", 254) }, "reset"},
		"a cluster that climbs":                 {func(s *Spec) { s.Cluster = "../x" }, "cluster"},
		"a halt without a reason":               {func(s *Spec) { s.Halt = &Halt{Message: "m"} }, "halt reason"},
		"a halt with a sentence for a reason":   {func(s *Spec) { s.Halt = &Halt{Reason: "By order."} }, "halt reason"},
		"a halt with a reason that is too long": {func(s *Spec) { s.Halt = &Halt{Reason: fault.Reason(strings.Repeat("A", 65))} }, "halt reason"},
		"a halt with a newline":                 {func(s *Spec) { s.Halt = &Halt{Reason: "Stopped", Message: "a\nb"} }, "halt message"},
		"a halt that is a book":                 {func(s *Spec) { s.Halt = &Halt{Reason: "Stopped", Message: strings.Repeat("x", 1025)} }, "halt message"},
		"a halt of a one-shot":                  {func(s *Spec) { s.Lifecycle, s.Halt = Ephemeral, &Halt{Reason: "Stopped"} }, "halt"},
		"a script that is not JSON":             {func(s *Spec) { s.Script = []byte("rm -rf /") }, "script"},
	} {
		t.Run(name+" is refused", func(t *testing.T) {
			s := valid()
			c.change(&s)
			err := Validate(s)
			if f := fault.Of(err); err == nil || f.Reason != fault.InvalidSpec || !f.Permanent || !strings.Contains(err.Error(), c.field) {
				t.Fatalf("got %v, want a permanent InvalidSpec that names %s", err, c.field)
			}
		})
	}
}

// FuzzValidate: whatever passes can be a path element and a line of a log.
func FuzzValidate(f *testing.F) {
	f.Add("0b1c", "default", "web", "nginx", "/healthz", "sha256:x", "/srv", "Stopped", "by order", "1", "0b1c")
	f.Add("..", "\x00", "a/b", "a b", "x\r\n", "", "../", "A b", "\x7f", "\n", "..")
	f.Fuzz(func(t *testing.T, id, namespace, name, reference, probe, digest, data, reason, message, reset, cluster string) {
		s := valid()
		s.ID, s.Namespace, s.Name, s.Image.Reference, s.Probe.Path, s.Image.Digest = id, namespace, name, reference, probe, digest
		s.Workload.DataPaths = []string{data}
		s.Halt, s.Reset, s.Cluster = &Halt{Reason: fault.Reason(reason), Message: message}, reset, cluster
		if Validate(s) != nil {
			return
		}
		if strings.ContainsAny(id, "/.\x00\n ") || id == "" || len(id) > 64 {
			t.Fatalf("id %q passed", id)
		}
		for _, v := range []string{namespace, name, reference, probe, digest, reason, message, reset, cluster} {
			if strings.ContainsAny(v, "\x00\n\r") {
				t.Fatalf("%q passed", v)
			}
		}
		if strings.ContainsAny(cluster+reason, "/. ") || len(message) > 1024 || len(reset) > 253 {
			t.Fatalf("%q %q %q %q passed", cluster, reason, message, reset)
		}
		if strings.Contains(namespace+"|"+name, "/") || !strings.HasPrefix(data, "/") || strings.Contains(data+"/", "/../") {
			t.Fatalf("%q %q %q passed", namespace, name, data)
		}
	})
}
