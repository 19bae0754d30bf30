package api

import (
	"testing"

	"imp.dev/imp/api/v1alpha1"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"
)

func class(t *testing.T, name, spec string) *unstructured.Unstructured {
	t.Helper()
	u := object(t, "apiVersion: imp.dev/v1alpha1\nkind: ImpVMClass\nmetadata: {name: "+name+"}\n")
	var fields map[string]any
	must(t, yaml.Unmarshal([]byte(spec), &fields))
	u.Object["spec"] = fields
	return u
}

func TestAnImpVMClassIsCheckedWhenItIsCreated(t *testing.T) {
	c := newCluster(t)
	probe := func(fields string) string {
		return `{vcpu: 1, memoryMiB: 128, diskGiB: 1, probes: {readinessProbe: ` + fields + `}}`
	}
	const probeField = "spec.probes.readinessProbe."
	for name, tc := range map[string]struct {
		spec string
		want []string
	}{
		"the smallest":                   {spec: `{vcpu: 1, memoryMiB: 128, diskGiB: 1}`},
		"the largest":                    {spec: `{vcpu: 32, memoryMiB: 1048576, diskGiB: 16384, arch: arm64}`},
		"no vcpu is refused":             {`{memoryMiB: 128, diskGiB: 1}`, []string{"spec.vcpu: Required value"}},
		"no vcpus are refused":           {`{vcpu: 0, memoryMiB: 128, diskGiB: 1}`, []string{"spec.vcpu", "must be from 1 to 32"}},
		"33 vcpus are refused":           {`{vcpu: 33, memoryMiB: 128, diskGiB: 1}`, []string{"spec.vcpu", "must be from 1 to 32"}},
		"127 MiB are refused":            {`{vcpu: 1, memoryMiB: 127, diskGiB: 1}`, []string{"spec.memoryMiB", "must be from 128 to 1048576 (1 TiB)"}},
		"more than 1 TiB is refused":     {`{vcpu: 1, memoryMiB: 1048577, diskGiB: 1}`, []string{"spec.memoryMiB", "must be from 128 to 1048576 (1 TiB)"}},
		"no disk is refused":             {`{vcpu: 1, memoryMiB: 128, diskGiB: 0}`, []string{"spec.diskGiB", "must be from 1 to 16384 (16 TiB)"}},
		"an architecture is Go's":        {`{vcpu: 1, memoryMiB: 128, diskGiB: 1, arch: x86_64}`, []string{"spec.arch", `"amd64", "arm64"`}},
		"a probe":                        {spec: probe(`{http: {path: "/ready?full=1", port: 8080}, periodSeconds: 5, timeoutSeconds: 5, failureThreshold: 1}`)},
		"a probe without http":           {probe(`{}`), []string{probeField + "http: Required value"}},
		"a probe without a port":         {probe(`{http: {}}`), []string{probeField + "http.port: Required value"}},
		"a probe on port 0":              {probe(`{http: {port: 0}}`), []string{probeField + "http.port", "must be a port from 1 to 65535"}},
		"a probe on port 65536":          {probe(`{http: {port: 65536}}`), []string{probeField + "http.port", "must be a port from 1 to 65535"}},
		"a probe of a relative path":     {probe(`{http: {port: 80, path: ready}}`), []string{probeField + "http.path", "must begin with '/'"}},
		"a probe of a path with a blank": {probe(`{http: {port: 80, path: "/a b"}}`), []string{probeField + "http.path", "no blanks"}},
		"a probe every 0 s":              {probe(`{http: {port: 80}, periodSeconds: 0}`), []string{probeField + "periodSeconds", "greater than or equal to 1"}},
		"a probe that waits 0 s":         {probe(`{http: {port: 80}, timeoutSeconds: 0}`), []string{probeField + "timeoutSeconds", "greater than or equal to 1"}},
		"a probe with threshold 0":       {probe(`{http: {port: 80}, failureThreshold: 0}`), []string{probeField + "failureThreshold", "greater than or equal to 1"}},
		"a probe slower than its period": {probe(`{http: {port: 80}, periodSeconds: 2, timeoutSeconds: 3}`), []string{probeField + "timeoutSeconds", "must not be more than periodSeconds"}},
	} {
		t.Run(name, func(t *testing.T) {
			refused(t, c.admin.Create(t.Context(), class(t, "checked", tc.spec), client.DryRunAll), tc.want...)
		})
	}
}

func TestDefaultsOfAnImpVMClass(t *testing.T) {
	c := newCluster(t)
	u := class(t, c.namespace, `{vcpu: 1, memoryMiB: 128, diskGiB: 1, probes: {readinessProbe: {http: {port: 80}}}}`)
	must(t, c.admin.Create(t.Context(), u))
	got := &v1alpha1.ImpVMClass{}
	must(t, c.admin.Get(t.Context(), client.ObjectKeyFromObject(u), got))
	if got.Spec.Arch != "amd64" {
		t.Errorf("arch is %q, want amd64", got.Spec.Arch)
	}
	want := v1alpha1.ReadinessProbe{
		HTTP: v1alpha1.HTTPGet{Path: "/", Port: 80}, PeriodSeconds: 10, FailureThreshold: 3, TimeoutSeconds: 1,
	}
	if got.Spec.Probes == nil || got.Spec.Probes.ReadinessProbe == nil || *got.Spec.Probes.ReadinessProbe != want {
		t.Errorf("the probe is %+v, want %+v", got.Spec.Probes, want)
	}
}

func TestWhatMayBeEditedOfAnImpVMClass(t *testing.T) {
	c := newCluster(t)
	u := class(t, c.namespace, `{vcpu: 1, memoryMiB: 128, diskGiB: 1}`)
	must(t, c.admin.Create(t.Context(), u))
	const anew = "cannot be changed; create a new ImpVMClass"
	for name, tc := range map[string]struct {
		change string
		want   []string
	}{
		"vcpu":          {`spec: {vcpu: 2}`, []string{"spec.vcpu", anew}},
		"memory":        {`spec: {memoryMiB: 256}`, []string{"spec.memoryMiB", anew}},
		"disk":          {`spec: {diskGiB: 2}`, []string{"spec.diskGiB", anew}},
		"arch":          {`spec: {arch: arm64}`, []string{"spec.arch", anew}},
		"probes, to":    {change: `spec: {probes: {readinessProbe: {http: {port: 81}}}}`},
		"probes, away":  {change: `spec: {probes: null}`},
		"restarts, to":  {change: `spec: {restartPolicy: {mode: reschedule}}`},
		"restarts, of":  {change: `spec: {restartPolicy: {mode: in-place, backoff: {maxRetries: 3}, onExhaustion: manual-reset}}`},
		"restarts, no":  {`spec: {restartPolicy: {mode: sideways}}`, []string{"spec.restartPolicy.mode", `"in-place", "reschedule"`}},
		"restarts, off": {change: `spec: {restartPolicy: null}`},
		"labels always": {change: `metadata: {labels: {a: b}}`},
	} {
		t.Run(name, func(t *testing.T) {
			refused(t, patch(t, c.admin, u.DeepCopy(), tc.change), tc.want...)
		})
	}
}
