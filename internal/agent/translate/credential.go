package translate

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"sort"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"imp.dev/imp/internal/image"
)

// dockerAuth is one entry of a docker config file's auths.
type dockerAuth struct {
	Auth          string `json:"auth"`
	Username      string `json:"username"`
	Password      string `json:"password"`
	IdentityToken string `json:"identitytoken"`
	RegistryToken string `json:"registrytoken"`
}

// Credentials reads a pull secret of one of Kubernetes' two types, its entries ordered by registry. No error holds anything of
// the secret's content.
func Credentials(secret *corev1.Secret) ([]image.Credential, error) {
	var auths map[string]dockerAuth
	switch secret.Type {
	case corev1.SecretTypeDockerConfigJson:
		var file struct {
			Auths map[string]dockerAuth `json:"auths"`
		}
		// The decoder's own error may quote the content.
		if json.Unmarshal(secret.Data[corev1.DockerConfigJsonKey], &file) != nil {
			return nil, fmt.Errorf("key %s is not a docker config file in JSON", corev1.DockerConfigJsonKey)
		}
		auths = file.Auths
	case corev1.SecretTypeDockercfg:
		if json.Unmarshal(secret.Data[corev1.DockerConfigKey], &auths) != nil {
			return nil, fmt.Errorf("key %s is not a docker config in JSON", corev1.DockerConfigKey)
		}
	default:
		return nil, fmt.Errorf("its type is %q and must be %s or %s", secret.Type,
			corev1.SecretTypeDockerConfigJson, corev1.SecretTypeDockercfg)
	}
	registries := make([]string, 0, len(auths))
	for registry := range auths {
		registries = append(registries, registry)
	}
	sort.Strings(registries)
	out := make([]image.Credential, 0, len(auths))
	for _, registry := range registries {
		c, err := credential(registry, auths[registry])
		if err != nil {
			return nil, fmt.Errorf("the entry for registry %q: %w", registry, err)
		}
		out = append(out, c)
	}
	return out, nil
}

// credential: the joined form wins over the separate fields, as in docker itself.
func credential(registry string, a dockerAuth) (image.Credential, error) {
	c := image.Credential{
		Registry: registry, Username: a.Username, Password: a.Password,
		IdentityToken: a.IdentityToken, RegistryToken: a.RegistryToken,
	}
	if a.Auth == "" {
		return c, nil
	}
	decoded, err := decodeBase64(a.Auth)
	if err != nil {
		return c, errors.New("auth is not base64")
	}
	user, password, ok := strings.Cut(decoded, ":")
	if !ok {
		return c, errors.New("auth is not user:password in base64")
	}
	c.Username, c.Password = user, strings.TrimRight(password, "\x00")
	return c, nil
}

// decodeBase64 takes padding as optional: some tools leave it out.
func decodeBase64(s string) (string, error) {
	b, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(strings.TrimSpace(s), "="))
	return string(b), err
}
