package place

import (
	"context"
	"fmt"
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/schedule"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// listed is a cache, or an API server, with these VMs.
type listed []v1alpha1.ImpVM

func (listed) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return fmt.Errorf("the ledger lists")
}

func (l listed) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	list.(*v1alpha1.ImpVMList).Items = l
	return nil
}

func boundVM(uid string) *v1alpha1.ImpVM {
	return &v1alpha1.ImpVM{
		ObjectMeta: metav1.ObjectMeta{UID: types.UID(uid)},
		Status: v1alpha1.ImpVMStatus{
			NodeName: "node-a", Assignment: 1, Resources: &v1alpha1.Resources{VCPU: 1, MemoryMiB: 100, DiskGiB: 1},
		},
	}
}

func TestWhatTheLedgerHoldsForAVM(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	one := schedule.Amount{VCPU: 1, MemoryMiB: 100, DiskGiB: 1}
	unplaced := v1alpha1.ImpVM{ObjectMeta: metav1.ObjectMeta{UID: "a"}}
	for name, test := range map[string]struct {
		assumed bool // by a decision of ours, on what the cache had
		primed  bool // by what the API server had
		cache   listed
		after   time.Duration
		want    schedule.Amount
	}{
		"a binding the cache does not show yet":                            {assumed: true, cache: listed{unplaced}, want: one},
		"a binding the cache shows, once":                                  {assumed: true, cache: listed{*boundVM("a")}, want: one},
		"nothing, once the VM is gone from the cache, however soon":        {assumed: true, cache: nil},
		"a predecessor's binding, though the cache has not seen the VM":    {primed: true, cache: nil, want: one},
		"a predecessor's binding only until the cache must have caught up": {primed: true, cache: nil, after: assumedFor},
		"a binding that was never written only so long":                    {assumed: true, cache: listed{unplaced}, after: assumedFor},
	} {
		t.Run(name, func(t *testing.T) {
			l := &ledger{}
			live := listed{}
			if test.primed {
				live = listed{*boundVM("a")}
			}
			if err := l.prime(t.Context(), live, now); err != nil {
				t.Fatal(err)
			}
			if test.assumed {
				l.assume(boundVM("a"), now)
			}
			taken, err := l.bound(t.Context(), test.cache, now.Add(test.after), &v1alpha1.ImpVM{ObjectMeta: metav1.ObjectMeta{UID: "another"}})
			if err != nil {
				t.Fatal(err)
			}
			if got := taken["node-a"].amount; got != test.want {
				t.Errorf("taken of the node: %+v, want %+v", got, test.want)
			}
		})
	}
}
