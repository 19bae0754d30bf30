package operator_test

import (
	"fmt"
	"testing"

	"imp.dev/imp/api/v1alpha1"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// owned is what one writer has said, for comparison. Ready and phase belong to all and are looked at by themselves.
func owned(vm *v1alpha1.ImpVM, writer string) map[string]any {
	s := vm.Status
	conditions := func(types ...string) (found []metav1.Condition) {
		for _, conditionType := range types {
			if c := meta.FindStatusCondition(s.Conditions, conditionType); c != nil {
				found = append(found, *c)
			}
		}
		return found
	}
	switch writer {
	case v1alpha1.ManagerPlace:
		return map[string]any{
			"node": s.NodeName, "assignment": s.Assignment, "placedAt": s.PlacedAt, "release": s.Release, "resources": s.Resources,
			"ip": s.IP, "addresses": s.Addresses,
			"conditions": conditions(v1alpha1.ConditionScheduled),
		}
	case v1alpha1.ManagerReachable:
		return map[string]any{"conditions": conditions(v1alpha1.ConditionNodeReachable)}
	default:
		return map[string]any{
			"reported": s.ReportedAssignment, "incarnation": s.Incarnation, "started": s.StartedAt, "digest": s.ImageDigest,
			"disk": s.DiskGeneration, "exit": s.ExitCode,
			"conditions": conditions(append(agentStages(), v1alpha1.ConditionFinished)...),
		}
	}
}

// act is one write of one writer about one VM.
type act struct {
	name, writer string
	do           func(r *rig, vm, node string)
}

func acts() []act {
	return []act{
		{"the agent says that it prepares", v1alpha1.ManagerAgent, func(r *rig, vm, _ string) {
			r.report(vm, func(*v1alpha1.ImpVMStatus) {})
		}},
		{"the agent says that it runs", v1alpha1.ManagerAgent, func(r *rig, vm, _ string) { r.report(vm, running) }},
		{"the node falls silent", v1alpha1.ManagerReachable, func(r *rig, _, node string) {
			r.silent()
			r.watchNode(node)
		}},
		{"the node is back", v1alpha1.ManagerReachable, func(r *rig, _, node string) {
			r.beat(node)
			r.watchNode(node)
		}},
		{"the probe changes", v1alpha1.ManagerPlace, func(r *rig, vm, _ string) {
			r.changeProbe()
			r.reconcile(vm)
		}},
	}
}

func (r *rig) changeProbe() {
	r.t.Helper()
	class := &v1alpha1.ImpVMClass{}
	must(r.t, r.admin.Get(r.t.Context(), keyOf(r.name("small")), class))
	port := int32(80)
	if class.Spec.Probes != nil {
		port = class.Spec.Probes.ReadinessProbe.HTTP.Port + 1
	}
	class.Spec.Probes = &v1alpha1.Probes{ReadinessProbe: &v1alpha1.ReadinessProbe{HTTP: v1alpha1.HTTPGet{Port: port}}}
	must(r.t, r.admin.Update(r.t.Context(), class))
}

// Whatever order the writers write in, none of them takes away what another has said, and Ready and the phase never vanish.
func TestEachWriterAfterEachOtherLosesNothing(t *testing.T) {
	r := networked(t, "10.44.0.0/16")
	node := r.name("a")
	for i, first := range acts() {
		for j, second := range acts() {
			for k, third := range acts() {
				if j == i || k == j {
					continue
				}
				name := fmt.Sprintf("vm-%d-%d-%d", i, j, k)
				r.beat(node)
				r.vm(name, persistent, inLAN)
				r.reconcile(name)
				if r.ip(name) == "" {
					t.Fatalf("%s has no address", name)
				}
				for _, a := range []act{first, second, third} {
					before := r.get(name)
					a.do(r, name, node)
					r.compare(first.name+", "+second.name+", "+third.name, a, before, r.get(name))
				}
				r.vanish(name)
			}
		}
	}
}

func (r *rig) compare(sequence string, a act, before, after *v1alpha1.ImpVM) {
	r.t.Helper()
	for _, writer := range []string{v1alpha1.ManagerPlace, v1alpha1.ManagerReachable, v1alpha1.ManagerAgent} {
		if writer == a.writer {
			continue
		}
		if diff := cmp.Diff(owned(before, writer), owned(after, writer)); diff != "" {
			r.t.Errorf("%s: after %q, of %s:\n%s", sequence, a.name, writer, diff)
		}
	}
	if told(after, v1alpha1.ConditionReady) == "absent" || after.Status.Phase == "" {
		r.t.Errorf("%s: after %q Ready or the phase is gone", sequence, a.name)
	}
}
