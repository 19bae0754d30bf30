package api

import (
	"strings"
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// policyCase is a restart policy that is accepted, or refused with phrases; fields in them are below restartPolicy.
type policyCase struct {
	policy string
	want   []string
}

func policyCases() map[string]policyCase {
	const duration = "must be a duration from 1s to 24h"
	delay := func(field, value string) policyCase {
		return policyCase{`{backoff: {` + field + `: ` + value + `}}`, []string{".backoff." + field, duration}}
	}
	return map[string]policyCase{
		"nothing, which is the default":       {policy: `{}`},
		"in place":                            {policy: `{mode: in-place}`},
		"elsewhere":                           {policy: `{mode: reschedule}`},
		"the whole of the contract":           {policy: `{mode: in-place, backoff: {maxRetries: 5, initialDelay: 10s, maxDelay: 5m}, onExhaustion: cool-down, coolDownPeriod: 1h}`},
		"never":                               {policy: `{backoff: {maxRetries: 0}}`},
		"an end that waits for somebody":      {policy: `{backoff: {maxRetries: 1}, onExhaustion: manual-reset}`},
		"an end that is one":                  {policy: `{backoff: {maxRetries: 1}, onExhaustion: fail}`},
		"the longest and the shortest delays": {policy: `{backoff: {maxRetries: 1000000, initialDelay: 1000ms, maxDelay: 24h}, onExhaustion: cool-down, coolDownPeriod: 720h}`},
		"a delay of several units":            {policy: `{backoff: {initialDelay: 1m30s, maxDelay: 1h0m0s}}`},
		"delays that do not grow":             {policy: `{backoff: {initialDelay: 20s, maxDelay: 20s}}`},
		"a first delay beyond the usual most": {policy: `{backoff: {initialDelay: 10m}}`},

		"an unknown mode":                 {`{mode: elsewhere}`, []string{".mode", `"in-place", "reschedule"`}},
		"an empty mode":                   {`{mode: ""}`, []string{".mode", `"in-place", "reschedule"`}},
		"an unknown kind of end":          {`{backoff: {maxRetries: 1}, onExhaustion: cooldown}`, []string{".onExhaustion", `"fail", "manual-reset", "cool-down"`}},
		"a negative number of retries":    {`{backoff: {maxRetries: -1}}`, []string{".backoff.maxRetries", "greater than or equal to 0"}},
		"more retries than are counted":   {`{backoff: {maxRetries: 1000001}}`, []string{".backoff.maxRetries", "less than or equal to 1000000"}},
		"retries in words":                {`{backoff: {maxRetries: many}}`, []string{".backoff.maxRetries", "must be of type integer"}},
		"a delay that is a number":        {`{backoff: {initialDelay: 10}}`, []string{".backoff.initialDelay", "must be of type string"}},
		"a delay without unit":            delay("initialDelay", `"10"`),
		"an empty delay":                  delay("initialDelay", `""`),
		"a delay in words":                delay("initialDelay", `soon`),
		"a delay in days":                 delay("initialDelay", `1d`),
		"a delay with a blank":            delay("initialDelay", `"1m 30s"`),
		"a delay with a sign":             delay("initialDelay", `"+10s"`),
		"a negative delay":                delay("initialDelay", `"-10s"`),
		"a broken delay":                  delay("initialDelay", `1.5s`),
		"a delay of 0":                    delay("initialDelay", `0s`),
		"a delay below a second":          delay("initialDelay", `999ms`),
		"a delay above a day":             delay("initialDelay", `24h1ms`),
		"a delay that overflows":          delay("initialDelay", `999999999h999999999h`),
		"a longest delay in words":        delay("maxDelay", `never`),
		"a longest delay above a day":     delay("maxDelay", `25h`),
		"a longest delay that overflows":  delay("maxDelay", `999999999h999999999h`),
		"a delay that is a novel":         {`{backoff: {initialDelay: ` + strings.Repeat("1s", 17) + `}}`, []string{".backoff.initialDelay", "may not be more than 32"}},
		"a longest delay below the first": {`{backoff: {initialDelay: 1m, maxDelay: 59s}}`, []string{".backoff.maxDelay", "must not be less than initialDelay"}},
		"a longest delay below the first, which is said by nobody": {
			`{backoff: {maxDelay: 9s}}`, []string{".backoff.maxDelay", "must not be less than initialDelay, which is 10s where it is absent"}},
		"an end without a limit":                    {`{onExhaustion: manual-reset}`, []string{".onExhaustion", "needs backoff.maxRetries: without a limit retries are never used up"}},
		"an end with a backoff that has no limit":   {`{backoff: {initialDelay: 10s}, onExhaustion: fail}`, []string{".onExhaustion", "needs backoff.maxRetries"}},
		"a cool-down that is not asked for":         {`{coolDownPeriod: 30m}`, []string{".coolDownPeriod", "belongs to onExhaustion: cool-down"}},
		"a cool-down beside another kind of end":    {`{backoff: {maxRetries: 1}, onExhaustion: fail, coolDownPeriod: 30m}`, []string{".coolDownPeriod", "belongs to onExhaustion: cool-down"}},
		"a cool-down without unit":                  {`{backoff: {maxRetries: 1}, onExhaustion: cool-down, coolDownPeriod: "30"}`, []string{".coolDownPeriod", "must be a duration from 1s to 720h"}},
		"a cool-down of more than a month":          {`{backoff: {maxRetries: 1}, onExhaustion: cool-down, coolDownPeriod: 721h}`, []string{".coolDownPeriod", "must be a duration from 1s to 720h"}},
		"a cool-down that overflows":                {`{backoff: {maxRetries: 1}, onExhaustion: cool-down, coolDownPeriod: 999999999h999999999h}`, []string{".coolDownPeriod", "must be a duration from 1s to 720h"}},
		"a policy that is a word":                   {`Always`, []string{"must be of type object"}},
		"a kind of end that is Kubernetes's, in it": {`{backoff: {maxRetries: 1}, onExhaustion: Never}`, []string{".onExhaustion", `"fail", "manual-reset", "cool-down"`}},
	}
}

func TestARestartPolicyIsCheckedOnVMsAndClassesAlike(t *testing.T) {
	c := newCluster(t)
	for name, tc := range policyCases() {
		want := append([]string(nil), tc.want...)
		if len(want) > 0 && strings.HasPrefix(want[0], ".") {
			want[0] = "spec.restartPolicy" + want[0]
		}
		t.Run("VM: "+name, func(t *testing.T) {
			vm := c.vm("checked", `{image: a, lifecycle: persistent, restartPolicy: `+tc.policy+`}`)
			refused(t, c.admin.Create(t.Context(), vm, client.DryRunAll), want...)
		})
		t.Run("class: "+name, func(t *testing.T) {
			u := class(t, "checked", `{vcpu: 1, memoryMiB: 128, diskGiB: 1, restartPolicy: `+tc.policy+`}`)
			refused(t, c.admin.Create(t.Context(), u, client.DryRunAll), want...)
		})
	}
}

func TestWhatAVMMayBeWishedToDo(t *testing.T) {
	c := newCluster(t)
	const (
		once    = "must be absent on an ephemeral VM: its workload runs at most once; set lifecycle: persistent"
		running = "must be Running or absent on an ephemeral VM, which cannot start again: delete it to stop it"
		later   = "is not supported yet: use Running or Stopped"
	)
	for name, tc := range map[string]struct {
		spec string
		want []string
	}{
		"a persistent VM runs":                     {spec: `{image: a, lifecycle: persistent, desiredState: Running}`},
		"a persistent VM is stopped":               {spec: `{image: a, lifecycle: persistent, desiredState: Stopped}`},
		"an ephemeral VM runs":                     {spec: `{image: a, desiredState: Running}`},
		"an ephemeral VM is not stopped":           {`{image: a, desiredState: Stopped}`, []string{"spec.desiredState", running}},
		"an ephemeral VM has no policy":            {`{image: a, restartPolicy: {mode: in-place}}`, []string{"spec.restartPolicy", once}},
		"an ephemeral VM has not an empty one":     {`{image: a, restartPolicy: {}}`, []string{"spec.restartPolicy", once}},
		"to suspend is for later":                  {`{image: a, lifecycle: persistent, desiredState: Suspended}`, []string{"spec.desiredState", later}},
		"to scale to zero is for later":            {`{image: a, lifecycle: persistent, desiredState: ScaleToZero}`, []string{"spec.desiredState", later}},
		"a state that there is not":                {`{image: a, lifecycle: persistent, desiredState: Paused}`, []string{"spec.desiredState", `"Running", "Stopped", "Suspended", "ScaleToZero"`}},
		"an empty wish is none":                    {`{image: a, lifecycle: persistent, desiredState: ""}`, []string{"spec.desiredState", `"Running", "Stopped"`}},
		"to suspend an ephemeral VM is for never":  {`{image: a, desiredState: Suspended}`, []string{"spec.desiredState", running}},
		"a stopped VM may have a policy and a net": {spec: `{image: a, lifecycle: persistent, desiredState: Stopped, restartPolicy: {mode: reschedule}, networkRef: {name: net}}`},
	} {
		t.Run(name, func(t *testing.T) {
			refused(t, c.admin.Create(t.Context(), c.vm("checked", tc.spec), client.DryRunAll), tc.want...)
		})
	}
}

// What has once been stored is read by every program's informers: a duration that Go cannot read would stop them all.
func TestWhatIsAcceptedAsADurationIsReadByPrograms(t *testing.T) {
	c := newCluster(t)
	vm := c.created("vm", `{image: a, lifecycle: persistent,
  restartPolicy: {backoff: {maxRetries: 1, initialDelay: 1m30s, maxDelay: 3600000ms}, onExhaustion: cool-down, coolDownPeriod: 0h0m90s}}`)
	p := vm.Spec.RestartPolicy
	for name, got := range map[string][2]time.Duration{
		"initialDelay":   {p.Backoff.InitialDelay.Duration, 90 * time.Second},
		"maxDelay":       {p.Backoff.MaxDelay.Duration, time.Hour},
		"coolDownPeriod": {p.CoolDownPeriod.Duration, 90 * time.Second},
	} {
		if got[0] != got[1] {
			t.Errorf("%s is read as %v, want %v", name, got[0], got[1])
		}
	}
	// A program that writes it back in Go's words changes nothing that would be refused.
	vm.Labels = map[string]string{"touched": "true"}
	must(t, c.admin.Update(t.Context(), vm))
	// Nor can one get there by the back door of the status.
	c.bind(vm, "node-a")
	refused(t, patchStatus(t, c.admin, vm, `status: {resources: {restartPolicy: {backoff: {initialDelay: soon}}}}`),
		"status.resources.restartPolicy.backoff.initialDelay", "must be a duration from 1s to 24h")
}

// Of an ephemeral VM neither may be set later on.
func TestAnEphemeralVMGetsNoPolicyLater(t *testing.T) {
	c := newCluster(t)
	vm := c.fullVM(v1alpha1.LifecycleEphemeral)
	refused(t, patch(t, c.admin, vm.DeepCopy(), `spec: {restartPolicy: {mode: reschedule}}`), "spec.restartPolicy", "set lifecycle: persistent")
	refused(t, patch(t, c.admin, vm.DeepCopy(), `spec: {desiredState: Stopped}`), "spec.desiredState", "delete it to stop it")
	refused(t, patch(t, c.admin, vm.DeepCopy(), `spec: {desiredState: Running}`))
}

func TestTheStatusHoldsAWholeHistoryAndAnOrderToStandStill(t *testing.T) {
	c := newCluster(t)
	vm := c.created("vm", `{image: a, lifecycle: persistent}`)
	c.bind(vm, "node-a")
	at := metav1.NewMicroTime(time.Date(2030, 1, 2, 3, 4, 5, 678000, time.UTC))
	want := v1alpha1.RestartStatus{
		Attempts: 3, StartFailures: 2, LastFailureAt: &at, NextTryAt: &at, ExhaustedAt: &at, Elsewhere: true, Reset: "2030-01-02",
	}
	c.status(vm, func(s *v1alpha1.ImpVMStatus) {
		s.Restart = want.DeepCopy()
		s.Hold = &v1alpha1.Hold{Reason: v1alpha1.ReasonEvacuated, Message: "m"}
	})
	got := c.get("vm").Status
	if got.Restart == nil || !got.Restart.NextTryAt.Equal(&at) || !got.Restart.LastFailureAt.Equal(&at) || !got.Restart.ExhaustedAt.Equal(&at) ||
		got.Restart.Attempts != 3 || got.Restart.StartFailures != 2 || !got.Restart.Elsewhere || got.Restart.Reset != want.Reset {
		t.Errorf("the history is %+v, want %+v", got.Restart, want)
	}
	if got.Hold == nil || got.Hold.Reason != v1alpha1.ReasonEvacuated {
		t.Errorf("the hold is %+v", got.Hold)
	}
	refused(t, patchStatus(t, c.admin, vm.DeepCopy(), `status: {hold: {reason: X, message: "`+strings.Repeat("m", 1025)+`"}}`),
		"status.hold.message", "may not be more than 1024")
}
