package nodes_test

import (
	"slices"
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/operator/nodes"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
)

func begin() time.Time { return time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC) }

func lease(node string, renewed time.Time) *coordinationv1.Lease {
	return &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: v1alpha1.SystemNamespace, Name: v1alpha1.LeasePrefix + node},
		Spec:       coordinationv1.LeaseSpec{RenewTime: ptr.To(metav1.NewMicroTime(renewed))},
	}
}

func TestWhoIsAliveAndWhoIsSilent(t *testing.T) {
	type state struct{ alive, silent bool }
	const s = time.Second
	tests := map[string]struct {
		steps func(h *nodes.Heartbeats, clock *clocktesting.FakeClock)
		want  state
	}{
		"a Lease renewed a moment ago": {
			func(h *nodes.Heartbeats, _ *clocktesting.FakeClock) { h.Observe(lease("a", begin())) }, state{alive: true},
		},
		"nothing at all is not silence before its time": {func(*nodes.Heartbeats, *clocktesting.FakeClock) {}, state{}},
		"a Lease that was old when it was first seen":   {func(h *nodes.Heartbeats, _ *clocktesting.FakeClock) { h.Observe(lease("a", begin().Add(-time.Hour))) }, state{}},
		"one that was old, after 40 s without a renewal": {func(h *nodes.Heartbeats, c *clocktesting.FakeClock) {
			h.Observe(lease("a", begin().Add(-time.Hour)))
			c.Step(40 * s)
		}, state{silent: true}},
		"a node whose clock is an hour behind, once it renews": {func(h *nodes.Heartbeats, c *clocktesting.FakeClock) {
			h.Observe(lease("a", begin().Add(-time.Hour)))
			c.Step(10 * s)
			h.Observe(lease("a", begin().Add(-time.Hour+10*s)))
		}, state{alive: true}},
		"39 s after the last renewal": {func(h *nodes.Heartbeats, c *clocktesting.FakeClock) {
			h.Observe(lease("a", begin()))
			c.Step(39 * s)
		}, state{alive: true}},
		"40 s after the last renewal": {func(h *nodes.Heartbeats, c *clocktesting.FakeClock) {
			h.Observe(lease("a", begin()))
			c.Step(40 * s)
		}, state{silent: true}},
		"a Lease shown again without a renewal is no sign of life": {func(h *nodes.Heartbeats, c *clocktesting.FakeClock) {
			h.Observe(lease("a", begin()))
			c.Step(39 * s)
			h.Observe(lease("a", begin()))
			c.Step(s)
		}, state{silent: true}},
		"silent for hours, but this process leads only since now": {func(h *nodes.Heartbeats, c *clocktesting.FakeClock) {
			h.Observe(lease("a", begin()))
			c.Step(time.Hour)
			h.Lead()
		}, state{}},
		"a Lease that was deleted": {func(h *nodes.Heartbeats, c *clocktesting.FakeClock) {
			h.Observe(lease("a", begin()))
			c.Step(10 * s)
			h.Handler().OnDelete(lease("a", begin()))
		}, state{}},
		"a Lease in another namespace is nobody's": {func(h *nodes.Heartbeats, _ *clocktesting.FakeClock) {
			l := lease("a", begin())
			l.Namespace = "default"
			h.Observe(l)
		}, state{}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			clock := clocktesting.NewFakeClock(begin())
			h := nodes.NewHeartbeats(clock)
			h.Lead()
			test.steps(h, clock)
			got := state{alive: h.Alive("a"), silent: !clock.Now().Before(h.SilentAt("a"))}
			if got != test.want {
				t.Errorf("got %+v, want %+v", got, test.want)
			}
		})
	}
}

func TestAListenerHearsOfANodeThatComesOrReturnsAndOfNoRenewal(t *testing.T) {
	clock := clocktesting.NewFakeClock(begin())
	h := nodes.NewHeartbeats(clock)
	var heard []string
	h.Listen(func(node string) { heard = append(heard, node+"@"+clock.Since(begin()).String()) })
	for range 4 {
		h.Observe(lease("a", clock.Now()))
		clock.Step(10 * time.Second)
	}
	clock.Step(time.Minute)
	h.Observe(lease("a", clock.Now()))
	h.Observe(lease("b", clock.Now()))
	if want := []string{"a@0s", "a@1m40s", "b@1m40s"}; !slices.Equal(heard, want) {
		t.Errorf("heard %q, want %q", heard, want)
	}
}
