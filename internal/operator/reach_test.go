package operator_test

import (
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"

	"sigs.k8s.io/controller-runtime/pkg/client"
)

// silent lets 41 s pass without a word of the node's agent.
func (r *rig) silent() { r.clock.Step(41 * time.Second) }

func TestASilentNodeIsToldOnItsVMsAndItsReturnAsWell(t *testing.T) {
	r, node := placed(t, persistent)
	r.report("web", running)
	r.clock.Step(20 * time.Second)
	if again := r.watchNode(node).RequeueAfter; again < 19*time.Second || again > 21*time.Second {
		t.Errorf("looks again after %v", again)
	}
	r.expect()
	r.silent()
	r.watchNode(node)
	r.watchNode(node)
	r.reconcile("web")
	r.expect("PATCH impvms/web/status")
	const message = " AgentTimeout: nothing heard of the agent on "
	want := "False" + message + node + " for 40 s; what the VM does is not known"
	r.expectCondition("web", v1alpha1.ConditionNodeReachable, want)
	r.expectCondition("web", v1alpha1.ConditionReady, want)
	if s := r.get("web").Status; s.Phase != v1alpha1.PhaseUnknown || s.NodeName != node {
		t.Errorf("it is %s on %q", s.Phase, s.NodeName)
	}
	r.beat(node)
	r.watchNode(node)
	r.watchNode(node)
	r.reconcile("web")
	r.expect("PATCH impvms/web/status")
	r.expectCondition("web", v1alpha1.ConditionNodeReachable, "True Reachable: the agent on "+node+" is heard again")
	r.expectCondition("web", v1alpha1.ConditionReady, "True Running: the guest is running and ready")
	r.expectEvents("web", "Normal Placed", "Warning AgentTimeout", "Normal Recovered")
}

func TestANodeIsNotCalledSilentByAnOperatorThatHasJustStarted(t *testing.T) {
	r, node := placed(t, persistent)
	r.clock.Step(time.Hour)
	r.restart(r.place.Client.(*inNamespace).Client)
	r.watchNode(node)
	r.expect()
	// Nor is it taken for alive: the Lease is an hour old.
	r.vm("new")
	r.reconcile("new")
	r.expectCondition("new", v1alpha1.ConditionScheduled, "False NoNodeFits: "+node+": agent not heard of")
	r.silent()
	r.writes.take()
	r.watchNode(node)
	r.expect("PATCH impvms/web/status")
}

func TestAOneShotOnANodeProvedGoneIsLost(t *testing.T) {
	for name, proof := range proofs() {
		t.Run(name, func(t *testing.T) {
			r, node := placed(t)
			r.report("web", running)
			proof(r, node)
			r.watchNode(node)
			r.expect() // not while the agent was heard a moment ago
			r.silent()
			r.watchNode(node)
			r.watchNode(node)
			r.reconcile("web")
			r.expect("PATCH impvms/web/status")
			r.expectCondition("web", v1alpha1.ConditionFinished, "True NodeLost: lost with "+node+": "+name)
			r.expectCondition("web", v1alpha1.ConditionReady, "False NodeLost: lost with "+node+": "+name)
			if s := r.get("web").Status; s.Phase != v1alpha1.PhaseFailed || s.StartedAt == nil {
				t.Errorf("status is %+v", s)
			}
			r.expectEvents("web", "Normal Placed", "Warning NodeLost")
			// The node comes back: what has ended stays ended.
			r.beat(node)
			r.watchNode(node)
			r.reconcile("web")
			r.expect()
		})
	}
}

func TestAKubeletThatIsBehindProvesNothing(t *testing.T) {
	r, node := placed(t)
	r.reboot(node, -time.Minute) // it said so before the agent's last word
	r.silent()
	r.watchNode(node)
	r.expect("PATCH impvms/web/status")
	r.expectCondition("web", v1alpha1.ConditionFinished, "absent")
}

func TestAVMThatMovedOffASilentNodeIsNotCalledUnreachableAnyMore(t *testing.T) {
	r, node := placed(t, persistent)
	r.report("web", running)
	r.silent()
	r.watchNode(node)
	proofs()["its Node object is gone"](r, node)
	r.reconcile("web") // no other node yet
	r.expectCondition("web", v1alpha1.ConditionScheduled, "False NoNodeFits: the cluster has no nodes")
	r.writes.take()
	r.watchNode("")
	r.expect("PATCH impvms/web/status")
	r.expectCondition("web", v1alpha1.ConditionNodeReachable, "absent")
	if got := told(r.get("web"), v1alpha1.ConditionReady); got != "False NoNodeFits: the cluster has no nodes" {
		t.Errorf("Ready is %s", got)
	}

	b := r.node("b")
	r.reconcile("web")
	r.expectCondition("web", v1alpha1.ConditionReady, "False Pending: waiting for the node to prepare the disk")
	r.writes.take()
	r.watchNode(b)
	r.expect()
}

func TestAVMThatMovedStraightToAnotherNodeIsCalledReachableThere(t *testing.T) {
	r, node := placed(t, persistent)
	r.silent()
	r.watchNode(node)
	b := r.node("b")
	proofs()["its Node object is gone"](r, node)
	r.writes.take()
	r.reconcile("web")
	r.expectCondition("web", v1alpha1.ConditionReady, "False Pending: waiting for the node to prepare the disk")
	r.watchNode(b)
	r.expect("PATCH impvms/web/status", "PATCH impvms/web/status")
	r.expectCondition("web", v1alpha1.ConditionNodeReachable, "True Reachable: the agent on "+b+" is heard again")
}

func TestWhatAnAgentWroteOfANodeGoesWhenTheNodeHasLeft(t *testing.T) {
	r := newRig(t)
	node := r.node("a")
	gone := func() bool {
		err := r.admin.Get(t.Context(), keyOf(node), &v1alpha1.ImpNode{})
		must(t, client.IgnoreNotFound(err))
		return err != nil
	}
	r.silent()
	r.watchNode(node)
	if gone() {
		t.Fatal("it went though the Node is there")
	}
	r.beat(node)
	proofs()["its Node object is gone"](r, node)
	if again := r.watchNode(node).RequeueAfter; gone() || again <= 0 {
		t.Fatalf("it went though the agent was heard a moment ago, or is not looked for again (%v)", again)
	}
	r.silent()
	r.watchNode(node)
	if !gone() {
		t.Error("it is still there")
	}
	if again := r.watchNode(node).RequeueAfter; again != 0 {
		t.Errorf("a node that has left is looked at again after %v", again)
	}
}

func TestAnEndThatIsToldBeforeTheNodeIsCalledReachableAgainReachesReady(t *testing.T) {
	r, node := placed(t)
	r.report("web", running)
	r.silent()
	r.watchNode(node)
	r.report("web", succeeded) // the agent is back, and quicker than imp-reachable
	r.beat(node)
	r.reconcile("web")
	r.writes.take()
	r.watchNode(node)
	r.watchNode(node)
	r.expect("PATCH impvms/web/status")
	r.expectCondition("web", v1alpha1.ConditionReady, "False Completed: the workload ended with 0")
	if got := r.get("web").Status.Phase; got != v1alpha1.PhaseSucceeded {
		t.Errorf("the phase is %s", got)
	}
	r.expectEvents("web", "Normal Placed", "Warning AgentTimeout")
}
