package controlplane

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"sort"
	"strings"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/rand"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"
)

// SystemNamespace is where Imp's own ServiceAccounts, Leases and Deployments live.
const SystemNamespace = "imp-system"

// fieldManager owns what the development server applies.
const fieldManager = "imp-dev"

// Client makes a client of the admin's that knows Kubernetes' own types and CRDs; more are used as unstructured objects.
func (cp *ControlPlane) Client() (client.Client, error) {
	s := runtime.NewScheme()
	if err := errors.Join(scheme.AddToScheme(s), apiextensionsv1.AddToScheme(s)); err != nil {
		return nil, err
	}
	return client.New(cp.admin, client.Options{Scheme: s})
}

// Install applies the manifests below the folders namespace, crd, rbac and policy of manifests, in this order and by name inside a
// folder, after making SystemNamespace. A missing folder is skipped. On return CRDs serve and policies are enforced.
func (cp *ControlPlane) Install(ctx context.Context, manifests fs.FS) error {
	c, err := cp.Client()
	if err != nil {
		return err
	}
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: SystemNamespace}}
	if err := c.Create(ctx, namespace); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("making namespace %s: %w", SystemNamespace, err)
	}
	for _, folder := range []string{"namespace", "crd", "rbac", "policy"} {
		objects, err := ReadManifests(manifests, folder)
		if err != nil {
			return err
		}
		if err := Apply(ctx, c, objects); err != nil {
			return fmt.Errorf("installing %s: %w", folder, err)
		}
		if folder == "crd" {
			err = awaitCRDs(ctx, c, objects)
		}
		if folder == "policy" && len(objects) > 0 {
			err = awaitPolicies(ctx, c)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// ReadManifests gives the objects of all .yaml files below folder, by file name. kustomization.yaml is left out.
func ReadManifests(manifests fs.FS, folder string) ([]*unstructured.Unstructured, error) {
	var files []string
	err := fs.WalkDir(manifests, folder, func(name string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() && path.Ext(name) == ".yaml" && path.Base(name) != "kustomization.yaml" {
			files = append(files, name)
		}
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("reading manifests: %w", err)
	}
	sort.Strings(files)
	var all []*unstructured.Unstructured
	for _, name := range files {
		content, err := fs.ReadFile(manifests, name)
		if err != nil {
			return nil, fmt.Errorf("reading manifests: %w", err)
		}
		objects, err := ParseManifests(content)
		if err != nil {
			return nil, fmt.Errorf("reading %s: %w", name, err)
		}
		all = append(all, objects...)
	}
	return all, nil
}

// ParseManifests splits a YAML stream into objects. Empty documents are dropped.
func ParseManifests(content []byte) ([]*unstructured.Unstructured, error) {
	var objects []*unstructured.Unstructured
	documents := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(content)))
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return objects, nil
		}
		if err != nil {
			return nil, err
		}
		fields := map[string]any{}
		if err := yaml.Unmarshal(document, &fields); err != nil {
			return nil, err
		}
		if len(fields) > 0 {
			objects = append(objects, &unstructured.Unstructured{Object: fields})
		}
	}
}

// Apply applies the objects in their order by server-side apply, forced.
func Apply(ctx context.Context, c client.Client, objects []*unstructured.Unstructured) error {
	for _, object := range objects {
		err := c.Apply(ctx, client.ApplyConfigurationFromUnstructured(object), client.FieldOwner(fieldManager), client.ForceOwnership)
		if err != nil {
			return fmt.Errorf("applying %s %s: %w", object.GetKind(), object.GetName(), err)
		}
	}
	return nil
}

// awaitTimeout bounds the wait for CRDs and policies; each takes a second or two.
const awaitTimeout = time.Minute

func awaitCRDs(ctx context.Context, c client.Client, objects []*unstructured.Unstructured) error {
	for _, object := range objects {
		if object.GetKind() != "CustomResourceDefinition" {
			continue
		}
		err := poll(ctx, "CRD "+object.GetName()+" to be served", func(ctx context.Context) (bool, error) {
			crd := &apiextensionsv1.CustomResourceDefinition{}
			if err := c.Get(ctx, client.ObjectKeyFromObject(object), crd); err != nil {
				return false, err
			}
			for _, condition := range crd.Status.Conditions {
				if condition.Type == apiextensionsv1.Established {
					return condition.Status == apiextensionsv1.ConditionTrue, nil
				}
			}
			return false, nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// awaitPolicies returns once admission policies made before the call are enforced. The API server tells nobody when a
// policy takes effect; but it takes them up together, so a canary made last is enforced last. Its name is new each time, since
// one that was just deleted is enforced for a moment more.
func awaitPolicies(ctx context.Context, c client.Client) error {
	name := "imp-dev-canary-" + rand.String(8)
	policy, binding := canary(name)
	for _, object := range []client.Object{policy, binding} {
		if err := c.Create(ctx, object); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("making the canary policy: %w", err)
		}
		defer func() { _ = c.Delete(context.WithoutCancel(ctx), object) }()
	}
	return poll(ctx, "admission policies to be enforced", func(ctx context.Context) (bool, error) {
		probe := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: SystemNamespace, Name: name}}
		err := c.Create(ctx, probe, client.DryRunAll)
		if err == nil {
			return false, nil
		}
		return strings.Contains(err.Error(), name), err
	})
}

func canary(name string) (*admissionv1.ValidatingAdmissionPolicy, *admissionv1.ValidatingAdmissionPolicyBinding) {
	fail := admissionv1.Fail
	return &admissionv1.ValidatingAdmissionPolicy{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: admissionv1.ValidatingAdmissionPolicySpec{
				FailurePolicy: &fail,
				MatchConstraints: &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{
					ResourceNames: []string{name},
					RuleWithOperations: admissionv1.RuleWithOperations{
						Operations: []admissionv1.OperationType{admissionv1.Create},
						Rule:       admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"configmaps"}},
					},
				}}},
				Validations: []admissionv1.Validation{{Expression: "false", Message: name + " is enforced"}},
			},
		}, &admissionv1.ValidatingAdmissionPolicyBinding{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
				PolicyName: name, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
			},
		}
}

// poll asks ten times a second until done, for at most awaitTimeout. An error is kept for the message and asked again.
func poll(ctx context.Context, what string, ask func(context.Context) (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, awaitTimeout)
	defer cancel()
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	for {
		done, err := ask(ctx)
		if done {
			return nil
		}
		if err == nil {
			err = errors.New("not yet")
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %w (last answer: %w)", what, ctx.Err(), err)
		case <-ticker.C:
		}
	}
}
