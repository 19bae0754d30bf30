package schedule

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

func TestEvict(t *testing.T) {
	noon := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	added := noon.Add(-time.Minute)
	taint := func(key string) corev1.Taint {
		return corev1.Taint{Key: key, Effect: corev1.TaintEffectNoExecute, TimeAdded: &metav1.Time{Time: added}}
	}
	tolerate := func(key string, seconds *int64) corev1.Toleration {
		return corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists, TolerationSeconds: seconds}
	}
	for name, c := range map[string]struct {
		taints      []corev1.Taint
		tolerations []corev1.Toleration
		at          time.Time // zero: it stays
	}{
		"a node without taints keeps its VMs":                     {},
		"a taint that is not tolerated acts when it was added":    {[]corev1.Taint{taint("a")}, nil, added},
		"one whose time is not known acts when it was first seen": {[]corev1.Taint{{Key: "a", Effect: corev1.TaintEffectNoExecute}}, nil, noon},
		"one that is tolerated does not act":                      {[]corev1.Taint{taint("a")}, []corev1.Toleration{tolerate("a", nil)}, time.Time{}},
		"one that is tolerated for a time acts after it":          {[]corev1.Taint{taint("a")}, []corev1.Toleration{tolerate("a", ptr.To(int64(90)))}, added.Add(90 * time.Second)},
		"of two tolerations the shorter holds":                    {[]corev1.Taint{taint("a")}, []corev1.Toleration{tolerate("a", ptr.To(int64(90))), tolerate("a", ptr.To(int64(10)))}, added.Add(10 * time.Second)},
		"one with a time holds against one without":               {[]corev1.Taint{taint("a")}, []corev1.Toleration{tolerate("a", nil), tolerate("a", ptr.To(int64(10))), tolerate("", nil)}, added.Add(10 * time.Second)},
		"seconds below zero are none":                             {[]corev1.Taint{taint("a")}, []corev1.Toleration{tolerate("a", ptr.To(int64(-5)))}, added},
		"the first of several taints counts":                      {[]corev1.Taint{taint("a"), taint("b")}, []corev1.Toleration{tolerate("a", ptr.To(int64(90))), tolerate("b", ptr.To(int64(20)))}, added.Add(20 * time.Second)},
		"a taint that only keeps newcomers away does not act":     {[]corev1.Taint{{Key: "a", Effect: corev1.TaintEffectNoSchedule}}, nil, time.Time{}},
		"that the kubelet is not ready is no reason":              {[]corev1.Taint{taint(corev1.TaintNodeNotReady)}, nil, time.Time{}},
		"that the node is unreachable is no reason":               {[]corev1.Taint{taint(corev1.TaintNodeUnreachable)}, nil, time.Time{}},
		"that the node is out of service is another's business":   {[]corev1.Taint{taint(corev1.TaintNodeOutOfService)}, nil, time.Time{}},
	} {
		t.Run(name, func(t *testing.T) {
			got, ok := Evict(c.taints, c.tolerations, func(corev1.Taint) time.Time { return noon })
			if ok == c.at.IsZero() || !got.At.Equal(c.at) {
				t.Errorf("got %v at %s, want %s", ok, got.At, c.at)
			}
		})
	}
}
