package api

import (
	"testing"

	"imp.dev/imp/api/v1alpha1"
)

const full = `{image: a, imagePullPolicy: Never, imagePullSecrets: [{name: s}], command: [c], args: [x], env: [{name: A, value: b}],
  workingDir: /w, dataPaths: [/d], nodeName: node-a, nodeSelector: {a: b}, tolerations: [{operator: Exists}],
  terminationGracePeriodSeconds: 5, activeDeadlineSeconds: 60, ttlSecondsAfterFinished: 60, classRef: {name: small}}`

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
	for _, e := range append(edits(), always()...) {
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
