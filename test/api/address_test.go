package api

import (
	"slices"
	"strings"
	"testing"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/network"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// address is the claim of an address by a VM of that name, in a network of that UID, as the operator makes it.
func (c *cluster) address(networkUID types.UID, ip, vm string) *v1alpha1.ImpAddress {
	vmUID := uuid.NewUUID()
	return &v1alpha1.ImpAddress{
		ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.AddressName(networkUID, ip)},
		Spec: v1alpha1.ImpAddressSpec{
			Network: v1alpha1.AddressNetwork{Namespace: c.namespace, Name: "net", UID: networkUID},
			VM:      v1alpha1.AddressVM{Namespace: c.namespace, Name: vm, UID: vmUID},
			Address: ip, MAC: network.GuestMAC(string(vmUID), 0).String(),
		},
		Status: v1alpha1.ImpAddressStatus{State: v1alpha1.AddressBound, Since: metav1.Now()},
	}
}

// claimed makes that claim, changed as the test needs it.
func (c *cluster) claimed(networkUID types.UID, ip, vm string, change func(*v1alpha1.ImpAddressStatus)) *v1alpha1.ImpAddress {
	c.t.Helper()
	a := c.address(networkUID, ip, vm)
	change(&a.Status)
	must(c.t, c.admin.Create(c.t.Context(), a))
	return a
}

func on(node string, assignment int64, state v1alpha1.AddressState) func(*v1alpha1.ImpAddressStatus) {
	return func(s *v1alpha1.ImpAddressStatus) {
		s.Node, s.Assignment, s.State, s.VTEP = node, assignment, state, "192.0.2.1"
	}
}

func TestAnAddressIsClaimedOnceInItsNetwork(t *testing.T) {
	c := newCluster(t)
	operator := clientOf(t, c.OperatorConfig())
	one, other := uuid.NewUUID(), uuid.NewUUID()
	must(t, operator.Create(t.Context(), c.address(one, "10.44.0.2", "vm-a")))
	refused(t, operator.Create(t.Context(), c.address(one, "10.44.0.2", "vm-b")), "already exists")
	must(t, operator.Create(t.Context(), c.address(one, "10.44.0.3", "vm-b")))
	must(t, operator.Create(t.Context(), c.address(other, "10.44.0.2", "vm-c")))
}

func TestAnImpAddressIsCheckedWhenItIsCreated(t *testing.T) {
	c := newCluster(t)
	for name, tc := range map[string]struct {
		change func(*v1alpha1.ImpAddress)
		want   []string
	}{
		"a claim": {change: func(*v1alpha1.ImpAddress) {}},
		"a name of another network is refused": {func(a *v1alpha1.ImpAddress) { a.Name = "00000000-10.44.0.2" },
			[]string{"metadata.name must be 12345678-10.44.0.2: the network and the address make the claim unique"}},
		"a name of another address is refused":  {func(a *v1alpha1.ImpAddress) { a.Name = "12345678-10.44.0.3" }, []string{"metadata.name must be 12345678-10.44.0.2"}},
		"a name with more than that is refused": {func(a *v1alpha1.ImpAddress) { a.Name += "-again" }, []string{"metadata.name must be 12345678-10.44.0.2"}},
		"an address in another spelling is refused, or it could be claimed twice": {func(a *v1alpha1.ImpAddress) {
			a.Spec.Address, a.Name = "10.44.0.02", "12345678-10.44.0.02"
		}, []string{"spec.address", "must be an IPv4 address, like 10.44.0.10"}},
		"an IPv6 address is refused": {func(a *v1alpha1.ImpAddress) { a.Spec.Address, a.Name = "fe80::1", "12345678-fe80--1" },
			[]string{"spec.address", "must be an IPv4 address"}},
		"no address is refused": {func(a *v1alpha1.ImpAddress) { a.Spec.Address, a.Name = "", "12345678-x" }, []string{"spec.address", "must be an IPv4 address"}},
		"a MAC in capitals is refused": {func(a *v1alpha1.ImpAddress) { a.Spec.MAC = "0A:00:00:00:00:01" },
			[]string{"spec.mac", "must be a locally administered unicast MAC address in lower case, like 02:00:5e:10:00:01"}},
		"a MAC of some maker's is refused":     {func(a *v1alpha1.ImpAddress) { a.Spec.MAC = "00:1b:21:00:00:01" }, []string{"spec.mac", "must be a locally administered"}},
		"a MAC of a group is refused":          {func(a *v1alpha1.ImpAddress) { a.Spec.MAC = "03:00:00:00:00:01" }, []string{"spec.mac", "unicast"}},
		"a MAC of five bytes is refused":       {func(a *v1alpha1.ImpAddress) { a.Spec.MAC = "02:00:00:00:01" }, []string{"spec.mac", "must be a locally administered"}},
		"a MAC with dashes is refused":         {func(a *v1alpha1.ImpAddress) { a.Spec.MAC = "02-00-00-00-00-01" }, []string{"spec.mac", "must be a locally administered"}},
		"a network without a UID is refused":   {func(a *v1alpha1.ImpAddress) { a.Spec.Network.UID = "" }, []string{"spec.network.uid", "should be at least 8 chars long"}},
		"a VM without a UID is refused":        {func(a *v1alpha1.ImpAddress) { a.Spec.VM.UID = "" }, []string{"spec.vm.uid", "should be at least 8 chars long"}},
		"a VM without a name is refused":       {func(a *v1alpha1.ImpAddress) { a.Spec.VM.Name = "" }, []string{"spec.vm.name", "should be at least 1 chars long"}},
		"no state is refused":                  {func(a *v1alpha1.ImpAddress) { a.Status.State = "" }, []string{"status.state", `"Bound", "Held", "Quarantined"`}},
		"an unknown state is refused":          {func(a *v1alpha1.ImpAddress) { a.Status.State = "Free" }, []string{"status.state", `"Bound", "Held", "Quarantined"`}},
		"no time is refused":                   {func(a *v1alpha1.ImpAddress) { a.Status.Since = metav1.Time{} }, []string{"status.since"}},
		"a negative assignment is refused":     {func(a *v1alpha1.ImpAddress) { a.Status.Assignment = -1 }, []string{"status.assignment", "greater than or equal to 0"}},
		"a VTEP that is no address is refused": {func(a *v1alpha1.ImpAddress) { a.Status.VTEP = "node-a" }, []string{"status.vtep", "must be the IPv4 address of a node"}},
	} {
		t.Run(name, func(t *testing.T) {
			a := c.address("12345678-aaaa-bbbb-cccc-000000000000", "10.44.0.2", "vm")
			tc.change(a)
			refused(t, c.admin.Create(t.Context(), a, client.DryRunAll), tc.want...)
		})
	}
}

