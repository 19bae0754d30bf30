package network

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"strconv"
	"strings"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/operator/statusapply"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// The numbers that networks are given. Lower ones are left to others: a VNI has 24 bits, and people use small ones by hand.
const (
	firstVNI = 1 << 12
	lastVNI  = 1<<24 - 1
)

// vniTries bounds how many numbers one pass finds claimed by others.
const vniTries = 64

// claimVNI gives the number that is the network's own: the one of its status while its claim holds, else the first that can be claimed
// from a place made of the network's UID.
func (r *Reconciler) claimVNI(ctx context.Context, network *v1alpha1.ImpNetwork) (int32, error) {
	holders, err := holders(ctx, r.Client)
	if err != nil {
		return 0, err
	}
	number := network.Status.VNI
	if number == 0 {
		number = startVNI(network.UID)
	}
	for range vniTries {
		switch holder, taken := holders[number]; {
		case taken && holder == network.UID:
			return number, nil
		case !taken:
			holder, err := r.tryVNI(ctx, network, number)
			if err != nil {
				return 0, err
			}
			if holder == network.UID {
				return number, nil
			}
		}
		if number == network.Status.VNI { // two networks must not have one
			r.Log.Error("the VNI of a network is another's", "vni", number, "namespace", network.Namespace, "name", network.Name)
		}
		number++
		if number > lastVNI {
			number = firstVNI
		}
	}
	return 0, fmt.Errorf("claiming a VNI: %d in a row are taken: %w", vniTries, statusapply.ErrConflict)
}

func startVNI(network types.UID) int32 {
	hash := fnv.New64a()
	_, _ = hash.Write([]byte(network)) // it never fails
	return int32(firstVNI + hash.Sum64()%(lastVNI-firstVNI+1))
}

// tryVNI makes the claim, or tells whose it is.
func (r *Reconciler) tryVNI(ctx context.Context, network *v1alpha1.ImpNetwork, number int32) (types.UID, error) {
	lease := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: v1alpha1.SystemNamespace, Name: leaseName(number)},
		Spec: coordinationv1.LeaseSpec{
			HolderIdentity: ptr.To(string(network.UID)), AcquireTime: &metav1.MicroTime{Time: r.Clock.Now()},
		},
	}
	err := r.Client.Create(ctx, lease, client.FieldOwner(v1alpha1.ManagerNetwork))
	if err == nil {
		return network.UID, nil
	}
	if !apierrors.IsAlreadyExists(err) {
		return "", fmt.Errorf("claiming VNI %d: %w", number, err)
	}
	err = r.Live.Get(ctx, client.ObjectKeyFromObject(lease), lease)
	if apierrors.IsNotFound(err) {
		return "", fmt.Errorf("claiming VNI %d: %w", number, statusapply.ErrConflict)
	}
	if err != nil {
		return "", fmt.Errorf("reading the claim of VNI %d: %w", number, err)
	}
	return types.UID(ptr.Deref(lease.Spec.HolderIdentity, "")), nil
}

// freeVNI deletes what the network claimed.
func (r *Reconciler) freeVNI(ctx context.Context, network *v1alpha1.ImpNetwork) error {
	// Of a number that was claimed and never written down, VNIs hears when the network is gone.
	holders, err := holders(ctx, r.Client)
	if err != nil {
		return err
	}
	if network.Status.VNI != 0 {
		holders[network.Status.VNI] = network.UID // the cache may not show it yet
	}
	for number, holder := range holders {
		if holder == network.UID {
			if err := freeLease(ctx, r.Client, r.Live, number, network.UID); err != nil {
				return err
			}
		}
	}
	return nil
}

func freeLease(ctx context.Context, c client.Client, live client.Reader, number int32, holder types.UID) error {
	lease := &coordinationv1.Lease{}
	err := live.Get(ctx, client.ObjectKey{Namespace: v1alpha1.SystemNamespace, Name: leaseName(number)}, lease)
	if err == nil && ptr.Deref(lease.Spec.HolderIdentity, "") == string(holder) {
		err = c.Delete(ctx, lease, client.Preconditions{UID: &lease.UID, ResourceVersion: &lease.ResourceVersion})
	}
	if apierrors.IsConflict(err) {
		return fmt.Errorf("freeing VNI %d: %w", number, statusapply.ErrConflict)
	}
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("freeing VNI %d: %w", number, err)
	}
	return nil
}

func leaseName(number int32) string { return v1alpha1.VNILeasePrefix + strconv.Itoa(int(number)) }

func numberOf(lease string) (int32, bool) {
	digits, ok := strings.CutPrefix(lease, v1alpha1.VNILeasePrefix)
	if !ok {
		return 0, false
	}
	number, err := strconv.ParseInt(digits, 10, 32)
	return int32(number), err == nil && leaseName(int32(number)) == lease
}

// holders of the VNIs that are claimed. A claim that names nobody is somebody's who wants the number left alone.
func holders(ctx context.Context, cached client.Reader) (map[int32]types.UID, error) {
	leases := &coordinationv1.LeaseList{}
	err := cached.List(ctx, leases, client.InNamespace(v1alpha1.SystemNamespace), client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil, fmt.Errorf("reading which VNIs are claimed: %w", err)
	}
	found := map[int32]types.UID{}
	for i := range leases.Items {
		if number, ok := numberOf(leases.Items[i].Name); ok {
			found[number] = types.UID(ptr.Deref(leases.Items[i].Spec.HolderIdentity, ""))
		}
	}
	return found, nil
}

// VNIs looks at one claim of a VNI at a time, the Lease, and frees it when its network is gone or has another one.
type VNIs struct {
	Client client.Client
	Live   client.Reader
	Log    *slog.Logger
}

// Reconcile implements reconcile.Reconciler.
func (v *VNIs) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	number, ok := numberOf(req.Name)
	if !ok {
		return ctrl.Result{}, nil
	}
	lease := &coordinationv1.Lease{}
	if err := v.Client.Get(ctx, req.NamespacedName, lease); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	holder := types.UID(ptr.Deref(lease.Spec.HolderIdentity, ""))
	if holder == "" {
		return ctrl.Result{}, nil
	}
	for _, from := range []client.Reader{v.Client, v.Live} { // the API server is asked only when the cache says that it is left over
		networks := &v1alpha1.ImpNetworkList{}
		if err := from.List(ctx, networks); err != nil {
			return ctrl.Result{}, fmt.Errorf("reading networks: %w", err)
		}
		if wanted(networks.Items, holder, number) {
			return ctrl.Result{}, nil
		}
	}
	err := freeLease(ctx, v.Client, v.Live, number, holder)
	if errors.Is(err, statusapply.ErrConflict) {
		return ctrl.Result{RequeueAfter: afterConflict}, nil
	}
	if err == nil {
		v.Log.Info("VNI of a network that is gone was freed", "vni", number, "network", holder)
	}
	return ctrl.Result{}, err
}

// wanted says that a network has the number, or may be about to.
func wanted(networks []v1alpha1.ImpNetwork, holder types.UID, number int32) bool {
	for i := range networks {
		if networks[i].UID == holder {
			return networks[i].Status.VNI == 0 || networks[i].Status.VNI == number
		}
	}
	return false
}
