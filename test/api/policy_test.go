package api

import (
	"context"
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// notMine demands the denial an agent takes for "not mine": 422, with the phrases.
func notMine(t *testing.T, err error, phrases ...string) {
	t.Helper()
	refused(t, err, phrases...)
	if !apierrors.IsInvalid(err) {
		t.Errorf("the denial is %v, want 422 Invalid", apierrors.ReasonForError(err))
	}
}

// unbound is the agents' ServiceAccount with a token that is bound to no node.
func (c *cluster) unbound() client.Client {
	c.t.Helper()
	token, err := c.Token(c.t.Context(), "imp-agent", nil)
	must(c.t, err)
	cfg := rest.CopyConfig(c.Anonymous())
	cfg.BearerToken = token
	return clientOf(c.t, cfg)
}

// applied writes a status by server-side apply, forced, as the agent does. fields is YAML of what its manager owns.
func (c *cluster) applied(as client.Client, vm *v1alpha1.ImpVM, fields string) error {
	c.t.Helper()
	u := object(c.t, "status: "+fields)
	u.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("ImpVM"))
	u.SetNamespace(vm.Namespace)
	u.SetName(vm.Name)
	return as.Status().Apply(c.t.Context(), client.ApplyConfigurationFromUnstructured(u),
		client.FieldOwner(v1alpha1.ManagerAgent), client.ForceOwnership)
}

const report = `{phase: Running, reportedAssignment: 1, incarnation: 1, run: 1, conditions: [
  {type: Started, status: "True", reason: Done, message: "", lastTransitionTime: "2030-01-01T00:00:00Z"},
  {type: Ready, status: "True", reason: Running, message: "", lastTransitionTime: "2030-01-01T00:00:00Z"}]}`

func TestAnAgentWritesTheStatusOfItsOwnVMsOnly(t *testing.T) {
	c := newCluster(t)
	agent := clientOf(t, c.AgentConfig("status-a"))
	mine, theirs, nobodys := c.created("mine", `{image: a}`), c.created("theirs", `{image: a}`), c.created("nobodys", `{image: a}`)
	c.bind(mine, "status-a")
	c.bind(theirs, "status-b")

	t.Run("its own, by apply", func(t *testing.T) { must(t, c.applied(agent, mine, report)) })
	t.Run("its own, by patch", func(t *testing.T) {
		must(t, patchStatus(t, agent, mine.DeepCopy(), `status: {run: 2}`))
	})
	t.Run("another node's", func(t *testing.T) {
		notMine(t, c.applied(agent, theirs, report),
			"the agent of node status-a may write only the status of ImpVMs bound to its node; this one is bound to node status-b")
	})
	t.Run("one that is bound to no node", func(t *testing.T) {
		notMine(t, c.applied(agent, nobodys, report), "this one is bound to none")
	})
	t.Run("one it binds to itself", func(t *testing.T) {
		notMine(t, c.applied(agent, nobodys, `{nodeName: status-a, assignment: 1}`), "this one is bound to none")
	})
	t.Run("by a token that is bound to no node", func(t *testing.T) {
		notMine(t, c.applied(c.unbound(), mine, report), "this one names no node, so it may write nothing")
	})
	t.Run("the operator writes all of them", func(t *testing.T) {
		operator := clientOf(t, c.OperatorConfig())
		must(t, c.applied(operator, nobodys, `{nodeName: status-b, assignment: 1}`))
		must(t, patch(t, operator, nobodys.DeepCopy(), `metadata: {finalizers: [imp.dev/node]}`))
		must(t, patch(t, operator, nobodys.DeepCopy(), `metadata: {finalizers: null}`))
	})
}

