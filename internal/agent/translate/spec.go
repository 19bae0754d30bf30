// Package translate turns an ImpVM into the runtime's Spec, and the runtime's Status into the part of an ImpVM's status that
// the agent owns. It is pure: Kubernetes types end here, and nothing below this package knows them.
package translate

import (
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/restart"
)

// DefaultGrace is that of a VM that says nothing else, and of one whose object is gone.
const DefaultGrace = 30 * time.Second

// Defaults of fields that the API server fills in; they hold as well for objects that were stored before a default existed.
const (
	defaultProbePath        = "/"
	defaultProbePeriod      = 10 * time.Second
	defaultProbeTimeout     = time.Second
	defaultFailureThreshold = 3
)

// Spec is what the runtime is told about vm, which must be bound. Credentials are those of the VM's imagePullSecrets: nil when they
// were not read, empty when there are none in them, which is no reason to wait for some. Facts are those of the VM's networks. The
// error, a fault InvalidSpec or NetworkSetupFailed, says what the operator has not written yet.
func Spec(vm *v1alpha1.ImpVM, facts map[types.UID]NetworkFacts, credentials []image.Credential) (machine.Spec, error) {
	r := vm.Status.Resources
	if r == nil {
		return machine.Spec{}, fault.Errorf(fault.InvalidSpec, "reading object",
			"status.resources is not there, although the VM is bound to node %s", vm.Status.NodeName)
	}
	nics, err := interfaces(vm, facts)
	if err != nil {
		return machine.Spec{}, err
	}
	s := machine.Spec{
		ID: string(vm.UID), Namespace: vm.Namespace, Name: vm.Name,
		Assignment: vm.Status.Assignment, Generation: vm.Generation,
		Lifecycle: lifecycle(vm.Spec.Lifecycle),
		Image: machine.Image{
			Reference:        vm.Spec.Image,
			Policy:           PullPolicy(vm.Spec.Image, vm.Spec.ImagePullPolicy),
			Digest:           pinnedDigest(vm),
			Credentials:      credentials,
			NeedsCredentials: len(vm.Spec.ImagePullSecrets) > 0 && (credentials == nil || len(credentials) > 0),
		},
		VCPU: int(r.VCPU), MemoryMiB: r.MemoryMiB, DiskGiB: r.DiskGiB,
		Workload: machine.Workload{
			Command: vm.Spec.Command, Args: vm.Spec.Args, Env: env(vm.Spec.Env),
			WorkingDir: vm.Spec.WorkingDir, DataPaths: vm.Spec.DataPaths,
		},
		Interfaces: nics,
		Probe:      probe(r.ReadinessProbe),
		Grace:      Grace(vm),
		Deadline:   deadline(vm),
		History:    history(vm.Status.Restart),
		Restart:    Policy(vm),
		Halt:       halt(vm),
	}
	s.Reset, _ = Reset(vm)
	if script := vm.Annotations[v1alpha1.AnnotationFakeScript]; script != "" {
		s.Script = []byte(script)
	}
	return s, nil
}

// Grace is the time between the stop signal and the kill; 0 kills at once.
func Grace(vm *v1alpha1.ImpVM) time.Duration {
	if seconds := vm.Spec.TerminationGracePeriodSeconds; seconds != nil {
		return time.Duration(max(*seconds, 0)) * time.Second
	}
	return DefaultGrace
}

// PullPolicy is the policy that holds for an image: the one asked for, else Kubernetes' own default, which asks the registry
// for what may have changed (tag latest, or none) and is content with the cache for everything else.
func PullPolicy(reference string, asked corev1.PullPolicy) image.PullPolicy {
	if asked != "" {
		return image.PullPolicy(asked)
	}
	if strings.Contains(reference, "@") {
		return image.IfNotPresent
	}
	last := reference[strings.LastIndex(reference, "/")+1:] // a colon before that is a registry's port
	_, tag, tagged := strings.Cut(last, ":")
	if !tagged || tag == "latest" {
		return image.Always
	}
	return image.IfNotPresent
}

func lifecycle(l v1alpha1.Lifecycle) machine.Lifecycle {
	if l == v1alpha1.LifecyclePersistent {
		return machine.Persistent
	}
	return machine.Ephemeral
}

// pinnedDigest is the digest of an earlier start. A persistent VM's image may be edited; a digest that was reported for
// an older generation may be that of another image.
func pinnedDigest(vm *v1alpha1.ImpVM) string {
	if vm.Spec.Lifecycle == v1alpha1.LifecyclePersistent && vm.Status.ObservedGeneration != vm.Generation {
		return ""
	}
	return vm.Status.ImageDigest
}

func env(in []v1alpha1.EnvVar) []machine.EnvVar {
	out := make([]machine.EnvVar, 0, len(in))
	for _, v := range in {
		out = append(out, machine.EnvVar{Name: v.Name, Value: v.Value})
	}
	return out
}

func probe(p *v1alpha1.ReadinessProbe) *machine.Probe {
	if p == nil {
		return nil
	}
	out := &machine.Probe{
		Path: p.HTTP.Path, Port: int(p.HTTP.Port),
		Period:           time.Duration(p.PeriodSeconds) * time.Second,
		Timeout:          time.Duration(p.TimeoutSeconds) * time.Second,
		FailureThreshold: int(p.FailureThreshold),
	}
	if out.Path == "" {
		out.Path = defaultProbePath
	}
	if out.Period <= 0 {
		out.Period = defaultProbePeriod
	}
	if out.Timeout <= 0 {
		out.Timeout = defaultProbeTimeout
	}
	if out.FailureThreshold <= 0 {
		out.FailureThreshold = defaultFailureThreshold
	}
	return out
}

// deadline counts from the placement: what a VM waits for a node is not its own time.
func deadline(vm *v1alpha1.ImpVM) *time.Time {
	if vm.Spec.ActiveDeadlineSeconds == nil {
		return nil
	}
	from := vm.CreationTimestamp
	if vm.Status.PlacedAt != nil {
		from = *vm.Status.PlacedAt
	}
	at := from.Add(time.Duration(*vm.Spec.ActiveDeadlineSeconds) * time.Second).UTC()
	return &at
}

func history(r *v1alpha1.RestartStatus) restart.History {
	if r == nil {
		return restart.History{}
	}
	return restart.History{
		Attempts: r.Attempts, StartFailures: r.StartFailures, LastFailureAt: toTime(r.LastFailureAt),
		NextTryAt: toTime(r.NextTryAt), ExhaustedAt: toTime(r.ExhaustedAt), Elsewhere: r.Elsewhere, Reset: r.Reset,
	}
}

func toTime(t *metav1.MicroTime) *time.Time {
	if t.IsZero() {
		return nil
	}
	at := t.UTC()
	return &at
}

func toMicro(t *time.Time) *metav1.MicroTime {
	if t == nil || t.IsZero() {
		return nil
	}
	return &metav1.MicroTime{Time: t.UTC().Truncate(time.Microsecond)}
}

// SecretProblem is the failure to use one pull secret, with the remedy.
func SecretProblem(namespace, name string, cause error) error {
	return fault.New(fault.ImagePullFailed, fmt.Sprintf("reading imagePullSecret %s/%s", namespace, name), cause)
}
