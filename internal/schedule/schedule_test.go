package schedule_test

import (
	"fmt"
	"strings"
	"testing"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/schedule"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"
)

// node gives a candidate that takes anything of up to 4 vcpu, 4096 MiB and 40 GiB, changed as the options say.
func node(name string, options ...func(*schedule.Candidate)) schedule.Candidate {
	c := schedule.Candidate{
		Node: &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v1alpha1.LabelEnabled: "true"}},
			Status: corev1.NodeStatus{
				Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
				NodeInfo:   corev1.NodeSystemInfo{Architecture: "amd64"},
			},
		},
		Imp: &v1alpha1.ImpNode{Status: v1alpha1.ImpNodeStatus{
			Budget:       v1alpha1.Budget{VCPU: 4, MemoryMiB: 4096, DiskGiB: 40},
			Capabilities: v1alpha1.NodeCapabilities{Arch: "amd64", OverheadMiB: 64},
			Conditions:   []metav1.Condition{{Type: v1alpha1.ConditionRuntimeReady, Status: metav1.ConditionTrue}},
		}},
		AgentAlive: true,
	}
	for _, option := range options {
		option(&c)
	}
	return c
}

func label(key, value string) func(*schedule.Candidate) {
	return func(c *schedule.Candidate) { c.Node.Labels[key] = value }
}

func taint(key string, effect corev1.TaintEffect) func(*schedule.Candidate) {
	return func(c *schedule.Candidate) {
		c.Node.Spec.Taints = append(c.Node.Spec.Taints, corev1.Taint{Key: key, Effect: effect})
	}
}

func bound(vcpu, memory, disk int64) func(*schedule.Candidate) {
	return func(c *schedule.Candidate) {
		c.Bound = schedule.Amount{VCPU: vcpu, MemoryMiB: memory, DiskGiB: disk}
	}
}

func small() schedule.Requirements {
	return schedule.Requirements{Size: schedule.Amount{VCPU: 1, MemoryMiB: 512, DiskGiB: 4}, Arch: "amd64"}
}

func TestEachRefusalIsTold(t *testing.T) {
	tests := map[string]struct {
		node schedule.Candidate
		req  func(*schedule.Requirements)
		want string
	}{
		"a node without the label takes no VMs": {
			node: node("node-a", label(v1alpha1.LabelEnabled, "false")),
			want: "node-a: without label imp/enabled=true",
		},
		"a node that is not ready": {
			node: node("node-a", func(c *schedule.Candidate) { c.Node.Status.Conditions[0].Status = corev1.ConditionUnknown }),
			want: "node-a: Node not ready",
		},
		"a cordoned node, whose taint is not told a second time": {
			node: node("node-a", taint(corev1.TaintNodeUnschedulable, corev1.TaintEffectNoSchedule),
				func(c *schedule.Candidate) { c.Node.Spec.Unschedulable = true }),
			want: "node-a: cordoned",
		},
		"every taint that is not tolerated": {
			node: node("node-a", taint("gpu", corev1.TaintEffectNoSchedule), taint("imp.dev/evacuate", corev1.TaintEffectNoExecute)),
			want: "node-a: taint gpu:NoSchedule not tolerated, taint imp.dev/evacuate:NoExecute not tolerated",
		},
		"a label the selector wants": {
			node: node("node-a", label("disk", "hdd")),
			req:  func(r *schedule.Requirements) { r.NodeSelector = map[string]string{"zone": "b", "disk": "ssd"} },
			want: "node-a: label disk=ssd,zone=b of spec.nodeSelector missing",
		},
		"another architecture": {
			node: node("node-a"), req: func(r *schedule.Requirements) { r.Arch = "arm64" },
			want: "node-a: architecture amd64, not arm64",
		},
		"a pin to a node that is not there": {
			node: node("node-a"), req: func(r *schedule.Requirements) { r.NodeName = "node-z" },
			want: "node-z: no such node, and spec.nodeName wants it",
		},
		"a silent agent": {
			node: node("node-a", func(c *schedule.Candidate) { c.AgentAlive = false }),
			want: "node-a: agent not heard of",
		},
		"no agent ever": {
			node: node("node-a", func(c *schedule.Candidate) { c.Imp = nil }),
			want: "node-a: ImpNode missing",
		},
		"a runtime that does not answer its agent": {
			node: node("node-a", runtimeIs(v1alpha1.ReasonRuntimeUnreachable, "connection refused")),
			want: "node-a: runtime not ready (connection refused)",
		},
		"a node that other nodes do not reach, by a VM with a network": {
			node: node("node-a"), req: networked,
			want: "node-a: without an address in the overlay, which spec.networkRef needs",
		},
		"a node that is full of one network's guests": {
			node: node("node-a", inOverlay, func(c *schedule.Candidate) { c.Guests = 1000 }), req: networked,
			want: "node-a: has 1000 guests of network team/lan, and takes no more than 1000",
		},
		"a node that just gave the VM back": {
			node: node("node-a", func(c *schedule.Candidate) { c.Refused = "gave the VM back for want of capacity" }),
			want: "node-a: gave the VM back for want of capacity",
		},
		"all that is short, the overhead included": {
			node: node("node-a", bound(4, 3600, 40)),
			want: "node-a: 1 short of vcpu, 80 MiB short of memory, 4 GiB short of disk",
		},
		"a VM larger than the whole node": {
			node: node("node-a", bound(1, 1000, 10)), req: func(r *schedule.Requirements) { r.Size.MemoryMiB = 8192 },
			want: "node-a: 8256 MiB of memory needed, budget is 4096",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			req := small()
			if test.req != nil {
				test.req(&req)
			}
			choice, refusals, ok := schedule.Pick(req, []schedule.Candidate{test.node})
			if ok {
				t.Fatalf("%s was picked", choice.Node)
			}
			if got := refusals.Message(1024); got != test.want {
				t.Errorf("got  %s\nwant %s", got, test.want)
			}
		})
	}
}

