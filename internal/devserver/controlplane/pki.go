package controlplane

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// authority is the one certificate authority of a development control plane. It lives for a year: longer than any
// development cluster, which begins anew with each start.
type authority struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	now  time.Time
}

// pair are the paths of a certificate and its key.
type pair struct{ cert, key string }

const validity = 365 * 24 * time.Hour

// newAuthority makes a CA in dir, which only the owner can read.
func newAuthority(dir string, now time.Time) (*authority, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the certificate folder: %w", err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template, err := certTemplate(now, "imp-dev-ca")
	if err != nil {
		return nil, err
	}
	template.IsCA, template.BasicConstraintsValid = true, true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	ca := &authority{dir: dir, cert: cert, key: key, now: now}
	return ca, writePEM(ca.certFile(), "CERTIFICATE", der, 0o644)
}

func (a *authority) certFile() string { return filepath.Join(a.dir, "ca.crt") }

// issue writes dir/name.crt and .key: a certificate good for serving on loopback and for being a client; groups become
// Kubernetes groups.
func (a *authority) issue(name, commonName string, groups ...string) (pair, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return pair{}, err
	}
	template, err := certTemplate(a.now, commonName)
	if err != nil {
		return pair{}, err
	}
	template.Subject.Organization = groups
	template.KeyUsage = x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	template.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1), net.IPv4(10, 96, 0, 1)} // loopback; the kubernetes Service
	template.DNSNames = []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		return pair{}, err
	}
	out := pair{cert: filepath.Join(a.dir, name+".crt"), key: filepath.Join(a.dir, name+".key")}
	if err := writePEM(out.cert, "CERTIFICATE", der, 0o644); err != nil {
		return pair{}, err
	}
	return out, writeKey(out.key, key)
}

// signingKey writes the key pair that ServiceAccount tokens are signed with.
func (a *authority) signingKey() (pair, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return pair{}, err
	}
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return pair{}, err
	}
	out := pair{cert: filepath.Join(a.dir, "tokens.pub"), key: filepath.Join(a.dir, "tokens.key")}
	if err := writePEM(out.cert, "PUBLIC KEY", public, 0o644); err != nil {
		return pair{}, err
	}
	return out, writeKey(out.key, key)
}

func certTemplate(now time.Time, commonName string) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	return &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: commonName},
		NotBefore:    now.Add(-time.Hour), // a clock that was just corrected must not lock us out
		NotAfter:     now.Add(validity),
	}, nil
}

func writeKey(path string, key *ecdsa.PrivateKey) error {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	return writePEM(path, "EC PRIVATE KEY", der, 0o600)
}

func writePEM(path, kind string, der []byte, mode os.FileMode) error {
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), mode)
}
