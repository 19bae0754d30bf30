package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/devserver"
	"imp.dev/imp/internal/devserver/fabric"
	"imp.dev/imp/internal/devserver/imagefile"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// guestMTU is what is left for guests of the nodes' links (fabric.MTU) when the overlay has taken its own.
const guestMTU = fabric.MTU - 50

// probeImage is the image that guests of networks run: testdata/probe, testdata/resolve with two C libraries, and nothing else.
const probeImage = "probe:1"

func (c *cluster) pushProbe(t *testing.T) {
	t.Helper()
	root := t.TempDir()
	compile(t, []string{"go", "build", "-trimpath", "-ldflags=-s -w", "-o", filepath.Join(root, "probe"), "./testdata/probe"})
	compile(t, []string{"musl-gcc", "-O1", "-static", "-o", filepath.Join(root, "resolve-musl"), "testdata/resolve/resolve.c"})
	compile(t, []string{"gcc", "-O1", "-o", filepath.Join(root, "resolve-glibc"), "testdata/resolve/resolve.c"})
	for library, dir := range map[string]string{"libc.so.6": "lib/x86_64-linux-gnu", "ld-linux-x86-64.so.2": "lib64"} {
		path := strings.TrimSpace(compile(t, []string{"gcc", "-print-file-name=" + library}))
		content, err := os.ReadFile(path)
		must(t, err)
		must(t, os.MkdirAll(filepath.Join(root, dir), 0o755))
		must(t, os.WriteFile(filepath.Join(root, dir, library), content, 0o755))
	}
	loaded, err := imagefile.Load(root, imagefile.Config{Entrypoint: []string{"/probe"}, Cmd: []string{"serve"}})
	must(t, err)
	c.push(t, loaded, probeImage)
}

// compile runs a compiler, which hack/deps.sh installs.
func compile(t *testing.T, words []string) string {
	t.Helper()
	if _, err := exec.LookPath(words[0]); err != nil {
		lacking(t, "needs %s to build what guests run: %v", words[0], err)
	}
	command := exec.Command(words[0], words[1:]...)
	command.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := command.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(words, " "), err, out)
	}
	return string(out)
}

// network makes one and waits until it can be used.
func (c *cluster) network(t *testing.T, namespace, name, subnet string, change ...func(*v1alpha1.ImpNetwork)) *v1alpha1.ImpNetwork {
	t.Helper()
	n := &v1alpha1.ImpNetwork{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec:       v1alpha1.ImpNetworkSpec{Subnet: subnet},
	}
	for _, f := range change {
		f(n)
	}
	must(t, c.client.Create(t.Context(), n))
	if !eventually(t.Context(), soon, func() bool {
		must(t, c.client.Get(t.Context(), client.ObjectKeyFromObject(n), n))
		return meta.IsStatusConditionTrue(n.Status.Conditions, v1alpha1.ConditionReady)
	}) {
		t.Fatalf("network %s is not usable: %+v", name, n.Status)
	}
	return n
}

func nat(n *v1alpha1.ImpNetwork) { n.Spec.NAT.Enabled = true }

// guest is a VM that runs the probe.
type guest struct {
	c       *cluster
	network *v1alpha1.ImpNetwork
	vm      *v1alpha1.ImpVM
}

// startGuest creates a persistent VM on a node, with a static address or "" for any. It does not wait.
func (c *cluster) startGuest(t *testing.T, n *v1alpha1.ImpNetwork, name, node, address string) *guest {
	t.Helper()
	vm := c.vm(n.Namespace, name, persistent, grace(0), image(c.server.Registry+"/"+probeImage), func(vm *v1alpha1.ImpVM) {
		vm.Spec.Command, vm.Spec.NodeName, vm.Spec.Address = nil, node, address
		vm.Spec.NetworkRef = &v1alpha1.NetworkReference{Name: n.Name}
	})
	return &guest{c: c, network: n, vm: c.create(t, vm)}
}

// await waits until the guest answers, and keeps the VM as it is then.
func (g *guest) await(t *testing.T) *guest {
	t.Helper()
	g.vm = g.c.await(t, g.vm, booting, "Ready", ready)
	if !eventually(t.Context(), soon, func() bool { _, err := g.ask(t, "look"); return err == nil }) {
		_, err := g.ask(t, "look")
		t.Fatalf("%s does not answer: %v\n%s\n%s", g.vm.Name, err, describe(g.vm), g.c.console(t, g.vm))
	}
	return g
}

// gone deletes the VM and waits until its object has gone.
func (g *guest) gone(t *testing.T) {
	t.Helper()
	must(t, g.c.client.Delete(t.Context(), g.vm))
	g.c.awaitGone(t, g.vm, soon)
	g.c.nothingLeft(t, g.vm)
}

func (g *guest) ip() string { return g.vm.Status.IP }

func (g *guest) mac(t *testing.T) net.HardwareAddr {
	t.Helper()
	mac, err := net.ParseMAC(g.look(t).MAC)
	must(t, err)
	return mac
}

// host is the namespace of the node that the guest is on.
func (g *guest) host() fabric.Host { return g.c.server.Fabric().Node(g.vm.Status.NodeName) }

