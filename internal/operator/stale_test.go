package operator_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/operator/statusapply"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

func keyOf(name string) client.ObjectKey { return client.ObjectKey{Name: name} }

// frozen is a cache that has stopped: it gives VMs and claims as they were when it was made, and everything else as it is.
type frozen struct {
	client.Client
	vms    []v1alpha1.ImpVM
	claims []v1alpha1.ImpAddress
}

func (r *rig) frozen() *frozen {
	r.t.Helper()
	f := &frozen{Client: r.place.Client}
	r.thaw(f)
	return f
}

// thaw has the cache catch up with the API server, and stop again.
func (r *rig) thaw(f *frozen) {
	r.t.Helper()
	vms, claims := &v1alpha1.ImpVMList{}, &v1alpha1.ImpAddressList{}
	must(r.t, r.admin.List(r.t.Context(), vms, client.InNamespace(r.ns)))
	must(r.t, r.admin.List(r.t.Context(), claims))
	f.vms, f.claims = vms.Items, claims.Items
}

// readFrom has imp-place and the claims it makes read from a cache.
func (r *rig) readFrom(c client.Client) {
	r.place.Client, r.place.Addresses.Client = c, c
}

func (f *frozen) Get(ctx context.Context, key client.ObjectKey, into client.Object, opts ...client.GetOption) error {
	switch o := into.(type) {
	case *v1alpha1.ImpVM:
		for i := range f.vms {
			if client.ObjectKeyFromObject(&f.vms[i]) == key {
				f.vms[i].DeepCopyInto(o)
				return nil
			}
		}
	case *v1alpha1.ImpAddress:
		for i := range f.claims {
			if f.claims[i].Name == key.Name {
				f.claims[i].DeepCopyInto(o)
				return nil
			}
		}
	default:
		return f.Client.Get(ctx, key, into, opts...)
	}
	return apierrors.NewNotFound(v1alpha1.GroupVersion.WithResource("frozen").GroupResource(), key.Name)
}

func (f *frozen) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	switch l := list.(type) {
	case *v1alpha1.ImpVMList:
		(&v1alpha1.ImpVMList{Items: f.vms}).DeepCopyInto(l)
		return nil
	case *v1alpha1.ImpAddressList:
		o := (&client.ListOptions{}).ApplyOptions(opts)
		for i := range f.claims {
			network := fields.Set{"spec.network.uid": string(f.claims[i].Spec.Network.UID)}
			if o.FieldSelector == nil || o.FieldSelector.Matches(network) {
				l.Items = append(l.Items, *f.claims[i].DeepCopy())
			}
		}
		return nil
	}
	return f.Client.List(ctx, list, opts...)
}

func TestVMsPlacedFasterThanTheCacheFollowsDoNotOvercommitANode(t *testing.T) {
	r := newRig(t)
	node := r.node("a") // room for four
	r.class("small")
	names := []string{"vm-1", "vm-2", "vm-3", "vm-4", "vm-5", "vm-6"}
	for _, name := range names {
		r.vm(name)
	}
	r.place.Client = r.frozen()
	var working sync.WaitGroup
	for _, name := range names {
		working.Go(func() {
			for range 2 { // a second look, with the cache still behind, does nothing
				r.reconcile(name)
			}
		})
	}
	working.Wait()
	on := 0
	for _, name := range names {
		if r.get(name).Status.NodeName == node {
			on++
		}
	}
	if on != 4 {
		t.Errorf("%d VMs on a node with room for 4", on)
	}
	if got := len(r.writes.take()); got != 4*2+2 {
		t.Errorf("%d writes, want 2 for each of 4 placed and 1 for each of 2 that wait", got)
	}
}

func TestAnOperatorThatTakesOverCountsWhatItsCacheDoesNotShowYet(t *testing.T) {
	r := newRig(t)
	r.node("a")
	r.class("small", func(c *v1alpha1.ImpVMClass) { c.Spec.VCPU = 3 })
	r.vm("first")
	r.vm("second")
	behind := r.frozen()
	r.reconcile("first")
	r.restart(r.place.Client.(*inNamespace).Client)
	r.place.Client = behind
	r.reconcile("second")
	r.expectCondition("second", v1alpha1.ConditionScheduled, "False NoNodeFits: "+r.name("a")+": 2 short of vcpu")
}

func TestAWriteToWhatHasChangedSinceItWasReadIsNotMade(t *testing.T) {
	r, node := placed(t)
	r.place.Client = r.frozen()
	r.report("web", running) // the cache does not show it
	before := r.get("web")
	r.changeProbe()
	if again := r.reconcile("web").RequeueAfter; again <= 0 || again > 5*time.Second {
		t.Errorf("looks again after %v", again)
	}
	if diff := cmp.Diff(before, r.get("web")); diff != "" {
		t.Errorf("it was changed: %s", diff)
	}
	r.reach.Client = r.place.Client
	r.silent()
	if again := r.watchNode(node).RequeueAfter; again <= 0 || again > 5*time.Second {
		t.Errorf("looks again after %v", again)
	}
	if diff := cmp.Diff(before, r.get("web")); diff != "" {
		t.Errorf("it was changed: %s", diff)
	}
	r.expectEvents("web", "Normal Placed")
}

