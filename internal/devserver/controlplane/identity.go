package controlplane

import (
	"context"
	"fmt"
	"runtime"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
)

// The ServiceAccounts of Imp's programs in SystemNamespace, as the chart names them.
const (
	OperatorAccount = "imp-controller-manager"
	AgentAccount    = "imp-agent"
)

// TokenLifetime is how long a token is good for. A holder that lives longer asks again at half of it.
const TokenLifetime = time.Hour

// EnabledLabel marks the nodes that run VMs.
const EnabledLabel = "imp/enabled"

// Node is what a kubelet would say of its host. BootID tells one boot of the machine from the next. Address is its InternalIP,
// PodCIDR what its pods would have; there are none.
type Node struct{ Name, BootID, Address, PodCIDR string }

// EnsureNode makes a Node as a kubelet would show it, ready and enabled for Imp, unless there is one.
func (cp *ControlPlane) EnsureNode(ctx context.Context, host Node) (*corev1.Node, error) {
	c, err := kubernetes.NewForConfig(cp.admin)
	if err != nil {
		return nil, err
	}
	made := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: host.Name,
		Labels: map[string]string{
			EnabledLabel: "true", corev1.LabelHostname: host.Name,
			corev1.LabelArchStable: runtime.GOARCH, corev1.LabelOSStable: "linux",
		},
	}}
	if host.PodCIDR != "" {
		made.Spec.PodCIDR, made.Spec.PodCIDRs = host.PodCIDR, []string{host.PodCIDR}
	}
	node, err := c.CoreV1().Nodes().Create(ctx, made, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return c.CoreV1().Nodes().Get(ctx, host.Name, metav1.GetOptions{})
	}
	if err != nil {
		return nil, fmt.Errorf("making node %s: %w", host.Name, err)
	}
	now := metav1.Now()
	capacity := corev1.ResourceList{
		corev1.ResourceCPU: *resource.NewQuantity(int64(runtime.NumCPU()), resource.DecimalSI),
	}
	node.Status = corev1.NodeStatus{
		Capacity: capacity, Allocatable: capacity,
		Conditions: []corev1.NodeCondition{{
			Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "DevelopmentNode",
			Message: "imp-dev runs this node", LastHeartbeatTime: now, LastTransitionTime: now,
		}},
		Addresses: []corev1.NodeAddress{
			{Type: corev1.NodeInternalIP, Address: host.Address}, {Type: corev1.NodeHostName, Address: host.Name},
		},
		NodeInfo: corev1.NodeSystemInfo{
			BootID: host.BootID, MachineID: host.Name, Architecture: runtime.GOARCH, OperatingSystem: "linux", KubeletVersion: kubeVersion,
		},
	}
	if node, err = c.CoreV1().Nodes().UpdateStatus(ctx, node, metav1.UpdateOptions{}); err != nil {
		return nil, fmt.Errorf("writing the status of node %s: %w", host.Name, err)
	}
	return node, nil
}

// Token asks for a token of a ServiceAccount in SystemNamespace, made if it is not there. With a node it is bound to that
// Node object, carries its name as a claim, and dies with it.
func (cp *ControlPlane) Token(ctx context.Context, account string, node *corev1.Node) (string, error) {
	c, err := kubernetes.NewForConfig(cp.admin)
	if err != nil {
		return "", err
	}
	accounts := c.CoreV1().ServiceAccounts(SystemNamespace)
	_, err = accounts.Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: account}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return "", fmt.Errorf("making ServiceAccount %s: %w", account, err)
	}
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		ExpirationSeconds: ptr.To(int64(TokenLifetime / time.Second)),
	}}
	if node != nil {
		request.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{
			Kind: "Node", APIVersion: "v1", Name: node.Name, UID: node.UID,
		}
	}
	answer, err := accounts.CreateToken(ctx, account, request, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("asking for a token of %s: %w", account, err)
	}
	return answer.Status.Token, nil
}

// Anonymous is a config with the server's address and CA and no credentials.
func (cp *ControlPlane) Anonymous() *rest.Config { return rest.AnonymousClientConfig(cp.admin) }

// as gives a config with a fresh token and nothing of the admin's.
func (cp *ControlPlane) as(ctx context.Context, account string, node *corev1.Node) (*rest.Config, error) {
	token, err := cp.Token(ctx, account, node)
	if err != nil {
		return nil, err
	}
	cfg := cp.Anonymous()
	cfg.BearerToken = token
	return cfg, nil
}

// AgentConfig is what the agent of a node has in a cluster: a token of its ServiceAccount bound to the Node, which is made if missing.
func (cp *ControlPlane) AgentConfig(ctx context.Context, node string) (*rest.Config, error) {
	object, err := cp.EnsureNode(ctx, Node{Name: node, BootID: "boot-of-" + node, Address: "127.0.0.1"})
	if err != nil {
		return nil, err
	}
	return cp.as(ctx, AgentAccount, object)
}

// OperatorConfig is what the operator has in a cluster: a token of its ServiceAccount.
func (cp *ControlPlane) OperatorConfig(ctx context.Context) (*rest.Config, error) {
	return cp.as(ctx, OperatorAccount, nil)
}
