package translate

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/network"
	"imp.dev/imp/internal/restart"
)

var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

const digest = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

// bound is an ImpVM on node n1 under assignment 2, of which nothing was said yet.
func bound(change ...func(*v1alpha1.ImpVM)) *v1alpha1.ImpVM {
	vm := &v1alpha1.ImpVM{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "team", Name: "web", UID: "11111111-2222-3333-4444-555555555555", ResourceVersion: "7", Generation: 4,
			CreationTimestamp: metav1.NewTime(noon.Add(-time.Hour)),
		},
		Spec: v1alpha1.ImpVMSpec{Image: "registry.test/app:1", Lifecycle: v1alpha1.LifecycleEphemeral},
		Status: v1alpha1.ImpVMStatus{
			NodeName: "n1", Assignment: 2, PlacedAt: &metav1.Time{Time: noon},
			Resources: &v1alpha1.Resources{VCPU: 2, MemoryMiB: 256, DiskGiB: 3, Arch: "amd64"},
			Conditions: []metav1.Condition{{
				Type: v1alpha1.ConditionScheduled, Status: "True", Reason: v1alpha1.ReasonPlaced, LastTransitionTime: metav1.NewTime(noon),
			}},
		},
	}
	for _, c := range change {
		c(vm)
	}
	return vm
}

func inNetwork(vm *v1alpha1.ImpVM) {
	vm.Spec.NetworkRef = &v1alpha1.NetworkReference{Name: "apps"}
	vm.Status.Addresses = []v1alpha1.VMAddress{{Address: "10.44.0.7", Prefix: 24, MAC: "02:00:00:00:00:01", Network: "apps", NetworkUID: "n-uid"}}
}

func persistent(vm *v1alpha1.ImpVM) { vm.Spec.Lifecycle = v1alpha1.LifecyclePersistent }

