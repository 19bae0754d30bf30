// Package controlplane runs a real Kubernetes control plane on loopback for development and for tests: etcd,
// kube-apiserver and the few controllers Imp leans on. It has no scheduler, no kubelet and no pod; its state begins anew
// with each start. RBAC is on, and ServiceAccount tokens are real, so that what may be done here may be done in a cluster.
package controlplane

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"imp.dev/imp/internal/devserver/child"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// Options say where and how a control plane runs.
type Options struct {
	// Dir receives certificates, etcd's data and the admin's kubeconfig. What an earlier start left in it is removed.
	Dir string
	// LogDir receives one log file per process. "" is Dir/log.
	LogDir string
	// Binaries as Find or Build gave them.
	Binaries Binaries
	// WithoutControllers leaves kube-controller-manager out: no garbage collection, namespaces are never finalized.
	WithoutControllers bool
	// Group owns the processes. nil makes one, which Stop closes.
	Group *child.Group
}

// ControlPlane is a running one.
type ControlPlane struct {
	// Kubeconfig is the path of the admin's kubeconfig, in the group system:masters.
	Kubeconfig string
	// Kubectl is the path of the kubectl built with the API server.
	Kubectl string

	admin    *rest.Config
	caFile   string
	group    *child.Group
	ownGroup bool
	specs    []child.Spec

	mu       sync.Mutex
	children []*child.Process
}

// startTries is how often a start is repeated when another process took a port between its choice and its use.
const startTries = 3

// Start runs the control plane and returns when it is ready to serve, or says which process did not come up and why.
// Processes die with the calling process, however that ends.
func Start(ctx context.Context, opts Options) (*ControlPlane, error) {
	if opts.LogDir == "" {
		opts.LogDir = filepath.Join(opts.Dir, "log")
	}
	for try := 1; ; try++ {
		cp, err := start(ctx, opts)
		if err == nil || try == startTries || !strings.Contains(err.Error(), "address already in use") {
			return cp, err
		}
	}
}

func start(ctx context.Context, opts Options) (_ *ControlPlane, err error) {
	if err := prepareDirs(opts); err != nil {
		return nil, err
	}
	cp := &ControlPlane{
		Kubeconfig: filepath.Join(opts.Dir, "kubeconfig"),
		Kubectl:    opts.Binaries.Kubectl,
		group:      opts.Group,
	}
	if cp.group == nil {
		cp.group, cp.ownGroup = child.NewGroup(), true
	}
	defer func() {
		if err != nil {
			cp.Stop()
		}
	}()
	ports, err := freePorts(3)
	if err != nil {
		return nil, err
	}
	lay, err := newLayout(opts, ports)
	if err != nil {
		return nil, fmt.Errorf("making certificates: %w", err)
	}
	cp.caFile = lay.ca.certFile()
	cp.admin = lay.adminConfig()
	if err := WriteKubeconfig(cp.Kubeconfig, cp.admin, ""); err != nil {
		return nil, err
	}
	cp.specs = lay.processes(opts, cp.Kubeconfig)
	for _, spec := range cp.specs {
		if err := cp.StartProcess(spec.Name); err != nil {
			return nil, err
		}
	}
	return cp, cp.AwaitReady(ctx)
}

// prepareDirs empties what belongs to an earlier control plane, and only that: Dir may hold other things.
func prepareDirs(opts Options) error {
	for _, name := range []string{"etcd", "pki"} {
		if err := os.RemoveAll(filepath.Join(opts.Dir, name)); err != nil {
			return fmt.Errorf("removing an earlier control plane: %w", err)
		}
	}
	for _, dir := range []string{opts.Dir, opts.LogDir} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("making the control plane's folders: %w", err)
		}
	}
	return nil
}

// freePorts gives n different loopback ports that were free a moment ago.
func freePorts(n int) ([]int, error) {
	ports := make([]int, 0, n)
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, fmt.Errorf("finding a free port: %w", err)
		}
		defer func() { _ = l.Close() }() // all stay open until the last is known, so that they differ
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
	}
	return ports, nil
}

// readyTimeout bounds the wait for /readyz. A start takes 4 s on an idle machine; loaded ones have taken a minute.
const readyTimeout = 3 * time.Minute

// AwaitReady returns when the API server is ready to serve, or with the process that has ended instead.
func (cp *ControlPlane) AwaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	client, err := kubernetes.NewForConfig(cp.admin)
	if err != nil {
		return err
	}
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	last := errors.New("not asked yet")
	for {
		body, err := client.Discovery().RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
		if err == nil && string(body) == "ok" {
			return nil
		}
		if err != nil {
			last = err
		}
		for _, p := range cp.Processes() {
			if !p.Running() {
				return p.Ended()
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for kube-apiserver to be ready: %w (last answer: %w)", ctx.Err(), last)
		case <-ticker.C:
		}
	}
}

// Config is the admin's, in the group system:masters. The caller may change its copy.
func (cp *ControlPlane) Config() *rest.Config { return rest.CopyConfig(cp.admin) }

// Processes are those of the control plane, so that a caller can watch whether one dies.
func (cp *ControlPlane) Processes() []*child.Process {
	cp.mu.Lock()
	defer cp.mu.Unlock()
	return slices.Clone(cp.children)
}

// Stop ends the processes, the last started first. Files stay; who gave Dir removes it.
func (cp *ControlPlane) Stop() {
	children := cp.Processes()
	for i := len(children) - 1; i >= 0; i-- {
		children[i].Stop()
	}
	if cp.ownGroup {
		cp.group.Close()
	}
}

// WriteKubeconfig writes a self-contained kubeconfig for cfg. With a tokenFile the credentials are read from that file, again and again, as a pod's are.
func WriteKubeconfig(path string, cfg *rest.Config, tokenFile string) error {
	const name = "imp-dev"
	user := &clientcmdapi.AuthInfo{
		ClientCertificateData: cfg.CertData, ClientKeyData: cfg.KeyData,
		Token: cfg.BearerToken, TokenFile: cfg.BearerTokenFile,
	}
	if tokenFile != "" {
		user = &clientcmdapi.AuthInfo{TokenFile: tokenFile}
	}
	out := clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{name: {Server: cfg.Host, CertificateAuthorityData: cfg.CAData}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{name: user},
		Contexts:       map[string]*clientcmdapi.Context{name: {Cluster: name, AuthInfo: name, Namespace: "default"}},
		CurrentContext: name,
	}
	content, err := clientcmd.Write(out)
	if err != nil {
		return fmt.Errorf("writing kubeconfig: %w", err)
	}
	if err := os.WriteFile(path, content, 0o600); err != nil {
		return fmt.Errorf("writing kubeconfig: %w", err)
	}
	return nil
}
