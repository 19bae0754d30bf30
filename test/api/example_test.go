package api

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"imp.dev/imp/api/v1alpha1"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// documents are the objects of a file of examples.
func documents(t *testing.T, path string) []*unstructured.Unstructured {
	t.Helper()
	content, err := os.ReadFile(path)
	must(t, err)
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(content), 4096)
	var objects []*unstructured.Unstructured
	for {
		u := &unstructured.Unstructured{}
		err := decoder.Decode(&u.Object)
		if errors.Is(err, io.EOF) {
			return objects
		}
		must(t, err)
		objects = append(objects, u)
	}
}

func TestTheExamplesAreAcceptedAsKubectlAppliesThem(t *testing.T) {
	c := newCluster(t)
	strict := client.WithFieldValidation(c.admin, "Strict")
	for _, pattern := range []string{"../../examples/*.yaml", "../../examples/*/*.yaml"} {
		paths, err := filepath.Glob(pattern)
		must(t, err)
		if len(paths) == 0 {
			t.Errorf("there is no example in %s", pattern)
		}
		for _, path := range paths {
			t.Run(filepath.Base(path), func(t *testing.T) {
				for _, u := range documents(t, path) {
					must(t, strict.Create(t.Context(), u, client.DryRunAll))
				}
			})
		}
	}
}

// kubectl apply -f examples/ reads no folder below it, and the demo runs what is there on a node without a network.
func TestTheExamplesOfTheFirstStepsNeedNoNetwork(t *testing.T) {
	paths, err := filepath.Glob("../../examples/*.yaml")
	must(t, err)
	for _, path := range paths {
		for _, u := range documents(t, path) {
			_, wants, err := unstructured.NestedMap(u.Object, "spec", "networkRef")
			must(t, err)
			if wants || u.GetKind() == "ImpNetwork" {
				t.Errorf("%s: %s/%s belongs into examples/network/", path, u.GetKind(), u.GetName())
			}
		}
	}
}

func TestTheExampleVMsAreInTheExampleNetwork(t *testing.T) {
	networks := map[string]bool{}
	var vms []*unstructured.Unstructured
	paths, err := filepath.Glob("../../examples/network/*.yaml")
	must(t, err)
	for _, path := range paths {
		for _, u := range documents(t, path) {
			switch u.GetKind() {
			case "ImpNetwork":
				networks[u.GetNamespace()+"/"+u.GetName()] = true
			case "ImpVM":
				vms = append(vms, u)
			}
		}
	}
	if len(vms) == 0 {
		t.Fatal("there is no VM among the examples of networks")
	}
	for _, u := range vms {
		name, _, err := unstructured.NestedString(u.Object, "spec", "networkRef", "name")
		must(t, err)
		if !networks[u.GetNamespace()+"/"+name] {
			t.Errorf("%s is in the network %q, which is not among the examples in %s (%s)", u.GetName(), name, u.GetNamespace(), v1alpha1.GroupVersion)
		}
	}
}