func TestOfAnImpAddressOnlyItsStateMayBeEdited(t *testing.T) {
	c := newCluster(t)
	operator := clientOf(t, c.OperatorConfig())
	a := c.claimed(uuid.NewUUID(), "10.44.0.2", "vm", on("node-a", 1, v1alpha1.AddressBound))
	const once = "cannot be changed: a claim is made once and deleted"
	for name, tc := range map[string]struct {
		change string
		want   []string
	}{
		"address":       {`spec: {address: 10.44.0.3}`, []string{"spec: Invalid value", once}},
		"MAC":           {`spec: {mac: "02:00:00:00:00:01"}`, []string{"spec: Invalid value", once}},
		"network":       {`spec: {network: {name: other}}`, []string{"spec: Invalid value", once}},
		"VM":            {`spec: {vm: {name: other}}`, []string{"spec: Invalid value", once}},
		"node":          {change: `status: {node: node-b, assignment: 2}`},
		"node, none":    {change: `status: {node: null, vtep: null}`},
		"state":         {change: `status: {state: Held}`},
		"state, freed":  {change: `status: {state: Quarantined, since: "2030-01-01T00:00:00Z"}`},
		"state, none":   {`status: {state: null}`, []string{"status.state: Required value"}},
		"what was told": {change: `status: {releasedAssignment: 2}`},
		"labels":        {change: `metadata: {labels: {a: b}}`},
	} {
		t.Run(name, func(t *testing.T) {
			refused(t, patch(t, operator, a.DeepCopy(), tc.change), tc.want...)
		})
	}
	must(t, operator.Delete(t.Context(), a))
}

func TestAddressesAreSelectedByTheirNetworkAndByTheirNode(t *testing.T) {
	c := newCluster(t)
	agent := clientOf(t, c.AgentConfig("select-a"))
	one, other := uuid.NewUUID(), uuid.NewUUID()
	here, there := "select-a", "select-b"
	c.claimed(one, "10.44.0.2", "vm-a", on(here, 1, v1alpha1.AddressBound))
	c.claimed(one, "10.44.0.3", "vm-b", on(there, 1, v1alpha1.AddressHeld))
	c.claimed(one, "10.44.0.4", "vm-c", on("", 0, v1alpha1.AddressBound))
	c.claimed(other, "10.44.0.2", "vm-d", on(here, 1, v1alpha1.AddressHeld))
	vms := func(selector map[string]string) []string {
		t.Helper()
		var list v1alpha1.ImpAddressList
		must(t, agent.List(t.Context(), &list, client.MatchingFields(selector)))
		var names []string
		for _, a := range list.Items {
			names = append(names, a.Spec.VM.Name)
		}
		slices.Sort(names)
		return names
	}
	equal(t, "the network's", vms(map[string]string{"spec.network.uid": string(one)}), []string{"vm-a", "vm-b", "vm-c"})
	equal(t, "the other network's", vms(map[string]string{"spec.network.uid": string(other)}), []string{"vm-d"})
	equal(t, "the node's", vms(map[string]string{"status.node": here}), []string{"vm-a", "vm-d"})
	equal(t, "the network's on the node", vms(map[string]string{"spec.network.uid": string(one), "status.node": here}), []string{"vm-a"})
	equal(t, "the network's on no node", vms(map[string]string{"spec.network.uid": string(one), "status.node": ""}), []string{"vm-c"})
	equal(t, "those of a network that is not", vms(map[string]string{"spec.network.uid": strings.Repeat("0", 36)}), nil)
}

func TestColumnsOfAnImpAddress(t *testing.T) {
	c := newCluster(t)
	a := c.claimed(uuid.NewUUID(), "10.44.0.2", "web", on("node-a", 1, v1alpha1.AddressHeld))
	table := c.table("/apis/imp.dev/v1alpha1/impaddresses/" + a.Name)
	equal(t, "the header", columns(table), []string{"Name", "Address", "State", "Network", "VM", "Node", "Age", "(Namespace)", "(MAC)"})
	equal(t, "the row", row(table, 0), []string{a.Name, "10.44.0.2", "Held", "net", "web", "node-a", "", c.namespace, a.Spec.MAC})
}
