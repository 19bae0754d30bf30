package agent

import (
	"context"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// identity is the UID of the namespace kube-system: what tells one cluster from another. "" until it was read.
type identity struct{ uid atomic.Pointer[string] }

func (i *identity) get() string {
	if p := i.uid.Load(); p != nil {
		return *p
	}
	return ""
}

// Waits between two tries to read it, doubling from the first to the last.
const (
	clusterFirst = time.Second
	clusterLast  = time.Minute
)

// readCluster reads the identity once. Without it no absence has a consequence, and everything else works.
func (a *Agent) readCluster(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, orderTimeout)
	defer cancel()
	namespace := &metav1.PartialObjectMetadata{}
	namespace.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Namespace"))
	err := a.client.Get(ctx, client.ObjectKey{Name: metav1.NamespaceSystem}, namespace)
	if err != nil || namespace.UID == "" {
		a.log.Warn("cluster's identity not read: no VM is stopped for want of an object", "node", a.opts.Node,
			"namespace", metav1.NamespaceSystem, "error", err)
		return false
	}
	uid := string(namespace.UID)
	a.cluster.uid.Store(&uid)
	return true
}

// learnCluster tries until the identity was read. Then every spec is told with it.
func (a *Agent) learnCluster(ctx context.Context) error {
	if a.cluster.get() != "" {
		return nil
	}
	for wait := clusterFirst; ; wait = min(2*wait, clusterLast) {
		select {
		case <-ctx.Done():
			return nil
		case <-a.clock.After(wait):
		}
		if a.readCluster(ctx) {
			a.kickAll(ctx)
			return nil
		}
	}
}
