package devserver

import (
	"context"
	"errors"
	"fmt"
	"time"

	"imp.dev/imp/api/v1alpha1"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// NewClient makes a client that knows Kubernetes' own types and Imp's.
func NewClient(cfg *rest.Config) (client.Client, error) {
	s := runtime.NewScheme()
	if err := errors.Join(scheme.AddToScheme(s), v1alpha1.AddToScheme(s)); err != nil {
		return nil, err
	}
	return client.New(cfg, client.Options{Scheme: s})
}

func (s *Server) client() (client.Client, error) { return NewClient(s.Config()) }

// removeTimeout bounds the removal of all VMs. They are killed, so each takes a second; hundreds take a while.
const removeTimeout = time.Minute

// removeVMs deletes every VM without grace, since their disks end with the server anyway, and waits until the nodes have removed them.
func (s *Server) removeVMs(ctx context.Context) error {
	c, err := s.client()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, removeTimeout)
	defer cancel()
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	ordered := map[client.ObjectKey]bool{}
	for {
		vms := &v1alpha1.ImpVMList{}
		if err := c.List(ctx, vms); err != nil {
			return fmt.Errorf("removing VMs: %w", err)
		}
		if len(vms.Items) == 0 {
			return nil
		}
		for i := range vms.Items {
			key := client.ObjectKeyFromObject(&vms.Items[i])
			if ordered[key] {
				continue
			}
			if err := killVM(ctx, c, &vms.Items[i]); err != nil {
				return err
			}
			ordered[key] = true
		}
		if dead := s.firstDead(); dead != "" {
			return fmt.Errorf("removing VMs: %s has ended, so %d of them are removed by force", dead, len(vms.Items))
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("removing VMs: %w, so %d of them are removed by force", ctx.Err(), len(vms.Items))
		case <-ticker.C:
		}
	}
}

func killVM(ctx context.Context, c client.Client, vm *v1alpha1.ImpVM) error {
	before := vm.DeepCopy()
	vm.Spec.TerminationGracePeriodSeconds = ptr.To(int64(0))
	err := c.Patch(ctx, vm, client.MergeFrom(before))
	if err == nil {
		err = c.Delete(ctx, vm)
	}
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("removing VM %s/%s: %w", vm.Namespace, vm.Name, err)
	}
	return nil
}

// firstDead names a program that a removal needs and that does not run.
func (s *Server) firstDead() string {
	for _, p := range s.ControlPlane.Processes() {
		if !p.Running() {
			return p.Name
		}
	}
	keys := []programKey{{program: Operator}}
	for _, node := range s.NodeNames() {
		keys = append(keys, programKey{program: Agent, node: node}, programKey{program: Runtime, node: node})
	}
	for _, key := range keys {
		if s.PID(key.program, key.node) == 0 {
			return key.String()
		}
	}
	return ""
}
