package api

import (
	"context"
	"io/fs"
	"testing"
	"time"

	"imp.dev/imp/config"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"
)

// olderGroup holds a copy of the CRD that this test may change.
const olderGroup = "older.imp.dev"

// strict gives the copy of the ImpVM CRD; loose the same with nothing refused, as a first version might have been.
func strict(t *testing.T) *unstructured.Unstructured {
	t.Helper()
	content, err := fs.ReadFile(config.Files, "crd/imp.dev_impvms.yaml")
	must(t, err)
	crd := &unstructured.Unstructured{}
	must(t, yaml.Unmarshal(content, &crd.Object))
	crd.SetName("impvms." + olderGroup)
	must(t, unstructured.SetNestedField(crd.Object, olderGroup, "spec", "group"))
	return crd
}

func loose(t *testing.T) *unstructured.Unstructured {
	t.Helper()
	crd := strict(t)
	versions, _, err := unstructured.NestedSlice(crd.Object, "spec", "versions")
	must(t, err)
	versions[0].(map[string]any)["schema"] = map[string]any{"openAPIV3Schema": map[string]any{
		"type": "object", "x-kubernetes-preserve-unknown-fields": true,
	}}
	delete(versions[0].(map[string]any), "selectableFields") // they need a schema
	must(t, unstructured.SetNestedSlice(crd.Object, versions, "spec", "versions"))
	return crd
}

// await asks until done or half a minute has passed.
func await(t *testing.T, what string, done func(context.Context) bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	for !done(ctx) {
		select {
		case <-ctx.Done():
			t.Fatalf("waited in vain for %s", what)
		case <-ticker.C:
		}
	}
}

func apply(t *testing.T, c client.Client, u *unstructured.Unstructured) {
	t.Helper()
	must(t, c.Apply(t.Context(), client.ApplyConfigurationFromUnstructured(u), client.FieldOwner("test"), client.ForceOwnership))
}

func TestAnObjectThatWasValidOnceCanStillBeFinalizedAndDeleted(t *testing.T) {
	c := newCluster(t)
	apply(t, c.admin, loose(t))
	t.Cleanup(func() { _ = c.admin.Delete(context.Background(), strict(t)) })
	older := c.vm("old", `{image: "Not An Image", lifecycle: ephemeral, dataPaths: [/proc], env: [{name: "a=b"}], tolerations: [{operator: In}],
		desiredState: ScaleToZero, restartPolicy: {backoff: {initialDelay: soon, maxDelay: "-1s"}, onExhaustion: fail, coolDownPeriod: never}}`)
	older.SetName("of.old") // no hostname either
	older.SetAPIVersion(olderGroup + "/v1alpha1")
	older.SetFinalizers([]string{"imp.dev/node"})
	await(t, "the loose CRD", func(ctx context.Context) bool { return c.admin.Create(ctx, older.DeepCopy()) == nil })
	apply(t, c.admin, strict(t))
	fresh := older.DeepCopy()
	fresh.SetName("new")
	await(t, "the strict CRD", func(ctx context.Context) bool { return c.admin.Create(ctx, fresh.DeepCopy(), client.DryRunAll) != nil })

	must(t, patch(t, c.admin, older.DeepCopy(), `metadata: {labels: {still: editable}}`))
	must(t, c.admin.Delete(t.Context(), older.DeepCopy()))
	must(t, patch(t, c.admin, older.DeepCopy(), `metadata: {finalizers: null}`))
	refused(t, c.admin.Get(t.Context(), client.ObjectKeyFromObject(older), older.DeepCopy()), "not found")
}
