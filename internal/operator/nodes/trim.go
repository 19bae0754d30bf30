package nodes

import (
	"maps"
	"slices"

	"imp.dev/imp/api/v1alpha1"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Trim is an informer's transform that keeps of a Node what the operator reads: a Node's image list alone outweighs the rest.
func Trim(obj any) (any, error) {
	node, ok := obj.(*corev1.Node)
	if !ok {
		return obj, nil
	}
	trimmed := &corev1.Node{
		TypeMeta: node.TypeMeta,
		ObjectMeta: metav1.ObjectMeta{
			Name: node.Name, UID: node.UID, ResourceVersion: node.ResourceVersion,
			CreationTimestamp: node.CreationTimestamp, Labels: node.Labels,
		},
		Spec: corev1.NodeSpec{Unschedulable: node.Spec.Unschedulable, Taints: node.Spec.Taints, PodCIDRs: node.Spec.PodCIDRs},
		Status: corev1.NodeStatus{
			Addresses: node.Status.Addresses,
			NodeInfo: corev1.NodeSystemInfo{
				BootID: node.Status.NodeInfo.BootID, Architecture: node.Status.NodeInfo.Architecture,
			},
		},
	}
	for _, condition := range node.Status.Conditions {
		if condition.Type == corev1.NodeReady {
			trimmed.Status.Conditions = []corev1.NodeCondition{condition}
		}
	}
	return trimmed, nil
}

func readyStatus(node *corev1.Node) corev1.ConditionStatus {
	i := slices.IndexFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == corev1.NodeReady })
	if i < 0 {
		return corev1.ConditionUnknown
	}
	return node.Status.Conditions[i].Status
}

// Changed says that placement may see the node with other eyes than before; a heartbeat changes nothing.
func Changed(before, now *corev1.Node) bool {
	return !maps.Equal(before.Labels, now.Labels) || before.Spec.Unschedulable != now.Spec.Unschedulable ||
		!equality.Semantic.DeepEqual(before.Spec.Taints, now.Spec.Taints) || readyStatus(before) != readyStatus(now) ||
		before.Status.NodeInfo != now.Status.NodeInfo
}

// Moved says that the node has other addresses, or another range for its pods, than before.
func Moved(before, now *corev1.Node) bool {
	return !slices.Equal(before.Spec.PodCIDRs, now.Spec.PodCIDRs) || !slices.Equal(before.Status.Addresses, now.Status.Addresses)
}

// ImpMoved is Moved for what the agent tells.
func ImpMoved(before, now *v1alpha1.ImpNode) bool {
	return !equality.Semantic.DeepEqual(before.Status.Network, now.Status.Network)
}

// ImpChanged is Changed for what the agent tells.
func ImpChanged(before, now *v1alpha1.ImpNode) bool {
	ready := func(n *v1alpha1.ImpNode) bool {
		return meta.IsStatusConditionTrue(n.Status.Conditions, v1alpha1.ConditionRuntimeReady)
	}
	return before.Status.Budget != now.Status.Budget || before.Status.Capabilities != now.Status.Capabilities ||
		before.Status.BootID != now.Status.BootID || ready(before) != ready(now) ||
		before.Status.Network.Address != now.Status.Network.Address
}
