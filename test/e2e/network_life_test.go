package e2e

import (
	"fmt"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/devserver"
	"imp.dev/imp/internal/devserver/controlplane"
	"imp.dev/imp/internal/devserver/fabric"

	"github.com/google/nftables"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// quarantine is how long an address is kept from use after its VM, with what a busy machine takes to see that it is over.
const quarantine = 75 * time.Second

// handOver takes the address of a guest that the others know, and the only one of a network, from their owners; others want them.
func (m *mesh) handOver(t *testing.T) {
	for _, g := range []*guest{m.ann, m.ben, m.cat} {
		g.reaches(t, m.former) // so that it is in every cache that there is
	}
	m.tight = m.cluster.network(t, m.ns, "tight", "10.64.0.0/30")
	first := m.startGuest(t, m.tight, "first", "node-1", "").await(t)
	if first.ip() != "10.64.0.2" {
		t.Errorf("the only guest of a /30 has %s", first.ip())
	}
	m.second = m.startGuest(t, m.tight, "second", "node-3", "")
	waits := func(g *guest, words ...string) {
		t.Helper()
		now := m.await(t, g.vm, soon, "waiting for an address", reason(v1alpha1.ReasonNetworkSetupFailed))
		for _, w := range words {
			if message := condition(now, v1alpha1.ConditionReady).Message; !strings.Contains(message, w) {
				t.Errorf("%s waits, but does not say %q: %s", g.vm.Name, w, message)
			}
		}
		if now.Status.NodeName != "" {
			t.Errorf("%s is placed without an address: %s", g.vm.Name, describe(now))
		}
	}
	waits(m.second, "tight", "1 of 1")
	first.gone(t)
	m.former.gone(t)
	m.heir = m.startGuest(t, m.network, "heir", "node-2", m.formerAddress)
	waits(m.heir, m.formerAddress)
	if claim := m.claims(t, m.network.UID)[m.formerAddress]; claim.Status.State != v1alpha1.AddressQuarantined {
		t.Errorf("the address of a VM that has just gone is %q, want it quarantined", claim.Status.State)
	}
	now := m.awaitNetwork(t, m.tight, soon, "counting its quarantined address", func(n *v1alpha1.ImpNetwork) bool { return n.Status.Quarantined == 1 })
	if now.Status.Used != 0 || now.Status.Capacity != 1 {
		t.Errorf("tight counts %d used of %d", now.Status.Used, now.Status.Capacity)
	}
}

// inherited is the end of what handOver began.
func (m *mesh) inherited(t *testing.T) {
	m.heir.await(t)
	if m.heir.ip() != m.formerAddress || m.heir.vm.Status.NodeName != "node-2" {
		t.Errorf("heir is %s on %s", m.heir.ip(), m.heir.vm.Status.NodeName)
	}
	for _, g := range []*guest{m.ann, m.ben, m.cat} {
		g.reaches(t, m.heir)
		m.heir.reaches(t, g)
	}
	m.second.await(t)
	if m.second.ip() != "10.64.0.2" {
		t.Errorf("second has %s", m.second.ip())
	}
	listen(t, m.outside, "198.51.100.1:8087")
	if _, err := m.ann.ask(t, "tcp", "198.51.100.1:8087"); err != nil {
		t.Errorf("ann → outside: %v", err)
	}
	m.second.refused(t, "198.51.100.1:8087") // its network has no NAT
	must(t, m.client.Delete(t.Context(), m.tight))
	m.awaitNetwork(t, m.tight, soon, "in use and saying for whom", func(n *v1alpha1.ImpNetwork) bool {
		c := meta.FindStatusCondition(n.Status.Conditions, v1alpha1.ConditionInUse)
		return c != nil && c.Status == "True" && strings.Contains(c.Message, "second")
	})
	m.second.gone(t)
	if !eventually(t.Context(), soon, func() bool {
		return apierrors.IsNotFound(m.client.Get(t.Context(), client.ObjectKeyFromObject(m.tight), &v1alpha1.ImpNetwork{}))
	}) {
		t.Error("a network that nobody uses any more is still there")
	}
}

func (m *mesh) restarts(t *testing.T) {
	for _, program := range []devserver.Program{devserver.Agent, devserver.Runtime} {
		pings := map[string]func() string{
			"ann → ben": m.ann.later(t, pingWords(m.ben.ip(), 80, 100*time.Millisecond, 56)...),
			"ben → mal": m.ben.later(t, pingWords(m.mal.ip(), 80, 100*time.Millisecond, 56)...),
		}
		for _, node := range []string{"node-1", "node-2"} {
			must(t, m.server.Kill(program, node))
			must(t, m.server.Start(program, node))
		}
		for _, node := range []string{"node-1", "node-2"} {
			if !eventually(t.Context(), soon, func() bool {
				answer, err := http.Get("http://" + m.server.Metrics(program, node) + "/metrics")
				if err == nil {
					answer.Body.Close()
				}
				return err == nil
			}) {
				t.Errorf("%s of %s is not back", program, node)
			}
		}
		for who, outcome := range pings {
			if e := readEchoes(t, outcome()); e.received < e.sent-1 {
				t.Errorf("%s while %s was killed and started on both nodes: %s", who, program, e)
			}
		}
	}
	for _, g := range []*guest{m.ann, m.ben, m.mal} {
		now := m.await(t, g.vm, soon, "Ready", ready)
		if now.Status.IP != g.ip() || now.Status.RestartCount != 0 {
			t.Errorf("%s was not left alone: %s", g.vm.Name, describe(now))
		}
	}
}

func (m *mesh) flushed(t *testing.T) {
	inside := m.server.NetworkNamespace("node-1", string(m.network.UID))
	for name, n := range map[string]fabric.Namespace{"the network's namespace": inside, "the node's": m.node1.Namespace} {
		rules := func() (state []string) {
			t.Helper()
			must(t, n.Do(func() (err error) { state, err = firewallState(); return err }))
			slices.Sort(state)
			return state
		}
		before := rules()
		if len(before) == 0 {
			t.Errorf("%s has no rules at all", name)
		}
		must(t, n.Do(func() error {
			conn, err := nftables.New()
			if err != nil {
				return err
			}
			conn.FlushRuleset()
			return conn.Flush()
		}))
		if len(rules()) != 0 {
			t.Errorf("%s: flushing left %v", name, rules())
		}
		if !eventually(t.Context(), soon, func() bool { return slices.Equal(rules(), before) }) {
			t.Errorf("%s: rules were\n  %s\nand are\n  %s", name, strings.Join(before, "\n  "), strings.Join(rules(), "\n  "))
		}
	}
	listen(t, m.outside, "198.51.100.1:8082")
	for _, g := range []*guest{m.ann, m.tom} {
		if out, err := g.ask(t, "tcp", "198.51.100.1:8082"); err != nil {
			t.Errorf("%s → outside: %v %s", g.vm.Name, err, out)
		}
	}
	m.ann.reaches(t, m.ben)
}

func (m *mesh) rebooted(t *testing.T) {
	before, claim := m.ben.ip(), m.claims(t, m.network.UID)[m.ben.ip()]
	incarnation := m.await(t, m.ben.vm, soon, "Ready", ready).Status.Incarnation
	m.ben.tell(t, "reboot")
	m.await(t, m.ben.vm, booting, "in its next boot", func(vm *v1alpha1.ImpVM) bool { return vm.Status.Incarnation == incarnation+1 && ready(vm) })
	m.ben.await(t)
	if m.ben.ip() != before || m.ben.look(t).Hostname != "ben" {
		t.Errorf("ben was %s and is %s", before, m.ben.ip())
	}
	if now := m.claims(t, m.network.UID)[before]; now.UID != claim.UID {
		t.Errorf("the claim of ben's address is another one: %+v", now)
	}
	for _, g := range []*guest{m.ann, m.mal, m.cat} {
		g.reaches(t, m.ben)
		m.ben.reaches(t, g)
	}
}

func (m *mesh) reborn(t *testing.T) {
	before := m.cat.ip()
	m.ann.reaches(t, m.cat)
	m.cat.gone(t)
	m.cat = m.startGuest(t, m.network, "cat", "node-1", "").await(t)
	if m.cat.ip() == before {
		t.Errorf("the address %s was given out again at once", before)
	}
	for _, g := range []*guest{m.ann, m.ben, m.mal} {
		g.reaches(t, m.cat)
		m.cat.reaches(t, g)
	}
}

func (m *mesh) columns(t *testing.T) {
	expect := func(out string, words ...string) {
		t.Helper()
		for _, w := range words {
			if !strings.Contains(out, w) {
				t.Errorf("%q is not in:\n%s", w, out)
			}
		}
	}
	used := 0
	for _, claim := range m.claims(t, m.network.UID) {
		if claim.Status.State == v1alpha1.AddressBound {
			used++
		}
	}
	now := m.awaitNetwork(t, m.network, soon, "counting its guests", func(n *v1alpha1.ImpNetwork) bool { return n.Status.Used == int64(used) })
	expect(m.kubectl(t, "get", "impnet", "-n", m.ns), "SUBNET", "USED", "NAT", "READY", "AGE", "mesh", meshSubnet, fmt.Sprintf("%d/253", used), "true", "True", "tight", "false")
	expect(m.kubectl(t, "get", "impnet", "mesh", "-n", m.ns, "-o", "wide"), "GATEWAY", "MTU", "VNI", "10.61.0.1", fmt.Sprint(guestMTU), fmt.Sprint(now.Status.VNI))
	expect(m.kubectl(t, "get", "impaddr"), "ADDRESS", "STATE", "NETWORK", "VM", "NODE", m.ann.ip(), "Bound", "mesh", "ann", "node-1")
	expect(m.kubectl(t, "get", "impvm", "ann", "-n", m.ns, "-o", "wide"), "IP", m.ann.ip())
}

// kubectl runs the one that belongs to the API server, as the admin.
func (c *cluster) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	_, cacheDir := need(t)
	binaries, err := controlplane.Find(cacheDir)
	must(t, err)
	cmd := exec.Command(binaries.Kubectl, append([]string{"--kubeconfig", c.server.Places.Kubeconfig()}, args...)...)
	cmd.Env = []string{"HOME=" + t.TempDir()}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}
