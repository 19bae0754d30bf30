// Package address is the life of ImpAddresses, the claims by which VMs have the addresses of their networks.
//
//	        place binds the VM            finished, or deleted and released by its node
//	(none) ───────────────────► Bound ─────────────────────────────────────► Quarantined ──a minute──► (deleted)
//	                              │ deleted, its node silent                      ▲
//	                              └────────────────────────► Held ────────────────┘ the node, or proof, speaks
//
// Claims makes and changes them as part of what place does about a VM. Reconciler is the audit: it looks at each claim by itself,
// finds what has been left behind, and ends quarantines. Both write only to a claim as it was read, and the API server refuses a
// second claim of one address, so that two operators at once give no address twice; they may claim two for one VM, and the
// audit frees the one that the VM's status does not name.
package address

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/operator/statusapply"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Indexes of the cache. The API server can select by the first two as well.
const (
	IndexNetwork = "spec.network.uid"
	IndexNode    = "status.node"
	IndexVM      = "spec.vm.uid"
)

// manager of what is written here; claims are not applied but created and patched.
const manager = "imp-address"

// believedFor is how long what we wrote counts although the cache does not show it.
const believedFor = time.Minute

// Claims makes, changes and lets go of claims. Its methods may be called from many goroutines.
type Claims struct {
	// Client reads from the cache and writes; Live reads from the API server.
	Client client.Client
	Live   client.Reader
	Clock  clock.PassiveClock

	mu     sync.Mutex // held from reading what is taken to reserving
	primed bool
	// ours are claims the cache may not show yet, by name. One without a resourceVersion is reserved, or its outcome is not known.
	ours map[string]entry
}

type entry struct {
	claim *v1alpha1.ImpAddress
	at    time.Time
}

// Location is where a VM is bound. The zero value is nowhere.
type Location struct {
	Node       string
	Assignment int64
	// VTEP is the node's address in the overlay; "" where it is not known at the moment.
	VTEP string
}

// prime remembers what the cache does not show of what the API server has: a new leader's cache may be behind the last writes of
// its predecessor. The caller holds mu.
func (c *Claims) prime(ctx context.Context) error {
	if c.primed {
		return nil
	}
	cached, live := &v1alpha1.ImpAddressList{}, &v1alpha1.ImpAddressList{}
	err := errors.Join(c.Client.List(ctx, cached, client.UnsafeDisableDeepCopy), c.Live.List(ctx, live))
	if err != nil {
		return fmt.Errorf("reading what is claimed: %w", err)
	}
	shown := make(map[string]string, len(cached.Items))
	for i := range cached.Items {
		shown[cached.Items[i].Name] = cached.Items[i].ResourceVersion
	}
	for i := range live.Items {
		if claim := &live.Items[i]; shown[claim.Name] != claim.ResourceVersion {
			c.remember(claim)
		}
	}
	c.primed = true
	return nil
}

// remember a claim as it is, or is about to be. The caller holds mu.
func (c *Claims) remember(claim *v1alpha1.ImpAddress) {
	if c.ours == nil {
		c.ours = map[string]entry{}
	}
	c.ours[claim.Name] = entry{claim: claim, at: c.Clock.Now()}
}

func (c *Claims) wrote(claim *v1alpha1.ImpAddress) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.remember(claim)
}

// forget what is remembered of claim, but nothing that was written there since by another.
func (c *Claims) forget(claim *v1alpha1.ImpAddress) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e, ok := c.ours[claim.Name]; ok && e.claim.UID == claim.UID && e.claim.Spec.VM.UID == claim.Spec.VM.UID {
		delete(c.ours, claim.Name)
	}
}

// Gone tells of a claim that the cache has just lost.
func (c *Claims) Gone(claim *v1alpha1.ImpAddress) { c.forget(claim) }

// newest of what the cache shows and what we remember under the name; cached may be nil. The caller holds mu.
func (c *Claims) newest(name string, cached *v1alpha1.ImpAddress) *v1alpha1.ImpAddress {
	e, ok := c.ours[name]
	switch {
	case !ok:
		return cached
	case c.Clock.Since(e.at) < believedFor && (cached == nil || older(cached, e.claim)):
		return e.claim
	}
	delete(c.ours, name)
	return cached
}