func networked(r *schedule.Requirements) {
	r.Network = &schedule.Network{Name: "team/lan", MaxGuests: 1000}
}

func inOverlay(c *schedule.Candidate) { c.Imp.Status.Network.Address = "192.0.2.1" }

func TestAVMWithANetworkGoesWhereItsNetworkCanBe(t *testing.T) {
	req := small()
	networked(&req)
	candidates := []schedule.Candidate{
		node("node-a"), node("node-b", inOverlay, bound(2, 1024, 8), func(c *schedule.Candidate) { c.Guests = 999 }),
	}
	if choice, refusals, ok := schedule.Pick(req, candidates); !ok || choice.Node != "node-b" {
		t.Errorf("picked %q (%s)", choice.Node, refusals.Message(1024))
	}
	req.Network = nil
	if choice, _, ok := schedule.Pick(req, candidates); !ok || choice.Node != "node-a" {
		t.Errorf("without a network: picked %q", choice.Node)
	}
}

func runtimeIs(reason, message string) func(*schedule.Candidate) {
	return func(c *schedule.Candidate) {
		c.Imp.Status.Conditions[0].Status = metav1.ConditionFalse
		c.Imp.Status.Conditions[0].Reason, c.Imp.Status.Conditions[0].Message = reason, message
	}
}

func TestWhichNodeIsPicked(t *testing.T) {
	tolerate := func(key string) func(*schedule.Requirements) {
		return func(r *schedule.Requirements) {
			r.Tolerations = []corev1.Toleration{{Key: key, Operator: corev1.TolerationOpExists}}
		}
	}
	tests := map[string]struct {
		nodes []schedule.Candidate
		req   func(*schedule.Requirements)
		want  string
	}{
		"a node without a VMM after every other":                                        {nodes: []schedule.Candidate{node("node-a", runtimeIs(v1alpha1.ReasonRuntimeUnusable, "no QEMU")), node("node-b", bound(3, 64, 8))}, want: "node-b"},
		"a node without a VMM if it is the only one: what is missing is told on the VM": {nodes: []schedule.Candidate{node("node-a", runtimeIs(v1alpha1.ReasonRuntimeUnusable, "no QEMU"))}, want: "node-a"},
		"the least loaded one":           {nodes: []schedule.Candidate{node("node-a", bound(2, 1024, 8)), node("node-b", bound(1, 576, 4)), node("node-c", bound(3, 64, 8))}, want: "node-b"},
		"the first by name among equals": {nodes: []schedule.Candidate{node("node-b"), node("node-a")}, want: "node-a"},
		"one that is tainted and tolerated": {
			nodes: []schedule.Candidate{node("node-a", taint("gpu", corev1.TaintEffectNoSchedule))}, req: tolerate("gpu"), want: "node-a",
		},
		"a cordoned one whose taint is tolerated, as with pods": {
			nodes: []schedule.Candidate{node("node-a", func(c *schedule.Candidate) { c.Node.Spec.Unschedulable = true })},
			req:   tolerate(corev1.TaintNodeUnschedulable), want: "node-a",
		},
		"one with a taint that only prefers others": {
			nodes: []schedule.Candidate{node("node-a", taint("old", corev1.TaintEffectPreferNoSchedule))}, want: "node-a",
		},
		"the pinned one though another is emptier": {
			nodes: []schedule.Candidate{node("node-a"), node("node-b", bound(2, 1024, 8))},
			req:   func(r *schedule.Requirements) { r.NodeName = "node-b" }, want: "node-b",
		},
		"one that is filled to the last MiB by it": {nodes: []schedule.Candidate{node("node-a", bound(3, 4096-512-64, 36))}, want: "node-a"},
		"one that matches the selector": {
			nodes: []schedule.Candidate{node("node-a"), node("node-b", label("zone", "b"))},
			req:   func(r *schedule.Requirements) { r.NodeSelector = map[string]string{"zone": "b"} }, want: "node-b",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			req := small()
			if test.req != nil {
				test.req(&req)
			}
			choice, refusals, ok := schedule.Pick(req, test.nodes)
			if !ok || choice.Node != test.want || choice.OverheadMiB != 64 {
				t.Errorf("got %+v (%s), want %s", choice, refusals.Message(1024), test.want)
			}
		})
	}
}