// ask has the guest's probe carry out a command. It goes by the network's own namespace, as from the gateway: what is between guests,
// node and outside is what tests are about.
func (g *guest) ask(t *testing.T, words ...string) (string, error) {
	t.Helper()
	inside := g.c.server.NetworkNamespace(g.vm.Status.NodeName, string(g.network.UID))
	body, err := json.Marshal(words)
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+net.JoinHostPort(g.ip(), "7000")+"/run", bytes.NewReader(body))
	must(t, err)
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		return inside.Dial(ctx, network, address)
	}}
	answer, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return "", fmt.Errorf("asking %s: %w", g.vm.Name, err)
	}
	defer answer.Body.Close()
	content, err := io.ReadAll(answer.Body)
	if err != nil {
		return "", fmt.Errorf("asking %s: %w", g.vm.Name, err)
	}
	said := struct{ Out, Err string }{}
	if err := json.Unmarshal(content, &said); err != nil {
		return "", fmt.Errorf("asking %s: %w: %s", g.vm.Name, err, content)
	}
	if said.Err != "" {
		return said.Out, errors.New(said.Err)
	}
	return said.Out, nil
}

// tell is ask where no error is expected.
func (g *guest) tell(t *testing.T, words ...string) string {
	t.Helper()
	out, err := g.ask(t, words...)
	if err != nil {
		t.Fatalf("%s: %s: %v %s", g.vm.Name, clipped(words), err, out)
	}
	return out
}

func clipped(words []string) string {
	text := strings.Join(words, " ")
	return text[:min(len(text), 120)]
}

// sight is what the probe's look finds.
type sight struct {
	Hostname, MAC                 string
	MTU                           int
	Addresses, Routes, Neighbours []string
	Links                         []string
	Resolv                        string
}

func (g *guest) look(t *testing.T) sight {
	t.Helper()
	s := sight{}
	must(t, json.Unmarshal([]byte(g.tell(t, "look")), &s))
	return s
}

// echoes is the outcome of a ping: how many were sent and came back, how many in a row did not, how many the guest's own kernel
// refused to send.
type echoes struct{ sent, received, gap, refused int }

func (e echoes) String() string {
	return fmt.Sprintf("%d of %d pings came back, at most %d in a row were lost, %d were too large to be sent", e.received, e.sent, e.gap, e.refused)
}

func (g *guest) ping(t *testing.T, to string, count int, every time.Duration, size int) echoes {
	t.Helper()
	return readEchoes(t, g.tell(t, pingWords(to, count, every, size)...))
}

func pingWords(to string, count int, every time.Duration, size int) []string {
	return []string{"ping", to, strconv.Itoa(count), strconv.FormatInt(every.Milliseconds(), 10), strconv.Itoa(size), "df"}
}

func readEchoes(t *testing.T, out string) (e echoes) {
	t.Helper()
	if _, err := fmt.Sscanf(out, "sent=%d received=%d gap=%d refused=%d", &e.sent, &e.received, &e.gap, &e.refused); err != nil {
		t.Fatalf("reading %q: %v", out, err)
	}
	return e
}

// reaches fails the test unless every one of a few pings is answered, and a connection by the right guest.
func (g *guest) reaches(t *testing.T, other *guest) {
	t.Helper()
	if e := g.ping(t, other.ip(), 5, 20*time.Millisecond, 56); e.received != e.sent {
		t.Errorf("%s → %s: %s", g.vm.Name, other.vm.Name, e)
	}
	if out, err := g.ask(t, "tcp", net.JoinHostPort(other.ip(), "7")); err != nil || strings.TrimSpace(out) != other.vm.Name {
		t.Errorf("%s → %s: %q answers by TCP (%v)", g.vm.Name, other.vm.Name, out, err)
	}
}

// later carries out a command beside what the test does, and gives its outcome when asked.
func (g *guest) later(t *testing.T, words ...string) func() string {
	t.Helper()
	type outcome struct {
		out string
		err error
	}
	done := make(chan outcome, 1)
	go func() { out, err := g.ask(t, words...); done <- outcome{out, err} }()
	return func() string {
		t.Helper()
		o := <-done
		if o.err != nil {
			t.Fatalf("%s: %s: %v %s", g.vm.Name, clipped(words), o.err, o.out)
		}
		return o.out
	}
}

// awaitNetwork looks at a network until it is as the words say.
func (c *cluster) awaitNetwork(t *testing.T, n *v1alpha1.ImpNetwork, within time.Duration, words string, is func(*v1alpha1.ImpNetwork) bool) *v1alpha1.ImpNetwork {
	t.Helper()
	now := &v1alpha1.ImpNetwork{}
	if !eventually(t.Context(), within, func() bool {
		must(t, c.client.Get(t.Context(), client.ObjectKeyFromObject(n), now))
		return is(now)
	}) {
		t.Fatalf("network %s is not %s after %s: %+v", n.Name, words, within, now.Status)
	}
	return now
}

// claims of a network, by address.
func (c *cluster) claims(t *testing.T, network types.UID) map[string]v1alpha1.ImpAddress {
	t.Helper()
	list := &v1alpha1.ImpAddressList{}
	must(t, c.client.List(t.Context(), list))
	found := map[string]v1alpha1.ImpAddress{}
	for _, a := range list.Items {
		if a.Spec.Network.UID == network {
			found[a.Spec.Address] = a
		}
	}
	return found
}

// dropped is how many frames of a VM were not its to send, by its runtime's metrics.
func (c *cluster) dropped(t *testing.T, vm *v1alpha1.ImpVM) int {
	t.Helper()
	answer, err := http.Get("http://" + c.server.Metrics(devserver.Runtime, vm.Status.NodeName) + "/metrics")
	must(t, err)
	defer answer.Body.Close()
	page, err := io.ReadAll(answer.Body)
	must(t, err)
	for line := range strings.Lines(string(page)) {
		labels, value, ok := strings.Cut(line, "} ")
		if ok && strings.HasPrefix(labels, "imp_vm_network_dropped_packets_total{") && strings.Contains(labels, string(vm.UID)) {
			n, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			must(t, err)
			return int(n)
		}
	}
	t.Fatalf("no imp_vm_network_dropped_packets_total of %s in the metrics of %s", vm.UID, vm.Status.NodeName)
	return 0
}
