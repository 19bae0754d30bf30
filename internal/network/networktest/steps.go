package networktest

import (
	"slices"
	"testing"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/network"
)

func isSetupFailure(t *testing.T, err error) {
	t.Helper()
	if !fault.Is(err, fault.NetworkSetupFailed) {
		t.Errorf("got %v, want an error with the reason %s", err, fault.NetworkSetupFailed)
	}
}

func (h *Harness) set(t *testing.T, spec network.Spec) {
	t.Helper()
	if err := h.Network.Set(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
}

func (h *Harness) forget(t *testing.T, id string) {
	t.Helper()
	if err := h.Network.Forget(t.Context(), id); err != nil {
		t.Fatal(err)
	}
}

// attach attaches the n-th VM and closes its TAPs, as if its VMM had ended.
func (h *Harness) attach(t *testing.T, n int, interfaces ...network.Interface) {
	t.Helper()
	attachments, err := h.Network.Attach(t.Context(), VM(n), interfaces)
	if err != nil {
		t.Fatal(err)
	}
	if len(attachments) != len(interfaces) {
		t.Errorf("%d attachments for %d interfaces", len(attachments), len(interfaces))
	}
	closeAll(attachments)
}

func (h *Harness) detach(t *testing.T, n int) {
	t.Helper()
	if err := h.Network.Detach(t.Context(), VM(n)); err != nil {
		t.Fatal(err)
	}
}

func (h *Harness) attached(t *testing.T, want ...int) {
	t.Helper()
	got, err := h.Network.Attached(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, n := range want {
		ids = append(ids, VM(n))
	}
	slices.Sort(got)
	if !slices.Equal(got, ids) {
		t.Errorf("attached are %v, want %v", got, ids)
	}
}

func (h *Harness) statuses(t *testing.T, want ...network.Status) {
	t.Helper()
	got, err := h.Network.Networks(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got, want) {
		t.Errorf("networks are %+v, want %+v", got, want)
	}
}

func closeAll(attachments []network.Attachment) {
	for _, a := range attachments {
		a.TAP.Close()
	}
}