func TestAnAgentLeavesTheOperatorsPartOfAStatusAlone(t *testing.T) {
	c := newCluster(t)
	agent := clientOf(t, c.AgentConfig("part-a"))
	vm := c.created("vm", `{image: a}`)
	c.bind(vm, "part-a")
	must(t, c.applied(agent, vm, report))
	for field, tc := range map[string]struct{ fields, want string }{
		"nodeName":          {`{nodeName: part-b, assignment: 2}`, "status.nodeName is the operator's"},
		"nodeName, emptied": {`{nodeName: ""}`, "status.nodeName is the operator's"},
		"assignment":        {`{assignment: 2}`, "status.assignment is the operator's"},
		"placedAt":          {`{placedAt: "2031-01-01T00:00:00Z"}`, "status.placedAt is the operator's"},
		"release":           {`{release: {assignment: 1, reason: Deleted}}`, "status.release is the operator's"},
		"hold":              {`{hold: {reason: Evacuated, message: m}}`, "status.hold is the operator's"},
		"resources":         {`{resources: {vcpu: 2, memoryMiB: 128, diskGiB: 1, arch: amd64}}`, "status.resources is the operator's"},
		"ip":                {`{ip: 10.44.0.66}`, "status.ip is the operator's"},
		"addresses": {`{addresses: [{address: 10.44.0.66, prefix: 24, mac: "02:00:00:00:00:01", network: net, networkUID: u}]}`,
			"status.addresses is the operator's"},
		"addresses, none":    {`{addresses: []}`, "status.addresses is the operator's"},
		"Scheduled":          {conditions("Scheduled", "False"), "the condition Scheduled is the operator's"},
		"NodeReachable":      {conditions("NodeReachable", "False"), "the condition NodeReachable is the operator's"},
		"releasedAssignment": {`{releasedAssignment: 2}`, "may not be greater than status.assignment"},
		"reportedAssignment": {`{reportedAssignment: 2}`, "may not be greater than status.assignment"},
		"what is its own":    {`{releasedAssignment: 1, reportedAssignment: 1}`, ""},
	} {
		t.Run(field, func(t *testing.T) {
			err := c.applied(agent, vm, tc.fields)
			if tc.want == "" {
				must(t, err)
				return
			}
			notMine(t, err, tc.want)
		})
	}
	t.Run("a condition of the operator's is removed by an update of the whole list", func(t *testing.T) {
		notMine(t, patchStatus(t, agent, vm.DeepCopy(), `status: {conditions: []}`), "the condition Scheduled is the operator's")
	})
	t.Run("a release and a hold that were ordered stay while the agent reports", func(t *testing.T) {
		vm := c.get("vm")
		c.status(vm, func(s *v1alpha1.ImpVMStatus) {
			s.Release = &v1alpha1.Release{Assignment: 1, Reason: "Deleted"}
			s.Hold = &v1alpha1.Hold{Reason: v1alpha1.ReasonEvacuated, Message: "m"}
		})
		must(t, c.applied(agent, vm, report))
		if s := c.get("vm").Status; s.Release == nil || s.Hold == nil {
			t.Error("the agent's report removed the release or the hold")
		}
		notMine(t, patchStatus(t, agent, vm.DeepCopy(), `status: {hold: null}`), "status.hold is the operator's")
	})
}

func conditions(kind, status string) string {
	return `{conditions: [{type: ` + kind + `, status: "` + status + `", reason: X, message: "", lastTransitionTime: "2030-01-01T00:00:00Z"}]}`
}

func TestAnAgentHasNoRightBeyondItsRoles(t *testing.T) {
	c := newCluster(t)
	agent := clientOf(t, c.AgentConfig("rights-a"))
	vm := c.created("vm", `{image: a}`)
	c.bind(vm, "rights-a")
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: "pull"}}
	must(t, c.admin.Create(t.Context(), secret))
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "rights-a"}}
	forbidden := func(what string, err error) {
		t.Helper()
		if !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v, want 403 Forbidden", what, err)
		}
	}
	forbidden("editing a spec", patch(t, agent, vm.DeepCopy(), `spec: {terminationGracePeriodSeconds: 1}`))
	forbidden("taking a finalizer off", patch(t, agent, vm.DeepCopy(), `metadata: {finalizers: null}`))
	forbidden("creating a VM", agent.Create(t.Context(), c.vm("other", `{image: a}`)))
	forbidden("deleting a VM", agent.Delete(t.Context(), vm.DeepCopy()))
	forbidden("reading its node", agent.Get(t.Context(), client.ObjectKeyFromObject(node), node.DeepCopy()))
	forbidden("labelling its node", patch(t, agent, node.DeepCopy(), `metadata: {labels: {imp/enabled: "true"}}`))
	forbidden("listing Secrets", agent.List(t.Context(), &corev1.SecretList{}, client.InNamespace(c.namespace)))
	forbidden("reading a Secret", agent.Get(t.Context(), client.ObjectKeyFromObject(secret), secret.DeepCopy()))
	forbidden("reading a Lease", agent.Get(t.Context(),
		client.ObjectKey{Namespace: v1alpha1.SystemNamespace, Name: "imp-controller-manager"}, &coordinationv1.Lease{}))
	forbidden("reading a namespace", agent.Get(t.Context(), client.ObjectKey{Name: "default"}, &corev1.Namespace{}))
	forbidden("listing classes", agent.List(t.Context(), &v1alpha1.ImpVMClassList{}))
	must(t, agent.List(t.Context(), &v1alpha1.ImpVMList{}, client.MatchingFields{"status.nodeName": "rights-a"}))
	must(t, agent.List(t.Context(), &v1alpha1.ImpNetworkList{}))
	must(t, agent.List(t.Context(), &v1alpha1.ImpAddressList{}))
}

