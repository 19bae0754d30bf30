package fake_test

import (
	"context"
	"path/filepath"
	"strings"
	"testing"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/image/fake"
	"imp.dev/imp/internal/image/imagetest"
)

func open(t *testing.T, budget int64) *fake.Store {
	t.Helper()
	s, err := fake.New(fake.Config{Dir: filepath.Join(t.TempDir(), "store"), BudgetBytes: budget})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestSuite(t *testing.T) {
	imagetest.Run(t, func(t *testing.T, budget int64) imagetest.World {
		s := open(t, budget)
		return imagetest.World{
			Store: s, Dir: t.TempDir(), Architecture: "amd64", Image: "fake/one", Other: "fake/two:v2", Missing: "fake/missing", Private: "fake/private",
			Credential: image.Credential{Registry: "fake", Username: "u", Password: fake.Password}, Slow: "fake/slow",
			Release: func() { s.Release("fake/slow") }, Disconnect: func() { s.Disconnect(true) }, Pulls: s.Pulls,
		}
	})
}

func TestWhatGoesWrongIsWrittenInTheReference(t *testing.T) {
	s := open(t, 0)
	ensure := func(reference string) error {
		_, _, err := s.Ensure(context.Background(), image.Request{Reference: reference}, nil)
		return err
	}
	for reference, want := range map[string]struct {
		reason fault.Reason
		text   string
	}{
		"fake/broken:1":   {fault.ImagePullFailed, "damaged"},
		"fake/full":       {fault.DiskFailed, "no space left on device"},
		"fake/missing-it": {fault.ImagePullFailed, "no such image"},
	} {
		if err := ensure(reference); !fault.Is(err, want.reason) || !strings.Contains(err.Error(), want.text) {
			t.Errorf("%s: got %v, want %s with %q", reference, err, want.reason, want.text)
		}
	}
	for i, ok := range []bool{false, false, true} {
		if err := ensure("fake/flaky-2"); (err == nil) != ok {
			t.Errorf("try %d of an image that fails twice: %v", i+1, err)
		}
	}
}
