package chaos

import (
	"context"
	"fmt"
	"maps"
	"strconv"
	"sync"
	"time"

	"imp.dev/imp/api/v1alpha1"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// epochAnnotation says which VM of its slot one is: Replace asks for the next.
const epochAnnotation = "imp.dev/chaos-epoch"

// wish is what the users want in a slot.
type wish struct {
	exists  bool
	epoch   int
	stopped bool
	delay   time.Duration
	reset   string
}

// slot is a place that one VM after another has. Its user repeats what fails, as a person with kubectl does, until the wish is in the API.
type slot struct {
	number int
	runner *runner
	wake   chan struct{}

	mu      sync.Mutex
	wish    wish
	applied bool      // the wish is in the API
	uid     types.UID // of the VM that is there as wished, "" for none
}

// apply changes the wish.
func (s *slot) apply(change func(*wish)) {
	s.mu.Lock()
	before := s.wish
	change(&s.wish)
	if s.wish != before {
		s.applied = false
	}
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// change is what a step of the schedule does to the wish.
func (w *wish) change(step Step, serial int) {
	switch step.Action {
	case Create:
		if !w.exists {
			w.epoch++
		}
		w.exists = true
	case Delete:
		w.exists = false
	case Replace:
		w.exists, w.epoch, w.stopped = true, w.epoch+1, false
	case Stop, Start:
		w.stopped = step.Action == Stop
	case Policy:
		w.delay = shortDelay + longDelay - w.delay
	case Reset:
		w.reset = strconv.Itoa(serial)
	}
}

const userRetry = 300 * time.Millisecond

// run works until ctx ends.
func (s *slot) run(ctx context.Context) {
	for {
		if err := s.once(ctx); err == nil {
			select {
			case <-s.wake:
			case <-ctx.Done():
				return
			}
			continue
		}
		retry := time.NewTimer(userRetry)
		select {
		case <-retry.C:
		case <-ctx.Done():
			retry.Stop()
			return
		}
	}
}

// once does the next thing that the wish needs. An error says that it is not in the API yet.
func (s *slot) once(ctx context.Context) error {
	s.mu.Lock()
	w := s.wish
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	c := s.runner.client
	vm := &v1alpha1.ImpVM{}
	err := c.Get(ctx, client.ObjectKey{Namespace: namespace, Name: slotName(s.number)}, vm)
	switch {
	case apierrors.IsNotFound(err):
		if !w.exists {
			return s.done(w, "")
		}
		vm = s.runner.vm(s.number)
		s.fill(vm, w)
		if err := c.Create(ctx, vm); err != nil {
			return err
		}
		return s.done(w, vm.UID)
	case err != nil:
		return err
	case !w.exists || vm.Annotations[epochAnnotation] != strconv.Itoa(w.epoch):
		s.mu.Lock()
		s.uid = ""
		s.mu.Unlock()
		if vm.DeletionTimestamp == nil {
			if err := c.Delete(ctx, vm, client.Preconditions{UID: &vm.UID}); err != nil {
				return err
			}
		}
		return fmt.Errorf("%s is not gone yet", vm.Name)
	}
	before := vm.DeepCopy()
	s.fill(vm, w)
	if err := c.Patch(ctx, vm, client.MergeFrom(before)); err != nil {
		return err
	}
	return s.done(w, vm.UID)
}

// fill puts the wish into an object.
func (s *slot) fill(vm *v1alpha1.ImpVM, w wish) {
	kind := s.runner.schedule.Kinds[s.number]
	vm.Annotations = maps.Clone(vm.Annotations)
	metav1.SetMetaDataAnnotation(&vm.ObjectMeta, epochAnnotation, strconv.Itoa(w.epoch))
	if w.reset != "" {
		metav1.SetMetaDataAnnotation(&vm.ObjectMeta, v1alpha1.AnnotationRestartReset, w.reset)
	}
	if !kind.persistent() {
		return
	}
	vm.Spec.RestartPolicy = kind.policy(w.delay)
	vm.Spec.DesiredState = v1alpha1.DesiredRunning
	if w.stopped {
		vm.Spec.DesiredState = v1alpha1.DesiredStopped
	}
}

func (s *slot) done(w wish, uid types.UID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.uid = uid
	if s.wish != w {
		return fmt.Errorf("the wish has changed meanwhile")
	}
	s.applied = true
	return nil
}

// now gives the VM that is there, and the wish; applied is false while the API does not have it.
func (s *slot) now() (uid string, w wish, applied bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return string(s.uid), s.wish, s.applied
}