func TestSpec(t *testing.T) {
	plain := machine.Spec{
		ID: "11111111-2222-3333-4444-555555555555", Namespace: "team", Name: "web", Assignment: 2, Generation: 4,
		Lifecycle: machine.Ephemeral, Image: machine.Image{Reference: "registry.test/app:1", Policy: image.IfNotPresent},
		VCPU: 2, MemoryMiB: 256, DiskGiB: 3, Workload: machine.Workload{Env: []machine.EnvVar{}}, Grace: 30 * time.Second,
	}
	facts := map[types.UID]NetworkFacts{"n-uid": {Gateway: "10.44.0.1", MTU: 1450, DNS: []string{"192.0.2.53"}, SearchDomains: []string{"apps.test"}}}
	cases := map[string]struct {
		vm          *v1alpha1.ImpVM
		credentials []image.Credential
		want        func(*machine.Spec)
	}{
		"a VM of a network has its interface": {
			bound(inNetwork), nil,
			func(s *machine.Spec) {
				s.Interfaces = []network.Interface{{
					Name: "eth0", Network: "n-uid", MAC: "02:00:00:00:00:01", Addresses: []string{"10.44.0.7/24"}, Gateway: "10.44.0.1", MTU: 1450,
					Nameservers: []string{"192.0.2.53"}, SearchDomains: []string{"apps.test"},
				}}
			},
		},
		"a VM without a network has a loopback only": {
			bound(inNetwork, func(vm *v1alpha1.ImpVM) { vm.Spec.NetworkRef = nil }), nil, func(*machine.Spec) {},
		},
		"the defaults are Kubernetes' own": {bound(), nil, func(*machine.Spec) {}},
		"command, args and env arrive byte for byte": {
			bound(func(vm *v1alpha1.ImpVM) {
				vm.Spec.Command, vm.Spec.Args = []string{"sh", "-c"}, []string{"echo \"$A\" '\n' ü $(x)"}
				vm.Spec.Env = []v1alpha1.EnvVar{{Name: "A", Value: "$B\n\"'"}, {Name: "E"}}
				vm.Spec.WorkingDir, vm.Spec.DataPaths = "/srv", []string{"/var/lib/x"}
			}), nil,
			func(s *machine.Spec) {
				s.Workload = machine.Workload{
					Command: []string{"sh", "-c"}, Args: []string{"echo \"$A\" '\n' ü $(x)"},
					Env:        []machine.EnvVar{{Name: "A", Value: "$B\n\"'"}, {Name: "E"}},
					WorkingDir: "/srv", DataPaths: []string{"/var/lib/x"},
				}
			},
		},
		"a persistent VM without a policy has the default one": {
			bound(persistent), nil,
			func(s *machine.Spec) { s.Lifecycle, s.Restart = machine.Persistent, restart.Default() },
		},
		"a grace of zero is zero": {
			bound(func(vm *v1alpha1.ImpVM) { vm.Spec.TerminationGracePeriodSeconds = ptr.To(int64(0)) }), nil,
			func(s *machine.Spec) { s.Grace = 0 },
		},
		"the deadline counts from the placement": {
			bound(func(vm *v1alpha1.ImpVM) { vm.Spec.ActiveDeadlineSeconds = ptr.To(int64(90)) }), nil,
			func(s *machine.Spec) { s.Deadline = ptr.To(noon.Add(90 * time.Second)) },
		},
		"pull secrets are needed even when none could be read": {
			bound(func(vm *v1alpha1.ImpVM) { vm.Spec.ImagePullSecrets = []corev1.LocalObjectReference{{Name: "s"}} }), nil,
			func(s *machine.Spec) { s.Image.NeedsCredentials = true },
		},
		"pull secrets without an entry are nothing to wait for": {
			bound(func(vm *v1alpha1.ImpVM) { vm.Spec.ImagePullSecrets = []corev1.LocalObjectReference{{Name: "s"}} }), []image.Credential{},
			func(s *machine.Spec) { s.Image.Credentials = []image.Credential{} },
		},
		"credentials are passed on": {
			bound(), []image.Credential{{Registry: "r"}},
			func(s *machine.Spec) { s.Image.Credentials = []image.Credential{{Registry: "r"}} },
		},
		"a digest that was pinned travels": {
			bound(func(vm *v1alpha1.ImpVM) { vm.Status.ImageDigest = digest }), nil,
			func(s *machine.Spec) { s.Image.Digest = digest },
		},
		"a digest that may be of an image before an edit does not": {
			bound(persistent, func(vm *v1alpha1.ImpVM) { vm.Status.ImageDigest, vm.Status.ObservedGeneration = digest, 3 }), nil,
			func(s *machine.Spec) { s.Lifecycle, s.Restart = machine.Persistent, restart.Default() },
		},
		"the history of failures travels": {
			bound(func(vm *v1alpha1.ImpVM) {
				vm.Status.Restart = &v1alpha1.RestartStatus{Attempts: 3, LastFailureAt: &metav1.MicroTime{Time: noon}}
			}), nil,
			func(s *machine.Spec) { s.History = restart.History{Attempts: 3, LastFailureAt: &noon} },
		},
		"the probe of the class has its defaults": {
			bound(func(vm *v1alpha1.ImpVM) {
				vm.Status.Resources.ReadinessProbe = &v1alpha1.ReadinessProbe{HTTP: v1alpha1.HTTPGet{Port: 80}}
			}), nil,
			func(s *machine.Spec) {
				s.Probe = &machine.Probe{Path: "/", Port: 80, Period: 10 * time.Second, Timeout: time.Second, FailureThreshold: 3}
			},
		},
		"the fake driver's script is passed on": {
			bound(func(vm *v1alpha1.ImpVM) { vm.Annotations = map[string]string{v1alpha1.AnnotationFakeScript: `{"a":1}`} }), nil,
			func(s *machine.Spec) { s.Script = []byte(`{"a":1}`) },
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			want := plain
			c.want(&want)
			got, err := Spec(c.vm, facts, c.credentials)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("spec differs (-want +got):\n%s", d)
			}
			if err := machine.Validate(got); err != nil {
				t.Errorf("the runtime would refuse it: %v", err)
			}
		})
	}
	t.Run("a VM whose resources were not resolved is an error that names them", func(t *testing.T) {
		_, err := Spec(bound(func(vm *v1alpha1.ImpVM) { vm.Status.Resources = nil }), nil, nil)
		if !fault.Is(err, fault.InvalidSpec) {
			t.Errorf("error is %v", err)
		}
	})
}

func TestSpecWaitsForTheNetwork(t *testing.T) {
	for name, vm := range map[string]*v1alpha1.ImpVM{
		"an address that was not given":           bound(inNetwork, func(vm *v1alpha1.ImpVM) { vm.Status.Addresses = nil }),
		"a network of which nothing is known yet": bound(inNetwork),
	} {
		t.Run(name+" is an error that names the network", func(t *testing.T) {
			_, err := Spec(vm, nil, nil)
			if !fault.Is(err, fault.NetworkSetupFailed) || !strings.Contains(err.Error(), "team/apps") {
				t.Errorf("error is %v", err)
			}
		})
	}
}

