package agent

import (
	"slices"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/machine"
)

// running makes a VM that is bound and Ready.
func (w *world) running(name string, change ...func(*v1alpha1.ImpVM)) *v1alpha1.ImpVM {
	w.t.Helper()
	vm := w.vm(name, change...)
	id := string(vm.UID)
	w.await("the runtime is told of "+name, func() bool { return w.runtime.told("ensure "+id) >= 1 })
	w.runtime.set(id, started, guestReady)
	return w.awaitVM(name, "is ready", has(v1alpha1.ConditionReady, "True", v1alpha1.ReasonRunning))
}

// vanish deletes the object without the node's word, as a restored backup or an impatient user would.
func (w *world) vanish(vm *v1alpha1.ImpVM) {
	w.t.Helper()
	patch := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))
	if err := w.admin.Patch(w.t.Context(), vm.DeepCopy(), patch); err != nil {
		w.t.Fatal(err)
	}
	if err := w.admin.Delete(w.t.Context(), vm.DeepCopy()); client.IgnoreNotFound(err) != nil {
		w.t.Fatal(err)
	}
	w.await("the object is gone", func() bool {
		err := w.admin.Get(w.t.Context(), client.ObjectKeyFromObject(vm), &v1alpha1.ImpVM{})
		return apierrors.IsNotFound(err)
	})
}

func TestWritesHeldBack(t *testing.T) {
	t.Run("a write that is held back while its object is deleted and made anew does not reach the new object", func(t *testing.T) {
		w := newWorld(t)
		w.start()
		old := w.vm("twin")
		w.await("the runtime is told", func() bool { return w.runtime.told("ensure "+string(old.UID)) == 1 })
		arrived, let := w.requests.hold(vmWrite)
		w.runtime.set(string(old.UID), started)
		<-arrived
		w.vanish(old)
		fresh := w.vm("twin")
		before := w.get("twin")
		let()
		w.await("the new VM is told", func() bool { return w.runtime.told("ensure "+string(fresh.UID)) == 1 })
		after := w.get("twin")
		if after.Status.Incarnation != 0 || after.Status.StartedAt != nil || after.ResourceVersion != before.ResourceVersion {
			t.Errorf("the new object was touched: %+v", after.Status)
		}
		if r := w.runtime.removals(); len(r) != 0 {
			t.Errorf("the old VM was removed without an order: %v", r)
		}
	})

	t.Run("a write that meets a change reads again and decides again", func(t *testing.T) {
		w := newWorld(t)
		w.start()
		vm := w.vm("raced")
		id := string(vm.UID)
		w.await("the runtime is told", func() bool { return w.runtime.told("ensure "+id) == 1 })
		arrived, let := w.requests.hold(vmWrite)
		w.runtime.set(id, started)
		<-arrived
		w.release(vm, 1)
		let()
		w.awaitVM("raced", "is released", func(vm *v1alpha1.ImpVM) bool { return vm.Status.ReleasedAssignment == 1 })
	})

	t.Run("a write about a VM that was taken away meanwhile is dropped", func(t *testing.T) {
		w := newWorld(t)
		w.start()
		vm := w.vm("moved")
		id := string(vm.UID)
		w.await("the runtime is told", func() bool { return w.runtime.told("ensure "+id) == 1 })
		arrived, let := w.requests.hold(vmWrite)
		w.runtime.set(id, started)
		<-arrived
		w.place(vm, "node-elsewhere", 2)
		let()
		w.await("the stale copy is removed", func() bool { return w.runtime.told("remove "+id) >= 1 })
		if got := w.get("moved"); got.Status.ReportedAssignment != 0 || got.Status.StartedAt != nil {
			t.Errorf("the other node's VM was written to: %+v", got.Status)
		}
	})
}