// Each write of the operator in turn is held back while the VM is deleted and another one is made under its name.
func TestAWriteHeldBackDoesNotTouchAnotherVMOfTheSameName(t *testing.T) {
	writes := map[string]struct {
		is      func(*http.Request) bool
		prepare func(r *rig, node string)
		write   func(r *rig, node string)
	}{
		"the finalizer": {is: onObject, write: func(r *rig, _ string) { r.reconcile("web") }},
		"the claim":     {is: onStatus, write: func(r *rig, _ string) { r.reconcile("web") }},
		"the word of a silent node": {
			is: onStatus,
			prepare: func(r *rig, _ string) {
				r.reconcile("web")
				r.silent()
			},
			write: func(r *rig, node string) { r.watchNode(node) },
		},
		"the drop of the finalizer": {
			is: onObject,
			prepare: func(r *rig, _ string) {
				r.reconcile("web")
				r.report("web", func(s *v1alpha1.ImpVMStatus) { s.ReleasedAssignment = 1 })
				r.delete("web")
			},
			write: func(r *rig, _ string) { r.reconcile("web") },
		},
		"the deletion after its time": {
			is: func(req *http.Request) bool { return req.Method == http.MethodDelete },
			prepare: func(r *rig, _ string) {
				r.reconcile("web")
				r.report("web", succeeded)
				r.clock.Step(time.Minute)
			},
			write: func(r *rig, _ string) { r.reconcile("web") },
		},
	}
	for name, test := range writes {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			node := r.node("a")
			r.class("small")
			brief := func(vm *v1alpha1.ImpVM) { vm.Spec.TTLSecondsAfterFinished = ptr.To[int32](1) }
			r.vm("web", brief)
			if test.prepare != nil {
				test.prepare(r, node)
			}
			var second *v1alpha1.ImpVM
			r.writes.fail = func(req *http.Request) (*http.Response, error) {
				if second != nil || !test.is(req) {
					return nil, nil
				}
				r.vanish("web")
				second = r.vm("web", brief)
				return nil, nil
			}
			test.write(r, node)
			if second == nil {
				t.Fatal("the write was not made")
			}
			if diff := cmp.Diff(second, r.get("web")); diff != "" {
				t.Errorf("the second VM was changed: %s", diff)
			}
			r.writes.fail = nil
			r.beat(node)
			r.reconcile("web")
			if got := r.get("web").Status; got.Assignment != 1 || got.NodeName == "" {
				t.Errorf("the second VM is not placed afterwards: %+v", got)
			}
		})
	}
}

func onStatus(req *http.Request) bool {
	return req.Method == http.MethodPatch && strings.HasSuffix(req.URL.Path, "/status")
}

func onObject(req *http.Request) bool { return req.Method == http.MethodPatch && !onStatus(req) }

// vanish removes the VM with no regard to finalizers.
func (r *rig) vanish(name string) {
	r.t.Helper()
	vm := r.get(name)
	if len(vm.Finalizers) > 0 {
		vm.Finalizers = nil
		must(r.t, r.admin.Update(r.t.Context(), vm))
	}
	must(r.t, client.IgnoreNotFound(r.admin.Delete(r.t.Context(), vm)))
}

func TestAClaimWhoseAnswerIsLostIsNotMadeTwice(t *testing.T) {
	r := newRig(t)
	r.node("a")
	r.node("b")
	r.class("small")
	r.vm("web")
	lost := errors.New("connection reset")
	behind := r.frozen()
	r.place.Client = behind
	r.writes.fail = func(req *http.Request) (*http.Response, error) {
		if !onStatus(req) {
			return nil, nil
		}
		r.writes.fail = nil
		answer, err := r.passOn(req)
		if err != nil {
			return nil, err
		}
		_ = answer.Body.Close()
		return nil, lost
	}
	if _, err := r.place.Reconcile(t.Context(), requestOf(r.ns, "web")); !errors.Is(err, lost) {
		t.Fatalf("got %v", err)
	}
	first := r.get("web").Status
	if first.Assignment != 1 {
		t.Fatal("the write was not made")
	}
	r.writes.take()
	r.reconcile("web") // the cache is still behind
	r.place.Client = behind.Client
	r.reconcile("web")
	r.expect()
	if got := r.get("web").Status; got.NodeName != first.NodeName || got.Assignment != 1 {
		t.Errorf("it is on %q with assignment %d", got.NodeName, got.Assignment)
	}
}

func TestAConflictOfFieldManagersIsADefectAndNotTriedAgainQuietly(t *testing.T) {
	err := apierrors.NewApplyConflict([]metav1.StatusCause{{Type: metav1.CauseTypeFieldManagerConflict, Field: ".status.nodeName"}}, "conflict")
	if got := statusapply.Explain(err); errors.Is(got, statusapply.ErrConflict) || !strings.Contains(got.Error(), "defect") {
		t.Errorf("got %v", got)
	}
	stale := apierrors.NewConflict(v1alpha1.GroupVersion.WithResource("impvms").GroupResource(), "web", errors.New("changed"))
	if got := statusapply.Explain(stale); !errors.Is(got, statusapply.ErrConflict) {
		t.Errorf("got %v", got)
	}
}
