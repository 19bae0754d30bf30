package agent

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"imp.dev/imp/internal/machine"
)

// view is what the runtime has said: the latest Status of every VM it has, by UID. It is whole only between the end of a
// Watch's initial list and the Watch's end (synced).
type view struct {
	mu    sync.Mutex
	vms   map[string]machine.Status
	fresh map[string]machine.Status // collected by a Watch that has not told everything yet
	epoch int64                     // of the connection; 0 while not synced
	last  int64
	// awaySince is when the runtime was last known to answer.
	awaySince time.Time
}

func newView(now time.Time) *view {
	return &view{vms: map[string]machine.Status{}, awaySince: now}
}

// begin starts a new initial list. What was known before stays readable until it ends.
func (v *view) begin() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.fresh = map[string]machine.Status{}
}

// put takes st unless something newer of the same VM is known. It says whether st was news.
func (v *view) put(st machine.Status) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	into := v.vms
	if v.fresh != nil {
		into = v.fresh
	}
	if known, ok := into[st.ID]; ok && known.Revision >= st.Revision {
		return false
	}
	into[st.ID] = st
	return true
}

// sync ends the initial list: what is not in it does not exist any more.
func (v *view) sync() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.fresh != nil {
		v.vms, v.fresh = v.fresh, nil
	}
	v.last++
	v.epoch = v.last
}

// lost says that the Watch has ended.
func (v *view) lost(now time.Time) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.epoch != 0 {
		v.awaySince = now
	}
	v.epoch, v.fresh = 0, nil
}

// connection is the present Watch's number, 0 when there is none, and then how long there has been none.
func (v *view) connection(now time.Time) (epoch int64, away time.Duration) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.epoch != 0 {
		return v.epoch, 0
	}
	return 0, now.Sub(v.awaySince)
}

// get gives the status of one VM.
func (v *view) get(uid types.UID) (machine.Status, bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	st, ok := v.vms[string(uid)]
	return st, ok
}

// named gives the statuses of all VMs that have or had the name.
func (v *view) named(name types.NamespacedName) []machine.Status {
	v.mu.Lock()
	defer v.mu.Unlock()
	var out []machine.Status
	for _, st := range v.vms {
		if nameOf(st) == name {
			out = append(out, st)
		}
	}
	return out
}

// all gives every status.
func (v *view) all() []machine.Status {
	v.mu.Lock()
	defer v.mu.Unlock()
	out := make([]machine.Status, 0, len(v.vms))
	for _, st := range v.vms {
		out = append(out, st)
	}
	return out
}

func nameOf(st machine.Status) types.NamespacedName {
	return types.NamespacedName{Namespace: st.Namespace, Name: st.Name}
}