func TestAbsence(t *testing.T) {
	t.Run("a VM whose object is gone without an order goes on, and one made anew under its name is looked after", func(t *testing.T) {
		w := newWorld(t)
		w.start()
		old := w.running("again")
		w.vanish(old)
		fresh := w.vm("again")
		w.await("the new one is told", func() bool { return w.runtime.told("ensure "+string(fresh.UID)) == 1 })
		w.await("the absence is in the log", func() bool { return strings.Contains(w.log.String(), "VM goes on without an object") })
		if w.runtime.state(string(old.UID)) != machine.Running || len(w.runtime.removals()) != 0 {
			t.Errorf("the old VM is %s, removals %v", w.runtime.state(string(old.UID)), w.runtime.removals())
		}
	})

	t.Run("a VM that was given to another node is stopped here, by the object's own word", func(t *testing.T) {
		w := newWorld(t)
		w.start()
		vm := w.running("gone")
		w.place(vm, "node-elsewhere", 2)
		w.await("it is removed", func() bool { return w.runtime.state(string(vm.UID)) == machine.Removed })
	})

	t.Run("a VM that was taken off this node is stopped here", func(t *testing.T) {
		w := newWorld(t)
		w.start()
		vm := w.running("unbound")
		w.place(vm, "", 1)
		w.await("it is removed", func() bool { return w.runtime.state(string(vm.UID)) == machine.Removed })
		if kept := w.runtime.kept(); !slices.Equal(kept, []bool{true}) {
			t.Errorf("disks kept: %v", kept)
		}
	})

	t.Run("a VM that is moved leaves its disk in the trash, one that is deleted does not", func(t *testing.T) {
		w := newWorld(t)
		w.start()
		moved := w.running("moved", func(vm *v1alpha1.ImpVM) { vm.Spec.Lifecycle = v1alpha1.LifecyclePersistent })
		w.release(moved, 1)
		w.await("it is removed", func() bool { return w.runtime.state(string(moved.UID)) == machine.Removed })
		deleted := w.running("deleted")
		if err := w.admin.Delete(t.Context(), deleted); err != nil {
			t.Fatal(err)
		}
		w.release(deleted, 1)
		w.await("it is removed", func() bool { return w.runtime.state(string(deleted.UID)) == machine.Removed })
		if kept := w.runtime.kept(); !slices.Equal(kept, []bool{true, false}) {
			t.Errorf("disks kept: %v", kept)
		}
	})
}

func TestSuspiciousList(t *testing.T) {
	t.Run("that most of a node's VMs are absent at once is told on the ImpNode, and none is touched", func(t *testing.T) {
		w := newWorld(t)
		w.start()
		for _, name := range []string{"one", "two", "three"} {
			w.vanish(w.running(name))
		}
		w.await("all absences are in the log", func() bool {
			return strings.Count(w.log.String(), "VM goes on without an object") == 3
		})
		w.runtime.leave() // a new connection has the node looked at now and not at the next beat
		w.runtime.comeBack()
		w.await("the event about the ImpNode", func() bool {
			list := &corev1.EventList{}
			if err := w.admin.List(t.Context(), list, client.InNamespace(corev1.NamespaceDefault)); err != nil {
				return false
			}
			return slices.ContainsFunc(list.Items, func(e corev1.Event) bool {
				return e.Reason == "SuspiciousList" && e.InvolvedObject.Kind == "ImpNode" && e.InvolvedObject.Name == w.node &&
					e.Type == corev1.EventTypeWarning && !e.LastTimestamp.IsZero()
			})
		})
		if got := w.runtime.removals(); len(got) != 0 {
			t.Errorf("removals %v", got)
		}
	})
}

