package api

import (
	"slices"
	"testing"

	"imp.dev/imp/api/v1alpha1"
)

const full = `{image: a, imagePullPolicy: Never, imagePullSecrets: [{name: s}], command: [c], args: [x], env: [{name: A, value: b}],
  workingDir: /w, dataPaths: [/d], nodeName: node-a, nodeSelector: {a: b}, tolerations: [{operator: Exists}],
  terminationGracePeriodSeconds: 5, activeDeadlineSeconds: 60, ttlSecondsAfterFinished: 60, classRef: {name: small},
  networkRef: {name: net}, address: 10.44.0.10}`

// edit is one change of one field.
type edit struct{ field, change string }

func edits() []edit {
	return []edit{
		{"image", `spec: {image: b}`},
		{"imagePullPolicy", `spec: {imagePullPolicy: Always}`},
		{"imagePullPolicy", `spec: {imagePullPolicy: null}`},
		{"imagePullSecrets", `spec: {imagePullSecrets: [{name: t}]}`},
		{"command", `spec: {command: [c, d]}`},
		{"command", `spec: {command: null}`},
		{"args", `spec: {args: [z]}`},
		{"env", `spec: {env: [{name: A, value: c}]}`},
		{"env", `spec: {env: null}`},
		{"workingDir", `spec: {workingDir: /v}`},
		{"nodeSelector", `spec: {nodeSelector: {a: c}}`},
		{"nodeSelector", `spec: {nodeSelector: null}`},
		{"tolerations", `spec: {tolerations: []}`},
		{"activeDeadlineSeconds", `spec: {activeDeadlineSeconds: 61}`},
		{"classRef", `spec: {classRef: {name: large}}`},
		{"classRef", `spec: {classRef: null}`},
	}
}

// always may be edited; never may not, whatever the lifecycle.
func always() []edit {
	return []edit{
		{"terminationGracePeriodSeconds", `spec: {terminationGracePeriodSeconds: 0}`},
		{"ttlSecondsAfterFinished", `spec: {ttlSecondsAfterFinished: 0}`},
		{"ttlSecondsAfterFinished", `spec: {ttlSecondsAfterFinished: null}`},
		{"labels", `metadata: {labels: {a: b}}`},
		{"finalizers", `metadata: {finalizers: [imp.dev/node]}`},
		{"finalizers", `metadata: {finalizers: null}`},
	}
}

func never() []edit {
	return []edit{
		{"nodeName", `spec: {nodeName: node-b}`},
		{"nodeName", `spec: {nodeName: null}`},
		{"dataPaths", `spec: {dataPaths: [/d, /e]}`},
		{"dataPaths", `spec: {dataPaths: null}`},
		{"networkRef", `spec: {networkRef: {name: other}}`},
		{"address", `spec: {address: 10.44.0.11}`},
		{"address", `spec: {address: null}`},
		{"address", `spec: {address: ""}`},
	}
}

// persistently may be edited where the lifecycle allows the field at all, and takes effect at once.
func persistently() []edit {
	return []edit{
		{"restartPolicy", `spec: {restartPolicy: {mode: reschedule, backoff: {maxRetries: 0, initialDelay: 1s}}}`},
		{"restartPolicy", `spec: {restartPolicy: {backoff: {maxRetries: 5}, onExhaustion: cool-down, coolDownPeriod: 30m}}`},
		{"restartPolicy", `spec: {restartPolicy: null}`},
		{"desiredState", `spec: {desiredState: Stopped}`},
		{"desiredState", `spec: {desiredState: null}`},
	}
}

func (c *cluster) fullVM(lifecycle v1alpha1.Lifecycle) *v1alpha1.ImpVM {
	c.t.Helper()
	u := c.vm("vm", full)
	u.Object["spec"].(map[string]any)["lifecycle"] = string(lifecycle)
	must(c.t, c.admin.Create(c.t.Context(), u))
	return c.get("vm")
}