func TestPullPolicy(t *testing.T) {
	cases := map[string]struct {
		reference string
		asked     corev1.PullPolicy
		want      image.PullPolicy
	}{
		"no tag":                      {"app", "", image.Always},
		"tag latest":                  {"registry.test/app:latest", "", image.Always},
		"another tag":                 {"registry.test/app:1.2", "", image.IfNotPresent},
		"a port is no tag":            {"registry.test:5000/app", "", image.Always},
		"a port and a tag":            {"registry.test:5000/app:1", "", image.IfNotPresent},
		"a digest":                    {"app@" + digest, "", image.IfNotPresent},
		"a digest beside tag latest":  {"app:latest@" + digest, "", image.IfNotPresent},
		"what the user asks for wins": {"app:latest", corev1.PullNever, image.Never},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			if got := PullPolicy(c.reference, c.asked); got != c.want {
				t.Errorf("policy is %s, want %s", got, c.want)
			}
		})
	}
}

func TestCredentials(t *testing.T) {
	file := func(content string) *corev1.Secret {
		return &corev1.Secret{Type: corev1.SecretTypeDockerConfigJson, Data: map[string][]byte{corev1.DockerConfigJsonKey: []byte(content)}}
	}
	old := func(content string) *corev1.Secret {
		return &corev1.Secret{Type: corev1.SecretTypeDockercfg, Data: map[string][]byte{corev1.DockerConfigKey: []byte(content)}}
	}
	good := map[string]struct {
		secret *corev1.Secret
		want   []image.Credential
	}{
		"user and password": {file(`{"auths":{"r":{"username":"u","password":"p"}}}`), []image.Credential{{Registry: "r", Username: "u", Password: "p"}}},
		"the joined form":   {file(`{"auths":{"r":{"auth":"dTpwOnE="}}}`), []image.Credential{{Registry: "r", Username: "u", Password: "p:q"}}},
		"without padding":   {file(`{"auths":{"r":{"auth":"dTpwOnE"}}}`), []image.Credential{{Registry: "r", Username: "u", Password: "p:q"}}},
		"tokens":            {file(`{"auths":{"r":{"identitytoken":"i","registrytoken":"t"}}}`), []image.Credential{{Registry: "r", IdentityToken: "i", RegistryToken: "t"}}},
		"ordered by name":   {file(`{"auths":{"b":{},"a":{}}}`), []image.Credential{{Registry: "a"}, {Registry: "b"}}},
		"the older type":    {old(`{"r":{"username":"u","password":"p"}}`), []image.Credential{{Registry: "r", Username: "u", Password: "p"}}},
		"no entries":        {file(`{}`), []image.Credential{}},
	}
	for name, c := range good {
		t.Run(name, func(t *testing.T) {
			got, err := Credentials(c.secret)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(c.want, got); d != "" {
				t.Errorf("credentials differ (-want +got):\n%s", d)
			}
		})
	}
	bad := map[string]struct {
		secret *corev1.Secret
		want   string
	}{
		"content that is not JSON": {file(`{"auths":{"r":{"password":"hidden-word"`), "key .dockerconfigjson is not a docker config file in JSON"},
		"no content":               {file(``), "key .dockerconfigjson is not a docker config file in JSON"},
		"an older one not in JSON": {old(`hidden-word`), "key .dockercfg is not a docker config in JSON"},
		"auth not in base64":       {file(`{"auths":{"r":{"auth":"hidden-word!"}}}`), `the entry for registry "r": auth is not base64`},
		"auth without a colon":     {file(`{"auths":{"r":{"auth":"aGlkZGVu"}}}`), `the entry for registry "r": auth is not user:password in base64`},
		"another type": {&corev1.Secret{Type: corev1.SecretTypeOpaque},
			`its type is "Opaque" and must be kubernetes.io/dockerconfigjson or kubernetes.io/dockercfg`},
	}
	for name, c := range bad {
		t.Run(name+" is refused without being shown", func(t *testing.T) {
			_, err := Credentials(c.secret)
			if err == nil || err.Error() != c.want {
				t.Errorf("error is %v, want %s", err, c.want)
			}
		})
	}
}
