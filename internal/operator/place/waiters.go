package place

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"imp.dev/imp/api/v1alpha1"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// spare is by how many more VMs are woken than there are free addresses, so that one whose pass fails holds up nobody.
const spare = 8

// waiters are the VMs that wait for an address, by network. What else changes in the cluster does not concern them: only an address
// that becomes free wakes some, the longest waiting first. A VM is entered before its pass looks for an address and taken out when
// it has one or waits for something else; so none is free unnoticed between a look and its end.
type waiters struct {
	mu sync.Mutex
	of map[types.NamespacedName]map[types.NamespacedName]waiter
	// enqueue starts a pass; nil before the controller has started.
	enqueue func(types.NamespacedName)
}

type waiter struct {
	since time.Time
	// address is the only one that will do; "" for any.
	address string
}

// networkOf is the name of the network that the VM wants to be in.
func networkOf(vm *v1alpha1.ImpVM) types.NamespacedName {
	return types.NamespacedName{Namespace: vm.Namespace, Name: vm.Spec.NetworkRef.Name}
}

func (w *waiters) start(enqueue func(types.NamespacedName)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.enqueue = enqueue
}

func (w *waiters) add(vm *v1alpha1.ImpVM) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.of == nil {
		w.of = map[types.NamespacedName]map[types.NamespacedName]waiter{}
	}
	network := networkOf(vm)
	if w.of[network] == nil {
		w.of[network] = map[types.NamespacedName]waiter{}
	}
	address := vm.Spec.Address
	if vm.Status.IP != "" {
		address = vm.Status.IP
	}
	w.of[network][client.ObjectKeyFromObject(vm)] = waiter{since: vm.CreationTimestamp.Time, address: address}
}

// remove the VM, and say for which network it was waiting.
func (w *waiters) remove(vm types.NamespacedName) (network types.NamespacedName, was bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for network, waiting := range w.of {
		if _, ok := waiting[vm]; !ok {
			continue
		}
		delete(waiting, vm)
		if len(waiting) == 0 {
			delete(w.of, network)
		}
		return network, true
	}
	return types.NamespacedName{}, false
}

func (w *waiters) none(network types.NamespacedName) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.of[network]) == 0
}

// has says that the VM waits for an address and for nothing else.
func (w *waiters) has(vm *v1alpha1.ImpVM) bool {
	if vm.Spec.NetworkRef == nil {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	_, ok := w.of[networkOf(vm)][client.ObjectKeyFromObject(vm)]
	return ok
}

// wake as many as there are free addresses, and those whose only one is free.
func (w *waiters) wake(network types.NamespacedName, count int, free func(address string) bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if count <= 0 || w.enqueue == nil {
		return
	}
	var dynamic []types.NamespacedName
	for vm, waits := range w.of[network] {
		switch {
		case waits.address == "":
			dynamic = append(dynamic, vm)
		case free(waits.address):
			w.enqueue(vm)
		}
	}
	waiting := w.of[network]
	slices.SortFunc(dynamic, func(a, b types.NamespacedName) int {
		return cmp.Or(waiting[a].since.Compare(waiting[b].since), cmp.Compare(a.Name, b.Name))
	})
	for _, vm := range dynamic[:min(len(dynamic), count+spare)] {
		w.enqueue(vm)
	}
}