func TestRestarts(t *testing.T) {
	t.Run("an agent that starts again touches nothing on the node and writes nothing", func(t *testing.T) {
		w := newWorld(t)
		w.start()
		vm := w.running("calm")
		id := string(vm.UID)
		before := w.get("calm")
		w.stop()
		w.start()
		w.await("the spec is told again", func() bool { return w.runtime.told("ensure "+id) == 2 })
		next := w.running("next") // when this one is Ready, the other one has long been looked at
		if got := w.get("calm"); got.ResourceVersion != before.ResourceVersion {
			t.Errorf("the object was written to: %+v", got.Status)
		}
		if len(w.runtime.removals()) != 0 {
			t.Errorf("removals %v", w.runtime.removals())
		}
		if e := w.events(vm); slices.Contains(e, "Normal Recovered") {
			t.Errorf("events are %v", e)
		}
		_ = next
	})

	t.Run("what happened while the agent was away is on the object afterwards", func(t *testing.T) {
		w := newWorld(t)
		w.start()
		vm := w.running("away")
		w.stop()
		w.runtime.set(string(vm.UID), finished(machine.Failed, ptr.To(int32(3)), "the workload exited with code 3", "no\n"))
		w.start()
		got := w.awaitVM("away", "has finished", has(v1alpha1.ConditionFinished, "True", v1alpha1.ReasonFailed))
		if *got.Status.ExitCode != 3 || got.Status.LastFailure == nil || got.Status.ConsoleTail != "no" {
			t.Errorf("status is %+v", got.Status)
		}
	})

	t.Run("a runtime that comes back is told every spec anew with its credentials, and nothing is written for it", func(t *testing.T) {
		w := newWorld(t)
		w.secret("pull", `{"auths":{"registry.test":{"username":"u","password":"hidden-word"}}}`)
		w.letReadSecrets()
		w.start()
		vm := w.running("kept", withPullSecret("pull"))
		id := string(vm.UID)
		writes := w.requests.of(vmWrite)
		w.runtime.leave()
		w.runtime.comeBack()
		w.await("the spec is told again", func() bool { return w.runtime.told("ensure "+id) == 2 })
		spec, _ := w.runtime.spec(id)
		want := []image.Credential{{Registry: "registry.test", Username: "u", Password: "hidden-word"}}
		if !slices.Equal(spec.Image.Credentials, want) || !spec.Image.NeedsCredentials {
			t.Errorf("credentials are %d, needed %v", len(spec.Image.Credentials), spec.Image.NeedsCredentials)
		}
		w.running("second")
		if got := w.get("kept"); got.ResourceVersion != vm.ResourceVersion {
			t.Errorf("%d writes before and the object was written to again", writes)
		}
		if strings.Contains(w.log.String(), "hidden-word") {
			t.Error("the log holds the password")
		}
	})

	t.Run("what happened while the runtime's stream was broken is on the object afterwards", func(t *testing.T) {
		w := newWorld(t)
		w.start()
		vm := w.running("blind")
		w.runtime.leave()
		w.runtime.set(string(vm.UID), func(s *machine.Status) {
			s.GuestReady = machine.Check{OK: no(), Reason: v1alpha1.ReasonProbeFailing, Message: "status 503"}
		})
		w.runtime.comeBack()
		w.awaitVM("blind", "is unready", has(v1alpha1.ConditionReady, "False", v1alpha1.ReasonProbeFailing))
	})

	t.Run("a one-shot that was started is not started again by a node that has forgotten it", func(t *testing.T) {
		w := newWorld(t)
		w.start()
		vm := w.running("once")
		w.stop()
		w.runtime = newFakeRuntime()
		w.start()
		got := w.awaitVM("once", "is lost", has(v1alpha1.ConditionFinished, "True", string(machine.Lost)))
		if got.Status.Phase != v1alpha1.PhaseFailed || w.runtime.told("ensure "+string(vm.UID)) != 0 {
			t.Errorf("phase %s, calls %v", got.Status.Phase, w.runtime.calls)
		}
	})

	t.Run("a VM the operator has ended with its lost node is stopped when the node is back", func(t *testing.T) {
		w := newWorld(t)
		w.start()
		vm := w.running("lost")
		w.apply(vm, v1alpha1.ManagerReachable, map[string]any{"conditions": []any{map[string]any{
			"type": v1alpha1.ConditionFinished, "status": "True", "reason": v1alpha1.ReasonNodeLost, "message": "node is gone",
			"lastTransitionTime": time.Now().UTC().Format(time.RFC3339),
		}}})
		w.await("it is removed", func() bool { return w.runtime.state(string(vm.UID)) == machine.Removed })
		w.running("other")
		if !has(v1alpha1.ConditionFinished, "True", v1alpha1.ReasonNodeLost)(w.get("lost")) {
			t.Errorf("the operator's word was overwritten: %+v", w.get("lost").Status)
		}
	})
}