func TestAnAgentReadsSecretsWhereAnAdministratorBoundTheRole(t *testing.T) {
	c := newCluster(t)
	agent := clientOf(t, c.AgentConfig("secret-a"))
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: "pull"}}
	must(t, c.admin.Create(t.Context(), secret))
	must(t, c.admin.Create(t.Context(), object(t, `
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: imp-agent-pull-secrets, namespace: `+c.namespace+`}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: imp-agent-pull-secrets}
subjects: [{kind: ServiceAccount, name: imp-agent, namespace: imp-system}]`)))
	var err error
	await(t, "the binding to take effect", func(ctx context.Context) bool {
		err = agent.Get(ctx, client.ObjectKeyFromObject(secret), secret.DeepCopy())
		return err == nil
	})
	if err := agent.List(t.Context(), &corev1.SecretList{}, client.InNamespace(c.namespace)); !apierrors.IsForbidden(err) {
		t.Errorf("listing Secrets: %v, want 403 Forbidden", err)
	}
}

func TestAnAgentWritesItsOwnImpNodeOnly(t *testing.T) {
	c := newCluster(t)
	agent, other := clientOf(t, c.AgentConfig("impnode-a")), clientOf(t, c.AgentConfig("impnode-b"))
	write := func(as client.Client, name string) error {
		u := &unstructured.Unstructured{}
		u.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("ImpNode"))
		u.SetName(name)
		return as.Apply(t.Context(), client.ApplyConfigurationFromUnstructured(u), client.FieldOwner(v1alpha1.ManagerAgent))
	}
	status := func(as client.Client, name string) error {
		node := &v1alpha1.ImpNode{ObjectMeta: metav1.ObjectMeta{Name: name}}
		return patchStatus(t, as, node, `status: {bootID: x}`)
	}
	must(t, write(agent, "impnode-a"))
	must(t, status(agent, "impnode-a"))
	const want = "the agent of node impnode-b may write only the ImpNode impnode-b, not impnode-a"
	notMine(t, status(other, "impnode-a"), want)
	notMine(t, patch(t, other, &v1alpha1.ImpNode{ObjectMeta: metav1.ObjectMeta{Name: "impnode-a"}}, `metadata: {labels: {a: b}}`), want)
	notMine(t, write(other, "impnode-c"), "may write only the ImpNode impnode-b, not impnode-c")
	notMine(t, write(c.unbound(), "impnode-d"), "this one names no node, so it may write nothing")
}

func TestAnAgentWritesItsOwnLeaseOnly(t *testing.T) {
	c := newCluster(t)
	agent := clientOf(t, c.AgentConfig("lease-a"))
	lease := func(name string) *coordinationv1.Lease {
		return &coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Namespace: v1alpha1.SystemNamespace, Name: name},
			Spec:       coordinationv1.LeaseSpec{HolderIdentity: ptr.To("lease-a"), RenewTime: &metav1.MicroTime{Time: time.Unix(1, 0)}},
		}
	}
	own := lease(v1alpha1.LeasePrefix + "lease-a")
	must(t, agent.Create(t.Context(), own))
	must(t, patch(t, agent, own.DeepCopy(), `spec: {leaseDurationSeconds: 40}`))

	const want = "the agent of node lease-a may write only the Lease imp-system/imp-agent-lease-a, not imp-system/"
	notMine(t, agent.Create(t.Context(), lease("imp-agent-lease-b")), want+"imp-agent-lease-b")
	leader := lease("leader-of-" + c.namespace)
	must(t, clientOf(t, c.OperatorConfig()).Create(t.Context(), leader))
	notMine(t, patch(t, agent, leader, `spec: {holderIdentity: thief}`), want+leader.Name)
	notMine(t, patch(t, c.unbound(), own, `spec: {holderIdentity: thief}`), "this one names no node, so it may write nothing")
}

