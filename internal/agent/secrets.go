package agent

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/agent/translate"
	"imp.dev/imp/internal/image"
)

// credentials reads the VM's pull secrets, each by its own GET: an agent that watched Secrets would need, and hold, them all. The
// error names the Secret and the remedy, and never holds anything of its content.
func (a *Agent) credentials(ctx context.Context, vm *v1alpha1.ImpVM) ([]image.Credential, error) {
	out := []image.Credential{}
	for _, ref := range vm.Spec.ImagePullSecrets {
		secret := &corev1.Secret{}
		err := a.client.Get(ctx, types.NamespacedName{Namespace: vm.Namespace, Name: ref.Name}, secret)
		if err != nil {
			return nil, translate.SecretProblem(vm.Namespace, ref.Name, secretCause(vm.Namespace, err))
		}
		found, err := translate.Credentials(secret)
		if err != nil {
			return nil, translate.SecretProblem(vm.Namespace, ref.Name, err)
		}
		out = append(out, found...)
	}
	return out, nil
}

func secretCause(namespace string, err error) error {
	switch {
	case apierrors.IsNotFound(err):
		return fmt.Errorf("there is no such Secret; create it in namespace %s with type %s", namespace, corev1.SecretTypeDockerConfigJson)
	case apierrors.IsForbidden(err):
		return fmt.Errorf("the agents may not read it; let them with: kubectl create rolebinding imp-agent-pull-secrets -n %s "+
			"--clusterrole=imp-agent-pull-secrets --serviceaccount=imp-system:imp-agent", namespace)
	default:
		return errors.New("the API server answered: " + err.Error())
	}
}
