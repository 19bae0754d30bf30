package agent

import (
	"reflect"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/restart"
)

// memory is what the agent remembers of one VM. All of it can be lost at any moment: it saves work and events, and decides
// nothing that matters. It is used by one reconcile at a time.
type memory struct {
	pace pace
	// told is the spec the runtime accepted on connection epoch at toldAt.
	told   machine.Spec
	epoch  int64
	toldAt time.Time
	// latest is the object as our own last write left it: the cache is some milliseconds behind.
	latest *v1alpha1.ImpVM
	// trouble says that a failure was seen since the VM was last Ready.
	trouble bool
	// loggedExit is the incarnation whose end was logged.
	loggedExit int64
	// pullingSince is when a pull was first seen, pullingTold when its progress was last told.
	pullingSince, pullingTold time.Time
	// absentTold is why the VM goes on without an object, as it was logged.
	absentTold string
	// absentSince is since when the object has been missing without a doubt; zero while it has not.
	absentSince time.Time
	// looks at the object of the absent VM on connection looksEpoch.
	looks      int
	looksEpoch int64
	// behindSince is when the object was first found to have an older assignment than the runtime; zero while it has not.
	behindSince time.Time
	// resetTold is the value of the reset annotation that was told to be none.
	resetTold string
	// networkSince is when the VM's network was first found not to be ready; zero while it is.
	networkSince time.Time
	// failures in a row of something that is tried again, for the backoff.
	failures int
}

// memories holds a memory for each UID.
type memories struct {
	mu  sync.Mutex
	vms map[types.UID]*memory
}

func newMemories() *memories { return &memories{vms: map[types.UID]*memory{}} }

func (m *memories) of(uid types.UID) *memory {
	m.mu.Lock()
	defer m.mu.Unlock()
	out, ok := m.vms[uid]
	if !ok {
		out = &memory{}
		m.vms[uid] = out
	}
	return out
}

func (m *memories) forget(uid types.UID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.vms, uid)
}

// newer gives the later of the cache's object and the one our last write left.
func (m *memory) newer(cached *v1alpha1.ImpVM) *v1alpha1.ImpVM {
	if m.latest == nil || m.latest.UID != cached.UID {
		return cached
	}
	if order, err := resourceversion.CompareResourceVersion(cached.ResourceVersion, m.latest.ResourceVersion); err != nil || order >= 0 {
		m.latest = nil
		return cached
	}
	return m.latest
}

// knows says that the runtime was told spec on connection epoch. History and the pinned digest are not compared: they follow
// from what the runtime itself reports. Neither are credentials, which are not kept here.
func (m *memory) knows(spec machine.Spec, epoch int64) bool {
	return m.epoch == epoch && epoch != 0 && reflect.DeepEqual(comparable(m.told), comparable(spec))
}

func comparable(s machine.Spec) machine.Spec {
	s.History = restart.History{}
	s.Image.Digest = ""
	s.Image.Credentials, s.Image.NeedsCredentials = nil, false
	return s
}

// backoff counts a failure and gives the time to wait: 1 s doubling to 1 min.
func (m *memory) backoff() time.Duration {
	const first, last = time.Second, time.Minute
	wait := last
	if m.failures < 6 {
		wait = first << m.failures
	}
	m.failures++
	return wait
}