func TestAnAgentWritesEventsOfItsOwnNodeOnly(t *testing.T) {
	c := newCluster(t)
	agent, other := clientOf(t, c.AgentConfig("event-a")), clientOf(t, c.AgentConfig("event-b"))
	// event is one that the agent of event-a writes about a VM, changed as the case says.
	event := func(change func(*corev1.Event)) *corev1.Event {
		e := &corev1.Event{
			ObjectMeta:          metav1.ObjectMeta{Namespace: c.namespace, GenerateName: "e-"},
			InvolvedObject:      corev1.ObjectReference{APIVersion: "imp.dev/v1alpha1", Kind: "ImpVM", Name: "vm", Namespace: c.namespace},
			Type:                corev1.EventTypeNormal,
			Reason:              "Started",
			Action:              "Start",
			ReportingController: "imp-agent", ReportingInstance: "event-a",
			EventTime: metav1.MicroTime{Time: time.Unix(1, 0)},
		}
		change(e)
		return e
	}
	about := func(version, kind, name string) func(*corev1.Event) {
		return func(e *corev1.Event) {
			e.InvolvedObject = corev1.ObjectReference{APIVersion: version, Kind: kind, Name: name}
			if e.Namespace = "default"; kind == "Pod" {
				e.Namespace, e.InvolvedObject.Namespace = c.namespace, c.namespace
			}
		}
	}
	const source = "the agent of node event-a may write only events whose reportingInstance or source.host is event-a"
	const subject = "the agent of node event-a may write only events about an ImpVM, the ImpNode event-a or the Node event-a"
	for name, tc := range map[string]struct {
		change func(*corev1.Event)
		want   string
	}{
		"about a VM": {change: func(*corev1.Event) {}},
		"about a VM, by source.host": {change: func(e *corev1.Event) {
			e.ReportingInstance, e.Source.Host = "", "event-a"
			e.EventTime = metav1.MicroTime{}
		}},
		"about its node":                    {change: about("v1", "Node", "event-a")},
		"about its ImpNode":                 {change: about("imp.dev/v1alpha1", "ImpNode", "event-a")},
		"about another node":                {about("v1", "Node", "event-b"), subject},
		"about another ImpNode":             {about("imp.dev/v1alpha1", "ImpNode", "event-b"), subject},
		"about a pod":                       {about("v1", "Pod", "p"), subject},
		"about another group's ImpVM":       {about("example.com/v1", "ImpVM", "vm"), subject},
		"in another's name":                 {func(e *corev1.Event) { e.ReportingInstance = "event-b" }, source},
		"in its own and in another's name":  {func(e *corev1.Event) { e.Source.Host = "event-b" }, source},
		"in nobody's name":                  {func(e *corev1.Event) { e.ReportingInstance, e.EventTime = "", metav1.MicroTime{} }, source},
		"in the operator's name, old style": {func(e *corev1.Event) { e.ReportingInstance, e.EventTime, e.Source.Host = "", metav1.MicroTime{}, "op" }, source},
	} {
		t.Run(name, func(t *testing.T) {
			err := agent.Create(t.Context(), event(tc.change))
			if tc.want == "" {
				must(t, err)
				return
			}
			notMine(t, err, tc.want)
		})
	}
	mine := event(func(*corev1.Event) {})
	must(t, agent.Create(t.Context(), mine))
	must(t, patch(t, agent, mine.DeepCopy(), `count: 2`))
	notMine(t, patch(t, other, mine.DeepCopy(), `count: 3`), "the agent of node event-b may write only events")
	notMine(t, patch(t, other, mine.DeepCopy(), `reportingInstance: event-b`), "the agent of node event-b may write only events")
	notMine(t, c.unbound().Create(t.Context(), event(func(*corev1.Event) {})), "this one names no node, so it may write nothing")
}
