package networks

import (
	"context"
	"fmt"
	"math"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// collection holds the objects of one filtered watch. Objects in it are never changed: a later one takes the place of an earlier.
type collection[T client.Object] struct {
	reflector *cache.Reflector
	// changed is called after every change; it must not block.
	changed func()

	mu      sync.Mutex
	objects map[string]T
	// whole says that everything there is has been told at least once.
	whole bool
	// err is why the API server could not be asked last, nil once it answers.
	err error
}

// watchBackoff of a watch that the API server refuses or does not answer. A reflector's own waits up to a minute, in which a guest
// that moved is sought in the wrong place.
func watchBackoff() *wait.Backoff {
	return &wait.Backoff{Duration: 250 * time.Millisecond, Factor: 2, Jitter: 0.5, Cap: 5 * time.Second, Steps: math.MaxInt32}
}

// newCollection makes the collection of what options select. list makes an empty list of T's kind.
func newCollection[T client.Object](c client.WithWatch, list func() client.ObjectList, example T, changed func(), options ...client.ListOption) *collection[T] {
	out := &collection[T]{changed: changed, objects: map[string]T{}}
	with := func(o metav1.ListOptions) []client.ListOption {
		return append([]client.ListOption{&client.ListOptions{Raw: &o, Limit: o.Limit, Continue: o.Continue}}, options...)
	}
	source := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			l := list()
			err := c.List(ctx, l, with(o)...)
			out.note(err)
			return l, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			w, err := c.Watch(ctx, list(), with(o)...)
			out.note(err)
			return w, err
		},
	}
	out.reflector = cache.NewReflectorWithOptions(source, example, out, cache.ReflectorOptions{Backoff: watchBackoff()})
	return out
}

// run watches until ctx ends.
func (c *collection[T]) run(ctx context.Context) { c.reflector.RunWithContext(ctx) }

// all gives the objects, in no order, and whether they are all there are.
func (c *collection[T]) all() (objects []T, whole bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make([]T, 0, len(c.objects))
	for _, o := range c.objects {
		out = append(out, o)
	}
	return out, c.whole
}

// one gives the only object, the zero T if there is none, and whether that is certain.
func (c *collection[T]) one() (object T, whole bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, o := range c.objects {
		object = o
	}
	return object, c.whole
}

// problem is why the API server could not be asked last, nil while it answers.
func (c *collection[T]) problem() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

func (c *collection[T]) note(err error) {
	c.mu.Lock()
	news := (err == nil) != (c.err == nil)
	c.err = err
	c.mu.Unlock()
	if news {
		c.changed()
	}
}

func (c *collection[T]) change(f func()) {
	c.mu.Lock()
	f()
	c.mu.Unlock()
	c.changed()
}

// Add implements cache.ReflectorStore.
func (c *collection[T]) Add(o any) error {
	object, ok := o.(T)
	if !ok {
		return fmt.Errorf("keeping object: a %T is none of this watch", o)
	}
	object.SetManagedFields(nil) // nothing here reads who set which field
	c.change(func() { c.objects[key(object)] = object })
	return nil
}

// Update implements cache.ReflectorStore.
func (c *collection[T]) Update(o any) error { return c.Add(o) }

// Delete implements cache.ReflectorStore.
func (c *collection[T]) Delete(o any) error {
	object, ok := o.(T)
	if !ok {
		return fmt.Errorf("dropping object: a %T is none of this watch", o)
	}
	c.change(func() { delete(c.objects, key(object)) })
	return nil
}

// Replace implements cache.ReflectorStore: a list, at the beginning or after a watch that was lost for too long.
func (c *collection[T]) Replace(list []any, _ string) error {
	objects := make(map[string]T, len(list))
	for _, o := range list {
		object, ok := o.(T)
		if !ok {
			return fmt.Errorf("keeping list: a %T is none of this watch", o)
		}
		object.SetManagedFields(nil)
		objects[key(object)] = object
	}
	c.change(func() { c.objects, c.whole = objects, true })
	return nil
}

// Resync implements cache.ReflectorStore; there is nobody to tell again.
func (c *collection[T]) Resync() error { return nil }

func key(o client.Object) string { return o.GetNamespace() + "/" + o.GetName() }