func TestWhatMayBeEditedOfAPlacedEphemeralVM(t *testing.T) {
	c := newCluster(t)
	vm := c.fullVM(v1alpha1.LifecycleEphemeral)
	c.bind(vm, "node-a")
	for _, e := range append(edits(), never()...) {
		t.Run(e.change, func(t *testing.T) {
			refused(t, patch(t, c.admin, vm.DeepCopy(), e.change), "spec."+e.field, "cannot be changed")
		})
	}
	for _, e := range always() {
		t.Run(e.change, func(t *testing.T) {
			refused(t, patch(t, c.admin, vm.DeepCopy(), e.change))
		})
	}
	t.Run("lifecycle", func(t *testing.T) {
		refused(t, patch(t, c.admin, vm.DeepCopy(), `spec: {lifecycle: persistent}`), "spec.lifecycle", "cannot be changed")
	})
}

func TestWhatMayBeEditedOfAPersistentVM(t *testing.T) {
	c := newCluster(t)
	vm := c.fullVM(v1alpha1.LifecyclePersistent)
	c.bind(vm, "node-a")
	for _, e := range slices.Concat(edits(), always(), persistently()) {
		t.Run(e.change, func(t *testing.T) {
			refused(t, patch(t, c.admin, vm.DeepCopy(), e.change))
		})
	}
	for _, e := range never() {
		t.Run(e.change, func(t *testing.T) {
			refused(t, patch(t, c.admin, vm.DeepCopy(), e.change), "spec."+e.field, "cannot be changed")
		})
	}
	t.Run("lifecycle", func(t *testing.T) {
		refused(t, patch(t, c.admin, vm.DeepCopy(), `spec: {lifecycle: ephemeral}`), "spec.lifecycle", "cannot be changed")
	})
}

func TestAnEphemeralVMIsRepairedByItsClassUntilItIsPlaced(t *testing.T) {
	c := newCluster(t)
	vm := c.created("vm", `{image: a}`)
	must(t, patch(t, c.admin, vm, `spec: {classRef: {name: wrong}}`))
	// A status without a node, as the operator's InvalidSpec leaves it, is no obstacle.
	c.status(vm, func(s *v1alpha1.ImpVMStatus) { s.Phase = v1alpha1.PhaseStarting })
	must(t, patch(t, c.admin, vm, `spec: {classRef: {name: right}}`))
	c.bind(vm, "node-a")
	err := patch(t, c.admin, vm.DeepCopy(), `spec: {classRef: {name: other}}`)
	refused(t, err, "spec.classRef", "cannot be changed on an ephemeral VM that has been placed on a node")
}

func TestAVMKeepsItsNetworkOrTheLackOfOne(t *testing.T) {
	const anew = "cannot be changed: the VM's address belongs to its network; delete the ImpVM and create it anew"
	for _, lifecycle := range []string{"ephemeral", "persistent"} {
		c := newCluster(t)
		for name, tc := range map[string]struct {
			spec, change string
			want         []string
		}{
			"another network":                 {`{image: a, networkRef: {name: net}}`, `spec: {networkRef: {name: other}}`, []string{"spec.networkRef", anew}},
			"no network any more":             {`{image: a, networkRef: {name: net}}`, `spec: {networkRef: null}`, []string{"spec.networkRef", anew}},
			"a network all the same":          {`{image: a}`, `spec: {networkRef: {name: net}}`, []string{"spec.networkRef", anew}},
			"an address that is wished later": {`{image: a, networkRef: {name: net}}`, `spec: {address: 10.44.0.10}`, []string{"spec.address", "cannot be changed"}},
			"an empty address is no address":  {`{image: a, networkRef: {name: net}}`, `spec: {address: ""}`, nil},
			"and no address is an empty one":  {`{image: a, networkRef: {name: net}, address: ""}`, `spec: {address: null}`, nil},
		} {
			t.Run(lifecycle+": "+name, func(t *testing.T) {
				vm := c.vm(dnsName(name), tc.spec)
				vm.Object["spec"].(map[string]any)["lifecycle"] = lifecycle
				must(t, c.admin.Create(t.Context(), vm))
				refused(t, patch(t, c.admin, vm, tc.change), tc.want...)
			})
		}
	}
}

// A program that reads a VM into Imp's types and writes it back drops what is empty. That is no change.
func TestAVMThatIsWrittenBackByAProgramIsNotChanged(t *testing.T) {
	c := newCluster(t)
	vm := c.created("vm", `{image: a, nodeName: "", workingDir: "", address: ""}`)
	vm.Labels = map[string]string{"touched": "true"}
	must(t, c.admin.Update(t.Context(), vm))
}
