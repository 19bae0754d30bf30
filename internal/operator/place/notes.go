package place

import (
	"sync"
	"time"

	"imp.dev/imp/api/v1alpha1"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// notes are what is remembered of a VM between passes and may be lost with the process.
type notes struct {
	mu sync.Mutex
	of map[types.NamespacedName]*note
}

type note struct {
	uid       types.UID
	written   string // resourceVersion of our latest write
	writtenAt time.Time
	messageAt time.Time           // when Scheduled=False was last written
	refused   map[string]*refused // by node
	failedOn  string              // the node that its last failure took it off; "" once it has been placed again
	foreign   types.UID           // of the VM that has its address, once that was told
}

// refused is a node that gave the VM back.
type refused struct {
	until time.Time
	times int
}

// get the note of vm, made if need be. One VM is looked at by one worker at a time, so what is in it needs no lock.
func (n *notes) get(vm *v1alpha1.ImpVM) *note {
	n.mu.Lock()
	defer n.mu.Unlock()
	key := client.ObjectKeyFromObject(vm)
	if found := n.of[key]; found != nil && found.uid == vm.UID {
		return found
	}
	if n.of == nil {
		n.of = map[types.NamespacedName]*note{}
	}
	made := &note{uid: vm.UID, refused: map[string]*refused{}}
	n.of[key] = made
	return made
}

func (n *notes) forget(key types.NamespacedName) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.of, key)
}

// wrote remembers a write of ours that made vm what it is now.
func (n *note) wrote(vm *v1alpha1.ImpVM, now time.Time) {
	n.written, n.writtenAt = vm.ResourceVersion, now
}

// believedFor is how long a cache may be behind. After that the cache is right: the API server may have been restored from a
// backup, and its versions with it.
const believedFor = time.Minute

// ahead says that vm is older than our own latest write to it: deciding by it would decide a second time.
func (n *note) ahead(vm *v1alpha1.ImpVM, now time.Time) bool {
	if n.written == "" || now.Sub(n.writtenAt) > believedFor {
		return false
	}
	order, err := resourceversion.CompareResourceVersion(vm.ResourceVersion, n.written)
	return err == nil && order < 0
}

// refuse remembers that the node gave the VM back; each time it is left alone for longer.
func (n *note) refuse(node string, now time.Time) {
	const shortest, longest = 10 * time.Second, 5 * time.Minute
	of := n.refused[node]
	if of == nil {
		of = &refused{}
		n.refused[node] = of
	}
	of.until = now.Add(min(longest, shortest<<min(of.times, 10)))
	of.times++
}