func TestManyRefusalsAreCountedByWhatTheyHaveInCommon(t *testing.T) {
	var nodes []schedule.Candidate
	for i := range 500 {
		option := bound(0, 4000+int64(i%50), 0)
		if i%5 == 0 {
			option = label(v1alpha1.LabelEnabled, "")
		}
		nodes = append(nodes, node(fmt.Sprintf("node-%d", i), option))
	}
	_, refusals, _ := schedule.Pick(small(), nodes)
	want := "none of 500 nodes fits: 400 short of memory; 100 without label imp/enabled=true"
	if got := refusals.Message(1024); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if got := refusals.Message(40); len(got) > 40 || !strings.HasPrefix(got, "none of 500 nodes fits") {
		t.Errorf("cut to %q", got)
	}
	if got := (schedule.Refusals{}).Message(1024); got != "the cluster has no nodes" {
		t.Errorf("without nodes: %q", got)
	}
}

// drawNode gives a node of arbitrary state, often a good one.
func drawNode(t *rapid.T, name string) schedule.Candidate {
	rarely := func(what string) bool { return rapid.IntRange(0, 9).Draw(t, what) == 0 }
	c := node(name)
	c.Imp.Status.Budget = v1alpha1.Budget{
		VCPU: rapid.Int64Range(0, 16).Draw(t, "vcpu"), MemoryMiB: rapid.Int64Range(0, 8192).Draw(t, "memory"),
		DiskGiB: rapid.Int64Range(0, 100).Draw(t, "disk"),
	}
	c.Imp.Status.Capabilities.OverheadMiB = rapid.Int64Range(0, 256).Draw(t, "overhead")
	c.AgentAlive = !rarely("silent")
	c.Node.Spec.Unschedulable = rarely("cordoned")
	if rarely("tainted") {
		taint("gpu", rapid.SampledFrom([]corev1.TaintEffect{corev1.TaintEffectNoSchedule, corev1.TaintEffectNoExecute}).Draw(t, "effect"))(&c)
	}
	if rarely("unlabelled") {
		delete(c.Node.Labels, v1alpha1.LabelEnabled)
	}
	if rarely("unknown") {
		c.Imp = nil
	}
	return c
}

func drawRequirements(t *rapid.T) schedule.Requirements {
	return schedule.Requirements{
		Size: schedule.Amount{
			VCPU: rapid.Int64Range(1, 8).Draw(t, "vcpus"), MemoryMiB: rapid.Int64Range(128, 4096).Draw(t, "MiB"),
			DiskGiB: rapid.Int64Range(1, 20).Draw(t, "GiB"),
		},
		Arch: rapid.SampledFrom([]string{"amd64", "amd64", "amd64", "arm64"}).Draw(t, "arch"),
	}
}

func TestPlacingVMsOneAfterAnotherNeverSpendsMoreThanTheBudget(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var nodes []schedule.Candidate
		for i := range rapid.IntRange(0, 6).Draw(t, "nodes") {
			nodes = append(nodes, drawNode(t, fmt.Sprintf("node-%d", i)))
		}
		for range rapid.IntRange(1, 30).Draw(t, "VMs") {
			req := drawRequirements(t)
			choice, refusals, ok := schedule.Pick(req, nodes)
			if !ok {
				if len(refusals) != len(nodes) {
					t.Fatalf("%d nodes, %d refusals", len(nodes), len(refusals))
				}
				continue
			}
			for i := range nodes {
				c := &nodes[i]
				if c.Node.Name != choice.Node {
					continue
				}
				if refused := schedule.Refuse(req, c); len(refused) > 0 {
					t.Fatalf("%s was picked though it refuses: %v", choice.Node, refused)
				}
				c.Bound = c.Bound.Plus(req.Size).Plus(schedule.Amount{MemoryMiB: choice.OverheadMiB})
				if b := c.Imp.Status.Budget; c.Bound.VCPU > b.VCPU || c.Bound.MemoryMiB > b.MemoryMiB || c.Bound.DiskGiB > b.DiskGiB {
					t.Fatalf("%s holds %+v of %+v", choice.Node, c.Bound, b)
				}
			}
		}
	})
}

func TestTheOrderOfTheNodesChangesNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var nodes []schedule.Candidate
		for i := range rapid.IntRange(1, 12).Draw(t, "nodes") {
			nodes = append(nodes, drawNode(t, fmt.Sprintf("node-%d", i)))
		}
		req := drawRequirements(t)
		shuffled := rapid.Permutation(nodes).Draw(t, "order")
		a, refusedA, okA := schedule.Pick(req, nodes)
		b, refusedB, okB := schedule.Pick(req, shuffled)
		if a != b || okA != okB || refusedA.Message(1024) != refusedB.Message(1024) {
			t.Fatalf("%+v %s\n%+v %s", a, refusedA.Message(1024), b, refusedB.Message(1024))
		}
	})
}