func TestRuntimeThatDoesNotAnswer(t *testing.T) {
	t.Run("a VM that waits for it says so, one that ran is unknown until it answers again, and the ImpNode is not ready", func(t *testing.T) {
		w := newWorld(t)
		clk := clocktesting.NewFakeClock(time.Now())
		w.clock = clk
		w.start()
		w.running("old")
		w.runtime.leave()
		w.await("the agent has noticed", func() bool { return strings.Contains(w.log.String(), "runtime's stream ended") })
		old := w.get("old")
		waiting := w.vm("new")
		clk.Step(silence + time.Second)
		// A change of the object stands for the time that the queue waits in earnest.
		patch := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"labels":{"look":"again"}}}`))
		if err := w.admin.Patch(t.Context(), waiting, patch); err != nil {
			t.Fatal(err)
		}
		got := w.awaitVM("new", "says why", has(v1alpha1.ConditionReady, "False", v1alpha1.ReasonRuntimeStartFailed))
		if m := meta.FindStatusCondition(got.Status.Conditions, v1alpha1.ConditionReady).Message; !strings.Contains(m, "/run/imp/runtime.sock") {
			t.Errorf("message is %q", m)
		}
		node := &v1alpha1.ImpNode{}
		w.await("the node is not ready", func() bool {
			err := w.admin.Get(t.Context(), client.ObjectKey{Name: w.node}, node)
			c := meta.FindStatusCondition(node.Status.Conditions, v1alpha1.ConditionRuntimeReady)
			return err == nil && c != nil && c.Reason == v1alpha1.ReasonRuntimeUnreachable
		})
		if node.Status.Budget.VCPU != 8 {
			t.Errorf("the node's budget is %+v", node.Status.Budget)
		}
		writes := w.requests.of(vmWrite)
		w.patch(old, `{"metadata":{"labels":{"look":"again"}}}`)
		got = w.awaitVM("old", "is not known", has(v1alpha1.ConditionReady, "False", v1alpha1.ReasonRuntimeTimeout))
		if got.Status.Phase != v1alpha1.PhaseUnknown || got.Status.StartedAt == nil || got.Status.Incarnation != 1 {
			t.Errorf("status is %+v", got.Status)
		}
		w.await("the event", func() bool { return slices.Contains(w.events(old), "Warning RuntimeTimeout") })
		w.runtime.comeBack()
		w.await("the VM is known again", func() bool {
			clk.Step(reconnectLast)
			return has(v1alpha1.ConditionReady, "True", v1alpha1.ReasonRunning)(w.get("old"))
		})
		if e := w.events(old); slices.Contains(e, "Normal Restarted") {
			t.Errorf("events are %v", e)
		}
		w.await("the event", func() bool { return slices.Contains(w.events(old), "Normal Recovered") })
		if n := w.requests.of(vmWrite) - writes; n > 4 { // two of each VM
			t.Errorf("%d writes for the way there and back", n)
		}
		w.await("the new VM is told", func() bool {
			clk.Step(reconnectLast)
			return w.runtime.told("ensure "+string(waiting.UID)) == 1
		})
	})
}

func withPullSecret(name string) func(*v1alpha1.ImpVM) {
	return func(vm *v1alpha1.ImpVM) { vm.Spec.ImagePullSecrets = []corev1.LocalObjectReference{{Name: name}} }
}

func (w *world) secret(name, config string) {
	w.t.Helper()
	err := w.admin.Create(w.t.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name},
		Type:       corev1.SecretTypeDockerConfigJson,
		Data:       map[string][]byte{corev1.DockerConfigJsonKey: []byte(config)},
	})
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) letReadSecrets() {
	w.t.Helper()
	scheme := w.admin.Scheme()
	if err := rbacv1.AddToScheme(scheme); err != nil {
		w.t.Fatal(err)
	}
	err := w.admin.Create(w.t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "imp-agent-pull-secrets"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "imp-agent-pull-secrets"},
		Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: v1alpha1.SystemNamespace, Name: "imp-agent"}},
	})
	if err != nil {
		w.t.Fatal(err)
	}
}

func TestPullSecrets(t *testing.T) {
	t.Run("a secret the agent may not read is named with the remedy, and the VM is ordered once it may", func(t *testing.T) {
		w := newWorld(t)
		w.secret("pull", `{"auths":{"registry.test":{"auth":"dTpw"}}}`)
		w.start()
		vm := w.vm("private", withPullSecret("pull"))
		got := w.awaitVM("private", "says why", has(v1alpha1.ConditionDiskReady, "False", v1alpha1.ReasonImagePullFailed))
		message := meta.FindStatusCondition(got.Status.Conditions, v1alpha1.ConditionReady).Message
		for _, part := range []string{w.namespace + "/pull", "--clusterrole=imp-agent-pull-secrets"} {
			if !strings.Contains(message, part) {
				t.Errorf("message %q does not hold %q", message, part)
			}
		}
		if w.runtime.told("ensure "+string(vm.UID)) != 0 {
			t.Error("the runtime was told without the credentials")
		}
		w.letReadSecrets()
		w.await("the runtime is told", func() bool { return w.runtime.told("ensure "+string(vm.UID)) == 1 })
		spec, _ := w.runtime.spec(string(vm.UID))
		if want := (image.Credential{Registry: "registry.test", Username: "u", Password: "p"}); len(spec.Image.Credentials) != 1 || spec.Image.Credentials[0] != want {
			t.Errorf("%d credentials", len(spec.Image.Credentials))
		}
	})

	t.Run("a secret that is missing is named, and the VM is ordered once it is there", func(t *testing.T) {
		w := newWorld(t)
		w.letReadSecrets()
		w.start()
		vm := w.vm("private", withPullSecret("absent"))
		w.awaitVM("private", "says why", func(vm *v1alpha1.ImpVM) bool {
			c := meta.FindStatusCondition(vm.Status.Conditions, v1alpha1.ConditionReady)
			return c != nil && c.Reason == v1alpha1.ReasonImagePullFailed && strings.Contains(c.Message, "there is no such Secret")
		})
		w.secret("absent", `{"auths":{}}`)
		w.await("the runtime is told", func() bool { return w.runtime.told("ensure "+string(vm.UID)) == 1 })
	})

	t.Run("a runtime that has lost the credentials is given them again", func(t *testing.T) {
		w := newWorld(t)
		w.secret("pull", `{"auths":{"registry.test":{"auth":"dTpw"}}}`)
		w.letReadSecrets()
		w.start()
		vm := w.vm("private", withPullSecret("pull"))
		id := string(vm.UID)
		w.await("the runtime is told", func() bool { return w.runtime.told("ensure "+id) == 1 })
		w.runtime.set(id, failing(disk, fault.WaitingForSecrets, "the credentials were lost with a restart"))
		w.await("the runtime is told again", func() bool { return w.runtime.told("ensure "+id) >= 2 })
	})
}

func TestNode(t *testing.T) {
	t.Run("the node's lease and its ImpNode say what the runtime says, and what it says when it changes", func(t *testing.T) {
		w := newWorld(t)
		w.start()
		node := &v1alpha1.ImpNode{}
		ready := func(status metav1.ConditionStatus, reason string) func() bool {
			return func() bool {
				if err := w.admin.Get(t.Context(), client.ObjectKey{Name: w.node}, node); err != nil {
					return false
				}
				c := meta.FindStatusCondition(node.Status.Conditions, v1alpha1.ConditionRuntimeReady)
				return c != nil && c.Status == status && c.Reason == reason
			}
		}
		w.await("the runtime is ready", ready("True", v1alpha1.ReasonRuntimeUsable))
		want := v1alpha1.Budget{VCPU: 8, MemoryMiB: 8192, DiskGiB: 100}
		if node.Status.Budget != want || node.Status.BootID != "boot-1" || node.Status.Capabilities.Driver != "fake" || node.Status.Capabilities.OverheadMiB != 16 {
			t.Errorf("status is %+v", node.Status)
		}
		lease := &coordinationv1.Lease{}
		w.await("the lease is there", func() bool {
			return w.admin.Get(t.Context(), client.ObjectKey{Namespace: v1alpha1.SystemNamespace, Name: v1alpha1.LeasePrefix + w.node}, lease) == nil
		})
		if *lease.Spec.LeaseDurationSeconds != 40 || *lease.Spec.HolderIdentity != w.node || lease.Spec.RenewTime == nil {
			t.Errorf("lease is %+v", lease.Spec)
		}
		writes := w.requests.of("PATCH impnodes/status")
		w.runtime.leave()
		w.runtime.mu.Lock()
		w.runtime.info.Usable, w.runtime.info.Problem = false, "no QEMU at /usr/bin/qemu"
		w.runtime.mu.Unlock()
		w.runtime.comeBack()
		w.await("the runtime is not ready", ready("False", v1alpha1.ReasonRuntimeUnusable))
		if n := w.requests.of("PATCH impnodes/status") - writes; n != 1 {
			t.Errorf("%d writes of the ImpNode for one change", n)
		}
	})
}