// older says that a is an older version than b. Anything that was seen is newer than what is only about to be written.
func older(a, b *v1alpha1.ImpAddress) bool {
	order, err := resourceversion.CompareResourceVersion(a.ResourceVersion, b.ResourceVersion)
	return err == nil && order < 0
}

// of gives the claims of a network by address, those included that are about to be written. They are not to be changed. The
// caller holds mu.
func (c *Claims) of(ctx context.Context, network types.UID) (map[netip.Addr]*v1alpha1.ImpAddress, error) {
	list := &v1alpha1.ImpAddressList{}
	err := c.Client.List(ctx, list, client.MatchingFields{IndexNetwork: string(network)}, client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil, fmt.Errorf("reading what is claimed: %w", err)
	}
	claims := make(map[netip.Addr]*v1alpha1.ImpAddress, len(list.Items))
	add := func(claim *v1alpha1.ImpAddress) {
		if address, err := netip.ParseAddr(claim.Spec.Address); err == nil {
			claims[address] = claim
		}
	}
	for i := range list.Items {
		add(c.newest(list.Items[i].Name, &list.Items[i]))
	}
	for name, e := range c.ours {
		if e.claim.Spec.Network.UID != network {
			continue
		}
		if address, err := netip.ParseAddr(e.claim.Spec.Address); err == nil && claims[address] == nil {
			if claim := c.newest(name, nil); claim != nil {
				claims[address] = claim
			}
		}
	}
	return claims, nil
}

// get a claim by name; nil if there is none. One that was written a moment ago and is not in the cache is asked for.
func (c *Claims) get(ctx context.Context, name string) (*v1alpha1.ImpAddress, error) {
	cached := &v1alpha1.ImpAddress{}
	err := c.Client.Get(ctx, client.ObjectKey{Name: name}, cached)
	missing := apierrors.IsNotFound(err)
	if err != nil && !missing {
		return nil, fmt.Errorf("reading claim %s: %w", name, err)
	}
	if missing {
		cached = nil
	}
	c.mu.Lock()
	claim := c.newest(name, cached)
	c.mu.Unlock()
	if missing && claim != nil {
		return c.live(ctx, name)
	}
	return claim, nil
}

// live reads a claim from the API server; nil if there is none.
func (c *Claims) live(ctx context.Context, name string) (*v1alpha1.ImpAddress, error) {
	claim := &v1alpha1.ImpAddress{}
	err := c.Live.Get(ctx, client.ObjectKey{Name: name}, claim)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading claim %s: %w", name, err)
	}
	return claim, nil
}

// write gives claim another status, unless somebody changed it since it was read. Since is filled in.
func (c *Claims) write(ctx context.Context, claim *v1alpha1.ImpAddress, status v1alpha1.ImpAddressStatus) error {
	status.Since, status.ReleasedAssignment = claim.Status.Since, claim.Status.ReleasedAssignment
	if status.State != claim.Status.State {
		status.Since = c.now()
	}
	if status == claim.Status {
		return nil
	}
	changed := claim.DeepCopy()
	changed.Status = status
	patch := client.MergeFromWithOptions(claim, client.MergeFromWithOptimisticLock{})
	if err := c.Client.Patch(ctx, changed, patch, client.FieldOwner(manager)); err != nil {
		return explain("changing claim", claim.Name, err)
	}
	c.wrote(changed)
	return nil
}

// Remove a claim, unless somebody changed it since it was read.
func (c *Claims) Remove(ctx context.Context, claim *v1alpha1.ImpAddress) error {
	err := c.Client.Delete(ctx, claim, client.Preconditions{UID: &claim.UID, ResourceVersion: &claim.ResourceVersion})
	if err != nil && !apierrors.IsNotFound(err) {
		return explain("deleting claim", claim.Name, err)
	}
	c.forget(claim)
	return nil
}

// now in the precision that the API keeps.
func (c *Claims) now() metav1.Time { return metav1.NewTime(c.Clock.Now().Truncate(time.Second)) }

// explain makes statusapply.ErrConflict of what says that a claim is not as it was read.
func explain(doing, name string, err error) error {
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) || apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("%s %s: %w", doing, name, statusapply.ErrConflict)
	}
	return fmt.Errorf("%s %s: %w", doing, name, err)
}
