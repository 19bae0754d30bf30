package schedule

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// Eviction is when a VM has to leave its node, and for which taint.
type Eviction struct {
	Taint corev1.Taint
	At    time.Time
}

// Evict gives the first eviction that taints of effect NoExecute ask for, as Kubernetes does with pods: a taint that is not tolerated at
// once, one that is tolerated for tolerationSeconds that long after it was added, which seen tells where the taint itself does not.
// false: the VM may stay. What Kubernetes and administrators say of the node's health is no order of this kind (silent):
// the agent's own heartbeat tells more, and silence is no proof.
func Evict(taints []corev1.Taint, tolerations []corev1.Toleration, seen func(corev1.Taint) time.Time) (first Eviction, ok bool) {
	for _, taint := range taints {
		if taint.Effect != corev1.TaintEffectNoExecute || silent(taint.Key) {
			continue
		}
		at := seen(taint)
		if taint.TimeAdded != nil {
			at = taint.TimeAdded.Time
		}
		patience, forever := toleratedFor(taint, tolerations)
		if forever {
			continue
		}
		if e := (Eviction{Taint: taint, At: at.Add(patience)}); !ok || e.At.Before(first.At) {
			first, ok = e, true
		}
	}
	return first, ok
}

// toleratedFor is how long a taint is borne: the shortest that any toleration of it says, 0 without one.
func toleratedFor(taint corev1.Taint, tolerations []corev1.Toleration) (patience time.Duration, forever bool) {
	found := false
	for _, t := range tolerations {
		if !tolerates([]corev1.Toleration{t}, &taint) {
			continue
		}
		if t.TolerationSeconds == nil {
			forever = forever || !found
			continue
		}
		seconds := time.Duration(max(*t.TolerationSeconds, 0)) * time.Second
		if !found || seconds < patience {
			patience = seconds
		}
		found, forever = true, false
	}
	return patience, forever
}

// silent taints tell that a node is not heard, or is lost: moves for that are made on proof only.
func silent(key string) bool {
	return slices.Contains([]string{corev1.TaintNodeNotReady, corev1.TaintNodeUnreachable, corev1.TaintNodeOutOfService}, key)
}
