package controlplane

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"imp.dev/imp/internal/devserver/child"

	"k8s.io/client-go/rest"
)

// layout is everything the command lines need: ports and the paths of certificates.
type layout struct {
	etcdPort, peerPort, apiPort int

	ca             *authority
	serving, admin pair // of the API server; of the admin
	etcd           pair // of etcd, as server, as peer, and of the API server as its client
	tokens         pair
	adminCert      []byte
	adminKey       []byte
	caCert         []byte
}

func newLayout(opts Options, ports []int) (*layout, error) {
	ca, err := newAuthority(filepath.Join(opts.Dir, "pki"), time.Now())
	if err != nil {
		return nil, err
	}
	l := &layout{etcdPort: ports[0], peerPort: ports[1], apiPort: ports[2], ca: ca}
	if l.serving, err = ca.issue("apiserver", "kube-apiserver"); err != nil {
		return nil, err
	}
	if l.admin, err = ca.issue("admin", "imp-dev-admin", "system:masters"); err != nil {
		return nil, err
	}
	if l.etcd, err = ca.issue("etcd", "etcd"); err != nil {
		return nil, err
	}
	if l.tokens, err = ca.signingKey(); err != nil {
		return nil, err
	}
	for path, into := range map[string]*[]byte{l.admin.cert: &l.adminCert, l.admin.key: &l.adminKey, ca.certFile(): &l.caCert} {
		if *into, err = os.ReadFile(path); err != nil {
			return nil, err
		}
	}
	return l, nil
}

func loopback(port int) string { return "https://127.0.0.1:" + strconv.Itoa(port) }

// adminConfig has no client-side rate limit: the limit's waits would be taken for slowness of what is tested.
func (l *layout) adminConfig() *rest.Config {
	return &rest.Config{
		Host: loopback(l.apiPort), QPS: -1,
		TLSClientConfig: rest.TLSClientConfig{CAData: l.caCert, CertData: l.adminCert, KeyData: l.adminKey},
	}
}

// processes gives the command lines in the order of start. Each waits by itself for the one before.
func (l *layout) processes(opts Options, kubeconfig string) []child.Spec {
	specs := []child.Spec{
		{Name: EtcdProcess, Path: opts.Binaries.Etcd, Args: l.etcdArgs(opts)},
		{Name: APIServerProcess, Path: opts.Binaries.APIServer, Args: l.apiServerArgs()},
	}
	if !opts.WithoutControllers {
		specs = append(specs, child.Spec{
			Name: ControllerManagerProcess, Path: opts.Binaries.ControllerManager, Args: l.controllerArgs(kubeconfig),
		})
	}
	for i := range specs {
		specs[i].LogFile = filepath.Join(opts.LogDir, specs[i].Name+".log")
		specs[i].Dir = opts.Dir
		specs[i].Grace = 5 * time.Second
	}
	return specs
}

// etcdArgs: client certificates are demanded although all is on loopback, because whoever writes to etcd is the cluster's
// admin and a development machine has other users. Without fsync a start takes a third of the time; the data is thrown away anyway.
func (l *layout) etcdArgs(opts Options) []string {
	client, peer := loopback(l.etcdPort), loopback(l.peerPort)
	return []string{
		"--name=imp-dev",
		"--data-dir=" + filepath.Join(opts.Dir, "etcd"),
		"--listen-client-urls=" + client, "--advertise-client-urls=" + client,
		"--listen-peer-urls=" + peer, "--initial-advertise-peer-urls=" + peer,
		"--initial-cluster=imp-dev=" + peer,
		"--client-cert-auth", "--trusted-ca-file=" + l.ca.certFile(),
		"--cert-file=" + l.etcd.cert, "--key-file=" + l.etcd.key,
		"--peer-client-cert-auth", "--peer-trusted-ca-file=" + l.ca.certFile(),
		"--peer-cert-file=" + l.etcd.cert, "--peer-key-file=" + l.etcd.key,
		"--unsafe-no-fsync", "--log-level=warn",
	}
}

func (l *layout) apiServerArgs() []string {
	return []string{
		"--etcd-servers=" + loopback(l.etcdPort),
		"--etcd-cafile=" + l.ca.certFile(), "--etcd-certfile=" + l.etcd.cert, "--etcd-keyfile=" + l.etcd.key,
		"--bind-address=127.0.0.1", "--advertise-address=127.0.0.1",
		"--secure-port=" + strconv.Itoa(l.apiPort),
		"--tls-cert-file=" + l.serving.cert, "--tls-private-key-file=" + l.serving.key,
		"--client-ca-file=" + l.ca.certFile(),
		"--authorization-mode=RBAC",
		// It taints each new Node as not ready until a node controller, which we do not run, takes that back.
		"--disable-admission-plugins=TaintNodesByCondition",
		"--endpoint-reconciler-type=none", // no pod will ever look for the kubernetes Service
		"--service-cluster-ip-range=10.96.0.0/24",
		"--service-account-issuer=https://imp-dev.invalid",
		"--service-account-signing-key-file=" + l.tokens.key,
		"--service-account-key-file=" + l.tokens.cert,
		"--allow-privileged=true",
		"--profiling=false",
	}
}

// controllers are those whose work a user of Imp sees. A pod or node controller would evict from, or delete, Nodes that have no kubelet.
func controllers() []string {
	return []string{
		"garbage-collector-controller", "namespace-controller", "serviceaccount-controller",
		"root-ca-certificate-publisher-controller", "resourcequota-controller",
	}
}

func (l *layout) controllerArgs(kubeconfig string) []string {
	return []string{
		"--kubeconfig=" + kubeconfig,
		"--controllers=" + strings.Join(controllers(), ","),
		"--secure-port=0",
		"--leader-elect=false",
		"--root-ca-file=" + l.ca.certFile(),
		"--service-account-private-key-file=" + l.tokens.key,
		"--kube-api-qps=200", fmt.Sprintf("--kube-api-burst=%d", 400),
	}
}
